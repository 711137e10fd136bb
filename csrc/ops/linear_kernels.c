/* The table of linear kernels: who can run which layer, why not, and what it is expected to take.
 */
#include "ops/linear_kernels.h"

#include "core/formats.h"
#include "core/invariant.h"
#include "cpu/cpu_linear.h"
#include "cuda/choice/choice.h"
#include "cuda/choice/choice_cublaslt.h"
#include "cuda/choice/limits.h"
#include "cuda/linear/cuda_linear.h"
#include "ops/linear_call.h"

#include <stdio.h>
#include <string.h>

bool moq_linear_runs_on_isa(const moq_linear_spec *spec, moq_isa isa, char *reason, size_t size) {
    char device[32];
    if (spec->device.kind != MOQ_CPU)
        snprintf(reason, size, "runs on the CPU, the layer is on %s",
                 moq_device_text(spec->device, device, sizeof device));
    else if (isa > moq_cpu_isa())
        snprintf(reason, size, "needs %s, this CPU (or MOQEXT_ISA) has %s", moq_isa_name(isa),
                 moq_isa_name(moq_cpu_isa()));
    else if (isa >= MOQ_ISA_AVX512BF16 && spec->dtype != MOQ_DT_BF16 &&
             spec->input == MOQ_INPUT_AS_IS)
        snprintf(reason, size, "multiplies bfloat16, which does not hold %s activations",
                 moq_dtype_name(spec->dtype));
    else
        return true;
    return false;
}

#define CPU_KERNEL(isa_name, level)                                                                \
    static bool can_run_##isa_name(const moq_linear_spec *spec, int64_t m, char *reason,           \
                                   size_t size) {                                                  \
        (void)m;                                                                                   \
        return moq_linear_runs_on_isa(spec, level, reason, size);                                  \
    }                                                                                              \
    static double cost_##isa_name(const moq_linear_spec *spec, int64_t m) {                        \
        return moq_cpu_linear_seconds(moq_linear_tiles_of(level), spec, m);                        \
    }                                                                                              \
    static moq_status run_##isa_name(const moq_linear_call *call, moq_err *err) {                  \
        return moq_cpu_linear(moq_linear_tiles_of(level), call, err);                              \
    }

#define CPU_ROW(isa_name)                                                                          \
    {{"cpu", #isa_name},                                                                           \
     can_run_##isa_name,                                                                           \
     .cost = cost_##isa_name,                                                                      \
     .run = run_##isa_name,                                                                        \
     .takes_codes = true}

CPU_KERNEL(portable, MOQ_ISA_PORTABLE)
CPU_KERNEL(avx2, MOQ_ISA_AVX2)
CPU_KERNEL(avx512, MOQ_ISA_AVX512)
CPU_KERNEL(avx512bf16, MOQ_ISA_AVX512BF16)
CPU_KERNEL(amx, MOQ_ISA_AMX)

/* ---- CUDA ---- */

static bool on_cuda(const moq_linear_spec *spec, char *reason, size_t size) {
    char device[32];
    if (spec->device.kind != MOQ_CUDA)
        snprintf(reason, size, "runs on a CUDA device, the layer is on %s",
                 moq_device_text(spec->device, device, sizeof device));
    else if (spec->target.missing[0])
        snprintf(reason, size, "%s", spec->target.missing);
    else
        return true;
    return false;
}

static bool since(const moq_linear_spec *spec, int capability, char *reason, size_t size) {
    if (spec->target.capability >= capability)
        return true;
    snprintf(reason, size, "needs compute capability %d.%d or later, this device has %d.%d",
             capability / 10, capability % 10, (int)spec->target.capability / 10,
             (int)spec->target.capability % 10);
    return false;
}

static bool has_int_rows(const moq_linear_spec *spec, char *reason, size_t size) {
    if (spec->out_features <= INT32_MAX)
        return true;
    snprintf(reason, size, "needs fewer than 2^31 rows of the weight, got %lld",
             (long long)spec->out_features);
    return false;
}

/* Code for sm_90a runs on compute capability 9.0 and no other. */
static bool on_sm90(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!on_cuda(spec, reason, size))
        return false;
    if (spec->target.capability == 90)
        return true;
    snprintf(reason, size, "needs compute capability 9.0, this device has %d.%d",
             (int)spec->target.capability / 10, (int)spec->target.capability % 10);
    return false;
}

/* m may be MOQ_ANY_TOKENS. */
static bool takes(int64_t m, int64_t most, char *reason, size_t size) {
    if (m <= most)
        return true;
    snprintf(reason, size, "needs at most %lld tokens, got %lld", (long long)most, (long long)m);
    return false;
}

/* Kernels that count tiles in 32 bits. */
static bool counts_outputs(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    if (m <= MOQ_NVFP4_MEDIUM_OUTPUTS / spec->out_features)
        return true;
    snprintf(reason, size, "needs at most 2^40 outputs, got %lld tokens of %lld", (long long)m,
             (long long)spec->out_features);
    return false;
}

static bool is_fp8(const moq_linear_spec *spec, char *reason, size_t size) {
    if (spec->weight == MOQ_WEIGHT_E4M3_ROW || spec->weight == MOQ_WEIGHT_E4M3_BLOCK)
        return true;
    snprintf(reason, size, "multiplies FP8 weights, %s with compute %s has others", spec->algo,
             moq_compute_name(spec->compute));
    return false;
}

/* True for packed NVFP4 whose x is not quantized, or need not be. */
static bool is_exact_nvfp4(const moq_linear_spec *spec, char *reason, size_t size) {
    bool packed = spec->weight == MOQ_WEIGHT_E2M1_PACKED;
    if (packed && (spec->input == MOQ_INPUT_AS_IS || moq_linear_has_choice(spec)))
        return true;
    if (packed && spec->compute != MOQ_COMPUTE_FP8) {
        snprintf(reason, size, "multiplies x as it is, %s quantizes it", spec->algo);
        return false;
    }
    snprintf(reason, size, "multiplies NVFP4 weights exactly, %s with compute %s asks for another",
             spec->algo, moq_compute_name(spec->compute));
    return false;
}

/* FP8 tensor cores of Hopper keep about 14 bits of the sums of 128 columns: far finer than 16-bit
 * outputs, coarser than float32 ones. */
static bool suits_fp8_cores(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!is_fp8(spec, reason, size))
        return false;
    if (spec->dtype != MOQ_DT_F32)
        return true;
    snprintf(reason, size, "sums to about 1e-4, float32 outputs ask for 1e-5");
    return false;
}

static bool can_run_fp8_decode(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    if (!on_sm90(spec, reason, size) || !suits_fp8_cores(spec, reason, size) ||
        !has_int_rows(spec, reason, size))
        return false;
    if (spec->in_features % MOQ_FP8_BLOCK == 0)
        return takes(m, MOQ_FP8_DECODE_TOKENS, reason, size);
    snprintf(reason, size, "needs in_features to be a multiple of 128, got %lld",
             (long long)spec->in_features);
    return false;
}

static bool is_sixteens(const char *what, int64_t size_of, char *reason, size_t size) {
    if (size_of % 16 == 0)
        return true;
    snprintf(reason, size, "needs %s to be a multiple of 16, got %lld", what, (long long)size_of);
    return false;
}

static bool can_run_fp8_prefill(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    if (!on_sm90(spec, reason, size) || !suits_fp8_cores(spec, reason, size) ||
        !is_sixteens("in_features", spec->in_features, reason, size) ||
        !has_int_rows(spec, reason, size))
        return false;
    if (spec->input != MOQ_INPUT_E4M3_TENSOR || spec->partition_count == 1 || spec->one_input_scale)
        return takes(m, MOQ_FP8_PREFILL_TOKENS, reason, size);
    snprintf(reason, size, "quantizes x once, %d partitions may have as many input scales",
             (int)spec->partition_count);
    return false;
}

static bool can_run_sm80_fp8(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    return on_cuda(spec, reason, size) && since(spec, 80, reason, size) &&
           is_fp8(spec, reason, size) &&
           is_sixteens("in_features", spec->in_features, reason, size) &&
           has_int_rows(spec, reason, size);
}

static bool can_run_sm89_fp8(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    return on_cuda(spec, reason, size) && since(spec, 89, reason, size) &&
           suits_fp8_cores(spec, reason, size) &&
           is_sixteens("in_features", spec->in_features, reason, size) &&
           has_int_rows(spec, reason, size);
}

/* Products of 16-bit activations with weights that 16 bits hold exactly. */
static bool suits_16_bits(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!is_exact_nvfp4(spec, reason, size) || !has_int_rows(spec, reason, size))
        return false;
    if (spec->dtype != MOQ_DT_F32)
        return true;
    snprintf(reason, size, "multiplies 16-bit activations, the layer has float32");
    return false;
}

static bool can_run_nvfp4_decode(const moq_linear_spec *spec, int64_t m, char *reason,
                                 size_t size) {
    return on_sm90(spec, reason, size) && suits_16_bits(spec, reason, size) &&
           takes(m, MOQ_NVFP4_DECODE_TOKENS, reason, size);
}

static bool can_run_nvfp4_medium(const moq_linear_spec *spec, int64_t m, char *reason,
                                 size_t size) {
    return on_sm90(spec, reason, size) && suits_16_bits(spec, reason, size) &&
           takes(m, MOQ_NVFP4_MEDIUM_TOKENS, reason, size) && counts_outputs(spec, m, reason, size);
}

static bool can_run_sm80_nvfp4(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    return on_cuda(spec, reason, size) && since(spec, 80, reason, size) &&
           suits_16_bits(spec, reason, size);
}

static bool can_run_nvfp4_prefill(const moq_linear_spec *spec, int64_t m, char *reason,
                                  size_t size) {
    return on_sm90(spec, reason, size) && suits_16_bits(spec, reason, size) &&
           takes(m, MOQ_NVFP4_PREFILL_TOKENS, reason, size);
}

/* FP8 products of packed NVFP4 weights. */
static bool suits_folding(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!on_sm90(spec, reason, size) || !has_int_rows(spec, reason, size))
        return false;
    if (!moq_linear_folds(spec))
        snprintf(reason, size,
                 "multiplies NVFP4 weights with compute fp8, %s with compute %s is "
                 "another layer",
                 spec->algo, moq_compute_name(spec->compute));
    else if (spec->dtype == MOQ_DT_F32)
        snprintf(reason, size, "sums to about 1e-4, float32 outputs ask for 1e-5");
    else if (spec->in_features > MOQ_NVFP4_FP8_COLUMNS)
        snprintf(reason, size, "needs at most %d in_features, got %lld", MOQ_NVFP4_FP8_COLUMNS,
                 (long long)spec->in_features);
    else if (spec->input != MOQ_INPUT_E4M3_TOKEN)
        snprintf(reason, size, "quantizes x by token");
    else
        return true;
    return false;
}

static bool can_run_nvfp4_fp8_prefill(const moq_linear_spec *spec, int64_t m, char *reason,
                                      size_t size) {
    return suits_folding(spec, reason, size) && takes(m, MOQ_NVFP4_PREFILL_TOKENS, reason, size);
}

static bool can_run_nvfp4_fp8_medium(const moq_linear_spec *spec, int64_t m, char *reason,
                                     size_t size) {
    return suits_folding(spec, reason, size) && takes(m, MOQ_NVFP4_MEDIUM_TOKENS, reason, size) &&
           counts_outputs(spec, m, reason, size);
}

static bool can_run_simt(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    return on_cuda(spec, reason, size) && since(spec, 80, reason, size) &&
           has_int_rows(spec, reason, size);
}

/* ---- cuBLASLt ---- */

/* True where cuBLASLt multiplies FP8: since compute capability 8.9, by blocks of scales on 9.0
 * alone. */
static bool has_scaling(const moq_linear_spec *spec, char *reason, size_t size) {
    int capability = (int)spec->target.capability;
    bool block = spec->weight == MOQ_WEIGHT_E4M3_BLOCK;
    if (capability == 90 || (!block && capability >= 89))
        return true;
    snprintf(reason, size, "%s needs compute capability %s, this device has %d.%d",
             block ? "FP8 with block scales" : "FP8", block ? "9.0" : "8.9", capability / 10,
             capability % 10);
    return false;
}

static bool has_cublaslt(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!spec->target.cublaslt_missing[0])
        return true;
    snprintf(reason, size, "%s", spec->target.cublaslt_missing);
    return false;
}

static bool can_run_cublaslt(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    (void)m;
    bool codes = moq_linear_folds(spec) ? suits_folding(spec, reason, size)
                                        : suits_fp8_cores(spec, reason, size);
    if (!on_cuda(spec, reason, size) || !codes || !has_scaling(spec, reason, size) ||
        !is_sixteens("in_features", spec->in_features, reason, size) ||
        !is_sixteens("out_features", spec->out_features, reason, size))
        return false;
    for (int i = 0; moq_cublaslt_by_partition(spec) && i < spec->partition_count; i++)
        if (!is_sixteens("each of out_partitions", spec->partition[i], reason, size))
            return false;
    return has_cublaslt(spec, reason, size);
}

/* Products of NVFP4 codes, both with block scales: since compute capability 10.0. */
static bool can_run_cublaslt_fp4(const moq_linear_spec *spec, int64_t m, char *reason,
                                 size_t size) {
    (void)m;
    if (!on_cuda(spec, reason, size) || !since(spec, 100, reason, size))
        return false;
    if (spec->weight != MOQ_WEIGHT_E2M1_SWIZZLED || spec->dtype == MOQ_DT_F32) {
        snprintf(reason, size,
                 "multiplies NVFP4 codes to 16-bit outputs (compute fp4), the layer is %s with "
                 "compute %s, %s",
                 spec->algo, moq_compute_name(spec->compute), moq_dtype_name(spec->dtype));
        return false;
    }
    if (spec->in_features % 32 != 0) { /* 16 bytes of codes */
        snprintf(reason, size, "needs in_features to be a multiple of 32, got %lld",
                 (long long)spec->in_features);
        return false;
    }
    for (int i = 0; i < spec->partition_count; i++)
        if (!is_sixteens("each of out_partitions", spec->partition[i], reason, size))
            return false;
    return has_cublaslt(spec, reason, size);
}

/* ---- the table ---- */

static const moq_linear_kernel KERNELS[] = {
    CPU_ROW(portable),
    CPU_ROW(avx2),
    CPU_ROW(avx512),
    CPU_ROW(avx512bf16),
    CPU_ROW(amx),
    {{"cuda", "simt"},
     can_run_simt,
     &MOQ_SIMT,
     .workspace = moq_cuda_simt_workspace,
     .run = moq_cuda_simt_linear},
    {{"cuda", "sm90_fp8_decode"},
     can_run_fp8_decode,
     &MOQ_FP8_DECODE,
     .run = moq_cuda_fp8_decode,
     .takes_codes = true},
    {{"cuda", "sm89_fp8"},
     can_run_sm89_fp8,
     &MOQ_MMA_FP8_AS_E4M3,
     .workspace = moq_cuda_mma_fp8_workspace,
     .run = moq_cuda_mma_fp8_as_e4m3,
     .takes_codes = true},
    {{"cuda", "sm80_fp8"},
     can_run_sm80_fp8,
     &MOQ_MMA_FP8_AS_F16,
     .workspace = moq_cuda_mma_fp8_workspace,
     .run = moq_cuda_mma_fp8_as_f16,
     .takes_codes = true},
    {{"cuda", "sm90_fp8_prefill"},
     can_run_fp8_prefill,
     &MOQ_FP8_PREFILL,
     .workspace = moq_cuda_fp8_prefill_workspace,
     .run = moq_cuda_fp8_prefill,
     .takes_codes = true},
    {{"cuda", "sm90_nvfp4_decode"},
     can_run_nvfp4_decode,
     &MOQ_NVFP4_DECODE,
     .run = moq_cuda_nvfp4_decode},
    {{"cuda", "sm80_nvfp4"},
     can_run_sm80_nvfp4,
     &MOQ_MMA_NVFP4,
     .workspace = moq_cuda_mma_nvfp4_workspace,
     .run = moq_cuda_mma_nvfp4},
    {{"cuda", "sm90_nvfp4_medium"},
     can_run_nvfp4_medium,
     &MOQ_NVFP4_MEDIUM,
     .workspace = moq_cuda_nvfp4_medium_workspace,
     .run = moq_cuda_nvfp4_medium},
    {{"cuda", "sm90_nvfp4_prefill"},
     can_run_nvfp4_prefill,
     &MOQ_NVFP4_PREFILL,
     .workspace = moq_cuda_nvfp4_prefill_workspace,
     .run = moq_cuda_nvfp4_prefill},
    {{"cuda", "sm90_nvfp4_fp8_prefill"},
     can_run_nvfp4_fp8_prefill,
     &MOQ_NVFP4_FP8_PREFILL,
     .workspace = moq_cuda_nvfp4_fp8_prefill_workspace,
     .run = moq_cuda_nvfp4_fp8_prefill,
     .folds = true},
    {{"cuda", "sm90_nvfp4_fp8_medium"},
     can_run_nvfp4_fp8_medium,
     &MOQ_NVFP4_FP8_MEDIUM,
     .workspace = moq_cuda_nvfp4_fp8_medium_workspace,
     .run = moq_cuda_nvfp4_fp8_medium,
     .folds = true},
    {{"cuda", "cublaslt"},
     can_run_cublaslt,
     &MOQ_CUBLASLT,
     .workspace = moq_cublaslt_workspace,
     .run = moq_cublaslt_linear,
     .variants = moq_cublaslt_variants,
     .takes_codes = true,
     .folds = true},
    {{"cuda", "cublaslt_fp4", "not yet run on hardware"},
     can_run_cublaslt_fp4,
     &MOQ_CUBLASLT,
     .workspace = moq_cublaslt_workspace,
     .run = moq_cublaslt_linear,
     .variants = moq_cublaslt_variants},
};

enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };
_Static_assert(KERNEL_COUNT <= MOQ_MAX_KERNELS, "a plan must hold every kernel of the table");

bool moq_linear_runs_on_cuda(const char *name, const moq_linear_spec *spec, char *reason,
                             size_t size) {
    for (int i = 0; i < KERNEL_COUNT; i++)
        if (strcmp(KERNELS[i].name.family, "cuda") == 0 && strcmp(KERNELS[i].name.name, name) == 0)
            return KERNELS[i].can_run(spec, MOQ_ANY_TOKENS, reason, size);
    MOQ_ASSERT(!"a kernel of the table");
    return false;
}

const moq_linear_kernel *moq_linear_kernel_at(int index) {
    return &KERNELS[index];
}

uint64_t moq_linear_variants(const moq_linear_kernel *kernel, const moq_linear_call *call) {
    moq_problem p = {call->spec, &call->spec->target, call->m, call->input_scale != NULL};
    return kernel->variants ? kernel->variants(call)
           : kernel->family ? moq_configs_near(kernel->family, &p)
                            : 1;
}

/* ---- what the rules of the plan ask of a linear ---- */

static moq_kernel_name name_of(int kernel) {
    return KERNELS[kernel].name;
}

static bool can_run(const void *problem, int kernel, int64_t m, char *reason, size_t size) {
    const moq_linear_spec *spec = problem;
    if (spec->quantized_input && !KERNELS[kernel].takes_codes) {
        snprintf(reason, size, "quantizes x itself, the layer gets codes");
        return false;
    }
    return KERNELS[kernel].can_run(spec, m, reason, size);
}

static const moq_configs *family(int kernel) {
    return KERNELS[kernel].family;
}

static double cost(const void *problem, int kernel, int64_t m) {
    return KERNELS[kernel].cost(problem, m);
}

/* The compute mode of a call: with "auto" the kernel's, elsewhere the layer's. */
static moq_compute compute(const void *problem, int kernel) {
    const moq_linear_spec *spec = problem;
    if (spec->compute != MOQ_COMPUTE_AUTO)
        return spec->compute;
    return moq_linear_has_choice(spec) && KERNELS[kernel].folds ? MOQ_COMPUTE_FP8
                                                                : MOQ_COMPUTE_EXACT;
}

static moq_layer layer(const void *problem) {
    const moq_linear_spec *spec = problem;
    return (moq_layer){.algo = spec->algo,
                       .dtype = spec->dtype,
                       .x_dtype = moq_linear_x_dtype(spec),
                       .x_scheme = "fp8_tensor",
                       .device = spec->device,
                       .target = &spec->target,
                       .group_size = spec->group_size};
}

static const char *text(const void *problem, char *buffer, size_t size) {
    return moq_linear_text(problem, buffer, size);
}

static int checkpoint_params(const void *problem, moq_param_spec *params) {
    return moq_linear_checkpoint_params(problem, params);
}

static int prepared_params(const void *problem, moq_param_spec *params) {
    return moq_linear_prepared_params(problem, params);
}

const moq_operation MOQ_LINEAR = {
    .kernel_count = KERNEL_COUNT,
    .name = name_of,
    .can_run = can_run,
    .family = family,
    .cost = cost,
    .compute = compute,
    .layer = layer,
    .text = text,
    .checkpoint_params = checkpoint_params,
    .prepared_params = prepared_params,
    .measure = moq_linear_measure,
};

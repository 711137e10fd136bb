/* The table of kernels for experts: who can run which layer, why not, and what it is expected to
 * take. On the CPU, and on any chip, experts are linears, and a kernel can do them where it can do
 * both of one expert. */
#include "ops/moe_kernels.h"

#include "cpu/cpu_moe.h"
#include "cuda/choice/choice.h"
#include "cuda/choice/moe_decode.h"
#include "cuda/moe/cuda_moe.h"
#include "ops/linear_kernels.h"
#include "ops/moe_call.h"

#include <stdio.h>

#define CPU_KERNEL(isa_name, level)                                                                \
    static bool can_run_##isa_name(const moq_moe_spec *spec, int64_t tokens, char *reason,         \
                                   size_t size) {                                                  \
        (void)tokens;                                                                              \
        return moq_linear_runs_on_isa(&spec->w13, level, reason, size) &&                          \
               moq_linear_runs_on_isa(&spec->w2, level, reason, size);                             \
    }                                                                                              \
    static double cost_##isa_name(const moq_moe_spec *spec, int64_t tokens) {                      \
        return moq_cpu_moe_seconds(moq_linear_tiles_of(level), spec, tokens);                      \
    }                                                                                              \
    static moq_status run_##isa_name(const moq_moe_call *call, moq_err *err) {                     \
        return moq_cpu_moe(moq_linear_tiles_of(level), call, err);                                 \
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

/* Slots are sorted by counts that a block holds in its shared memory. */
static bool has_few_experts(const moq_moe_spec *spec, char *reason, size_t size) {
    if (spec->experts <= MOQ_CUDA_MOE_EXPERTS)
        return true;
    snprintf(reason, size, "needs at most %d experts, got %d", MOQ_CUDA_MOE_EXPERTS,
             (int)spec->experts);
    return false;
}

/* Defines an experts' kernel that runs where the kernel of linears can do both linears of an
 * expert. */
#define CUDA_KERNEL(name, kernel)                                                                  \
    static bool can_run_##kernel(const moq_moe_spec *spec, int64_t tokens, char *reason,           \
                                 size_t size) {                                                    \
        (void)tokens;                                                                              \
        return moq_linear_runs_on_cuda(name, &spec->w13, reason, size) &&                          \
               moq_linear_runs_on_cuda(name, &spec->w2, reason, size) &&                           \
               has_few_experts(spec, reason, size);                                                \
    }

#define CUDA_ROW(name, kernel, of, computes_folded)                                                \
    {{"cuda", name},                                                                               \
     can_run_##kernel,                                                                             \
     &MOQ_MOE_##of,                                                                                \
     .workspace = moq_cuda_moe_##kernel##_workspace,                                               \
     .run = moq_cuda_moe_##kernel,                                                                 \
     .takes_codes = true,                                                                          \
     .folds = computes_folded}

CUDA_KERNEL("simt", simt)
CUDA_KERNEL("sm89_fp8", mma_fp8_as_e4m3)
CUDA_KERNEL("sm80_fp8", mma_fp8_as_f16)

/* Packed NVFP4 weights multiplied with float16 or bfloat16, which hold x and what its codes mean.
 */
static bool suits_16_bits(const moq_moe_spec *spec, char *reason, size_t size) {
    const moq_linear_spec *w13 = &spec->w13;
    if (!moq_linear_runs_on_cuda("simt", w13, reason, size) ||
        !moq_linear_runs_on_cuda("simt", &spec->w2, reason, size) ||
        !has_few_experts(spec, reason, size))
        return false;
    if (w13->weight != MOQ_WEIGHT_E2M1_PACKED)
        snprintf(reason, size, "multiplies NVFP4 weights, %s has others", w13->algo);
    else if (w13->dtype == MOQ_DT_F32)
        snprintf(reason, size, "multiplies 16-bit activations, the layer has float32");
    else
        return true;
    return false;
}

static bool can_run_mma_nvfp4(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size) {
    (void)tokens;
    if (!suits_16_bits(spec, reason, size))
        return false;
    if (spec->w13.compute != MOQ_COMPUTE_FP8)
        return true;
    snprintf(reason, size, "multiplies NVFP4 weights exactly, compute fp8 asks for another");
    return false;
}

static bool can_run_mma_nvfp4_folded(const moq_moe_spec *spec, int64_t tokens, char *reason,
                                     size_t size) {
    (void)tokens;
    if (!suits_16_bits(spec, reason, size))
        return false;
    if (moq_linear_folds(&spec->w13))
        return true;
    snprintf(reason, size,
             "multiplies NVFP4 weights with compute fp8, %s with compute %s is "
             "another layer",
             spec->w13.algo, moq_compute_name(spec->w13.compute));
    return false;
}

/* Code for sm_90a runs on compute capability 9.0 and no other. */
static bool on_hopper(const moq_moe_spec *spec, char *reason, size_t size) {
    int capability = (int)spec->w13.target.capability;
    if (!moq_linear_runs_on_cuda("simt", &spec->w13, reason, size))
        return false;
    if (capability == 90)
        return true;
    snprintf(reason, size, "needs compute capability 9.0, this device has %d.%d", capability / 10,
             capability % 10);
    return false;
}

#define FEW_KERNEL(format)                                                                         \
    static bool can_run_##format##_decode(const moq_moe_spec *spec, int64_t tokens, char *reason,  \
                                          size_t size) {                                           \
        return on_hopper(spec, reason, size) &&                                                    \
               moq_moe_##format##_decode_takes(spec, tokens, reason, size);                        \
    }

/* A kernel for Hopper. */
#define SM90_ROW(kernel, of)                                                                       \
    {{"cuda", "sm90_" #kernel},                                                                    \
     can_run_##kernel,                                                                             \
     &MOQ_MOE_##of,                                                                                \
     .workspace = moq_cuda_moe_##kernel##_workspace,                                               \
     .run = moq_cuda_moe_##kernel}

FEW_KERNEL(fp8)
FEW_KERNEL(nvfp4)

CUDA_KERNEL("sm90_fp8_prefill", fp8_prefill)
CUDA_KERNEL("sm90_nvfp4_prefill", nvfp4_prefill)
CUDA_KERNEL("sm90_nvfp4_fp8_prefill", nvfp4_fp8_prefill)

static const moq_moe_kernel KERNELS[] = {
    CPU_ROW(portable),
    CPU_ROW(avx2),
    CPU_ROW(avx512),
    CPU_ROW(avx512bf16),
    CPU_ROW(amx),
    CUDA_ROW("simt", simt, SIMT, false),
    CUDA_ROW("sm89_fp8", mma_fp8_as_e4m3, MMA_FP8_AS_E4M3, false),
    CUDA_ROW("sm80_fp8", mma_fp8_as_f16, MMA_FP8_AS_F16, false),
    CUDA_ROW("sm80_nvfp4", mma_nvfp4, MMA_NVFP4, false),
    CUDA_ROW("sm80_nvfp4_fp8", mma_nvfp4_folded, MMA_NVFP4_FOLDED, true),
    SM90_ROW(fp8_decode, FP8_DECODE),
    SM90_ROW(nvfp4_decode, NVFP4_DECODE),
    SM90_ROW(fp8_prefill, FP8_PREFILL),
    SM90_ROW(nvfp4_prefill, NVFP4_PREFILL),
    {{"cuda", "sm90_nvfp4_fp8_prefill"},
     can_run_nvfp4_fp8_prefill,
     &MOQ_MOE_NVFP4_FP8_PREFILL,
     .workspace = moq_cuda_moe_nvfp4_fp8_prefill_workspace,
     .run = moq_cuda_moe_nvfp4_fp8_prefill,
     .folds = true},
};

enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };
_Static_assert(KERNEL_COUNT <= MOQ_MAX_KERNELS, "a plan must hold every kernel of the table");

const moq_moe_kernel *moq_moe_kernel_at(int index) {
    return &KERNELS[index];
}

uint64_t moq_moe_variants(const moq_moe_kernel *kernel, const moq_moe_call *call) {
    moq_problem p = {call->spec, &call->spec->w13.target, call->tokens, true};
    return kernel->family ? moq_configs_near(kernel->family, &p) : 1;
}

/* ---- what the rules of the plan ask of experts ---- */

static moq_kernel_name name_of(int kernel) {
    return KERNELS[kernel].name;
}

static bool can_run(const void *problem, int kernel, int64_t tokens, char *reason, size_t size) {
    if (!((const moq_moe_spec *)problem)->w13.quantized_input || KERNELS[kernel].takes_codes)
        return KERNELS[kernel].can_run(problem, tokens, reason, size);
    snprintf(reason, size, "quantizes x itself, the layer gets codes");
    return false;
}

static const moq_configs *family(int kernel) {
    return KERNELS[kernel].family;
}

static double cost(const void *problem, int kernel, int64_t tokens) {
    return KERNELS[kernel].cost(problem, tokens);
}

/* The compute mode of a call: with "auto" the kernel's, elsewhere the layer's. */
static moq_compute compute(const void *problem, int kernel) {
    const moq_linear_spec *w13 = &((const moq_moe_spec *)problem)->w13;
    if (w13->compute != MOQ_COMPUTE_AUTO)
        return w13->compute;
    return moq_linear_has_choice(w13) && KERNELS[kernel].folds ? MOQ_COMPUTE_FP8
                                                               : MOQ_COMPUTE_EXACT;
}

/* The scheme that quantizes x as the layer wants it. */
static const char *scheme_of(const moq_linear_spec *w13) {
    return w13->input == MOQ_INPUT_NVFP4        ? "nvfp4"
           : w13->input == MOQ_INPUT_E4M3_TOKEN ? "fp8_token"
           : w13->input == MOQ_INPUT_E4M3_GROUP ? "fp8_group"
                                                : "fp8_tensor";
}

static moq_layer layer(const void *problem) {
    const moq_linear_spec *w13 = &((const moq_moe_spec *)problem)->w13;
    return (moq_layer){.algo = w13->algo,
                       .dtype = w13->dtype,
                       .x_dtype = moq_linear_x_dtype(w13),
                       .x_scheme = scheme_of(w13),
                       .device = w13->device,
                       .target = &w13->target,
                       .group_size = w13->group_size};
}

static const char *text(const void *problem, char *buffer, size_t size) {
    return moq_moe_text(problem, buffer, size);
}

static int checkpoint_params(const void *problem, moq_param_spec *params) {
    return moq_moe_checkpoint_params(problem, params);
}

static int prepared_params(const void *problem, moq_param_spec *params) {
    return moq_moe_prepared_params(problem, params);
}

const moq_operation MOQ_MOE = {
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
    .measure = moq_moe_measure,
};

/* The table of linear kernels and the choice among them: see plan.h. */
#include "ops/plan.h"

#include "core/formats.h"
#include "cpu/linear.h"
#include "cuda/cublaslt_cost.h"
#include "cuda/linear.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static bool on_cpu(const moq_linear_spec *spec, moq_isa isa, char *reason, size_t size) {
    char device[32];
    if (spec->device.kind != MOQ_CPU)
        snprintf(reason, size, "runs on the CPU, the layer is on %s",
                 moq_device_text(spec->device, device, sizeof device));
    else if (isa > moq_cpu_isa())
        snprintf(reason, size, "needs %s, this CPU (or MOQEXT_ISA) has %s", moq_isa_name(isa),
                 moq_isa_name(moq_cpu_isa()));
    else
        return true;
    return false;
}

/* bfloat16 products are exact where bfloat16 holds the activations: its own, and all that are
 * quantized to at most six significant bits. */
static bool on_bf16(const moq_linear_spec *spec, moq_isa isa, char *reason, size_t size) {
    if (!on_cpu(spec, isa, reason, size))
        return false;
    if (spec->dtype == MOQ_DT_BF16 || spec->input != MOQ_INPUT_AS_IS)
        return true;
    snprintf(reason, size, "multiplies bfloat16, which does not hold %s activations",
             moq_dtype_name(spec->dtype));
    return false;
}

/* Estimated seconds of one core: decoding each weight once a panel, and its products. Per weight,
 * from instruction counts at 3 GHz and 3 a cycle, or what one thread of a Zen 4 took where that
 * says more; `few` is the decoding where a few rows need no tiles; `rows` are multiplied at a time.
 */
static double cpu_cost(const moq_linear_spec *spec, const moq_linear_tiles *tiles, int64_t m,
                       double decode, double few, double product, int64_t rows) {
    double weights = (double)spec->in_features * (double)spec->out_features;
    double panels = (double)((m + MOQ_CPU_PANEL_ROWS - 1) / MOQ_CPU_PANEL_ROWS);
    if (m <= tiles->few && spec->input != MOQ_INPUT_NVFP4)
        decode = few;
    return weights * (decode * panels + product * (double)((m + rows - 1) / rows * rows));
}

#define CPU_KERNEL(isa_name, level, accepts, decode, few, product, rows)                           \
    static bool can_run_##isa_name(const moq_linear_spec *spec, char *reason, size_t size) {       \
        return accepts(spec, level, reason, size);                                                 \
    }                                                                                              \
    static double cost_##isa_name(const moq_linear_spec *spec, int64_t m) {                        \
        return cpu_cost(spec, moq_linear_tiles_of(level), m, decode, few, product, rows);          \
    }                                                                                              \
    static moq_status run_##isa_name(const moq_linear_call *call, moq_err *err) {                  \
        return moq_cpu_linear(moq_linear_tiles_of(level), call, err);                              \
    }

#define CPU_ROW(isa_name)                                                                          \
    {"cpu", #isa_name, can_run_##isa_name, cost_##isa_name, NULL, run_##isa_name}

CPU_KERNEL(portable, MOQ_ISA_PORTABLE, on_cpu, 1e-9, 1e-9, 1e-10, 1)
CPU_KERNEL(avx2, MOQ_ISA_AVX2, on_cpu, 2e-10, 3.5e-11, 2.5e-11, 1)
CPU_KERNEL(avx512, MOQ_ISA_AVX512, on_cpu, 1.5e-10, 1.5e-10, 1.3e-11, 1)
CPU_KERNEL(avx512bf16, MOQ_ISA_AVX512BF16, on_bf16, 4e-11, 4e-11, 7e-12, 1)
CPU_KERNEL(amx, MOQ_ISA_AMX, on_bf16, 5e-11, 5e-11, 1e-12, 32)

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

static bool is_fp8(const moq_linear_spec *spec, char *reason, size_t size) {
    if (spec->weight == MOQ_WEIGHT_E4M3_ROW || spec->weight == MOQ_WEIGHT_E4M3_BLOCK)
        return true;
    snprintf(reason, size, "multiplies FP8 weights, %s with compute %s has others", spec->algo,
             moq_compute_name(spec->compute));
    return false;
}

/* And x is not quantized, or need not be. */
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

static bool can_run_fp8_decode(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!on_sm90(spec, reason, size) || !suits_fp8_cores(spec, reason, size) ||
        !has_int_rows(spec, reason, size))
        return false;
    if (spec->in_features % MOQ_FP8_BLOCK == 0)
        return true;
    snprintf(reason, size, "needs in_features to be a multiple of 128, got %lld",
             (long long)spec->in_features);
    return false;
}

static double norm4(double a, double b) {
    return sqrt(sqrt(a * a * a * a + b * b * b * b));
}

/* Seconds, fitted as the estimates of the FP8 GEMM are (sm90_fp8_gemm.cu): the weight, or what each
 * row of outputs costs where that is longer, then x, read and quantized by every multiprocessor, by
 * the way it is quantized. Of small layers with a token or two two calls are on a multiprocessor.
 * Beyond its tokens another kernel has to do it. */
static double cost_fp8_decode(const moq_linear_spec *spec, int64_t m) {
    double n = (double)spec->out_features, k = (double)spec->in_features, tokens = (double)m;
    double value = spec->input == MOQ_INPUT_E4M3_TENSOR  ? 2.55e-11
                   : spec->input == MOQ_INPUT_E4M3_GROUP ? 5.57e-11
                                                         : 5.32e-11;
    bool small = n * k <= (double)MOQ_FP8_DECODE_SMALL * spec->target.sm_count;
    double start = m <= MOQ_FP8_DECODE_FEW && small ? 1.41e-6 : 1.75e-6;
    if (m > MOQ_FP8_DECODE_TOKENS)
        return INFINITY;
    return start + norm4(n * k / 4.54e12, n * (7.62e-11 + 1.66e-11 * tokens)) + value * tokens * k;
}

static bool is_sixteens(const char *what, int64_t size_of, char *reason, size_t size) {
    if (size_of % 16 == 0)
        return true;
    snprintf(reason, size, "needs %s to be a multiple of 16, got %lld", what, (long long)size_of);
    return false;
}

static bool can_run_fp8_gemm(const moq_linear_spec *spec, char *reason, size_t size) {
    if (!on_sm90(spec, reason, size) || !suits_fp8_cores(spec, reason, size) ||
        !is_sixteens("in_features", spec->in_features, reason, size) ||
        !has_int_rows(spec, reason, size))
        return false;
    if (spec->input != MOQ_INPUT_E4M3_TENSOR || spec->partition_count == 1 || spec->one_input_scale)
        return true;
    snprintf(reason, size, "quantizes x once, %d partitions may have as many input scales",
             (int)spec->partition_count);
    return false;
}

static double cost_fp8_gemm(const moq_linear_spec *spec, int64_t m) {
    return m > MOQ_FP8_GEMM_TOKENS ? INFINITY : moq_cuda_fp8_gemm_seconds(spec, m);
}

static bool can_run_sm80_fp8(const moq_linear_spec *spec, char *reason, size_t size) {
    return on_cuda(spec, reason, size) && since(spec, 80, reason, size) &&
           is_fp8(spec, reason, size) &&
           is_sixteens("in_features", spec->in_features, reason, size) &&
           has_int_rows(spec, reason, size);
}

static bool can_run_sm89_fp8(const moq_linear_spec *spec, char *reason, size_t size) {
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

static bool can_run_nvfp4_sm90(const moq_linear_spec *spec, char *reason, size_t size) {
    return on_sm90(spec, reason, size) && suits_16_bits(spec, reason, size);
}

static double cost_nvfp4_decode(const moq_linear_spec *spec, int64_t m) {
    return m > MOQ_NVFP4_DECODE_TOKENS ? INFINITY : moq_cuda_nvfp4_decode_seconds(spec, m);
}

static double cost_nvfp4_gemm(const moq_linear_spec *spec, int64_t m) {
    return m > MOQ_NVFP4_GEMM_TOKENS ? INFINITY : moq_cuda_nvfp4_gemm_seconds(spec, m);
}

static bool can_run_sm80_nvfp4(const moq_linear_spec *spec, char *reason, size_t size) {
    return on_cuda(spec, reason, size) && since(spec, 80, reason, size) &&
           suits_16_bits(spec, reason, size);
}

/* Seconds: W read at 2.9 TB/s, then multiplied, 8 rows of x at least. Within a sixth of what it
 * takes on an H200 from 8192 x 8192 on, up to a third short of it for 32 to 256 tokens of 4096 x
 * 4096 (docs/lab.md); an estimate elsewhere. */
static double cost_sm80_nvfp4(const moq_linear_spec *spec, int64_t m) {
    double weights = (double)spec->in_features * (double)spec->out_features;
    return 3e-6 + 0.5625 * weights / 2.9e12 + 2 * weights * (double)(m < 8 ? 8 : m) / 3.7e14;
}

static bool can_run_nvfp4_wide(const moq_linear_spec *spec, char *reason, size_t size) {
    return on_sm90(spec, reason, size) && can_run_sm80_nvfp4(spec, reason, size);
}

static double cost_nvfp4_wide(const moq_linear_spec *spec, int64_t m) {
    return m > MOQ_NVFP4_WIDE_TOKENS ? INFINITY : moq_cuda_nvfp4_wide_seconds(spec, m);
}

/* FP8 products of packed NVFP4 weights. */
static bool can_run_nvfp4_fp8(const moq_linear_spec *spec, char *reason, size_t size) {
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

static double cost_nvfp4_fp8(const moq_linear_spec *spec, int64_t m) {
    return m > MOQ_NVFP4_WIDE_TOKENS ? INFINITY : moq_cuda_nvfp4_fp8_seconds(spec, m);
}

static double cost_nvfp4_fp8_gemm(const moq_linear_spec *spec, int64_t m) {
    return m > MOQ_NVFP4_GEMM_TOKENS ? INFINITY : moq_cuda_nvfp4_fp8_gemm_seconds(spec, m);
}

static bool can_run_simt(const moq_linear_spec *spec, char *reason, size_t size) {
    return on_cuda(spec, reason, size) && since(spec, 80, reason, size) &&
           has_int_rows(spec, reason, size);
}

/* Seconds: the steps of a block one after the other, bytes at 1 TB/s, products at 20 TFLOP/s.
 * Within a factor of two of what FP8 layers of 4096 x 4096 to 8192 x 8192 take on an H200. */
static double cost_simt(const moq_linear_spec *spec, int64_t m) {
    double weights = (double)spec->in_features * (double)spec->out_features;
    double steps = (double)spec->in_features / 512;
    return 5e-6 + 1e-6 * steps + weights / 1e12 + weights * (double)m / 1e13;
}

/* Seconds: x quantized, then W read at 1.5 TB/s or multiplied at `rate` a second, 16 rows of x at
 * least. Within a factor of 1.5 of what the kernel of fp16 takes on an H200; an estimate elsewhere.
 */
static double mma_cost(const moq_linear_spec *spec, int64_t m, double rate) {
    double weights = (double)spec->in_features * (double)spec->out_features;
    double products = weights * (double)(m < 16 ? 16 : m) / rate;
    return 8e-6 + (weights / 1.5e12 > products ? weights / 1.5e12 : products);
}

static double cost_sm80_fp8(const moq_linear_spec *spec, int64_t m) {
    return mma_cost(spec, m, 1e14);
}

/* The chips that make these products of fp16 ones gain nothing by them. */
static double cost_sm89_fp8(const moq_linear_spec *spec, int64_t m) {
    bool native = spec->target.capability == 89 || spec->target.capability >= 120;
    return native ? 0.99 * mma_cost(spec, m, 2e14) : 1.01 * mma_cost(spec, m, 1e14);
}

/* ---- cuBLASLt ---- */

/* It multiplies FP8 since compute capability 8.9, by blocks of scales on 9.0 alone. */
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

static bool can_run_cublaslt(const moq_linear_spec *spec, char *reason, size_t size) {
    bool codes = moq_linear_folds(spec) ? can_run_nvfp4_fp8(spec, reason, size)
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
static bool can_run_cublaslt_fp4(const moq_linear_spec *spec, char *reason, size_t size) {
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

static const moq_linear_kernel KERNELS[] = {
    CPU_ROW(portable),
    CPU_ROW(avx2),
    CPU_ROW(avx512),
    CPU_ROW(avx512bf16),
    CPU_ROW(amx),
    {"cuda", "simt", can_run_simt, cost_simt, moq_cuda_simt_workspace, moq_cuda_simt_linear},
    {"cuda", "sm90_fp8_decode", can_run_fp8_decode, cost_fp8_decode, NULL, moq_cuda_fp8_decode},
    {"cuda", "sm89_fp8", can_run_sm89_fp8, cost_sm89_fp8, moq_cuda_mma_fp8_workspace,
     moq_cuda_mma_fp8_as_e4m3},
    {"cuda", "sm80_fp8", can_run_sm80_fp8, cost_sm80_fp8, moq_cuda_mma_fp8_workspace,
     moq_cuda_mma_fp8_as_f16},
    {"cuda", "sm90_fp8_gemm", can_run_fp8_gemm, cost_fp8_gemm, moq_cuda_fp8_gemm_workspace,
     moq_cuda_fp8_gemm, moq_cuda_fp8_gemm_variants, moq_cuda_fp8_gemm_choose},
    {"cuda", "sm90_nvfp4_decode", can_run_nvfp4_sm90, cost_nvfp4_decode, NULL,
     moq_cuda_nvfp4_decode, moq_cuda_nvfp4_decode_variants, moq_cuda_nvfp4_decode_choose},
    {"cuda", "sm80_nvfp4", can_run_sm80_nvfp4, cost_sm80_nvfp4, moq_cuda_mma_nvfp4_workspace,
     moq_cuda_mma_nvfp4},
    {"cuda", "sm90_nvfp4_gemm", can_run_nvfp4_sm90, cost_nvfp4_gemm, moq_cuda_nvfp4_gemm_workspace,
     moq_cuda_nvfp4_gemm, moq_cuda_nvfp4_gemm_variants, moq_cuda_nvfp4_gemm_choose},
    {"cuda", "sm90_nvfp4_wide", can_run_nvfp4_wide, cost_nvfp4_wide, moq_cuda_nvfp4_wide_workspace,
     moq_cuda_nvfp4_wide, moq_cuda_nvfp4_wide_variants, moq_cuda_nvfp4_wide_choose},
    {"cuda", "sm90_nvfp4_fp8", can_run_nvfp4_fp8, cost_nvfp4_fp8, moq_cuda_nvfp4_fp8_workspace,
     moq_cuda_nvfp4_fp8, moq_cuda_nvfp4_fp8_variants, .folds = true},
    {"cuda", "sm90_nvfp4_fp8_gemm", can_run_nvfp4_fp8, cost_nvfp4_fp8_gemm,
     moq_cuda_nvfp4_fp8_gemm_workspace, moq_cuda_nvfp4_fp8_gemm, moq_cuda_nvfp4_fp8_gemm_variants,
     moq_cuda_nvfp4_fp8_gemm_choose, .folds = true},
    {"cuda", "cublaslt", can_run_cublaslt, moq_cublaslt_seconds, moq_cublaslt_workspace,
     moq_cublaslt_linear, moq_cublaslt_variants, .folds = true},
    {"cuda", "cublaslt_fp4", can_run_cublaslt_fp4, moq_cublaslt_seconds, moq_cublaslt_workspace,
     moq_cublaslt_linear, moq_cublaslt_variants, NULL, false, "not yet run on hardware"},
};

enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };
_Static_assert(KERNEL_COUNT <= MOQ_MAX_KERNELS, "a plan must hold every kernel of the table");

const moq_linear_kernel *moq_linear_kernel_at(int index) {
    return index >= 0 && index < KERNEL_COUNT ? &KERNELS[index] : NULL;
}

static bool is_named(const moq_linear_kernel *kernel, const char *text) {
    size_t family = strlen(kernel->family);
    return strncmp(text, kernel->family, family) == 0 && text[family] == ':' &&
           strcmp(text + family + 1, kernel->name) == 0;
}

/* Names all that there are. */
static moq_status refuse_name(const char *forced, moq_err *err) {
    char names[640] = "";
    size_t used = 0;
    for (int i = 0; i < KERNEL_COUNT && used < sizeof names; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s:%s", i ? ", " : "",
                                 KERNELS[i].family, KERNELS[i].name);
    return moq_fail(err, MOQ_ERR_VALUE, "MOQEXT_KERNEL: no kernel named \"%.64s\"; there are %s",
                    forced, names);
}

static moq_status plan_forced(const moq_linear_spec *spec, const char *forced,
                              moq_linear_plan *plan, moq_err *err) {
    char reason[256];
    for (int i = 0; i < KERNEL_COUNT; i++) {
        if (!is_named(&KERNELS[i], forced))
            continue;
        if (!KERNELS[i].can_run(spec, reason, sizeof reason))
            return moq_fail(err, MOQ_ERR_UNSUPPORTED, "MOQEXT_KERNEL=%s cannot run this layer: %s",
                            forced, reason);
        plan->kernel[plan->count++] = &KERNELS[i];
        return MOQ_OK;
    }
    return refuse_name(forced, err);
}

/* Whether a kernel's family could run a layer there at all. */
static bool is_for(const moq_linear_kernel *kernel, moq_device device) {
    return (strcmp(kernel->family, "cpu") == 0) == (device.kind == MOQ_CPU);
}

/* Why none of the kernels for the layer's device can run it. */
static moq_status refuse(const moq_linear_spec *spec, moq_err *err) {
    char text[160], reason[256], reasons[832] = "";
    size_t used = 0;
    for (int i = 0; i < KERNEL_COUNT && used < sizeof reasons; i++) {
        const moq_linear_kernel *kernel = &KERNELS[i];
        if (!is_for(kernel, spec->device))
            continue;
        kernel->can_run(spec, reason, sizeof reason);
        used += (size_t)snprintf(reasons + used, sizeof reasons - used, "%s%s:%s %s",
                                 used ? "; " : "", kernel->family, kernel->name, reason);
    }
    return moq_fail(err, MOQ_ERR_UNSUPPORTED, "no kernel can run %s: %s",
                    moq_linear_text(spec, text, sizeof text),
                    spec->target.missing[0] ? spec->target.missing : reasons);
}

static moq_status collect(const moq_linear_spec *spec, const char *forced, moq_linear_plan *plan,
                          moq_err *err) {
    char reason[256];
    if (forced && *forced)
        return plan_forced(spec, forced, plan, err);
    for (int i = 0; i < KERNEL_COUNT; i++) {
        if (KERNELS[i].can_run(spec, reason, sizeof reason))
            plan->kernel[plan->count++] = &KERNELS[i];
    }
    return plan->count ? MOQ_OK : refuse(spec, err);
}

static moq_linear_choice find_cheapest(const moq_linear_plan *plan, const moq_linear_spec *spec,
                                       int64_t m) {
    const moq_linear_kernel *best = plan->kernel[0];
    double least = best->cost(spec, m);
    for (int i = 1; i < plan->count; i++) {
        double seconds = plan->kernel[i]->cost(spec, m);
        if (seconds < least) {
            best = plan->kernel[i];
            least = seconds;
        }
    }
    return (moq_linear_choice){best, best->choose && isfinite(least) ? best->choose(spec, m) : 0};
}

/* ---- choices that are remembered, a word each: m, then the kernel's row, then the variant ---- */

#define ROW_BITS     8
#define VARIANT_BITS 8

static uint64_t to_word(int64_t m, moq_linear_choice choice) {
    uint64_t row = (uint64_t)(choice.kernel - KERNELS);
    return ((uint64_t)m << ROW_BITS | row) << VARIANT_BITS | (uint64_t)choice.variant;
}

static moq_linear_choice from_word(uint64_t word) {
    return (moq_linear_choice){&KERNELS[word >> VARIANT_BITS & ((1u << ROW_BITS) - 1)],
                               (int32_t)(word & ((1u << VARIANT_BITS) - 1))};
}

static moq_linear_choice find_remembered(moq_linear_plan *plan, const moq_linear_spec *spec,
                                         int64_t m) {
    if (m < 1)
        m = 1;                               /* nothing runs */
    if (m >> (63 - ROW_BITS - VARIANT_BITS)) /* more rows than a word holds */
        return find_cheapest(plan, spec, m);
    _Atomic uint64_t *place = &plan->remembered[m % MOQ_REMEMBERED];
    uint64_t word = atomic_load_explicit(place, memory_order_relaxed);
    if (word && word >> (ROW_BITS + VARIANT_BITS) == (uint64_t)m)
        return from_word(word);
    moq_linear_choice choice = find_cheapest(plan, spec, m);
    atomic_store_explicit(place, to_word(m, choice), memory_order_relaxed);
    return choice;
}

moq_status moq_linear_make_plan(const moq_linear_spec *spec, const char *forced,
                                moq_linear_plan *plan, moq_err *err) {
    memset(plan, 0, sizeof *plan);
    plan->param_count = moq_linear_prepared_params(spec, plan->param);
    return collect(spec, forced, plan, err);
}

static int find_tuned(const moq_linear_plan *plan, int64_t m) {
    int64_t bucket = moq_token_bucket(m);
    int i = 0;
    while (i < plan->tuned_count && plan->tuned[i].bucket != bucket)
        i++;
    return i;
}

moq_linear_choice moq_linear_pick(moq_linear_plan *plan, const moq_linear_spec *spec, int64_t m) {
    int tuned = plan->tuned_count ? find_tuned(plan, m) : 0;
    return tuned < plan->tuned_count ? plan->tuned[tuned].choice : find_remembered(plan, spec, m);
}

moq_compute moq_linear_pick_compute(moq_linear_plan *plan, const moq_linear_spec *spec, int64_t m) {
    if (spec->compute != MOQ_COMPUTE_AUTO)
        return spec->compute;
    bool folds = moq_linear_has_choice(spec) && moq_linear_pick(plan, spec, m).kernel->folds;
    return folds ? MOQ_COMPUTE_FP8 : MOQ_COMPUTE_EXACT;
}

moq_status moq_linear_keep(moq_linear_plan *plan, const moq_linear_spec *spec, int64_t m,
                           const char *kernel, int32_t variant, moq_err *err) {
    const moq_linear_kernel *chosen = NULL;
    for (int i = 0; i < plan->count && !chosen; i++)
        if (is_named(plan->kernel[i], kernel) && isfinite(plan->kernel[i]->cost(spec, m)))
            chosen = plan->kernel[i];
    if (!chosen)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "kernel: expected one of this plan that runs %lld rows, got \"%.64s\"",
                        (long long)m, kernel);
    int i = find_tuned(plan, m);
    if (i == MOQ_MAX_TUNED)
        return moq_fail(err, MOQ_ERR_VALUE, "tokens: a layer can be tuned for %d numbers",
                        MOQ_MAX_TUNED);
    plan->tuned[i].bucket = moq_token_bucket(m);
    plan->tuned[i].choice = (moq_linear_choice){chosen, variant};
    plan->tuned_count += i == plan->tuned_count;
    return MOQ_OK;
}

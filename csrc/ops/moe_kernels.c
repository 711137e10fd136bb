/* The table of kernels for experts: who can run which layer, why not, and what it is expected to
 * take. On the CPU experts are linears, and a kernel can do them where it can do both of one
 * expert. */
#include "ops/moe_kernels.h"

#include "cpu/cpu_moe.h"
#include "ops/linear_kernels.h"
#include "ops/moe_call.h"

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
    {{"cpu", #isa_name}, can_run_##isa_name, cost_##isa_name, NULL, run_##isa_name}

CPU_KERNEL(portable, MOQ_ISA_PORTABLE)
CPU_KERNEL(avx2, MOQ_ISA_AVX2)
CPU_KERNEL(avx512, MOQ_ISA_AVX512)
CPU_KERNEL(avx512bf16, MOQ_ISA_AVX512BF16)
CPU_KERNEL(amx, MOQ_ISA_AMX)

static const moq_moe_kernel KERNELS[] = {
    CPU_ROW(portable), CPU_ROW(avx2), CPU_ROW(avx512), CPU_ROW(avx512bf16), CPU_ROW(amx),
};

enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };
_Static_assert(KERNEL_COUNT <= MOQ_MAX_KERNELS, "a plan must hold every kernel of the table");

const moq_moe_kernel *moq_moe_kernel_at(int index) {
    return &KERNELS[index];
}

/* ---- what the rules of the plan ask of experts ---- */

static moq_kernel_name name_of(int kernel) {
    return KERNELS[kernel].name;
}

static bool can_run(const void *problem, int kernel, int64_t tokens, char *reason, size_t size) {
    return KERNELS[kernel].can_run(problem, tokens, reason, size);
}

static double cost(const void *problem, int kernel, int64_t tokens) {
    return KERNELS[kernel].cost(problem, tokens);
}

static moq_way choose(const void *problem, int kernel, int64_t tokens, int32_t variant) {
    return KERNELS[kernel].choose ? KERNELS[kernel].choose(problem, tokens, variant)
                                  : moq_way_of(variant, 0, 1);
}

/* Of "auto" what the kernel multiplies, elsewhere what the layer asks for. */
static moq_compute compute(const void *problem, int kernel) {
    const moq_linear_spec *w13 = &((const moq_moe_spec *)problem)->w13;
    if (w13->compute != MOQ_COMPUTE_AUTO)
        return w13->compute;
    return moq_linear_has_choice(w13) && KERNELS[kernel].folds ? MOQ_COMPUTE_FP8
                                                               : MOQ_COMPUTE_EXACT;
}

static moq_layer layer(const void *problem) {
    const moq_linear_spec *w13 = &((const moq_moe_spec *)problem)->w13;
    return (moq_layer){.algo = w13->algo,
                       .dtype = w13->dtype,
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
    .cost = cost,
    .choose = choose,
    .compute = compute,
    .layer = layer,
    .text = text,
    .checkpoint_params = checkpoint_params,
    .prepared_params = prepared_params,
    .measure = moq_moe_measure,
};

/* The table of kernels for experts: those of the CPU, and of CUDA, which define their rows
 * themselves. On the CPU experts are linears, and a kernel can do them where it can do both of one
 * expert. */
#include "ops/moe_kernels.h"

#include "cpu/cpu_moe.h"
#include "cuda/choice/families.h"
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
    }                                                                                              \
    static const moq_moe_kernel ROW_##isa_name = {                                                 \
        {"cpu", #isa_name, .takes_codes = true, .row_order_fixed = true},                          \
        can_run_##isa_name,                                                                        \
        .cost = cost_##isa_name,                                                                   \
        .run = run_##isa_name};

CPU_KERNEL(portable, MOQ_ISA_PORTABLE)
CPU_KERNEL(avx2, MOQ_ISA_AVX2)
CPU_KERNEL(avx512, MOQ_ISA_AVX512)
CPU_KERNEL(avx512bf16, MOQ_ISA_AVX512BF16)
CPU_KERNEL(amx, MOQ_ISA_AMX)

#define CUDA_ROW(name) &MOQ_MOE_##name.kernel,

static const moq_kernel *const KERNELS[] = {&ROW_portable.kernel, &ROW_avx2.kernel,
                                            &ROW_avx512.kernel,   &ROW_avx512bf16.kernel,
                                            &ROW_amx.kernel,      MOQ_MOE_FAMILIES(CUDA_ROW)};

enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };
_Static_assert(KERNEL_COUNT <= MOQ_MAX_KERNELS, "a plan must hold every kernel of the table");

/* The row whose first member a kernel is. */
static const moq_moe_kernel *row_of(const moq_kernel *kernel) {
    return (const moq_moe_kernel *)kernel;
}

const moq_moe_kernel *moq_moe_kernel_at(int index) {
    return row_of(KERNELS[index]);
}

uint64_t moq_moe_variants(const moq_moe_kernel *row, const moq_moe_call *call) {
    moq_problem p = {call->spec, &call->spec->w13.target, call->tokens, true};
    return row->kernel.configs ? moq_configs_near(row->kernel.configs, &p) : 1;
}

/* ---- what the rules of the plan ask of experts ---- */

static bool can_run(const void *problem, const moq_kernel *kernel, int64_t tokens, char *reason,
                    size_t size) {
    return row_of(kernel)->can_run(problem, tokens, reason, size);
}

static double cost(const void *problem, const moq_kernel *kernel, int64_t tokens) {
    return row_of(kernel)->cost(problem, tokens);
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
    .kernels = KERNELS,
    .kernel_count = KERNEL_COUNT,
    .can_run = can_run,
    .cost = cost,
    .text = text,
    .checkpoint_params = checkpoint_params,
    .prepared_params = prepared_params,
    .measure = moq_moe_measure,
};

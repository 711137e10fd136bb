/* The table of linear kernels: those of the CPU, and of CUDA, which define their rows themselves.
 */
#include "ops/linear_kernels.h"

#include "cpu/cpu_linear.h"
#include "cuda/choice/families.h"
#include "cuda/cuda.h"
#include "ops/linear_call.h"

#include <stdio.h>

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
    else if (isa >= MOQ_ISA_AVX512BF16 && spec->weight == MOQ_WEIGHT_INT4_GROUP)
        snprintf(reason, size, "multiplies bfloat16, which does not hold int4 codes times scales");
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
    }                                                                                              \
    static const moq_linear_kernel ROW_##isa_name = {                                              \
        {"cpu", #isa_name, .adds = true, .takes_codes = true, .row_order_fixed = true},            \
        can_run_##isa_name,                                                                        \
        .cost = cost_##isa_name,                                                                   \
        .run = run_##isa_name};

CPU_KERNEL(portable, MOQ_ISA_PORTABLE)
CPU_KERNEL(avx2, MOQ_ISA_AVX2)
CPU_KERNEL(avx512, MOQ_ISA_AVX512)
CPU_KERNEL(avx512bf16, MOQ_ISA_AVX512BF16)
CPU_KERNEL(amx, MOQ_ISA_AMX)

#define CUDA_ROW(name) &MOQ_LINEAR_##name.kernel,

static const moq_kernel *const KERNELS[] = {&ROW_portable.kernel, &ROW_avx2.kernel,
                                            &ROW_avx512.kernel,   &ROW_avx512bf16.kernel,
                                            &ROW_amx.kernel,      MOQ_LINEAR_FAMILIES(CUDA_ROW)};

enum { KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS };
_Static_assert(KERNEL_COUNT <= MOQ_MAX_KERNELS, "a plan must hold every kernel of the table");

/* The row whose first member a kernel is. */
static const moq_linear_kernel *row_of(const moq_kernel *kernel) {
    return (const moq_linear_kernel *)kernel;
}

const moq_linear_kernel *moq_linear_kernel_at(int index) {
    return row_of(KERNELS[index]);
}

uint64_t moq_linear_variants(const moq_linear_kernel *row, const moq_linear_call *call) {
    const moq_configs *configs = row->kernel.configs;
    moq_problem p = {call->spec, &call->spec->target, call->m, call->input_scale != NULL};
    return row->variants ? row->variants(call) : configs ? moq_configs_near(configs, &p) : 1;
}

/* ---- what the rules of the plan ask of a linear ---- */

/* Numbers of tokens of which a library is asked when a layer is made: it serves one of them, or the
 * kernel is none of the plan. */
static const int64_t ASKED[] = {1, 64, 1024, 8192};

/* The forms of a call by which its products differ: y is written as it is, with a bias, and at an
 * address that no library takes. */
typedef enum { PLAIN, BIASED, UNALIGNED, FORMS } form;

static moq_tensor describe_rows(const moq_linear_spec *spec, void *data, moq_dtype dtype,
                                int64_t rows, int64_t columns) {
    moq_tensor t = {.data = data, .dtype = dtype, .device = spec->device, .ndim = 2};
    t.shape[0] = rows;
    t.shape[1] = columns;
    moq_tensor_set_contiguous(&t);
    return t;
}

static bool ask_for_form(const moq_linear_kernel *row, const moq_linear_spec *spec, int64_t m,
                         form form, char *reason, size_t size) {
    _Alignas(256) static uint8_t somewhere[256]; /* never read: addresses count by alignment */
    moq_tensor x =
        describe_rows(spec, somewhere, moq_linear_x_dtype(spec), m, moq_linear_x_columns(spec));
    moq_tensor y =
        describe_rows(spec, somewhere + (form == UNALIGNED), spec->dtype, m, spec->out_features);
    moq_problem p = {spec, &spec->target, m, true};
    moq_linear_call call = {.spec = spec,
                            .m = m,
                            .x = &x,
                            .y = &y,
                            .weight = somewhere,
                            .weight_scale = somewhere,
                            .output_scale = (const float *)somewhere,
                            .fold_scale = (const float *)somewhere,
                            .input_scale = (const float *)somewhere,
                            .bias = form == BIASED ? somewhere : NULL,
                            .bias_dtype = spec->dtype,
                            .config = moq_choose_config(row->kernel.configs, &p, 0)};
    return row->ask(&call, reason, size);
}

static bool ask_for_tokens(const moq_linear_kernel *row, const moq_linear_spec *spec, int64_t m,
                           char *reason, size_t size) {
    for (int i = 0; i < FORMS; i++)
        if (!ask_for_form(row, spec, m, (form)i, reason, size))
            return false;
    return true;
}

static bool ask(const moq_linear_kernel *row, const moq_linear_spec *spec, int64_t m, char *reason,
                size_t size) {
    bool has = m != MOQ_ANY_TOKENS && ask_for_tokens(row, spec, m, reason, size);
    for (size_t i = 0; m == MOQ_ANY_TOKENS && !has && i < sizeof ASKED / sizeof *ASKED; i++)
        has = ask_for_tokens(row, spec, ASKED[i], reason, size);
    return has;
}

/* Asks the library of a kernel, with the device current. A device that cannot be is no reason: the
 * call says what it is. */
static bool is_served(const void *problem, const moq_kernel *kernel, int64_t m, char *reason,
                      size_t size) {
    const moq_linear_kernel *row = row_of(kernel);
    const moq_linear_spec *spec = problem;
    const moq_target *target = &spec->target;
    bool entered;
    moq_err err;
    if (!row->ask || (target->assumed && !target->pretended))
        return true;
    if (moq_cuda_enter(spec->device.index, &entered, &err) != MOQ_OK)
        return !target->pretended || ask(row, spec, m, reason, size);
    bool served = ask(row, spec, m, reason, size);
    moq_cuda_leave(entered);
    return served;
}

static bool can_run(const void *problem, const moq_kernel *kernel, int64_t m, char *reason,
                    size_t size) {
    return row_of(kernel)->can_run(problem, m, reason, size);
}

static double cost(const void *problem, const moq_kernel *kernel, int64_t m) {
    return row_of(kernel)->cost(problem, m);
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
    .kernels = KERNELS,
    .kernel_count = KERNEL_COUNT,
    .can_run = can_run,
    .is_served = is_served,
    .cost = cost,
    .text = text,
    .checkpoint_params = checkpoint_params,
    .prepared_params = prepared_params,
    .measure = moq_linear_measure,
};

/* The table of linear kernels and the choice among them: see plan.h. */
#include "ops/plan.h"

#include "cpu/linear.h"

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

#define CPU_ROW(isa_name) {"cpu", #isa_name, can_run_##isa_name, cost_##isa_name, run_##isa_name}

CPU_KERNEL(portable, MOQ_ISA_PORTABLE, on_cpu, 1e-9, 1e-9, 1e-10, 1)
CPU_KERNEL(avx2, MOQ_ISA_AVX2, on_cpu, 2e-10, 3.5e-11, 2.5e-11, 1)
CPU_KERNEL(avx512, MOQ_ISA_AVX512, on_cpu, 1.5e-10, 1.5e-10, 1.3e-11, 1)
CPU_KERNEL(avx512bf16, MOQ_ISA_AVX512BF16, on_bf16, 4e-11, 4e-11, 7e-12, 1)
CPU_KERNEL(amx, MOQ_ISA_AMX, on_bf16, 5e-11, 5e-11, 1e-12, 32)

static const moq_linear_kernel KERNELS[] = {
    CPU_ROW(portable), CPU_ROW(avx2), CPU_ROW(avx512), CPU_ROW(avx512bf16), CPU_ROW(amx),
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
    return moq_fail(err, MOQ_ERR_VALUE,
                    "MOQEXT_KERNEL: no kernel named \"%s\"; the form is family:name, as in %s:%s",
                    forced, KERNELS[0].family, KERNELS[0].name);
}

moq_status moq_linear_make_plan(const moq_linear_spec *spec, const char *forced,
                                moq_linear_plan *plan, moq_err *err) {
    char text[160], reason[256], reasons[512] = "";
    size_t used = 0;
    plan->count = 0;
    if (forced && *forced)
        return plan_forced(spec, forced, plan, err);
    for (int i = 0; i < KERNEL_COUNT; i++) {
        const moq_linear_kernel *kernel = &KERNELS[i];
        if (kernel->can_run(spec, reason, sizeof reason))
            plan->kernel[plan->count++] = kernel;
        else if (used < sizeof reasons)
            used += (size_t)snprintf(reasons + used, sizeof reasons - used, "%s%s:%s %s",
                                     used ? "; " : "", kernel->family, kernel->name, reason);
    }
    if (plan->count)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_UNSUPPORTED, "no kernel can run %s: %s",
                    moq_linear_text(spec, text, sizeof text), reasons);
}

const moq_linear_kernel *moq_linear_pick(const moq_linear_plan *plan, const moq_linear_spec *spec,
                                         int64_t m) {
    const moq_linear_kernel *best = plan->kernel[0];
    for (int i = 1; i < plan->count; i++) {
        if (plan->kernel[i]->cost(spec, m) < best->cost(spec, m))
            best = plan->kernel[i];
    }
    return best;
}

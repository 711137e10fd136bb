/* The table of linear kernels and the choice among them: see plan.h. */
#include "ops/plan.h"

#include "cpu/linear.h"

#include <stdio.h>
#include <string.h>

static bool on_cpu(const moq_linear_spec *spec, char *reason, size_t size) {
    char device[32];
    if (spec->device.kind == MOQ_CPU)
        return true;
    snprintf(reason, size, "runs on the CPU, the layer is on %s",
             moq_device_text(spec->device, device, sizeof device));
    return false;
}

/* Decoding a weight, once per panel of rows, takes about 1 ns of one core and a product 0.1 ns,
 * measured on a 3 GHz x86-64. */
static double portable_cost(const moq_linear_spec *spec, int64_t m) {
    double weights = (double)spec->in_features * (double)spec->out_features;
    double panels = (double)((m + MOQ_CPU_PANEL_ROWS - 1) / MOQ_CPU_PANEL_ROWS);
    return weights * (1e-9 * panels + 1e-10 * (double)m);
}

static const moq_linear_kernel KERNELS[] = {
    {"cpu", "portable", on_cpu, portable_cost, moq_cpu_linear_portable},
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

/* Row of the block-scaled product of compute capability 12.x (nvfp4_block.cu), in the place of
 * cuBLASLt's: codes and scales of x, alphas, bias and low-rank part are those of
 * linear_cublaslt.cu.
 */
#include "cuda/choice/family.h"
#include "cuda/choice/grid.h"

#include <stdio.h>

/* Nobody has measured it: without rates it is never chosen. */
static const moq_rates RATES[] = {{0}};

static bool work(const moq_problem *p, int config, moq_load *w) {
    (void)config;
    const moq_linear_spec *spec = p->layer;
    w->bytes = MOQ_NVFP4_BYTES * (double)spec->out_features * (double)spec->in_features;
    return true;
}

static const moq_configs CONFIGS = {.configs = 1, .rates = RATES, .work = work};

static bool can_run(const moq_linear_spec *spec, int64_t m, char *reason, size_t size) {
    int capability = (int)spec->target.capability;
    if (!moq_is_on_cuda(spec, reason, size) || !moq_takes_tokens(m, 1 << 22, reason, size))
        return false;
    if (capability / 10 == 12)
        return moq_suits_fp4(spec, reason, size);
    snprintf(reason, size, "needs compute capability 12.0 or 12.1, this device has %d.%d",
             capability / 10, capability % 10);
    return false;
}

MOQ_ENTRY moq_status moq_block_scaled_linear(const moq_linear_call *call, moq_err *err);
MOQ_ENTRY int64_t moq_cublaslt_workspace(const moq_linear_call *call);

const moq_linear_kernel MOQ_LINEAR_SM120_NVFP4_BLOCK = {
    {"cuda", "sm120_nvfp4_block", "never run on its chip: only where MOQEXT_KERNEL names it",
     &CONFIGS, .adds = true, .quantizes = true, .only_forced = true},
    can_run,
    .workspace = moq_cublaslt_workspace,
    .run = moq_block_scaled_linear,
};

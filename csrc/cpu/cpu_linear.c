/* The driver of the CPU's linear kernels: see cpu/cpu_linear.h. Panel by panel, and in each
 * partition by partition where their activations are quantized with different scales; a pass
 * (cpu/cpu_pass.h) does the rest. */
#include "cpu/cpu_linear.h"

#include "cpu/cpu_pass.h"
#include "cpu/cpu_quantize.h"
#include "cpu/cpu_rows.h"
#include "cpu/float_mode.h"
#include "cpu/interrupt.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

/* Rows of the weight a thread takes at least: below, starting it costs more than it does. */
enum { ROWS_PER_THREAD = 32 };

static moq_status run_pass(moq_pass *p, int64_t rows, moq_err *err) {
    moq_shares shares = {.count = rows,
                         .grain = ROWS_PER_THREAD,
                         .piece = p->strip > 1 ? MOQ_STRIP * MOQ_LARGE_ROWS : 0,
                         .nanoseconds = p->nanoseconds};
    moq_parallel_for(&shares, moq_pass_multiply_rows, p);
    p->start += rows;
    return p->failed ? moq_fail(err, MOQ_ERR_MEMORY, "no memory for the tiles of a linear layer")
                     : MOQ_OK;
}

/* One panel with all partitions; neighbours whose activations are quantized alike go together. */
static moq_status run_panel(moq_pass *p, float dynamic, moq_err *err) {
    const moq_linear_spec *spec = p->call->spec;
    const float *scales = p->call->input_scale;
    p->start = 0;
    for (int32_t i = 0; i < spec->partition_count;) {
        int64_t rows = 0;
        p->input_scale = scales ? scales[i] : dynamic;
        do
            rows += spec->partition[i++];
        while (i < spec->partition_count && (!scales || scales[i] == p->input_scale));
        moq_pass_load(p);
        MOQ_TRY(run_pass(p, rows, err));
    }
    return MOQ_OK;
}

/* The scale of all of x, for an algorithm that has one and a checkpoint that does not. */
static float dynamic_scale(const moq_linear_call *call) {
    moq_input_mode mode = call->spec->input;
    if (call->input_scale || (mode != MOQ_INPUT_E4M3_TENSOR && mode != MOQ_INPUT_NVFP4))
        return 1.0f;
    float amax = moq_cpu_amax(call->x);
    return mode == MOQ_INPUT_NVFP4 ? moq_nvfp4_dynamic_scale(amax) : moq_fp8_dynamic_scale(amax);
}

static moq_status run_panels(moq_pass *p, moq_err *err) {
    int64_t m = p->call->m;
    float dynamic = dynamic_scale(p->call);
    moq_status status = MOQ_OK;
    for (int64_t first = 0; first < m && status == MOQ_OK && !moq_stop_asked();
         first += MOQ_CPU_PANEL_ROWS) {
        moq_pass_begin(p, first, m - first < MOQ_CPU_PANEL_ROWS ? m - first : MOQ_CPU_PANEL_ROWS);
        for (int64_t i = 0; i < p->rows; i++)
            p->y[i] = (char *)p->call->y->data + (size_t)moq_row_offset(p->call->y, first + i) *
                                                     moq_dtype_size(p->call->y->dtype);
        status = run_panel(p, dynamic, err);
    }
    return status;
}

static moq_status allocate_panel(moq_pass *p, moq_err *err) {
    int64_t m = p->call->m, rows = m < MOQ_CPU_PANEL_ROWS ? m : MOQ_CPU_PANEL_ROWS;
    char *memory = moq_take_scratch(MOQ_SCRATCH_PANEL, moq_pass_bytes(p, rows));
    if (!memory)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for a panel of a linear layer");
    moq_pass_place(p, rows, memory);
    return MOQ_OK;
}

double moq_cpu_linear_seconds(const moq_linear_tiles *tiles, const moq_linear_spec *spec,
                              int64_t m) {
    const moq_linear_speed *speed = &tiles->speed;
    double weights = (double)spec->in_features * (double)spec->out_features;
    double panels = (double)divide_up(m, MOQ_CPU_PANEL_ROWS);
    int64_t padded = round_up(m, tiles->pad_rows);
    switch (moq_regime_of(tiles, spec, m)) {
    case MOQ_DECODE:
        return weights * (speed->few + speed->product * (double)m);
    case MOQ_MEDIUM:
        return weights *
               (speed->some * (double)(padded / tiles->pad_rows) + speed->product * (double)m);
    default:
        return weights * (speed->decode * panels +
                          speed->product * (double)(m < tiles->arrange_from ? m : padded));
    }
}

moq_status moq_cpu_linear(const moq_linear_tiles *tiles, const moq_linear_call *call,
                          moq_err *err) {
    moq_pass p;
    moq_pass_open(&p, tiles, call);
    p.nanoseconds = 1e9 * moq_cpu_linear_seconds(tiles, call->spec, call->m) +
                    MOQ_NANOSECONDS_OF_X * (double)call->m * (double)p.k;
    MOQ_TRY(allocate_panel(&p, err));
    unsigned flushes = moq_enter_float_mode();
    moq_status status = run_panels(&p, err);
    moq_leave_float_mode(flushes);
    return status;
}

const moq_linear_tiles *moq_linear_tiles_of(moq_isa isa) {
    static const moq_linear_tiles *const ALL[MOQ_ISA_COUNT] = {
        &moq_linear_portable,
#if defined(__x86_64__)
        &moq_linear_avx2,     &moq_linear_avx512, &moq_linear_avx512bf16, &moq_linear_amx,
#endif
    };
    return ALL[isa];
}

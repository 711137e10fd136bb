/* What the files of weight processing share: linear_prepare.c reads and checks the scales, and
 * linear_prepare_cpu.c and linear_prepare_cuda.c check, move, fold or pack the codes. */
#ifndef MOQ_OPS_LINEAR_PREPARE_H
#define MOQ_OPS_LINEAR_PREPARE_H

#include "ops/linear.h"

/* Scales of a layer as float32 on the host, checked. A partition or row whose scale is zero is all
 * zeros in the producer's meaning; its codes, which are NaN on disk, are written as zeros. */
typedef struct {
    float *weight;  /* one per partition, or one per row (per-channel FP8) */
    bool per_row;   /* which of the two */
    bool on_device; /* those of moq_prepare_scale_count are there, neither read nor checked */
    float *block;   /* [block rows, columns] for FP8_PB_WO, else NULL */
    float *input;   /* one per partition, or NULL */
    float *smooth;  /* [K], or NULL */
    float *factor;  /* [N], NULL for blocks */
    float *memory;  /* what all of them point into */
} moq_prepare_scales;

/* Rows of codes: the first, and bytes from one to the next. */
typedef struct {
    const uint8_t *data;
    int64_t stride;
} moq_code_rows;

/* Those of partition p, which starts at row `first` of the layer. */
moq_code_rows moq_prepare_rows(const moq_source *source, int32_t p, int64_t first);

/* How many scales, of rows, blocks or packed partitions, may stay on the device. */
int64_t moq_prepare_scale_count(const moq_linear_spec *spec);

/* The failure of the first bad one among those that stayed there. */
moq_status moq_prepare_bad_scale(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                 void *stream, moq_err *err);

/* The failure of a code that no intact checkpoint holds. */
moq_status moq_prepare_bad_code(const moq_linear_spec *spec, int64_t row, int64_t column,
                                moq_err *err);

moq_status moq_prepare_on_cpu(const moq_linear_spec *spec, const moq_linear_sources *sources,
                              const moq_prepare_scales *scales, moq_linear_params *params,
                              moq_err *err);
/* On the current device. Where the outputs are fresh, FP8 codes are written while they are
 * checked. */
moq_status moq_prepare_on_cuda(const moq_linear_spec *spec, const moq_linear_sources *sources,
                               const moq_prepare_scales *scales, moq_prepare_way way,
                               moq_linear_params *params, moq_err *err);

#endif

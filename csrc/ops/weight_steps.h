/* What the files of weight processing share: weight_prepare.c reads and checks the scales, and
 * weight_prepare_cpu.c and weight_prepare_cuda.c check, move, fold or pack the codes. */
#ifndef MOQ_OPS_WEIGHT_STEPS_H
#define MOQ_OPS_WEIGHT_STEPS_H

#include "ops/weight_prepare.h"

/* ---- what is given ---- */

/* The tensor of partition p, or of all partitions, of the source's expert. */
moq_tensor moq_source_part(const moq_source *source, int32_t p);
/* Bytes from expert to expert; 0 for a matrix. */
int64_t moq_source_step(const moq_source *source, int32_t p);
/* All tensors of one expert. */
moq_weight_sources moq_sources_of(const moq_weight_sources *sources, int64_t expert);

/* Rows of codes: the first, and bytes from one to the next, and from those of an expert to those of
 * the next one. */
typedef struct {
    const uint8_t *data;
    int64_t stride, step;
} moq_code_rows;

/* Those of partition p, which starts at row `first` of the matrix, of the source's expert. */
moq_code_rows moq_prepare_rows(const moq_source *source, int32_t p, int64_t first);

/* ---- scales ---- */

/* Scales of all experts as float32 on the host, checked, those of an expert after the ones of the
 * expert before. A partition, row or block whose scale is zero is all zeros in the producer's
 * meaning; its codes, which are zero or NaN on disk, are written as zeros. Other codes under a
 * scale of zero mean that the scale was lost, and are refused. */
typedef struct {
    float *weight;        /* one per partition, or one per row (per-channel FP8); NULL for blocks */
    bool per_row;         /* which of the two */
    bool on_device;       /* those of the weight are there, float32 or 16 bits, and not read */
    float *block;         /* [block rows, columns] for FP8_PB_WO, else NULL */
    bool input_on_device; /* those of x are there, likewise */
    float *input;         /* one per partition, or NULL: none, or on the device */
    float *smooth;        /* [K], or NULL */
    float *factor;        /* [N], NULL for blocks */
    float *memory;        /* what all of them point into */
} moq_prepare_scales;

/* Block scales of 128 x 128 of one matrix. */
int64_t moq_prepare_block_count(const moq_weight *weight);

/* The scales of one expert; `memory` stays with those of all. */
moq_prepare_scales moq_prepare_scales_of(const moq_weight *weight, const moq_prepare_scales *scales,
                                         int64_t expert);

/* Reads the scales of partitions that stayed on the device after all. */
moq_status moq_prepare_download_scales(const moq_weight *weight, const moq_weight_sources *sources,
                                       moq_prepare_scales *scales, void *stream, moq_err *err);

/* The failure of the first bad one among scales, of the weight or of x, that stayed on the device.
 */
moq_status moq_prepare_bad_scale(const moq_weight *weight, const moq_weight_sources *sources,
                                 const moq_prepare_scales *scales, void *stream, moq_err *err);

/* All scales of rows, blocks or partitions on the host, wherever they are now, without those of x.
 * The caller frees home->memory, whatever is returned. */
moq_status moq_prepare_scales_to_host(const moq_weight *weight, const moq_weight_sources *sources,
                                      void *stream, moq_prepare_scales *on_host, moq_err *err);

/* ---- codes ---- */

/* The failure of a code that no intact checkpoint holds. */
moq_status moq_prepare_bad_code(const moq_weight *weight, int64_t row, int64_t column,
                                moq_err *err);

/* Codes of one partition of a matrix on the host: rows of the weight and, for e2m1, of its block
 * scales. */
typedef struct {
    int32_t index;
    int64_t first; /* row of the matrix */
    moq_code_rows codes, groups;
    bool zero; /* known to mean zero, whatever the scales of rows say */
} moq_prepare_part;

/* Looks for codes that no intact checkpoint holds: NaN, or under a scale of zero a value. The
 * scales are of the matrix. */
moq_status moq_prepare_check_part(const moq_weight *weight, const moq_prepare_part *part,
                                  const moq_prepare_scales *scales, moq_err *err);

/* Where the codes of a matrix are written on the host, and its block scales of e2m1. */
typedef struct {
    uint8_t *weight, *groups;
} moq_prepare_out;

/* The partition's rows of the prepared weight (and e2m1 block scales), on the host. */
void moq_prepare_write_part(const moq_weight *weight, const moq_prepare_part *part,
                            const moq_prepare_scales *scales, const moq_prepare_out *out);

moq_status moq_prepare_on_cpu(const moq_weight *weight, const moq_weight_sources *sources,
                              moq_prepare_mode mode, const moq_prepare_scales *scales,
                              moq_params *params, moq_err *err);
/* On the current device; waits until all is done. */
moq_status moq_prepare_on_cuda(const moq_weight *weight, const moq_weight_sources *sources,
                               moq_prepare_scales *scales, moq_prepare_mode mode,
                               moq_params *params, moq_err *err);

#endif

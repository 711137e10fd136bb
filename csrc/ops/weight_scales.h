/* Scales of a weight's checkpoint as float32 on the host, read from where they are and checked. */
#ifndef MOQ_OPS_WEIGHT_SCALES_H
#define MOQ_OPS_WEIGHT_SCALES_H

#include "ops/weight_sources.h"

/* Scales of all experts, an expert's after the ones of the expert before. A partition, row or block
 * whose scale is zero is all zeros in the producer's meaning; its codes, which are zero or NaN on
 * disk, are written as zeros. Other codes under a scale of zero mean that the scale was lost, and
 * are refused. */
typedef struct {
    float *weight; /* one per partition, or one per row (per-channel FP8); NULL for blocks */
    float *block;  /* [block rows, columns] for FP8_PB_WO, [N, columns] for int4, else NULL */
    float *factor; /* [N], NULL for blocks */
    float *input;  /* one per partition */
    float *smooth; /* [K], or NULL: there is no pre_quant_scale */
    float *memory; /* what all of them point into */
} moq_prepare_scales;

/* Makes room for all scales, which are not read yet. The caller frees scales->memory, also where
 * this fails. */
moq_status moq_prepare_open_scales(const moq_weight *weight, const moq_weight_sources *sources,
                                   moq_prepare_scales *scales, moq_err *err);

/* Kinds of scales, as bits of a set. */
enum { MOQ_SCALES_OF_WEIGHT = 1, MOQ_SCALES_OF_INPUT = 2, MOQ_SCALES_OF_SMOOTHING = 4 };

/* Reads the scales of the kinds in `which`, wherever they are, expert after expert, so that of
 * several wrong ones the first is named. */
moq_status moq_prepare_read_scales(const moq_weight *weight, const moq_weight_sources *sources,
                                   int which, void *stream, const moq_prepare_scales *scales,
                                   moq_err *err);

/* Reads one tensor of a source as moq_read_scales does, wherever the tensor is. */
moq_status moq_prepare_read_values(const moq_source *source, int32_t p, const char *name,
                                   int64_t count, void *stream, float *out, moq_err *err);

/* The scales of one expert; `memory` stays with those of all. */
moq_prepare_scales moq_prepare_scales_of(const moq_weight *weight, const moq_prepare_scales *scales,
                                         int64_t expert);

/* Values of the scale matrix of one weight: of 128 x 128 blocks, or of groups of int4. */
int64_t moq_prepare_block_count(const moq_weight *weight);

/* True if there are input scales that the weight's products use. */
bool moq_uses_input_scale(const moq_weight *weight, const moq_weight_sources *sources);

#endif

/* A quantized weight, independent of what it is multiplied with: a matrix [N, K], or a stack of
 * matrices [E, N, K], one for each expert.
 *
 * Several layers fused along rows ("partitions": q, k, v; gate and up of an expert) keep their own
 * scales: a factor per output row carries every scale that is constant along K, so that nothing is
 * requantized to a common one.
 *
 * A weight is resolved once from names and sizes; it tells which tensors the checkpoint holds and
 * which ones the prepared form holds. Those of a stack have the experts as their first dimension,
 * and in the prepared form without gaps, so that an expert of the prepared stack is, byte by byte,
 * what its matrix alone would be. */
#ifndef MOQ_CORE_WEIGHT_H
#define MOQ_CORE_WEIGHT_H

#include "core/algo.h"
#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_MAX_PARTITIONS 64
#define MOQ_MAX_PARAMS     7 /* of a weight */
/* Rank of a low-rank pair, where nothing states it: what SVDQuant of ModelOpt splits off. */
#define MOQ_SVD_RANK 32
/* Kernels of weight processing have an expert for each step of a grid's second dimension. */
#define MOQ_MAX_EXPERTS 65535

typedef enum { MOQ_COMPUTE_EXACT, MOQ_COMPUTE_FP8, MOQ_COMPUTE_FP4, MOQ_COMPUTE_AUTO } moq_compute;

typedef enum {
    MOQ_WEIGHT_E4M3_ROW,    /* e4m3 [N, K]; one factor per row */
    MOQ_WEIGHT_E4M3_BLOCK,  /* e4m3 [N, K]; float32 scale per 128 x 128 block of a partition */
    MOQ_WEIGHT_E2M1,        /* packed e2m1 [N, K / 2]; e4m3 scale per group of K; factor per row */
    MOQ_WEIGHT_E2M1_PACKED, /* the same codes and scales as core/nvfp4_packed.h has them */
    MOQ_WEIGHT_E2M1_SWIZZLED, /* the same codes; scales of each partition as core/swizzle.h has them
                               */
    /* Layouts that only general kernels read, as the checkpoint stores them: */
    MOQ_WEIGHT_E4M3_GROUP, /* e4m3 [N, K]; E8M0 scale per group of K */
    MOQ_WEIGHT_INT8_ROW,   /* int8 [N, K]; one factor per row */
    MOQ_WEIGHT_INT4_GROUP  /* int4 [N / 2, K], rows 2i (low) and 2i + 1; float32 scale per group */
} moq_weight_layout;

/* The members of a weight, and of a problem that has one weight (core/linear.h), so that kernels
 * find all about their problem in one place. */
#define MOQ_WEIGHT_FACTS                                                                           \
    const char *algo; /* canonical name, static storage */                                         \
    moq_compute compute;                                                                           \
    moq_device device;                                                                             \
    moq_weight_layout checkpoint; /* as the checkpoint stores the weight */                        \
    moq_weight_layout weight;     /* as the kernel gets it */                                      \
    moq_input_mode input;         /* what becomes of the activations */                            \
    bool per_row_scale;           /* the checkpoint's weight_scale has one value per row */        \
    bool mx_scales;               /* its block scales are E8M0, and there is no second level */    \
    bool one_input_scale;         /* the partitions have the same */                               \
    uint8_t choice;               /* moq_compute that "auto" takes beside EXACT, or that alone */  \
    bool checkpoint_input_scale;  /* the algorithm writes an input_scale (it may be absent) */     \
    bool by_token;                /* without it, x has one scale a row */                          \
    bool pre_quant_scale;         /* and, where none was folded elsewhere, a pre_quant_scale */    \
    bool unused_scale_2;          /* and a weight_scale_2 that is no part of the weight */         \
    int32_t group_size; /* along K: 16 or 32 for e2m1, 128 for blocks and int4, 0 for rows */      \
    int32_t rank;       /* of each partition's pair lora_a, lora_b; 0: there is none */            \
    int32_t experts;    /* of a stack; 0 for a matrix */                                           \
    int place; /* of the stack's tensors among those of a layer: MOQ_PARAM_OF_W13, or 0 */         \
    int64_t in_features;  /* K */                                                                  \
    int64_t out_features; /* N: sum of the partitions */                                           \
    int32_t partition_count;                                                                       \
    const int64_t *partition; /* rows of each; the memory is that of whoever resolved it */

typedef struct {
    MOQ_WEIGHT_FACTS
} moq_weight;

/* The tensors that belong to a weight, in the checkpoint or prepared. */
typedef enum {
    MOQ_PARAM_WEIGHT,
    MOQ_PARAM_WEIGHT_SCALE,
    MOQ_PARAM_WEIGHT_SCALE_2,
    MOQ_PARAM_OUTPUT_SCALE,
    MOQ_PARAM_FOLD_SCALE,
    MOQ_PARAM_INPUT_SCALE,
    MOQ_PARAM_PRE_QUANT_SCALE,
    MOQ_PARAM_LORA_A,
    MOQ_PARAM_LORA_B,
    MOQ_PARAM_BIAS, /* of experts, whose layer has it among its parameters */
    MOQ_PARAM_COUNT,
    /* A layer of several weights has the tensors of each at places of their own. Experts
     * (core/moe.h) have w13 and then w2 behind the places of a single weight. */
    MOQ_PARAM_OF_W13 = MOQ_PARAM_COUNT,
    MOQ_PARAM_OF_W2 = 2 * MOQ_PARAM_COUNT,
    MOQ_PARAM_PLACES = 3 * MOQ_PARAM_COUNT
} moq_param;

/* Parameters of a layer: two weights and a bias of each. */
#define MOQ_MAX_LAYER_PARAMS (2 * (MOQ_MAX_PARAMS + 1))

typedef struct {
    moq_param id; /* of the only weight, or of one of several, from its place on */
    const char *name;
    const char *role; /* "codes", "scale", "factor" */
    moq_dtype dtype;
    int32_t ndim;
    int64_t shape[4];
    bool required;
} moq_param_spec;

/* The name of a tensor of the only weight (place 0), or of one of several. */
const char *moq_param_name(int place, moq_param id);

/* The names and sizes that a weight is resolved from. Any spelling of an algorithm will do. */
typedef struct {
    const char *algo;
    const char *compute;
    moq_device device;
    int32_t experts; /* 0 for a matrix */
    int64_t in_features;
    const int64_t *partitions; /* has to live as long as the weight */
    int32_t partition_count;
    int64_t group_size;       /* 0: the algorithm's own */
    int64_t rank;             /* 0: MOQ_SVD_RANK where there is a low-rank pair */
    const char *columns_name; /* what the caller calls in_features, in messages; NULL: so */
} moq_weight_names;

/* MOQ_ERR_UNSUPPORTED for a known algorithm or compute mode that has no linear method,
 * MOQ_ERR_VALUE for an unknown one or sizes no checkpoint can hold. */
moq_status moq_weight_resolve(const moq_weight_names *names, moq_weight *weight, moq_err *err);

/* Fails for a weight with low-rank pairs, which experts do not have: MOQ_ERR_UNSUPPORTED. */
moq_status moq_weight_refuse_experts(const moq_weight *weight, moq_err *err);

/* Promises that all partitions (of an expert) have the same input_scale: MOQ_ERR_UNSUPPORTED where
 * there is none. */
moq_status moq_weight_promise_one_input_scale(moq_weight *weight, moq_err *err);

/* The dtype of the codes in the checkpoint. */
moq_dtype moq_weight_code_dtype(const moq_weight *weight);

/* The number of matrices: 1 that is no stack, or the experts. */
static inline int64_t moq_weight_matrices(const moq_weight *weight) {
    return weight->experts ? weight->experts : 1;
}

/* True for layouts that only general kernels read. */
static inline bool moq_layout_is_general(moq_weight_layout layout) {
    return layout >= MOQ_WEIGHT_E4M3_GROUP;
}

/* True if the checkpoint has a matrix of float scales: of 128 x 128 blocks, or of groups of int4.
 */
static inline bool moq_weight_has_scale_matrix(const moq_weight *weight) {
    return weight->checkpoint == MOQ_WEIGHT_E4M3_BLOCK ||
           weight->checkpoint == MOQ_WEIGHT_INT4_GROUP;
}

/* Rows of lora_a: the ranks of all partitions, which have pairs of their own. */
static inline int64_t moq_weight_ranks(const moq_weight *weight) {
    return (int64_t)weight->rank * weight->partition_count;
}

/* True if the prepared form has a factor for each row. */
static inline bool moq_weight_has_output_scale(const moq_weight *weight) {
    return weight->weight != MOQ_WEIGHT_E4M3_BLOCK && weight->weight != MOQ_WEIGHT_E4M3_GROUP &&
           weight->weight != MOQ_WEIGHT_INT4_GROUP;
}

/* Rows of codes of so many rows of the weight: int4 has two in one. */
static inline int64_t moq_code_rows_of(moq_weight_layout layout, int64_t rows) {
    return layout == MOQ_WEIGHT_INT4_GROUP ? rows / 2 : rows;
}

/* Rows of the scale matrix of one partition: 128 x 128 blocks, or rows of int4. */
int64_t moq_weight_partition_blocks(const moq_weight *weight, int32_t partition);
/* Rows of the scale matrix of a weight: every partition starts a new row of blocks. */
int64_t moq_weight_block_rows(const moq_weight *weight);
/* Columns of the scale that runs along K: ceil(K / group_size). */
int64_t moq_weight_scale_columns(const moq_weight *weight);

/* True if kernels fold block scales into e4m3 codes as they read them: with v[k] = e2m1[k] *
 * scale[k / group] of row n, the weight is e4m3(v[k] * fold_scale[n]). fold_scale is the power of
 * two that brings the row's largest |v| above 224 and no further than 448 (moq_cpu_fold_e2m1_row
 * returns 1 / fold_scale), and outputs are scaled by output_scale / fold_scale. The product scale *
 * fold_scale of a group whose codes are all zero may be large, up to 448 * 2^18: it must not become
 * an infinity before it meets the codes. */
bool moq_weight_folds(const moq_weight *weight);

/* True if each call may be done as compute "exact" or as `choice` has it, "fp8" or "fp4", whichever
 * kernel is expected to be faster: compute "auto" where there are both. They read the same prepared
 * tensors but for fold_scale and input_scale, which exact ones do not. `input` is then that of
 * `choice`; exact kernels take x as it is. Elsewhere "auto" is "exact". */
bool moq_weight_has_choice(const moq_weight *weight);

/* The tensors of the checkpoint for this weight, and those of its prepared form; returns the count,
 * at most MOQ_MAX_PARAMS. */
int moq_weight_checkpoint_params(const moq_weight *weight, moq_param_spec *params);
int moq_weight_prepared_params(const moq_weight *weight, moq_param_spec *params);

/* Names a tensor of the weight as the layer of the weight does. */
static inline const char *moq_weight_param_name(const moq_weight *weight, moq_param id) {
    return moq_param_name(weight->place, id);
}

/* Adds to the failure of one matrix of a stack the expert it belongs to, or MOQ_EVERY_EXPERT.
 * Returns the status. */
moq_status moq_weight_fail_in_expert(const moq_weight *weight, int64_t expert, moq_status status,
                                     moq_err *err);

/* Hands a failure up as one of the expert `expert`. */
#define MOQ_TRY_EXPERT(weight, expert, call, err)                                                  \
    do {                                                                                           \
        moq_status moq_try_status_ = (call);                                                       \
        if (moq_try_status_ != MOQ_OK)                                                             \
            return moq_weight_fail_in_expert(weight, expert, moq_try_status_, err);                \
    } while (0)

/* "NVFP4 8 x 4096x14336, compute exact on cuda:0", for messages. */
const char *moq_weight_text(const moq_weight *weight, char *buffer, size_t size);
const char *moq_compute_name(moq_compute compute);

#ifdef __cplusplus
}
#endif
#endif

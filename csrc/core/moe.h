/* A layer of experts, independent of who computes it.
 *
 * A token t has top_k slots, each with the id of an expert and a weight w. Slot j counts where its
 * id names an expert that is here: 0 <= id < global_experts, and expert_map[id] >= 0 where there is
 * a map from global to local numbers. With its local expert e,
 *
 *   u = W13[e] treated(h) + b13[e]       h = x[t], or rounded(x[t] * w) where weights are on the
 *                                        input; W13 has I rows for gate and I for up, or I rows;
 *   g = rounded(act(u))                  rounded to the dtype of x;
 *   d = W2[e] treated(g) + b2[e]
 *   y[t] = rounded(out[t] + sum_j w d)   out where results accumulate, w = 1 where it was on the
 *                                        input; from slot 0 on, in float32
 *
 * and "treated" what a linear of the algorithm does with its activations (core/linear.h). Each
 * weight is a stack of experts (core/weight.h): gate and up keep their own scales.
 *
 * x may be codes already, made as w13 treats it (w13.quantized_input), with scales beside them:
 * what an engine sends from device to device.
 *
 * act of gate g, up v, all in float32:
 *   silu       g * s(alpha * g) * (v + beta), s(z) = 1 / (1 + exp(-z)), where there is a limit
 *              with min(g, limit) and min(max(v, -limit), limit);
 *   gelu       g / 2 * (1 + erf(g / sqrt(2))) * v;
 *   gelu_tanh  g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3))) * v;
 *   relu2      max(g, 0)^2 * v.
 * Where there is no gate, g is the row itself and the last factor is missing. "swigluoai" is silu
 * with alpha 1.702, beta 1 and limit 7. */
#ifndef MOQ_CORE_MOE_H
#define MOQ_CORE_MOE_H

#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_MOE_TOP_K 32

typedef enum { MOQ_MOE_SILU, MOQ_MOE_GELU, MOQ_MOE_GELU_TANH, MOQ_MOE_RELU2 } moq_moe_activation;

typedef struct {
    /* The layers of one expert: w13 [P * I, H] and w2 [H, I], of the dtype of x, for kernels that
     * do experts as linears, one after the other. */
    moq_linear_spec w13, w2;
    int64_t partition13[2], partition2[1]; /* what they point to */
    int32_t experts;                       /* E: those that are here */
    int32_t global_experts;                /* of which ids tell, at least E */
    int32_t top_k;
    bool gated; /* P is 2 */
    moq_moe_activation activation;
    float alpha, beta, limit; /* an infinite limit is none */
} moq_moe_spec;

typedef struct {
    const char *algo;
    const char *compute;
    const char *dtype;
    moq_device device;
    int64_t experts, global_experts; /* global_experts 0: as many as are here */
    int64_t hidden, intermediate;
    int64_t top_k;
    int64_t group_size; /* 0: the algorithm's own */
    bool gated;
    bool quantized_input;
    bool batch_invariant; /* of both linears; a token's bits depend on no other token's routing */
    const char *activation;
    /* NaN: the activation's own */
    double alpha, beta, limit;
} moq_moe_names;

/* MOQ_ERR_UNSUPPORTED for a known algorithm or compute mode that has no experts, MOQ_ERR_VALUE for
 * an unknown one or sizes that cannot be. The spec points into itself: not to be copied. */
moq_status moq_moe_resolve(const moq_moe_names *names, moq_moe_spec *spec, moq_err *err);

/* Scales beside a row of x, where x is codes: one, one of each 128 columns or, of e4m3, one of each
 * 16; 0 where the layer's input_scale is all there is, or x is values. */
int64_t moq_moe_x_scales(const moq_moe_spec *spec);
moq_dtype moq_moe_x_scale_dtype(const moq_moe_spec *spec);

/* The stacks of all experts. Their activation scales are one an expert, for gate and up alike. */
moq_weight moq_moe_stack13(const moq_moe_spec *spec);
moq_weight moq_moe_stack2(const moq_moe_spec *spec);

/* The tensors of the checkpoint and of the prepared form, whose names begin with "w13_" or "w2_";
 * returns the count, at most MOQ_MAX_LAYER_PARAMS. */
int moq_moe_checkpoint_params(const moq_moe_spec *spec, moq_param_spec *params);
int moq_moe_prepared_params(const moq_moe_spec *spec, moq_param_spec *params);

/* "NVFP4 128 experts 2048x768, top 8, compute exact, bfloat16 on cpu", for messages. */
const char *moq_moe_text(const moq_moe_spec *spec, char *buffer, size_t size);

/* The prepared tensors of a stack. */
typedef struct {
    const uint8_t *weight;
    const void *weight_scale;
    const float *output_scale;
    const float *fold_scale;  /* [E, N] where moq_linear_folds, else NULL */
    const float *input_scale; /* [E, P], equal within an expert */
    const float *pre_quant_scale;
    const float *bias;
} moq_moe_weight;

/* One call of prepared experts, already checked. On CUDA x and y are matrices [tokens, H] of
 * contiguous rows, and those of x, like the weights, begin at addresses that are multiples of 16.
 */
typedef struct {
    const moq_moe_spec *spec;
    int64_t tokens;      /* rows of x and y */
    const moq_tensor *x; /* [..., H], of pairs of codes [..., H / 2]; any strides on the CPU */
    const moq_tensor *x_scale; /* [..., moq_moe_x_scales], any strides, or NULL */
    const moq_tensor *y;       /* [..., H], contiguous rows */
    const moq_tensor *weights; /* float32 [..., top_k], any strides */
    const moq_tensor *ids;     /* int32 or int64 [..., top_k], any strides */
    const int32_t *expert_map; /* [global_experts], or NULL */
    bool weights_on_input;     /* top_k is 1 then */
    bool accumulate;
    moq_moe_weight w13, w2;
    moq_kernel_config config;
    void *stream;    /* CUDA: cudaStream_t, NULL for the legacy default stream */
    void *workspace; /* of the bytes that the kernel's row of the table asks for, or NULL */
} moq_moe_call;

#ifdef __cplusplus
}
#endif
#endif

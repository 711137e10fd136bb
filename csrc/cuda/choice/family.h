/* Conditions that the predicates of several families share.
 *
 * Each function returns true, or false after writing the reason: what the kernel needs, and what
 * the layer or the device has. They look at the description alone. */
#ifndef MOQ_CUDA_CHOICE_FAMILY_H
#define MOQ_CUDA_CHOICE_FAMILY_H

#include "cuda/choice/families.h"
#include "cuda/choice/search.h"

/* Rows of x that the NVFP4 kernels for prefill take. */
#define MOQ_NVFP4_PREFILL_TOKENS (1 << 24)

/* ---- devices ---- */

bool moq_is_on_cuda(const moq_linear_spec *spec, char *reason, size_t size);

/* A CUDA device of compute capability `least`, as 10 * major + minor, or later. */
bool moq_has_capability(const moq_linear_spec *spec, int least, char *reason, size_t size);

/* A device of compute capability 9.0: code for sm_90a runs on no other. */
bool moq_is_on_sm90(const moq_linear_spec *spec, char *reason, size_t size);

/* cuBLASLt was found. */
bool moq_has_cublaslt(const moq_linear_spec *spec, char *reason, size_t size);

/* ---- sizes ---- */

/* At most `most` tokens; m may be MOQ_ANY_TOKENS. */
bool moq_takes_tokens(int64_t m, int64_t most, char *reason, size_t size);

/* Fewer than 2^31 rows of the weight. */
bool moq_has_int_rows(const moq_linear_spec *spec, char *reason, size_t size);

/* A size, called `what` in the reason, that is a multiple of 16. */
bool moq_is_multiple_of_16(const char *what, int64_t size_of, char *reason, size_t size);

/* ---- layers ---- */

bool moq_is_fp8(const moq_linear_spec *spec, char *reason, size_t size);

/* FP8 weights with 16-bit outputs: FP8 tensor cores of Hopper keep about 14 bits of the sums of 128
 * columns, far finer than 16-bit outputs and coarser than float32 ones. */
bool moq_suits_fp8_cores(const moq_linear_spec *spec, char *reason, size_t size);

/* Packed NVFP4 weights, multiplied exactly with 16-bit activations. */
bool moq_suits_16_bits(const moq_linear_spec *spec, char *reason, size_t size);

/* Packed NVFP4 weights, multiplied as FP8 codes on compute capability 9.0. */
bool moq_suits_folding(const moq_linear_spec *spec, char *reason, size_t size);

/* NVFP4 weights and activations with 16-bit outputs, in sizes that block-scaled products take. */
bool moq_suits_fp4(const moq_linear_spec *spec, char *reason, size_t size);

/* MXFP8, int8 and int4 weights with 16-bit activations. */
bool moq_is_general(const moq_linear_spec *spec, char *reason, size_t size);

/* MXFP8, int8 and int4 weights on compute capability 9.0, with x as it is and scales a word for a
 * row and 128 columns. */
bool moq_suits_general_sm90(const moq_linear_spec *spec, char *reason, size_t size);

/* Groups of int4 weights, if it has any, of a multiple of so many columns. */
bool moq_has_groups(const moq_linear_spec *spec, int multiple, char *reason, size_t size);

/* ---- experts ---- */

bool moq_has_few_experts(const moq_moe_spec *spec, char *reason, size_t size);

/* Experts that are few enough, both of whose linears run on a kernel of linears. */
bool moq_runs_as_linears(const moq_linear_kernel *kernel, const moq_moe_spec *spec, char *reason,
                         size_t size);

#endif

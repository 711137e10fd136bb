/* Parts shared by the fuzz targets: reading a test case from bytes, checks that end the process, a
 * JSON reader that builds the trees the binding would, and tensors whose memory ends where they
 * end.
 *
 * A target is one file with LLVMFuzzerTestOneInput. It is linked with libFuzzer's main, or with
 * that of replay.c, which runs it over the files it is given. */
#ifndef MOQ_FUZZ_H
#define MOQ_FUZZ_H

#include "core/tensor.h"
#include "core/value.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the process with a message when `condition` does not hold. */
#define FUZZ_CHECK(condition, ...)                                                                 \
    do {                                                                                           \
        if (!(condition))                                                                          \
            fuzz_fail(__FILE__, __LINE__, #condition, __VA_ARGS__);                                \
    } while (0)

_Noreturn void fuzz_fail(const char *file, int line, const char *condition, const char *format, ...)
    MOQ_PRINTF(4, 5);

/* Checks that `err` is what `status` promises: its kind, a message, and a path where a document is
 * at fault. */
void fuzz_check_error(moq_status status, const moq_err *err);

/* ---- the bytes of a case; reading past the end gives zeros ---- */

typedef struct {
    const uint8_t *data;
    size_t size;
} fuzz_input;

uint64_t fuzz_bits(fuzz_input *in, int bytes);
/* low <= result <= high */
int64_t fuzz_range(fuzz_input *in, int64_t low, int64_t high);
bool fuzz_flag(fuzz_input *in);
float fuzz_float(fuzz_input *in);
/* Mostly a modest positive number, now and then any float. */
float fuzz_scale(fuzz_input *in);
/* Fills memory with what is left of the case, repeated with changes. */
void fuzz_fill(const fuzz_input *in, uint32_t salt, void *memory, size_t size);

/* ---- text ---- */

/* A copy of the bytes in which what is no UTF-8 is replaced, as the binding hands down nothing
 * else. The caller frees it. */
char *fuzz_utf8(const uint8_t *data, size_t size);
/* Takes the text before the next `separator` off *rest; false when nothing is left. */
bool fuzz_split(moq_text *rest, char separator, moq_text *out);
/* The document in `text`, or false when it is not JSON, is nested deeper than the binding takes, or
 * has a lone surrogate. Of a repeated key the last value counts. */
bool fuzz_json(moq_arena *arena, moq_text text, moq_value *out);

/* ---- tensors ---- */

/* A tensor in memory of its own, of just the bytes it covers, filled from the case. Strides are
 * drawn: row-major or with gaps, axes reversed, repeated or in another order. */
typedef struct {
    moq_tensor view;
    uint8_t *memory;
} fuzz_tensor;

fuzz_tensor fuzz_make(fuzz_input *in, moq_dtype dtype, int32_t ndim, const int64_t *shape,
                      bool strided);
/* A row-major one for a result, full of `poison`. */
fuzz_tensor fuzz_result(const moq_tensor *like, uint8_t poison);
void fuzz_free(fuzz_tensor *t);
/* Offset in elements of the i-th element in row-major order. */
int64_t fuzz_offset(const moq_tensor *t, int64_t i);
/* Element i as a number; pairs of fp4 count two elements a byte. */
float fuzz_element(const moq_tensor *t, int64_t i);

#endif

/* The one error style of the library.
 *
 * A function that can fail returns a moq_status and, when it is not MOQ_OK, has filled the error
 * record. The record keeps apart what a caller may have to tell apart: the kind, what is wrong, the
 * expert that has it, and the text. Only the binding joins them and makes a Python exception of
 * them, so everything below it runs without the GIL. The caller owns the record and need not clear
 * it before a call. */
#ifndef MOQ_CORE_STATUS_H
#define MOQ_CORE_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    MOQ_OK = 0,
    MOQ_ERR_VALUE,       /* ValueError: a value, shape or scale that cannot be right */
    MOQ_ERR_TYPE,        /* TypeError: an object or dtype of the wrong kind */
    MOQ_ERR_BUFFER,      /* BufferError: memory that cannot be used (device, layout, read-only) */
    MOQ_ERR_MEMORY,      /* MemoryError */
    MOQ_ERR_CONFIG,      /* moqext.ConfigError: a quantization config that cannot be understood */
    MOQ_ERR_UNSUPPORTED, /* moqext.UnsupportedQuantization: recognised, but not runnable here */
    MOQ_ERR_INTERRUPTED, /* the exception of a signal handler, which is set already */
    MOQ_ERR_INTERNAL     /* RuntimeError: a broken invariant of this library, or a driver failure */
} moq_status;

#define MOQ_EVERY_EXPERT (-1)
#define MOQ_NO_EXPERT    (-2)

#define MOQ_MESSAGE_SIZE 1024

typedef struct {
    moq_status kind;
    const char *subject; /* an argument, a tensor or a size, owned by the caller; "" for none */
    int64_t expert;      /* the number of one, MOQ_EVERY_EXPERT or MOQ_NO_EXPERT */
    bool subject_first;  /* "w13_weight: experts.3: ...", not "experts.3: weight: ..." */
    char text[MOQ_MESSAGE_SIZE];
    char path[256]; /* MOQ_ERR_CONFIG: JSON path of the field, e.g. "$.quantization.quant_algo" */
} moq_err;

#if defined(__GNUC__)
#define MOQ_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#define MOQ_PRINTF(fmt, first)
#endif

/* Fills *err (which may be NULL) and returns `kind`, so that a failure is one return statement. The
 * text says by itself what is wrong. */
moq_status moq_fail(moq_err *err, moq_status kind, const char *format, ...) MOQ_PRINTF(3, 4);

/* Fills *err with a text about `subject`, which outlives the record. */
moq_status moq_fail_of(moq_err *err, moq_status kind, const char *subject, const char *format, ...)
    MOQ_PRINTF(4, 5);

/* Fills *err for a configuration, with the JSON path of the offending field: MOQ_ERR_CONFIG. */
moq_status moq_fail_config(moq_err *err, const char *path, const char *format, ...)
    MOQ_PRINTF(3, 4);

/* Joins the record to the message that a user sees: "experts.3: weight_scale: expected ...". */
const char *moq_err_message(const moq_err *err, char message[MOQ_MESSAGE_SIZE]);

/* The number of the first `size` bytes of UTF-8 that are whole characters; `text` goes on behind
 * them. */
size_t moq_utf8_cut(const char *text, size_t size);
/* Ends a text in `size` bytes with three dots if it was to have `wanted` bytes and did not fit. */
void moq_end_cut(char *text, size_t size, size_t wanted);

/* Hands a failure up unchanged. */
#define MOQ_TRY(call)                                                                              \
    do {                                                                                           \
        moq_status moq_try_status_ = (call);                                                       \
        if (moq_try_status_ != MOQ_OK)                                                             \
            return moq_try_status_;                                                                \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif

/* Error records: see status.h. Messages longer than the record are cut, never overrun. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>

static void fill(moq_err *err, moq_status kind, const char *path, const char *format, va_list args)
    MOQ_PRINTF(4, 0);

static void fill(moq_err *err, moq_status kind, const char *path, const char *format,
                 va_list args) {
    if (err == NULL)
        return;
    err->kind = kind;
    vsnprintf(err->message, sizeof err->message, format, args);
    snprintf(err->path, sizeof err->path, "%s", path);
}

moq_status moq_fail(moq_err *err, moq_status kind, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fill(err, kind, "", format, args);
    va_end(args);
    return kind;
}

moq_status moq_fail_config(moq_err *err, const char *path, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fill(err, MOQ_ERR_CONFIG, path, format, args);
    va_end(args);
    return MOQ_ERR_CONFIG;
}

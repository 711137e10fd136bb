/* Error records: see status.h. Messages longer than the record are cut, never overrun, and end in
 * three dots. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

size_t moq_utf8_cut(const char *text, size_t size) {
    while (size > 0 && ((unsigned char)text[size] & 0xc0) == 0x80)
        size--;
    return size;
}

void moq_end_cut(char *text, size_t size, size_t wanted) {
    if (wanted >= size)
        memcpy(text + moq_utf8_cut(text, size - 4), "...", 4);
}

static void fill(moq_err *err, moq_status kind, const char *path, const char *format, va_list args)
    MOQ_PRINTF(4, 0);

static void fill(moq_err *err, moq_status kind, const char *path, const char *format,
                 va_list args) {
    if (err == NULL)
        return;
    err->kind = kind;
    int wanted = vsnprintf(err->message, sizeof err->message, format, args);
    moq_end_cut(err->message, sizeof err->message, wanted < 0 ? 0 : (size_t)wanted);
    wanted = snprintf(err->path, sizeof err->path, "%s", path);
    moq_end_cut(err->path, sizeof err->path, wanted < 0 ? 0 : (size_t)wanted);
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

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

/* Ends what snprintf wrote, of which it tells how long it would have been. */
static void end_written(char *text, size_t size, int wanted) {
    moq_end_cut(text, size, wanted < 0 ? 0 : (size_t)wanted);
}

static void fill(moq_err *err, moq_status kind, const char *subject, const char *path,
                 const char *format, va_list args) MOQ_PRINTF(5, 0);

static void fill(moq_err *err, moq_status kind, const char *subject, const char *path,
                 const char *format, va_list args) {
    if (err == NULL)
        return;
    err->kind = kind;
    err->subject = subject;
    err->expert = MOQ_NO_EXPERT;
    err->subject_first = false;
    end_written(err->text, sizeof err->text, vsnprintf(err->text, sizeof err->text, format, args));
    end_written(err->path, sizeof err->path, snprintf(err->path, sizeof err->path, "%s", path));
}

moq_status moq_fail(moq_err *err, moq_status kind, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fill(err, kind, "", "", format, args);
    va_end(args);
    return kind;
}

moq_status moq_fail_of(moq_err *err, moq_status kind, const char *subject, const char *format,
                       ...) {
    va_list args;
    va_start(args, format);
    fill(err, kind, subject, "", format, args);
    va_end(args);
    return kind;
}

moq_status moq_fail_config(moq_err *err, const char *path, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fill(err, MOQ_ERR_CONFIG, "", path, format, args);
    va_end(args);
    return MOQ_ERR_CONFIG;
}

const char *moq_err_message(const moq_err *err, char message[MOQ_MESSAGE_SIZE]) {
    char expert[40] = "";
    const char *colon = *err->subject ? ": " : "";
    if (err->expert == MOQ_EVERY_EXPERT)
        snprintf(expert, sizeof expert, "experts: ");
    else if (err->expert != MOQ_NO_EXPERT)
        snprintf(expert, sizeof expert, "experts.%lld: ", (long long)err->expert);
    bool first = err->subject_first;
    end_written(message, MOQ_MESSAGE_SIZE,
                snprintf(message, MOQ_MESSAGE_SIZE, "%s%s%s%s%s", first ? "" : expert, err->subject,
                         colon, first ? expert : "", err->text));
    return message;
}

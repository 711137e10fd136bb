/* The header of a .safetensors file as exporters write it, read entry by entry without a document.
 *
 * A header is a JSON object of tensors, and of free text under "__metadata__". What is read here is
 * read as any reader of JSON would; everything else is MOQ_HEADER_UNUSUAL, and judged by nobody
 * here: escapes in text, numbers that are no plain integers of 63 bits, keys that are unknown,
 * missing or there twice, what is no JSON. The caller has a slower reader for such headers, which
 * takes what JSON allows and says what is wrong with the rest. Whether two entries have one name,
 * and whether text is UTF-8, is the caller's to see, too. */
#ifndef MOQ_CORE_TENSOR_HEADER_H
#define MOQ_CORE_TENSOR_HEADER_H

#include "core/value.h"

#define MOQ_HEADER_RANK_MAX 32 /* what NumPy 1.26 can represent */

typedef struct {
    moq_text name;
    moq_text dtype; /* the format's spelling; of an entry of the metadata its text */
    int32_t ndim;
    int64_t shape[MOQ_HEADER_RANK_MAX];
    int64_t begin, end; /* bytes behind the header */
} moq_header_entry;

typedef enum {
    MOQ_HEADER_TENSOR,
    MOQ_HEADER_METADATA, /* name and dtype are set */
    MOQ_HEADER_END,
    MOQ_HEADER_UNUSUAL
} moq_header_step;

typedef struct {
    const char *at, *end;
    bool inside;   /* of the object, whose opening bracket was read */
    bool metadata; /* inside of the metadata */
    bool has_metadata;
    bool first; /* no entry of the object that is being read came yet */
} moq_header_reader;

void moq_header_open(moq_header_reader *reader, moq_text text);
/* The next entry; text in it points into the header. Nothing comes behind the last two steps. */
moq_header_step moq_header_next(moq_header_reader *reader, moq_header_entry *entry);

/* True if a tensor has as many bytes as its shape takes, all of them among the `room` behind the
 * header, and its extents that are not 0 multiply to less than 2^60.
 *
 * `bits` are those of an element, 0 where nobody knows them. */
bool moq_header_entry_fits(const moq_header_entry *entry, int64_t room, int64_t bits);

#endif

/* Headers of .safetensors files: what the reader of entries takes is what a reader of JSON finds.
 *
 * Case: a byte that tells how much room there is behind the header, then the header. */
#include "fuzz.h"

#include "core/tensor_header.h"

#include <stdlib.h>
#include <string.h>

#define SIZE_LIMIT ((size_t)1 << 12)

static void check_sizes(const moq_value *list, const int64_t *sizes, int32_t count) {
    FUZZ_CHECK(list && list->kind == MOQ_LIST && list->as.list.count == (size_t)count, "%d", count);
    for (int32_t i = 0; i < count; i++) {
        const moq_value *item = &list->as.list.items[i];
        FUZZ_CHECK(item->kind == MOQ_INT && item->as.integer == sizes[i], "%lld",
                   (long long)sizes[i]);
    }
}

static void check_text(const moq_value *value, moq_text text) {
    FUZZ_CHECK(value && value->kind == MOQ_STRING && moq_text_equal(value->as.text, text), "%.*s%s",
               MOQ_TEXT_ARGS(text));
}

static const moq_value *find_member(const moq_value *object, moq_text key) {
    FUZZ_CHECK(object && object->kind == MOQ_OBJECT, "no object");
    for (size_t i = 0; i < object->as.object.count; i++) {
        if (moq_text_equal(object->as.object.members[i].key, key))
            return &object->as.object.members[i].value;
    }
    return NULL;
}

static void check_tensor(const moq_value *document, const moq_header_entry *entry, int64_t room) {
    const moq_value *found = find_member(document, entry->name);
    FUZZ_CHECK(found && found->kind == MOQ_OBJECT && found->as.object.count == 3, "%.*s%s",
               MOQ_TEXT_ARGS(entry->name));
    const int64_t offsets[2] = {entry->begin, entry->end};
    check_text(moq_value_member(found, "dtype"), entry->dtype);
    check_sizes(moq_value_member(found, "shape"), entry->shape, entry->ndim);
    check_sizes(moq_value_member(found, "data_offsets"), offsets, 2);
    double elements = 1;
    for (int32_t i = 0; i < entry->ndim; i++)
        elements *= (double)entry->shape[i];
    if (moq_header_entry_fits(entry, room, 8))
        FUZZ_CHECK(entry->begin >= 0 && entry->begin <= entry->end && entry->end <= room &&
                       elements == (double)(entry->end - entry->begin),
                   "%.*s%s", MOQ_TEXT_ARGS(entry->name));
}

/* How many entries there are; -1 where the reader gives up. With a document each is compared. */
static int64_t read_all(moq_text text, const moq_value *document, int64_t room, int64_t *metadata) {
    moq_header_reader reader;
    moq_header_entry entry;
    int64_t tensors = 0;
    *metadata = 0;
    moq_header_open(&reader, text);
    for (;;) {
        switch (moq_header_next(&reader, &entry)) {
        case MOQ_HEADER_END:
            return tensors;
        case MOQ_HEADER_UNUSUAL:
            return -1;
        case MOQ_HEADER_TENSOR:
            tensors++;
            if (document)
                check_tensor(document, &entry, room);
            break;
        case MOQ_HEADER_METADATA:
            ++*metadata;
            if (document)
                check_text(find_member(moq_value_member(document, "__metadata__"), entry.name),
                           entry.dtype);
            break;
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0 || size > SIZE_LIMIT)
        return 0;
    const int64_t room = (int64_t)1 << (data[0] % 63);
    char *text = fuzz_utf8(data + 1, size - 1);
    /* In memory of its own size, so that a sanitizer sees a read beyond it. */
    char *exact = malloc(size - 1);
    if (size > 1)
        memcpy(exact, text, size - 1);
    const moq_text header = {exact, size - 1};
    moq_arena arena;
    moq_value document;
    int64_t metadata;
    moq_arena_setup(&arena, (size_t)1 << 24);
    const int64_t tensors = read_all(header, NULL, room, &metadata);
    if (tensors >= 0) {
        FUZZ_CHECK(fuzz_json(&arena, header, &document), "%.*s%s", MOQ_TEXT_ARGS(header));
        FUZZ_CHECK(document.kind == MOQ_OBJECT, "%d", document.kind);
        const moq_value *free_text = moq_value_member(&document, "__metadata__");
        const size_t distinct = document.as.object.count - (free_text ? 1 : 0);
        FUZZ_CHECK(distinct <= (size_t)tensors, "%zu of %lld", distinct, (long long)tensors);
        /* The document has the last one of names that are there twice. */
        if (distinct == (size_t)tensors &&
            (free_text ? free_text->as.object.count : 0) == (size_t)metadata)
            read_all(header, &document, room, &metadata);
    }
    moq_arena_release(&arena);
    free(exact);
    free(text);
    return 0;
}

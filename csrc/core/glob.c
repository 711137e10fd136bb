/* Glob compilation and matching: see glob.h. */
#include "core/glob.h"

#include <string.h>

typedef enum { OP_LITERAL, OP_STAR, OP_ANY, OP_SET } op_kind;

typedef struct {
    uint32_t low, high;
} code_range;

struct moq_glob_op {
    op_kind kind;
    bool negated;      /* OP_SET */
    moq_text literal;  /* OP_LITERAL */
    code_range *range; /* OP_SET */
    size_t ranges;
};

/* Bytes of the code point at `at`; a byte that starts none counts as one. */
static size_t code_size(moq_text text, size_t at) {
    unsigned char lead = (unsigned char)text.data[at];
    size_t size = lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    return size < text.size - at ? size : text.size - at;
}

static uint32_t code_at(moq_text text, size_t at) {
    size_t size = code_size(text, at);
    uint32_t code = (unsigned char)text.data[at];
    if (size > 1)
        code &= 0x7fu >> size;
    for (size_t i = 1; i < size; i++)
        code = code << 6 | ((unsigned char)text.data[at + i] & 0x3fu);
    return code;
}

/* Offset of the "]" that closes the set opened at `open`, or SIZE_MAX: a "]" right after "[" or
 * "[!" is a member. */
static size_t set_end(moq_text pattern, size_t open) {
    size_t at = open + 1;
    if (at < pattern.size && pattern.data[at] == '!')
        at++;
    if (at < pattern.size && pattern.data[at] == ']')
        at++;
    while (at < pattern.size && pattern.data[at] != ']')
        at++;
    return at < pattern.size ? at : SIZE_MAX;
}

static void add_range(moq_glob_op *op, uint32_t low, uint32_t high) {
    op->range[op->ranges++] = (code_range){low, high};
}

/* Fills `op` from the inside of a set. A "-" between two characters makes a range; a reversed range
 * vanishes with both its ends, and a "!" that thereby comes to stand first negates, as it does in
 * CPython, where the set is rewritten as text before it is read again. */
static void read_set(moq_text inside, moq_glob_op *op) {
    size_t at = 0;
    bool shifted = false;
    op->negated = inside.size > 0 && inside.data[0] == '!';
    if (op->negated)
        at = 1;
    while (at < inside.size) {
        uint32_t low = code_at(inside, at), high = low;
        at += code_size(inside, at);
        bool range = at + 1 < inside.size && inside.data[at] == '-';
        if (range) {
            high = code_at(inside, at + 1);
            at += 1 + code_size(inside, at + 1);
            if (low > high) {
                shifted = true;
                continue;
            }
        }
        if (shifted && !op->negated && op->ranges == 0 && low == '!') {
            op->negated = true;
            if (range) {
                add_range(op, '-', '-');
                add_range(op, high, high);
            }
        } else {
            add_range(op, low, high);
        }
    }
}

static bool set_matches(const moq_glob_op *op, uint32_t code) {
    for (size_t i = 0; i < op->ranges; i++) {
        if (code >= op->range[i].low && code <= op->range[i].high)
            return !op->negated;
    }
    return op->negated;
}

static bool is_special(char c, moq_glob_rules rules) {
    return c == '*' || (rules == MOQ_GLOB_FNMATCH && (c == '?' || c == '['));
}

size_t moq_glob_head(moq_text pattern, moq_glob_rules rules) {
    size_t at = 0;
    while (at < pattern.size && !is_special(pattern.data[at], rules))
        at++;
    return at;
}

/* One op for what stands at *at; a run of stars counts once. */
static moq_status compile_op(moq_arena *arena, moq_text pattern, moq_glob_rules rules, size_t *at,
                             moq_glob_op *op, moq_err *err) {
    const char c = pattern.data[*at];
    const size_t close = c == '[' && rules == MOQ_GLOB_FNMATCH ? set_end(pattern, *at) : SIZE_MAX;
    if (c == '*') {
        op->kind = OP_STAR;
        while (*at < pattern.size && pattern.data[*at] == '*')
            ++*at;
        return MOQ_OK;
    }
    if (c == '?' && rules == MOQ_GLOB_FNMATCH) {
        op->kind = OP_ANY;
        ++*at;
        return MOQ_OK;
    }
    if (close != SIZE_MAX) {
        moq_text inside = {pattern.data + *at + 1, close - *at - 1};
        void *ranges;
        op->kind = OP_SET;
        MOQ_TRY(moq_arena_take(arena, inside.size + 1, sizeof *op->range, &ranges, err));
        op->range = ranges;
        read_set(inside, op);
        *at = close + 1;
        return MOQ_OK;
    }
    const moq_text rest = {pattern.data + *at + 1, pattern.size - *at - 1};
    const size_t size = 1 + moq_glob_head(rest, rules); /* an unclosed "[" is itself */
    op->kind = OP_LITERAL;
    op->literal = (moq_text){pattern.data + *at, size};
    *at += size;
    return MOQ_OK;
}

moq_status moq_glob_compile(moq_arena *arena, moq_text pattern, moq_glob_rules rules, moq_glob *out,
                            moq_err *err) {
    size_t bound = 1;
    for (size_t i = 0; i < pattern.size; i++)
        bound += is_special(pattern.data[i], rules) ? 2 : 0;
    void *memory;
    MOQ_TRY(moq_arena_take(arena, bound, sizeof(moq_glob_op), &memory, err));
    moq_glob_op *ops = memory;
    size_t count = 0;
    for (size_t at = 0; at < pattern.size; count++)
        MOQ_TRY(compile_op(arena, pattern, rules, &at, &ops[count], err));
    *out = (moq_glob){ops, count};
    return MOQ_OK;
}

moq_text moq_glob_longest_literal(const moq_glob *glob) {
    moq_text longest = MOQ_TEXT("");
    for (size_t i = 0; i < glob->count; i++) {
        if (glob->ops[i].kind == OP_LITERAL && glob->ops[i].literal.size >= longest.size)
            longest = glob->ops[i].literal;
    }
    return longest;
}

/* Matches one op that is no star at *at and moves behind it. */
static bool step(const moq_glob_op *op, moq_text name, size_t *at) {
    if (op->kind == OP_LITERAL) {
        if (name.size - *at < op->literal.size ||
            memcmp(name.data + *at, op->literal.data, op->literal.size) != 0)
            return false;
        *at += op->literal.size;
        return true;
    }
    if (*at == name.size || (op->kind == OP_SET && !set_matches(op, code_at(name, *at))))
        return false;
    *at += code_size(name, *at);
    return true;
}

/* Only the last star met is ever widened: an earlier one could not reach further than it has. */
bool moq_glob_match(const moq_glob *glob, moq_text name) {
    size_t op = 0, at = 0, star_op = SIZE_MAX, star_at = 0;
    for (;;) {
        if (op < glob->count && glob->ops[op].kind == OP_STAR) {
            if (++op == glob->count)
                return true;
            star_op = op;
            star_at = at;
        } else if (op < glob->count && step(&glob->ops[op], name, &at)) {
            op++;
        } else if (op == glob->count && at == name.size) {
            return true;
        } else if (star_op == SIZE_MAX || star_at == name.size) {
            return false;
        } else {
            star_at += code_size(name, star_at);
            op = star_op;
            at = star_at;
        }
    }
}

/* Sizes rounded to multiples, and parts of one block of memory that begin at such. All values are
 * positive or zero, and far from the end of int64. */
#ifndef MOQ_CORE_SIZES_H
#define MOQ_CORE_SIZES_H

#include <stdint.h>

/* Parts of a workspace begin at multiples of this. */
#define MOQ_PART_ALIGNMENT 256

static inline int64_t divide_up(int64_t value, int64_t by) {
    return (value + by - 1) / by;
}

static inline int64_t round_up(int64_t value, int64_t step) {
    return divide_up(value, step) * step;
}

/* Reserves the next part of a workspace: returns where it begins and moves `*end` behind it. */
static inline int64_t take_part(int64_t *end, int64_t bytes) {
    int64_t at = *end;
    *end += round_up(bytes, MOQ_PART_ALIGNMENT);
    return at;
}

#endif

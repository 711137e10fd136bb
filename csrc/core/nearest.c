/* Near names: see nearest.h. The distance is that of optimal string alignment: insertions,
 * deletions, substitutions and swaps of neighbours. */
#include "core/nearest.h"

#include <stdio.h>
#include <string.h>

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

/* The letters, as capitals, and digits; returns how many, 0 where there is no room for them. */
static int simplify(moq_text text, char *out) {
    int size = 0;
    for (size_t i = 0; i < text.size; i++) {
        char c = text.data[i];
        bool lower = c >= 'a' && c <= 'z', upper = c >= 'A' && c <= 'Z';
        if (!lower && !upper && !is_digit(c))
            continue;
        if (size == MOQ_NEAREST_SIZE)
            return 0;
        out[size++] = lower ? (char)(c - 'a' + 'A') : c;
    }
    return size;
}

/* True if the digits of `part` are among those of `all`, in their order. */
static bool has_digits(const char *all, int all_size, const char *part, int part_size) {
    int at = 0;
    for (int i = 0; i < part_size; i++) {
        if (!is_digit(part[i]))
            continue;
        while (at < all_size && all[at] != part[i])
            at++;
        if (at++ == all_size)
            return false;
    }
    return true;
}

static int least(int a, int b, int c) {
    int smaller = a < b ? a : b;
    return smaller < c ? smaller : c;
}

static int find_distance(const char *a, int a_size, const char *b, int b_size) {
    int rows[3][MOQ_NEAREST_SIZE + 1];
    int *before = rows[0], *last = rows[1], *row = rows[2];
    for (int j = 0; j <= b_size; j++)
        last[j] = j;
    for (int i = 1; i <= a_size; i++) {
        row[0] = i;
        for (int j = 1; j <= b_size; j++) {
            bool same = a[i - 1] == b[j - 1];
            row[j] = least(row[j - 1] + 1, last[j] + 1, last[j - 1] + !same);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = least(row[j], before[j - 2] + 1, row[j]);
        }
        int *oldest = before;
        before = last;
        last = row;
        row = oldest;
    }
    return last[b_size];
}

void moq_nearest_begin(moq_nearest *nearest, moq_text typed) {
    nearest->size = simplify(typed, nearest->typed);
    nearest->distance = nearest->size < 6 ? 2 : 3; /* one more than is near */
    nearest->name = NULL;
}

void moq_nearest_try(moq_nearest *nearest, const char *spelling, const char *name) {
    char letters[MOQ_NEAREST_SIZE];
    const char *typed = nearest->typed;
    int size = simplify((moq_text){spelling, strlen(spelling)}, letters);
    if (nearest->size == 0 || size == 0 ||
        (!has_digits(letters, size, typed, nearest->size) &&
         !has_digits(typed, nearest->size, letters, size)))
        return;
    int distance = find_distance(typed, nearest->size, letters, size);
    if (distance < nearest->distance) {
        nearest->distance = distance;
        nearest->name = name;
    } else if (distance == nearest->distance && nearest->name != name) {
        nearest->name = NULL;
    }
}

const char *moq_nearest_hint(const moq_nearest *nearest, char *buffer, size_t size) {
    buffer[0] = '\0';
    if (nearest->name)
        snprintf(buffer, size, "; did you mean %s?", nearest->name);
    return buffer;
}

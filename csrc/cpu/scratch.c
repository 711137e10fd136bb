/* Memory a thread keeps: see scratch.h. It is freed when the thread ends. */
#include "cpu/scratch.h"

#include <pthread.h>
#include <stdlib.h>

/* Under AddressSanitizer every workspace is a new one that ends where it was asked to end. */
#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define MOQ_ASAN 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define MOQ_ASAN 1
#endif
#ifndef MOQ_ASAN
#define MOQ_ASAN 0
#endif

static pthread_key_t key;

static void free_all(moq_scratch_set *set) {
    for (int i = 0; i < MOQ_SCRATCH_COUNT; i++)
        free(set->memory[i]);
}

static void release(void *set) {
    free_all(set);
    free(set);
}

static void make_key(void) {
    pthread_key_create(&key, release);
}

static moq_scratch_set *own_set(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_key);
    moq_scratch_set *set = pthread_getspecific(key);
    if (!set) {
        set = calloc(1, sizeof *set);
        if (set && pthread_setspecific(key, set) != 0) {
            free(set);
            set = NULL;
        }
    }
    return set;
}

void *moq_take_scratch(moq_scratch purpose, size_t bytes) {
    moq_scratch_set *set = own_set();
    if (!set)
        return NULL;
    if (MOQ_ASAN || set->bytes[purpose] < bytes) {
        size_t unit = MOQ_ASAN ? 64 : 4096, rounded = (bytes + unit - 1) / unit * unit;
        free(set->memory[purpose]);
        set->memory[purpose] = aligned_alloc(64, rounded);
        set->bytes[purpose] = set->memory[purpose] ? rounded : 0;
    }
    return set->memory[purpose];
}

void moq_set_scratch_aside(moq_scratch_set *kept) {
    moq_scratch_set *set = own_set();
    *kept = (moq_scratch_set){0};
    if (set) {
        *kept = *set;
        *set = (moq_scratch_set){0};
    }
}

void moq_put_scratch_back(const moq_scratch_set *kept) {
    moq_scratch_set *set = own_set();
    if (set) {
        free_all(set);
        *set = *kept;
    }
}

/* Ending a long call: see interrupt.h. */
#define _GNU_SOURCE /* CLOCK_MONOTONIC_COARSE */
#include "cpu/interrupt.h"

#include "cpu/scratch.h"

#include <stddef.h>
#include <time.h>

/* Nanoseconds between two questions. Each may wait for a lock that another thread gives up within
 * five milliseconds, so it is not put more often than a person can tell. */
#define INTERVAL ((int64_t)50 * 1000 * 1000)

/* The call on whose behalf this thread works. */
static _Thread_local moq_watch *current;
static _Thread_local bool owned; /* it was opened by this thread, which puts the question */

void moq_watch_open(moq_watch *watch, moq_question ask, void *context) {
    watch->ask = ask;
    watch->context = context;
    watch->due = 0;
    atomic_init(&watch->stopped, false);
    watch->outer = current;
    watch->outer_owned = owned;
    current = watch;
    owned = true;
}

bool moq_watch_close(moq_watch *watch) {
    current = watch->outer;
    owned = watch->outer_owned;
    return atomic_load_explicit(&watch->stopped, memory_order_relaxed);
}

moq_watch *moq_watch_here(void) {
    return current;
}

void moq_watch_join(moq_watch *watch) {
    current = watch;
    owned = false;
}

/* A clock that takes a few nanoseconds to read and is right to a few milliseconds. */
static int64_t read_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* Calls of whatever answers have a watch of their own, or none, and workspaces of their own. */
static bool put_question(moq_watch *watch) {
    moq_scratch_set kept;
    current = NULL;
    moq_set_scratch_aside(&kept);
    bool stop = watch->ask(watch->context);
    moq_put_scratch_back(&kept);
    current = watch;
    owned = true;
    return stop;
}

bool moq_stop_asked(void) {
    moq_watch *watch = current;
    if (!watch)
        return false;
    if (atomic_load_explicit(&watch->stopped, memory_order_relaxed))
        return true;
    if (!owned)
        return false;
    int64_t now = read_clock();
    if (watch->due == 0)
        watch->due = now + INTERVAL;
    if (now < watch->due)
        return false;
    bool stop = put_question(watch);
    watch->due = read_clock() + INTERVAL;
    if (stop)
        atomic_store_explicit(&watch->stopped, true, memory_order_relaxed);
    return stop;
}

/* Threads of the CPU kernels: see threads.h. */
#include "cpu/threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static atomic_int wanted;  /* 0: the default */
static atomic_int started; /* a team was made in this process */
static atomic_int forked;  /* this is a child of a process that had one */

static void after_fork(void) {
    if (atomic_load(&started))
        atomic_store(&forked, 1);
}

static int default_threads(void) {
    const char *text = getenv("MOQEXT_NUM_THREADS");
    long count = text ? strtol(text, NULL, 10) : 0;
#ifdef _OPENMP
    if (count < 1)
        count = omp_get_max_threads() < omp_get_num_procs() ? omp_get_max_threads()
                                                            : omp_get_num_procs();
#endif
    return count < 1 ? 1 : count > MOQ_MAX_THREADS ? MOQ_MAX_THREADS : (int)count;
}

int moq_num_threads(void) {
    int count = atomic_load(&wanted);
    return atomic_load(&forked) ? 1 : count > 0 ? count : default_threads();
}

void moq_set_num_threads(int count) {
    atomic_store(&wanted, count);
}

#ifdef _OPENMP
static void register_fork_handler(void) {
    pthread_atfork(NULL, NULL, after_fork);
}

/* The team is always of the same size and members without work stay idle: libgomp ends the threads
 * that a smaller team leaves over and makes them anew for the next, 20 us each. */
static void run_team(int team, int64_t threads, int64_t grains, int64_t count, int64_t grain,
                     void (*work)(void *, int64_t, int64_t), void *context) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_fork_handler);
    atomic_store(&started, 1);
#pragma omp parallel num_threads(team)
    {
        int64_t members = omp_get_num_threads(), id = omp_get_thread_num();
        int64_t active = members < threads ? members : threads;
        int64_t begin = grains * id / active * grain, end = grains * (id + 1) / active * grain;
        if (id < active && begin < end)
            work(context, begin, end < count ? end : count);
    }
}
#endif

void moq_parallel_for(int64_t count, int64_t grain,
                      void (*work)(void *context, int64_t begin, int64_t end), void *context) {
    int64_t grains = (count + grain - 1) / grain;
    int team = moq_num_threads();
    int64_t threads = team < grains ? team : grains;
    if (count <= 0)
        return;
#ifdef _OPENMP
    if (threads > 1) {
        run_team(team, threads, grains, count, grain, work, context);
        return;
    }
#else
    (void)threads;
    (void)after_fork;
    (void)started;
#endif
    work(context, 0, count);
}

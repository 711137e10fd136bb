/* Threads of the CPU kernels: see threads.h. */
#include "cpu/threads.h"

#include "cpu/float_mode.h"
#include "cpu/interrupt.h"
#include "cpu/openmp.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

static atomic_int wanted;   /* 0: the default */
static atomic_bool at_fork; /* a runtime was loaded when the process last forked */
static atomic_bool forked;  /* this is a child of a process that had one */

/* ---- forks ---- */

/* Asked in the parent: in the child the loader's lock may be held by a thread that is no more.
 * Which thread has a team, and whose work it did, cannot be asked. */
static void before_fork(void) {
    atomic_store(&at_fork, moq_openmp_is_loaded());
}

static void after_fork(void) {
    if (atomic_load(&at_fork))
        atomic_store(&forked, true);
}

/* When moqext is loaded, since a framework may have teams before moqext has. */
__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(before_fork, NULL, after_fork);
}

/* ---- the number ---- */

bool moq_parse_thread_count(const char *text, int *count) {
    int value = 0, digits = 0;
    for (; text[digits] >= '0' && text[digits] <= '9' && value <= MOQ_MAX_THREADS; digits++)
        value = value * 10 + (text[digits] - '0');
    *count = value;
    return digits > 0 && text[digits] == '\0' && value <= MOQ_MAX_THREADS;
}

static int default_threads(const moq_openmp *omp) {
    const char *text = getenv("MOQEXT_NUM_THREADS");
    int count;
    if (!text || !moq_parse_thread_count(text, &count) || count == 0) {
        int most = omp->max_threads(), processors = omp->num_procs();
        count = most < processors ? most : processors;
    }
    return count < 1 ? 1 : count > MOQ_MAX_THREADS ? MOQ_MAX_THREADS : count;
}

int moq_num_threads(void) {
    int count = atomic_load(&wanted);
    if (count == 1 || atomic_load(&forked)) /* without a look for a runtime, which may load one */
        return 1;
    const moq_openmp *omp = moq_find_openmp(NULL);
    if (!omp || omp->in_parallel())
        return 1;
    return count > 0 ? count : default_threads(omp);
}

void moq_set_num_threads(int count) {
    atomic_store(&wanted, count);
}

/* ---- the team ---- */

typedef struct {
    void (*work)(void *context, int64_t begin, int64_t end);
    void *context;
    int64_t count, grain, grains;
    const moq_openmp *omp;
    moq_watch *watch; /* of the calling thread */
} region;

static void run_member(void *data) {
    const region *r = data;
    int64_t members = r->omp->num_threads(), id = r->omp->thread_num();
    int64_t active = members < r->grains ? members : r->grains;
    if (id >= active)
        return;
    int64_t begin = r->grains * id / active * r->grain;
    int64_t end = r->grains * (id + 1) / active * r->grain;
    unsigned flushes = moq_enter_float_mode();
    if (id > 0) /* the calling thread is under it already */
        moq_watch_join(r->watch);
    r->work(r->context, begin, end < r->count ? end : r->count);
    if (id > 0)
        moq_watch_join(NULL);
    moq_leave_float_mode(flushes);
}

/* The team is always of the same size and members without work stay idle: libgomp ends the threads
 * that a smaller team leaves over and makes them anew for the next, 20 us each. */
void moq_parallel_for(int64_t count, int64_t grain,
                      void (*work)(void *context, int64_t begin, int64_t end), void *context) {
    int64_t grains = (count + grain - 1) / grain;
    if (count <= 0 || moq_stop_asked())
        return;
    int team = grains > 1 ? moq_num_threads() : 1;
    if (team == 1) {
        unsigned flushes = moq_enter_float_mode();
        work(context, 0, count);
        moq_leave_float_mode(flushes);
        return;
    }
    region r = {work, context, count, grain, grains, moq_find_openmp(NULL), moq_watch_here()};
    r.omp->parallel(run_member, &r, (unsigned)team, 0);
}

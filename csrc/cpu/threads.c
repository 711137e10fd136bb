/* Threads of the CPU kernels: see threads.h. */
#define _POSIX_C_SOURCE 199309L /* CLOCK_MONOTONIC */
#include "cpu/threads.h"

#include "core/sizes.h"
#include "cpu/float_mode.h"
#include "cpu/interrupt.h"
#include "cpu/openmp.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

/* Pieces of a member's share, where the caller does not say how long they are: a member that is
 * held up keeps one from the others. */
#define PIECES_OF_SHARE 4

static atomic_int wanted;   /* 0: the default */
static atomic_bool at_fork; /* a runtime was loaded when the process last forked */
static atomic_bool forked;  /* this is a child of a process that had one */

/* ---- forks ---- */

/* The parent is asked, since in the child the loader's lock may be held by a thread that is no
 * more. Which thread has a team, and whose work it did, cannot be asked. */
static void before_fork(void) {
    atomic_store(&at_fork, moq_openmp_is_loaded());
}

static void after_fork(void) {
    if (atomic_load(&at_fork))
        atomic_store(&forked, true);
}

/* Watches forks from when moqext is loaded: a framework may have teams before moqext has. */
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

/* ---- what teams are worth ---- */

/* A team is given up for a while when it was slower than its caller alone would have been: where
 * other processes hold the processors, a member that is not running holds up the end of the region
 * for milliseconds, whether it has work or not, and no program can leave an OpenMP region before.
 * Each calling thread keeps an account of what its teams won and lost, in nanoseconds. */
typedef struct {
    int64_t credit;
    int64_t rest_until; /* on the clock of time_of_day */
} account;

static _Thread_local account own_account;

/* Credit beyond this is forgotten: less than a time slice of the scheduler's, so that one loss of a
 * slice among large gains does not count, and the second does. */
#define MOST_CREDIT ((int64_t)2 * 1000 * 1000)
/* Rest for a loss, so that finding out again costs 5 % of the time; and how long at most, since the
 * machine may be free again. */
#define REST_FOR_LOSS 20
#define MOST_TAIL     ((int64_t)2 * 1000 * 1000 * 1000)

static int64_t read_clock(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static int64_t time_of_day(void) {
    return read_clock(CLOCK_MONOTONIC);
}

/* The processor time of this thread: the time in which it could not run is no measure of its work.
 * Some 0.2 microseconds. */
static int64_t time_of_thread(void) {
    return read_clock(CLOCK_THREAD_CPUTIME_ID);
}

/* Enters a region that took so many nanoseconds, and would have taken the caller `alone`, which is
 * what its members needed together. */
static void settle(account *a, int64_t now, int64_t took, int64_t alone) {
    int64_t credit = a->credit + alone - took;
    if (credit >= 0) {
        a->credit = credit < MOST_CREDIT ? credit : MOST_CREDIT;
        return;
    }
    int64_t most = MOST_TAIL / REST_FOR_LOSS, lost = -credit < most ? -credit : most;
    a->credit = 0;
    a->rest_until = now + lost * REST_FOR_LOSS;
}

/* ---- the team ---- */

/* Every member has a lane of its own, which is the same part of the work in every call, and claims
 * it piece by piece; then it claims what others have not come to. */
typedef struct {
    _Alignas(64) _Atomic int64_t next; /* the first that nobody has claimed */
    int64_t end;
} lane;

#define MAX_LANES 64

typedef struct {
    moq_work work;
    void *context;
    int64_t piece;
    int64_t lanes;
    lane *lane;
    const moq_openmp *omp;
    moq_watch *watch;       /* of the calling thread */
    _Atomic int64_t worked; /* processor's time that members had for pieces */
} region;

/* Claims a piece of a lane: its first, or -1. */
static int64_t acquire(lane *l, int64_t piece) {
    if (atomic_load_explicit(&l->next, memory_order_relaxed) >= l->end)
        return -1;
    int64_t begin = atomic_fetch_add_explicit(&l->next, piece, memory_order_relaxed);
    return begin < l->end ? begin : -1;
}

/* Does pieces until none is left, from lane `home` on. */
static void do_pieces(const region *r, int64_t home) {
    for (int64_t i = 0; i < r->lanes; i++) {
        lane *l = &r->lane[(home + i) % r->lanes];
        for (int64_t begin; (begin = acquire(l, r->piece)) >= 0;) {
            r->work(r->context, begin, l->end - begin < r->piece ? l->end : begin + r->piece);
            if (moq_stop_asked())
                return;
        }
    }
}

static void run_member(void *data) {
    region *r = data;
    int64_t members = r->omp->num_threads(), id = r->omp->thread_num();
    int64_t home = members > r->lanes && r->lanes == MAX_LANES ? id * r->lanes / members : id;
    if (home >= r->lanes)
        return;
    int64_t begin = time_of_thread();
    unsigned flushes = moq_enter_float_mode();
    if (id > 0) /* the calling thread is under it already */
        moq_watch_join(r->watch);
    do_pieces(r, home);
    if (id > 0)
        moq_watch_join(NULL);
    moq_leave_float_mode(flushes);
    atomic_fetch_add_explicit(&r->worked, time_of_thread() - begin, memory_order_relaxed);
}

/* The team is always of the same size and members without work stay idle: libgomp ends the threads
 * that a smaller team leaves over and makes them anew for the next, 20 us each. */
static void run_team(const moq_shares *s, moq_work work, void *context, int team) {
    lane lanes[MAX_LANES];
    int64_t grains = divide_up(s->count, s->grain);
    int64_t count = team < grains ? team : grains;
    count = count < MAX_LANES ? count : MAX_LANES;
    for (int64_t i = 0; i < count; i++) {
        int64_t end = grains * (i + 1) / count * s->grain;
        atomic_init(&lanes[i].next, grains * i / count * s->grain);
        lanes[i].end = end < s->count ? end : s->count;
    }
    int64_t piece = s->piece > 0 ? s->piece : divide_up(grains, count * PIECES_OF_SHARE) * s->grain;
    region r = {.work = work,
                .context = context,
                .piece = piece,
                .lanes = count,
                .lane = lanes,
                .omp = moq_find_openmp(NULL),
                .watch = moq_watch_here()};
    int64_t begin = time_of_day();
    r.omp->parallel(run_member, &r, (unsigned)team, 0);
    int64_t now = time_of_day();
    if (!moq_stop_asked())
        settle(&own_account, now, now - begin,
               atomic_load_explicit(&r.worked, memory_order_relaxed));
}

static bool is_resting(account *a) {
    if (a->rest_until == 0)
        return false;
    if (time_of_day() < a->rest_until)
        return true;
    a->rest_until = 0;
    return false;
}

static int team_for(const moq_shares *s) {
    bool small = s->count <= s->grain || s->nanoseconds < MOQ_TEAM_WORTH;
    return small || is_resting(&own_account) ? 1 : moq_num_threads();
}

void moq_parallel_for(const moq_shares *shares, moq_work work, void *context) {
    if (shares->count <= 0 || moq_stop_asked())
        return;
    int team = team_for(shares);
    if (team > 1) {
        run_team(shares, work, context, team);
        return;
    }
    unsigned flushes = moq_enter_float_mode();
    work(context, 0, shares->count);
    moq_leave_float_mode(flushes);
}

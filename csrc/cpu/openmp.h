/* The OpenMP runtime of the process, found when it is first asked for.
 *
 * A runtime keeps a team of threads for every thread that calls it, and they spin for some
 * milliseconds after each region. Two runtimes in one process keep two teams, which take the
 * processors from each other. So moqext is linked with none: it uses the one that is loaded
 * already, a framework's, be it GCC's libgomp under whatever name, LLVM's libomp or Intel's
 * libiomp5, all of which have the functions that GCC's `#pragma omp parallel` calls. Of several it
 * takes the one loaded first; where there is none it opens the system's. It stays with its choice.
 */
#ifndef MOQ_CPU_OPENMP_H
#define MOQ_CPU_OPENMP_H

#include <stdbool.h>

typedef struct {
    /* member(data) on each thread of a team of `threads`, the caller among them; flags are 0. */
    void (*parallel)(void (*member)(void *), void *data, unsigned threads, unsigned flags);
    int (*num_threads)(void); /* of the team, asked by a member */
    int (*thread_num)(void);  /* the member's number in its team */
    int (*in_parallel)(void); /* whether the caller is a member of a team */
    int (*max_threads)(void); /* of the caller's next team */
    int (*num_procs)(void);   /* processors that the caller may use */
    const char *path;         /* of the library */
} moq_openmp;

/* The runtime, or null, with the reason in *reason, a text that lives as long as the process.
 * `reason` may be null. */
const moq_openmp *moq_find_openmp(const char **reason);

/* True if a runtime is loaded, moqext's choice or not. Chooses none. */
bool moq_openmp_is_loaded(void);

#endif

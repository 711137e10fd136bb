/* The OpenMP runtime of the process: see openmp.h. */
#define _GNU_SOURCE /* dl_iterate_phdr, dladdr */
#include "cpu/openmp.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Names of runtimes begin so, whatever a wheel's builder has added: libgomp-a34b3233.so.1. */
static const char *const NAMES[] = {"libgomp", "libomp", "libiomp"};
/* The names of runtimes on systems, the one that most frameworks ask for first. */
static const char *const SYSTEM[] = {"libgomp.so.1", "libomp.so.5", "libiomp5.so"};

static moq_openmp chosen;
static char why_not[256];

/* ---- what is loaded ---- */

typedef struct {
    int skip;        /* so many runtimes before the one that is looked for */
    char path[4096]; /* PATH_MAX of Linux */
} search;

static bool is_runtime(const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    for (size_t i = 0; i < COUNT(NAMES); i++)
        if (strncmp(name, NAMES[i], strlen(NAMES[i])) == 0)
            return true;
    return false;
}

/* The loader's lock is held here, so the path is copied and the library opened later. */
static int visit(struct dl_phdr_info *object, size_t size, void *data) {
    search *s = data;
    (void)size;
    if (!is_runtime(object->dlpi_name) || s->skip-- > 0)
        return 0;
    return snprintf(s->path, sizeof s->path, "%s", object->dlpi_name) < (int)sizeof s->path;
}

bool moq_openmp_is_loaded(void) {
    search s = {0};
    return dl_iterate_phdr(visit, &s) != 0;
}

/* ---- the choice ---- */

/* Takes the functions from an open library; false when it is no OpenMP runtime after all, as
 * LLVM's libomptarget is not. */
static bool take(void *library) {
    const struct {
        const char *name;
        void *target; /* POSIX has dlsym's result stored in a function pointer this way */
    } functions[] = {
        {"GOMP_parallel", &chosen.parallel},          {"omp_get_num_threads", &chosen.num_threads},
        {"omp_get_thread_num", &chosen.thread_num},   {"omp_in_parallel", &chosen.in_parallel},
        {"omp_get_max_threads", &chosen.max_threads}, {"omp_get_num_procs", &chosen.num_procs},
    };
    for (size_t i = 0; i < COUNT(functions); i++) {
        void *address = dlsym(library, functions[i].name);
        if (!address)
            return false;
        memcpy(functions[i].target, &address, sizeof address);
    }
    Dl_info info;
    void *parallel = dlsym(library, functions[0].name);
    chosen.path = dladdr(parallel, &info) ? info.dli_fname : "";
    return true;
}

/* The library stays open: its threads never end. */
static bool open_runtime(const char *path, int how) {
    void *library = dlopen(path, how | RTLD_LAZY | RTLD_LOCAL);
    if (library && take(library))
        return true;
    if (library)
        dlclose(library);
    return false;
}

static void choose(void) {
    search s = {0};
    for (int i = 0; s.skip = i, dl_iterate_phdr(visit, &s) != 0; i++)
        if (open_runtime(s.path, RTLD_NOLOAD))
            return;
    for (size_t i = 0; i < COUNT(SYSTEM); i++) {
        if (open_runtime(SYSTEM[i], 0))
            return;
        const char *error = dlerror();
        if (i == 0) /* who has none installs this one */
            snprintf(why_not, sizeof why_not, "no OpenMP runtime: %s", error ? error : SYSTEM[i]);
    }
}

const moq_openmp *moq_find_openmp(const char **reason) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose);
    if (reason)
        *reason = chosen.path ? NULL : why_not;
    return chosen.path ? &chosen : NULL;
}

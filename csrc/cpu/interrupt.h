/* Ending a long call from outside, as Ctrl-C does.
 *
 * Who starts a call opens a watch in the thread that runs it. The kernels ask moq_stops() between
 * pieces of their work. The thread of the watch then calls the watch's own question some twenty
 * times a second; the threads of its team only look whether the answer was yes. After a yes every
 * kernel returns as soon as it can, moq_parallel_for does nothing any more, and what was to be
 * written is undefined. Without a watch nothing is ever stopped.
 *
 * A call shorter than the first interval never puts the question, and reads a coarse clock once for
 * each piece of its work. */
#ifndef MOQ_CPU_INTERRUPT_H
#define MOQ_CPU_INTERRUPT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* The question: whether the call is to end. It may run whatever it likes, other calls included. */
typedef bool (*moq_question)(void *context);

typedef struct moq_watch {
    moq_question ask;
    void *context;
    int64_t due; /* when the question is next put, in nanoseconds; 0: no clock was read yet */
    atomic_bool stopped;
    struct moq_watch *outer; /* the one that was open in this thread before */
    bool outer_owned;
} moq_watch;

/* Watches the calls of this thread until moq_watch_close. */
void moq_watch_open(moq_watch *watch, moq_question ask, void *context);
/* True if the call was stopped. */
bool moq_watch_close(moq_watch *watch);

/* The watch this thread works under, or NULL. */
moq_watch *moq_watch_here(void);
/* Works under the watch of another thread, NULL for none, until told otherwise. */
void moq_watch_join(moq_watch *watch);

/* True if the call this thread works for is to end; asks when it is time. */
bool moq_stop_asked(void);

/* Work since moq_stop_asked was last asked. Starts as {0}. */
typedef struct {
    int64_t done;
} moq_pace;

/* Values, or products of a matrix, between two looks at the clock: below ten milliseconds of the
 * slowest kernel, and so much that looking costs nothing. */
#define MOQ_PACE ((int64_t)1 << 22)

/* True if the call is to end, asked after each `work` values or products; true: return. */
static inline bool moq_stops(moq_pace *pace, int64_t work) {
    pace->done += work;
    if (__builtin_expect(pace->done < MOQ_PACE, 1))
        return false;
    pace->done = 0;
    return moq_stop_asked();
}

#endif

/* Threads of the CPU kernels: one OpenMP team a call, or the calling thread alone where the work is
 * too little for a team, or teams have just been slower than that.
 *
 * The number is, in this order: what moq_set_num_threads said, MOQEXT_NUM_THREADS, what the OpenMP
 * runtime gives the calling thread (OMP_NUM_THREADS, what a framework has set, the processors), but
 * no more than the processors it may use. The calling thread is one of them. The others are the
 * runtime's, which keeps them for the calling thread and for whoever uses the same runtime, a
 * framework too: see openmp.h. They spin for some milliseconds after a call before they sleep;
 * OMP_WAIT_POLICY=passive lets them sleep at once.
 *
 * A call inside a parallel region of the same runtime has one thread. Calls from several threads
 * have a team each, as OpenMP has it; taking turns was tried and is slower (docs/lab/cpu.md). After
 * a fork the child runs on one thread if the process had an OpenMP runtime: libgomp's team does not
 * survive it, and the child would wait for it for ever. */
#ifndef MOQ_CPU_THREADS_H
#define MOQ_CPU_THREADS_H

#include <stdbool.h>
#include <stdint.h>

#define MOQ_MAX_THREADS 1024

/* A value of MOQEXT_NUM_THREADS: 0 to MOQ_MAX_THREADS in decimal digits, 0 for the default. False
 * for any other text. */
bool moq_parse_thread_count(const char *text, int *count);

/* Threads a large enough call of this thread uses, at least 1. */
int moq_num_threads(void);
/* 1 to MOQ_MAX_THREADS; 0 goes back to the default. */
void moq_set_num_threads(int count);

/* Nanoseconds of one thread's work below which the calling thread does it alone. Beginning and
 * ending a region of two threads takes 0.5 microseconds where the other one spins and 30 to 40
 * where it sleeps (libgomp, a Xeon with AMX as a virtual machine), milliseconds where it cannot
 * run. */
#define MOQ_TEAM_WORTH 3e4

/* The sharing of work. */
typedef struct {
    int64_t count;
    int64_t grain;      /* ranges begin at multiples of it: the least that is worth a member */
    int64_t piece;      /* what is claimed at once, a multiple of grain; 0: a part of a share */
    double nanoseconds; /* one thread's time for all of it, roughly */
} moq_shares;

/* Does a range of the work; called many times by one thread. */
typedef void (*moq_work)(void *context, int64_t begin, int64_t end);

/* Calls work(context, begin, end) for disjoint ranges that cover [0, count). Members of the team
 * claim them, so which thread runs which range changes from call to call; results do not depend on
 * it where ranges are independent. Does nothing in a call that is to end (interrupt.h); work that
 * takes long asks for itself. */
void moq_parallel_for(const moq_shares *shares, moq_work work, void *context);

#endif

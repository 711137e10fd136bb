/* Threads of the CPU kernels: one OpenMP team a call, as many threads as the work is worth.
 *
 * The number is, in this order: what moq_set_num_threads said, MOQEXT_NUM_THREADS, what the OpenMP
 * runtime gives the calling thread (OMP_NUM_THREADS, what a framework has set, the processors), but
 * no more than the processors it may use. The calling thread is one of them. The others are the
 * runtime's, which keeps them for the calling thread and for whoever uses the same runtime, a
 * framework too: see openmp.h. They spin for some milliseconds after a call before they sleep;
 * OMP_WAIT_POLICY=passive lets them sleep at once.
 *
 * A call inside a parallel region of the same runtime has one thread. Calls from several threads
 * have a team each, as OpenMP has it; taking turns was tried and is slower (docs/lab.md). After a
 * fork the child runs on one thread if the process had an OpenMP runtime: libgomp's team does not
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

/* Calls work(context, begin, end) for disjoint ranges that cover [0, count), each a multiple of
 * `grain` long except the last, on as many threads as there are grains at most. Which thread runs
 * which range does not matter to a caller whose ranges are independent, so results do not depend on
 * the number of threads. Does nothing in a call that is to end (interrupt.h); work that takes long
 * asks for itself. */
void moq_parallel_for(int64_t count, int64_t grain,
                      void (*work)(void *context, int64_t begin, int64_t end), void *context);

#endif

/* Threads of the CPU kernels: one OpenMP team a call, as many threads as the work is worth.
 *
 * The number is, in this order: what moq_set_num_threads said, MOQEXT_NUM_THREADS, OMP_NUM_THREADS,
 * the processors this process may use. The calling thread is one of them. The others spin for some
 * milliseconds after a call before they sleep, as the OpenMP runtime has it: what a framework runs
 * on other threads right after a call competes with them, and the reverse. OMP_WAIT_POLICY=passive
 * lets them sleep at once. After a fork the child runs on one thread: OpenMP's team does not
 * survive it. */
#ifndef MOQ_CPU_THREADS_H
#define MOQ_CPU_THREADS_H

#include <stdint.h>

#define MOQ_MAX_THREADS 1024

/* Threads a large enough call uses, at least 1. */
int moq_num_threads(void);
/* 1 to MOQ_MAX_THREADS; 0 goes back to the default. */
void moq_set_num_threads(int count);

/* Calls work(context, begin, end) for disjoint ranges that cover [0, count), each a multiple of
 * `grain` long except the last, on as many threads as there are grains at most. Which thread runs
 * which range does not matter to a caller whose ranges are independent, so results do not depend on
 * the number of threads. */
void moq_parallel_for(int64_t count, int64_t grain,
                      void (*work)(void *context, int64_t begin, int64_t end), void *context);

#endif

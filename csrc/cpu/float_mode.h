/* Subnormal numbers as IEEE 754 has them, whatever mode the caller's thread is in.
 *
 * Frameworks let their users set the processor's modes that take subnormal numbers for zero, as
 * operands and as results (torch.set_flush_denormal). Codes must not depend on that: a subnormal
 * scale would be a division by zero. The modes belong to a thread, and threads that are started in
 * them inherit them. Reading them takes a few cycles; they are written where they are set. */
#ifndef MOQ_CPU_FLOAT_MODE_H
#define MOQ_CPU_FLOAT_MODE_H

#if defined(__x86_64__)
#include <xmmintrin.h>

#define MOQ_FLUSHES 0x8040u /* of MXCSR: flush to zero, and denormals are zeros */

/* Ends them, and returns what moq_leave_float_mode() restores. */
static inline unsigned moq_enter_float_mode(void) {
    unsigned mode = _mm_getcsr();
    if (mode & MOQ_FLUSHES)
        _mm_setcsr(mode & ~MOQ_FLUSHES);
    return mode & MOQ_FLUSHES;
}

static inline void moq_leave_float_mode(unsigned flushes) {
    if (flushes)
        _mm_setcsr(_mm_getcsr() | flushes);
}

#else /* where such modes are not known they stay as they are */
static inline unsigned moq_enter_float_mode(void) {
    return 0;
}

static inline void moq_leave_float_mode(unsigned flushes) {
    (void)flushes;
}
#endif

#endif

/* The vector extensions of the CPU this runs on. */
#ifndef MOQ_CPU_ISA_H
#define MOQ_CPU_ISA_H

/* Name of the i-th extension that is both known here and supported by CPU and operating system, in
 * ascending order of age; NULL past the last. */
const char *moq_cpu_isa_name(int i);

#endif

/* Invariants of the library: what holds whatever a caller passes, since it was checked before or
 * follows from the code. Builds with sanitizers check them (MOQ_CHECKED, which setup.py defines for
 * MOQEXT_SANITIZE=1) and end the process with one line where one is broken; in other builds a check
 * is no code. */
#ifndef MOQ_CORE_INVARIANT_H
#define MOQ_CORE_INVARIANT_H

#ifdef __cplusplus
extern "C" {
#endif

#ifdef MOQ_CHECKED
/* Says on stderr which invariant of which line is broken, and aborts. */
void moq_break(const char *invariant, const char *file, int line);

#define MOQ_ASSERT(invariant) ((invariant) ? (void)0 : moq_break(#invariant, __FILE__, __LINE__))
#else
#define MOQ_ASSERT(invariant) ((void)sizeof(invariant)) /* not evaluated; its names are used */
#endif

#ifdef __cplusplus
}
#endif
#endif

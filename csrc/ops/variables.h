/* The variables of the environment that change what runs, and what is wrong with those that are
 * set.
 *
 * What reads one ignores a value that means nothing; here that is found out, by the same functions,
 * so that somebody can tell. */
#ifndef MOQ_OPS_VARIABLES_H
#define MOQ_OPS_VARIABLES_H

/* Calls report(context, text) for every variable whose value means nothing, and for every other
 * name that begins like one. MOQEXT_KERNEL is not among them: a layer cannot be made with a wrong
 * one (moq_linear_make_plan). */
void moq_check_variables(void (*report)(void *context, const char *text), void *context);

#endif

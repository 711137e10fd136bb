/* Names of modules that mean more than themselves, one table each: prefixes that a file and its
 * reader need not share, linears that engines fuse, and experts. The Python package reads the
 * tables through `_C.names()`. */
#ifndef MOQ_CORE_NAMES_H
#define MOQ_CORE_NAMES_H

#include "core/value.h"

enum { MOQ_FUSED_PARTS_MAX = 3, MOQ_FUSED_NAMES_MAX = 2 };

/* Linears of one parent that read one input, which engines stack along their rows. */
typedef struct {
    size_t count;
    moq_text part[MOQ_FUSED_PARTS_MAX];
    moq_text
        name[MOQ_FUSED_NAMES_MAX]; /* what engines call them together; none, or empty ones last */
} moq_fused_group;

/* A projection of an expert: the last component of its name. */
typedef struct {
    moq_text name;
    const char *role; /* "gate_up", "gate", "up" or "down" */
    bool stacks;      /* also the name of a tensor that holds the projection of all experts */
} moq_expert_projection;

/* The tables; an entry with an empty first text ends each. */
const moq_text *moq_name_prefixes(void);
const moq_fused_group *moq_fused_groups(void);
const moq_expert_projection *moq_expert_projections(void);

/* The name without the first of the prefixes. */
moq_text moq_name_body(moq_text name);

/* Components a fused last component stands for (qkv_proj and the like); *count is 0 for others. */
const moq_text *moq_fused_parts(moq_text component, size_t *count);

/* The end of an expert container's component, and the beginning of the component of shared experts,
 * which are ordinary linears. */
#define MOQ_EXPERTS_TAIL        "experts"
#define MOQ_SHARED_EXPERTS_HEAD "shared"
/* The container whose stacked projections are named like linears, without "experts". */
#define MOQ_MOE_CONTAINER "moe"

/* True if the module stands for all experts of a layer, by its last component: `experts`, with
 * lower-case letters and underscores before it but not `shared`, or `moe`. */
bool moq_name_is_experts(moq_text name);
/* The expert container that `name` lies in, empty for none: the first one, as an expert holds no
 * experts. In `moe` lie its stacked projections alone; it holds a router, too. */
moq_text moq_name_experts_above(moq_text name);

#endif

/* Resolution: from a configuration to the algorithm of one module.
 *
 * A module's own entry in quantized_layers decides first, then exclusion, then the entry of the
 * nearest container above it, then the algorithm of the whole checkpoint (which MIXED_PRECISION
 * does not have: an unlisted layer is not quantized). A fused name that nothing names directly is
 * resolved through its parts, which must agree. */
#ifndef MOQ_CORE_RESOLVE_H
#define MOQ_CORE_RESOLVE_H

#include "core/config.h"

typedef enum {
    MOQ_RULE_CONFIG,   /* the checkpoint's quant_algo */
    MOQ_RULE_UNLISTED, /* MIXED_PRECISION, and no entry covers the module */
    MOQ_RULE_LAYERS,   /* an entry of quantized_layers */
    MOQ_RULE_EXCLUDED, /* an entry of exclude_modules */
    MOQ_RULE_NATIVE    /* stored in the format of the model's maker */
} moq_rule;

typedef struct {
    moq_algo algo; /* NONE: not quantized */
    int64_t group_size;
    moq_rule rule;
    moq_text entry; /* of LAYERS and EXCLUDED */
} moq_layer_quant;

typedef struct moq_resolver moq_resolver;

/* Indexes over the configuration, which must outlive them, taken from the arena. */
moq_status moq_resolver_build(moq_arena *arena, const moq_config *config, moq_resolver **out,
                              moq_err *err);

/* `parts` override what the module is made of: each is a whole module name when it holds a dot,
 * else it replaces the last component. With count 0 the known fused names are looked up. */
moq_status moq_resolve_layer(const moq_resolver *resolver, moq_text module, const moq_text *parts,
                             size_t count, moq_layer_quant *out, moq_err *err);
/* True if exclude_modules covers the module, or what it is made of: fused names and `parts` as in
 * moq_resolve_layer. */
moq_status moq_resolve_excluded(const moq_resolver *resolver, moq_text module,
                                const moq_text *parts, size_t count, bool *out, moq_err *err);

#endif

/* Every keyword a binding function takes, once: the names are interned at import and matched by
 * pointer. Keep sorted. */
#ifndef MOQ_BINDING_KEYWORDS_H
#define MOQ_BINDING_KEYWORDS_H

#define MOQ_KEYWORDS(X)                                                                            \
    X(accumulate)                                                                                  \
    X(activation)                                                                                  \
    X(alpha)                                                                                       \
    X(amax)                                                                                        \
    X(apply_router_weight_on_input)                                                                \
    X(batch_invariant)                                                                             \
    X(beta)                                                                                        \
    X(bias)                                                                                        \
    X(capability)                                                                                  \
    X(chosen)                                                                                      \
    X(codes)                                                                                       \
    X(compute)                                                                                     \
    X(correction_bias)                                                                             \
    X(cos)                                                                                         \
    X(device)                                                                                      \
    X(dtype)                                                                                       \
    X(eps)                                                                                         \
    X(expert_map)                                                                                  \
    X(experts)                                                                                     \
    X(fast_accum)                                                                                  \
    X(fnmatch)                                                                                     \
    X(fold_scale)                                                                                  \
    X(format)                                                                                      \
    X(gated)                                                                                       \
    X(global_num_experts)                                                                          \
    X(group_size)                                                                                  \
    X(hidden_size)                                                                                 \
    X(in_features)                                                                                 \
    X(input_scale)                                                                                 \
    X(interleaved)                                                                                 \
    X(intermediate_size)                                                                           \
    X(k_cache)                                                                                     \
    X(k_heads)                                                                                     \
    X(k_weight)                                                                                    \
    X(kernel)                                                                                      \
    X(limit)                                                                                       \
    X(lora_a)                                                                                      \
    X(lora_b)                                                                                      \
    X(module)                                                                                      \
    X(name)                                                                                        \
    X(num_experts)                                                                                 \
    X(num_groups)                                                                                  \
    X(one_input_scale)                                                                             \
    X(origins)                                                                                     \
    X(padding)                                                                                     \
    X(positions)                                                                                   \
    X(pretend)                                                                                     \
    X(q_heads)                                                                                     \
    X(q_weight)                                                                                    \
    X(quantized_input)                                                                             \
    X(out)                                                                                         \
    X(out_partitions)                                                                              \
    X(output_scale)                                                                                \
    X(packed)                                                                                      \
    X(packed_modules_mapping)                                                                      \
    X(params)                                                                                      \
    X(partitions)                                                                                  \
    X(pattern)                                                                                     \
    X(pre_quant_scale)                                                                             \
    X(quant_algo)                                                                                  \
    X(rank)                                                                                        \
    X(renormalize)                                                                                 \
    X(requires_grad)                                                                               \
    X(residual)                                                                                    \
    X(residual_out)                                                                                \
    X(routed_scaling_factor)                                                                       \
    X(router_logits)                                                                               \
    X(scale)                                                                                       \
    X(scale_out)                                                                                   \
    X(scheme)                                                                                      \
    X(scoring)                                                                                     \
    X(search)                                                                                      \
    X(semantics)                                                                                   \
    X(shape)                                                                                       \
    X(shards)                                                                                      \
    X(sin)                                                                                         \
    X(slots)                                                                                       \
    X(stack)                                                                                       \
    X(stream)                                                                                      \
    X(swizzled)                                                                                    \
    X(table)                                                                                       \
    X(tokens)                                                                                      \
    X(top_k)                                                                                       \
    X(topk_groups)                                                                                 \
    X(topk_ids)                                                                                    \
    X(topk_weights)                                                                                \
    X(v_cache)                                                                                     \
    X(value_out)                                                                                   \
    X(variant)                                                                                     \
    X(w13_bias)                                                                                    \
    X(w13_fold_scale)                                                                              \
    X(w13_input_scale)                                                                             \
    X(w13_output_scale)                                                                            \
    X(w13_pre_quant_scale)                                                                         \
    X(w13_weight)                                                                                  \
    X(w13_weight_scale)                                                                            \
    X(w13_weight_scale_2)                                                                          \
    X(w2_bias)                                                                                     \
    X(w2_fold_scale)                                                                               \
    X(w2_input_scale)                                                                              \
    X(w2_output_scale)                                                                             \
    X(w2_pre_quant_scale)                                                                          \
    X(w2_weight)                                                                                   \
    X(w2_weight_scale)                                                                             \
    X(w2_weight_scale_2)                                                                           \
    X(weight)                                                                                      \
    X(weight_scale)                                                                                \
    X(weight_scale_2)                                                                              \
    X(x)                                                                                           \
    X(x_scale)

typedef enum {
#define MOQ_KW_ENUM(name) KW_##name,
    MOQ_KEYWORDS(MOQ_KW_ENUM)
#undef MOQ_KW_ENUM
        KW_COUNT
} moq_keyword;

#endif

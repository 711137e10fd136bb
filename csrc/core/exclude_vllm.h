/* A compiled list of excluded modules, as vLLM reads it.
 *
 * In this order: the name itself or, for a packed name, all of its shards, is an entry; a name with
 * "experts" in it lies inside an entry that has "experts" in it; some other entry lies inside the
 * name (kept there for exports older than 0.39, and the reason why `model.layers.1` also excludes
 * layer 10); the name matches an entry by fnmatch; whatever the entries are, the name has that of a
 * vision tower in it. */
#ifndef MOQ_CORE_EXCLUDE_VLLM_H
#define MOQ_CORE_EXCLUDE_VLLM_H

#include "core/nametable.h"

typedef struct moq_vllm_exclusion moq_vllm_exclusion;

/* Compiles a list, all of whose memory is the arena's; the entries' text is borrowed. */
moq_status moq_vllm_exclusion_compile(moq_arena *arena, const moq_text *entries, size_t count,
                                      moq_vllm_exclusion **out, moq_err *err);

/* `shards` are what the last component of a packed name stands for; none for other names. `path` is
 * the list's JSON path: a failure there says that only some shards are listed. */
moq_status moq_vllm_exclusion_find(const moq_vllm_exclusion *set, moq_text name,
                                   const moq_text *shards, size_t shard_count, const char *path,
                                   bool *out, moq_err *err);

#endif

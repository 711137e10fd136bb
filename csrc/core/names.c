/* The tables of names: see names.h. */
#include "core/names.h"

static const moq_text PREFIXES[] = {
    {"model.language_model.", 21},
    {"language_model.model.", 21},
    {"language_model.", 15},
    {"model.", 6},
    {NULL, 0},
};

static const moq_fused_group FUSED[] = {
    {3, {{"q_proj", 6}, {"k_proj", 6}, {"v_proj", 6}}, {{"qkv_proj", 8}}},
    {2, {{"gate_proj", 9}, {"up_proj", 7}}, {{"gate_up_proj", 12}}},
    {2, {{"w1", 2}, {"w3", 2}}, {{"w13", 3}}},
    {2, {{"gate", 4}, {"up", 2}}, {{NULL, 0}}},
    {2,
     {{"q_a_proj", 8}, {"kv_a_proj_with_mqa", 18}},
     {{"fused_qkv_a_proj_with_mqa", 25}, {"fused_qkv_a_proj", 16}}},
    {2, {{"in_proj_qkv", 11}, {"in_proj_z", 9}}, {{"in_proj_qkvz", 12}}},
    {2, {{"in_proj_b", 9}, {"in_proj_a", 9}}, {{"in_proj_ba", 10}}},
    {0},
};

static const moq_expert_projection PROJECTIONS[] = {
    {{"gate_up_proj", 12}, "gate_up", true},
    {{"gate_proj", 9}, "gate", true},
    {{"up_proj", 7}, "up", true},
    {{"down_proj", 9}, "down", true},
    {{"w1", 2}, "gate", false},
    {{"w3", 2}, "up", false},
    {{"w2", 2}, "down", false},
    {{"gate", 4}, "gate", false},
    {{"up", 2}, "up", false},
    {{"down", 4}, "down", false},
    {{NULL, 0}, NULL, false},
};

const moq_text *moq_name_prefixes(void) {
    return PREFIXES;
}

const moq_fused_group *moq_fused_groups(void) {
    return FUSED;
}

const moq_expert_projection *moq_expert_projections(void) {
    return PROJECTIONS;
}

moq_text moq_name_body(moq_text name) {
    for (const moq_text *prefix = PREFIXES; prefix->size; prefix++) {
        if (moq_text_starts(name, *prefix))
            return (moq_text){name.data + prefix->size, name.size - prefix->size};
    }
    return name;
}

const moq_text *moq_fused_parts(moq_text component, size_t *count) {
    *count = 0;
    for (const moq_fused_group *group = FUSED; group->count; group++) {
        for (size_t i = 0; i < MOQ_FUSED_NAMES_MAX && group->name[i].size; i++) {
            if (!moq_text_equal(component, group->name[i]))
                continue;
            *count = group->count;
            return group->part;
        }
    }
    return NULL;
}

/* Lower-case letters and underscores alone. */
static bool is_word(moq_text text) {
    for (size_t i = 0; i < text.size; i++) {
        if (text.data[i] != '_' && (text.data[i] < 'a' || text.data[i] > 'z'))
            return false;
    }
    return true;
}

static bool is_experts(moq_text component) {
    return moq_text_ends(component, MOQ_TEXT(MOQ_EXPERTS_TAIL)) &&
           !moq_text_starts(component, MOQ_TEXT(MOQ_SHARED_EXPERTS_HEAD)) && is_word(component);
}

static bool is_moe(moq_text component) {
    return moq_text_equal(component, MOQ_TEXT(MOQ_MOE_CONTAINER));
}

bool moq_name_is_experts(moq_text name) {
    const moq_text last = moq_text_last_component(name);
    return is_experts(last) || is_moe(last);
}

static bool is_stacked_projection(moq_text text) {
    for (const moq_expert_projection *known = PROJECTIONS; known->name.size; known++) {
        if (known->stacks && moq_text_equal(text, known->name))
            return true;
    }
    return false;
}

moq_text moq_name_experts_above(moq_text name) {
    size_t start = 0; /* of the component */
    for (size_t i = 0; i < name.size; i++) {
        if (name.data[i] != '.')
            continue;
        const moq_text component = {name.data + start, i - start};
        const moq_text below = {name.data + i + 1, name.size - i - 1};
        if (is_experts(component) || (is_moe(component) && is_stacked_projection(below)))
            return (moq_text){name.data, i};
        start = i + 1;
    }
    return (moq_text){NULL, 0};
}

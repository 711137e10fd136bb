"""Memory of the KV cache, against what the models' own pages say of a token."""

import pytest

from moqext.reader.config.cache_memory import CachePart, cache_bytes, cache_parts

from .work import each

LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.mark.parametrize(
    "algo, size", [(None, 4096), ("FP8", 2048), ("INT8", 2048), ("NVFP4", 1152), ("NVFP4_AFFINE", 1152)]
)
def test_grouped_queries(algo, size):
    parts = cache_parts(LLAMA_8B, algo)
    assert parts == (CachePart(32, size, None),)
    assert cache_bytes(parts, 1000) == 32 * size * 1000


def test_compressed_attention_keeps_one_vector():
    config = {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    assert cache_parts(config, "FP8") == (CachePart(61, 576, None),)


def test_sliding_layers_keep_a_window():
    kinds = ["sliding_attention", "full_attention"] * 2 + ["linear_attention"]
    config = LLAMA_8B | {"num_hidden_layers": 5, "layer_types": kinds, "sliding_window": 128, "head_dim": 64}
    parts = cache_parts(config, None)
    assert parts == (CachePart(2, 2048, None), CachePart(2, 2048, 128))
    assert cache_bytes(parts, 100) == 4 * 2048 * 100
    assert cache_bytes(parts, 1000) == 2 * 2048 * (1000 + 128)


def test_a_window_without_a_list_is_every_layers_unless_switched_off():
    assert cache_parts(LLAMA_8B | {"sliding_window": 4096}, None)[0].window == 4096
    assert (
        cache_parts(LLAMA_8B | {"sliding_window": 4096, "use_sliding_window": False}, None)[0].window is None
    )


def test_hybrids_and_text_parts():
    assert cache_parts({"text_config": LLAMA_8B}, None) == cache_parts(LLAMA_8B, None)
    hybrid = LLAMA_8B | {"hybrid_override_pattern": "M-M*-M*"}
    assert cache_parts(hybrid, None) == (CachePart(2, 4096, None),)


@each("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
@each("value", [None, "32", 0, -1, True, 2**80])
def test_what_config_does_not_tell_is_not_guessed(key, value):
    config = {name: number for name, number in LLAMA_8B.items() if name != "num_key_value_heads"}
    assert cache_parts(config | {key: value}, None) == ()

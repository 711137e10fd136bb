"""Layers that are split between two ranks, by rows and columns or by experts: the tokens of one rank."""

import json
import shutil

import numpy as np
import pytest

from tests.vllm.conftest import results
from tests.vllm_cases import DATA, change, multiply, requantize, write_llama

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

EXPERTS = {"enable_expert_parallel": True}
SPLIT = {  # by name: what runs on two ranks, with which options
    "experts of NVFP4": ("qwen3moe_nvfp4", {}),
    "experts of NVFP4, each on one rank": ("qwen3moe_nvfp4", EXPERTS),
    "experts of FP8": ("qwen3moe_fp8", {}),
    "experts of FP8, each on one rank": ("qwen3moe_fp8", EXPERTS),
    "experts of FP8 with unequal scales of activations": ("unequal", EXPERTS),
    "files of other ranks' experts unread": ("unequal", EXPERTS | {"enable_ep_weight_filter": True}),
    "experts of W4A16_AWQ": ("experts_int4", {}),
    "experts of W4A8_AWQ, each on one rank": ("experts_w4a8", EXPERTS),
    "rows of an expert's group": ("qwen3moe_mixed", {}),
    "FP8": ("llama_fp8_kvfp8", {}),
    "NVFP4": ("llama_nvfp4_kvfp8", {}),
    "W4A8_NVFP4_FP8": ("llama_w4a8_nvfp4_fp8", {}),
    "W4A16_AWQ": ("int4", {}),
    "W8A8_SQ_PER_CHANNEL": ("llama_int8_sq", {}),
    "NVFP4_SVD": ("low_rank", {}),
    "FP8_PB_WO": ("blocks", {}),
    "rows of a block": ("llama_fp8_pb_wo", {}),
    "columns of a group": ("groups", {}),
    "columns of a group of int4": ("llama_int4_awq", {}),
}
DATA_PARALLEL = EXPERTS | {"tensor_parallel_size": 1, "data_parallel_size": 2}
SHARED = {  # by name: experts whose tokens come from both ranks
    "experts of NVFP4 and prompts, each on one rank": ("qwen3moe_nvfp4", DATA_PARALLEL),
    "experts of FP8 with unequal scales and prompts, each on one rank": ("unequal", DATA_PARALLEL),
}
REFUSED = {
    "rows of a block": ("model.layers.0.self_attn.qkv_proj", "64+32+32 rows, no multiples of the 128"),
    "columns of a group": (
        "model.layers.0.mlp.down_proj",
        "each rank 24 of 48 columns",
        "multiple of the group size 16",
    ),
    "columns of a group of int4": (
        "model.layers.0.self_attn.o_proj",
        "each rank 64 of 128 columns",
        "multiple of the group size 128",
    ),
    "rows of an expert's group": (
        "model.layers.0.mlp.experts",
        "each rank 24 rows of an expert",
        "multiple of the group size 16",
    ),
}
RUN = [name for name in SPLIT if name not in REFUSED]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Checkpoints by name; those that are made have what the genuine ones have not."""
    place = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(5)  # one model, whose tokens do not hang on a last bit
    made = {
        "blocks": write_llama(place / "blocks", "FP8_PB_WO", rng, hidden=512, inner=512, heads=4, kv_heads=2),
        "groups": write_llama(place / "groups", "NVFP4", rng, hidden=128, inner=48, heads=4, kv_heads=2),
        "int4": write_llama(place / "int4", "W4A16_AWQ", rng, hidden=256, inner=256, heads=8, kv_heads=2),
        "experts_int4": requantize(place / "experts_int4", "qwen3moe_fp8", "W4A16_AWQ", 32),
        "experts_w4a8": requantize(place / "experts_w4a8", "qwen3moe_fp8", "W4A8_AWQ", 32),
        "low_rank": requantize(place / "low_rank", "llama_fp8_kvfp8", "NVFP4_SVD"),
        "unequal": place / "unequal",
        "qwen3moe_mixed": DATA / "exports" / "qwen3moe_mixed",
    }
    shutil.copytree(DATA / "checkpoints" / "qwen3moe_fp8", made["unequal"])

    def scale(tensors):
        for name in list(tensors):
            if ".experts.3." in name and name.endswith("input_scale"):
                multiply(tensors, name, 30000)  # codes of x lose most of their bits

    change(made["unequal"], scale)
    names = {name for name, _ in SPLIT.values()}
    return {name: made.get(name, DATA / "checkpoints" / name) for name in names}


@pytest.fixture(scope="module")
def alone(engine, directories):
    """The tokens of one rank."""
    names = sorted({SPLIT[name][0] for name in RUN})
    return dict(zip(names, engine("tokens", *(directories[name] for name in names)), strict=True))


@pytest.fixture(scope="module")
def split(two_ranks, directories):
    """Answers of two ranks to all cases: experts come first, as vLLM makes their groups once."""
    return ask(two_ranks, directories, SPLIT)


@pytest.fixture(scope="module")
def data_parallel(two_ranks, directories):
    """Answers of two ranks that have all prompts each, and half of the experts."""
    return ask(two_ranks, directories, SHARED, MOQEXT_VLLM_FORCE="1")


def ask(two_ranks, directories, cases, **variables):
    """By name the answers of both ranks."""
    given = [json.dumps([str(directories[name]), options]) for name, options in cases.values()]
    said = results(two_ranks("engine.py", "split", *given, **variables), len(cases))
    return dict(zip(cases, zip(*said, strict=True), strict=True))


@pytest.mark.parametrize("name", RUN)
def test_two_ranks_have_the_tokens_of_one(split, alone, name):
    first, second = split[name]
    assert first == second
    assert first == alone[SPLIT[name][0]][0]


@pytest.mark.parametrize("name", SHARED)
def test_ranks_with_prompts_of_their_own_share_experts(data_parallel, alone, name):
    """Tokens go to the rank that has their experts, and come back."""
    assert all(tokens == alone[SHARED[name][0]][0] for tokens in data_parallel[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_split_a_scale_is_refused_by_name(split, name):
    for kind, message in split[name]:
        assert kind == "UnsupportedQuantization"
        for text in REFUSED[name]:
            assert text in message


def test_the_largest_scale_of_activations_matters(alone):
    """Or the cases with unequal ones would pass whatever the ranks exchange."""
    assert alone["unequal"][0] != alone["qwen3moe_fp8"][0]


def test_workers_of_the_engine(engine, alone):
    """The engine starts its own two workers, and shares a checkpoint between them."""
    options = {"tensor_parallel_size": 2}
    found = engine(
        "tokens_split",
        DATA / "checkpoints" / "llama_nvfp4_kvfp8",
        json.dumps(options),
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    )
    assert found == [alone["llama_nvfp4_kvfp8"][0]]

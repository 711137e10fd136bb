"""Models built and loaded by moqext's methods and by vLLM's own: the same parameters, with the same values.

Of every genuine checkpoint, with vLLM's own models and loaders; before anything is prepared, so that vLLM's
kernels are not needed. It also runs beside vLLM's files of Python alone.
"""

import pytest

from tests.vllm.conftest import on_cuda

pytest.importorskip("vllm")
from tests.vllm.test_config import GENUINE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.unsanitized,
    pytest.mark.skipif(on_cuda(), reason="models are built on the CPU, without kernels"),
]

MOQEXT_ALONE = {  # and what vLLM says
    "llama_fp8_pb_wo": "0-dim",
    **dict.fromkeys(("llama_int4_awq", "llama_int8_sq", "llama_w4a8_awq"), "currently only supports"),
    "llama_w4a8_nvfp4_fp8": "currently only supports",
    "llama_w4a8_mxfp4_fp8": "currently only supports",
    "mxfp4": "currently only supports",
    "fp8_pb_real": "currently only supports",
    "fp8_pb_wo_one_block": "divisible by 128, got 64",
    "fp8_pb_wo_unaligned": "divisible by 128, got 144",
    "gpt_oss_fp8": "w2_bias",
    "gpt_oss_nvfp4": "w2_bias",
    "mixed_three": "divisible by 128, got 64",
    "w4a16_nvfp4_group_32": "exceeds dimension size",
    "w4a8_nvfp4_fp8": "currently only supports",
}
NEITHER = {  # and what both, or first moqext and then vLLM, say
    "deepseek_nvfp4": ("e_score_correction_bias|MLA attention on CPU",),
    "fp8_embedding": ("embed_tokens.weight_scale",),
    "gpt_oss_mxfp8": ("divisible by 32, got 48",),
    "llama4_fp8": ("w2_weight_input_scale",),
    "llama4_nvfp4": ("w2_weight_input_scale",),
    "mixed_in_qkv": ("quantized differently", "Mixed quant_algo"),
    "nemotron_h_mixed": ("is_act_and_mul=False",),
    "nemotron_h_nvfp4": ("is_act_and_mul=False",),
    "nvfp4_kvaffine": ("NVFP4_AFFINE", "no attribute 'data'"),
}
ON_THE_CACHE = "kv-cache-dtype nvfp4 is not supported"
"""Message of 0.33 for a cache in NVFP4 on a CPU; 0.32 builds the model."""


@pytest.fixture(scope="module")
def built(engine):
    """Answers of either to each genuine checkpoint."""
    both = [
        engine("parameters", *GENUINE, MOQEXT_VLLM_CHECK="0", VLLM_PLUGINS=plugins)
        for plugins in ("moqext", "none")
    ]
    names = [directory.name for directory in GENUINE]
    assert [len(each) for each in both] == [len(names)] * 2
    return {name: pair for name, *pair in zip(names, *both, strict=True)}


def algorithm(name):
    import json

    directory = next(directory for directory in GENUINE if directory.name == name)
    return json.loads((directory / "config.json").read_text())["quantization_config"]["quant_algo"]


def may_be_alone(name, parameter):
    """Whether only moqext has a parameter: scales that other exporters write, of a cache in a mixed model."""
    if parameter.endswith((".k_scale", ".v_scale", ".q_scale", ".prob_scale")):
        return algorithm(name) == "MIXED_PRECISION"
    return parameter.endswith("_proj.input_scale") and algorithm(name) == "FP8_PER_CHANNEL_PER_TOKEN"


def may_differ(parameter, ours, theirs):
    """Whether values may: those never filled, a scale of gate and of up for one of both, and of the cache.

    The last are float32, as the checkpoint's, and have the dtype of the model in vLLM.
    """
    if parameter.endswith((".k_scale", ".v_scale", ".q_scale")):
        return ours[1] == theirs[1] and (ours[2], theirs[2]) == ("torch.float32", "torch.bfloat16")
    if parameter.endswith("experts.w13_input_scale"):
        return ours[1] == [*theirs[1], 2]
    return parameter.endswith("_proj.input_scale") and ours[1] == theirs[1] and ours[3].startswith("marked")


def test_every_genuine_checkpoint_is_expected_to_do_something():
    names = {directory.name for directory in GENUINE}
    assert MOQEXT_ALONE.keys() <= names
    assert NEITHER.keys() <= names
    assert not MOQEXT_ALONE.keys() & NEITHER.keys()


@pytest.mark.parametrize("name", [each.name for each in GENUINE])
def test_parameters_are_those_of_vllm(built, name):
    ours, theirs = built[name]
    if name in NEITHER:
        texts = NEITHER[name]
        for found, text in ((ours, texts[0]), (theirs, texts[-1])):
            assert isinstance(found, list)
            assert any(each in found[1] for each in text.split("|")), found
        return
    if name in MOQEXT_ALONE:
        assert isinstance(ours, dict), ours
        assert isinstance(theirs, list)
        assert MOQEXT_ALONE[name] in theirs[1]
        return
    if isinstance(theirs, list):
        assert ON_THE_CACHE in theirs[1]
        assert ours == theirs
        return
    assert isinstance(ours, dict), ours
    assert theirs.keys() - ours.keys() == set()
    for parameter in ours.keys() - theirs.keys():
        assert may_be_alone(name, parameter), parameter
    for parameter, expected in theirs.items():
        found = ours[parameter]
        assert found[1:] == expected[1:] or may_differ(parameter, found, expected), parameter
        if ".experts." not in parameter:  # whose loader does not ask for classes
            assert expected[0][0] in found[0], parameter

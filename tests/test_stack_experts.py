"""`stack_experts`: every stored form of experts gives the stacks that were meant, bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moqext
from moqext import Checkpoint, CheckpointError, MoEMethod, UnsupportedQuantization, reference, stack_experts
from moqext.layers.read_stacks import turned

from .expert_files import (
    CONTAINER,
    dotted_experts,
    expert_weights,
    follow,
    single_experts,
    stacked_experts,
    write_checkpoint,
)
from .moe_cases import ALGOS, random_stacks
from .work import each

DATA = Path(__file__).parent / "data"
GENUINE = {
    "exports/deepseek_nvfp4": ("silu", 2),
    "exports/gpt_oss_fp8": ("swigluoai", 2),
    "exports/gpt_oss_nvfp4": ("swigluoai", 2),
    "exports/llama4_fp8": ("silu", 1),
    "exports/llama4_nvfp4": ("silu", 1),
    "exports/mixtral_fp8": ("silu", 2),
    "exports/mixtral_nvfp4": ("silu", 2),
    "exports/nemotron_h_mixed": ("relu2", 1),
    "exports/nemotron_h_nvfp4": ("relu2", 1),
    "exports/qwen3moe_mixed": ("silu", 2),
    "checkpoints/qwen3moe_fp8": ("silu", 2),
    "checkpoints/qwen3moe_nvfp4": ("silu", 2),
}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
E, H, W = 3, 160, 96  # experts, hidden size, expert width


def as_float32(stacks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks of random data as a reader returns them: factors and biases of bfloat16 as float32."""
    return {
        name: reference.decode(stack, "bfloat16") if stack.dtype == np.uint16 else stack
        for name, stack in stacks.items()
    }


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(got) == sorted(expected)
    for name, stack in expected.items():
        assert got[name].dtype == stack.dtype, name
        assert got[name].flags.c_contiguous, name
        np.testing.assert_array_equal(got[name], stack, name)


def container(checkpoint: Checkpoint) -> Any:
    (record,) = [layer for layer in checkpoint.layers() if layer.kind == "moe"]
    return record


def read(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with Checkpoint(directory) as checkpoint:
        return stack_experts(checkpoint, container(checkpoint))


# Genuine exports


@each("case", GENUINE)
def test_genuine_stacks_are_what_dequantize_reads(case: str) -> None:
    with Checkpoint(DATA / case) as checkpoint:
        record = container(checkpoint)
        options, stacks = stack_experts(checkpoint, record.name)
        sizes = ("num_experts", "hidden_size", "intermediate_size")
        assert tuple(options[size] for size in sizes) == record.shape
        assert (options["activation"], options["top_k"]) == GENUINE[case]
        assert options["interleaved"] == ("gpt_oss" in case)
        specs = MoEMethod(**options).checkpoint_params
        assert {name: stack.shape for name, stack in stacks.items()}.items() <= {
            name: spec.shape for name, spec in specs.items()
        }.items()
        weights = expert_weights(
            stacks, options["quant_algo"], options["gated"], options["group_size"], options["interleaved"]
        )
        for projection in record.projections:
            expected = checkpoint.dequantize(projection)
            got = weights["w2"]
            if projection.role == "gate_up":
                both = (weights["gate"], weights["up"])
                got = np.stack(both, 2).reshape(expected.shape)
                got = got if projection.interleaved else np.concatenate(both, axis=1)
            np.testing.assert_array_equal(got, expected)
        parts = {
            "gate_proj": "gate",
            "w1": "gate",
            "up_proj": "up",
            "w3": "up",
            "down_proj": "w2",
            "w2": "w2",
        }
        for member in record.members:
            *_, expert, last = member.name.split(".")
            np.testing.assert_array_equal(weights[parts[last]][int(expert)], checkpoint.dequantize(member))
        for role in ("input_scale", "bias"):
            for projection in record.projections:
                if role in projection.tensors:
                    stack = stacks["w2_" + role if projection.role == "down" else "w13_" + role]
                    value = reference.as_float32(checkpoint.tensor(projection.tensors[role]))
                    np.testing.assert_array_equal(stack, np.broadcast_to(value, stack.shape))
            for member in record.members:
                *_, expert, last = member.name.split(".")
                stack = stacks[("w2_" if parts[last] == "w2" else "w13_") + "input_scale"][int(expert)]
                value = checkpoint.tensor(member.tensors["input_scale"])
                assert value in np.atleast_1d(stack)


# Every form, from stacks


@pytest.mark.parametrize("names", ["gate_proj", "w1", "gate"])
@pytest.mark.parametrize("algo", ALGOS)
def test_experts_one_by_one(rng: Any, tmp_path: Path, algo: str, names: str) -> None:
    stacks = random_stacks(rng, algo, E, H, W, bias="bfloat16", missing_input_scales=0.3)
    directory = write_checkpoint(tmp_path, single_experts(stacks, algo, names=names), algo)
    options, got = read(directory)
    assert_same(got, as_float32(stacks))
    assert (options["quant_algo"], options["gated"], options["interleaved"]) == (algo, True, False)
    assert "top_k" not in options


@pytest.mark.parametrize("algo", ALGOS)
def test_experts_without_a_gate(rng: Any, tmp_path: Path, algo: str) -> None:
    stacks = random_stacks(rng, algo, E, H, W, gated=False)
    tensors = single_experts(stacks, algo, gated=False)
    directory = write_checkpoint(tmp_path, tensors, algo, mlp_hidden_act="relu2", hidden_act="silu")
    options, got = read(directory)
    assert_same(got, as_float32(stacks))
    assert (options["gated"], options["activation"]) == (False, "relu2")


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"])
def test_stacks_in_one_tensor(rng: Any, tmp_path: Path, algo: str, transposed: bool) -> None:
    stacks = random_stacks(rng, algo, E, H, W, bias="bfloat16")
    if algo == "FP8":  # has no form with a scale for each half
        stacks["w13_weight_scale"][:, 1] = stacks["w13_weight_scale"][:, 0]
    tensors = stacked_experts(stacks, algo, transposed=transposed)
    if algo == "FP8":
        tensors[f"{CONTAINER}.gate_up_proj_weight_scale"] = ("F32", stacks["w13_weight_scale"][:, 0])
    config = {"architectures": ["Llama4ForConditionalGeneration"]}
    options, got = read(write_checkpoint(tmp_path, tensors, {"quant_algo": algo, "group_size": 16}, **config))
    assert_same(got, as_float32(stacks))
    assert options["interleaved"] is False


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4"])
def test_stacks_whose_gate_and_up_take_turns(rng: Any, tmp_path: Path, algo: str) -> None:
    stacks = random_stacks(rng, algo, E, H, W, bias="bfloat16", interleaved=True)
    for name in stacks:
        if name in ("w13_weight_scale_2", "w13_input_scale") or (algo, name) == ("FP8", "w13_weight_scale"):
            stacks[name][:, 1] = stacks[name][:, 0]
    tensors = {
        name: (dtype, value[:, 0] if value.ndim == 2 and value.shape[1] == 2 else value)
        for name, (dtype, value) in stacked_experts(stacks, algo).items()
    }
    options, got = read(write_checkpoint(tmp_path, tensors, algo, **GPT_OSS, swiglu_limit=5.0))
    assert_same(got, as_float32(stacks))
    assert options["interleaved"] is True
    assert (options["activation"], options["limit"]) == ("swigluoai", 5.0)


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4"])
def test_dotted_stacks_of_gate_up_and_down(rng: Any, tmp_path: Path, algo: str) -> None:
    stacks = random_stacks(rng, algo, E, 256, 160)
    options, got = read(write_checkpoint(tmp_path, dotted_experts(stacks, algo), algo))
    assert_same(got, stacks)
    assert options["intermediate_size"] == 160


@pytest.mark.parametrize("form", ["0-d", "one", "(E,)", "(E, 1)", "(E, 2)"])
def test_scalar_scales_of_a_stack(rng: Any, tmp_path: Path, form: str) -> None:
    stacks = random_stacks(rng, "NVFP4", E, H, W)
    tensors = stacked_experts(stacks, "NVFP4")
    given, meant = {}, dict(stacks)
    for role in ("weight_scale_2", "input_scale"):
        both = stacks[f"w13_{role}"]
        kept = {
            "0-d": both[0, 0].reshape(()),
            "one": both[0, :1],
            "(E,)": both[:, 0],
            "(E, 1)": both[:, :1],
            "(E, 2)": both,
        }[form]
        given[f"{CONTAINER}.gate_up_proj_{role}"] = ("F32", kept)
        meant[f"w13_{role}"] = np.broadcast_to(kept if kept.ndim == 2 else kept.reshape(-1, 1), (E, 2))
    _, got = read(write_checkpoint(tmp_path, tensors | given, "NVFP4"))
    assert_same(got, meant)


@pytest.mark.parametrize("role", ["gate_up_proj", "down_proj"])
def test_one_scale_an_expert_serves_every_channel(rng: Any, tmp_path: Path, role: str) -> None:
    """ModelOpt's FP8_PER_CHANNEL_PER_TOKEN of stacked experts."""
    stacks = random_stacks(rng, "FP8_PER_CHANNEL_PER_TOKEN", E, H, W)
    name = {"gate_up_proj": "w13_weight_scale", "down_proj": "w2_weight_scale"}[role]
    stacks[name][:] = stacks[name][:, :1]
    tensors = stacked_experts(stacks, "FP8_PER_CHANNEL_PER_TOKEN")
    tensors[f"{CONTAINER}.{role}_weight_scale"] = ("F32", stacks[name][:, 0])
    _, got = read(write_checkpoint(tmp_path, tensors, "FP8_PER_CHANNEL_PER_TOKEN"))
    assert_same(got, stacks)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "spaced"),
    [
        (256, 128, False),
        (128, 64, False),
        (128, 64, True),
        (96, 256, False),
        (96, 256, True),
        (100, 60, False),
        (100, 60, True),
    ],
)
def test_square_blocks_of_a_stack(
    rng: Any, tmp_path: Path, hidden: int, intermediate: int, spaced: bool
) -> None:
    stacks = random_stacks(rng, "FP8_PB_WO", E, hidden, intermediate)
    one_block = intermediate < 128
    if one_block:  # gate and up are in one block of rows
        half = stacks["w13_weight_scale"].shape[1] // 2
        stacks["w13_weight_scale"][:, half:] = stacks["w13_weight_scale"][:, :half]
    tensors = stacked_experts(stacks, "FP8_PB_WO")
    if one_block:
        name = f"{CONTAINER}.gate_up_proj_weight_scale"
        tensors[name] = ("F32", tensors[name][1][:, :, :1])
    if spaced:
        for name, (dtype, value) in tensors.items():
            if name.endswith("weight_scale"):
                tensors[name] = (dtype, value[:, :, None, :, None])
    _, got = read(write_checkpoint(tmp_path, tensors, "FP8_PB_WO"))
    assert_same(got, stacks)


def test_an_input_scale_that_is_not_used_is_left_out(rng: Any, tmp_path: Path) -> None:
    stacks = random_stacks(rng, "NVFP4", E, H, W)
    tensors = single_experts(stacks, "NVFP4")
    _, got = read(write_checkpoint(tmp_path, tensors, "W4A16_NVFP4"))
    assert_same(got, {name: stack for name, stack in stacks.items() if "input_scale" not in name})


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (64, 512), (65, 513), (300, 7), (7, 1100)])
def test_a_matrix_of_bytes_is_turned(rng: Any, rows: int, columns: int) -> None:
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    got = turned(codes)
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, codes.T)


def test_one_tensor_of_one_expert_is_read_at_a_time(
    rng: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = random_stacks(rng, "NVFP4", E, H, W)
    directory = write_checkpoint(tmp_path, stacked_experts(stacks, "NVFP4"), "NVFP4")
    largest = stacks["w13_weight"].nbytes // E
    with Checkpoint(directory) as checkpoint:
        record = container(checkpoint)
        read_whole = checkpoint.tensor

        def tensor(name: str) -> Any:
            assert checkpoint.tensors[name].nbytes < largest, name
            return read_whole(name)

        monkeypatch.setattr(checkpoint, "tensor", tensor)
        assert_same(stack_experts(checkpoint, record)[1], stacks)


# Experts without a stack


def refused(directory: Path) -> str:
    with Checkpoint(directory) as checkpoint:
        record = container(checkpoint)
        with pytest.raises(UnsupportedQuantization) as caught:
            stack_experts(checkpoint, record)
        for part in record.projections or record.members:
            assert np.isfinite(checkpoint.dequantize(part)).all()
    return str(caught.value)


def test_an_expert_of_two_formats_is_refused_by_name(rng: Any, tmp_path: Path) -> None:
    fp8, nvfp4 = (random_stacks(rng, algo, E, H, W) for algo in ("FP8", "NVFP4"))
    tensors = single_experts(nvfp4, "NVFP4")
    other = single_experts(fp8, "FP8")
    tensors = {name: value for name, value in tensors.items() if ".1.down_proj." not in name}
    tensors |= {name: value for name, value in other.items() if ".1.down_proj." in name}
    message = refused(write_checkpoint(tmp_path, tensors, "NVFP4"))
    assert "expert 1 has gate_proj NVFP4 g16, up_proj NVFP4 g16, down_proj FP8" in message
    assert message.endswith(f"; load them one by one, as '{CONTAINER}.0.gate_proj'")


def test_a_stack_of_two_formats_is_refused_by_name(rng: Any, tmp_path: Path) -> None:
    fp8, nvfp4 = (random_stacks(rng, algo, E, H, W) for algo in ("FP8", "NVFP4"))
    tensors = stacked_experts({n: v for n, v in nvfp4.items() if n.startswith("w13")}, "NVFP4")
    tensors |= stacked_experts({n: v for n, v in fp8.items() if n.startswith("w2")}, "FP8")
    message = refused(write_checkpoint(tmp_path, tensors, "NVFP4"))
    assert "every expert has gate_up NVFP4 g16, down FP8" in message


def test_experts_of_several_formats_are_no_one_stack(rng: Any, tmp_path: Path) -> None:
    fp8, nvfp4 = (random_stacks(rng, algo, E, H, W) for algo in ("FP8", "NVFP4"))
    tensors = {n: v for n, v in single_experts(nvfp4, "NVFP4").items() if ".experts.1." not in n}
    tensors |= {n: v for n, v in single_experts(fp8, "FP8").items() if ".experts.1." in n}
    message = refused(write_checkpoint(tmp_path, tensors, "NVFP4"))
    assert "experts in several formats (2 x NVFP4 g16, 1 x FP8)" in message


def test_an_expert_that_is_not_quantized_is_refused_by_name(rng: Any, tmp_path: Path) -> None:
    tensors = single_experts(random_stacks(rng, "NVFP4", E, H, W), "NVFP4")
    tensors = {name: value for name, value in tensors.items() if ".2.up_proj." not in name}
    tensors[f"{CONTAINER}.2.up_proj.weight"] = ("BF16", np.zeros((W, H), np.uint16))
    message = refused(write_checkpoint(tmp_path, tensors, "NVFP4"))
    assert f"{CONTAINER}.2.up_proj.weight is stored as BF16" in message


def test_blocks_along_the_output_are_refused_by_name(rng: Any, tmp_path: Path) -> None:
    shapes = {"gate_up_proj": (E, H, 2 * W), "down_proj": (E, W, H)}
    tensors = {}
    for name, (experts, rows, columns) in shapes.items():
        base = f"{CONTAINER}.{name}"
        codes = rng.integers(0, 256, (experts, rows, columns // 2), dtype=np.uint8)
        scale = rng.integers(1, 0x7F, (experts, rows, columns // 32), dtype=np.uint8)
        tensors[base] = ("U8", codes)
        tensors[f"{base}_weight_scale"] = ("F8_E4M3", scale)
        tensors[f"{base}_weight_scale_2"] = ("F32", np.float32(0.01))
        tensors[f"{base}_input_scale"] = ("F32", np.float32(0.01))
    message = refused(write_checkpoint(tmp_path, tensors, {"quant_algo": "W4A8_NVFP4_FP8", "group_size": 32}))
    assert "gate_up_proj (W4A8_NVFP4_FP8 g32) lie along its output" in message
    assert message.endswith(f"; dequantize('{CONTAINER}.gate_up_proj') reads a projection")


def test_a_block_with_rows_of_gate_and_up_is_refused_by_name(rng: Any, tmp_path: Path) -> None:
    stacks = random_stacks(rng, "FP8_PB_WO", E, 256, 96)
    tensors = stacked_experts(stacks, "FP8_PB_WO")
    message = refused(write_checkpoint(tmp_path, tensors, "FP8_PB_WO"))
    assert "gate and up of 96 rows are one weight in blocks of 128, and one has rows of both" in message


def test_a_scale_for_each_input_is_refused_by_name(rng: Any, tmp_path: Path) -> None:
    stacks = random_stacks(rng, "FP8_PER_CHANNEL_PER_TOKEN", E, H, W)
    tensors = stacked_experts(stacks, "FP8_PER_CHANNEL_PER_TOKEN")
    name = f"{CONTAINER}.gate_up_proj_weight_scale"
    tensors[name] = ("F32", rng.uniform(0.5, 1, (E, H)).astype(np.float32))
    message = refused(write_checkpoint(tmp_path, tensors, "FP8_PER_CHANNEL_PER_TOKEN"))
    assert "gate_up_proj: a scale for each input" in message


def test_scales_of_rows_or_columns_of_square_experts_are_refused_by_name(rng: Any, tmp_path: Path) -> None:
    stacks = random_stacks(rng, "FP8_PER_CHANNEL_PER_TOKEN", E, W, W)
    tensors = stacked_experts(stacks, "FP8_PER_CHANNEL_PER_TOKEN")
    directory = write_checkpoint(tmp_path, tensors, "FP8_PER_CHANNEL_PER_TOKEN")
    says = "down_proj: whether its scales are of rows or of columns cannot be told"
    with Checkpoint(directory) as checkpoint, pytest.raises(UnsupportedQuantization, match=says):
        stack_experts(checkpoint, CONTAINER)


def test_scales_of_halves_and_rows_in_turns_are_refused_by_name(rng: Any, tmp_path: Path) -> None:
    stacks = random_stacks(rng, "NVFP4", E, H, W, interleaved=True)
    message = refused(write_checkpoint(tmp_path, stacked_experts(stacks, "NVFP4"), "NVFP4", **GPT_OSS))
    assert "gate_up_proj: weight_scale_2 of two halves, and rows of gate and up that take turns" in message


def test_formats_without_a_method_are_refused_by_name() -> None:
    message = refused(DATA / "exports" / "gpt_oss_mxfp8")
    assert "(MXFP8 g32) lie along its output" in message
    assert message.endswith("gate_up_proj') reads a projection")


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        (".1.up_proj.weight", "missing"),
        (".2.down_proj.weight_scale_2", "missing_scale"),
        (".0.gate_proj.pre_quant_scale", "expert 0: one of gate and up has a pre_quant_scale"),
        (".1.down_proj.pre_quant_scale", "w2_pre_quant_scale: expert 1 (w2) has none"),
        (".1.up_proj.bias", "w13_bias: expert 1 (up) has none"),
    ],
)
def test_what_is_missing_is_named(rng: Any, tmp_path: Path, lost: str, says: str) -> None:
    stacks = random_stacks(rng, "NVFP4_AWQ", E, H, W, bias="float32")
    tensors = single_experts(stacks, "NVFP4_AWQ")
    del tensors[CONTAINER + lost]
    directory = write_checkpoint(tmp_path, tensors, "NVFP4_AWQ")
    with Checkpoint(directory) as checkpoint, pytest.raises(CheckpointError) as caught:
        stack_experts(checkpoint, CONTAINER)
    assert says in str(caught.value)


def test_stacks_of_unlike_numbers_of_experts_are_refused(rng: Any, tmp_path: Path) -> None:
    tensors = dotted_experts(random_stacks(rng, "FP8", E, H, W), "FP8")
    tensors = {
        name: (dtype, value[: E - 1] if ".up_proj." in name else value)
        for name, (dtype, value) in tensors.items()
    }
    says = "up_proj has 2 experts, another projection 3"
    with Checkpoint(write_checkpoint(tmp_path, tensors, "FP8")) as checkpoint:
        record = container(checkpoint)
        with pytest.raises(CheckpointError, match=says):
            stack_experts(checkpoint, record)


def test_unequal_factors_of_gate_and_up_are_refused(rng: Any, tmp_path: Path) -> None:
    tensors = single_experts(random_stacks(rng, "NVFP4_AWQ", E, H, W), "NVFP4_AWQ")
    name = f"{CONTAINER}.1.up_proj.pre_quant_scale"
    tensors[name] = ("BF16", tensors[name][1] + np.uint16(1))
    directory = write_checkpoint(tmp_path, tensors, "NVFP4_AWQ")
    says = "pre_quant_scale of expert 1: gate and up have one input"
    with Checkpoint(directory) as checkpoint, pytest.raises(CheckpointError, match=says):
        stack_experts(checkpoint, CONTAINER)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.0.gate_proj"]
)
def test_what_is_no_container_is_refused(name: str) -> None:
    with Checkpoint(DATA / "checkpoints" / "qwen3moe_fp8") as checkpoint:
        with pytest.raises(CheckpointError, match="is no container of experts"):
            stack_experts(checkpoint, name)
        with pytest.raises(CheckpointError, match="nothing quantized is named"):
            stack_experts(checkpoint, "model.layers.7.mlp.experts")


# config.json


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_act": "silu", "num_experts_per_tok": 8}, {"activation": "silu", "top_k": 8}),
        ({"hidden_act": "swish"}, {"activation": "silu"}),
        ({"hidden_act": "gelu"}, {"activation": "gelu"}),
        ({"hidden_activation": "gelu_pytorch_tanh", "top_k_experts": 4},
         {"activation": "gelu_tanh", "top_k": 4}),
        ({"hidden_act": "silu", "mlp_hidden_act": "relu2"}, {"activation": "relu2"}),
        ({"hidden_act": "silu", "swiglu_limit": 10}, {"activation": "silu", "limit": 10.0}),
        ({"hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_limit": 6.0},
         {"activation": "swigluoai", "alpha": 1.5, "limit": 6.0}),
        ({"hidden_act": "silu", "swiglu_limits": [0.0, 7.0]}, {"activation": "silu"}),
        ({"hidden_act": "silu", "moe_topk": [3, 4]}, {"activation": "silu", "top_k": 3}),
        ({"text_config": {"hidden_act": "gelu", "num_experts_per_token": 2}, "hidden_act": "silu"},
         {"activation": "gelu", "top_k": 2}),
        ({"thinker_config": {"text_config": {"hidden_act": "gelu"}}}, {"activation": "gelu"}),
        ({"num_experts_per_tok": True, "hidden_act": 3}, {}),
        ({"hidden_act": "mish"}, {}),
        ({}, {}),
    ],
)  # fmt: skip
def test_what_config_json_says(
    rng: Any, tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    tensors = single_experts(random_stacks(rng, "FP8", E, H, W), "FP8")
    options, _ = read(write_checkpoint(tmp_path, tensors, "FP8", **config))
    keys = ("activation", "alpha", "beta", "limit", "top_k")
    assert {key: options[key] for key in keys if key in options} == expected


def test_it_is_public() -> None:
    assert moqext.stack_experts is stack_experts
    assert follow(np.arange(8).reshape(1, 8)).tolist() == [[0, 2, 4, 6, 1, 3, 5, 7]]
    assert json.loads((DATA / "exports/gpt_oss_fp8/config.json").read_text())["hidden_act"] == "silu"

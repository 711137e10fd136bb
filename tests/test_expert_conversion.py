"""`convert` and `compare` of experts in every stored form: each is the same experts as any other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moqext import Checkpoint, ExpertLayer
from moqext.tools.compare import compare, open_side

from .expert_files import (
    CONTAINER,
    dotted_experts,
    expert_weights,
    single_experts,
    stacked_experts,
    write_checkpoint,
)
from .linear_cases import random_x
from .moe_cases import ALGOS, random_routing, random_stacks

E, H, W = 3, 160, 96  # experts, hidden size, expert width
CONFIG = {"hidden_act": "silu", "num_experts_per_tok": 2}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
LLAMA4 = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
FORMS = [
    (algo, form)
    for algo in ALGOS
    for form in ("one by one", "no gate", "dotted", "straight", "transposed", "turns")
    if form in ("one by one", "no gate", "dotted") or algo in ("FP8", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
]


def source(rng: Any, directory: Path, algo: str, form: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint, and its weights by "gate", "up" and "w2"."""
    turns = form == "turns"
    stacks = random_stacks(rng, algo, E, H, W, gated=form != "no gate", interleaved=turns)
    second = "w13_weight_scale" if algo == "FP8" else "w13_weight_scale_2"
    if form in ("straight", "transposed", "turns"):
        stacks[second][:, 1] = stacks[second][:, 0]
        tensors = stacked_experts(stacks, algo, transposed=form != "straight")
        name = f"{CONTAINER}.gate_up_proj_{second.removeprefix('w13_')}"
        tensors[name] = ("F32", tensors[name][1][:, 0])
    elif form == "dotted":
        tensors = dotted_experts(stacks, algo, CONTAINER)
    else:
        tensors = single_experts(stacks, algo, gated=form != "no gate", names="gate_proj")
    config = {"turns": GPT_OSS, "transposed": LLAMA4}.get(form, {})
    directory = write_checkpoint(directory, tensors, algo, dtype="bfloat16", **CONFIG, **config)
    weights = expert_weights(stacks, algo, form != "no gate", None, turns)
    if algo == "NVFP4_AWQ":
        for part in weights:
            factors = stacks[f"{'w2' if part == 'w2' else 'w13'}_pre_quant_scale"]
            weights[part] = weights[part] * bfloat16(factors)[:, None, :]
    return directory, weights


def bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@pytest.mark.parametrize(("algo", "form"), FORMS)
def test_every_form_unstacked_is_its_weights(rng: Any, tmp_path: Path, algo: str, form: str) -> None:
    directory, weights = source(rng, tmp_path / "in", algo, form)
    with Checkpoint(directory) as checkpoint:
        checkpoint.convert(tmp_path / "out", to="fp32", experts="unstacked")
    names = {"gate": "gate_proj", "up": "up_proj", "w2": "down_proj"}
    with Checkpoint(tmp_path / "out") as converted:
        assert len(converted.tensors) == E * len(weights)
        for part, values in weights.items():
            for expert, expected in enumerate(values):
                got = converted.tensor(f"{CONTAINER}.{expert}.{names[part]}.weight")
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("algo", "form"), FORMS)
@pytest.mark.parametrize("experts", ["source", "unstacked", "stacked"])
def test_a_conversion_compares_equal(rng: Any, tmp_path: Path, algo: str, form: str, experts: str) -> None:
    directory, weights = source(rng, tmp_path / "in", algo, form)
    with Checkpoint(directory) as checkpoint:
        checkpoint.convert(tmp_path / "out", to="fp32", experts=experts)
        with open_side(tmp_path / "out") as other:
            result = compare(checkpoint, other)
            turned_round = compare(other, checkpoint)
    for found in (result, turned_round):
        assert (found.only_first, found.only_second, found.misshapen) == ((), (), ())
        assert sum(np.prod(row.shape) for row in found.layers) == sum(part.size for part in weights.values())
        assert {row.relative_error for row in found.layers} == {0.0}


def test_gate_and_up_apart_against_one_stack(rng: Any, tmp_path: Path) -> None:
    """Step-3.7 as the files have it, and as Transformers has it in memory."""
    directory, weights = source(rng, tmp_path / "in", "NVFP4", "dotted")
    both = np.concatenate([weights["gate"], weights["up"]], axis=1)
    noisy = both + np.float32(0.01) * rng.standard_normal(both.shape).astype(np.float32)
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": ("F32", noisy),
        "model.layers.0.mlp.experts.down_proj": ("F32", weights["w2"]),
    }
    write_checkpoint(tmp_path / "plain", tensors, {"quant_algo": None})
    with open_side(directory) as ours, open_side(tmp_path / "plain") as theirs:
        for first, second in ((ours, theirs), (theirs, ours)):
            result = compare(first, second)
            assert (result.only_first, result.only_second, result.misshapen) == ((), (), ())
            rows = {row.layer: row for row in result.layers}
            assert len(rows) == 2 * E + 1
            for half, part in enumerate(("gate", "up")):
                for expert in range(E):
                    name = f"{CONTAINER}.{part}_proj[{expert}]"
                    name = name if first is ours else f"{CONTAINER}.gate_up_proj[{expert}].{part}"
                    exact = noisy[expert, half * W : (half + 1) * W]
                    error = np.linalg.norm(weights[part][expert] - exact)
                    base = exact if first is ours else weights[part][expert]
                    assert rows[name].relative_error == pytest.approx(error / np.linalg.norm(base), rel=1e-4)


@pytest.mark.parametrize("form", ["one by one", "no gate", "dotted", "straight", "transposed", "turns"])
@pytest.mark.parametrize("algo", ["NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"])
def test_as_fp8_the_layer_runs(rng: Any, tmp_path: Path, algo: str, form: str) -> None:
    directory, _ = source(rng, tmp_path / "in", algo, form)
    with Checkpoint(directory) as checkpoint:
        before = checkpoint.load(CONTAINER, dtype="float32", activation="silu")
        checkpoint.convert(tmp_path / "out", to="fp8")
    with Checkpoint(tmp_path / "out") as converted:
        assert [problem.code for problem in converted.problems if problem.severity == "error"] == []
        after = converted.load(CONTAINER, dtype="float32", activation="silu")
    assert isinstance(before, ExpertLayer)
    assert isinstance(after, ExpertLayer)
    assert after.method.quant_algo == "FP8_PER_CHANNEL_PER_TOKEN"
    x = random_x(rng, (32, H), "float32")
    weights, ids = random_routing(rng, 32, before.top_k, E)
    y, expected = after(x, weights, ids), before(x, weights, ids)
    # Weights and activations of three products rounded to e4m3, about a 38th of each.
    assert np.linalg.norm(y - expected) < 0.12 * np.linalg.norm(expected)

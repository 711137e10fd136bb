"""`verify` of experts: they run together, and what is wrong with one of them is found and named."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moqext import Checkpoint, ExpertLayer
from moqext.__main__ import main
from moqext.tools.verify import select_weights
from moqext.tools.verify_experts import all_experts, few_experts
from moqext.tools.verify_row import LIMITS
from tests.expert_files import CONTAINER, dotted_experts, single_experts, stacked_experts, write_checkpoint
from tests.moe_cases import ALGOS, random_stacks

E, H, W = 6, 160, 96  # experts, hidden size, expert width
CONFIG = {"hidden_act": "silu", "num_experts_per_tok": 2}


def verify(capsys: Any, directory: Path, *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["verify", str(directory), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def rows_of(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(row["layer"], row["kind"], row["status"]) for row in result["rows"]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("algo", ALGOS)
def test_experts_of_every_algorithm_pass(
    rng: Any, tmp_path: Path, capsys: Any, algo: str, dtype: str
) -> None:
    """Whatever is rounded in the middle: no row fails for a value that lies on a boundary."""
    tensors = single_experts(random_stacks(rng, algo, E, H, W, bias="bfloat16"), algo)
    status, result = verify(capsys, write_checkpoint(tmp_path, tensors, algo, **CONFIG), "--dtype", dtype)
    assert status == 0, result
    (row,) = result["rows"]
    assert rows_of(result) == [(CONTAINER, "experts", "ok")]
    assert (row["group"], row["shape"], row["weights"]) == (None, [E, H, W], 3 * E * H * W)
    assert row["relative_error"] <= LIMITS[dtype][0]
    assert row["kernel"].startswith("cpu:")
    assert result["totals"]["ran"]["share"] == 1


def test_work_grows_with_the_number_of_experts(rng: Any, tmp_path: Path, capsys: Any) -> None:
    """Every expert was looked for among all: 68 seconds for 2048 experts of 32 x 32."""
    calls = []
    for count in (16, 64):
        tensors = single_experts(random_stacks(rng, "FP8", count, 32, 32), "FP8")
        directory = write_checkpoint(tmp_path / str(count), tensors, "FP8", **CONFIG)
        verify(capsys, directory)  # what is done once, or kept, is done here
        seen: Counter[str] = Counter()
        sys.setprofile(
            lambda frame, event, _, seen=seen: seen.update([frame.f_code.co_qualname] * (event == "call"))
        )
        try:
            assert verify(capsys, directory)[0] == 0
        finally:
            sys.setprofile(None)
        calls.append(seen)
    few, many = calls
    assert {name: count for name, count in many.items() if count > 5 * few[name] + 100} == {}


@pytest.mark.parametrize("compute", ["fp8", "fp4", "auto"])
def test_other_computes(rng: Any, tmp_path: Path, capsys: Any, compute: str) -> None:
    tensors = stacked_experts(random_stacks(rng, "NVFP4", E, H, W), "NVFP4")
    directory = write_checkpoint(tmp_path, tensors, "NVFP4", **CONFIG)
    status, result = verify(capsys, directory, "--compute", compute)
    assert (status, rows_of(result)) == (0, [(CONTAINER, "experts", "ok")]), result


def test_stacks_of_every_form_pass(rng: Any, tmp_path: Path, capsys: Any) -> None:
    stacks = random_stacks(rng, "NVFP4", E, H, W)
    turns = random_stacks(rng, "NVFP4", E, H, W, interleaved=True)
    for role in ("weight_scale_2", "input_scale"):
        turns[f"w13_{role}"] = turns[f"w13_{role}"][:, 0]
    gpt_oss = {"architectures": ["GptOssForCausalLM"]}
    forms = {
        "dotted": (dotted_experts(stacks, "NVFP4"), {}),
        "stacked": (stacked_experts(stacks, "NVFP4", transposed=False), {}),
        "transposed": (stacked_experts(stacks, "NVFP4"), {}),
        "turns": (stacked_experts(turns, "NVFP4"), gpt_oss),
    }
    for form, (tensors, config) in forms.items():
        directory = write_checkpoint(tmp_path / form, tensors, "NVFP4", **config)
        status, result = verify(capsys, directory)  # config.json says neither top_k nor activation
        assert (status, [row["status"] for row in result["rows"]]) == (0, ["ok"]), (form, result)


def test_one_wrong_expert_is_named(data: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One percent off for the tokens of one expert is outside the limits."""
    run = ExpertLayer.__call__

    def off(self: Any, x: Any, weights: Any, ids: Any, *args: Any) -> Any:
        y = run(self, x, weights, ids, *args)
        y[(ids == 2).any(axis=1)] *= np.float32(1.01)
        return y

    monkeypatch.setattr(ExpertLayer, "__call__", off)
    directory = data / "checkpoints" / "qwen3moe_nvfp4"
    status, result = verify(capsys, directory, "--dtype", "float32", "--tokens", "64")
    assert status == 1
    (bad,) = [row for row in result["rows"] if row["status"] != "ok"]
    assert (bad["layer"], bad["status"]) == ("model.layers.0.mlp.experts", "failed")
    said = r"limits are 1e-05 and 1e-05, errors \S+ and \S+; every token of experts 2 is beyond them"
    assert re.fullmatch(said, bad["message"])
    assert main(["verify", str(directory), "--dtype", "float32"]) == 1
    assert capsys.readouterr().out.endswith("result: 1 wrong layer\n")


@pytest.mark.parametrize("case", ["exports/gpt_oss_fp8", "exports/mixtral_nvfp4", "exports/llama4_nvfp4"])
def test_a_weight_that_was_misread_is_found(
    data: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Two rows of an expert changed places in the stack, from which reference and kernel compute alike."""
    from moqext.layers import load_experts

    fill = load_experts.fill_stacks

    def wrong(*args: Any) -> Any:
        stacks = fill(*args)
        stacks["w13_weight"][1, :2] = stacks["w13_weight"][1, 1::-1].copy()
        return stacks

    monkeypatch.setattr(load_experts, "fill_stacks", wrong)
    status, result = verify(capsys, data / case)
    assert status == 1
    (bad,) = [row for row in result["rows"] if row["status"] != "ok"]
    assert bad["status"] == "failed"
    assert ", expert 1: " in bad["message"]
    assert bad["message"].endswith(" weights are misread")


def test_a_damaged_code_refuses_the_layer(
    rng: Any, tmp_path: Path, capsys: Any, overwrite: Any, copied: Any
) -> None:
    directory = copied("checkpoints/qwen3moe_fp8")
    overwrite(directory, "model.layers.0.mlp.experts.1.up_proj.weight", b"\x7f", 5)
    status, result = verify(capsys, directory)
    assert status == 1
    (bad,) = [row for row in result["rows"] if row["status"] != "ok"]
    assert bad["status"] == "error"
    assert "a NaN code" in bad["message"]


def test_experts_that_cannot_run_together_run_one_by_one(rng: Any, tmp_path: Path, capsys: Any) -> None:
    nvfp4, fp8 = (single_experts(random_stacks(rng, algo, E, H, W), algo) for algo in ("NVFP4", "FP8"))
    tensors = {name: value for name, value in nvfp4.items() if ".down_proj." not in name}
    tensors |= {name: value for name, value in fp8.items() if ".down_proj." in name}
    directory = write_checkpoint(tmp_path, tensors, "NVFP4", **CONFIG)
    status, result = verify(capsys, directory)
    assert status == 0
    assert [row["status"] for row in result["rows"]] == ["ok"] * 3 * E
    assert {row["kind"] for row in result["rows"]} == {"linear"}
    assert {row["group"] for row in result["rows"]} == {CONTAINER}
    with Checkpoint(directory) as checkpoint:
        (why,) = {weight.why for weight in select_weights(checkpoint)}
    assert why.startswith("expert 0 has gate_proj NVFP4 g16, up_proj NVFP4 g16, down_proj FP8")
    assert {row["message"] for row in result["rows"]} == {f"by itself, as {why}"}


def test_uncalibrated_experts_run_one_by_one(rng: Any, tmp_path: Path, capsys: Any) -> None:
    """Linears find their activation scale as they run; experts have one of the checkpoint, or none."""
    stacks = random_stacks(rng, "FP8", E, H, W, input_scales=False)
    status, result = verify(capsys, write_checkpoint(tmp_path, single_experts(stacks, "FP8"), "FP8"))
    assert (status, len(result["rows"])) == (0, 3 * E)
    assert {(row["kind"], row["status"]) for row in result["rows"]} == {("linear", "ok")}


def test_a_damaged_expert_is_found_among_the_others(rng: Any, tmp_path: Path, capsys: Any) -> None:
    """With an error against one member no layer runs, and the others are verified by themselves."""
    stacks = random_stacks(rng, "NVFP4", E, H, W)
    stacks["w2_weight_scale_2"][3] = np.inf
    directory = write_checkpoint(tmp_path, single_experts(stacks, "NVFP4"), "NVFP4", **CONFIG)
    status, result = verify(capsys, directory)
    assert status == 1
    bad = [(row["layer"], row["status"]) for row in result["rows"] if row["status"] != "ok"]
    assert bad == [(f"{CONTAINER}.3.down_proj", "error")]
    assert len(result["rows"]) == 3 * E


def test_stacks_that_cannot_run_are_read_and_say_why(rng: Any, tmp_path: Path, capsys: Any) -> None:
    stacks = random_stacks(rng, "FP8_PB_WO", E, 256, W)
    directory = write_checkpoint(tmp_path, stacked_experts(stacks, "FP8_PB_WO"), "FP8_PB_WO", **CONFIG)
    status, result = verify(capsys, directory)
    assert (status, [row["status"] for row in result["rows"]]) == (0, ["read", "read"])
    assert "one has rows of both" in result["rows"][0]["message"]
    assert main(["inspect", str(directory)]) == 0
    assert "recognised, not runnable: stacked experts (FP8_PB_WO)\n" in capsys.readouterr().out


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(4, 2, 16), (128, 8, 1), (7, 3, 2), (1, 1, 5)])
def test_routings(rng: Any, experts: int, top_k: int, tokens: int) -> None:
    class Layer:
        num_experts = experts

    layer: Any = Layer()
    layer.top_k = top_k
    weights, ids = all_experts(rng, tokens, layer)
    assert set(ids.ravel()) == set(range(experts))
    counts = np.bincount(ids.ravel())
    assert counts.max() - counts.min() <= 1
    assert ids.shape[0] >= tokens
    few_weights, few = few_experts(rng, 64, layer)
    assert few.shape == few_weights.shape == (64, top_k)
    assert np.bincount(few.ravel(), minlength=experts).max() >= 32
    assert 0 <= few.min() <= few.max() < experts
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("config", [CONFIG, CONFIG | {"architectures": ["GptOssForCausalLM"]}])
def test_experts_whose_gates_are_gone_fail(rng: Any, tmp_path: Path, capsys: Any, config: Any) -> None:
    tensors = single_experts(random_stacks(rng, "NVFP4", E, H, W), "NVFP4")
    tensors = {name: tensor for name, tensor in tensors.items() if ".gate_proj." not in name}
    status, result = verify(capsys, write_checkpoint(tmp_path, tensors, "NVFP4", **config))
    assert status == 1
    assert rows_of(result) == [(CONTAINER, "experts", "failed")]
    assert "no expert has a gate" in result["rows"][0]["message"]

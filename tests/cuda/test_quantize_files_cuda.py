"""`quantize --device cuda`: the files of the CPU, byte for byte."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import moqext
from moqext.__main__ import main
from moqext.ops.quantize_weights import SEARCHED
from moqext.tools.quantize import quantizers, weights
from moqext.tools.quantize.scales import write_scales

from ..quantize_files import CASES, cache_amax, input_amax, unquantized

safetensors = pytest.importorskip("safetensors.numpy")
pytestmark = pytest.mark.gpu


def contents(directory):
    """File -> its bytes, of all files below; the configuration without the time of the machine."""
    paths = [path for path in sorted(Path(directory).rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def both(source, tmp_path, *arguments):
    """Quantizes on the CPU and on the device, and checks that all files are the same."""
    made = []
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        assert main(["quantize", str(source), str(out), "--device", device, "--quiet", *arguments]) == 0
        made.append(contents(out))
    assert made[0].keys() == made[1].keys()
    for name, content in made[0].items():
        assert made[1][name] == content, name
    return made[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.export)
def test_genuine_models(case, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_BYTES", 8 << 10)  # several pieces and batches of these small weights
    monkeypatch.setattr(quantizers, "PIECE_BYTES", 20 << 10)
    monkeypatch.setattr(quantizers, "BATCH_BYTES", 20 << 10)
    source = unquantized(case, tmp_path / "in")
    arguments = [] if case.to is None else ["--to", case.to]
    arguments += [argument for rule in case.rules for argument in ("--rule", rule)]
    arguments += [argument for glob in case.exclude for argument in ("--exclude", glob)]
    if case.kv_cache is not None:
        arguments += ["--kv-cache", case.kv_cache]
    write_scales(tmp_path / "scales.json", input_amax(case) | cache_amax(case))
    scales = str(tmp_path / "scales.json") if case.given else "none"
    files = both(source, tmp_path, *arguments, "--scales", scales, "--max-shard-size", "40KB")
    assert "config.json" in files


@pytest.mark.parametrize("algo, search", [(algo, search) for search in SEARCHED for algo in SEARCHED[search]])
def test_searches(algo, search, tmp_path, rng):
    tensors = {
        f"model.layers.{layer}.mlp.{name}.weight": rng.standard_normal(shape).astype(np.float16)
        for layer in range(3)
        for name, shape in (("gate_proj", (288, 160)), ("up_proj", (288, 160)), ("down_proj", (160, 288)))
    }
    (tmp_path / "in").mkdir()
    safetensors.save_file(tensors, tmp_path / "in" / "model.safetensors")
    arguments = ["--to", algo, "--scale-search", search, "--scales", "none"]
    both(tmp_path / "in", tmp_path, *arguments)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("algo", ["FP8_PER_CHANNEL_PER_TOKEN", "W4A16_NVFP4", "MXFP8"])
def test_weights_that_are_not_finite(value, algo, tmp_path, capsys):
    weight = np.ones((256, 64), np.float32)
    weight[200, 3] = value
    (tmp_path / "in").mkdir()
    safetensors.save_file({"layers.0.q_proj.weight": weight}, tmp_path / "in" / "model.safetensors")
    told = []
    for device in ("cpu", "cuda:0"):
        out = tmp_path / "out"
        assert main(["quantize", str(tmp_path / "in"), str(out), "--to", algo, "--device", device]) == 2
        told.append(capsys.readouterr().err.splitlines()[-1])
    assert told[0] == told[1]
    assert "layers.0.q_proj: a weight is infinite or NaN" in told[1]


def test_large_weights_in_several_batches(tmp_path, rng):
    """Batches that are not whole, and memory that grows from one weight to the next."""
    shapes = {"q_proj": (4096, 4096), "k_proj": (1000, 4096), "v_proj": (1000, 4096), "o_proj": (8192, 4000)}
    tensors = {
        f"model.layers.0.self_attn.{name}.weight": rng.standard_normal(shape, np.float32).astype(np.float16)
        for name, shape in shapes.items()
    }
    (tmp_path / "in").mkdir()
    safetensors.save_file(tensors, tmp_path / "in" / "model.safetensors")
    both(
        tmp_path / "in",
        tmp_path,
        "--rule",
        "*q_proj* MXFP8",
        "--rule",
        "*k_proj* FP8_PB_WO",
        "--rule",
        "*v_proj* FP8_PER_CHANNEL_PER_TOKEN",
        "--rule",
        "*o_proj* W4A16_NVFP4",
    )


def test_a_run_of_the_cpu_goes_on_on_the_device(tmp_path, rng):
    tensors = {
        f"model.layers.{layer}.mlp.up_proj.weight": rng.standard_normal((256, 64)).astype(np.float32)
        for layer in range(8)
    }
    (tmp_path / "in").mkdir()
    safetensors.save_file(tensors, tmp_path / "in" / "model.safetensors")

    class Ended(Exception):
        pass

    def stop(done, total, name):
        if done > total // 2:
            raise Ended

    with moqext.Checkpoint(tmp_path / "in") as checkpoint:
        whole = checkpoint.quantize(tmp_path / "whole", to="W4A16_NVFP4")
        for device in ("cpu", "cuda"):
            with pytest.raises(Ended):
                checkpoint.quantize(tmp_path / "out", to="W4A16_NVFP4", device=device, progress=stop)
        result = checkpoint.quantize(tmp_path / "out", to="W4A16_NVFP4", device="cuda")
    assert result.bytes_kept > 0
    assert result.bytes_written == whole.bytes_written
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]

"""`bench` on a device: the runtime of moqext times linears and layers of checkpoints, graphs time torch."""

import json
import statistics
import sys

import pytest

from moqext import LinearMethod
from moqext.__main__ import main
from moqext.tools import bench, bench_layers

pytestmark = pytest.mark.gpu
SHAPES = ("--device", "cuda", "--shapes", "512x256,64x128", "--algos", "FP8,NVFP4", "--tokens", "1,16")


def run(capsys, *options):
    assert main(["bench", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(params=[True, False], ids=["torch", "without"])
def torch(request, monkeypatch):
    if request.param:
        return pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    return None


def test_linears(capsys, torch):
    told = run(capsys, *SHAPES)
    assert (told["device"], told["calibration"], told["flop_per_second"]) == ("cuda:0", None, None)
    assert len(told["rows"]) == 4 * (3 if torch else 2)
    for row in told["rows"]:
        rows, columns = row["shape"]
        assert (
            row["kernel"] == "torch" if row["quant_algo"] == bench.PEER else row["kernel"].startswith("cuda:")
        )
        assert 0 < row["best_seconds"] <= row["seconds"] < 1e-3
        assert row["flop"] == 2 * rows * columns * row["tokens"]
        assert row["floor_seconds"] == row["bytes"] / told["bytes_per_second"]
        assert (row["torch_ratio"] is None) == (torch is None)


def test_the_kernel_that_is_timed_is_the_one_that_is_chosen(rng):
    method = LinearMethod("NVFP4", 1024, [512], device="cuda:0")
    params, plan = bench.random_params(method, rng), method._plan
    for tokens in (1, 64, 512):
        kernel, variant, *_ = plan.config(tokens)
        ((name, number, seconds),) = plan.measure(tokens, params, chosen=True)
        assert (name, number) == (kernel, variant)
        assert 0 < seconds < 1e-3
    for name, number, _ in plan.measure(64, params)[:4]:
        plan.keep(64, name, number)
        assert plan.measure(64, params, chosen=True)[0][:2] == plan.config(64)[:2]
        assert plan.config(64)[0] == name


@pytest.mark.parametrize("name", ["qwen3moe_nvfp4", "llama_fp8_kvfp8", "llama_mxfp8", "llama_int4_awq"])
def test_layers_of_a_checkpoint(data, capsys, torch, name):
    told = run(capsys, str(data / "checkpoints" / name), "--device", "cuda:0", "--tokens", "1,40")
    assert [each["tokens"] for each in told["passes"]] == [1, 40]
    for each in told["passes"]:
        rows = [row for row in told["layers"] if row["tokens"] == each["tokens"]]
        assert all(row["kernel"].startswith("cuda:") and row["seconds"] < 1e-3 for row in rows)
        assert all((row["torch_seconds"] is not None) == (torch is not None) for row in rows)
        assert each["seconds"] == pytest.approx(sum(len(row["names"]) * row["seconds"] for row in rows))
        assert (each["torch_ratio"] is None) == (torch is None)
    assert not told["refused"]


def test_torch_is_timed_as_a_layer_of_its_own(rng):
    """The graph's time of a call is that of a call among many, not of a launch by the host."""
    torch = pytest.importorskip("torch")
    timer = bench_layers.DeviceTimer(torch, rng, "cuda:0")
    small, large = (timer.torch((rows, 4096), [1])[0] for rows in (256, 65536))
    assert len(small) == 5
    assert statistics.median(small) < statistics.median(large)

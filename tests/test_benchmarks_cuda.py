"""The CUDA benchmark without a GPU: what it measures and checks against, and what it makes of results."""

import argparse
import importlib.util
import json
import math
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from moqext import ops
from moqext.tools.bench import PEER, Ceilings

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a source tree without benchmarks")


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return pytest.importorskip(f"benchmarks.{name}")


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("linear", monkeypatch)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("layers", monkeypatch)


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("goals", monkeypatch)


def row(peer: str, seconds: float, **other: Any) -> dict[str, Any]:
    about = {"shape": [4096, 4096], "tokens": 1, "quant_algo": "FP8", "peer": peer, "kernel": "cuda:one"}
    about |= {
        "protocol": "interleaved",
        "seconds": seconds,
        "best_seconds": seconds,
        "worst_seconds": seconds,
    }
    about |= {"calls": 20, "error": 1e-3, "bytes": 16_800_000, "flop": 1 << 25, "floor_seconds": 4e-6}
    return about | other


# ---- what runs ----


def test_parts_deal_every_shape_once(linear: Any, layers: Any) -> None:
    for count in (1, 2, 3, 5, 16):
        dealt = [linear.part_of(layers.SHAPES, (index, count)) for index in range(1, count + 1)]
        assert sorted(shape for part in dealt for shape in part) == sorted(layers.SHAPES)
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_quick_shapes_are_usual_ones_that_every_kernel_takes(layers: Any) -> None:
    published = {
        (*cell[:2],) for cell in json.loads((ROOT / "benchmarks/published_h200.json").read_text())["cells"]
    }
    assert set(layers.QUICK_SHAPES) <= set(layers.SHAPES)
    assert set(layers.QUICK_SHAPES) <= published
    assert all(columns % 128 == 0 for _, columns in layers.SHAPES)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_a_part_that_is_none(linear: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected i/n"):
        linear._part(text)


@pytest.mark.parametrize("text", ["4096", "4096x", "0x4096", "axb", "1x2x3"])
def test_a_shape_that_is_none(layers: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected OUTxIN"):
        layers.shape_of(text)


def test_options(linear: Any, layers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.parse(["--quick"]).shapes == layers.QUICK_SHAPES
    assert linear.parse([]).shapes == layers.SHAPES
    assert linear.parse([]).algo == layers.ALGOS
    assert linear.parse(["--nvfp4"]).algo == ("NVFP4", "NVFP4, fp8")
    assert linear.parse(["--nvfp4", "--algo", "W4A16_NVFP4"]).algo == ["W4A16_NVFP4"]
    given = linear.parse(["--shapes", "64x128", "128x64", "--part", "2/3", "--tokens", "1", "7"])
    assert (given.shapes, given.part, given.tokens) == ([(64, 128), (128, 64)], (2, 3), [1, 7])
    with pytest.raises(SystemExit):
        linear.parse(["--merge", "a.json"])
    assert "--merge needs --json" in capsys.readouterr().err


def test_variables_hold_for_a_while(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOQEXT_PDL", "1")
    monkeypatch.delenv("MOQEXT_KERNEL", raising=False)
    with linear.variables({"MOQEXT_PDL": "0", "MOQEXT_KERNEL": "cuda:x"}):
        assert (os.environ["MOQEXT_PDL"], os.environ["MOQEXT_KERNEL"]) == ("0", "cuda:x")
    assert os.environ["MOQEXT_PDL"] == "1"
    assert "MOQEXT_KERNEL" not in os.environ
    with pytest.raises(KeyError), linear.variables({"MOQEXT_PDL": "0"}):
        os.environ["MOQEXT_IS_NOT_SET"]
    assert os.environ["MOQEXT_PDL"] == "1"


def test_everyone_is_told_apart_and_says_why_it_cannot_run(linear: Any) -> None:
    peers = linear.all_peers()
    assert len({(peer.quant_algo, peer.name) for peer in peers}) == len(peers)
    reasons = {peer.name: peer.missing() for peer in peers}
    here = importlib.util.find_spec("deep_gemm") is not None
    assert here == ("deep_gemm" not in str(reasons["DeepGEMM"]))
    assert here or str(reasons["DeepGEMM"]).endswith("deep_gemm not installed")
    assert all(reason is None or reason for reason in reasons.values())
    chosen = {peer.name for peer in linear.select(peers, ["rowwise"])}
    assert chosen == {"torch rowwise", "torch rowwise, fast", "torch rowwise, fast, PDL"}
    with pytest.raises(ValueError, match="torch bfloat16"):
        linear.select(peers, ["nobody"])


def test_without_dependent_launch_it_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = load("peers.own", monkeypatch).usual
    assert {peer.name for peer in usual({"MOQEXT_PDL": "0"})} == {"moqext, no PDL"}
    assert {peer.name for peer in usual({"MOQEXT_PDL": "1"})} == {"moqext", "moqext, fast"}
    assert {peer.name for peer in usual({})} == {"moqext", "moqext, fast"}
    assert {peer.quant_algo for peer in usual({}) if peer.fast_accum} == {"FP8", "FP8_PER_CHANNEL_PER_TOKEN"}


@pytest.mark.parametrize("seconds, calls", [(1e-6, 160), (10e-6, 100), (60e-6, 20), (5e-4, 8), (4e-3, 4)])
def test_calls_of_a_graph(monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int) -> None:
    assert load("device", monkeypatch).calls_for(seconds) == calls


# ---- what is computed ----


@pytest.mark.parametrize(
    "algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", PEER, "NVFP4", "NVFP4, fp8", "W4A16_NVFP4"]
)
def test_a_layer_means_what_moqext_computes(layers: Any, algo: str, rng: np.random.Generator) -> None:
    """Data, references and moqext's CPU path agree, so that a peer is measured against the right thing."""
    torch = pytest.importorskip("torch")
    problem = layers.Problem.random(torch, (96, 256), 9, "cpu", int(rng.integers(1 << 30)), rotate=1)
    layer = problem.layer(algo)
    rows = layers.checked_rows(torch, 9, "cpu")
    expected = problem.expected(algo, rows)
    assert expected.shape == (9, 96)
    if algo == PEER:
        got = problem.x @ layer.codes[0].T
    else:
        options = {"in_features": 256, "out_partitions": [96], **layers.method_arguments(algo)}
        method = pytest.importorskip("moqext").LinearMethod(**options)
        got = method(problem.x, method.prepare(layer.checkpoint(1)))
    assert layers.relative_error(torch, got, expected) < 2.5e-3
    assert math.isnan(layers.relative_error(torch, got * float("nan"), expected))
    plain = problem.x.double() @ problem.weight.double().T
    error = layers.relative_error(torch, got, plain)
    assert 1e-4 < error < (0.01 if algo == PEER else 0.13 if "NVFP4" in algo else 0.06)  # the format's cost


def test_nvfp4_weights_are_rounded_to_the_nearest_code(
    monkeypatch: pytest.MonkeyPatch, layers: Any, rng: np.random.Generator
) -> None:
    torch = pytest.importorskip("torch")
    nvfp4 = load("nvfp4", monkeypatch)
    # In one group, with a scale of 1 by the other 6 x 448: every tie, and both sides of zero.
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    first = torch.tensor([[*ties, -0.25, 6.0, -6.0, 0.0, 0.2, 0.3, -2.4, 4.9, 5.1] + [6.0 * 448] * 16])
    codes, scale, second = nvfp4.quantize(torch, first)
    assert (float(second), scale.float().tolist()) == (1.0, [[1.0, 448.0]])
    found = nvfp4.meaning(torch, codes, scale, second)[0].tolist()
    assert found[:7] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert found[7:16] == [0.0, 6.0, -6.0, 0.0, 0.0, 0.5, -2.0, 4.0, 6.0]
    weight = torch.from_numpy(rng.standard_normal((8, 256), np.float32))
    own = nvfp4.quantize(torch, weight)
    again = nvfp4.quantize(torch, nvfp4.meaning(torch, *own).float())
    assert torch.equal(own[0], again[0])
    halves = nvfp4.halves(torch, own[0], 128).reshape(8, 2, 64)
    columns = torch.stack([own[0] & 15, own[0] >> 4], 2).reshape(8, 2, 2, 64)
    assert torch.equal(halves & 15, columns[:, :, 0])
    assert torch.equal(halves >> 4, columns[:, :, 1])


@pytest.mark.parametrize(
    "algo, scheme", [("FP8_PER_CHANNEL_PER_TOKEN", "fp8_token"), ("FP8_PB_WO", "fp8_group")]
)
def test_activations_are_quantized_bit_for_bit(
    layers: Any, algo: str, scheme: str, rng: np.random.Generator
) -> None:
    torch = pytest.importorskip("torch")
    problem = layers.Problem.random(torch, (128, 384), 5, "cpu", int(rng.integers(1 << 30)), rotate=1)
    codes, scales = layers.quantize_activations(torch, problem.x, problem.layer(algo))
    wanted, wanted_scales = ops.quantize(problem.x, scheme)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


def test_rows_that_are_checked(layers: Any) -> None:
    torch = pytest.importorskip("torch")
    assert layers.checked_rows(torch, 64, "cpu").tolist() == list(range(64))
    few = layers.checked_rows(torch, 1000, "cpu").tolist()
    assert few == [*range(32), *range(968, 1000)]


class Fake:
    """A peer on the CPU that computes the layer, forgets its last row, doubles it, or refuses."""

    environment: dict[str, str] = {}  # noqa: RUF012 - a protocol's attribute

    def __init__(self, linear: Any, name: str, quant_algo: str = "FP8") -> None:
        self.linear, self.name, self.quant_algo = linear, name, quant_algo

    def missing(self) -> None:
        return None

    def weights(self, layer: Any) -> Any:
        if self.name == "without weights":
            raise ValueError("no such weight\nat all")
        return layer.codes

    def bind(self, layer: Any, weights: Any, x: Any) -> Any:
        if self.name == "few tokens" and len(x) > 4:
            raise RuntimeError("too many tokens")
        torch, out = layer.torch, x.new_empty(len(x), layer.shape[0])
        codes, scale = (x.float(), 1.0) if layer.input_scale is None else self.quantized(layer, x)

        def call(weight: Any) -> None:
            y = codes.double() @ weight.double().T * scale
            y = y if layer.weight_scale is None else y * layer.weight_scale
            last = len(x) - (self.name == "forgets")
            out[:last] = ((2 if self.name == "doubles" else 1) * y).to(torch.bfloat16)[:last]

        return self.linear.Bound(call, out, f"fake:{self.name}", call if self.name == "right" else None)

    def quantized(self, layer: Any, x: Any) -> Any:
        codes, scale = self.linear.layers.quantize_activations(layer.torch, x, layer)
        return codes, scale.double()


def test_who_is_wrong_or_cannot_run_is_left_out(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of a measurement but for the GPU's clock."""
    torch = pytest.importorskip("torch")
    times = linear.device.Times(2e-6, 1e-6, 3e-6, 20)
    alone = []

    def measure_alone(torch: Any, graph: Any) -> Any:
        alone.append(graph)
        return times

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(linear.device, "Graph", lambda torch, call, weights: call(weights[0]))
    monkeypatch.setattr(linear.device, "interleaved", lambda torch, graphs: dict.fromkeys(graphs, times))
    monkeypatch.setattr(linear.device, "alone", measure_alone)
    monkeypatch.setattr(linear.device, "sustained", lambda torch, graph, power: times)
    monkeypatch.setattr(linear.device, "host_seconds", lambda torch, call, weights: times)
    monkeypatch.setattr(linear, "HOST_SHAPE", (48, 128))
    monkeypatch.setattr(linear, "SUSTAINED_SHAPES", ((48, 128),))
    monkeypatch.setattr(linear, "ALONE_FROM", 100)
    names = ("right", "forgets", "doubles", "few tokens", "without weights")
    peers = [Fake(linear, name) for name in names] + [Fake(linear, "right", PEER)]
    ceilings = {"bfloat16": Ceilings(1e12, 1e15), "fp8": Ceilings(1e12, 2e15)}
    run = linear.Run(torch, peers, ceilings, None, 7, "cpu")
    run.measure_shape((48, 128), (1, 70, 130), sustained=True)
    measured = [(row["peer"], row["quant_algo"], row["tokens"], row["protocol"]) for row in run.rows]
    assert measured == [
        ("right", "FP8", 1, "interleaved"),
        ("few tokens", "FP8", 1, "interleaved"),
        ("right", PEER, 1, "interleaved"),
        ("right", "FP8", 70, "interleaved"),
        ("right", PEER, 70, "interleaved"),
        ("right", "FP8", 130, "alone"),
        ("right", PEER, 130, "alone"),
        ("right", "FP8", 130, "sustained"),
        ("right", PEER, 130, "sustained"),
    ]
    assert len(alone) == 2
    reasons = {(one["peer"], one["tokens"]): one["reason"] for one in run.skipped}
    assert reasons["without weights", None] == "no such weight"
    assert reasons["few tokens", 70] == "too many tokens"
    for tokens in (1, 70, 130):
        assert reasons["doubles", tokens] == "wrong: relative error 1.0e+00"
        assert reasons["forgets", tokens] == "wrong: relative error nan, outputs not written"
    hosts = [(row["peer"], row["quant_algo"], row["result"]) for row in run.host]
    assert hosts == [
        ("right", "FP8", "given"),
        ("right", "FP8", "new"),
        ("few tokens", "FP8", "given"),
        ("right", PEER, "given"),
        ("right", PEER, "new"),
    ]
    first = run.rows[0]
    assert first["bytes"] == 48 * 128 + 4 + 2 * (48 + 128)
    assert first["flop"] == 2 * 48 * 128
    assert first["floor_seconds"] == pytest.approx(first["bytes"] / 1e12)
    assert 0 < first["error"] < 2.5e-3


# ---- what is made of results ----


def record(rows: list[dict[str, Any]], bandwidth: float = 4e12, **environment: Any) -> dict[str, Any]:
    ceilings = {"bytes_per_second": bandwidth, "flop_per_second": 1e15}
    about = {"gpu": "Chip", "driver": "1", "torch": "2", "cuda": "13", "date": "2026-01-02T03:04"}
    about |= {"moqext": {"commit": "abc"}, **environment}
    result = {"environment": about, "ceilings": {"bfloat16": dict(ceilings), "fp8": dict(ceilings)}}
    return result | {"rows": rows, "host": [], "skipped": []}


def test_parts_are_joined_over_the_best_ceilings(linear: Any) -> None:
    first = record([row("moqext", 5e-6)], 4.0e12, date="2026-01-01")
    second = record([row("moqext", 6e-6, shape=[64, 64])], 4.2e12, date="2026-01-02")
    both = linear.merge([first, second])
    assert [tuple(one["shape"]) for one in both["rows"]] == [(4096, 4096), (64, 64)]
    assert both["ceilings"]["fp8"]["bytes_per_second"] == 4.2e12
    floor = Ceilings(4.2e12, 1e15).floor(16_800_000, 1 << 25)
    assert [one["floor_seconds"] for one in both["rows"]] == [floor, floor]
    assert first["rows"][0]["floor_seconds"] == 4e-6, "parts stay as they are"
    with pytest.raises(ValueError, match="driver is '1' here, '2' there"):
        linear.merge([first, record([], driver="2")])


def test_a_shape_that_fails_leaves_what_came_before(
    linear: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes go from large to small, and none begins when the seconds are over."""
    pytest.importorskip("torch")

    def measure(run: Any, shape: tuple[int, int], tokens: Any, *, sustained: bool) -> None:
        if run.rows:
            raise RuntimeError("no memory")
        run.rows.append({"shape": list(shape)})

    monkeypatch.setattr(linear.device, "measure_ceilings", lambda torch: {"fp8": Ceilings(1e12, 1e15)})
    monkeypatch.setattr(linear, "choose_peers", lambda options: [])
    monkeypatch.setattr(linear, "facts", lambda torch, power: {"gpu": "GPU"})
    monkeypatch.setattr(linear.torch_linear, "WORKSPACE", {})
    monkeypatch.setattr(linear.Run, "measure_shape", measure)
    path = tmp_path / "result.jsonl"
    command = ["linear", "--shapes", "4x4", "8x8", "--json", str(path)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(RuntimeError, match="no memory"):
        linear.main()
    assert linear.record.read(path)["rows"] == [{"shape": [8, 8]}]
    monkeypatch.setattr("sys.argv", [*command, "--seconds", "0"])
    linear.main()
    assert linear.record.read(path)["rows"] == []


def test_a_time_limit_is_a_start_and_the_floor(goals: Any) -> None:
    assert goals.time_limit(1, 9.7e-6) == pytest.approx(11.6e-6)
    assert goals.time_limit(16, 9.7e-6) == goals.time_limit(1, 9.7e-6)
    assert goals.time_limit(17, 9.5e-6) == pytest.approx(12.0e-6)
    assert goals.time_limit(65, 9.5e-6) is None


def test_a_cell_knows_its_best_path(goals: Any) -> None:
    rows = [
        row("moqext", 5e-6),
        row("moqext, no PDL", 8.1e-6),
        row("slow", 9e-6),
        row("fast", 8e-6),
        row("other algorithm", 1e-6, quant_algo="FP8_PB_WO"),
        row("torch bfloat16", 8.5e-6, quant_algo=PEER),
        row("moqext", 1e-6, protocol="sustained"),
    ]
    published = {((4096, 4096), 1, "FP8"): [goals.Figure("theirs", "interleaved", 7.5e-6)]}
    cell, other = goals.cells(rows, published)
    assert (other.key[2], other.own, other.ratio, goals.goals(other)) == ("FP8_PB_WO", None, None, [])
    assert [one["peer"] for one in cell.peers] == ["fast", "torch bfloat16", "slow"]
    assert cell.published.peer == "theirs"
    assert cell.ratio == pytest.approx(1.5)
    verdicts = {goal.name: (goal.met, goal.reached) for goal in goals.goals(cell)}
    assert verdicts["time"] == (True, 5e-6)
    assert verdicts["no slower than any"] == (True, pytest.approx(1.5))
    assert verdicts["without PDL"] == (False, pytest.approx(8 / 8.1))
    (bare,) = goals.cells([row("moqext", 5e-6)], {})
    assert (bare.best, bare.published, bare.ratio) == (None, None, None)
    assert [goal.name for goal in goals.goals(bare)] == ["time"]


def test_less_exact_sums_are_compared_among_themselves(goals: Any) -> None:
    rows = [row("moqext", 5e-6), row("torch, fast", 4e-6), row("torch", 6e-6), row("moqext, fast", 3e-6)]
    exact, fast = goals.cells(rows, {})
    assert (exact.key[2], exact.best["peer"], exact.ratio) == ("FP8", "torch", pytest.approx(1.2))
    assert (fast.key[2], fast.own["peer"], fast.best["peer"]) == ("FP8, fast", "moqext, fast", "torch, fast")
    (all_of_them,) = goals.cells(rows[:3], {})
    assert (all_of_them.best["peer"], all_of_them.ratio) == ("torch, fast", pytest.approx(0.8))


def test_goals_of_blocks(goals: Any) -> None:
    def verdicts(own: float, torch: float, tokens: int, flop: int) -> dict[str, bool]:
        about = {"quant_algo": "FP8_PB_WO", "tokens": tokens, "flop": flop}
        found = goals.cells([row("moqext", own, **about), row("torch blockwise", torch, **about)], {})
        return {goal.name: goal.met for goal in goals.goals(found[0])}

    assert verdicts(5e-6, 7.4e-6, 64, 1)["torch blockwise"] is False
    assert verdicts(5e-6, 7.5e-6, 64, 1)["torch blockwise"] is True
    assert "torch blockwise" not in verdicts(5e-6, 7.5e-6, 65, 1)
    assert verdicts(1e-3, 2e-3, 8192, goals.LARGE_FLOP)["rate"] is False
    assert verdicts(0.7e-3, 2e-3, 8192, goals.LARGE_FLOP)["rate"] is True


def test_goals_of_nvfp4(goals: Any) -> None:
    def verdicts(algo: str, tokens: int, own: float, **others: float) -> dict[str, bool]:
        about = {"quant_algo": algo, "tokens": tokens}
        rows = [row("moqext", own, **about)]
        if "wide" in others:
            rows.append(row("torch bfloat16", others["wide"], quant_algo=PEER, tokens=tokens))
        if "marlin" in others:
            rows.append(row("Marlin", others["marlin"], **about))
        if "without" in others:
            rows.append(row("moqext, no PDL", others["without"], **about))
        if "fp8" in others:
            fp8 = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "tokens": tokens}
            rows += [row("torch rowwise", 1e-9, **fp8), row("moqext", others["fp8"], **fp8)]
        published = {((4096, 4096), tokens, "NVFP4"): [goals.Figure("Humming", "interleaved", 12.0e-6)]}
        cell = next(cell for cell in goals.cells(rows, published) if cell.key[2] == algo)
        return {goal.name: goal.met for goal in goals.goals(cell)}

    assert verdicts("NVFP4", 1, 6.3e-6, wide=9.4e-6) == {"time": True, "bfloat16": False}
    assert verdicts("NVFP4", 16, 6.4e-6, wide=9.6e-6) == {"time": False, "bfloat16": True}
    assert verdicts("W4A16_NVFP4", 64, 5.3e-6, wide=8e-6) == {"time": True, "bfloat16": True}
    assert verdicts("NVFP4", 32, 10e-6) == {"Marlin and Humming": True}
    assert verdicts("NVFP4", 256, 10e-6, marlin=11.9e-6, wide=9.6e-6) == {
        "Marlin and Humming": False,
        "bfloat16": False,
    }
    assert verdicts("NVFP4", 1024, 10e-6, wide=9.5e-6) == {"bfloat16": True}
    assert verdicts("NVFP4", 1024, 10e-6, wide=9.5e-6, without=9.6e-6) == {
        "bfloat16": True,
        "without PDL": False,
    }
    assert verdicts("NVFP4, fp8", 64, 10e-6, wide=9e-6, fp8=9e-6) == {}
    assert verdicts("NVFP4, fp8", 128, 10e-6, wide=9e-6, fp8=9.6e-6) == {"FP8": True}
    assert verdicts("NVFP4, fp8", 1024, 10e-6, wide=16e-6, fp8=9.4e-6) == {"bfloat16": False, "FP8": False}


def test_published_figures_are_those_of_the_fair_protocol(goals: Any) -> None:
    published = goals.read_published()
    large = published[(8192, 8192), 8192, "FP8"]
    assert {figure.protocol for figure in large} == {"alone", "interleaved"}
    best = goals.best_published(large, 8192)
    assert (best.peer, best.protocol) == ("vLLM CUTLASS, per tensor", "alone")
    assert best.seconds == pytest.approx(813e-6)
    small = published[(4096, 4096), 1, "FP8"]
    assert goals.best_published(small, 1).seconds == pytest.approx(8.9e-6)
    assert goals.best_published([], 1) is None
    unfair = [goals.Figure("a", "interleaved", 1.0), goals.Figure("b", "alone", 2.0)]
    assert goals.best_published(unfair, 1023).peer == "a"
    assert goals.best_published(unfair, 1024).peer == "b"
    assert goals.best_published(unfair[:1], 1024).peer == "a"


def test_published_figures_have_a_meaning(goals: Any, layers: Any) -> None:
    data = json.loads(goals.PUBLISHED.read_text())
    assert len(data["cells"]) > 500
    for outs, ins, tokens, algo, peer, protocol, microseconds in data["cells"]:
        assert protocol in data["about"]["protocols"]
        assert algo in (*layers.ALGOS, *layers.NVFP4_ALGOS, PEER)
        assert peer
        # None beats reading the weight once at the memory's datasheet rate, or the chip's peak.
        values = {PEER: 2, "NVFP4": 0.5625, "NVFP4, fp8": 0.5}.get(algo, 1)
        peak = 989e12 if algo in (PEER, "NVFP4") else 1979e12
        assert microseconds * 1e-6 > max(values * outs * ins / 4.8e12, 2 * outs * ins * tokens / peak)


def test_geomean(goals: Any) -> None:
    assert goals.geomean([1.0, 4.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="at least one"):
        goals.geomean([])


def test_linears_beside_the_fastest_path(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = load("pairs", monkeypatch)
    rows = [
        row("moqext", 5e-6),
        row("moqext, no PDL", 6e-6),
        row("torch tensorwise", 8e-6),
        row("torch bfloat16", 12e-6, quant_algo=PEER),
        row("moqext", 3e-3, tokens=8192, protocol="sustained", clock_mhz=1500.0, watts=690.0),
        row("torch tensorwise", 9e-6, tokens=64),
        row("moqext", 5e-6, quant_algo="NVFP4"),
        row("moqext", 7e-6, quant_algo="NVFP4, fp8"),
    ]
    monkeypatch.setattr(pairs.record, "read_all", lambda name: {"chip": record(rows), "h200": record(rows)})
    found = pairs.linears("linear_cuda", lambda algo: True)
    alone = [
        (pair.algo, pair.beside, pair.peer, round(pair.ratio, 2)) for pair in found if pair.chip == "chip"
    ]
    assert alone == [
        ("FP8", pairs.ANY, "torch tensorwise", 1.6),
        ("FP8", pairs.TORCH, "bfloat16", 2.4),
        ("NVFP4", pairs.ANY, "torch bfloat16", 2.4),
        ("NVFP4", pairs.TORCH, "bfloat16", 2.4),
        ("NVFP4, fp8", pairs.ANY, "torch bfloat16", 1.71),
        ("NVFP4, fp8", pairs.TORCH, "bfloat16", 1.71),
    ]
    assert (found[0].plain, found[1].plain) == (6e-6, None)
    assert dict(found[0].goals) == {"time": True, "no slower than any": True, "without PDL": True}
    others = {(pair.algo, pair.beside): pair.peer for pair in found if pair.chip == "h200"}
    assert others["NVFP4", pairs.MARLIN].startswith(("Marlin", "Humming"))
    assert ("FP8", pairs.MARLIN) not in others


def test_plots_have_the_shapes_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = load("subjects", monkeypatch)
    rows = [row("moqext", 5e-6), row("moqext", 2e-3, tokens=8192), row("torch tensorwise", 8e-6)]
    rows += [row("moqext", 1e-6, shape=[64, 64])]
    monkeypatch.setattr(subjects.record, "read_all", lambda name: {"chip": record(rows)})
    ((name, drawing),) = subjects.linear_plots("linear_cuda", "cuda-fp8", subjects.roofline)()
    assert name == "cuda-fp8.chip.svg"
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    assert "4096 × 4096" in drawing
    assert "64 × 64" not in drawing

"""The program that measures every config, without a GPU: what it would measure, and the file it writes."""

import importlib
import math
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CHIP = "H200 SXM"
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a source tree without benchmarks")


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.configs")


def subject_maker(configs: Any) -> Any:
    """Plans of cells on a chip that is not here, without tensors."""

    def subject_of(cell: Any) -> Any:
        if cell.where in configs.MODELS:
            plan = configs.experts_plan(cell.layer, configs.MODELS[cell.where], CHIP)
        else:
            plan = configs.linear_plan(cell.layer, configs.layers.shape_of(cell.where), CHIP)
        return configs.Subject(plan, lambda number: None, 1, 1e-5, True)

    return subject_of


def in_time(subject: Any, tokens: int, found: Any) -> dict[Any, float]:
    return dict.fromkeys(found, 1e-06)


def measured(configs: Any, *arguments: str, timer: Any = in_time, until: float = math.inf) -> list[str]:
    """The lines of a grid."""
    lines: list[str] = []
    options = configs.parse(["--output", "none", *arguments])
    configs.measure(configs.grid(options), subject_maker(configs), timer, CHIP, lines.append, until)
    return lines


@pytest.mark.parametrize(
    ("layer", "kernel", "count"),
    [
        ("FP8", "sm90_fp8_prefill", 17),
        ("FP8_PB_WO", "sm90_fp8_prefill", 14),
        ("FP8_PB_WO", "cublaslt", 1),
        ("FP8_PER_CHANNEL_PER_TOKEN", "cublaslt", 2),
        ("NVFP4", "sm90_nvfp4_decode", 7),
        ("NVFP4", "sm90_nvfp4_medium", 28),
        ("NVFP4", "sm90_nvfp4_prefill", 4),
        ("NVFP4,fp8", "sm90_nvfp4_fp8_medium", 19),
        ("NVFP4,fp8", "sm90_nvfp4_fp8_prefill", 6),
    ],
)
def test_configs_of_a_linear(configs: Any, layer: str, kernel: str, count: int) -> None:
    """Configs that the table has and that the layer has room for; none twice."""
    plan = configs.linear_plan(layer, (4096, 4096), CHIP)
    found = [config for config in configs.configs_of(plan, 4) if config.kernel == f"cuda:{kernel}"]
    assert len(found) == len(set(found)) == count
    for config in found:
        plan.keep(4, config.kernel, config.variant)
        assert plan.config(4)[2] == config.number or config.variant == configs.OTHER_SCALING


@pytest.mark.parametrize(
    ("layer", "kernel", "count"),
    [
        ("FP8", "sm90_fp8_decode", 5),
        ("NVFP4", "sm90_nvfp4_decode", 5),
        ("FP8_PB_WO", "sm90_fp8_prefill", 2),
        ("NVFP4", "sm90_nvfp4_prefill", 5),
        ("NVFP4,fp8", "sm90_nvfp4_fp8_prefill", 2),
        ("NVFP4,fp8", "sm80_nvfp4_fp8", 1),
    ],
)
def test_configs_of_experts(configs: Any, layer: str, kernel: str, count: int) -> None:
    plan = configs.experts_plan(layer, configs.MODELS["Qwen3-30B-A3B"], CHIP)
    found = Counter(config.kernel for config in configs.configs_of(plan, 4))
    assert found[f"cuda:{kernel}"] == count


def test_the_grid_has_every_kernel_that_is_chosen_there(configs: Any) -> None:
    lines = measured(configs, "--tokens", "1", "64", "2048", "--shapes", "4096x4096", "28672x8192")
    kernels = {tuple(line.split("; ")[i] for i in (1, 2, 3, 4)) for line in lines}
    cells = {cell[1:] for cell in kernels}
    experts = sum(configs.has_experts(*each) for each in product(configs.LAYERS, configs.MODELS))
    assert len(configs.MODELS) * 5 < experts < len(configs.MODELS) * len(configs.LAYERS)
    assert len(cells) == 3 * (2 * len(configs.LAYERS) + experts)
    for layer, where, tokens in cells:
        plan = subject_maker(configs)(configs.Cell(layer, where, 0)).plan
        assert (plan.backend(int(tokens)), layer, where, tokens) in kernels


def test_a_file_is_continued(configs: Any) -> None:
    """Cells that are measured, and one that failed, are left out; a cut leaves every format."""
    lines = measured(configs, "--only", "linears", "--tokens", "4", "--shapes", "4096x4096")
    found = configs.measured_cells("# name=x; sms=1\n" + "\n".join(lines))
    assert found == {configs.Cell(layer, "4096x4096", 4) for layer in configs.LAYERS}
    assert lines[0] == f"{CHIP}; cuda:sm90_fp8_decode; FP8; 4096x4096; 4; 2:1.00"
    assert measured(configs, until=0) == ["# no time was left for FP8; 4096x4096; 1 and what follows"]


def test_a_cell_that_fails_costs_no_other(configs: Any) -> None:
    def fails(subject: Any, tokens: int, found: Any) -> dict[Any, float]:
        if tokens == 4:
            raise RuntimeError("no;\n memory")
        return in_time(subject, tokens, found)

    about = ("--only", "linears", "--shapes", "4096x4096", "--layer", "FP8")
    lines = measured(configs, *about, "--tokens", "4", "8", timer=fails)
    assert lines[0] == "# failed: FP8; 4096x4096; 4; RuntimeError: no; memory"
    assert configs.measured_cells("\n".join(lines)) == {
        configs.Cell("FP8", "4096x4096", 4),
        configs.Cell("FP8", "4096x4096", 8),
    }
    lost = measured(configs, *about, "--tokens", *"4" * 5, timer=fails)
    assert lost[3:] == ["# too many in a row; run it again for the rest"]


def test_calls_are_told_apart_in_a_graph(configs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges into a call's first kernel become ordinary, those within a call stay."""
    edges = {(node, node + 1): None for node in range(1, 6)}
    monkeypatch.setattr(configs.graph_edges, "edges_of", lambda graph: edges)
    policy = configs.begins(0, 3)
    assert policy(list(edges)) == [(2, 3), (4, 5)]
    with pytest.raises(ValueError, match="of 4 calls, got 6 kernels"):
        configs.begins(0, 4)


@pytest.mark.parametrize("layer", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "NVFP4,fp8"])
def test_what_is_timed_runs(configs: Any, monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    """On the CPU, whose results no poison of a rotated weight or of random experts reaches."""
    torch = pytest.importorskip("torch")
    subject = configs.Linears(torch, "cpu").subject(configs.Cell(layer, "256x512", 3))
    assert subject.turns == configs.COPIES
    assert torch.equal(subject.call(0), subject.call(subject.turns - 1))
    sizes = configs.Sizes(8, 2, 256, 128, of_all=32)
    monkeypatch.setattr(configs, "MODELS", {"tiny": sizes})
    experts = configs.ManyExperts(torch, "cpu").subject(configs.Cell(layer, "tiny", 5))
    assert bool(experts.call(0).isfinite().all())

"""The benchmarks run, and what a call costs has not grown several times over."""

import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from . import moe_calls

ROOT = Path(__file__).parent.parent
WAYS = Path(__file__).parent / "data" / "expert_ways.txt"
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a source tree without benchmarks")


def run(tmp_path: Path, name: str, *options: str, keep: str = "--json") -> dict[str, Any]:
    """The JSON record that a benchmark writes."""
    path = tmp_path / "deeper" / "result.json"
    # The tree comes last, so that the package under test is the one the tests found.
    code = "import runpy, sys; sys.path += ['.', 'python']; runpy.run_module({!r}, None, '__main__')"
    command = [sys.executable, "-c", code.format(f"benchmarks.{name}"), keep, str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return json.loads(path.read_text())


@pytest.mark.unsanitized
def test_the_cost_of_a_call(tmp_path: Path) -> None:
    record = run(tmp_path, "host_cost", "--rounds", "100")
    assert {"cpu", "python", "numpy", "date", "moqext"} <= set(record["environment"])
    goals = {row["case"]: row for row in record["rows"] if row["goal_us"]}
    assert len(goals) in (3, 6, 20)  # without torch, with it, with a GPU too
    for name, row in goals.items():
        # Half of a goal would be met on an idle machine of today; this is for what became 5 times slower.
        assert 0 < row["best_us"] < 4 * row["goal_us"], name


def test_exclusion(tmp_path: Path) -> None:
    record = run(tmp_path, "exclusion", "--runs", "1")
    assert {row["what"] for row in record["rows"]} == {"read", "modelopt", "vllm"}
    assert record["names"] == 60_000


def test_a_llama(tmp_path: Path) -> None:
    """A small one; its logits are those of the values that the quantized codes mean, in every form."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    sizes = ("--batch", "1,2", "--context", "16", "--prefill", "24")
    record = run(tmp_path, "llama", "--tiny", "--device", "cpu", *sizes, keep="--output")
    assert record["failed"] == []
    weights = {"bfloat16", "FP8", "NVFP4"}
    expected = {(form, each) for form in ("modules", "transformers", "fused") for each in weights}
    expected.remove(("transformers", "bfloat16"))  # nothing of it is fused
    assert len(record["checks"]) == 2 * len(expected)
    assert all(line["error"] < 0.01 for line in record["checks"])
    rows = record["rows"]
    assert {(row["form"], row["weights"]) for row in rows} == expected
    assert all(row["graph_error"] == 0 for row in rows if row["what"] == "decode")
    assert {row["goal"] for row in rows if "goal" in row} == {2.4, 1.65, 1.0, 1.3}
    sizes = {row["weights"]: row["bytes"] for row in rows}
    assert sizes["NVFP4"] < sizes["FP8"] < sizes["bfloat16"]


def test_linears_among_neighbours(tmp_path: Path) -> None:
    """Small ones: every output is what the codes mean for the input that it has between its neighbours."""
    pytest.importorskip("torch")
    record = run(tmp_path, "neighbours", "--tiny", "--device", "cpu", keep="--output")
    roles = {"llama": {"qkv", "o", "gate_up", "down"}, "square": {"square"}}
    expected = {
        (chain, role, tokens, algo, neighbours)
        for chain, names in roles.items()
        for role in names
        for tokens in (1, 16, 64)
        for algo in ("NVFP4", "FP8", "bfloat16")
        for neighbours in ("torch", "moqext")
    }
    names = ("chain", "role", "tokens", "quant_algo", "neighbours")
    assert {tuple(check[name] for name in names) for check in record["checks"]} == expected
    assert all(0 < check["error"] < 2.5e-3 for check in record["checks"])
    assert record["rows"] == []  # times are of a GPU


def test_experts_by_themselves_and_in_blocks(tmp_path: Path) -> None:
    """Small ones: every output is what the codes mean for the input and the routing that it has."""
    pytest.importorskip("torch")
    record = run(tmp_path, "moe", "--tiny", "--device", "cpu", "--tokens", "1", "16", keep="--output")
    algos = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "NVFP4, fp8", "bfloat16")
    places = [("uniform", None), ("power law", None), ("router", "torch"), ("router", "moqext")]
    expected = {
        (tokens, algo, routing, neighbours)
        for tokens in (1, 16)
        for algo in algos
        for routing, neighbours in places
    }
    names = ("tokens", "quant_algo", "routing", "neighbours")
    found = {tuple(check.get(name) for name in names) for check in record["checks"]}
    assert {check for check in found if check[1] != "bfloat16"} == {
        check for check in expected if check[1] != "bfloat16"
    }
    assert found <= expected  # torch has no grouped product everywhere
    assert all(0 < check["error"] < 2.5e-3 for check in record["checks"] if check["quant_algo"] != "bfloat16")
    assert record["rows"] == []  # times are of a GPU


def test_a_cell_of_experts_that_is_wrong_leaves_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT)
    moe = importlib.import_module("benchmarks.moe")
    layers = importlib.import_module("benchmarks.moe_layers")
    errors = iter([0.0, 0.0, 1.0])
    monkeypatch.setattr(moe.Experts, "errors", lambda *_: layers.Errors(0.0, next(errors)))
    path = tmp_path / "result.json"
    command = ["moe", "--tiny", "--device", "cpu", "--tokens", "1", "3", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(ArithmeticError, match="wrong"):
        moe.main()
    assert [check["error"] for check in json.loads(path.read_text())["checks"]] == [0.0, 0.0, 1.0]


def test_a_whole_model_of_experts(tmp_path: Path) -> None:
    """A small one: each form is what the codes mean, and decodes."""
    pytest.importorskip("transformers")
    options = ["--tiny", "--device", "cpu", "--batch", "1", "3", "--context", "32"]
    record = run(tmp_path, "moe_model", *options, keep="--output")
    forms = {("grouped_mm", "bfloat16"), ("batched_mm", "bfloat16")}
    forms |= {(form, algo) for form in ("modules", "transformers") for algo in ("FP8", "NVFP4")}
    found = {(row["form"], row["weights"], row["tokens"]) for row in record["rows"]}
    assert found == {(*form, tokens) for form in forms for tokens in (1, 3)}
    assert {check["form"] for check in record["checks"]} == {"modules", "transformers"}
    assert all(check["error"] < 0.02 for check in record["checks"])
    assert record["failed"] == []


def test_policies_of_programmatic_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    edges = importlib.import_module("benchmarks.graph_edges")
    assert edges.in_order([(3, 4), (1, 2), (2, 3)]) == [(1, 2), (2, 3), (3, 4)]
    assert edges.in_order([]) == []
    for branched in ([(1, 2), (1, 3)], [(1, 3), (2, 3)], [(1, 2), (3, 4)]):
        with pytest.raises(ValueError, match="one behind the other"):
            edges.in_order(branched)
    some = [(1, 2), (2, 3), (5, 6), (6, 7), (7, 8)]
    assert list(edges.nothing(some)) == []
    assert list(edges.everything(some)) == some
    assert edges.behind_strangers(some) == [(1, 2), (5, 6)]
    # Three a layer, of which the first layer lacks the first.
    assert edges.only(0, 3)(some) == [(1, 2), (2, 3), (6, 7), (7, 8)]
    assert edges.only(2, 3)(some) == [(1, 2), (5, 6), (6, 7)]


@pytest.fixture
def cpu_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that writes docs/results/cpu-linears.md."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.cpu_page")


def test_the_page_of_the_cpu_is_what_its_results_make(cpu_page: Any) -> None:
    """Else: python -m benchmarks.cpu_page."""
    files = cpu_page.page_files()
    for name, text in files.items():
        assert (ROOT / "docs" / "results" / name).read_text() == text, name
    assert {path.name for path in (ROOT / "docs" / "results").glob("cpu-linears.*")} == set(files)


def test_the_page_of_experts_is_what_its_results_make(cpu_page: Any) -> None:
    """Else: python -m benchmarks.moe_cpu_page."""
    module = importlib.import_module("benchmarks.moe_cpu_page")
    assert module.PAGE.read_text() == module.page_text()


def test_the_page_of_experts_on_cuda_is_what_its_results_make(cpu_page: Any) -> None:
    """Else: python -m benchmarks.moe_page."""
    files = importlib.import_module("benchmarks.moe_page").page_files()
    for name, text in files.items():
        assert (ROOT / "docs" / "results" / name).read_text() == text, name
    assert {path.name for path in (ROOT / "docs" / "results").glob("cuda-experts.*")} == set(files)


def test_the_page_of_experts_on_cuda(cpu_page: Any) -> None:
    """A result with what a run writes: every table has its figures, every goal its verdict."""
    module = importlib.import_module("benchmarks.moe_page")

    def row(tokens: int, algo: str | None, neighbours: str, policy: str, us: float) -> dict[str, Any]:
        routing = "uniform" if neighbours == "alone" else "router"
        about = {"model": "small", "tokens": tokens, "routing": routing, "quant_algo": algo}
        about |= {"neighbours": neighbours, "policy": policy, "seconds": us * 1e-6, "active_experts": 8.0}
        return about if algo is None else about | {"floor_seconds": 4e-6, "flop": 4e9}

    rows = [row(1, "bfloat16", "alone", "all", 30)]
    rows += [row(1, "FP8", "alone", "all", 10), row(1, "FP8", "alone", "none", 12)]
    rows += [row(1, "NVFP4", "alone", "all", 9.5), row(4096, "NVFP4, fp8", "alone", "all", 5)]
    rows += [row(1, None, "torch", "all", 20), row(1, "FP8", "torch", "all", 31.5)]
    assert [module.goal(each) for each in rows[:3]] == [None, 5e-6 + 4e-6 / 0.95, 5e-6 + 4e-6 / 0.95]
    assert module.goal(rows[4]) == 4e9 / 850e12
    table = module.times_table(rows, "uniform", "all").splitlines()
    assert table[2] == "| 1 | 8 | 30.0 (13%) | 10.0 (40%) **3.00×** | 9.5 (42%) **3.16×** |  |"
    assert "| 12.0 (33%) **2.50×** |" in module.times_table(rows, "uniform", "none")
    assert "31.5 (+11.5)" in module.blocks_table(rows)
    assert module.goals_table(rows).splitlines()[2:] == [
        "| small | `FP8` | 10.0 / 9.2 |  |",
        "| small | `NVFP4` | **9.5** / 9.6 |  |",
        "| small | `NVFP4, fp8` |  | 5.0 / 4.7 |",
    ]
    sizes = {"experts": 8, "of_all": None, "top_k": 2, "hidden": 256, "intermediate": 128}
    rate = {"bytes_per_second": 3e12, "flop_per_second": 8e14}
    result = {
        "environment": {"gpu": "GPU", "torch": "2", "driver": "1", "date": "2026-01-01T00:00"},
        "ceilings": {"fp8": rate, "bfloat16": rate},
        "models": {"small": sizes},
        "rows": rows,
        "checks": [{"quant_algo": "FP8", "error": 1e-3}],
        "host": [{"model": "small", "quant_algo": "FP8", "seconds": 7e-6}],
    }
    assert "| small | `FP8` | 7.0 |" in module.section("gpu", result)
    assert module.plot(result).startswith("<svg")
    others = module.others_table(
        rows, {("small", 1, "FP8"): (20.0, "Other"), ("small", 1, "bfloat16"): (1, "")}
    )
    assert others.splitlines()[2:] == ["| small | `FP8` | 1 | 10.0 **2.00×** | 12.0 **1.67×** | 20.0 Other |"]
    assert module.read_published()["Qwen3-30B-A3B", 1, "NVFP4"] == (28.7, "SGLang Marlin")


def test_experts_beside_public_kernels(cpu_page: Any) -> None:
    """Paths of the harness have their names, later runs replace earlier ones, the fastest other counts."""
    module = importlib.import_module("benchmarks.moe_peers")

    def run(us: dict[str, float]) -> dict[str, Any]:
        about = {"model": "qwen3", "T": 64, "routing": "uniform", "floor": 10.0, "active": 126.0}
        rows = [
            {**about, "peer": peer, "us": each, "lo": each, "hi": each, "kernel": None}
            for peer, each in us.items()
        ]
        checks = [{"model": "qwen3", "peer": peer, "error": 0.001} for peer in us]
        facts = {"gpu": "GPU", "date": "2026-01-01T00:00", "torch": "2", "driver": "1"}
        facts["moqext"] = {"commit": "abc"}
        return {"environment": facts, "rows": rows, "checks": checks, "failed": {}}

    first = run({"moq_nv": 200.0, "marlin": 150.0, "hum": 140.0, "hum_mx8": 1.0})
    second = run({"moq_nv": 100.0, "moq_nv-ordinary": 112.0, "moq_nv_fp8": 50.0})
    joined = module.join([first, second])
    assert len(joined["rows"]) == len(joined["checks"]) == 5
    assert joined["rows"][0]["seconds"] == 100e-6
    other = run({})
    other["environment"]["gpu"] = "another"
    with pytest.raises(ValueError, match="on one chip, got GPU, another"):
        module.join([first, other])
    page = importlib.import_module("benchmarks.moe_page")
    others = "Humming 140.0, vLLM Marlin 150.0"
    start = "| Qwen3-30B-A3B | `NVFP4"
    published = {
        ("Qwen3-30B-A3B", 64, "NVFP4"): (143.0, "Other"),
        ("Qwen3-30B-A3B", 1, "FP8"): (9.0, "Other"),
    }
    fastest = page.fastest_others(published, joined)
    assert fastest["Qwen3-30B-A3B", 64, "NVFP4"] == (140.0, "Humming")
    assert fastest["Qwen3-30B-A3B", 1, "FP8"] == (9.0, "Other")
    assert page.beside_section(joined)[-1].splitlines()[2:] == [
        f"{start}` | uniform | 64 | 10.0 | 100.0 **1.40×** | 112.0 **1.25×** | {others} |",
        f"{start}, fp8` | uniform | 64 | 10.0 | 50.0 **2.80×** |  | {others} |",
    ]


def test_experts_in_the_harness_of_others(cpu_page: Any) -> None:
    """Prepared at the first call, when static scales are known; a new result."""
    torch = pytest.importorskip("torch")
    layers = importlib.import_module("benchmarks.moe_layers")
    own = importlib.import_module("benchmarks.peers.own_experts")
    made = layers.Experts.random(torch, layers.TINY, "FP8", "cpu", 1)
    asked: list[bool] = []

    def stacks() -> dict[str, Any]:
        asked.append(True)
        return made.stacks

    call = own.OwnExperts("FP8", own.Shape(8, 2, 256, 128), stacks)
    assert not asked
    source = torch.Generator().manual_seed(2)
    x = torch.randn(5, 256, generator=source).to(torch.bfloat16)
    batch = layers.draw(torch, layers.TINY, x, torch.empty_like(x), "uniform", source)
    y = call(x, batch.weights, batch.ids, 5)
    assert 0 < made.errors(batch, y).worst < 2.5e-3
    wrong = y.clone()
    wrong[2] *= 1.5
    assert made.errors(batch, wrong).worst > 0.4
    assert made.errors(batch, wrong).median < 2.5e-3
    assert torch.equal(call(x, batch.weights, batch.ids, 5), y)
    assert len(asked) == 1
    assert call.kernel(5).startswith("cpu:")


@pytest.mark.parametrize("quant_algo", ["FP8", "FP8_PB_WO", "NVFP4", None])
def test_experts_without_a_gate(cpu_page: Any, quant_algo: str | None) -> None:
    """In moqext's formats and, if None, by torch's grouped product."""
    torch = pytest.importorskip("torch")
    layers = importlib.import_module("benchmarks.moe_layers")
    sizes = replace(layers.TINY, activation="relu2", gated=False)
    made = layers.Experts.random(torch, sizes, quant_algo or layers.PEER, "cpu", 1)
    call = layers.moqext_call(made)[0] if quant_algo else layers.torch_call(made)
    source = torch.Generator().manual_seed(2)
    x = torch.randn(5, 256, generator=source).to(torch.bfloat16)
    batch = layers.draw(torch, sizes, x, torch.empty_like(x), "uniform", source)
    y = call(batch)
    assert 0 < made.errors(batch, y).worst < (2.5e-3 if quant_algo else 2e-2)
    assert made.errors(batch, 1.5 * y).median > 0.4


@pytest.mark.parametrize(("layer", "ways"), [("FP8", 2), ("FP8_PB_WO", 2), ("NVFP4", 5), ("NVFP4,fp8", 2)])
def test_ways_of_experts(cpu_page: Any, layer: str, ways: int) -> None:
    """Every way is found, and a line of one is what tests of the choice read."""
    module = importlib.import_module("benchmarks.expert_ways")
    algo, _, compute = layer.partition(",")
    plan = moe_calls.plan(algo, 128, 2048, 768, 8, compute=compute or "exact", chip="H200 SXM")
    assert module.variants_of(plan, module.KERNELS[layer], 512) == list(range(1, ways + 1))
    cell = module.Cell("H200 SXM", layer, "Mixtral-8x7B", 512, {1: 530.06, 0: 563.14})
    assert cell.line() == f"H200 SXM; {layer}; Mixtral-8x7B; 512; 0:563.1 1:530.1"
    assert any(line.startswith(cell.line().rpartition("; ")[0]) for line in WAYS.read_text().splitlines())


def test_the_table_of_a_whole_model_of_experts(cpu_page: Any) -> None:
    module = importlib.import_module("benchmarks.moe_page")
    rows = [
        {"form": "grouped_mm", "weights": "bfloat16", "tokens": 1, "tokens_per_second": 50.2, "ratio": 0.5},
        {"form": "batched_mm", "weights": "bfloat16", "tokens": 1, "tokens_per_second": 100.4, "ratio": 1.0},
        {"form": "transformers", "weights": "NVFP4", "tokens": 1, "tokens_per_second": 301.0, "ratio": 3.0},
        {"form": "transformers", "weights": "NVFP4", "tokens": 16, "tokens_per_second": 900.0},
    ]
    assert module.models_table({"rows": rows}).splitlines()[2:] == [
        "| grouped_mm | bfloat16 | 50 |  |",
        "| batched_mm | bfloat16 | 100 |  |",
        "| transformers | `NVFP4` | 301 **3.00×** | 900 |",
    ]


def test_slices_of_experts_are_joined(cpu_page: Any) -> None:
    """Later rows take the place of the same ones, and know the run that they are of."""
    module = importlib.import_module("benchmarks.moe_merge")

    def result(date: str, models: dict[str, Any], cells: list[tuple[str, int, float]]) -> dict[str, Any]:
        rows = [
            {"model": model, "tokens": tokens, "routing": "uniform", "quant_algo": "FP8"}
            | {"neighbours": "alone", "policy": "all", "seconds": seconds}
            for model, tokens, seconds in cells
        ]
        about = {"gpu": "GPU", "date": date, "driver": "1", "torch": "2", "moqext": {"commit": date}}
        lists: dict[str, Any] = {"checks": [], "host": [], "skipped": [], "rows": rows}
        facts = {"benchmark": "moe_cuda", "environment": about, "seed": 1, "ceilings": {"fp8": date}}
        return facts | {"models": models} | lists

    small, large = {"experts": 4}, {"experts": 8}
    first = result("one", {"small": small}, [("small", 1, 1.0), ("small", 16, 2.0)])
    second = result("two", {"large": large}, [("large", 1, 3.0)])
    third = result("three", {"small": small}, [("small", 16, 4.0), ("small", 4, 5.0)])
    merged = module.merge([module.merge([first, second]), third])
    found = [(row["model"], row["tokens"], row["seconds"]) for row in merged["rows"]]
    assert found == [("small", 1, 1.0), ("small", 4, 5.0), ("small", 16, 4.0), ("large", 1, 3.0)]
    dates = [merged["runs"][row["run"]]["date"] for row in merged["rows"]]
    assert dates == ["one", "three", "three", "two"]
    assert merged["environment"]["date"] == "three"
    everything = result("four", {"small": small, "large": large}, [("small", t, 1.0) for t in (1, 4, 16)])
    again = module.merge([merged, everything])
    assert [run["date"] for run in again["runs"]] == ["two", "four"]
    other = result("five", {"small": large}, [])
    with pytest.raises(ValueError, match="small: expected the sizes"):
        module.merge([first, other])
    other["environment"]["gpu"] = "another"
    with pytest.raises(ValueError, match="of one chip, got GPU, another"):
        module.merge([first, other])


def test_the_page_of_neighbours_is_what_its_results_make(cpu_page: Any) -> None:
    """Else: python -m benchmarks.neighbours_page."""
    module = importlib.import_module("benchmarks.neighbours_page")
    assert module.PAGE.read_text() == module.page_text()


def test_the_page_of_vllm_is_what_its_results_make(cpu_page: Any) -> None:
    """Else: python -m benchmarks.vllm_page."""
    module = importlib.import_module("benchmarks.vllm_page")
    assert module.PAGE.read_text() == module.page_text()


def test_ways_in_vllm_stand_beside_its_own_of_the_same_mode(cpu_page: Any) -> None:
    module = importlib.import_module("benchmarks.vllm_page")
    ways = [("FP8 moqext", False, 30.0), ("FP8 vLLM", False, 20.0), ("FP8 moqext", True, 33.0)]
    rows = [
        {"name": name, "compile": compiled, "decode": {"1": speed}, "prefill": None}
        for name, compiled, speed in ways
    ]
    assert "| FP8 moqext | 30.0 (1.50×) |" in module.table(rows, False)
    assert "| FP8 moqext | 33.0 |" in module.table(rows, True)
    about = {"environment": {"torch": "2", "date": "2026-11-26"}, "gpu": "H200", "vllm": "0.33", "note": ""}
    failed = [{"name": "FP8 vLLM", "failed": "no kernel"}]
    assert module.section({**about, "rows": rows + failed}) == module.section({**about, "rows": rows})


def test_what_linears_add(cpu_page: Any) -> None:
    module = importlib.import_module("benchmarks.neighbours_page")

    def row(algo: str | None, neighbours: str, policy: str, us: float, without: str | None = None) -> Any:
        about = {"chain": "llama", "tokens": 1, "quant_algo": algo, "neighbours": neighbours}
        return about | {"policy": policy, "without": without, "seconds": us * 1e-6, "forced": None}

    rows = [
        row(None, "torch", "all", 17),
        row("FP8", "torch", "none", 80),
        row("FP8", "torch", "none", 70, "o"),
    ]
    rows += [row(None, "moqext", "none", 9), row("FP8", "moqext", "none", 72.5)]
    rows += [row("FP8", "moqext", "none", 1) | {"forced": "cuda:other"}]
    times = module.Times(rows)
    assert times.added("llama", 1, "FP8", "torch", "none") == pytest.approx(63)
    assert times.added("llama", 1, "FP8", "moqext", "none") == pytest.approx(63.5)
    assert times.added("llama", 1, "FP8", "moqext", "all") is None
    assert times.added_by("llama", 1, "FP8", "none", "o") == pytest.approx(10)
    line = "| llama | `FP8` | 1 |  |  |  | 80.00 (+63.00) |  | 72.50 (+63.50) |"
    assert line in module.layers_table(times, ("all", "none")).splitlines()


def test_tables_and_plot_of_a_result(cpu_page: Any) -> None:
    def row(algo: str, tokens: int, seconds: float, ratio: float, goal: float | None) -> dict[str, Any]:
        about = {"shape": [64, 32], "tokens": tokens, "quant_algo": algo, "goal": goal, "torch_ratio": ratio}
        return about | {"seconds": seconds, "floor_seconds": 1e-6, "flop": 4096 * tokens}

    rows = [
        row("bfloat16", 1, 6e-6, 1.0, None),
        row("NVFP4", 1, 2e-6, 3.0, 2.8),
        row("bfloat16", 16, 6e-6, 1.0, None),
        row("NVFP4", 16, 5e-6, 1.2, 1.5),
    ]
    environment = {"cpu": "Chip", "isa": "amx", "python": "3.12", "numpy": "2", "date": "2026-01-02T03:04"}
    result = {"environment": environment | {"moqext": {"commit": "abc"}}, "rows": rows, "threads": 16}
    result |= {"bytes_per_second": 2e11, "flop_per_second": 1e12}
    page = f"Before.\n{cpu_page.BEGIN}\nold\n{cpu_page.END}\nAfter.\n"
    files = cpu_page.render(page, {"chip": result})
    lines = files["cpu-linears.md"].splitlines()
    assert (lines[0], lines[-1]) == ("Before.", "After.")
    assert "old" not in lines
    assert "### Chip, amx, 16 threads" in lines
    assert "| 64 × 32 | 1 | 6.00 µs, 17% | 2.00 µs, 50%, **3.00×** |" in lines
    assert "| `NVFP4` | 1 | 2.8 | 3.00 to 3.00 | met |" in lines
    assert "| `NVFP4` | 16 | 1.5 | 1.20 to 1.20 | missed |" in lines
    assert ElementTree.fromstring(files["cpu-linears.chip.svg"]).tag.endswith("svg")
    again = cpu_page.render(files["cpu-linears.md"], {"chip": result})
    assert again == files
    page = f"Before.\n{cpu_page.PEER_BEGIN}{cpu_page.PEER_END}\n"
    result |= {"ggml": {"version": "1.2", "features": ["avx2", "avx512"]}}
    peer = cpu_page.render_peer(page, {"chip": result})
    assert "Chip, amx, 16 threads; ggml 1.2, built for avx2, avx512. " in peer
    assert "| 64 × 32 | 1 | 6.00 µs, 17% | 2.00 µs, 50%, **3.00×** |" in peer


@pytest.mark.slow
def test_linear_cpu(tmp_path: Path) -> None:
    record = run(tmp_path, "linear_cpu", "--seconds", "0.01", "--rotate", "1", keep="--output")
    goals = {(row["quant_algo"], row["tokens"]): row["goal"] for row in record["rows"]}
    assert goals["W4A16_NVFP4", 1] == goals["NVFP4", 1] == 2.8
    assert goals["FP8_PB_WO", 16] == 1.2
    assert goals.get(("bfloat16", 1)) is None

"""The benchmarks run, and what a call costs has not grown several times over."""

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a source tree without benchmarks")


def read(path: Path) -> dict[str, Any]:
    """A result: its header, and each row in its list."""
    header, *rows = map(json.loads, path.read_text().splitlines())
    lists: dict[str, Any] = {}
    for row in rows:
        lists.setdefault(row.pop("list", "rows"), []).append(row)
    return header | lists


def run(tmp_path: Path, name: str, *options: str, keep: str = "--json") -> dict[str, Any]:
    """The JSON record that a benchmark writes."""
    path = tmp_path / "deeper" / "result.json"
    # The tree comes last, so that the package under test is the one the tests found.
    code = "import runpy, sys; sys.path += ['.', 'python']; runpy.run_module({!r}, None, '__main__')"
    command = [sys.executable, "-c", code.format(f"benchmarks.{name}"), keep, str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return read(path)


def test_a_result_is_a_header_and_a_row_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    record = importlib.import_module("benchmarks.record")
    rows = [{"tokens": 1, "seconds": 1e-6 / 3}, {"tokens": 16, "name": "µ"}]
    result = {
        "benchmark": "one",
        "sizes": {"K": 8},
        "isa": ["a", "b"],
        "checks": [{"error": 0.1}],
        "rows": rows,
    }
    path = tmp_path / "one.chip.jsonl"
    for each in (result, result | {"rows": []}, result | {"checks": []}):
        record.save(each, path)
        assert record.read(path) == each
        assert record.read_all("one", tmp_path) == {"chip": each}
        assert len(path.read_text().splitlines()) == 1 + len(each["checks"]) + len(each["rows"])


def test_results_that_are_kept_have_one_form() -> None:
    for path in (ROOT / "benchmarks" / "results").iterdir():
        assert path.suffix == ".jsonl"
        header = json.loads(path.open().readline())
        assert {"benchmark", "environment"} <= set(header), path


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


def test_rows_of_invariant_layers_are_compared(tmp_path: Path) -> None:
    """The first and the last row of each: 4 linears and 3 layers of experts with 1 and 16 tokens."""
    pytest.importorskip("torch")
    record = run(tmp_path, "batch_invariance", "--tiny", "--device", "cpu")
    assert (record["compared"], record["differ"], record["rows"]) == (21, [], [])  # times are of a GPU


def test_files_are_quantized_cold_and_warm(
    tree: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = importlib.import_module("benchmarks.quantize_files")
    monkeypatch.setattr(files, "SHAPES", {"mlp.up_proj": (64, 32)})
    path = tmp_path / "result.jsonl"
    command = ["quantize_files", str(tmp_path), "--layers", "2", "--algos", "FP8", "--devices", "cpu"]
    monkeypatch.setattr(sys, "argv", [*command, "--cached", "--json", str(path)])
    files.main()
    found = read(path)
    rows = found["rows"]
    assert [(row["cache"], row["device"], row["bytes_read"]) for row in rows] == [
        ("cold", "cpu", 8192),
        ("warm", "cpu", 8192),
    ]
    assert all(found[f"{what}_bytes_per_second"] > 0 for what in ("read", "cache", "write"))
    assert list(tmp_path.iterdir()) == [path]


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
    assert [check["error"] for check in read(path)["checks"]] == [0.0, 0.0, 1.0]


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
def tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks can be imported."""
    monkeypatch.syspath_prepend(str(ROOT))


def test_pages_are_what_results_make(tree: None) -> None:
    """Else: python -m benchmarks.pages."""
    pages = importlib.import_module("benchmarks.pages")
    files = pages.files()
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, path.name
    assert set((ROOT / "docs" / "results").glob("*.svg")) <= set(files)
    written = {found[2] for text in files.values() for found in pages.MARKED.finditer(text)}
    assert written == {*pages.SUBJECTS, "speed", "general", "general-experts", "support"}


def test_every_result_has_tables(tree: None) -> None:
    """Each subject prints, and every file of times is one of a subject's."""
    subjects = importlib.import_module("benchmarks.subjects").SUBJECTS
    for name, subject in subjects.items():
        assert not subject.measured or len(subject.tables().splitlines()) > 10, name
    told = {benchmark for subject in subjects.values() for benchmark in subject.benchmarks}
    kept = {path.name.split(".")[0] for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert kept - told == {
        "host_cost",
        "minilm",
        "perplexity",
    }  # docs/numerics.md and transformers.md have both


def test_the_table_of_perplexities_is_what_was_measured(tree: None) -> None:
    """Each row of the result stands in docs/transformers.md, and nothing else does."""
    result = importlib.import_module("benchmarks.record").read_all("perplexity")["epyc-avx2"]
    page = (ROOT / "docs" / "transformers.md").read_text().split("\n## Perplexity")[1].split("\n## ")[0]
    shown = re.findall(r"^\| ([A-Z]\w+|bfloat16) \| [^|]* \| (.*) \|$", page, re.MULTILINE)
    expected = [
        (
            row["algorithm"],
            f"{row['bytes'] / 1e6:.0f} MB | {row['perplexity']:.2f} | {100 * row['same_token']:.0f} %",
        )
        for row in result["rows"]
    ]
    assert shown == expected


def test_the_costs_of_tensors_are_what_was_measured(tree: None) -> None:
    """Numbers of docs/tensors.md that follow from the result; of five tensors, of a new result and of all."""
    result = importlib.import_module("benchmarks.record").read(
        ROOT / "benchmarks" / "results" / "host_cost.jsonl"
    )
    best = {row["case"]: row["best_us"] for row in result["rows"]}
    page = (ROOT / "docs" / "tensors.md").read_text().split("\n## What it costs")[1].split("\n## ")[0]
    empty = best["no-op, no tensors"]
    each = {name: (best[f"no-op, 5 {name}"] - empty) / 5 for name in ("NumPy arrays", "torch tensors")}
    given = {name: best[f"LinearMethod, {name}, out="] for name in ("NumPy", "torch")}
    new = {name: best[f"LinearMethod, {name}, new result"] - time for name, time in given.items()}
    for line in (
        f"| an empty call | {1e3 * empty:.0f} ns |",
        f"| a NumPy array, taken and released | {1e3 * each['NumPy arrays']:.0f} ns |",
        f"| a PyTorch tensor (exchange API) | {1e3 * each['torch tensors']:.0f} ns, and ",
        f"| a new NumPy array, a new PyTorch tensor | {new['NumPy']:.2f} µs, {new['torch']:.2f} µs |",
        f"| {given['NumPy']:.2f} µs on NumPy arrays, {given['torch']:.2f} µs on PyTorch tensors and ",
    ):
        assert line in page


def test_tokens_of_busy_servers_are_what_was_measured(tree: None) -> None:
    """Numbers of docs/results/vllm.md, with 128 and 256 sequences."""
    record = importlib.import_module("benchmarks.record")
    page = (ROOT / "docs" / "results" / "vllm.md").read_text().split("* Busy servers")[1].split("\n\n")[0]
    for benchmark in ("vllm-busy", "vllm-experts-busy"):
        for row in record.read_all(benchmark)["h200"]["rows"]:
            assert f"{row['decode']['128']:.0f} / {row['decode']['256']:.0f}" in page, row["name"]


def test_the_tables_of_a_trained_model_are_what_was_measured(tree: None) -> None:
    """Rows of the results in docs/numerics.md and docs/quantize.md, in the page's rounding."""
    result = importlib.import_module("benchmarks.record").read(
        ROOT / "benchmarks" / "results" / "minilm.jsonl"
    )
    page = (ROOT / "docs" / "numerics.md").read_text().split("\n## A trained model")[1].split("\n## ")[0]
    shown = re.findall(r"^\| (float32|bfloat16) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    expected = []
    for row in result["rows"]:
        errors = [row[name] for name in ("moqext_error", "modelopt_error", "moqext_to_modelopt")]
        cells = [*(f"{100 * error:.2g} %" for error in errors), f"{row['worst_layer']:.0e}"]
        cells = [*(cells if any(errors) else [""] * 4), f"{row['partners']} of 32"]
        expected.append((row["dtype"], row["weights"], " | ".join(cells)))
    assert shown == expected
    page = (ROOT / "docs" / "quantize.md").read_text().split("\n## A trained model")[1].split("\n## ")[0]
    shown = re.findall(r"^\| (\w+)(?:, .*?)? \| (.* %.*?) *\|$", page, re.MULTILINE)
    found = {(row["algorithm"], row["search"]): row for row in result["quantized"]}
    expected = []
    for algo, _ in shown:
        row, cells = found[algo, None], []
        for value in (row["weight_error"], row["error"]):
            cells.append(f"{100 * value:.2g} %")
        cells.append(row["same_tensors"])
        searched = (found.get((algo, search)) for search in ("mse", "4over6"))
        cells += [f"{100 * each['error']:.2g} %" if each else "" for each in searched]
        expected.append((algo, re.sub(r" +", " ", " | ".join(cells)).rstrip(" |")))
    assert [(algo, cells.rstrip(" |")) for algo, cells in shown] == expected
    assert {algo for algo, _ in shown} == {algo for algo, _ in found} - {"W4A16_NVFP4", "W4A8_MXFP4_FP8"}


def test_what_stands_between_markers_is_written_anew(tree: None) -> None:
    pages = importlib.import_module("benchmarks.pages")
    assert pages.fill("a\n<!-- speed -->\nold\n<!-- /speed -->\nb\n") == (
        f"a\n<!-- speed -->\n\n{pages.speed()}\n\n<!-- /speed -->\nb\n"
    )
    assert pages.fill("no marker") == "no marker"
    assert len(pages.speed().splitlines()) == 7
    with pytest.raises(KeyError):
        pages.fill("<!-- nobody -->\n<!-- /nobody -->")


def test_a_subject_without_a_result_keeps_its_place(tree: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is written from the first result that there is."""
    pages = importlib.import_module("benchmarks.pages")
    page = "<!-- batch-invariance -->\nby hand\n<!-- /batch-invariance -->\n"
    results: dict[str, Any] = {}
    monkeypatch.setattr(pages.record, "read_all", lambda name: results)
    assert pages.fill(page) == page
    case = {"quant_algo": "FP8", "tokens": 16, "kernel": "cuda:a"}
    rows = [
        case | {"case": name, "batch_invariant": fixed, "seconds": (5 + 3 * fixed) * 1e-6}
        for name in ("4096 × 4096", "28672 × 4096")
        for fixed in (False, True)
    ]
    moqext = {"commit": "0123456789ab"}
    about = {"date": "2026-11-30T00:00+00:00", "gpu": "NVIDIA H200", "torch": "2.11.0", "moqext": moqext}
    results["h200"] = {"environment": about, "rows": rows}
    written = pages.fill(page)
    assert "by hand" not in written
    assert "| NVIDIA H200 | 2026-11-30 | `0123456` | torch 2.11.0 | `batch_invariance.h200` |" in written
    assert "| H200 | FP8 | 4096 × 4096 | chosen by tokens | 8.00 µs, 0.62× |" in written


def test_a_summary(tree: None) -> None:
    """Means by range of tokens with their slowest cells, how many are slower, and goals."""
    pages = importlib.import_module("benchmarks.pages")

    def pair(case: str, tokens: int, own: float, other: float, **more: Any) -> Any:
        about = ("h200", "FP8", case, tokens, "others", own * 1e-6, other * 1e-6, "Peer", "file")
        return pages.Pair(*about, **more)

    some = [
        pair("a", 1, 20, 40, goals=[("time", True)], plain=40e-6),
        pair("b", 1, 20, 160, goals=[("time", False)]),
        pair("a", 4096, 20, 18),
    ]
    assert pages.summary(some, by_case=False).splitlines() == [
        "| machine | format | beside | 1 | 4096 | slower | slowest cell | without PDL | goals met |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| H200 | FP8 | others | 4.00× (2.00) | 0.90× (0.90) | 1/3 | a, 4096: 20.0 µs, Peer 18.0 µs "
        "| 1.00× (1.00) | 1/2 |",
    ]
    assert pages.summary(some[1:], by_case=True).splitlines()[2:] == [
        "| H200 | FP8 | b | others | 20.0 µs, 8.00× |  | 0/1 |",
        "| H200 | FP8 | a | others |  | 20.0 µs, 0.90× |  |",
    ]
    served = pair("a", 1, 2000, 3000, rate=True)
    assert served.line()[4:] == ["500 tokens/s", "", "333 tokens/s", "Peer", "1.50", ""]
    assert pages.summary([served], by_case=True).splitlines()[2] == "| H200 | FP8 | others | 500, 1.50× |"


def test_a_grid_of_rows(tree: None) -> None:
    grid = importlib.import_module("benchmarks.grid")
    rows = [
        {"shape": [8, 4], "algo": "FP8", "tokens": 1, "seconds": 2e-6, "of_copy": 0.5},
        {"shape": [8, 4], "algo": "FP8", "tokens": 16, "seconds": 3e-6},
        {"shape": [8, 4], "algo": None, "tokens": 1, "seconds": 4e-6},
    ]
    result = {"rows": rows, "host": [{"shapes": [[8, 4], [2, 1]], "seconds": 5e-6}]}
    assert grid.Grid("", ("shape", "algo"), ("tokens",)).table(result).splitlines() == [
        "| shape | algo | 1 | 16 |",
        "| --- | --- | ---: | ---: |",
        "| 8 × 4 | FP8 | 2.00 µs | 3.00 µs |",
        "| 8 × 4 |  | 4.00 µs |  |",
    ]
    several = grid.Grid("", ("algo",), ("tokens",), ("seconds", "of_copy"), {"tokens": "1|2", "algo": "FP8"})
    assert several.table(result).splitlines()[0] == "| algo | 1 seconds | 1 of_copy |"
    assert several.table(result).splitlines()[2:] == ["| FP8 | 2.00 µs | 50% |"]
    plain = grid.Grid("", rows="host").table(result)
    assert plain.splitlines()[2:] == ["| 8 × 4, 2 × 1 | 5.00 µs |"]


def test_tables_of_files(
    tree: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = importlib.import_module("benchmarks.tables")

    def printed(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tables", *arguments])
        tables.main()
        return capsys.readouterr().out

    assert "llama.h100" in printed()
    head = printed(
        "llama.h100", "--where", "what=decode", "--lines", "form", "--columns", "weights", "tokens"
    )
    assert head.startswith("| form | bfloat16, 1 | bfloat16, 16 | bfloat16, 64 |")
    assert printed("llama.h100", "--list", "checks").startswith("| form | weights | what | error |")
    assert "| h100 | FP8 | Qwen3-30B-A3B | 1 |" in printed("experts")
    with pytest.raises(SystemExit):
        printed("nobody")


def test_experts_beside_public_kernels(tree: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    pairs = importlib.import_module("benchmarks.pairs")
    monkeypatch.setattr(
        pairs, "published_experts", lambda: {("Qwen3-30B-A3B", 64, "NVFP4"): (143e-6, "Other")}
    )
    cells = list(pairs._public_experts("h200", joined["rows"]))
    assert [(cell.algo, cell.peer, round(cell.ratio, 2)) for cell in cells] == [
        ("NVFP4", "Humming", 1.40),
        ("NVFP4, fp8", "Humming", 2.80),
    ]
    assert cells[0].plain == 112e-6


def test_experts_in_the_harness_of_others(tree: None) -> None:
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
def test_experts_without_a_gate(tree: None, quant_algo: str | None) -> None:
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


def test_slices_of_experts_are_joined(tree: None) -> None:
    """Later rows take the place of the same ones, and know the run that they are of."""
    module = importlib.import_module("benchmarks.merge")

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


def kept(monkeypatch: pytest.MonkeyPatch, **results: dict[str, Any]) -> Any:
    """The module that compares, with these results of one H100 and no others."""
    pairs = importlib.import_module("benchmarks.pairs")
    found = {name.replace("_", "-", name.startswith("vllm")): result for name, result in results.items()}
    chips = {name: {"h100": result} for name, result in found.items()}
    monkeypatch.setattr(pairs.record, "read_all", lambda name: chips.get(name, {}))
    return pairs


def test_ways_in_vllm_stand_beside_its_own_of_the_same_mode(
    tree: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [("FP8 moqext", False, 30.0), ("FP8 vLLM", False, 20.0), ("FP8 vLLM", True, 22.0)]
    ways += [("FP8 moqext", True, 33.0), ("NVFP4 moqext", False, 50.0), ("NVFP4 Marlin", False, 25.0)]
    ways += [
        ("NVFP4 Humming", False, 40.0),
        ("FP8 moqext, fast_accum", False, 99.0),
        ("bfloat16", False, 9.0),
    ]
    rows = [
        {"name": name, "compile": compiled, "decode": {"1": speed}, "prefill": None}
        for name, compiled, speed in ways
    ]
    found = [
        (pair.algo, pair.case, pair.peer, pair.tokens, pytest.approx(pair.ratio))
        for pair in kept(monkeypatch, vllm={"rows": rows}).vllm()
    ]
    assert found == [
        ("FP8", "Llama 8B, graphs", "vLLM, its own", 1, 1.5),
        ("FP8", "Llama 8B, torch.compile", "vLLM, its own", 1, 1.5),
        ("NVFP4", "Llama 8B, graphs", "vLLM, Humming", 1, 1.25),
    ]


def test_what_linears_add(tree: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(algo: str | None, neighbours: str, policy: str, us: float, without: str | None = None) -> Any:
        about = {"chain": "llama", "tokens": 1, "quant_algo": algo, "neighbours": neighbours}
        return about | {"policy": policy, "without": without, "seconds": us * 1e-6, "forced": None}

    rows = [row(None, "torch", "all", 17), row("FP8", "torch", "knowing", 80), row("FP8", "torch", "all", 90)]
    rows += [row("FP8", "torch", "knowing", 70, "o"), row("bfloat16", "torch", "all", 143)]
    rows += [row(None, "moqext", "knowing", 9), row("FP8", "moqext", "knowing", 72.5)]
    rows += [row("FP8", "moqext", "knowing", 1) | {"forced": "cuda:other"}]
    (pair,) = kept(monkeypatch, neighbours={"rows": rows}).neighbours()
    assert (pair.case, pair.tokens) == ("llama, torch's kernels between", 1)
    assert (pair.own, pair.other) == (pytest.approx(63e-6), pytest.approx(126e-6))


def test_models_stand_beside_the_faster_bfloat16(tree: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"form": form, "weights": weights, "tokens": tokens, "tokens_per_second": speed}
        for form, weights, tokens, speed in (
            ("grouped_mm", "bfloat16", 1, 50.0),
            ("batched_mm", "bfloat16", 1, 100.0),
            ("transformers", "NVFP4", 1, 300.0),
            ("transformers", "NVFP4", 16, 900.0),
        )
    ]
    (pair,) = kept(monkeypatch, moe_model={"rows": rows}).models()
    assert (pair.case, pair.peer) == ("Qwen3-30B-A3B, as loaded", "Transformers, batched_mm")
    assert pair.ratio == pytest.approx(3)


def test_layers_on_the_cpu_stand_beside_torch_and_llama_cpp(
    tree: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(algo: str, seconds: float, **more: Any) -> dict[str, Any]:
        return {"shape": [64, 32], "tokens": 1, "quant_algo": algo, "seconds": seconds, **more}

    rows = [row("bfloat16", 6e-6), row("NVFP4 of llama.cpp", 3e-6)]
    rows += [row("FP8", 4e-6, goal=1.6, torch_ratio=1.5), row("NVFP4", 2e-6, goal=None)]
    found = kept(monkeypatch, linear_cpu={"rows": rows}).cpu_linears()
    assert [(pair.algo, pair.beside, round(pair.ratio, 2), pair.goals) for pair in found] == [
        ("FP8", "torch bfloat16", 1.5, [("1.6×", False)]),
        ("NVFP4", "torch bfloat16", 3.0, []),
        ("NVFP4", "llama.cpp", 1.5, []),
    ]


def test_layers_of_experts_stand_beside_torch(tree: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(algo: str, tokens: int, us: float, **more: Any) -> dict[str, Any]:
        about = {
            "model": "small",
            "tokens": tokens,
            "routing": "uniform",
            "quant_algo": algo,
            "policy": "all",
        }
        about |= {"neighbours": "alone", "seconds": us * 1e-6, "floor_seconds": 4e-6, "flop": 4e9}
        return about | more

    rows = [row("bfloat16", 1, 30), row("FP8", 1, 10), row("FP8", 1, 1, policy="none"), row("NVFP4", 1, 9.5)]
    rows += [row("bfloat16", 4096, 20), row("NVFP4, fp8", 4096, 5), row("FP8", 1, 1, routing="power law")]
    pairs = kept(monkeypatch, moe_cuda={"rows": rows})
    assert [(pair.algo, round(pair.ratio, 2), pair.goals) for pair in pairs.experts()] == [
        ("FP8", 3.0, [("time", False)]),  # 9.2 us are asked
        ("NVFP4", 3.16, [("time", True)]),
        ("NVFP4, fp8", 4.0, [("time", False)]),
    ]
    assert pairs.goals.experts_limit("FP8", 1, 4e-6, 4e9) == 5e-6 + 4e-6 / 0.95
    assert pairs.goals.experts_limit("NVFP4, fp8", 4096, 4e-6, 4e9) == 4e9 / 850e12
    assert pairs.goals.experts_limit("NVFP4", 1024, 4e-6, 4e9) is None


@pytest.mark.slow
def test_linear_cpu(tmp_path: Path) -> None:
    record = run(tmp_path, "linear_cpu", "--seconds", "0.01", "--rotate", "1", keep="--output")
    goals = {(row["quant_algo"], row["tokens"]): row["goal"] for row in record["rows"]}
    assert goals["W4A16_NVFP4", 1] == goals["NVFP4", 1] == 2.8
    assert goals["FP8_PB_WO", 16] == 1.2
    assert goals.get(("bfloat16", 1)) is None

"""`selftest`: right kernels pass, wrong ones are found, and its report tells nothing but of the chip."""

import importlib
import json
import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moqext import _C, LinearMethod, MoEMethod, UnsupportedQuantization
from moqext.__main__ import main
from moqext.algorithms import LINEARS
from moqext.cli import selftest as command
from moqext.tools import selftest, selftest_times
from moqext.tools.random_layers import poisoned
from moqext.tools.verify_row import LIMITS, compare, within_reach

ROOT = Path(__file__).parent.parent


class Clock:
    """Seconds that pass only when they are asked for."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def some(kinds: Any, *formats: str) -> list[Any]:
    """The kinds of these formats."""
    return [kind for kind in kinds if kind.format in formats]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few formats, one turn of which takes a second, and a clock that counts layers."""
    make = selftest.Selftest.__init__

    def init(self: Any, *about: Any) -> None:
        make(self, *about)
        self.kinds = some(self.kinds, "NVFP4", "W8A16")

    monkeypatch.setattr(selftest.Selftest, "__init__", init)
    monkeypatch.setattr(command, "clock", Clock())


def wrong(call: Any, method: Any, *about: Any, **options: Any) -> Any:
    """A call whose last output is a little off."""
    y = call(method, *about, **options)
    flat = y.reshape(-1)
    flat[-1] = 0x3F80 if flat[-1] != 0x3F80 else 0x4000  # bfloat16's 1, or 2
    return y


def test_all_right_on_the_cpu(few: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert main(["selftest", "--device", "cpu", "--seconds", "7", "--report", str(file), "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    kernels = [name for name, reason in LinearMethod("NVFP4", 32, [8])._plan.explain() if reason is None]
    assert [line.split()[0] for line in lines[1 : 1 + 2 * len(kernels)]] == [
        *kernels,
        *(f"{name}," for name in kernels),
    ]
    assert all(line.endswith(" ok") for line in lines[1 : 1 + 2 * len(kernels)])
    reached = "result: all right, of the formats that were reached; more --seconds reach the others"
    assert lines[-2:] == [reached, f"written to {file}"]
    assert "; seed 3" in "\n".join(lines)
    report = json.loads(file.read_text())
    assert report["good"] is True
    assert report["times"] == []
    for row in report["kernels"]:
        assert row["verdict"] == "ok"
        assert 0 < row["of_limit"] < 1
        assert set(row["checked"]) == {"NVFP4", "W8A16"} <= set(row["formats"])


def test_the_verdict_tells_whether_all_formats_were_reached() -> None:
    row = SimpleNamespace(verdict="ok", faults=[], checked=["FP8"], formats=["FP8"])
    test: Any = SimpleNamespace(layers=1, rows=[row])
    (*_, last) = command._summary(test, "cpu", 1, None, None)
    assert last.text == "result: all right"
    row.formats.append("NVFP4")
    (*_, last) = command._summary(test, "cpu", 1, None, None)
    assert "of the formats that were reached" in last.text


@pytest.mark.parametrize("kind", [LinearMethod, MoEMethod])
def test_a_wrong_kernel_is_found(
    few: None, kind: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = kind.__call__

    def off(method: Any, *about: Any, **options: Any) -> Any:
        named = method.backend_for(len(about[0])) == "cpu:portable"
        return wrong(call, method, *about, **options) if named else call(method, *about, **options)

    monkeypatch.setattr(kind, "__call__", off)
    assert main(["selftest", "--device", "cpu", "--seconds", "5", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    operation = "linear" if kind is LinearMethod else "experts"
    found = {(row["operation"], row["kernel"]) for row in report["kernels"] if row["verdict"] == "wrong"}
    assert found == {(operation, "cpu:portable")}
    (row,) = [row for row in report["kernels"] if row["verdict"] == "wrong"]
    assert row["wrong"] >= len(row["faults"]) > 0
    assert ": errors " in row["faults"][0]


def test_what_is_not_written_and_what_raises_is_found(
    few: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(method: Any, x: Any, params: Any, bias: Any, out: Any) -> Any:
        if len(x) == 1:
            raise RuntimeError("cannot open '/home/someone/lib.so'")
        return out

    monkeypatch.setattr(LinearMethod, "__call__", nothing)
    assert main(["selftest", "--device", "cpu", "--seconds", "3"]) == 1
    out = capsys.readouterr().out
    assert ": not finite" in out
    assert "RuntimeError: cannot open" in out
    assert out.splitlines()[-1].startswith("result: ")


@pytest.mark.parametrize("seconds, layers", [("0.1", 1), ("2", 1), ("3", 2), ("7", 4), ("200", 100)])
def test_time_ends_it(
    few: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: str,
    layers: int,
) -> None:
    """One layer runs in any case. The clock is asked at the start, and twice a layer but for the first."""
    for name in ("_check_linear", "_check_experts"):
        monkeypatch.setattr(selftest.Selftest, name, lambda *about: None)
    assert main(["selftest", "--device", "cpu", "--seconds", seconds, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == layers


def test_a_seed_repeats_it(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for seed in ("7", "7", "8"):
        assert main(["selftest", "--device", "cpu", "--seconds", "1", "--json", "--seed", seed]) == 0
        found.append(json.loads(capsys.readouterr().out)["kernels"])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "options", [("--seconds", "0"), ("--seconds", "x"), ("--seed", "-1"), ("--seed", str(2**64))]
)
def test_wrong_arguments(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["selftest", *options])
    assert ended.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["selftest", "--device", "cuda:77"]) == 2
    assert "cuda:77: no such CUDA device" in capsys.readouterr().err
    assert main(["selftest", "--device", "cpu", "--report", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err


def strings(data: Any) -> Iterator[str]:
    """Every string of plain data."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from (key, *strings(value))
    elif isinstance(data, list):
        for value in data:
            yield from strings(value)
    elif isinstance(data, str):
        yield data


def test_the_report_tells_of_no_machine_and_no_user(
    few: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Errors of libraries name files, which are in a user's directory."""
    file = tmp_path / "report.json"
    library = tmp_path / "lib" / "libsomething.so"

    def fails(*about: Any) -> Any:
        raise RuntimeError(f"{library}: cannot open '{Path.cwd()}' ({sys.executable})")

    monkeypatch.setattr(LinearMethod, "__call__", fails)
    assert main(["selftest", "--device", "cpu", "--seconds", "3", "--report", str(file)]) == 1
    report = json.loads(file.read_text())
    (about, *_) = [row["faults"][0] for row in report["kernels"] if row["faults"]]
    assert about.endswith("RuntimeError: ... cannot open '...' (...)")
    private = {socket.gethostname(), platform.node(), os.getcwd(), str(tmp_path), str(ROOT), str(Path.home())}
    private |= {os.environ[name] for name in ("USER", "LOGNAME") if name in os.environ}
    for text in strings(report | {"chip": ""}):  # "w/ graphics" is part of a processor's name
        assert "/" not in text, text
        assert not any(len(name) > 2 and name in text for name in private), text


def test_every_format_that_runs_is_among_the_kinds() -> None:
    """Exact layers of all algorithms, and of linears and experts what else there is."""
    kinds = selftest.Selftest("cpu", 0).kinds
    assert {kind.quant_algo for kind in kinds if kind.operation == "linear"} == set(LINEARS)
    assert len(some(kinds, "NVFP4", "NVFP4,fp8", "NVFP4,fp4")) == 6
    assert len(kinds) == len(set(kinds)) == 49


def on_hopper(kind: Any, device: str) -> Any:
    """The plan of usual sizes of a chip that need not be here."""
    if kind.operation == "linear":
        rows, columns = selftest.USUAL_LINEAR
        where = f"{rows}x{columns}"
        return OnChip(kind.format, where, "H200 SXM")
    about = ("silu", True, None, "bfloat16", "cuda:0", kind.compute)
    method = OnChip("FP8", "128x128", "H200 SXM")
    numbers = (None, None, None, None, False, "H200 SXM")
    method.plan = _C.moe_plan(kind.quant_algo, *selftest.USUAL_EXPERTS, 2, *about, *numbers)
    return method


def test_kernels_of_a_chip_are_found_and_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of a Hopper chip has a row, and one of the first layers; each of its configs is drawn."""
    monkeypatch.setattr(selftest, "usual_method", on_hopper)
    test = selftest.Selftest("cuda:0", 0)
    found = {row.kernel for row in test.rows if row.operation == "linear"}
    assert found >= {name for name in _C.kernels() if name.startswith("cuda:sm90_")}
    assert "cuda:sm90_nvfp4_fp8_prefill" in {row.kernel for row in test.rows if row.operation == "experts"}
    first = test.kinds[: len(test.rows)]
    assert all(any(kind.format in row.formats for kind in first) for row in test.rows)
    plan, rng = on_hopper(some(test.kinds, "NVFP4")[0], "").plan, np.random.default_rng(0)
    drawn = [selftest.variants_of(plan, 4, "cuda:sm90_nvfp4_medium", rng) for _ in range(60)]
    assert {len(variants) for variants in drawn} == {1 + selftest.MOST_CONFIGS}
    every = [number + 1 for name, number, *_ in plan.configs(4) if name == "cuda:sm90_nvfp4_medium"]
    assert {0, *every} == {variant for variants in drawn for variant in variants}


@pytest.mark.parametrize("operation", ["linear", "experts"])
def test_every_sixth_format_is_right(operation: str) -> None:
    """In sizes of tiles; others have other sizes, and follow in `test_many_turns_are_right`."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    test = selftest.Selftest("cpu", seed, lambda: test.layers)
    test.kinds = [kind for kind in test.kinds if kind.operation == operation][::6]
    test.run(len(test.kinds))
    assert test.layers == len(test.kinds) >= 4
    assert [fault for row in test.rows for fault in row.faults] == []


@pytest.mark.slow
def test_many_turns_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpu", "--seconds", "240"]) == 0, capsys.readouterr().out


def test_outputs_move_no_further_than_sums_are_inexact() -> None:
    exact = np.array([[1.0, 2.0, 4.0, 100.0]])
    y = np.array([[1.0078125, 2.0, 4.5, 100.0]])
    slack = np.array([[0.004, 0, 0.2, 0]])
    near = within_reach(y, exact, slack, "bfloat16")
    assert near.tolist() == [[1.0, 2.0, 4.3125, 100.0]]  # 4.1875 is the farthest that 4.2 rounds to
    assert compare(near, exact)[1] < LIMITS["bfloat16"][1]
    hole = np.where(np.arange(4) == 2, np.nan, y)
    assert compare(within_reach(hole, exact, slack, "bfloat16"), exact) == (np.inf, np.inf)
    assert np.isnan(poisoned((2, 3), "float32")).all()


# ---- times ----


def measured(plan: Any, tokens: int) -> list[tuple[str, int, float]]:
    """Timings as `measure` returns them, made up: a config takes what is expected of it."""
    rows = []
    for kernel, number, *_, seconds in plan.configs(tokens):
        variant = selftest_times.variant_of(plan, tokens, kernel, number)
        rows.append((kernel, variant, seconds * (1 + number / 100)))
    return sorted(rows, key=lambda row: row[2])


class OnChip:
    """A method of a chip that need not be here."""

    def __init__(self, layer: str, where: str, chip: str) -> None:
        algo, _, compute = layer.partition(",")
        if where == selftest_times.EXPERT_MODEL:
            kind = ("silu", True, None, "bfloat16", "cuda:0", compute or "exact")
            sizes = (*selftest_times.EXPERT_SIZES, selftest_times.EXPERT_TOP_K)
            self.plan = _C.moe_plan(algo, *sizes, *kind, None, None, None, None, False, chip)
        else:
            rows, columns = map(int, where.split("x"))
            about = (algo, columns, [rows], None, "bfloat16", "cuda:0", compute or "exact")
            self.plan = _C.linear_plan(*about, capability=chip)

    @property
    def _plan(self) -> Any:
        plan = self.plan

        class Measured:
            config, configs, keep, explain = plan.config, plan.configs, plan.keep, plan.explain

            @staticmethod
            def measure(tokens: int, params: Any) -> Any:
                return measured(plan, tokens)

        return Measured


@pytest.fixture
def on_chip(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Has methods of a chip, and times of it."""

    def put(chip: str) -> None:
        monkeypatch.setattr(
            selftest_times, "_method", lambda layer, where, device: OnChip(layer, where, chip)
        )
        monkeypatch.setattr(selftest_times, "random_params", lambda method, rng: {})

    return put


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a source tree without benchmarks")
@pytest.mark.parametrize(
    "device, chip",
    [("NVIDIA H200", "H200 SXM"), ("NVIDIA L40S", "L40S"), ("NVIDIA A100-SXM4-80GB", "A100 SXM")],
)
def test_the_fit_reads_the_times_of_a_report(
    on_chip: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, chip: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    reports, fit = (importlib.import_module(f"benchmarks.{name}") for name in ("reports", "fit"))
    on_chip(chip)
    cells = list(selftest_times.time_cells("cuda:0", 1.0, lambda: 0.0))
    assert len(cells) == 2 * 10 * 3 + 2 * 3
    assert all(cell.seconds_of(cell.chosen) is not None for cell in cells)
    report = {
        "moqext_selftest": 1,
        "good": True,
        "device": "cuda",
        "chip": device,
        "attributes": {"name": device, "sms": 132, "sm_khz": 1980000},
        "commit": "abc",
        "version": "0.1.0",
        "date": "2026-11-29",
        "times": [row for cell in cells for row in cell.as_rows()],
    }
    text = "\n".join(reports.lines(json.loads(json.dumps(report))))
    assert text.startswith(f"# name={device}; sms=132; sm_khz=1980000; moqext=abc; date=2026-11-29\n")
    (tmp_path / "chip.txt").write_text(text)
    times = fit.read(tmp_path)
    assert len(times) == len(cells)
    assert {cell.chip for cell in times} == {chip}
    for cell in cells:
        found = times[fit.Cell(chip, cell.layer, cell.where, cell.tokens)]
        expected = {(k, n): 1e6 * s for k, each in cell.seconds.items() for n, s in each.items()}
        assert found == pytest.approx(expected, abs=0.006)
    made = fit.Fit(times)
    assert sum(map(len, made.cells.values())) == sum(map(len, times.values()))
    assert all(loss < 0.7 for lost in fit.losses(times).values() for loss in lost.values())


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a source tree without benchmarks")
def test_reports_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    reports = importlib.import_module("benchmarks.reports")
    configs = importlib.import_module("benchmarks.configs")
    sizes = configs.MODELS[selftest_times.EXPERT_MODEL]
    assert (sizes.experts, sizes.hidden, sizes.intermediate) == selftest_times.EXPERT_SIZES
    assert sizes.top_k == selftest_times.EXPERT_TOP_K
    good = {
        **{"moqext_selftest": 1, "good": True, "device": "cuda", "chip": "NVIDIA H200", "attributes": {}},
        **{"commit": "abc", "version": "0.1.0", "date": "2026-11-29", "times": []},
    }
    row = {
        "kernel": "cuda:simt",
        "layer": "FP8",
        "where": "4096x4096",
        "tokens": 1,
        "microseconds": {"0": 2.5},
    }
    assert list(reports.lines(good | {"times": [row]}))[1:] == [
        "H200 SXM; cuda:simt; FP8; 4096x4096; 1; 0:2.50"
    ]
    for change, message in (
        ({"device": "cpu"}, "on a CUDA device"),
        ({"good": False}, "is wrong"),
        ({"chip": "NVIDIA T4"}, "'NVIDIA T4' has no name"),
        ({"times": [row | {"layer": "FP7"}]}, "no cell"),
        ({"times": [row | {"where": "../x"}]}, "no cell"),
        ({"times": [row | {"kernel": "cuda:a; b"}]}, "no cell"),
        ({"times": [row | {"microseconds": {"0": -1.0}}]}, "no cell"),
    ):
        with pytest.raises(ValueError, match=message):
            list(reports.lines(good | change))


def test_times_of_a_device_are_shown(
    on_chip: Any, few: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_chip("H200 SXM")
    cells = list(selftest_times.time_cells("cuda:0", 5.0, Clock()))
    assert [(cell.layer, cell.tokens) for cell in cells] == [("FP8", 1), ("FP8", 16), ("FP8", 256)]
    lines = command._time_lines(cells, None)
    assert lines[1].split() == list(command._TIMES_HEAD)
    assert lines[2].split()[:5] == ["FP8", "4096", "×", "4096", "1"]
    assert command._time_lines([], None) == []


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a source tree without benchmarks")
def test_a_device_has_a_report_with_times(
    on_chip: Any,
    few: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Kernels of the CPU stand for those of a device, and times are made up."""
    monkeypatch.syspath_prepend(str(ROOT))
    reports, file = importlib.import_module("benchmarks.reports"), tmp_path / "report.json"
    about = {"name": "NVIDIA L40S", "driver": 13000, "sms": 142, "sm_khz": 2520000, "major": 8, "minor": 9}
    found = {"index": 0, "name": "NVIDIA L40S", "capability": (8, 9), "sm_count": 142, "memory": 48 << 30}
    on_chip("L40S")
    monkeypatch.setattr(command, "choose_device", lambda wanted: ("cuda:0", " (NVIDIA L40S)"))
    monkeypatch.setattr(command, "Selftest", lambda device, *rest: selftest.Selftest("cpu", *rest))
    monkeypatch.setattr(command, "cuda_attributes", lambda index: about)
    monkeypatch.setattr(command._C, "cuda_devices", lambda: [found])
    options = ("--device", "cuda", "--seconds", "12", "--report", str(file))
    assert main(["selftest", *options]) == 0
    shown = capsys.readouterr().out.splitlines()
    table = shown[shown.index("") + 1 :]
    assert table[0].split() == list(command._TIMES_HEAD)
    assert table[1].startswith("FP8    4096 × 4096")
    report = json.loads(file.read_text())
    assert (report["device"], report["chip"], report["capability"]) == ("cuda", "NVIDIA L40S", "8.9")
    head, *lines = reports.lines(report)
    assert head.startswith("# name=NVIDIA L40S; driver=13000; sms=142; sm_khz=2520000; ")
    assert lines[0].startswith("L40S; cuda:")
    assert {line.split("; ")[2] for line in lines} == {"FP8"}


def test_nothing_that_runs_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest.Selftest, "_find", lambda test, operation: iter(()))
    assert main(["selftest", "--device", "cpu"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "result: no kernel runs here"


def test_layers_that_the_device_lacks_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*about: Any) -> Any:
        raise UnsupportedQuantization("no kernel")

    monkeypatch.setattr(selftest_times, "_method", refuse)
    assert list(selftest_times.time_cells("cuda:0", 1.0, lambda: 0.0)) == []


@pytest.mark.gpu
def test_all_right_on_a_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    try:
        devices = _C.cuda_devices()
    except RuntimeError as error:
        pytest.skip(str(error))
    file = tmp_path / "report.json"
    status = main(["selftest", "--device", "cuda:0", "--seconds", "120", "--report", str(file)])
    assert status == 0, capsys.readouterr().out
    report = json.loads(file.read_text())
    assert {row["verdict"] for row in report["kernels"]} == {"ok"}
    assert report["times"]
    assert report["attributes"]["sms"] == devices[0]["sm_count"]
    assert not any("/" in text for text in strings(report))

"""`bench`: every algorithm is measured, floors and ratios follow from the figures, the plot can be read."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import moqext
from moqext.__main__ import main
from moqext.cli import bench as cli_bench
from moqext.cli.bench import doubt
from moqext.environment import environment, last_level_cache
from moqext.tools import bench
from moqext.tools.bench_plot import roofline
from moqext.tools.busy import Calibration

QUICK = (
    "--shapes",
    "48x32,16x128",
    "--tokens",
    "1,3",
    "--seconds",
    "0.01",
    "--rotate",
    "1",
    "--threads",
    "1",
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def without_torch(monkeypatch):
    """None in place of a module makes an import fail as if it were not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)


def measured(capsys, *options):
    assert main(["bench", *QUICK, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_without_torch(capsys, without_torch):
    threads = moqext.num_threads()
    result = measured(capsys, "--seed", "5")
    assert moqext.num_threads() == threads
    assert (result["schema"], result["threads"], result["seed"], result["rotate"]) == (1, 1, 5, 1_000_000)
    assert result["flop_per_second"] is None
    assert {"cpu", "isa", "numpy", "moqext"} <= result["environment"].keys()
    keys = [(tuple(row["shape"]), row["tokens"], row["quant_algo"]) for row in result["rows"]]
    assert keys == [(s, m, a) for s in ((48, 32), (16, 128)) for m in (1, 3) for a in bench.ALGOS]
    for row in result["rows"]:
        rows, columns = row["shape"]
        assert row["kernel"].startswith("cpu:")
        assert 0 < row["best_seconds"] <= row["seconds"]
        assert row["calls"] >= 1
        assert row["torch_ratio"] is None
        assert row["flop"] == 2 * rows * columns * row["tokens"]
        assert row["floor_seconds"] == row["bytes"] / result["bytes_per_second"]


def test_bytes_are_those_of_the_formats(capsys, without_torch):
    rows = {(row["quant_algo"], *row["shape"]): row for row in measured(capsys)["rows"] if row["tokens"] == 3}
    vectors = 3 * 2 * (16 + 128)  # x and y, bfloat16
    assert rows["FP8_PER_CHANNEL_PER_TOKEN", 16, 128]["bytes"] == 16 * 128 + 4 * 16 + vectors
    assert rows["FP8_PB_WO", 16, 128]["bytes"] == 16 * 128 + 4 + vectors
    assert rows["W4A16_NVFP4", 16, 128]["bytes"] == 16 * 64 + 16 * 8 + 4 * 16 + vectors


def test_torch_takes_turns(capsys):
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    result = measured(capsys, "--algos", "fp8,NVFP4")
    assert torch.get_num_threads() == threads
    assert result["flop_per_second"] > 0
    assert [row["quant_algo"] for row in result["rows"]] == 4 * [bench.PEER, "FP8", "NVFP4"]
    for peer, *others in (result["rows"][i : i + 3] for i in range(0, 12, 3)):
        assert (peer["kernel"], peer["torch_ratio"]) == ("torch", 1.0)
        assert peer["bytes"] == 2 * (np.prod(peer["shape"]) + peer["tokens"] * sum(peer["shape"]))
        for row in others:
            assert row["torch_ratio"] == pytest.approx(peer["seconds"] / row["seconds"])


def test_no_column_for_torch_that_is_not_there(capsys, without_torch):
    """The last column of the table stood empty."""
    assert main(["bench", *QUICK]) == 0
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if "algorithm" in line]
    assert heads == 4 * [["algorithm", "kernel", "time", "GB/s", "of", "floor"]]


def test_a_busy_machine_is_a_warning_and_data(capsys, monkeypatch, without_torch):
    for calm in (True, False):
        monkeypatch.setattr(
            cli_bench, "calibrate", lambda threads, s=0.99 if calm else 0.5: Calibration(s, 0.0)
        )
        monkeypatch.setattr(cli_bench, "doubt", lambda rows: "")
        assert main(["bench", *QUICK, "--json"]) == 0
        captured = capsys.readouterr()
        told = json.loads(captured.out)
        assert told["calibration"] == {"share": 0.99 if calm else 0.5, "spread": 0.0}
        assert captured.err.count("\n") == len(told["warnings"]) == (not calm)
        assert captured.err == "".join(f"moqext: warning: {warning}\n" for warning in told["warnings"])


def test_table_and_plot(capsys, tmp_path, without_torch):
    plot = tmp_path / "plot.svg"
    assert main(["bench", *QUICK, "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "48 × 32, 1 token\n",
        "16 × 128, 3 tokens\n",
        "cpu:",
        "GB/s",
        "torch is not installed",
        "seed ",
    ):
        assert expected in printed
    assert sum(line.split()[:1] == ["NVFP4"] for line in printed.splitlines()) == 4
    tree = ElementTree.parse(plot)
    assert tree.getroot().tag == SVG + "svg"
    texts = {text.text for text in tree.iter(SVG + "text")}
    assert {"48 × 32", "16 × 128", "1", "3", "flop/s", *bench.ALGOS} <= texts


def row(shape, tokens, algo, seconds, floor):
    flop = 2 * shape[0] * shape[1] * tokens
    return {
        "shape": shape,
        "tokens": tokens,
        "quant_algo": algo,
        "flop": flop,
        "seconds": seconds,
        "floor_seconds": floor,
    }


def test_plot_places_what_was_reached_below_its_roof():
    rows = [row([64, 64], m, algo, 1e-5 * m, 4e-6) for algo in ("bfloat16", "A<&>B") for m in (1, 16, 256)]
    tree = ElementTree.fromstring(roofline(rows, "a & b < c"))
    width, height = (float(tree.get(name)) for name in ("width", "height"))
    lines = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in tree.iter(SVG + "polyline")
    ]
    assert len(lines) == 4
    for roof, reached in zip(lines[::2], lines[1::2], strict=True):
        assert [x for x, _ in roof] == [x for x, _ in reached] == sorted(x for x, _ in roof)
        for (x, high), (_, low) in zip(roof, reached, strict=True):
            assert 0 < high < low < height  # y grows downwards
            assert 0 < x < width
        assert len({y for _, y in reached}) == 1  # as many operations a second for all tokens
    texts = {text.text for text in tree.iter(SVG + "text")}
    assert {"a & b < c", "A<&>B", "torch, bfloat16"} <= texts


def test_plot_of_one_number_of_tokens():
    tree = ElementTree.fromstring(roofline([row([1, 1], 1, "FP8", 1.0, 1.0)], ""))
    assert len(list(tree.iter(SVG + "circle"))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shapes", "4096"), "expected OUTxIN,... as in 4096x14336, got '4096'"),
        (("--shapes", "16x0"), "expected features from 1"),
        (("--tokens", "1,,2"), "expected tokens from 1"),
        (("--tokens", "-1"), "expected tokens from 1"),
        (("--threads", "0"), "expected threads from 1 to 1024, got '0'"),
        (("--seconds", "nan"), "expected seconds, more than 0"),
        (("--rotate", "0"), "expected megabytes from 1"),
        (("--seed", "-1"), "expected a seed from 0"),
        (("--device", "gpu"), 'expected "cpu", "cuda:N" or "auto", got \'gpu\''),
    ],
)
def test_bad_arguments(capsys, options, message):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--algos", "NVFP5"), 'got "NVFP5"'),
        (("--algos", "MIXED_PRECISION"), "MIXED_PRECISION has no linear method"),
        (("--shapes", "16x17"), "in_features: expected a multiple of the group size 16 for NVFP4, got 17"),
        (("--plot", "no/such/folder/plot.svg"), "no/such/folder/plot.svg"),
        (("--device", "cuda:77"), "--device cuda:77: no such CUDA device"),
        (("--compute", "fp4"), "fp4"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(capsys, monkeypatch, options, message):
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("measured"))
    assert main(["bench", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("moqext: error: ")
    assert captured.err.count("\n") == 1


def test_every_call_takes_another_copy(rng):
    """Weights come from memory: as many copies take turns as make up the size asked for."""
    contestant = bench._contestant("NVFP4", (64, 64), rng, 100_000)
    weights = contestant.weights
    assert sum(tensor.nbytes for copy in weights for tensor in copy.values()) >= 100_000
    assert len({copy["weight"].ctypes.data for copy in weights}) == len(weights)
    called = []
    recorded = contestant._replace(call=lambda x, weight: called.append(id(weight)))
    times = bench.take_turns([recorded, recorded], np.zeros((1, 64), np.float32), 0.2)
    assert min(map(len, times)) >= bench.CALLS
    assert len(set(called[: len(weights)])) > min(len(called), len(weights)) // 3


def test_long_calls_are_not_repeated(rng, monkeypatch):
    contestant = bench._contestant("FP8", (16, 16), rng, 1)
    clock = iter(range(1000))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(clock)))
    assert bench.take_turns([contestant], np.zeros((1, 16), np.float32), 0.5) == [[1.0]]


def test_speed_of_products_is_sought_where_it_is_highest():
    """Many processors need large matrices: where speed doubles with size, the largest matrix has it."""
    sizes = []

    def quick(size):
        sizes.append(size)
        return 2 * size**3 / (1e12 * size)

    assert bench.product_speed(quick) == pytest.approx(8192e12)
    assert tuple(sizes) == bench.PRODUCT_SIZES == (256, 512, 1024, 2048, 4096, 8192)


def test_speed_of_products_stops_at_a_long_one():
    """A slow machine is not kept busy for minutes, and the best of the sizes before counts too."""
    seconds = {256: 1e-3, 512: 0.9 * bench.LONG_PRODUCT, 1024: 1.1 * bench.LONG_PRODUCT}
    assert bench.product_speed(seconds.__getitem__) == 2 * 1024**3 / seconds[1024]
    seconds[256] = 1e-5
    assert bench.product_speed(seconds.__getitem__) == 2 * 256**3 / 1e-5


def test_environment_is_json():
    assert json.loads(json.dumps(environment()))["cpus"] >= 1
    assert last_level_cache() is None or last_level_cache() >= 1 << 15


def test_calls_that_are_faster_than_the_machine_are_a_warning(capsys, monkeypatch):
    """A busy machine printed 1280 % of the floor and nothing else."""
    measure_ceilings = bench.measure_ceilings

    def busy(*args, **kwargs):
        return replace(measure_ceilings(*args, **kwargs), bytes_per_second=1e3, flop_per_second=None)

    monkeypatch.setattr(bench, "measure_ceilings", busy)
    options = ["--shapes", "64x64", "--tokens", "1", "--algos", "FP8", "--seconds", "0.01", "--rotate", "1"]
    assert main(["bench", *options]) == 0
    assert "the machine was busy" in capsys.readouterr().err


def test_calls_within_the_floor_are_no_warning():
    row = SimpleNamespace(floor_seconds=1.0, seconds=0.9)
    assert doubt([row]) == ""

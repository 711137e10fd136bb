"""The cache of `moqext tune`: what is written is found again, and what does not fit is ignored in a line."""

import copy
import json
import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import moqext
from moqext import CheckpointError, LinearMethod, MoEMethod
from moqext.layers import tuning
from moqext.layers.tuning import Cell

from .linear_cases import random_case, random_x

PACKAGES = str(Path(moqext.__file__).parents[1])


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The cache of this test, not there yet."""
    file = tmp_path / "cache" / "tune.json"
    monkeypatch.setenv("MOQEXT_TUNE", str(file))
    return file


def layer(**options):
    return LinearMethod("FP8", 64, [48], **options)


def other_kernel(method, tokens=3):
    """A kernel that runs the layer, and is not the one that estimates choose."""
    can = [name for name, reason in method._plan.explain() if reason is None]
    return next(name for name in can if name != method.backend_for(tokens))


def write(path, cells, method=None, device=None, software=None):
    method = method or layer()
    document = {
        "moqext_tune": 1,
        "devices": {
            device or tuning.device_key("cpu"): {
                software or tuning.software_key("cpu"): {tuning.layer_key(method): cells}
            }
        },
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))
    tuning.forget()


def cell(kernel, variant=0, seconds=1e-6):
    return {"kernel": kernel, "variant": variant, "seconds": seconds}


def lines(caplog):
    return [record for record in caplog.records if record.name == "moqext"]


# ------------------------------------------------------------------------------------------ what fits


def test_what_tune_saves_is_found_by_later_methods(path, rng):
    case = random_case(rng, "NVFP4", 64, [48])
    method = case.method(dtype="bfloat16")
    params = method.prepare(case.listed())
    timings = method.tune([1, 40], params, save=True)
    later = case.method(dtype="bfloat16")
    for tokens in (1, 40):
        assert later.backend_for(tokens) == next(t.kernel for t in timings if t.chosen and t.tokens == tokens)
        assert later.explain(tokens).count("chosen, tuned") == 1
    assert "tuned" not in later.explain(100)
    assert "tuned" in copy.copy(later).explain(1)
    assert "tuned" not in case.method(dtype="float16").explain(1)
    x = random_x(rng, (40, 64), "bfloat16")
    assert np.array_equal(later(x, params), method(x, params))


def test_a_choice_changes_the_kernel_and_stays_within_the_contract(path, rng):
    case = random_case(rng, "FP8", 64, [48])
    plain = case.method(dtype="float32")
    other = other_kernel(plain)
    write(path, {"3": cell(other)}, plain)
    tuned = case.method(dtype="float32")
    assert tuned.backend_for(3) == other
    assert re.search(f"^{other} +chosen, tuned$", tuned.explain(3), re.MULTILINE)
    assert [tuned.backend_for(m) == plain.backend_for(m) for m in (1, 2, 4, 5)] == [True] * 4
    params, x = plain.prepare(case.listed()), random_x(rng, (3, 64), "float32")
    expected = plain(x, params)
    np.testing.assert_allclose(tuned(x, params), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_choice_holds_for_its_bucket(path):
    other = other_kernel(layer(), 100)
    write(path, {"104": cell(other)})
    tuned = layer()
    assert [tuned._plan.bucket(m) for m in (96, 97, 104, 105)] == [96, 104, 104, 112]
    assert [tuned._plan.is_tuned(m) for m in (0, 96, 97, 104, 105)] == [False, False, True, True, False]


def test_experts_have_choices_too(path):
    def experts(**options):
        return MoEMethod("FP8", 4, 32, 64, top_k=2, **options)

    other = other_kernel(experts())
    write(path, {"3": cell(other)}, experts())
    assert experts().backend_for(3) == other
    assert experts(limit=7.0).backend_for(3) == other
    assert "tuned" not in experts(activation="gelu").explain(3)


def test_subclasses_find_the_choices_of_their_layer(path):
    class Own(LinearMethod):
        pass

    other = other_kernel(layer())
    write(path, {"3": cell(other)})
    assert Own("FP8", 64, [48]).backend_for(3) == other


def test_the_file_is_read_once(path, monkeypatch):
    write(path, {"3": cell(other_kernel(layer()))})
    read, paths = tuning.read, []
    monkeypatch.setattr(tuning, "read", lambda path: paths.append(path) or read(path))
    for width in (16, 32, 48, 48):
        LinearMethod("FP8", 64, [width])
    assert paths == [path]


# ------------------------------------------------------------------------------------ where the file is


def test_places(tmp_path, monkeypatch):
    monkeypatch.delenv("MOQEXT_TUNE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert tuning.cache_path() == tmp_path / "caches" / "moqext" / "tune.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tuning.cache_path() == tmp_path / ".cache" / "moqext" / "tune.json"
    monkeypatch.setenv("MOQEXT_TUNE", "~/own.json")
    assert tuning.cache_path() == tmp_path / "own.json"
    monkeypatch.setenv("MOQEXT_TUNE", "0")
    assert tuning.cache_path() is None


def test_0_turns_the_cache_off(rng, monkeypatch):
    monkeypatch.setenv("MOQEXT_TUNE", "0")
    case = random_case(rng, "FP8", 64, [48])
    method = case.method(dtype="bfloat16")
    with pytest.raises(CheckpointError, match="MOQEXT_TUNE is 0"):
        method.tune([1], method.prepare(case.listed()), save=True)
    assert "tuned" not in method.explain(1)


def test_a_forced_kernel_stays(path, monkeypatch, caplog):
    write(path, {"3": cell(other_kernel(layer()))})
    monkeypatch.setenv("MOQEXT_KERNEL", "cpu:portable")
    assert layer().backend_for(3) == "cpu:portable"
    assert not lines(caplog)
    with pytest.raises(CheckpointError, match="MOQEXT_KERNEL is set"):
        tuning.save(path, "cpu", {})


# ------------------------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize(
    ("key", "level", "text"),
    [
        ({"software": "moqext 0.0.9"}, logging.WARNING, "is not of moqext"),
        ({"device": "Another, avx2"}, logging.INFO, "nothing in it was measured on"),
    ],
)
def test_choices_of_others_are_ignored_in_one_line(path, caplog, key, level, text):
    usual = layer().backend_for(3)
    write(path, {"3": cell(other_kernel(layer()))}, **key)
    with caplog.at_level(logging.INFO, "moqext"):
        assert layer().backend_for(3) == usual
        layer(dtype="float16")
    assert [(line.levelno, text in line.getMessage()) for line in lines(caplog)] == [(level, True)]


BAD_CELLS = [
    [],
    {"x": {}},
    {"0": cell("cpu:avx2")},
    {"2147483648": cell("cpu:avx2")},
    {"1": []},
    {"1": cell(7)},
    {"1": cell("cpu:\x1b[31m")},
    {"1": cell("cpu:avx2", -1)},
    {"1": cell("cpu:avx2", 64)},
    {"1": cell("cpu:avx2", "0")},
    {"1": cell("cpu:avx2", 0, "fast")},
    {"1": cell("cpu:avx2", 0, -1.0)},
    {"1": cell("cpu:avx2") | {"library": 13}},
    {str(8 * tokens): cell("cpu:avx2") for tokens in range(1, 66)},
    {"3": cell("cpu:gone")},
    {"3": cell("cuda:sm90_fp8_decode")},
    {"3": cell("cpu:portable", 5)},
]


@pytest.mark.parametrize("cells", BAD_CELLS)
def test_cells_that_cannot_be_are_ignored_in_one_line(path, caplog, cells):
    usual = [layer().backend_for(m) for m in (1, 3, 8)]
    write(path, cells)
    assert [layer().backend_for(m) for m in (1, 3, 8)] == usual
    assert [(line.levelno, "ignored" in line.getMessage()) for line in lines(caplog)] == [(30, True)]
    assert lines(caplog)[0].getMessage().isprintable()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"moqext_tune": 2, "devices": {}}',
        b'{"moqext_tune": 1, "devices": []}',
        b'{"moqext_tune": 1, "devices": {"%s": 7}}',
        b'{"moqext_tune": 1, "devices": {"%s": {"%s": 7}}}',
        b'{"moqext_tune": 1e999, "devices": {}}',
    ],
)
def test_a_file_that_is_no_cache_is_ignored_in_one_line(path, caplog, content):
    keys = tuning.device_key("cpu").encode(), tuning.software_key("cpu").encode()
    path.parent.mkdir()
    path.write_bytes(content % keys[: content.count(b"%s")] if b"%s" in content else content)
    layer(), layer()
    assert [(line.levelno, "ignored" in line.getMessage()) for line in lines(caplog)] == [(30, True)]


def test_what_is_no_file_is_ignored(tmp_path, monkeypatch, caplog):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(tuning.MAX_BYTES + 1)
    for name in ("pipe", "large", "."):
        monkeypatch.setenv("MOQEXT_TUNE", str(tmp_path / name))
        layer()
    assert len(lines(caplog)) == 3


# ---------------------------------------------------------------------------------------------- writing


def saved(path):
    return json.loads(path.read_text())["devices"][tuning.device_key("cpu")][tuning.software_key("cpu")]


def test_what_is_there_stays(path):
    write(path, {"1": cell("cpu:avx2")}, device="Another")
    tuning.save(path, "cpu", {"a": {1: Cell("cpu:avx2", 0, 1e-6), 8: Cell("cpu:avx2", 0, 1e-6)}})
    tuning.save(path, "cpu", {"a": {8: Cell("cpu:amx", 0, 1e-6)}, "b": {2: Cell("cpu:amx", 0, 1e-6)}})
    assert {name: list(cells) for name, cells in saved(path).items()} == {"a": ["1", "8"], "b": ["2"]}
    assert saved(path)["a"]["8"]["kernel"] == "cpu:amx"
    assert "Another" in json.loads(path.read_text())["devices"]


def test_of_too_many_numbers_the_newest_stay(path):
    old = {8 * m: Cell("cpu:avx2", 0, 1e-6) for m in range(1, 65)}
    tuning.save(path, "cpu", {"a": old})
    tuning.save(path, "cpu", {"a": {1: Cell("cpu:amx", 0, 1e-6), 8: Cell("cpu:amx", 0, 1e-6)}})
    assert len(saved(path)["a"]) == tuning.MAX_BUCKETS
    assert [saved(path)["a"][tokens]["kernel"] for tokens in ("1", "8", "16")] == ["cpu:amx"] * 2 + [
        "cpu:avx2"
    ]


def test_choices_that_cannot_be_are_written_anew(path):
    write(path, {"0": 7})
    tuning.save(path, "cpu", {"a": {1: Cell("cpu:avx2", 0, 1e-6)}})
    assert list(saved(path)) == ["a"]


def test_a_file_that_is_no_cache_is_not_overwritten(path):
    path.parent.mkdir()
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="is no cache of moqext tune"):
        tuning.save(path, "cpu", {})
    assert path.read_text() == '{"model_type": "llama"}'


def test_a_device_that_is_not_there_has_no_choices(path):
    with pytest.raises(CheckpointError, match="no device cuda:99"):
        tuning.save(path, "cuda:99", {})


def test_an_interrupt_leaves_the_old_file(path, monkeypatch):
    tuning.save(path, "cpu", {"a": {1: Cell("cpu:avx2", 0, 1e-6)}})
    before = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tuning.save(path, "cpu", {"b": {1: Cell("cpu:avx2", 0, 1e-6)}})
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["tune.json"]
    monkeypatch.undo()
    tuning.save(path, "cpu", {"b": {1: Cell("cpu:avx2", 0, 1e-6)}})
    assert list(saved(path)) == ["a", "b"]


def test_writers_at_once_lose_nothing(path):
    code = "import sys; from moqext.layers import tuning; from pathlib import Path\n"
    code += "for n in range(10): tuning.save(Path(sys.argv[1]), 'cpu', "
    code += "{f'{sys.argv[2]} {n}': {1: tuning.Cell('cpu:avx2', 0, 1e-6)}})"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), name], env=os.environ | {"PYTHONPATH": PACKAGES}
        )
        for name in ("a", "b")
    ]
    with ThreadPoolExecutor(4) as pool:
        cells = {1: Cell("cpu:avx2", 0, 1e-6)}
        list(pool.map(lambda n: tuning.save(path, "cpu", {f"thread {n}": cells}), range(20)))
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(saved(path)) == 40

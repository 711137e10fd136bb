"""The target of a quantizer is whole or no checkpoint, and a run that was ended is gone on with."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import moqext
from moqext.__main__ import main
from moqext.tools.convert import staging, writer
from moqext.tools.convert.journal import Journal
from moqext.tools.quantize import quantizers, weights

from .quantize_files import CASES, unquantized
from .work import HANGS

CASE = next(case for case in CASES if case.export == "exports/nvfp4_sharded")
LEFTOVERS = ".moqext-convert-*"
OPTIONS = {"to": "NVFP4", "scales": "none", "max_shard_size": 12_000}


def content(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def source(tmp_path):
    return unquantized(CASE, tmp_path / "in")


@pytest.fixture
def whole(source, tmp_path):
    """The files that a run writes which is not disturbed."""
    moqext.Checkpoint(source).quantize(tmp_path / "whole", **OPTIONS)
    return content(tmp_path / "whole")


def jobs_of(run):
    """The jobs whose bytes a run writes."""
    made = []
    append = writer.TensorWriter.append

    def counted(self, name, array):
        made.append(name)
        return append(self, name, array)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.TensorWriter, "append", counted)
        run()
    return made


@pytest.mark.parametrize("at", range(1, 60, 7))
def test_threads_that_fail_end_the_others_and_are_gone_on_with(at, source, whole, tmp_path, monkeypatch):
    calls = itertools.count(1)
    append = writer.TensorWriter.append

    def full(self, name, array):
        if next(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(self, name, array)

    monkeypatch.setattr(quantizers.HostQuantizer, "workers", 4)
    with monkeypatch.context() as patch:
        patch.setattr(writer.TensorWriter, "append", full)
        with pytest.raises(moqext.CheckpointError, match="No space"):
            moqext.Checkpoint(source).quantize(tmp_path / "out", **OPTIONS)
    assert not list((tmp_path / "out").glob("*.json"))
    moqext.Checkpoint(source).quantize(tmp_path / "out", **OPTIONS)
    assert content(tmp_path / "out") == whole


KILLED = """
import os, signal, sys
import moqext
from moqext.tools.convert import journal, writer

calls = 0
def die_at(owner, name, at):
    function = getattr(owner, name)
    def wrapped(*args):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    setattr(owner, name, wrapped)

where, at = sys.argv[3], int(sys.argv[4])
die_at(*{{"write": (os, "pwrite"), "mark": (journal.Journal, "add"), "move": (os, "replace")}}[where], at)
moqext.Checkpoint(sys.argv[1]).quantize(sys.argv[2], **{options!r})
"""


@pytest.mark.parametrize(
    ("where", "at"), [("write", 1), ("write", 2), ("write", 40), ("mark", 1), ("mark", 60), ("move", 2)]
)
def test_a_killed_run_leaves_no_checkpoint_and_is_gone_on_with(where, at, source, whole, tmp_path):
    out = tmp_path / "out"
    code = KILLED.format(options=OPTIONS)
    environment = {**os.environ, "PYTHONPATH": str(Path(moqext.__file__).parents[1])}
    arguments = [sys.executable, "-c", code, str(source), str(out), where, str(at)]
    process = subprocess.run(arguments, env=environment, timeout=HANGS, check=False)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "config.json").exists()
    (folder,) = out.glob(LEFTOVERS)
    done = (folder / "journal").read_text().splitlines() if (folder / "journal").exists() else []
    results = []
    again = jobs_of(
        lambda: results.append(moqext.Checkpoint(source).quantize(out, overwrite=where == "move", **OPTIONS))
    )
    assert content(out) == whole
    everything = jobs_of(lambda: moqext.Checkpoint(source).quantize(tmp_path / "other", **OPTIONS))
    assert bool(done) == (len(again) < len(everything)) == (results[0].bytes_kept > 0)


def test_runs_that_write_something_else_do_not_go_on(source, tmp_path):
    """Neither other options, nor a source that changed."""
    out = tmp_path / "out"

    def ended(**options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "add", interrupt_at(5))
            with pytest.raises(KeyboardInterrupt):
                moqext.Checkpoint(source).quantize(out, **OPTIONS | options)
        assert [path.name.startswith(".moqext-convert-") for path in out.iterdir()] == [True]

    ended()
    for change in ({"to": "W4A16_NVFP4"}, {"exclude": ["*layers.3.*"]}, {"scale_search": "mse"}):
        result = moqext.Checkpoint(source).quantize(out, **OPTIONS | change)
        assert result.bytes_kept == 0
        shutil.rmtree(out)
        ended()
    os.utime(source / "model.safetensors", ns=(1, 1))
    assert moqext.Checkpoint(source).quantize(out, **OPTIONS).bytes_kept == 0


def interrupt_at(number):
    """`Journal.add`, which is interrupted some time."""
    add, calls = Journal.add, itertools.count(1)

    def wrapped(self, job):
        if next(calls) == number:
            raise KeyboardInterrupt
        add(self, job)

    return wrapped


def test_a_run_before_the_machine_began_anew_does_not_count(source, tmp_path, monkeypatch):
    boot = tmp_path / "boot"
    monkeypatch.setattr("moqext.tools.convert.journal._BOOT", boot)
    kept = []
    for name in ("one", "two", "two"):
        boot.write_text(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "add", interrupt_at(5 + len(kept)))
            with pytest.raises(KeyboardInterrupt):
                moqext.Checkpoint(source).quantize(tmp_path / "out", **OPTIONS)
        (folder,) = (tmp_path / "out").glob(LEFTOVERS)
        kept.append(len((folder / "journal").read_text().splitlines()))
    assert kept == [4, 5, 11]
    boot.unlink()
    moqext.Checkpoint(source).quantize(tmp_path / "out", **OPTIONS)
    assert not list((tmp_path / "out").glob(LEFTOVERS))


def test_a_line_of_the_journal_without_its_end_does_not_count(tmp_path):
    (tmp_path / "journal").write_bytes(b"a 1\na 2\na 3")
    journal = Journal(tmp_path / "journal")
    assert [job in journal for job in ("a 1", "a 2", "a 3")] == [True, True, False]
    journal.add("b 4")
    journal.close()
    assert (tmp_path / "journal").read_bytes() == b"a 1\na 2\nb 4\n"


def test_a_disk_that_fills_up_is_one_sentence_and_the_next_run_goes_on(source, whole, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["quantize", str(source), str(out), "--to", "NVFP4", "--scales", "none"]
    arguments += ["--max-shard-size", "12KB", "--quiet"]
    pwrite, calls = os.pwrite, itertools.count(1)

    def full(*values):
        if next(calls) > 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.os, "pwrite", full)
        assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "could not be written to its end (No space left on device)" in err
    assert "; the same command goes on from .moqext-convert-" in err
    assert main(arguments) == 0
    assert content(out) == whole


def test_what_an_earlier_run_wrote_counts_as_room(source, tmp_path, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", interrupt_at(100))
        with pytest.raises(KeyboardInterrupt):
            moqext.Checkpoint(source).quantize(tmp_path / "out", **OPTIONS)
    need = []
    written = staging.Staging._written
    monkeypatch.setattr(staging.Staging, "_written", lambda self: need.append(written(self)) or need[-1])
    moqext.Checkpoint(source).quantize(tmp_path / "out", **OPTIONS)
    assert need[0] > 0


def test_weights_that_are_no_numbers_leave_nothing(source, tmp_path):
    file = source / "model.safetensors"
    with moqext.Checkpoint(source) as checkpoint:
        name = "model.layers.7.mlp.up_proj.weight"
        at = checkpoint.files.tensors[name]
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    offset = start + json.loads(raw[8:start])[name]["data_offsets"][0]
    raw[offset : offset + 2] = b"\xc0\x7f"
    file.write_bytes(raw)
    assert at.dtype == "BF16"
    for to in ("NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP4"):
        with pytest.raises(
            moqext.CheckpointError, match=r"layers\.7\.mlp\.up_proj: a weight is infinite or NaN"
        ):
            moqext.Checkpoint(source).quantize(tmp_path / "out", to=to, scales="none")
        assert not (tmp_path / "out").exists()


def test_a_target_in_the_source_is_refused(source):
    with pytest.raises(moqext.CheckpointError, match="lies in the checkpoint"):
        moqext.Checkpoint(source).quantize(source / "out", **OPTIONS)


def test_a_source_that_is_quantized_is_refused(tmp_path):
    with pytest.raises(
        moqext.CheckpointError, match="is quantized already; `moqext convert DIR OUT --to bf16`"
    ):
        moqext.Checkpoint(CASE.directory).quantize(tmp_path / "out", to="MXFP8")


def test_memory_is_bounded_by_pieces(tmp_path, monkeypatch, rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    safetensors = pytest.importorskip("safetensors.numpy")
    (tmp_path / "in").mkdir()
    weight = rng.standard_normal((1000, 64)).astype(ml_dtypes.bfloat16)
    safetensors.save_file({"layers.0.up_proj.weight": weight}, tmp_path / "in/model.safetensors")
    monkeypatch.setattr(weights, "PIECE_BYTES", 1 << 10)
    read = []
    rows = moqext.Checkpoint.rows
    monkeypatch.setattr(
        moqext.Checkpoint, "rows", lambda self, *args: read.append((part := rows(self, *args)).nbytes) or part
    )
    moqext.Checkpoint(tmp_path / "in").quantize(tmp_path / "out", to="NVFP4", scales="none")
    assert max(read) == 128 * 64 * 2  # rows of a block
    assert sum(read) == 2 * weight.nbytes  # once for the largest magnitude, once for the codes

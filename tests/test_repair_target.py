"""The target of a repair has what was in it or the repaired checkpoint, whole, whatever fails in between."""

import errno
import os
import shutil
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import moqext
from moqext.__main__ import main
from moqext.cli.progress import Progress
from moqext.tools.convert import writer
from moqext.tools.convert.staging import STAGING

from .damaged import Damaged

NVFP4 = "checkpoints/llama_nvfp4_kvfp8"
K = "model.layers.0.self_attn.k_proj"


def content(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def plan(data, tmp_path):
    """The plan of a checkpoint with a change of names and one of values."""
    model = Damaged(data / NVFP4)
    model.rename(f"{K}.k_scale", f"{K}.output_scale")
    model[f"{K}.weight_scale"][0, 0] = 0x7F
    model[f"{K}.weight"][0, :8] = 0
    source = model.save(tmp_path / "source")
    with moqext.Checkpoint(source) as checkpoint:
        yield checkpoint.plan_repair()


@pytest.fixture
def old(data, tmp_path):
    """A target with a checkpoint of several files, and a file of the user's own."""
    out = Path(shutil.copytree(data / "exports/nvfp4_sharded", tmp_path / "out"))
    (out / "notes.txt").write_text("mine")
    return out


def count_moves(plan, old, monkeypatch):
    calls = []
    move = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *args: (calls.append(args), move(*args)))
        plan.write(shutil.copytree(old, old.with_name("trial")), overwrite=True)
    return len(calls)


def test_a_kill_at_any_move_leaves_what_the_next_run_restores(plan, old, monkeypatch):
    before = content(old)
    move = os.replace
    for number in range(1, count_moves(plan, old, monkeypatch) + 1):
        if (child := os.fork()) == 0:
            calls = []

            def replace(*args, calls=calls, number=number):
                calls.append(args)
                if len(calls) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                move(*args)

            monkeypatch.setattr(os, "replace", replace)
            plan.write(old, overwrite=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with pytest.raises(moqext.CheckpointError, match="is not empty"):
            plan.write(old)
        assert content(old) == before
    plan.write(old, overwrite=True)
    with moqext.Checkpoint(old) as checkpoint:
        assert checkpoint.plan_repair().changes == ()
    assert (old / "notes.txt").read_text() == "mine"


def test_a_kill_while_weights_are_written_leaves_no_checkpoint(plan, tmp_path):
    out = tmp_path / "new"
    if (child := os.fork()) == 0:
        plan.write(out, progress=lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not list(out.glob("*.json"))
    assert not list(out.glob("*.safetensors"))
    plan.write(out)
    assert not list(out.glob(f"{STAGING}*"))
    with moqext.Checkpoint(out) as checkpoint:
        assert checkpoint.problems == ()


def test_a_disk_without_room_is_refused_before_anything_is_written(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10_000, 9_000, 1_000))
    with pytest.raises(moqext.CheckpointError, match=r"deep/out: not enough space: .* 1,000 bytes are free"):
        plan.write(tmp_path / "deep/out")
    assert not (tmp_path / "deep").exists()


def test_a_disk_that_fills_up_on_the_way_is_told_in_words(plan, old, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = content(old)
    monkeypatch.setattr(writer.os, "pwrite", full)
    with pytest.raises(moqext.CheckpointError, match=r"out: could not be written .*No space left.* takes \d"):
        plan.write(old, overwrite=True)
    assert content(old) == before


def test_a_result_that_is_refused_leaves_the_old_checkpoint(plan, old, monkeypatch):
    """The check comes before the files change places."""
    before = content(old)
    monkeypatch.setattr(
        writer.TensorWriter,
        "append",
        lambda self, name, array: self._next.__setitem__(name, self._end[name]) or 0,
    )  # every tensor is zeros
    with pytest.raises(moqext.CheckpointError, match="still wrong after the repair"):
        plan.write(old, overwrite=True)
    assert content(old) == before


def test_a_signal_cleans_up(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Progress, "__call__", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert main(["repair", str(tmp_path / "source"), str(tmp_path / "new"), "--quiet"]) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "new").exists()
    assert capsys.readouterr().err == f"moqext: {signal.strsignal(signal.SIGTERM).lower()}\n"


@pytest.mark.parametrize("below", ["", "out"])
def test_the_source_is_never_written_to(plan, tmp_path, below):
    before = content(tmp_path / "source")
    with pytest.raises(moqext.CheckpointError, match="lies in the checkpoint that is read"):
        plan.write(tmp_path / "source" / below, overwrite=True)
    assert content(tmp_path / "source") == before


def test_memory_holds_a_piece_of_a_tensor(data, tmp_path, monkeypatch):
    """Swizzled scales and codes of 16 MB with pieces of 256 KB."""
    monkeypatch.setattr("moqext.tools.repair.draft.CHUNK", 1 << 18)
    monkeypatch.setattr("moqext.tools.convert.jobs.CHUNK", 1 << 18)
    model = Damaged(data / NVFP4)
    name, rows, columns = "model.layers.0.mlp.up_proj", 1 << 15, 1024
    codes = np.full((rows, columns // 2), 0x11, np.uint8)
    model.put(f"{name}.weight", "U8", codes)
    model.put(f"{name}.weight_scale", "F8_E4M3", np.full((rows, columns // 16), 0x38, np.uint8))
    model.configs["config.json"] |= {"hidden_size": columns, "intermediate_size": rows}
    source = model.save(tmp_path / "in")
    with moqext.Checkpoint(source, scale_layout="swizzled", nibbles="high") as checkpoint:
        plan = checkpoint.plan_repair()
        plan._check = lambda folder: None  # reads whole scales, as every reader of them does
        tracemalloc.start()
        plan.write(tmp_path / "big")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < codes.nbytes // 4

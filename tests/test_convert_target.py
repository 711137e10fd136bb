"""The target of a conversion holds the old checkpoint or the new one, whole, whatever fails in between."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import moqext
from moqext.__main__ import main
from moqext.cli.progress import Progress
from moqext.tools.convert import writer

LEFTOVERS = ".moqext-convert-*"


def content(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def source(data):
    """Smaller than the old one, and without one of its files."""
    return moqext.Checkpoint(data / "exports/fp8_kvcast")


@pytest.fixture
def old(data, tmp_path):
    """A target with a checkpoint of several files, and a file of the user's own."""
    out = tmp_path / "out"
    moqext.Checkpoint(data / "exports/nvfp4_sharded").convert(out, max_shard_size=60_000)
    (out / "notes.txt").write_text("mine")
    return out


def count_moves(source, old, monkeypatch):
    """How often files change places, tried on a copy."""
    calls = []
    move = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *args: (calls.append(args), move(*args)))
        copy = Path(shutil.copytree(old, old.with_name("trial")))
        source.convert(copy, overwrite=True)
    return len(calls)


def stop_at(number, stop, monkeypatch):
    """Has the process, or the call, end at a move."""
    move, calls = os.replace, []

    def replace(*args):
        calls.append(args)
        if len(calls) == number:
            stop()
        move(*args)

    monkeypatch.setattr(os, "replace", replace)


def fail():
    raise OSError(errno.EIO, "Input/output error")


def test_a_move_that_fails_leaves_the_old_checkpoint(source, old, monkeypatch):
    before = content(old)
    for number in range(1, count_moves(source, old, monkeypatch) + 1):
        with monkeypatch.context() as patch:
            stop_at(number, fail, patch)
            with pytest.raises(OSError, match="Input/output"):
                source.convert(old, overwrite=True)
        assert content(old) == before
        assert not list(old.glob(LEFTOVERS))


def test_a_kill_at_any_move_leaves_what_the_next_run_restores(source, old, monkeypatch):
    before = content(old)
    for number in range(1, count_moves(source, old, monkeypatch) + 1):
        if (child := os.fork()) == 0:
            stop_at(number, lambda: os._exit(9), monkeypatch)
            source.convert(old, overwrite=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert number <= 2 or not (old / "config.json").exists()
        with pytest.raises(moqext.CheckpointError, match="is not empty"):
            source.convert(old)
        assert content(old) == before


def test_a_kill_after_the_last_move_leaves_the_new_checkpoint(source, old, tmp_path, monkeypatch):
    if os.fork() == 0:
        monkeypatch.setattr(Path, "unlink", lambda *args: os._exit(9))
        source.convert(old, overwrite=True)
    os.wait()
    with pytest.raises(moqext.CheckpointError, match="is not empty"):
        source.convert(old)
    source.convert(tmp_path / "fresh")
    assert content(old).items() >= content(tmp_path / "fresh").items()
    assert not list(old.glob(LEFTOVERS))


@pytest.mark.parametrize("moves", [[["../victim", "x"]], [["{root}/link/victim", "x"]], {"a": 1}, [[]]])
def test_moves_that_lead_elsewhere_are_refused(source, tmp_path, moves):
    """The folder may have come with a download."""
    (tmp_path / "victim").write_text("precious")
    folder = tmp_path / "out/.moqext-convert-x"
    folder.mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path)
    (folder / "moves.json").write_text(json.dumps(moves).replace("{root}", folder.name))
    with pytest.raises(moqext.CheckpointError, match=r"moves\.json.*remove its folder"):
        source.convert(tmp_path / "out", overwrite=True)
    assert (tmp_path / "victim").read_text() == "precious"


def test_what_a_killed_conversion_left_is_no_checkpoint(source, tmp_path):
    stale = tmp_path / "out" / ".moqext-convert-abc"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    source.convert(tmp_path / "out")
    assert not list((tmp_path / "out").glob(LEFTOVERS))


def test_a_conversion_that_runs_keeps_its_folder(source, tmp_path):
    out, refused = tmp_path / "out", []

    def again(done, total, name):
        if not refused:
            with pytest.raises(moqext.CheckpointError, match="another command is writing to it") as caught:
                source.convert(out, overwrite=True)
            refused.append(caught)

    source.convert(out, progress=again)
    assert refused
    source.convert(out, overwrite=True)


def test_a_directory_that_holds_no_checkpoint_is_not_said_to(source, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(moqext.CheckpointError, match=r"is not empty; --overwrite .* beside notes\.txt"):
        source.convert(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_directory_where_a_file_is_to_be_written_is_refused_first(source, old, name):
    (old / name).unlink(missing_ok=True)
    (old / name).mkdir()
    before = content(old)
    with pytest.raises(moqext.CheckpointError, match=f"{name}: is a directory"):
        source.convert(old, overwrite=True, progress=lambda *args: pytest.fail("something was written"))
    assert content(old) == before


# The source is not written to, whatever links lead to it


def test_a_source_whose_links_lead_to_the_target_is_refused(data, old, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in old.iterdir():
        (linked / path.name).symlink_to(path)
    before = content(old)
    with pytest.raises(moqext.CheckpointError, match="is a link to a file in it"):
        moqext.Checkpoint(linked).convert(old, overwrite=True)
    assert content(old) == before


def test_a_source_in_the_target_is_refused(data, tmp_path):
    inner = Path(shutil.copytree(data / "exports/fp8_kvcast", tmp_path / "out/in"))
    (tmp_path / "alias").symlink_to(tmp_path / "out")
    with pytest.raises(moqext.CheckpointError, match="the checkpoint that is read lies in it"):
        moqext.Checkpoint(inner).convert(tmp_path / "alias", overwrite=True)


def test_a_folder_of_the_target_that_leads_to_the_source_is_refused(data, tmp_path):
    inner = Path(shutil.copytree(data / "exports/fp8_kvcast", tmp_path / "in"))
    (inner / "templates").mkdir()
    (inner / "templates/tool.jinja").write_text("tool")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/templates").symlink_to(inner / "templates")
    with pytest.raises(moqext.CheckpointError, match="templates: is a link that leads out of"):
        moqext.Checkpoint(inner).convert(tmp_path / "out", overwrite=True)


def test_a_loop_of_links_is_refused_by_name(source, tmp_path):
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(moqext.CheckpointError, match="out: exists and is no directory"):
        source.convert(tmp_path / "out")


def test_links_that_lead_nowhere_are_told(data, tmp_path):
    inner = Path(shutil.copytree(data / "exports/fp8_kvcast", tmp_path / "in"))
    (inner / "tokenizer.json").symlink_to("../blobs/gone")
    (inner / "loop.txt").symlink_to("loop.txt")
    result = moqext.Checkpoint(inner).convert(tmp_path / "out")
    assert result.notes[-1] == "files not copied: loop.txt, tokenizer.json"


# Room, and the end of the process


def test_a_disk_without_room_is_refused_before_anything_is_written(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10_000, 9_000, 1_000))
    told = rf"out: not enough space: \d\d,\d{{3}} bytes are needed, 1,000 bytes are free on .* {tmp_path}"
    with pytest.raises(moqext.CheckpointError, match=told):
        source.convert(tmp_path / "deep/out")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_on_the_way_is_told_in_words(source, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer.os, "pwrite", full)
    with pytest.raises(moqext.CheckpointError, match=r"out: could not be written .*No space left.* takes \d"):
        source.convert(tmp_path / "deep/out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_cleans_up_as_an_interrupt_does(number, status, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Progress, "__call__", lambda *args: os.kill(os.getpid(), number))
    before = signal.signal(number, signal.SIG_DFL)  # tests may run under nohup
    try:
        assert main(["convert", str(data / "exports/fp8_kvcast"), str(tmp_path / "out")]) == status
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == f"moqext: {signal.strsignal(number).lower()}\n"


def test_a_signal_that_is_ignored_stays_so(data, tmp_path, monkeypatch):
    """SIGHUP is ignored, as nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(Progress, "__call__", lambda *args: os.kill(os.getpid(), signal.SIGHUP))
        assert main(["convert", str(data / "exports/fp8_kvcast"), str(tmp_path / "out"), "--quiet"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_model_without_quantization_is_not_turned_into_fp8(data, tmp_path, capsys):
    moqext.Checkpoint(data / "exports/fp8_kvcast").convert(tmp_path / "plain")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--to", "fp8"]) == 2
    assert "nothing quantized to requantize" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

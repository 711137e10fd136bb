"""Processes: children after a fork, and an interruption."""

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import moqext

from .work import HANGS

PACKAGES = str(Path(moqext.__file__).parents[1])
COMMON = """
import os, signal, sys, threading
import numpy as np
import moqext

signal.alarm(900)  # a child that hangs ends, and the test with it
moqext.set_num_threads(4)
rng = np.random.default_rng(int(sys.argv[1]))
method = moqext.LinearMethod("NVFP4", 512, [512, 256], dtype="float32")
params = method.prepare({
    "weight": rng.integers(0, 256, (768, 256), dtype=np.uint8),
    "weight_scale": rng.integers(0, 0x7F, (768, 32), dtype=np.uint8),
    "weight_scale_2": np.float32([1, 2]),
})
large = rng.standard_normal((256, 4096)).astype(np.float32)  # enough to be worth several threads
x = large[:64, :512]

def work():
    codes = moqext.ops.quantize(large, "fp8_token")[0]
    return method(x, params).tobytes() + codes.tobytes()

expected = work()
"""

FORK = """
for generation in range(3):  # a child of a child, too
    child = os.fork()
    if child == 0:
        signal.alarm(900)
        if work() != expected:
            os._exit(3)
        continue
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if work() != expected:
        status = status or 4
    os._exit(status) if generation else sys.exit(status)
os._exit(0)
"""

# The parent's threads are inside kernels, or between them, when the process splits.
FORK_AMONG_THREADS = """
stop = threading.Event()
def repeat():
    while not stop.is_set():
        work()
threads = [threading.Thread(target=repeat) for _ in range(3)]
for thread in threads:
    thread.start()
failed = 0
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(900)
        os._exit(0 if work() == expected else 3)
    failed = failed or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
stop.set()
for thread in threads:
    thread.join()
sys.exit(failed)
"""

POOL = """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    results = [pool.apply_async(work) for _ in range(8)]
    sys.exit(0 if all(result.get(900) == expected for result in results) else 3)
"""


# A child that is forked while a thread is in the allocator of gcc 12's AddressSanitizer, which does not
# prepare for forks, may wait for its lock forever.
AMONG_THREADS = pytest.param(FORK_AMONG_THREADS, id="among threads", marks=pytest.mark.unsanitized)


@pytest.mark.parametrize(
    "script", [pytest.param(FORK, id="fork"), AMONG_THREADS, pytest.param(POOL, id="pool")]
)
def test_children_after_a_fork(script: str) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    command = [sys.executable, "-W", "ignore", "-c", COMMON + script, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, (seed, done.stderr)


def files_below(directory: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if "__pycache__" not in path.parts
    }


def read_all(terminal: int) -> bytes:
    """Reads what a process has shown, until its end of the terminal is closed."""
    shown = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:
            return shown
        shown += part


INTERRUPTED = """
import signal, sys
from moqext.__main__ import main
from moqext.cli.progress import Progress

tell = Progress.__call__

def interrupted(self, done, total, name, count=""):
    self._next = 0.0  # the bar is drawn, however little time has passed
    tell(self, done, total, name, count)
    if count.startswith("3/"):
        signal.raise_signal(signal.SIGINT)

Progress.__call__ = interrupted
sys.exit(main())
"""


@pytest.fixture
def heeded() -> Iterator[None]:
    """Interrupts are. Shells let what they start in the background ignore them, and that is inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(
    "options, kept",
    [([], b"\nresult: interrupted after "), (["--json"], b'"interrupted": "after ')],
    ids=["table", "json"],
)
def test_an_interrupted_verify_leaves_its_rows_and_no_file(
    data: Path, tmp_path: Path, options: list[str], kept: bytes
) -> None:
    directory = data / "checkpoints" / "llama_nvfp4_kvfp8"
    before = files_below(directory)
    command = [sys.executable, "-c", INTERRUPTED, "verify", str(directory), *options]
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": PACKAGES},
        start_new_session=True,
    )
    os.close(theirs)
    output, _ = process.communicate(timeout=HANGS)
    shown = read_all(terminal)
    os.close(terminal)
    assert process.returncode == 130
    assert kept in output
    assert re.search(rb"\r\x1b\[Kmoqext: interrupted after 2 of 7 layers\r\n$", shown)  # the bar is gone
    assert b"Traceback" not in shown
    assert files_below(tmp_path) == {}
    assert files_below(directory) == before

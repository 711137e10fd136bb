"""The number of threads: set, limited, one after a fork, and what they do on a machine that is not empty."""

import os
import subprocess
import sys

import pytest

import moqext


@pytest.fixture(autouse=True)
def default_threads():
    yield
    moqext.set_num_threads(0)


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_set_and_reset():
    default = moqext.num_threads()
    assert 1 <= default <= len(os.sched_getaffinity(0))
    moqext.set_num_threads(3)
    assert moqext.num_threads() == 3
    moqext.set_num_threads(0)
    assert moqext.num_threads() == default
    for bad in (-1, 1025):
        with pytest.raises(ValueError, match=f"count: expected an int from 0 to 1024, got {bad}"):
            moqext.set_num_threads(bad)


def test_environment():
    code = "import moqext; print(moqext.num_threads())"
    assert run(code, MOQEXT_NUM_THREADS="5") == ["5"]
    assert run(code, OMP_NUM_THREADS="1") == ["1"]
    assert run(code, MOQEXT_NUM_THREADS="2", OMP_NUM_THREADS="1") == ["2"]


LAYER = """
import os, subprocess, sys, time
import numpy as np
import moqext

rng = np.random.default_rng(0)

def layer(n, k, tokens):
    method = moqext.LinearMethod("NVFP4", k, [n], dtype="float32")
    params = method.prepare({
        "weight": rng.integers(0, 256, (n, k // 2), dtype=np.uint8),
        "weight_scale": rng.integers(0, 0x7F, (n, k // 16), dtype=np.uint8),
        "weight_scale_2": np.float32([1]),
    })
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    return lambda: np.asarray(method(x, params)).tobytes()

def tasks():
    return len(os.listdir("/proc/self/task"))
"""


def test_microseconds_of_work_have_no_team():
    """A layer of 64 x 128 with 16 tokens waited milliseconds for a team beside busy processes."""
    code = """
moqext.set_num_threads(4)
before = tasks()
layer(64, 128, 16)()
moqext.ops.quantize(np.ones((8, 128), np.float32), "fp8_token")
print(tasks() - before)
layer(2048, 2048, 64)()
print(tasks() - before)
"""
    assert run(LAYER + code) == ["0", "3"]


def test_results_do_not_depend_on_who_claims_what():
    """Results hold with more threads than there are lanes, and than processors."""
    code = """
call = layer(2100, 512, 40)
moqext.set_num_threads(1)
expected = call()
for threads in (2, 3, 65, 150):
    moqext.set_num_threads(threads)
    print(all(call() == expected for _ in range(5)))
"""
    assert run(LAYER + code) == ["True"] * 4


@pytest.mark.unsanitized
def test_no_team_is_waited_for_beside_busy_processes():
    """Nearly all of the time went into waiting for teams; trying them again takes a part of it."""
    code = """
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
call = layer(512, 512, 16)
spin = [sys.executable, "-c", "while True: pass"]
busy = [subprocess.Popen(spin) for _ in range(2)]
try:
    seconds = {1: [], 2: []}
    start = time.monotonic()
    while time.monotonic() < start + 8:
        for threads, times in seconds.items():
            moqext.set_num_threads(threads)
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    elapsed = time.monotonic() - start
finally:
    for process in busy:
        process.kill()
        process.wait()
print(np.median(seconds[2]) / np.median(seconds[1]), (np.sum(seconds[2]) - np.sum(seconds[1])) / elapsed)
"""
    median, lost = map(float, run(LAYER + code))
    assert median < 2
    assert lost < 0.5

"""The number of threads: set, limited, one after a fork, and what they do on a machine that is not empty."""

import os
import shutil
import subprocess
import sys

import pytest

import moqext


@pytest.fixture(autouse=True)
def default_threads():
    yield
    moqext.set_num_threads(0)


def run(code, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
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
import os, sys
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


HELD_UP = """
#include <time.h>
static int regions;
void GOMP_parallel(void (*member)(void *), void *data, unsigned threads, unsigned flags) {
    const struct timespec slice = {.tv_nsec = 100000000};
    regions++;
    member(data);
    nanosleep(&slice, NULL);
}
int omp_get_num_threads(void) { return 2; }
int omp_get_thread_num(void) { return 0; }
int omp_in_parallel(void) { return 0; }
int omp_get_max_threads(void) { return 2; }
int omp_get_num_procs(void) { return 2; }
int count_regions(void) { return regions; }
"""
"""An OpenMP runtime whose second member never runs, as beside busy processes: regions end 100 ms late."""


@pytest.mark.unsanitized
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_no_team_is_waited_for_beside_busy_processes(tmp_path):
    """Nearly all of the time went into waiting for teams; one that loses time is left for 20 times that."""
    source, library = tmp_path / "held_up.c", tmp_path / "libgomp-held-up.so"
    source.write_text(HELD_UP)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = """
import ctypes
runtime = ctypes.CDLL(sys.argv[1])
moqext.set_num_threads(2)
call = layer(512, 512, 16)
for _ in range(50):
    call()
print(runtime.count_regions())
"""
    (regions,) = run(LAYER + code, library)
    assert 1 <= int(regions) <= 3

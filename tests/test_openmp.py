"""The OpenMP runtime: the one that is loaded already, its threads and no others, also inside its regions.

Each case is a process of its own. A copy of libgomp under another name and soname stands for the runtime that
a framework's wheel brings.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .work import HANGS

COMMON = """
import ctypes, os, signal, sys
import numpy as np

signal.alarm(900)  # who waits for a team that is no more ends, and the test with it
THREADS = 5

def tasks():
    return len(os.listdir("/proc/self/task"))

def runtimes():
    '''Files of OpenMP runtimes in the process.'''
    paths = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
    names = ("libgomp", "libomp", "libiomp")
    return sorted(path for path in paths if os.path.basename(path).startswith(names))

def team(library, function, threads):
    '''Calls function(NULL) on so many threads, as `#pragma omp parallel` does.'''
    library.GOMP_parallel(function, None, ctypes.c_uint(threads), ctypes.c_uint(0))

def nothing(library):
    return ctypes.cast(library.free, ctypes.c_void_p)  # free(NULL) does nothing

def quantize():
    '''Worth a team.'''
    import moqext
    moqext.ops.quantize(np.ones((256, 4096), np.float32), "fp8_token")

def product():
    '''Worth a team of torch's.'''
    import torch
    torch.set_num_threads(THREADS)  # makes threads of its own, which are no part of the count
    before = tasks()
    torch.ones(1 << 20).exp_()
    return tasks() - before

def quantized():
    import moqext
    moqext.set_num_threads(THREADS)
    before = tasks()
    quantize()
    return tasks() - before
"""


def run(code, *arguments, **environment):
    """Runs a process and gives what it prints; it must not inherit wishes for threads."""
    clean = {
        name: value for name, value in os.environ.items() if "OMP_" not in name and "NUM_THREADS" not in name
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMMON + code, *map(str, arguments)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def libgomp():
    """Path of the system's libgomp."""
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        pytest.skip("there is no libgomp.so.1")
    with open("/proc/self/maps") as maps:
        return next(Path(line.split()[-1]) for line in maps if "/libgomp" in line)


@pytest.fixture
def renamed(libgomp, tmp_path):
    """Makes a copy of libgomp with a name of the same length, in the file system and in the ELF file."""

    def make(name):
        assert len(name) == len("libgomp.so.1")
        code = libgomp.read_bytes()
        assert b"\0libgomp.so.1\0" in code
        path = tmp_path / name
        path.write_bytes(code.replace(b"\0libgomp.so.1\0", b"\0" + name.encode() + b"\0"))
        return path

    return make


@pytest.mark.unsanitized
@pytest.mark.parametrize("first", ["torch", "moqext"])
@pytest.mark.parametrize("used_first", ["torch", "moqext"])
def test_torch_and_moqext_share_their_threads(first, used_first):
    pytest.importorskip("torch")
    both = ["product()", "quantized()"] if used_first == "torch" else ["quantized()", "product()"]
    other = "moqext" if first == "torch" else "torch"
    code = f"""
import {first}, {other}
print({", ".join(both)})
print(quantized(), product())
print(*runtimes(), sep="\\n")
"""
    made, again, *runtimes = run(code)
    assert made == "4 0"
    assert again == "0 0"
    assert len(runtimes) == 1


@pytest.mark.unsanitized
def test_the_number_is_torchs():
    pytest.importorskip("torch")
    code = """
import moqext, torch
torch.ones(1 << 20).exp_()
print(moqext.num_threads() == torch.get_num_threads())
torch.set_num_threads(1)
print(moqext.num_threads())
"""
    assert run(code) == ["True", "1"]


def test_the_number_is_that_of_the_loaded_runtime(renamed):
    code = """
library = ctypes.CDLL(sys.argv[1])
import moqext
print(moqext.num_threads() == len(os.sched_getaffinity(0)))
library.omp_set_num_threads(1)
print(moqext.num_threads())
"""
    assert run(code, renamed("libgomp-7.so")) == ["True", "1"]


@pytest.mark.parametrize("name", ["libgomp-7.so", "libiomp5.so0", "libomp.so.14"])
def test_a_loaded_runtime_is_used_whatever_its_name(renamed, name):
    """Imported before or after moqext, as long as it is there when moqext first has work for threads."""
    path = renamed(name)
    code = """
import moqext
library = ctypes.CDLL(sys.argv[1])
team(library, nothing(library), THREADS)
print(quantized())
print(*runtimes(), sep="\\n")
print(moqext._C.openmp()[0])
"""
    assert run(code, path) == ["0", str(path), str(path)]


def test_the_first_of_several_runtimes_is_used(renamed):
    first, second = renamed("libgomp-1.so"), renamed("libgomp-2.so")
    code = "for path in sys.argv[1:]: ctypes.CDLL(path)\nimport moqext; print(moqext._C.openmp()[0])"
    assert run(code, first, second) == [str(first)]
    assert run(code, second, first) == [str(second)]


def test_a_library_that_is_no_runtime_is_passed_over(renamed):
    """LLVM's libomptarget begins like libomp."""
    path = renamed("libomptarget")
    path.write_bytes(path.read_bytes().replace(b"\0GOMP_parallel\0", b"\0GOMP_missing_\0"))
    code = "ctypes.CDLL(sys.argv[1])\nimport moqext; print(moqext._C.openmp()[0])"
    (chosen,) = run(code, path)
    assert chosen not in ("None", str(path))


def test_import_loads_no_runtime():
    code = """
import moqext
moqext.set_num_threads(1)
quantize()
print(runtimes())
"""
    assert run(code) == ["[]"]


def test_one_thread_and_a_reason_where_there_is_no_runtime(tmp_path):
    for name in ("libgomp.so.1", "libomp.so.5", "libiomp5.so"):
        (tmp_path / name).touch()
    code = """
print(quantized())
import moqext
print(moqext.num_threads())
print(moqext._C.openmp())
"""
    threads, number, openmp = run(code, LD_LIBRARY_PATH=str(tmp_path))
    assert (threads, number) == ("0", "1")
    assert "None" in openmp
    assert "no OpenMP runtime: " in openmp
    assert "libgomp.so.1" in openmp


def test_a_call_inside_a_parallel_region_has_one_thread(renamed):
    """One thread, where regions inside regions are allowed, too."""
    path = renamed("libgomp-7.so")
    code = """
library = ctypes.CDLL(sys.argv[1])
import moqext
moqext.set_num_threads(THREADS)
quantize()  # the team is there
before, seen = tasks(), []
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def member(_):
    number = moqext.num_threads()
    quantize()
    seen.append((number, tasks() - before))
team(library, member, THREADS)
print(seen, moqext.num_threads())
"""
    assert run(code, path, OMP_MAX_ACTIVE_LEVELS="3") == [f"{[(1, 0)] * 5} 5"]


def test_a_child_does_not_wait_for_a_team_that_moqext_has_not_made(renamed):
    """Torch's, say: made before the fork by the thread that forks."""
    path = renamed("libgomp-7.so")
    code = """
library = ctypes.CDLL(sys.argv[1])
team(library, nothing(library), THREADS)
import moqext
moqext.set_num_threads(THREADS)
child = os.fork()
if child == 0:
    signal.alarm(900)
    quantize()
    os._exit(moqext.num_threads())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), moqext.num_threads())
"""
    assert run(code, path) == ["1 5"]


def test_a_child_of_a_process_without_a_runtime_has_threads(libgomp):
    code = """
import moqext
moqext.set_num_threads(THREADS)
child = os.fork()
if child == 0:
    os._exit(quantized())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code) == ["4"]

"""The number of threads: set, limited, and one after a fork."""

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

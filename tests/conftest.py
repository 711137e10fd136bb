"""Fixtures every test may use: fresh random data whose seed is printed, and the genuine data."""

import os
import re
from contextlib import suppress
from pathlib import Path

import pytest

# Workers of pytest share the cores, which threads that wait busily would take from each other: those of
# OpenMP sleep instead, and the reference's products have one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "OMP_NUM_THREADS" not in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

with suppress(ImportError):  # what a machine does besides makes no example too slow
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")

# JAX would take three quarters of a device's memory at once, from every other library of the process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# No test reads what `moqext tune` found on this machine.
os.environ["MOQEXT_TUNE"] = "0"

DATA = Path(__file__).parent / "data"


class Failures:
    """Names what failed when it did: a run that is cut short by its time has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal:
            terminal.write_line(f"\n{report.when} of {report.nodeid} failed")


MARKED = re.compile(r"^pytestmark = .*\bpytest\.mark\.(gpu|vllm|sglang)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files whose tests are all deselected by a mark: reading them takes as long as all others."""
    if collection_path.suffix != ".py":
        return None
    mark = MARKED.search(collection_path.read_text(encoding="utf-8"))
    return True if mark and f"not {mark[1]}" in config.option.markexpr else None


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers hand their reports to the process that began them
        config.pluginmanager.register(Failures(config))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator with a fresh seed; MOQEXT_SEED replays the seed that a failure printed."""
    seed = int(os.environ.get("MOQEXT_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
    print(f"{request.node.nodeid}: MOQEXT_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory of genuine checkpoints, manifests and configs."""
    return DATA

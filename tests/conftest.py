"""Fixtures every test may use: fresh random data whose seed is printed, and the genuine data."""

import os
from pathlib import Path

import numpy as np
import pytest

# JAX would take three quarters of a device's memory at once, from every other library of the process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

DATA = Path(__file__).parent / "data"


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

"""Fixtures of every test on a CUDA device."""

import sys

import pytest

from moqext import _C


@pytest.fixture(autouse=True)
def cuda_device(request: pytest.FixtureRequest) -> None:
    """Skips a test marked `gpu` where there is no CUDA device, with the reason; begins on the first one."""
    if request.node.get_closest_marker("gpu"):
        try:
            _C.cuda_devices()
        except RuntimeError as error:
            pytest.skip(str(error))
        if "torch" in sys.modules:  # whatever the test before left: JAX makes the last device current
            sys.modules["torch"].cuda.set_device(0)

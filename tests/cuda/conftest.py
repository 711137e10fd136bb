"""What every test on a CUDA device needs."""

import pytest

from moqext import _C


@pytest.fixture(autouse=True)
def cuda_device(request: pytest.FixtureRequest) -> None:
    """Skips a test marked `gpu` where there is no CUDA device, with the reason."""
    if request.node.get_closest_marker("gpu"):
        try:
            _C.cuda_devices()
        except RuntimeError as error:
            pytest.skip(str(error))

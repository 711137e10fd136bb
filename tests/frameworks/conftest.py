"""The framework packages lie in python/ of a checkout; an installed moqext has them beside it."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("moqext_torch") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "python"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Device of the layers of a test: the CPU always, CUDA too where torch and moqext have it."""
    import torch

    from moqext import _C

    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("torch has no CUDA device")
        if not _C.build_info()["cuda"]:
            pytest.skip("moqext was built without CUDA")
    return request.param

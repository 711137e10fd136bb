"""SGLang without a GPU: `stand_in` for the libraries that its classes import, before the first of them is.

A test file that imports this one is skipped where SGLang is not installed.
"""

import importlib.util

import pytest

pytest.importorskip("torch", minversion="2.10")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from .sglang_process.sglang_absent import stand_in

__all__ = ["stand_in"]

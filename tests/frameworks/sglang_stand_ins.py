"""SGLang without a GPU: what stands for the libraries that its classes import.

SGLang imports libraries of CUDA kernels (sgl_kernel, flashinfer, vllm) and torchvision with its quantization
methods; none of them is called by the layers here. Where they are absent, empty modules stand for them.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import ClassVar

import pytest

pytest.importorskip("torch", minversion="2.10")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)


class _Nothing:
    """What an absent library has under any name."""

    def __init__(self, *args, **options):
        pass

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and callable(args[0]) else _Nothing()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Nothing()


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots):
        self.roots = roots

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self.roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def stand_in():
    """Makes SGLang importable; to be called before its first import."""
    absent = {
        name
        for name in ("sgl_kernel", "flashinfer", "torchvision", "vllm")
        if name not in sys.modules and importlib.util.find_spec(name) is None
    }
    # Transformers looks for torchvision, and has to go on without.
    import transformers.image_transforms
    import transformers.image_utils
    import transformers.utils.import_utils

    transformers.utils.import_utils.is_torchvision_available()
    if not any(isinstance(finder, _Absent) for finder in sys.meta_path):
        sys.meta_path.append(_Absent(absent))

"""Stand-ins for libraries that SGLang's engine imports in each of its processes, where they are absent.

Python imports this file when it starts, as `sitecustomize`. Nothing of the stand-ins is called by what the
tests run on the CPU; what asks whether a library is there is told that it is not.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import ClassVar

ROOTS = {
    *("flashinfer", "mistral_common", "openai_harmony", "outlines", "outlines_core", "sgl_kernel"),
    *("torchvision", "vllm", "xgrammar"),
}


class _Nothing:
    def __init__(self, *args, **options):
        pass

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and callable(args[0]) else _Nothing()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Class:
    """What stands for a class, in models of pydantic too."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Class,), {}) if name[0].isupper() else _Nothing()


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in ROOTS:
            return None
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
            frame = frame.f_back
        if frame is not None and frame.f_globals.get("__name__") == "importlib.util":
            return None  # somebody asks whether it is there
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Absent())

"""Stand-ins for absent libraries that SGLang imports: kernels, grammars, images.

Nothing of the stand-ins is called by what the tests run: a kernel that is called raises. What asks whether a
library is there is told that it is not.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import ClassVar

ROOTS = (
    *("cutlass", "deepseek_recipe", "flashinfer", "mistral_common", "openai_harmony", "outlines"),
    *("outlines_core", "sgl_kernel", "tml_renderers", "torchvision", "vllm", "xgrammar"),
)
"""Packages that get a stand-in where they are not installed."""
OPTIONAL = ("flashinfer.norm",)
"""Modules of theirs that get none: SGLang and sgl_kernel go on without, by kernels that are there."""

_KNOWN = {
    "sgl_kernel.utils.is_arch_support_pdl": lambda *_: False,
    "sgl_kernel.weak_ref_tensor": lambda tensor: tensor,  # a graph then keeps what it could free
}
"""Functions that are no kernels, and are called."""


class _Nothing:
    """Stand-in for any name of an absent library that is no class."""

    def __init__(self, name):
        self._name = name

    def __call__(self, *args, **options):
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]  # a decorator
        if self._name.startswith("sgl_kernel."):
            raise RuntimeError(f"{self._name} was called, and sgl_kernel is absent")
        return _Nothing(self._name)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(f"{self._name}.{name}")


class _Class:
    """Stand-in for a class, in models of pydantic and in annotations too."""

    def __class_getitem__(cls, item):
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in _KNOWN:
            return _KNOWN[f"{self.__name__}.{name}"]
        return type(name, (_Class,), {}) if name[0].isupper() else _Nothing(f"{self.__name__}.{name}")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots):
        self.roots = roots

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self.roots or fullname in OPTIONAL:
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


def stand_in():
    """Makes SGLang importable; to be called before its first import."""
    if any(type(finder).__name__ == _Absent.__name__ for finder in sys.meta_path):
        return
    absent = {name for name in ROOTS if name not in sys.modules and importlib.util.find_spec(name) is None}
    sys.meta_path.append(_Absent(absent))


def is_absent(name):
    """Whether a package is not installed, whatever stands for it."""
    spec = importlib.util.find_spec(name)
    return spec is None or type(spec.loader).__name__ == _Absent.__name__

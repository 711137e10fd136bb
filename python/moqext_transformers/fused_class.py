"""Modules of Transformers with another `forward`, under the names and classes that they have."""

from functools import cache
from typing import Any

import torch

from moqext_transformers.texts import digest

FUSED_DTYPES = (torch.bfloat16, torch.float16)
"""In float32, norms, activation and routing stay torch's: the silu of moqext is exact to 2^-19 alone."""


class Fused:
    """A module of Transformers with another `forward`; its class is made at run time and pickled by parts."""

    made_from: tuple[type, type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, self.made_from, self.__getstate__()


@cache
def _class(mixin: type, original: type) -> type:
    """A subclass of a model's class, under its name: Transformers finds modules by their class."""
    made = type(original.__name__, (mixin, original), {"made_from": (mixin, original)})
    made.__module__ = original.__module__
    return made


def _new(mixin: type, original: type) -> Any:
    made = _class(mixin, original)
    return made.__new__(made)


def turn_into(module: Any, mixin: type) -> bool:
    """Gives a module the forward of `mixin`."""
    module.__class__ = _class(mixin, type(module))
    return True


def text_of(module: torch.nn.Module) -> str:
    """The digest of its forward; empty for one that was changed."""
    return "" if isinstance(module, Fused) else digest(type(module).forward)

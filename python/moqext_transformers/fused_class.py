"""Modules of Transformers with another `forward`, under the names and classes that they have."""

from functools import cache
from typing import Any

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from moqext_torch.texts import digest

FUSED_DTYPES = (torch.bfloat16, torch.float16)
"""In float32, norms, activation and routing stay torch's: the silu of moqext is exact to 2^-19 alone."""


class Fused:
    """A module of Transformers with another `forward`; its class is made at run time and pickled by parts."""

    made_from: tuple[type, type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, self.made_from, self.__getstate__()


class FusedCall(Fused):
    """A module whose `fused_forward` does what modules in it would, without calling them.

    Where one of these was replaced, patched or given a hook, the model's own forward runs, which calls them.

    Attributes:
        fused_members: their names in this module, and what stood there when it was fused.
    """

    fused_members: tuple[tuple[str, torch.nn.Module], ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the fused steps, or the model's own where a member was replaced or hooked."""
        if self._is_as_fused():
            return self.fused_forward(*args, **kwargs)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes what the model's forward does, in fewer calls."""
        raise NotImplementedError

    def _is_as_fused(self) -> bool:
        """Whether nobody would notice that members are not called."""
        if _global_forward_hooks or _global_forward_pre_hooks:
            return False
        here = self._modules  # type: ignore[attr-defined]
        for name, member in self.fused_members:  # a generator takes twice as long
            if (
                here.get(name) is not member
                or member._forward_hooks
                or member._forward_pre_hooks
                or "forward" in member.__dict__
            ):
                return False
        return True


@cache
def _class(mixin: type, original: type) -> type:
    """A subclass of a model's class, under its name: Transformers finds modules by their class."""
    made = type(original.__name__, (mixin, original), {"made_from": (mixin, original)})
    made.__module__ = original.__module__
    return made


def _new(mixin: type, original: type) -> Any:
    made = _class(mixin, original)
    return made.__new__(made)


def turn_into(module: Any, mixin: type, *members: str) -> bool:
    """Gives a module the forward of `mixin`, which does what the members of these names do."""
    if members:
        module.fused_members = tuple((name, getattr(module, name)) for name in members)
    module.__class__ = _class(mixin, type(module))
    return True


def text_of(module: torch.nn.Module) -> str:
    """The digest of its forward; empty for one that was changed."""
    return "" if isinstance(module, Fused) else digest(type(module).forward)

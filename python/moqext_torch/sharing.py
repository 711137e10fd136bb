"""Which modules hold which memory, so that a reload of one does not overwrite what another calculates with.

Modules come to share tensors by `load_state_dict(assign=True)`, by shallow copies and by assignment. What
belongs to codes, as prepared scales, each has of its own, and it would be another module's then.
"""

from collections.abc import Set
from weakref import WeakSet

import torch

_FEW = 4096


class _Holders:
    """Modules by the addresses of their tensors; where none is left, an address is forgotten at times."""

    def __init__(self) -> None:
        self._by_address: dict[int, WeakSet[torch.nn.Module]] = {}
        self._many = _FEW

    def note(self, module: torch.nn.Module) -> None:
        """Remembers where the tensors of a module are now."""
        for address in _addresses(module):
            self._by_address.setdefault(address, WeakSet()).add(module)
        if len(self._by_address) > self._many:
            self._by_address = {address: held for address, held in self._by_address.items() if held}
            self._many = max(_FEW, 2 * len(self._by_address))

    def is_shared(self, module: torch.nn.Module, tensor: torch.Tensor) -> bool:
        """Whether another module has a tensor that begins where this one of a module does."""
        address = tensor.data_ptr()
        holders = self._by_address.get(address, ())
        return any(other is not module and address in _addresses(other) for other in holders)


def _addresses(module: torch.nn.Module) -> Set[int]:
    """Addresses of a module's tensors, without those on meta and empty ones."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return {tensor.data_ptr() for tensor in tensors if tensor is not None and not tensor.is_meta} - {0}


HOLDERS = _Holders()

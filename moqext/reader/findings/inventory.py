"""The tensors of a checkpoint sorted by the module they belong to: the common ground of the finders."""

import re
from collections import defaultdict
from collections.abc import Mapping

from moqext._C import NAME_LIMIT
from moqext.reader.formats.stored import Tensor, is_small, tensor_bytes
from moqext.reader.naming import KV_ROLES, parse_tensor_name

_SCALE_NAME = re.compile(
    r"(?:^|\.|proj_|w[0-9]{1,2}_)(?:weight|input|output)_scale(?:_2|_inv)?$"
    r"|_weight_scale(?:_2|_inv)?$|kv_cache_scaling_factor$|_amax$"
)
"""Names of scales of quantization; parameters of models end in `_scale` too, as `correct_output_scale`."""

_FOREIGN = ("weight_scale_inv", "scale", "scale_weight", "output_scale", "kv_cache_scaling_factor")
"""Last parts of names that other producers gave to scales."""


class Inventory:
    """The tensors of a checkpoint by module and role.

    Attributes:
        tensors: name -> data type and shape.
        modules: module -> role -> tensor name, roles of the KV cache apart.
        kv: module -> role -> tensor name, roles of the KV cache only.
        foreign: tensor name -> the spelling of its role, where another producer's.
        leftovers: tensors of the quantizer's inner state.
        strays: tensors that look quantized, or like scales, and have no place above.
        repeats: module -> (tensor that counts, tensor of the same role under another name).
        too_long: tensors whose names have more bytes than a module name may have.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.modules: dict[str, dict[str, str]] = defaultdict(dict)
        self.kv: dict[str, dict[str, str]] = defaultdict(dict)
        self.foreign: dict[str, str] = {}
        self.leftovers: list[str] = []
        self.strays: list[str] = []
        self.repeats: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.too_long: list[str] = []
        for name, info in tensors.items():
            self._add(name, info)

    def _add(self, name: str, info: Tensor) -> None:
        if 4 * len(name) > NAME_LIMIT and len(name.encode()) > NAME_LIMIT:
            self.too_long.append(name)
            return
        named = parse_tensor_name(name)
        if named is None:
            if is_small(info) or _SCALE_NAME.search(name):
                self.strays.append(name)
            return
        module, role, part = named
        if role == "leftover":
            self.leftovers.append(name)
            return
        if part in _FOREIGN:
            self.foreign[name] = part
        roles = (self.kv if role in KV_ROLES else self.modules)[module]
        other = roles.setdefault(role, name)
        if other is not name:
            # Two spellings of one role: the usual one counts.
            if other in self.foreign:
                roles[role] = name
                self.repeats[module].append((name, other))
            else:
                self.repeats[module].append((other, name))

    def infos(self, roles: Mapping[str, str]) -> dict[str, Tensor]:
        """Role -> data type and shape."""
        return {role: self.tensors[name] for role, name in roles.items()}

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Module -> shape of its weight as stored."""
        weights = ((module, roles.get("weight")) for module, roles in self.modules.items())
        return {module: tuple(self.tensors[name].shape) for module, name in weights if name is not None}

    def size(self, roles: Mapping[str, str]) -> int:
        """Bytes of the tensors of a layer."""
        return sum(tensor_bytes(self.tensors[name]) for name in roles.values())

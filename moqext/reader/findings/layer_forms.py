"""Facts that layers of one form have in common, found once: large checkpoints have tens of thousands alike.

One form have linears with one last name whose tensors have the same roles, types and shapes.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from moqext.reader.config.quant_config import QuantConfig
from moqext.reader.findings.decision import Decision, ask, check_linear_shapes, check_roles, decide
from moqext.reader.findings.inventory import Inventory
from moqext.reader.formats.partitions import Scalar, parts_of, rows_of_parts
from moqext.reader.formats.stored import Stored, Tensor, recognise
from moqext.reader.naming import is_embedding
from moqext.reader.problems import Problem


class Form(NamedTuple):
    """Facts that the tensors and the last name of a linear tell.

    Attributes:
        stored: the format.
        partitions: rows of the parts, where each has a scale.
        size: bytes of the tensors.
        weights: number of weights.
        is_table: whether it is an embedding by its name.
    """

    stored: Stored
    partitions: tuple[int, ...]
    size: int
    weights: int
    is_table: bool


class Forms:
    """The forms of the linears of a checkpoint.

    Args:
        inventory: its tensors.
        model: what config.json holds, for the rows of q, k and v in a fused linear.
    """

    def __init__(self, inventory: Inventory, model: Mapping[str, Any]) -> None:
        self._inventory = inventory
        self._model = model
        self._known: dict[Hashable, Form] = {}
        self._flawless: set[Hashable] = set()
        self._decisions: dict[Hashable, Decision] = {}

    def find(self, module: str, roles: Mapping[str, str]) -> Form:
        """The form of a linear; `roles` are tensor names by role, with its weight among them."""
        tensors = self._inventory.tensors
        parts: list[Hashable] = [module[module.rfind(".") + 1 :], *roles]
        for name in roles.values():
            info = tensors[name]
            parts += (info.dtype, tuple(info.shape))
        key = tuple(parts)
        form = self._known.get(key)
        if form is None:
            infos = self._inventory.infos(roles)
            stored, partitions = recognise_linear(module, infos, self._model)
            size, weights = self._inventory.size(roles), prod(stored.shape)
            form = Form(stored, partitions, size, weights, is_embedding(module))
            self._known[key] = form
        return form

    def decide(self, module: str, form: Form, config: QuantConfig | None) -> tuple[Decision, list[Problem]]:
        """The decision of `decision.decide` for a linear of this form."""
        asked, problems = ask(config, module)
        key = (id(form), asked)
        decision = None if problems else self._decisions.get(key)
        if decision is None:
            decision, found = decide(module, form.stored, config)
            if found:
                return decision, found
            self._decisions[key] = decision
        return decision, []

    def judge(
        self, module: str, roles: Mapping[str, str], form: Form, algo: str, activations: bool
    ) -> list[Problem]:
        """The problems of the tensors of a linear, given its algorithm.

        Args:
            module: its name.
            roles: tensor names by role.
            form: its form.
            algo: its algorithm.
            activations: as for `check_roles`.
        """
        key = (id(form), algo, activations)
        foreign = roles.get("weight_scale") in self._inventory.foreign
        if key in self._flawless and not foreign:
            return []
        problems = [*check_roles(module, algo, roles, self._inventory, activations=activations)]
        if len(form.stored.shape) == 2:
            rows, columns = form.stored.shape
            parts = len(form.partitions)
            problems += check_linear_shapes(module, (rows, columns), roles, self._inventory, parts)
        if not problems:
            self._flawless.add(key)
        return problems


class _Flat(NamedTuple):
    """A tensor of another shape."""

    dtype: str
    shape: tuple[int, ...]


def _flat(infos: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a convolution as those of a linear with as many rows."""
    rows, *rest = infos["weight"].shape
    flat: dict[str, Tensor] = {**infos, "weight": _Flat(infos["weight"].dtype, (rows, prod(rest)))}
    scale = infos.get("weight_scale")
    if scale is not None and prod(scale.shape) in (1, rows):
        flat["weight_scale"] = _Flat(scale.dtype, () if prod(scale.shape) == 1 else (rows,))
    return flat


def recognise_linear(
    module: str, infos: Mapping[str, Tensor], model: Mapping[str, Any]
) -> tuple[Stored, tuple[int, ...]]:
    """The format of a weight, and the rows of its parts where each has a scale."""
    if len(shape := tuple(infos["weight"].shape)) > 2:
        return replace(recognise(_flat(infos)), shape=shape), ()
    parts = parts_of(module, infos)
    if not parts:
        return recognise(infos), ()
    partitions = rows_of_parts(module, infos["weight"].shape[0], model)
    if partitions:
        return recognise({**infos, "weight_scale": Scalar(infos["weight_scale"].dtype)}), partitions
    message = f"one scale for each of {', '.join(parts)}, whose rows neither names nor config.json tell"
    return replace(recognise(infos), fault=("shape_mismatch", message)), ()

"""Scales of activations for `Checkpoint.quantize`: the largest magnitudes that linears are given.

The model is not quantized. Linears tell their inputs by hooks; experts that Transformers keeps in one
parameter multiply views of it by functions of torch, which are watched. Keys and values of the cache are what
an attention hands to the function that multiplies them.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import AttentionInterface

from moqext import Checkpoint
from moqext.reader.naming import PROJECTIONS, parse_expert_name
from moqext.tools.quantize.scales import CACHE_ROLES, write_scales
from moqext_transformers.naming import Names

_PRODUCTS = frozenset(("linear", "matmul", "__matmul__", "bmm", "mm", "baddbmm", "addmm", "einsum"))
"""Functions of torch that multiply."""


def calibrate(
    model: Any,
    batches: Iterable[Any],
    file: str | os.PathLike[str] | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
) -> dict[str, float]:
    """The largest magnitude of the input of every linear, over some batches: ModelOpt's max calibration.

    Experts of one layer share what gate and up are given, and what down is given, under the names
    `<container>.gate_up_proj` and `<container>.down_proj`. Linears that no batch reaches are left out. Keys
    and values of an attention are `<attention>.k_cache` and `<attention>.v_cache`, for a quantized cache.

    Args:
        model: a model of Transformers, not quantized; it is put into evaluation for the while.
        batches: what the model is called with, without gradients: token ids, or mappings of arguments. They
            are moved to its device.
        file: written for `--scales` of `moqext quantize`, where one is named.
        checkpoint: the directory with the files of the model, whose names hold; by default the one that it
            was loaded from.

    Returns:
        Module as named in the checkpoint -> magnitude.

    Raises:
        ValueError: no batch, or activations that are infinite or NaN, with the first module that had them.
        CheckpointError: no such checkpoint.
    """
    with Checkpoint(checkpoint or model.name_or_path, headers_only=True) as files:
        names = Names(model, files)
    record = _Record(names)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), record.watching(model):
            count = 0
            for batch in batches:
                _call(model, batch)
                count += 1
    finally:
        model.train(training)
    if not count:
        raise ValueError("batches: expected at least one, got none")
    amax = record.amax()
    if file is not None:
        write_scales(file, amax)
    return amax


def _call(model: Any, batch: Any) -> None:
    if isinstance(batch, Mapping):
        moved = {
            key: value.to(model.device) if isinstance(value, torch.Tensor) else value
            for key, value in batch.items()
        }
        model(**moved)
    else:
        model(torch.as_tensor(batch).to(model.device))


class _Record:
    """The largest magnitudes so far, as tensors where they were found: nothing waits for a device."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._found: dict[str, torch.Tensor] = {}

    def add(self, module: str, given: torch.Tensor) -> None:
        """Takes in what a module was given."""
        if not given.numel():
            return
        largest = given.detach().abs().amax()
        before = self._found.get(module)
        self._found[module] = largest if before is None else torch.maximum(before, largest.to(before.device))

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Takes in what linears and experts are given meanwhile."""
        handles = []
        stacks: list[tuple[str, torch.Tensor]] = []
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                handles.append(module.register_forward_pre_hook(self._hook(self._names(name))))
                continue
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3 and key in PROJECTIONS:
                    stacks.append((_shared_name(self._names(name), PROJECTIONS[key]), parameter))
        try:
            with _one_by_one(model), _cache_of(model, self._add_cache), _Products(stacks, self.add):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, module: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def hook(_: Any, args: tuple[Any, ...]) -> None:
            if args:
                self.add(module, args[0])

        return hook

    def _add_cache(self, attention: str, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes in what an attention multiplies."""
        for role, given in zip(CACHE_ROLES, (keys, values), strict=True):
            self.add(f"{self._names(attention)}.{role}", given)

    def amax(self) -> dict[str, float]:
        """Module -> magnitude, experts by their container.

        Raises:
            ValueError: one is infinite or NaN.
        """
        found: dict[str, float] = {}
        for module, largest in self._found.items():
            value = float(largest)
            if not value < float("inf"):
                raise ValueError(f"{module}: activations are infinite or NaN")
            key = _shared(module)
            found[key] = max(value, found.get(key, 0.0))
        return found


def _shared(module: str) -> str:
    """The name under which the magnitude of a module counts."""
    expert = parse_expert_name(module)
    role = PROJECTIONS.get(expert.projection) if expert else None
    return module if expert is None or role is None else _shared_name(expert.container, role)


def _shared_name(container: str, role: str) -> str:
    """The name of what the experts of a container share."""
    return f"{container}.{'down_proj' if role == 'down' else 'gate_up_proj'}"


@contextmanager
def _one_by_one(model: Any) -> Iterator[None]:
    """Has experts multiplied one by one: other ways copy their weights first, so that they are not known."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None))
    }
    chosen = [
        (config, config._experts_implementation)
        for config in configs.values()
        if getattr(config, "_experts_implementation", None) is not None
    ]
    try:
        for config, _ in chosen:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, implementation in chosen:
            config._experts_implementation = implementation


@contextmanager
def _cache_of(model: Any, tell: Callable[[str, torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Calls `tell` with the name, keys and values of each attention that has a cache, as they are used."""
    attentions = {
        module: name
        for name, module in model.named_modules()
        if getattr(module, "layer_idx", None) is not None
    }
    choose = AttentionInterface.get_interface

    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
        multiply = choose(self, *args, **kwargs)

        def watched(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
            if (name := attentions.get(module)) is not None:
                tell(name, key, value)
            return multiply(module, query, key, value, *rest, **more)

        return watched

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = choose


class _Products(TorchFunctionMode):
    """Tells of products with views of some parameters what else is multiplied.

    Args:
        stacks: name and parameter of each.
        tell: called with the name and the other factor.
    """

    def __init__(
        self, stacks: list[tuple[str, torch.Tensor]], tell: Callable[[str, torch.Tensor], None]
    ) -> None:
        super().__init__()
        self._ranges = [
            (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name)
            for name, parameter in stacks
        ]
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._ranges and name in _PRODUCTS:
            factors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            owners = [self._owner(factor) for factor in factors]
            stack = next((owner for owner in owners if owner is not None), None)
            if stack is not None:
                self._tell(stack, next(f for f, owner in zip(factors, owners, strict=True) if owner is None))
        return func(*args, **kwargs)

    def _owner(self, tensor: torch.Tensor) -> str | None:
        at = tensor.data_ptr()
        return next((name for begin, end, name in self._ranges if begin <= at < end), None)

"""replace_linears: a model's linears become those of a quantized checkpoint."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from moqext import Checkpoint, CheckpointError, LayerRecord, UnsupportedQuantization
from moqext.spelling import Compute
from moqext_torch.exchange import stored_tensor
from moqext_torch.quant_linear import DTYPES, QuantLinear, refuse_unfit

SHOWN = 12
"""Names that an error lists; more are counted."""


class _Place(NamedTuple):
    """A module of the model, and what the checkpoint has for it."""

    module: torch.nn.Module
    record: LayerRecord


def replace_linears(
    model: torch.nn.Module,
    checkpoint: Checkpoint | str | os.PathLike[str],
    *,
    compute: Compute = "exact",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    load: bool = False,
    rename: Callable[[str], str] | None = None,
) -> torch.nn.Module:
    """Puts a `QuantLinear` in the place of every `nn.Linear` that the checkpoint holds quantized.

    Everything is read, checked and prepared before the model changes. A linear that the checkpoint holds
    unquantized stays what it is, as does a head tied to the embedding. A quantized embedding table is
    dequantized into the model's own.

    Args:
        model: any module; its parameters may be on the meta device.
        checkpoint: a directory, or one that is open.
        compute: as for `QuantLinear`.
        dtype: of activations; None takes that of each linear's weight, bfloat16 where it is another one.
        device: where the layers run; None leaves them where the linears are, on the CPU for meta.
        load: whether all other parameters and buffers are loaded, too, each into its own dtype.
        rename: from the name of a module or tensor in the model to its name in the checkpoint.

    Returns:
        The model, changed in place; or, where it is itself a linear, the module in its place.

    Raises:
        CheckpointError: a problem of severity "error" stands against the checkpoint.
        UnsupportedQuantization: an algorithm that does not run, or experts stored as one stack.
        ValueError: the two do not fit: it lists quantized layers without a linear, other shapes, biases of
            one side only, and with `load` tensors that one of them lacks.
    """
    rename = rename or (lambda name: name)
    if not isinstance(checkpoint, Checkpoint):
        with Checkpoint(checkpoint) as opened:
            return _replace(model, opened, compute, dtype, device, load, rename)
    return _replace(model, checkpoint, compute, dtype, device, load, rename)


def _replace(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    compute: Compute,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    load: bool,
    rename: Callable[[str], str],
) -> torch.nn.Module:
    refuse_problems(checkpoint)
    places = find_places(model, checkpoint.layers(), rename)
    linears, tables = {}, {}
    for name, (module, record) in places.items():
        where = device or ("cpu" if module.weight.is_meta else module.weight.device)
        if record.kind == "embedding":
            table = torch.from_numpy(checkpoint.dequantize(record)).to(where, module.weight.dtype)
            tables[name] = torch.nn.Parameter(table, requires_grad=False)
        else:
            kind = dtype or (module.weight.dtype if module.weight.dtype in DTYPES else torch.bfloat16)
            linears[name] = QuantLinear.from_checkpoint(
                checkpoint, record, compute=compute, dtype=kind, device=where
            )
    rest = _plain_tensors(model, checkpoint, places, rename, device) if load else {}
    for name, table in tables.items():
        model.get_submodule(name).weight = table
    for name, tensor in rest.items():
        _assign(model, name, tensor)
    for name, linear in linears.items():
        linear.train(model.training)
        if not name:
            return linear
        model.set_submodule(name, linear)
    return model


def refuse_problems(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError with every problem of severity "error"."""
    errors = [problem for problem in checkpoint.problems if problem.severity == "error"]
    if errors:
        lines = [f"{p.layer or p.tensor or 'files'}: {p.code}: {p.message}" for p in errors]
        raise CheckpointError(_listed("the checkpoint is damaged", lines), file=checkpoint.directory)


def find_places(
    model: torch.nn.Module, layers: Iterable[LayerRecord], rename: Callable[[str], str]
) -> dict[str, _Place]:
    """The modules that a checkpoint holds quantized, by their names in the model.

    Args:
        model: as for `replace_linears`, like `rename`.
        layers: of the checkpoint.
        rename: from a name in the model to one in the checkpoint.

    Raises:
        UnsupportedQuantization, ValueError: as `replace_linears`.
    """
    modules = {rename(name): (name, module) for name, module in model.named_modules()}
    places, wrong = {}, []
    for layer in layers:
        for record in layer.linears():
            name, module = modules.get(record.name, ("", None))
            if module is None or not isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                if record.projections:
                    stack = f"{record.shape[0]} experts ({record.quant_algo}) in one stack"
                    raise UnsupportedQuantization(f"{record.name}: {stack} do not run yet")
                found = "none" if module is None else type(module).__name__
                wrong.append(
                    f"{record.name}: quantized in the checkpoint, no nn.Linear in the model ({found})"
                )
                continue
            wrong += _misfits(record, module)
            places[name] = _Place(module, record)
    if wrong:
        raise ValueError(_listed("model and checkpoint do not fit", wrong))
    return places


def _misfits(record: LayerRecord, module: torch.nn.Module) -> Iterator[str]:
    """Why a module cannot be what the checkpoint holds."""
    if isinstance(module, torch.nn.Linear) != (record.kind == "linear"):
        yield f"{record.name}: {record.kind} in the checkpoint, {type(module).__name__} in the model"
        return
    if tuple(module.weight.shape) != record.shape:
        shapes = f"{list(record.shape)} in the checkpoint, {list(module.weight.shape)} in the model"
        yield f"{record.name}: {shapes}"
    if record.kind == "linear":
        refuse_unfit(record)
        if (module.bias is not None) != ("bias" in record.tensors):
            yield f"{record.name}: a bias in the {'model' if module.bias is not None else 'checkpoint'} alone"


def _plain_tensors(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    places: dict[str, _Place],
    rename: Callable[[str], str],
    device: torch.device | str | None,
) -> dict[str, torch.Tensor]:
    """The parameters and buffers outside of replaced modules, read, by their names in the model."""
    replaced = tuple(f"{name}." if name else "" for name in places)
    owned = {tensor for place in places.values() for tensor in place.record.tensors.values()}
    owned |= {tensor for record in checkpoint.kv_scales() for tensor in record.tensors.values()}
    owned |= {problem.tensor for problem in checkpoint.problems if problem.tensor}
    wanted: dict[int, list[str]] = {}  # tied ones have several names
    targets = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and not name.startswith(replaced):
            wanted.setdefault(id(tensor), []).append(name)
            targets[name] = tensor
    read, wrong = {}, []
    for names in wanted.values():
        stored = next((name for name in names if rename(name) in checkpoint.tensors), None)
        if stored is None:
            if not any(name.startswith(replaced) for name in names):
                wrong.append(f"{names[0]}: not in the checkpoint")
            continue
        owned |= {rename(name) for name in names}
        target, tensor = targets[stored], stored_tensor(checkpoint, rename(stored))
        if tensor.shape != target.shape:
            wrong.append(
                f"{stored}: {list(tensor.shape)} in the checkpoint, {list(target.shape)} in the model"
            )
            continue
        where = device or ("cpu" if target.is_meta else target.device)
        tensor = tensor.to(where, target.dtype)
        if isinstance(target, torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor, requires_grad=target.requires_grad)
        read |= dict.fromkeys(names, tensor)
    wrong += [f"{name}: not in the model" for name in checkpoint.tensors if name not in owned]
    if wrong:
        raise ValueError(_listed("model and checkpoint do not fit", wrong))
    return read


def _assign(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Sets a parameter or buffer, so that tied ones stay one object."""
    parent, _, own = name.rpartition(".")
    module: Any = model.get_submodule(parent)
    setattr(module, own, tensor)


def _listed(head: str, lines: list[str]) -> str:
    more = f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"{head}:\n  " + "\n  ".join(lines[:SHOWN]) + more

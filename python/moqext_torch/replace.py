"""replace_linears: a model's linears become those of a quantized checkpoint."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from moqext import Checkpoint, CheckpointError, LayerRecord
from moqext.ops.spelling import Compute
from moqext_torch.exchange import stored_tensor
from moqext_torch.experts import ExpertsPlace, find_experts
from moqext_torch.prepared import DTYPES
from moqext_torch.quant_linear import QuantLinear, refuse_unfit
from moqext_torch.quant_moe import QuantMoE

SHOWN = 12
"""Names that an error lists; more are counted."""


_VALUES = {torch.float64, *DTYPES}
"""Dtypes whose values may be rounded to one another; those of codes mean nothing by themselves."""


class _Place(NamedTuple):
    """A module of the model, and what the checkpoint has for it."""

    module: torch.nn.Module
    record: LayerRecord


class Places(NamedTuple):
    """The modules that a checkpoint holds quantized, by their names in the model."""

    linears: dict[str, _Place]
    """Linears and embedding tables."""

    experts: dict[str, ExpertsPlace]
    """Modules with all experts of a layer."""


def replace_linears(
    model: torch.nn.Module,
    checkpoint: Checkpoint | str | os.PathLike[str],
    *,
    compute: Compute = "exact",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    load: bool = False,
    rename: Callable[[str], str] | None = None,
    batch_invariant: bool = False,
) -> torch.nn.Module:
    """Puts a `QuantLinear` in the place of every `nn.Linear` that the checkpoint holds quantized.

    A module with all experts of a layer, as those of Transformers, becomes a `QuantExperts`. Everything is
    read, checked and prepared before the model changes. A linear that the checkpoint holds unquantized stays
    what it is, as does a head tied to the embedding. Quantized embedding tables and convolutions are
    dequantized into the model's own.

    Args:
        model: any module; its parameters may be on the meta device.
        checkpoint: a directory, or one that is open.
        compute: as for `QuantLinear`.
        dtype: of activations; None takes that of each linear's weight, bfloat16 where it is another one.
        device: where the layers run; None leaves them where the linears are, on the CPU for meta.
        load: whether all other parameters and buffers are loaded, too, each into its own dtype.
        rename: from the name of a module or tensor in the model to its name in the checkpoint.
        batch_invariant: as for `QuantLinear` and `QuantMoE`.

    Returns:
        The model, changed in place; or, where it is itself a linear, the module in its place.

    Raises:
        CheckpointError: a problem of severity "error" stands against the checkpoint.
        UnsupportedQuantization: an algorithm that does not run, experts in several formats, or a module of
            experts that is none of those known.
        TypeError: `model` is no module.
        ValueError: the two do not fit: it lists quantized layers without a linear, other shapes, biases of
            one side only, and with `load` tensors that one of them lacks.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model)}")
    rename = rename or (lambda name: name)
    about = {"compute": compute, "batch_invariant": batch_invariant}
    if not isinstance(checkpoint, Checkpoint):
        with Checkpoint(checkpoint) as opened:
            return _replace(model, opened, about, dtype, device, load, rename)
    return _replace(model, checkpoint, about, dtype, device, load, rename)


def _replace(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    about: Mapping[str, Any],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    load: bool,
    rename: Callable[[str], str],
) -> torch.nn.Module:
    refuse_problems(checkpoint)
    places = find_places(model, checkpoint, checkpoint.layers(), rename)
    linears, tables, experts = {}, {}, {}
    for name, (module, record) in places.linears.items():
        where = device or ("cpu" if module.weight.is_meta else module.weight.device)
        if record.kind in ("embedding", "convolution"):
            table = torch.from_numpy(checkpoint.dequantize(record)).to(where, module.weight.dtype)
            tables[f"{name}.weight"] = torch.nn.Parameter(table, requires_grad=False)
            if "bias" in record.tensors:
                bias = stored_tensor(checkpoint, record.tensors["bias"]).to(where, module.weight.dtype)
                tables[f"{name}.bias"] = torch.nn.Parameter(bias, requires_grad=False)
        else:
            linears[name] = QuantLinear.from_checkpoint(
                checkpoint, record, dtype=dtype or _dtype_of(module.weight), device=where, **about
            )
    for name, place in places.experts.items():
        experts[name] = QuantMoE.from_checkpoint(
            checkpoint,
            place.record,
            dtype=dtype or _dtype_of(place.weight),
            device=device or ("cpu" if place.weight.is_meta else place.weight.device),
            **place.options,
            **about,
        )
    rest = _plain_tensors(model, checkpoint, places, rename, device) if load else {}
    for name, table in tables.items():
        _assign(model, name, table)
    for name, tensor in rest.items():
        _assign(model, name, tensor)
    if "" in linears:
        return linears[""].train(model.training)
    _put({id(places.linears[name].module): linear for name, linear in linears.items()}, model)
    for name, moe in experts.items():
        model = places.experts[name].install(model, moe)
    return model


def _put(linears: Mapping[int, QuantLinear], model: torch.nn.Module) -> None:
    """Puts linears in the places of modules, told by their ids: a shared one has several."""
    for parent in list(model.modules()):
        # named_children() would leave out a module that it had before
        for name, module in list(parent._modules.items()):
            if id(module) in linears:
                setattr(parent, name, linears[id(module)].train(model.training))


def _dtype_of(weight: torch.Tensor) -> torch.dtype:
    """The dtype in which a layer in the place of a weight calculates."""
    return weight.dtype if weight.dtype in DTYPES else torch.bfloat16


def refuse_problems(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError with every problem of severity "error" but those of cache scales."""
    cache = [problem for record in checkpoint.kv_scales() for problem in record.problems]
    problems = [problem for problem in checkpoint.problems if problem not in cache]
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        lines = [f"{p.layer or p.tensor or 'files'}: {p.code}: {p.message}" for p in errors]
        raise CheckpointError(_listed("the checkpoint is damaged", lines), file=checkpoint.directory)


def find_places(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    layers: Iterable[LayerRecord],
    rename: Callable[[str], str],
) -> Places:
    """The modules that a checkpoint holds quantized.

    Args:
        model: as for `replace_linears`, like `rename`.
        checkpoint: where they are stored.
        layers: of the checkpoint.
        rename: from a name in the model to one in the checkpoint.

    Raises:
        UnsupportedQuantization, ValueError: as `replace_linears`.
    """
    layers = list(layers)
    modules = {rename(name): (name, module) for name, module in model.named_modules()}
    experts, wrong = find_experts(checkpoint, modules, layers)
    linears = {}
    together = {place.record.name for place in experts.values()}
    for record in (part for layer in layers if layer.name not in together for part in layer.linears()):
        name, module = modules.get(record.name, ("", None))
        if record.kind == "moe" or not (is_linear(module) or isinstance(module, _DEQUANTIZED)):
            wanted = _WANTED.get(record.kind, "nn.Linear")
            found = "none" if module is None else type(module).__name__
            wrong.append(f"{record.name}: quantized in the checkpoint, no {wanted} in the model ({found})")
            continue
        wrong += _misfits(record, module)
        linears[name] = _Place(module, record)
    if wrong:
        raise ValueError(_listed("model and checkpoint do not fit", wrong))
    return Places(linears, experts)


_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_DEQUANTIZED = (torch.nn.Embedding, *_CONVOLUTIONS)
_ROWS_FIRST = (torch.nn.Linear, *_DEQUANTIZED)
_WANTED = {"moe": "module of experts", "embedding": "nn.Embedding", "convolution": "convolution"}


def is_linear(module: Any) -> bool:
    """Whether a module is a linear: torch's, or GPT-2's Conv1D, which keeps the transposed weight.

    Exporters turn a Conv1D into a linear of torch, so that checkpoints have [out, in] for both.
    """
    return isinstance(module, torch.nn.Linear) or (
        type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    )


def _misfits(record: LayerRecord, module: torch.nn.Module) -> Iterator[str]:
    """Why a module cannot be what the checkpoint holds."""
    kind = "linear" if is_linear(module) else "embedding"
    if record.kind != ("convolution" if isinstance(module, _CONVOLUTIONS) else kind):
        yield f"{record.name}: {record.kind} in the checkpoint, {type(module).__name__} in the model"
        return
    shape = tuple(module.weight.shape) if isinstance(module, _ROWS_FIRST) else module.weight.shape[::-1]
    if shape != record.shape:
        shapes = f"{list(record.shape)} in the checkpoint, {list(shape)} in the model"
        yield f"{record.name}: {shapes}"
    if record.kind == "linear":
        refuse_unfit(record)
    if record.kind != "embedding" and (module.bias is not None) != ("bias" in record.tensors):
        yield f"{record.name}: a bias in the {'model' if module.bias is not None else 'checkpoint'} alone"


def _plain_tensors(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    places: Places,
    rename: Callable[[str], str],
    device: torch.device | str | None,
) -> dict[str, torch.Tensor]:
    """The parameters and buffers outside of replaced modules, read, by their names in the model."""
    gone = {id(place.module) for place in places.linears.values()}
    names = [name for name, module in model.named_modules(remove_duplicate=False) if id(module) in gone]
    replaced = tuple(f"{name}." if name else "" for name in (*names, *places.experts))
    records = [place.record for place in (*places.linears.values(), *places.experts.values())]
    owned = {name for record in records for part in record.linears() for name in part.tensors.values()}
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
        if tensor.dtype != target.dtype and not {tensor.dtype, target.dtype} <= _VALUES:
            wrong.append(f"{stored}: {tensor.dtype} in the checkpoint, {target.dtype} in the model")
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

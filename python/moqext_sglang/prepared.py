"""Where prepared tensors stand in a layer of SGLang, and how a reload goes to the same memory.

Parameters have the names of files, which are their roles but for those of low-rank pairs.
A prepared tensor that has the bytes of the checkpoint's is that parameter itself. Codes in another layout
(NVFP4 packed for CUDA) take the place of the weight, whose own block scales are part of them then. All others
are buffers beside the parameters. Memory stays where it is when weights are loaded again, for graphs.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from moqext import UnsupportedQuantization
from moqext.ops import unpack_nvfp4
from moqext_torch.exchange import NAMED, stored_exponents
from moqext_torch.op import LOW_RANK, PAIR

STORED_AS = {role: f"{PAIR}{role}" for role in LOW_RANK}
"""Names of parameters that files do not call by their roles."""


def register(layer: torch.nn.Module, role: str, parameter: torch.nn.Parameter) -> None:
    """Gives a layer the parameter of a role, under the name that files have."""
    owner, _, name = STORED_AS.get(role, role).rpartition(".")
    if owner and not hasattr(layer, owner):
        layer.add_module(owner, torch.nn.Module())
    layer.get_submodule(owner).register_parameter(name, parameter)


@torch.inference_mode(False)
@torch.no_grad()
def prepare(
    layer: Any,
    method: Any,
    given: Iterable[str],
    before: Mapping[str, torch.Tensor],
    wrap: Callable[[dict[str, Any]], Any] = dict,
) -> dict[str, torch.Tensor]:
    """Prepares the parameters of a layer, in the memory of an earlier time where that is of the same roles.

    Args:
        layer: of SGLang, with the checkpoint's tensors as parameters.
        method: `LinearMethod` or `MoEMethod`.
        given: roles that the checkpoint has.
        before: what this function returned the time before; empty the first time.
        wrap: makes of the tensors what the method's `prepare` takes.

    Returns:
        The prepared tensors by role.

    Raises:
        ValueError, TypeError: as `prepare` of the method.
    """
    specs = method.prepared_params
    tensors = {role: layer.get_parameter(STORED_AS.get(role, role)).data for role in given}
    roles = {role for role, spec in specs.items() if spec.required or role in tensors}
    out = {}
    for role in sorted(roles):
        spec = specs[role]
        if method.keeps(role):
            out[role] = tensors[role]
        elif role in before:
            out[role] = before[role]
        else:
            device = tensors[next(iter(tensors))].device
            out[role] = torch.empty(spec.shape, dtype=NAMED[spec.dtype], device=device)
    arguments = {role: t.cpu() if t.dtype == torch.float32 else t for role, t in tensors.items()}
    method.prepare(wrap(arguments), out)
    for role, tensor in out.items():
        if not method.keeps(role) and not role.endswith("weight"):
            layer.register_buffer(f"moqext_{role}", tensor, persistent=False)
    return out


def settle(layer: Any, method: Any, prepared: Mapping[str, torch.Tensor], prefix: str = "") -> None:
    """Packed codes take the place of the checkpoint's, which are freed with their block scales.

    Args:
        layer: as for `prepare`, like the next one.
        method: as there.
        prepared: what `prepare` returned.
        prefix: of the names of a matrix or a stack: "w13_" or "w2_".
    """
    if method.keeps(f"{prefix}weight"):
        return
    getattr(layer, f"{prefix}weight").data = prepared[f"{prefix}weight"]
    if f"{prefix}weight_scale" not in method.prepared_params:
        scale = getattr(layer, f"{prefix}weight_scale")
        scale.data = scale.data.new_empty(0)


def restore(
    layer: Any,
    method: Any,
    prepared: Mapping[str, torch.Tensor],
    shape: tuple[int, ...],
    prefix: str = "",
) -> None:
    """Puts the checkpoint's tensors back where packed ones took their places; does nothing where they stand.

    Args:
        layer: as for `settle`, like the next two.
        method: as there.
        prepared: as there.
        shape: rows and columns of the weight; of a stack, experts before them.
        prefix: as for `settle`.

    Raises:
        UnsupportedQuantization: codes that were folded for good.
    """
    if not prepared or method.keeps(f"{prefix}weight"):
        return
    codes = prepared[f"{prefix}weight"]
    if f"{prefix}weight_scale" in method.prepared_params or codes.dim() != len(shape) + 1:
        raise UnsupportedQuantization(
            f"{method.quant_algo} prepared with compute={method.compute!r} cannot be loaded again"
        )
    weight = getattr(layer, f"{prefix}weight")
    if weight.data_ptr() != codes.data_ptr():
        return
    unpacked, scales = unpack_nvfp4(codes, shape, method.group_size or 16)
    weight.data = unpacked
    scales = scales.view(torch.float8_e4m3fn)
    if method.checkpoint_params[f"{prefix}weight_scale"].dtype == "float8_e8m0fnu":
        scales = stored_exponents(scales, prepared[f"{prefix}output_scale"])
    getattr(layer, f"{prefix}weight_scale").data = scales

"""Where prepared tensors stand in a layer of SGLang, and how a reload goes to the same memory.

A prepared tensor that has the bytes of the checkpoint's is that parameter itself. Codes in another layout
(NVFP4 packed for CUDA) take the place of the weight, whose own block scales are part of them then. All others
are buffers beside the parameters. Memory stays where it is when weights are loaded again, for graphs.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from moqext import ParamSpec, UnsupportedQuantization
from moqext.ops import unpack_nvfp4
from moqext_torch.exchange import NAMED

Specs = Mapping[str, ParamSpec]


def has_the_bytes(role: str, stored: Specs, prepared: Specs) -> bool:
    """Whether a prepared tensor is the checkpoint's, byte for byte."""
    return (
        role in stored
        and role in prepared
        and stored[role].dtype != "float32"
        and stored[role][:2] == prepared[role][:2]
    )


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
    stored, specs = method.checkpoint_params, method.prepared_params
    tensors = {role: getattr(layer, role).data for role in given}
    roles = {role for role, spec in specs.items() if spec.required or role in tensors}
    out = {}
    for role in sorted(roles):
        spec = specs[role]
        if has_the_bytes(role, stored, specs):
            out[role] = tensors[role]
        elif role in before:
            out[role] = before[role]
        else:
            device = tensors[next(iter(tensors))].device
            out[role] = torch.empty(spec.shape, dtype=NAMED[spec.dtype], device=device)
    arguments = {role: t.cpu() if t.dtype == torch.float32 else t for role, t in tensors.items()}
    method.prepare(wrap(arguments), out)
    for role, tensor in out.items():
        if not has_the_bytes(role, stored, specs) and not role.endswith("weight"):
            layer.register_buffer(f"moqext_{role}", tensor, persistent=False)
    return out


def _in_another_layout(method: Any) -> list[str]:
    """Roles of codes whose prepared tensor is not the checkpoint's."""
    stored, specs = method.checkpoint_params, method.prepared_params
    return [role for role in specs if role.endswith("weight") and not has_the_bytes(role, stored, specs)]


def settle(layer: Any, method: Any, prepared: Mapping[str, torch.Tensor]) -> None:
    """Packed codes take the place of the checkpoint's, which are freed with their block scales.

    Args:
        layer: of SGLang.
        method: as for `prepare`.
        prepared: what that returned.
    """
    for role in _in_another_layout(method):
        getattr(layer, role).data = prepared[role]
        if f"{role}_scale" not in method.prepared_params:
            scales = getattr(layer, f"{role}_scale")
            scales.data = scales.data.new_empty(0)


def restore(layer: Any, method: Any, prepared: Mapping[str, torch.Tensor]) -> None:
    """Puts the checkpoint's tensors back where packed ones took their places; the packed stay in `prepared`.

    Args:
        layer: of SGLang.
        method: as for `prepare`.
        prepared: what that returned.

    Raises:
        UnsupportedQuantization: codes that were folded for good.
    """
    stored, specs = method.checkpoint_params, method.prepared_params
    for role in _in_another_layout(method):
        *rows, half = stored[role].shape
        if f"{role}_scale" in specs or len(specs[role].shape) != len(rows) + 2:
            raise UnsupportedQuantization(
                f"{method.quant_algo} prepared with compute={method.compute!r} cannot be loaded again"
            )
        codes, scales = unpack_nvfp4(prepared[role], (*rows, 2 * half), method.group_size or 16)
        getattr(layer, role).data = codes
        getattr(layer, f"{role}_scale").data = scales.view(torch.float8_e4m3fn)

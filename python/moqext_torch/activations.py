"""Operations between linears: `torch.ops.moqext.rms_norm`, `add_rms_norm`, `silu_and_mul` and their kin.

The functions here are those of `moqext.ops` in torch's way: operations for torch.compile and
torch.export, and in eager mode calls around the dispatcher, as `QuantLinear` does.
"""

import torch

from moqext import ops
from moqext_torch.op import NO_GRADIENT, is_plain_call, register_autograd

torch.library.define(
    "moqext::rms_norm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "moqext::add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define("moqext::silu_and_mul", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
torch.library.define(
    "moqext::silu_and_mul_quantize",
    "(Tensor x, Tensor scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "moqext::rotary_embedding",
    "(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`moqext.ops.rms_norm`: v, or with a residual (v, z).

    Raises:
        RuntimeError: a gradient is asked for.
        TypeError, ValueError, BufferError: as there.
    """
    if _is_watched(x):
        if residual is None:
            return torch.ops.moqext.rms_norm(x, weight, eps)
        return torch.ops.moqext.add_rms_norm(x, residual, weight, eps)
    if residual is None:
        return ops.rms_norm(*_plain(x, weight), eps)
    x, residual, weight = _plain(x, residual, weight)
    return ops.rms_norm(x, weight, eps, residual=residual)


def rms_norm_with_codes(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...] | None:
    """`rms_norm`, and in the same pass the codes of v as "fp8_tensor", for linears with `quantized_input`.

    Args:
        x: [..., K], as for `moqext.ops.rms_norm`.
        weight: as there.
        eps: as there.
        scale: float32, one value: the linear's input_scale.
        residual: as there.

    Returns:
        (v, codes), with a residual (v, codes, z); None where a call has to be an operation of torch, which
        this is not.

    Raises:
        RuntimeError, TypeError, ValueError, BufferError: as `rms_norm`.
    """
    if _is_watched(x):
        return None
    x, weight, scale = _plain(x, weight, scale)
    residual = None if residual is None else _plain(residual)[0]
    v = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    found = ops.rms_norm_quantize(x, weight, eps, "fp8_tensor", residual=residual, scale=scale, value_out=v)
    return (v, found[0], *found[2:])


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`moqext.ops.silu_and_mul`; raises as `rms_norm`."""
    if _is_watched(x):
        return torch.ops.moqext.silu_and_mul(x)
    return ops.silu_and_mul(*_plain(x))


def silu_and_mul_quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of `moqext.ops.silu_and_mul_quantize` as "fp8_tensor", for linears with `quantized_input`.

    Args:
        x: [..., 2K], gates first.
        scale: float32, one value: the linear's input_scale.

    Raises:
        RuntimeError, TypeError, ValueError, BufferError: as `rms_norm`.
    """
    if _is_watched(x):
        return torch.ops.moqext.silu_and_mul_quantize(x, scale)
    x, scale = _plain(x, scale)
    return ops.silu_and_mul_quantize(x, "fp8_tensor", scale=scale)[0]


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`moqext.ops.rotary_embedding`; raises as `rms_norm`."""
    if _is_watched(x):
        return torch.ops.moqext.rotary_embedding(x, cos, sin)
    return ops.rotary_embedding(*_plain(x, cos, sin))


def _is_watched(x: torch.Tensor) -> bool:
    """Whether a call has to be an operation of torch; on meta there is nothing to compute with."""
    return torch.compiler.is_compiling() or x.is_meta or not is_plain_call(x)


def _plain(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors that nothing will ask for a gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(NO_GRADIENT)
    return tuple(tensor.detach() if tensor.requires_grad else tensor for tensor in tensors)


@torch.library.impl("moqext::rms_norm", ("cpu", "cuda"))
def _run_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return ops.rms_norm(x.detach(), weight.detach(), eps)


@torch.library.impl("moqext::add_rms_norm", ("cpu", "cuda"))
def _run_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.rms_norm(x.detach(), weight.detach(), eps, residual=residual.detach())


@torch.library.impl("moqext::silu_and_mul", ("cpu", "cuda"))
def _run_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return ops.silu_and_mul(x.detach())


@torch.library.impl("moqext::silu_and_mul_quantize", ("cpu", "cuda"))
def _run_silu_and_mul_quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes: torch.Tensor = ops.silu_and_mul_quantize(x.detach(), "fp8_tensor", scale=scale.detach())[0]
    return codes


@torch.library.impl("moqext::rotary_embedding", ("cpu", "cuda"))
def _run_rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return ops.rotary_embedding(x.detach(), cos.detach(), sin.detach())


@torch.library.register_fake("moqext::rms_norm")
def _shape_of_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("moqext::add_rms_norm")
def _shape_of_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake("moqext::silu_and_mul")
def _shape_of_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.register_fake("moqext::silu_and_mul_quantize")
def _shape_of_silu_and_mul_quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.float8_e4m3fn)


@torch.library.register_fake("moqext::rotary_embedding")
def _shape_of_rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


for _name in ("rms_norm", "add_rms_norm", "silu_and_mul", "silu_and_mul_quantize", "rotary_embedding"):
    register_autograd(_name)

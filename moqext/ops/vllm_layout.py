"""Stacks of experts as vLLM keeps them; public as part of `moqext.ops`.

What vLLM does to the tensors of experts when it loads them, value by value, for those who have to have its
weights. moqext's own layers do none of it: they keep every scale apart, which loses nothing.
"""

from collections.abc import Sequence
from typing import Any

from moqext import _C


def swap_gate_up(stack: Any, *, out: Any = None) -> Any:
    """A stack of experts with gate and up exchanged: halves of axis 1, [gate, up] to [up, gate] and back.

    FlashInfer's kernels, which vLLM may run, have up first. Their weights, scales by row or block and scales
    of the halves all change places.

    Args:
        stack: [E, 2I, ...] or [E, 2] of any dtype but bool, any strides: w13_weight, w13_weight_scale,
            w13_weight_scale_2, w13_input_scale or w13_bias; on the host or a CUDA device.
        out: contiguous tensor of the same shape and dtype, apart from `stack`.

    Returns:
        `out`, or a new tensor.

    Raises:
        TypeError: a bool, or an out of another dtype.
        ValueError: fewer than 2 or more than 7 dimensions, an odd second one, or an out of another shape.
        BufferError: a device that cannot be used, tensors of different devices, an out that is read-only or
            overlaps the input.
    """
    return _C.swap_gate_up(stack, out=out)


def expert_input_scale(input_scale: Any, *, out: Any = None) -> Any:
    """One input scale for each expert: the larger one of gate and up, as vLLM's NVFP4 kernels have it.

    Args:
        input_scale: float32 [E, 2], or [E], which stays; in host memory, finite and not negative. A slot that
            no checkpoint filled is for the caller to find: a NaN is refused, 1.0 is not.
        out: contiguous float32 [E], apart from the input.

    Returns:
        `out`, or a new tensor.

    Raises:
        TypeError: a dtype that is not float32.
        ValueError: another shape, no expert, or a value that is negative or not finite, named by its expert.
        BufferError: memory that is not on the host, an out that is read-only or overlaps the input.
    """
    return _C.expert_input_scale(input_scale, out=out)


def shared_input_scale(input_scale: Any, shape: Sequence[int] | None = None, *, out: Any = None) -> Any:
    """The largest input scale of all experts, in as many copies as asked for.

    vLLM has one of each projection for FP8 (shape None), and the same for all experts of NVFP4 where a kernel
    knows one only, which it calls a global scale factor. There the maximum is of all experts of the layer,
    those of other ranks too, while the result is for the local ones: with expert parallelism give the scales
    of all experts, or the maxima that the ranks exchanged, and shape (local experts,). Each copy has memory
    of its own, so that moving experts between ranks may move it. For `MoEMethod` put the result where the
    checkpoint's scales were: shape (local experts, 2) for w13_input_scale.

    Args:
        input_scale: as for `expert_input_scale`, of all experts.
        shape: up to 3 extents; None is (), one element.
        out: contiguous float32 tensor of that shape, apart from the input.

    Returns:
        `out`, or a new tensor.

    Raises:
        TypeError: a dtype that is not float32, or a shape of another kind.
        ValueError: as for `expert_input_scale`, or an out of another shape.
        BufferError: as for `expert_input_scale`.
    """
    return _C.shared_input_scale(input_scale, shape, out=out)


def expert_alphas(
    input_scale: Any, weight_scale_2: Any, *, out: Any = None, scale_out: Any = None
) -> tuple[Any, Any]:
    """The factors of NVFP4 products in vLLM: alpha = input_scale * weight_scale_2, and 1 / input_scale.

    alpha multiplies the sums of codes times block scales; the reciprocal is what its kernels quantize
    activations by. Of weight_scale_2 [E, 2] both halves get gate's, which is wrong by up's over gate's where
    a checkpoint has two: `MoEMethod` applies each.

    Args:
        input_scale: float32 [E], above 2^-128, whose reciprocal float32 does not hold, and finite; in host
            memory.
        weight_scale_2: float32 [E] or [E, 2], finite and not negative; in host memory.
        out: contiguous float32 [E] for alpha, apart from all other tensors.
        scale_out: the same for the reciprocals.

    Returns:
        (alpha, reciprocal): `out` and `scale_out`, or new tensors.

    Raises:
        TypeError: a dtype that is not float32.
        ValueError: shapes that do not belong together, or a value out of range, named by its expert.
        BufferError: as for `expert_input_scale`.
    """
    return _C.expert_alphas(input_scale, weight_scale_2, out=out, scale_out=scale_out)

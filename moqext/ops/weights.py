"""Weights of experts prepared, and products with prepared weights."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from moqext import _C
from moqext.ops.scalars import as_tensors
from moqext.ops.spelling import Compute, Tensor
from moqext.variables import check_variables


def linear(
    x: Tensor,
    params: Mapping[str, Any],
    quant_algo: str,
    out_partitions: Sequence[int],
    *,
    group_size: int | None = None,
    compute: Compute = "exact",
    bias: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Tensor:
    """A linear layer on prepared parameters, without keeping a `LinearMethod`.

    Its plan is found again by the description, so a call costs little more than one of the method.

    Args:
        x: [..., in_features]; float32, float16 or bfloat16 (uint16 is taken as raw bfloat16).
        params: what `LinearMethod.prepare` returned for the same description.
        quant_algo: as for `LinearMethod`, like the next three.
        out_partitions: rows of each fused layer.
        group_size: columns that share a block scale, None for the algorithm's own.
        compute: "exact", "fp8", "fp4" or "auto".
        bias: as for `LinearMethod.__call__`, like the next two.
        out: where to write.
        stream: CUDA stream, None for the current one.

    Returns:
        `out`, or a new tensor of x's own framework.

    Raises:
        UnsupportedQuantization, ValueError, TypeError, BufferError, RuntimeError: as `LinearMethod`.
    """
    about = _C.describe_tensor(x)
    dtype = "bfloat16" if about["dtype"] == "uint16" else about["dtype"]
    if dtype not in ("bfloat16", "float16", "float32"):
        raise TypeError(f"x: expected bfloat16, float16 or float32, got {dtype}")
    if not about["shape"]:
        raise ValueError("x: expected at least one dimension, got shape []")
    partitions = tuple(out_partitions) if isinstance(out_partitions, Iterable) else out_partitions
    columns, device = about["shape"][-1], about["device"]
    pair = params.get("lora_b")
    rank = None if pair is None else _C.describe_tensor(pair)["shape"][-1]
    options = (None, False, False, False, rank)  # no chip, and none of the permissions of a method
    plan = _linear_plan(quant_algo, columns, partitions, group_size, dtype, device, compute, *options)
    return plan.run(x, params, bias, out, stream)  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _linear_plan(*about: Any) -> _C.LinearPlan:
    """The plan of `LinearMethod` with these arguments."""
    check_variables(stacklevel=3)
    return _C.linear_plan(*about)


def prepare_experts(
    params: Mapping[str, Any],
    quant_algo: str,
    in_features: int,
    out_partitions: Sequence[int],
    *,
    group_size: int | None = None,
    compute: str = "exact",
    one_input_scale: bool = False,
    out: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Weight processing of a stack of experts: all of them at once, each as `LinearMethod.prepare` does one.

    Expert e of a result is, bit by bit, what `LinearMethod(quant_algo, K, out_partitions).prepare` makes of
    expert e of `params`; scales that differ between experts, or between gate and up, stay exact.

    - weight: E4M3 [E, N, K], or fp4 [E, N, K/2], uint8 with two codes a byte;
    - weight_scale: float, FP8 [E] or [E, P], per channel [E, N], 128 x 128 [E, Nt, Kt];
    - weight_scale of NVFP4: E4M3 [E, N, K/g];
    - weight_scale_2, input_scale: float [E] or [E, P];
    - pre_quant_scale: float [E, K], or [K] for all experts.

    N is the sum of the P partitions, [2I] as [I, I] for gate and up; Nt counts blocks of each partition by
    itself. Each tensor may also be a list of one stack per partition ([E, I, K] for gate and for up). One
    value of a scale of partitions serves all experts. Experts may be any distance apart in memory; what
    belongs to one expert is laid out as for `LinearMethod`.

    Args:
        params: the tensors by name, all codes on one device; where results go.
        quant_algo: as for `LinearMethod`, like the next five.
        in_features: K.
        out_partitions: rows of the P layers fused in each expert.
        group_size: columns that share a block scale, None for the algorithm's own.
        compute: "exact", "fp8", "fp4" or "auto".
        one_input_scale: all partitions of an expert have the same `input_scale`, which is checked.
        out: tensors of an earlier call to overwrite, as for `LinearMethod.prepare`.

    Returns:
        A new dict of tensors of the weight's own framework, or `out`: those of `LinearMethod.prepared_params`
        with the experts as first dimension, contiguous. A scale of one value an expert is a vector [E].

    Raises:
        UnsupportedQuantization, ValueError, TypeError, BufferError: as `LinearMethod` and its `prepare`; what
            is wrong in one expert is named with it, "experts.3: weight_scale: ...". Nothing of `out` was
            written then.
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"params: expected a mapping of names to tensors, got {type(params)}")
    if params.get("weight") is None:
        raise ValueError('params: "weight" is missing')
    weight = params["weight"]
    about = _C.describe_tensor(weight[0] if isinstance(weight, (list, tuple)) and weight else weight)
    if not about["shape"] or not about["shape"][0]:
        raise ValueError(f"weight: expected experts, rows and columns, got shape {about['shape']}")
    plan = _weight_plan(
        quant_algo,
        in_features,
        tuple(out_partitions),
        group_size,
        about["device"],
        compute,
        about["shape"][0],
        one_input_scale,
    )
    return plan.prepare({name: as_tensors(value) for name, value in params.items()}, out)


# typed: in_features 64.0 is no 64, which it equals
_weight_plan = lru_cache(maxsize=256, typed=True)(_C.weight_plan)

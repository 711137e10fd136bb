"""How far the outputs of a linear may be from the reference's: the sums of a kernel are not float64.

The bounds are those of `expert_slack` for one product. Most outputs then round to one value.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext import reference
from moqext.reference.linear import multiplied_weight
from moqext.tools.expert_slack import SUMS, error_of_sums, read_by, smoothed

_CORE_KERNELS = (
    "cuda:sm90_fp8_decode",
    "cuda:sm90_fp8_prefill",
    "cuda:sm90_nvfp4_fp8_medium",
    "cuda:sm90_nvfp4_fp8_prefill",
    "cuda:sm89_fp8",
    "cuda:cublaslt",
    "cuda:cublaslt_fp4",
)


def sums_in_cores(kernel: str) -> bool:
    """Whether a kernel of linears has sums that FP8 or FP4 tensor cores begin, for `linear_slack`."""
    return kernel in _CORE_KERNELS


def linear_slack(
    x: NDArray[Any],
    params: dict[str, NDArray[Any]],
    quant_algo: str,
    *,
    compute: str = "exact",
    dtype: str = "bfloat16",
    group_size: int | None = None,
    bias: NDArray[np.float32] | None = None,
    in_cores: bool = False,
) -> NDArray[np.float64]:
    """How far each output may move, [T, N].

    Args:
        x: [T, K], values of the dtype as float32.
        params: As for `reference.linear`, like all that follow.
        quant_algo: Canonical name.
        compute: "exact", "fp8" or "fp4".
        dtype: Of x.
        group_size: Columns that share a scale.
        bias: [N].
        in_cores: As `sums_in_cores` tells of the kernel.
    """
    options = {"quant_algo": quant_algo, "compute": compute, "dtype": dtype, "group_size": group_size}
    weight = multiplied_weight(params, quant_algo, compute, group_size)
    added: Any = 0.0 if bias is None else bias.astype(np.float64)
    slack = error_of_sums(read_by(x, params, options), weight, added, in_cores)
    if "lora_a" in params:
        down, up = (np.abs(reference.as_float32(params[role]).astype(np.float64)) for role in _PAIR)
        slack = slack + SUMS * (np.abs(smoothed(x, params, options)) @ down.T @ up.T)
    return slack


_PAIR = ("lora_a", "lora_b")

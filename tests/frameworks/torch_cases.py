"""The random linears of `linear_cases` as QuantLinears; needs torch."""

import numpy as np
import torch

from moqext.algorithms import ALGORITHMS
from moqext_torch import QuantLinear

from ..linear_cases import random_case, smoothed, with_pairs

ALGOS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "NVFP4_AWQ",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "MXFP4",
)
FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def case_of(rng, algo, rows=(40,), columns=128):
    case = random_case(rng, algo, columns, rows)
    case = smoothed(rng, case) if ALGORITHMS[algo].pre_quant_scale else case
    return with_pairs(rng, case, 8) if ALGORITHMS[algo].low_rank else case


def tensors_of(case):
    """The tensors of a case as torch has them, in the dtypes of a checkpoint."""
    found, specs = {}, case.method().checkpoint_params
    for role, array in case.fused().items():
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if specs[role].dtype == "float8_e4m3fn":
            tensor = tensor.view(torch.float8_e4m3fn)
        if array.dtype == np.uint16:
            tensor = tensor.view(torch.bfloat16)
        found[role] = tensor.clone()
    return found


def filled(case, bias=None, **options):
    """A layer that has loaded the case from a state dict."""
    layer = QuantLinear(case.in_features, case.out_partitions, case.algo, bias=bias is not None, **options)
    extra = {} if bias is None else {"bias": bias}
    layer.load_state_dict(tensors_of(case) | extra)
    return layer


def random_x(rng, case, *shape, dtype=torch.bfloat16):
    return torch.from_numpy(rng.standard_normal((*shape, case.in_features), dtype=np.float32)).to(dtype)

"""The random experts of `moe_cases` as QuantMoEs; needs torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moqext import MoEMethod
from moqext.reference import experts_reference
from moqext_torch import QuantMoE

from ..moe_cases import random_routing, random_stacks

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 128, 96, 2


@dataclass
class MoECase:
    """A layer of experts: its description, and its stacks as NumPy has them."""

    algo: str
    stacks: dict[str, np.ndarray]
    options: dict[str, Any]

    @property
    def about(self):
        """The positional arguments of `MoEMethod` and of `QuantMoE`."""
        return self.algo, EXPERTS, HIDDEN, INTERMEDIATE

    def method(self, **options):
        return MoEMethod(*self.about, **({"top_k": TOP_K} | self.options | options))

    def expected(self, x, weights, ids, dtype="bfloat16", **call):
        """The reference's output in float64."""
        given = self.options | call
        return experts_reference(
            x.float().numpy(),
            self.stacks,
            weights.numpy(),
            ids.numpy(),
            quant_algo=self.algo,
            dtype=dtype,
            **given,
        )


def moe_case(rng, algo, *, bias=None, missing_input_scales=0.0, **options):
    layout = {name: options[name] for name in ("gated", "interleaved", "group_size") if name in options}
    stacks = random_stacks(
        rng,
        algo,
        EXPERTS,
        HIDDEN,
        INTERMEDIATE,
        bias=bias,
        missing_input_scales=missing_input_scales,
        **layout,
    )
    return MoECase(algo, stacks, options)


def stacks_of(case):
    """The stacks as torch has them, in the dtypes of a checkpoint."""
    specs, found = case.method().checkpoint_params, {}
    for role, array in case.stacks.items():
        tensor = torch.from_numpy(np.array(array))
        if specs[role].dtype == "float8_e4m3fn":
            tensor = tensor.view(torch.float8_e4m3fn)
        elif array.dtype == np.uint16:
            tensor = tensor.view(torch.bfloat16)
        found[role] = tensor
    return found


def filled_moe(case, **options):
    """A layer that has loaded the case from a state dict."""
    layer = QuantMoE(*case.about, **({"top_k": TOP_K} | case.options | options))
    layer.load_state_dict(stacks_of(case))
    return layer


def random_call(rng, *shape, dtype=torch.bfloat16, top_k=TOP_K, kind="random", ids_dtype="int32"):
    """Activations, router weights and ids of some tokens."""
    x = torch.from_numpy(rng.standard_normal((*shape, HIDDEN), dtype=np.float32)).to(dtype)
    tokens = int(np.prod(shape))
    weights, ids = random_routing(rng, tokens, top_k, EXPERTS, kind, ids_dtype)
    return x, *(torch.from_numpy(array).reshape(*shape, top_k) for array in (weights, ids))

"""batch_invariant on the device: every kernel that may run such layers, in configs that tuning may try."""

from typing import Any

import numpy as np
import pytest

from moqext import UnsupportedQuantization, reference

from ..moe_cases import random_routing
from ..test_batch_invariance import (
    EXPERTS,
    LINEARS,
    assert_rows_stand_alone,
    assert_same_bits,
    assert_tokens_stand_alone,
    experts,
    linear,
    rows_of_all_sizes,
)

pytestmark = pytest.mark.gpu

COUNTS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 96, 128, 129, 200, 256, 300, 512, 1000, 2048)
LINEAR_KERNELS = (
    None,
    "cuda:simt",
    "cuda:sm89_fp8",
    "cuda:sm80_fp8",
    "cuda:sm80_nvfp4",
    "cuda:sm80_general",
    "cuda:sm90_fp8_prefill",
    "cuda:sm90_int8_prefill",
    "cuda:sm90_nvfp4_medium",
    "cuda:sm90_nvfp4_prefill",
    "cuda:sm90_general_prefill",
    "cuda:sm90_nvfp4_fp8_medium",
    "cuda:sm90_nvfp4_fp8_prefill",
)
EXPERT_KERNELS = (
    None,
    "cuda:simt",
    "cuda:sm89_fp8",
    "cuda:sm80_fp8",
    "cuda:sm80_nvfp4",
    "cuda:sm80_nvfp4_fp8",
    "cuda:sm80_general",
    "cuda:sm90_fp8_prefill",
    "cuda:sm90_nvfp4_prefill",
    "cuda:sm90_nvfp4_fp8_prefill",
)


def layer_of(make: Any, kind: tuple[str, str], *args: Any, **options: Any) -> Any:
    """A layer of `make`; skips the test where the kernel that is forced cannot run it."""
    try:
        return make(*kind, *args, **options)
    except UnsupportedQuantization as error:
        pytest.skip(str(error))


def keep_each_variant(method: Any, tokens: int) -> Any:
    """Has calls of so many tokens run in each config that the layer may have."""
    kernel = method.backend
    configs = set()
    for variant in range(64):
        method._plan.keep(tokens, kernel, variant)
        config = method._plan.config(tokens)[1:4]
        if config not in configs:
            configs.add(config)
            yield config
    method._plan.keep(tokens, kernel, 0)


@pytest.mark.parametrize("kind", LINEARS, ids=str)
@pytest.mark.parametrize("kernel", LINEAR_KERNELS)
def test_rows_of_linears(rng, kernel, kind):
    dtype = "float16" if rng.integers(2) else "bfloat16"
    method, product = layer_of(linear, kind, dtype, "cuda:0", (1536, 528), 2048, kernel)
    counts = COUNTS if kernel != "cuda:simt" else COUNTS[:12]
    x = rows_of_all_sizes(rng, counts[-1] + 50, 2048, dtype)
    assert method.backend_for(1) == method.backend_for(4096)
    assert_rows_stand_alone(rng, product, x, counts)


@pytest.mark.parametrize("kind", LINEARS[:5], ids=str)
def test_every_config_that_tuning_may_try(rng, kind):
    method, product = layer_of(linear, kind, "bfloat16", "cuda:0", (1024, 144), 1536)
    x = rows_of_all_sizes(rng, 300, 1536, "bfloat16")
    bias = -np.nan_to_num(reference.as_float32(product(x)[0]), posinf=0, neginf=0)
    whole = product(x, bias)
    for tokens in (1, 16, 40, 100, 300):
        for config in keep_each_variant(method, tokens):
            assert_same_bits(product(x[:tokens], bias), whole[:tokens], f"{tokens} rows, {config}")


@pytest.mark.parametrize("kind", EXPERTS, ids=str)
@pytest.mark.parametrize("kernel", EXPERT_KERNELS)
def test_tokens_of_experts(rng, kernel, kind):
    """In float16, whose outputs show more of the order of sums, and in bfloat16, where d may be rounded."""
    counts = [count for count in COUNTS if count < (2000 if kernel != "cuda:simt" else 300)]
    for dtype, routing in (("float16", "skewed"), ("bfloat16", "hostile")):
        method, layer = layer_of(experts, kind, dtype, "cuda:0", 12, 512, 384, 4, kernel)
        assert method.backend_for(1) == method.backend_for(4096)
        x = rows_of_all_sizes(rng, counts[-1] + 50, 512, dtype)
        weights, ids = random_routing(rng, len(x), 4, 12, routing)
        assert_tokens_stand_alone(rng, layer, x, weights, ids, counts)

"""The builders of stacks and routing, and the check of outputs: what they promise, and what it refuses."""

import numpy as np
import pytest

from moqext import reference
from moqext.tools.expert_slack import expert_slack

from .linear_cases import random_x
from .moe_cases import (
    ALGOS,
    COMPUTES,
    ROUTINGS,
    WITH_INPUT_SCALES,
    assert_experts_close,
    random_expert_map,
    random_routing,
    random_stacks,
)
from .work import each


def in_float32(x, stacks, weights, ids, *, rng, **options):
    """The reference with noise of float32's size in the sums of w13, as another order of them makes it."""
    noise = 1 + rng.choice([-1, 1], stacks["w13_bias"].shape) * np.float32(2.0**-22)
    noisy = stacks | {"w13_bias": (stacks["w13_bias"] * noise).astype(np.float32)}
    y = reference.experts_reference(x, noisy, weights, ids, **options)
    return reference.round_to(y, options["dtype"])


@pytest.mark.parametrize(("algo", "compute"), COMPUTES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_outputs_that_differ_in_last_bits_pass(algo, compute, dtype, rng):
    stacks = random_stacks(rng, algo, 4, 64, 64, bias="float32")
    x = reference.as_float32(random_x(rng, (12, 64), dtype))
    weights, ids = random_routing(rng, 12, 2, 4)
    options = {"quant_algo": algo, "compute": compute, "dtype": dtype}
    y = in_float32(x, stacks, weights, ids, rng=rng, **options)
    assert np.isfinite(y).all()
    assert_experts_close(y, x, stacks, weights, ids, **options)
    slack = expert_slack(x, stacks, weights, ids, **options)
    assert (slack >= 0).all()
    assert np.linalg.norm(slack) < 0.1 * np.linalg.norm(y.astype(np.float64))


def test_allowance_of_a_rounded_second_product(rng):
    """Half an ulp of bfloat16 of each slot, and no more: d is what one slot of weight 1 gives."""
    stacks = random_stacks(rng, "FP8", 4, 64, 64)
    x = reference.as_float32(random_x(rng, (12, 64), "bfloat16"))
    weights, ids = np.ones((12, 1), np.float32), random_routing(rng, 12, 1, 4)[1]
    options = {"quant_algo": "FP8", "dtype": "bfloat16"}
    d = reference.experts_reference(x, stacks, weights, ids, **options)
    moved = np.abs(reference.as_float32(reference.round_to(d, "bfloat16")) - d)
    alone = expert_slack(x, stacks, weights, ids, **options)
    term = expert_slack(x, stacks, weights, ids, rounded=True, **options) - alone
    assert (moved <= term).all()
    # Where a value of g may be one of two, the allowance is that of the lower, whose d is up to `alone` away.
    assert (term <= 2.0**-8 * (np.abs(d) + 2 * alone) * (1 + 1e-9)).all()


@pytest.mark.parametrize(("algo", "compute"), COMPUTES)
def test_wrong_outputs_do_not_pass(algo, compute, rng):
    """Up before gate, a slot that is left out, the neighbour's expert, one weight for all."""
    stacks = random_stacks(rng, algo, 4, 64, 64)
    x = reference.as_float32(random_x(rng, (12, 64), "bfloat16"))
    weights, ids = random_routing(rng, 12, 2, 4)
    options = {"quant_algo": algo, "compute": compute}

    def refused(y):
        with pytest.raises(AssertionError):
            assert_experts_close(reference.round_to(y, "bfloat16"), x, stacks, weights, ids, **options)

    def layer(own=stacks, w=weights, i=ids):
        return reference.experts_reference(x, own, w, i, **options)

    swapped = {
        name: np.concatenate(np.split(value, 2, axis=1)[::-1], axis=1)
        for name, value in stacks.items()
        if name.startswith("w13") and "pre_quant" not in name
    }
    refused(layer(stacks | swapped))
    refused(layer(w=weights * np.float32([1, 0])))
    refused(layer(i=(ids + 1) % 4))
    refused(layer(w=np.full_like(weights, 0.5)) * 1.01)


@each("gated", [True, False])
@each("algo", ALGOS)
def test_stacks_have_the_shapes_of_checkpoint_params(algo, gated, rng):
    experts, hidden, middle, parts = 3, 160, 96, 2 if gated else 1
    stacks = random_stacks(rng, algo, experts, hidden, middle, gated=gated, bias="bfloat16")
    packed = 2 if "FP4" in algo else 1
    scalar = (experts, parts) if gated else (experts,)
    shapes = {
        "w13_weight": (experts, parts * middle, hidden // packed),
        "w2_weight": (experts, hidden, middle // packed),
        "w13_bias": (experts, parts * middle),
        "w2_bias": (experts, hidden),
    }
    if "FP4" in algo:
        group = 32 if "MXFP4" in algo or algo == "W4A8_NVFP4_FP8" else 16
        shapes["w13_weight_scale"] = (experts, parts * middle, hidden // group)
        shapes["w2_weight_scale"] = (experts, hidden, middle // group)
        if "NVFP4" in algo:
            shapes |= {"w13_weight_scale_2": scalar, "w2_weight_scale_2": (experts,)}
    elif algo == "FP8_PB_WO":
        shapes |= {"w13_weight_scale": (experts, parts, 2), "w2_weight_scale": (experts, 2, 1)}
    elif algo == "FP8":
        shapes |= {"w13_weight_scale": scalar, "w2_weight_scale": (experts,)}
    else:
        shapes |= {"w13_weight_scale": (experts, parts * middle), "w2_weight_scale": (experts, hidden)}
    if algo in WITH_INPUT_SCALES:
        shapes |= {"w13_input_scale": scalar, "w2_input_scale": (experts,)}
    if algo == "NVFP4_AWQ":
        shapes |= {"w13_pre_quant_scale": (experts, hidden), "w2_pre_quant_scale": (experts, middle)}
    assert {name: value.shape for name, value in stacks.items()} == shapes
    assert all(value.flags.c_contiguous for value in stacks.values())
    if gated and "MXFP4" not in algo:
        name = "w13_weight_scale_2" if "NVFP4" in algo else "w13_weight_scale"
        gate, up = np.split(stacks[name], 2, axis=1)
        assert (gate != up).all()


def test_missing_input_scales_leave_one(rng):
    for share in (0.5, 1.0):
        stacks = random_stacks(rng, "NVFP4", 9, 32, 32, missing_input_scales=share)
        for name in ("w13_input_scale", "w2_input_scale"):
            known = ~np.isnan(stacks[name])
            assert known.any()
            assert share < 1 or known.sum() == 1
    assert "w2_input_scale" not in random_stacks(rng, "FP8", 2, 32, 32, input_scales=False)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings_are_what_they_are_called(kind, rng):
    weights, ids = random_routing(rng, 400, 4, 16, kind, "int64")
    assert (weights.dtype, ids.dtype) == (np.float32, np.int64)
    assert weights.shape == ids.shape == (400, 4)
    here = (ids >= 0) & (ids < 16)
    counts = np.bincount(ids[here], minlength=16)
    repeated = (np.diff(np.sort(ids, axis=1)) == 0).any()
    assert repeated == (kind in ("duplicates", "few", "hostile"))
    assert here.all() == (kind != "hostile")
    assert np.isfinite(weights[here]).all()
    if kind == "skewed":
        assert counts[:4].min() > 3 * counts[-4:].max()
    if kind == "one":
        assert counts.max() == 400
        assert len(np.unique(ids[:, 0])) == 1
    if kind == "few":
        assert (counts == 0).sum() == 12
    if kind == "hostile":
        assert {np.iinfo(np.int64).min, np.iinfo(np.int64).max, -1, 16} <= set(ids[~here].tolist())
        assert np.isnan(weights[~here]).any()
    weights, ids = random_routing(rng, 0, 2, 4, kind)
    assert weights.shape == ids.shape == (0, 2)


def test_expert_maps_have_every_local_expert_once(rng):
    expert_map = random_expert_map(rng, 20, 7)
    assert expert_map.dtype == np.int32
    assert sorted(expert_map[expert_map >= 0]) == list(range(7))
    assert (expert_map == -1).sum() == 13

"""Experts of several devices, run in turn on one: their sums are those of the layer as a whole.

Experts can be shared out (each share has some of them, and slots of others count nothing) or each expert's
intermediate columns can (each share has some rows of gate and up, and those columns of W2). Shares add to one
`out`. When the bits are those of the whole:

* **Shared experts** compute the same d of a slot as the whole, since a slot's expert has the same rows in
  both; what may differ is the order in which y adds them up. Each share adds its slots in their order to what
  `out` holds, so with outputs of float32, and the slots of each token in the order of the shares, the sums
  are one chain of the same additions: the same bits. Outputs of 16 bits are rounded once a share; where all
  slots of a token are of one share, others add nothing, and rounding twice changes nothing: the same bits.
* **Shared columns** split the sum over intermediate columns, which floating-point addition does not survive:
  the same bits only where all products and sums are exact. Otherwise the difference is that of a float32 sum.
  A scale found from a row of g (by token) is found from a share's part of it. Codes of g then differ as those
  of another layer would, and each share is compared with what is meant by it instead.
"""

from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod, reference

from .linear_cases import random_x
from .moe_calls import as_values, check, options_of, prepared, run
from .moe_cases import ALGOS, COMPUTES, random_routing, random_stacks
from .moe_code_cases import CODED, quantized, run_codes

EXPERTS, HIDDEN, INNER, TOP_K, SHARES = 12, 96, 256, 4, 3


@pytest.fixture(scope="session")
def device() -> str:
    """Device of the layers of a test; `cuda/test_moe_shares_cuda.py` has another."""
    return "cpu"


def expert_share(
    stacks: dict[str, np.ndarray], share: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The stacks of some experts, and the map that tells their numbers."""
    expert_map = np.full(EXPERTS, -1, np.int32)
    expert_map[share] = np.arange(len(share))
    return {name: stack[share] for name, stack in stacks.items()}, expert_map


def unify(stacks: dict[str, np.ndarray]) -> None:
    """One input scale for all experts: FP8 has one of the layer, which a share alone would find otherwise."""
    for name in ("w13_input_scale", "w2_input_scale"):
        if name in stacks:
            stacks[name][...] = np.nanmax(stacks[name])


def run_expert_shares(
    algo: str, stacks: dict[str, np.ndarray], order: np.ndarray, inputs: Any, **options: Any
) -> np.ndarray:
    """y of shares that add to each other, the first one beginning."""
    x, weights, ids = inputs
    out = None
    for share in np.split(order, SHARES):
        own, expert_map = expert_share(stacks, share)
        method = MoEMethod(
            algo, len(share), HIDDEN, INNER, top_k=TOP_K, global_num_experts=EXPERTS, **options
        )
        into = {} if out is None else {"out": out, "accumulate": True}
        out = run(method, prepared(method, own), x, weights, ids, expert_map=expert_map, **into)
    assert out is not None
    return out


def in_order(ids: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Slots of each token in the order of the shares that have them."""
    place = np.empty(EXPERTS, np.int64)
    place[order] = np.arange(EXPERTS)
    return np.take_along_axis(ids, np.argsort(place[ids], axis=1, kind="stable"), axis=1)


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_shares_of_experts_add_up_bit_by_bit(rng, device, algo, compute):
    """Float32 outputs, slots in the order of the shares."""
    options: dict[str, Any] = {"dtype": "float32", "compute": compute, "device": device}
    stacks = random_stacks(rng, algo, EXPERTS, HIDDEN, INNER, bias="float32")
    unify(stacks)
    order = rng.permutation(EXPERTS)
    whole = MoEMethod(algo, EXPERTS, HIDDEN, INNER, top_k=TOP_K, **options)
    for tokens in (1, 40):
        x = random_x(rng, (tokens, HIDDEN), "float32")
        weights, ids = random_routing(rng, tokens, TOP_K, EXPERTS)
        ids = in_order(ids, order)
        expected = run(whole, prepared(whole, stacks), x, weights, ids)
        y = run_expert_shares(algo, stacks, order, (x, weights, ids), **options)
        assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algo", ALGOS)
def test_tokens_of_one_share_add_up_bit_by_bit(rng, device, algo, dtype):
    """Outputs of 16 bits, all slots of a token in one share, as routers that choose groups first have it."""
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    stacks = random_stacks(rng, algo, EXPERTS, HIDDEN, INNER)
    unify(stacks)
    order = rng.permutation(EXPERTS)
    tokens, each = 40, EXPERTS // SHARES
    groups = order.reshape(SHARES, each)[rng.integers(SHARES, size=tokens)]
    ids = rng.permuted(groups, axis=1)[:, :TOP_K].astype(np.int32)
    weights, _ = random_routing(rng, tokens, TOP_K, EXPERTS)
    x = random_x(rng, (tokens, HIDDEN), dtype)
    whole = MoEMethod(algo, EXPERTS, HIDDEN, INNER, top_k=TOP_K, **options)
    expected = run(whole, prepared(whole, stacks), x, weights, ids)
    y = run_expert_shares(algo, stacks, order, (x, weights, ids), **options)
    assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("algo", ALGOS)
def test_shares_of_experts_in_any_order(rng, device, algo):
    """Only the order of float32 sums of top_k terms differs."""
    options: dict[str, Any] = {"dtype": "float32", "device": device}
    stacks = random_stacks(rng, algo, EXPERTS, HIDDEN, INNER)
    unify(stacks)
    x = random_x(rng, (40, HIDDEN), "float32")
    weights, ids = random_routing(rng, 40, TOP_K, EXPERTS)
    whole = MoEMethod(algo, EXPERTS, HIDDEN, INNER, top_k=TOP_K, **options)
    expected = run(whole, prepared(whole, stacks), x, weights, ids)
    y = run_expert_shares(algo, stacks, rng.permutation(EXPERTS), (x, weights, ids), **options)
    terms = np.zeros((40, HIDDEN))
    for slot in range(TOP_K):  # a slot alone: the weights of the others are 0
        alone = np.where(np.arange(TOP_K) == slot, weights, np.float32(0))
        terms += np.abs(run(whole, prepared(whole, stacks), x, alone, ids))
    assert (np.abs(y - expected) <= 2 * TOP_K * 2.0**-24 * terms).all()


@pytest.mark.parametrize("algo, compute", CODED)
def test_codes_that_were_sent_to_shares(rng, device, algo, compute):
    """Each share gets the rows of codes that it has experts for, and nothing else: what dispatch does."""
    options: dict[str, Any] = {"dtype": "float32", "compute": compute, "device": device}
    options["quantized_input"] = True
    stacks = random_stacks(rng, algo, EXPERTS, HIDDEN, INNER)
    unify(stacks)
    order = rng.permutation(EXPERTS)
    whole = MoEMethod(algo, EXPERTS, HIDDEN, INNER, top_k=TOP_K, **options)
    x = random_x(rng, (30, HIDDEN), "float32")
    weights, ids = random_routing(rng, 30, TOP_K, EXPERTS)
    codes, scale = quantized(whole, stacks, x)
    expected = run_codes(whole, prepared(whole, stacks), codes, scale, weights, ids)
    y = np.zeros((30, HIDDEN))
    for share in np.split(order, SHARES):
        own, expert_map = expert_share(stacks, share)
        method = MoEMethod(
            algo, len(share), HIDDEN, INNER, top_k=TOP_K, global_num_experts=EXPERTS, **options
        )
        sent = np.flatnonzero((expert_map[ids] >= 0).any(axis=1))
        part = None if scale is None else scale[sent]
        y[sent] += run_codes(
            method, prepared(method, own), codes[sent], part, weights[sent], ids[sent], expert_map=expert_map
        )
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# ---- shares of intermediate columns ----


def column_share(stacks: dict[str, np.ndarray], share: int, shares: int) -> dict[str, np.ndarray]:
    """Some rows of gate and of up, and those columns of W2, of every expert.

    The bias of W2 is the first share's: it is added once.
    """
    own = {}
    for name, stack in stacks.items():
        stack = np.asarray(stack)
        if name.startswith("w13_"):
            rows = stack.shape[1] if stack.ndim > 1 else 0
            by_row = rows > 2 and name != "w13_pre_quant_scale"
            halves = np.split(stack, 2, axis=1) if by_row else []
            parts = [np.split(half, shares, axis=1)[share] for half in halves]
            own[name] = np.concatenate(parts, axis=1) if by_row else stack
        elif name == "w2_bias":
            own[name] = stack if share == 0 else np.zeros_like(stack)
        elif name == "w2_pre_quant_scale" or (stack.ndim == 3 and stack.shape[2] > 1):
            own[name] = np.split(stack, shares, axis=-1)[share]
        else:
            own[name] = stack
    return own


def run_column_shares(
    algo: str, stacks: dict[str, np.ndarray], shares: int, inputs: Any, **options: Any
) -> np.ndarray:
    """y of shares that add to each other."""
    out = None
    for share in range(shares):
        method = MoEMethod(algo, EXPERTS, HIDDEN, INNER // shares, top_k=TOP_K, **options)
        own = column_share(stacks, share, shares)
        into = {} if out is None else {"out": out, "accumulate": True}
        out = run(method, prepared(method, own), *inputs, **into)
    assert out is not None
    return out


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_shares_of_columns_are_what_they_mean(rng, device, algo, compute):
    """Each share is a layer of its own, and their sum is the whole but for the codes of g."""
    options: dict[str, Any] = {"dtype": "float32", "compute": compute, "device": device}
    stacks = random_stacks(rng, algo, EXPERTS, HIDDEN, INNER, bias="float32")
    x = random_x(rng, (12, HIDDEN), "float32")
    weights, ids = random_routing(rng, 12, TOP_K, EXPERTS)
    whole = MoEMethod(algo, EXPERTS, HIDDEN, INNER, top_k=TOP_K, **options)
    expected = run(whole, prepared(whole, stacks), x, weights, ids)
    y = np.zeros_like(expected)
    for share in range(2):
        method = MoEMethod(algo, EXPERTS, HIDDEN, INNER // 2, top_k=TOP_K, **options)
        own = column_share(stacks, share, 2)
        part = run(method, prepared(method, own), x, weights, ids)
        check(part, method, own, x, weights, ids)
        y += part
    sums = run_column_shares(algo, stacks, 2, (x, weights, ids), **options)
    np.testing.assert_allclose(sums, y, rtol=0, atol=1e-5 * np.abs(y).max())
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    by_token = compute == "fp8" or algo == "FP8_PER_CHANNEL_PER_TOKEN"
    quantized_g = algo in ("FP8", "FP8_PB_WO", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8") or compute == "fp4"
    # Rounding to e4m3 moves a value by 2.6 % in the mean, so two roundings under other scales differ by at
    # most sqrt(2) as much; under the same scales by the codes at whose boundaries a sum lies, one of many.
    assert error <= (0.037 if by_token else 5e-3 if quantized_g else 1e-5)


@pytest.mark.parametrize("algo", ["W4A16_NVFP4", "FP8"])
@pytest.mark.parametrize("shares", [2, 4])
def test_exact_sums_of_columns_add_up_bit_by_bit(rng, device, algo, shares):
    """Small integers and powers of two, with relu: no product and no sum is rounded, in whichever order."""
    options: dict[str, Any] = {"dtype": "float32", "device": device, "gated": False, "activation": "relu2"}
    w13 = rng.integers(-1, 2, (EXPERTS, INNER, HIDDEN)).astype(np.float32)
    w2 = rng.integers(-1, 2, (EXPERTS, HIDDEN, INNER)).astype(np.float32)
    stacks = {}
    for name, values in (("w13", w13), ("w2", w2)):
        if algo == "FP8":
            stacks[f"{name}_weight"] = reference.encode(values, "e4m3")
            stacks[f"{name}_weight_scale"] = np.ones(EXPERTS, np.float32)
            stacks[f"{name}_input_scale"] = np.ones(EXPERTS, np.float32)
        else:
            stacks[f"{name}_weight"] = reference.encode(values, "e2m1")
            ones = np.ones((*values.shape[:2], values.shape[2] // 16), np.float32)
            stacks[f"{name}_weight_scale"] = reference.encode(ones, "e4m3")
            stacks[f"{name}_weight_scale_2"] = np.ones(EXPERTS, np.float32)
    x = (rng.integers(0, 2, (12, HIDDEN)) * (rng.random((12, HIDDEN)) < 0.1)).astype(np.float32)
    _, ids = random_routing(rng, 12, TOP_K, EXPERTS)
    weights = np.exp2(rng.integers(-2, 2, ids.shape)).astype(np.float32)
    whole = MoEMethod(algo, EXPERTS, HIDDEN, INNER, top_k=TOP_K, **options)
    expected = run(whole, prepared(whole, stacks), x, weights, ids)
    meant = reference.experts_reference(x, stacks, weights, ids, **options_of(whole))
    np.testing.assert_array_equal(expected, meant)
    assert len(np.unique(expected)) > 50
    own_shares = []
    out = np.zeros_like(expected)
    for share in range(shares):
        width = INNER // shares
        rows = slice(share * width, (share + 1) * width)
        own = dict(stacks)
        own["w13_weight"] = stacks["w13_weight"][:, rows]
        packed = 1 if algo == "FP8" else 2
        own["w2_weight"] = stacks["w2_weight"][..., rows.start // packed : rows.stop // packed]
        if algo != "FP8":
            own["w13_weight_scale"] = stacks["w13_weight_scale"][:, rows]
            own["w2_weight_scale"] = stacks["w2_weight_scale"][..., rows.start // 16 : rows.stop // 16]
        own_shares.append(own)
    for share in rng.permutation(shares):
        method = MoEMethod(algo, EXPERTS, HIDDEN, INNER // shares, top_k=TOP_K, **options)
        own = {name: np.ascontiguousarray(stack) for name, stack in own_shares[share].items()}
        run(method, prepared(method, own), x, weights, ids, out=out, accumulate=True)
    assert out.tobytes() == expected.tobytes()


def test_options_of_the_reference_know_shares(rng):
    """The reference of a share is what the whole has of it."""
    stacks = random_stacks(rng, "NVFP4", EXPERTS, HIDDEN, INNER)
    x = random_x(rng, (9, HIDDEN), "bfloat16")
    weights, ids = random_routing(rng, 9, TOP_K, EXPERTS)
    method = MoEMethod("NVFP4", EXPERTS, HIDDEN, INNER, top_k=TOP_K)
    values = as_values(x, "bfloat16")
    whole = reference.experts_reference(values, stacks, weights, ids, **options_of(method))
    total = np.zeros_like(whole)
    for share in np.split(np.arange(EXPERTS), SHARES):
        own, expert_map = expert_share(stacks, share)
        total += reference.experts_reference(
            values, own, weights, ids, **options_of(method), expert_map=expert_map
        )
    np.testing.assert_allclose(total, whole, rtol=1e-12, atol=1e-12 * np.abs(whole).max())

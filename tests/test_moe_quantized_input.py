"""Experts whose x is codes already, with the scales beside them: what engines send from device to device."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod, UnsupportedQuantization, ops, reference

from .linear_cases import random_x
from .moe_calls import as_values, prepared, run
from .moe_cases import random_expert_map, random_routing, random_stacks
from .moe_code_cases import CODED, check_codes, input_scale_of, quantized, run_codes, scheme_of

DTYPES = ("bfloat16", "float16", "float32")


@pytest.fixture(scope="session")
def device() -> str:
    """Device of the layers of a test; `cuda/test_moe_quantized_input_cuda.py` has another."""
    return "cpu"


def both(algo: str, compute: str, *sizes: int, **options: Any) -> tuple[MoEMethod, MoEMethod]:
    """A layer of codes, and one that quantizes by itself."""
    coded = MoEMethod(algo, *sizes, compute=compute, quantized_input=True, **options)
    return coded, MoEMethod(algo, *sizes, compute=compute, **options)


def stacks_of(rng: Any, algo: str, compute: str, *sizes: int, **options: Any) -> dict[str, np.ndarray]:
    """Random stacks; of "fp4" with one scale of w13, so that a layer without codes has it, too."""
    stacks = random_stacks(rng, algo, *sizes, **options)
    if compute == "fp4":
        stacks["w13_input_scale"][...] = np.nanmax(stacks["w13_input_scale"])
    return stacks


def routing_with_gaps(rng: Any, tokens: int, top_k: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Some slots count nothing; weights of one sign, so that no sum is much smaller than its terms."""
    weights, ids = random_routing(rng, tokens, top_k, experts, "skewed")
    nothing = rng.random(ids.shape) < 0.2
    nothing[:, 0] = False
    return np.where(nothing, np.float32(np.nan), weights), np.where(nothing, np.int32(-1), ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algo, compute", CODED)
def test_codes_give_the_bits_of_what_they_were_made_from(rng, device, algo, compute, dtype):
    """Outputs of either kind are what the reference says, with biases and slots that count nothing."""
    sizes = 4, 160, 64
    coded, plain = both(algo, compute, *sizes, top_k=3, dtype=dtype, device=device)
    stacks = stacks_of(rng, algo, compute, *sizes, bias="float32")
    params, own = prepared(coded, stacks), prepared(plain, stacks)
    for tokens in (1, 70):
        x = random_x(rng, (tokens, 160), dtype)
        weights, ids = routing_with_gaps(rng, tokens, 3, 4)
        codes, scale = quantized(coded, stacks, as_values(x, dtype))
        y = run_codes(coded, params, codes, scale, weights, ids)
        check_codes(y, coded, stacks, codes, scale, weights, ids)
        if plain.backend_for(tokens) == coded.backend_for(tokens):
            assert y.tobytes() == run(plain, own, x, weights, ids).tobytes()


@pytest.mark.parametrize("algo, compute", CODED)
def test_scales_of_others(rng, device, algo, compute):
    """Scales need not be those that moqext would find: here they are powers of two above them."""
    if scheme_of(MoEMethod(algo, 4, 288, 64, top_k=2, compute=compute)) == "fp8_tensor":
        return
    coded, _ = both(algo, compute, 4, 288, 64, top_k=2, dtype="float32", device=device)
    stacks = stacks_of(rng, algo, compute, 4, 288, 64)
    x = random_x(rng, (9, 288), "float32")
    weights, ids = random_routing(rng, 9, 2, 4)
    codes, scale = quantized(coded, stacks, x)
    if compute == "fp4":
        codes = rng.integers(0, 256, codes.shape, dtype=np.uint8)
        scale = rng.integers(0, 127, scale.shape, dtype=np.uint8)
    else:
        scale = np.exp2(np.ceil(np.log2(scale))).astype(np.float32)
        codes = rng.integers(0, 127, codes.shape, dtype=np.uint8) | rng.choice([0, 128], codes.shape)
        codes = codes.astype(np.uint8)
    y = run_codes(coded, prepared(coded, stacks), codes, scale, weights, ids)
    check_codes(y, coded, stacks, codes, scale, weights, ids)


@pytest.mark.parametrize("algo, compute", CODED)
def test_what_ops_quantize_goes_in(rng, algo, compute):
    coded, plain = both(algo, compute, 4, 160, 64, top_k=2, dtype="float32")
    stacks = stacks_of(rng, algo, compute, 4, 160, 64)
    params = prepared(coded, stacks)
    x = random_x(rng, (5, 160), "float32")
    weights, ids = random_routing(rng, 5, 2, 4)
    scheme = scheme_of(coded)
    given = scheme in ("fp8_tensor", "nvfp4")
    made = ops.quantize(x, scheme, scale=float(params["w13_input_scale"].flat[0]) if given else None)
    scale = None if scheme == "fp8_tensor" else made[1]
    y = coded(made[0], params, weights, ids, x_scale=scale)
    np.testing.assert_array_equal(y, plain(x, prepared(plain, stacks), weights, ids))


@pytest.mark.parametrize("hidden", [17, 40, 130, 560])
def test_rows_of_any_length(rng, device, hidden):
    """Rows that end within a vector, and groups that end within 128 columns."""
    for algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"):
        coded, _ = both(algo, "exact", 3, hidden, 48, top_k=2, dtype="float32", device=device)
        stacks = random_stacks(rng, algo, 3, hidden, 48)
        x = random_x(rng, (19, hidden), "float32")
        weights, ids = random_routing(rng, 19, 2, 3)
        codes, scale = quantized(coded, stacks, x)
        y = run_codes(coded, prepared(coded, stacks), codes, scale, weights, ids)
        check_codes(y, coded, stacks, codes, scale, weights, ids)


def test_rows_of_pairs_of_any_length(rng, device):
    for hidden in (16, 48, 80, 560):
        coded, _ = both("NVFP4", "fp4", 3, hidden, 48, top_k=2, dtype="float32", device=device)
        stacks = stacks_of(rng, "NVFP4", "fp4", 3, hidden, 48)
        x = random_x(rng, (19, hidden), "float32")
        weights, ids = random_routing(rng, 19, 2, 3)
        codes, scale = quantized(coded, stacks, x)
        y = run_codes(coded, prepared(coded, stacks), codes, scale, weights, ids)
        check_codes(y, coded, stacks, codes, scale, weights, ids)


def test_a_map_and_sums_that_go_on(rng, device):
    coded, _ = both(
        "FP8_PB_WO", "exact", 5, 256, 64, top_k=3, dtype="float32", device=device, global_num_experts=16
    )
    stacks = random_stacks(rng, "FP8_PB_WO", 5, 256, 64)
    params = prepared(coded, stacks)
    expert_map = random_expert_map(rng, 16, 5)
    x = random_x(rng, (40, 256), "float32")
    weights, ids = routing_with_gaps(rng, 40, 3, 16)
    codes, scale = quantized(coded, stacks, x)
    y = run_codes(coded, params, codes, scale, weights, ids, expert_map=expert_map)
    options = {"expert_map": expert_map, "global_num_experts": 16}
    check_codes(y, coded, stacks, codes, scale, weights, ids, **options)


def test_every_code_is_taken_for_its_value(rng, device):
    """Code by code, NaN too, through an expert that passes one column on: relu2 of it."""
    coded, _ = both(
        "FP8", "exact", 1, 256, 16, top_k=1, dtype="float32", activation="relu2", gated=False, device=device
    )
    stacks = random_stacks(rng, "FP8", 1, 256, 16, gated=False)
    stacks["w13_weight"] = np.full((1, 16, 256), 0x38, np.uint8)
    stacks["w2_weight"] = np.full((1, 256, 16), 0x38, np.uint8)
    stacks |= {f"{name}_weight_scale": np.ones(1, np.float32) for name in ("w13", "w2")}
    stacks["w2_input_scale"] = np.ones(1, np.float32)
    codes = np.zeros((256, 256), np.uint8)
    np.fill_diagonal(codes, np.arange(256))
    ones, zeros = np.ones((256, 1), np.float32), np.zeros((256, 1), np.int32)
    y = run_codes(coded, prepared(coded, stacks), codes, None, ones, zeros)[:, 0]
    u = reference.decode(np.arange(256, dtype=np.uint8), "e4m3") * input_scale_of(coded, stacks)
    g = reference.quantize_fp8_static(np.square(np.maximum(u, 0)).astype(np.float32), np.float32(1))
    np.testing.assert_array_equal(y, 16 * reference.decode(g, "e4m3"))


@pytest.mark.parametrize("algo, compute", CODED)
def test_a_nan_stays_in_its_row(rng, device, algo, compute):
    coded, _ = both(algo, compute, 4, 160, 64, top_k=2, dtype="float32", device=device)
    stacks = stacks_of(rng, algo, compute, 4, 160, 64)
    params = prepared(coded, stacks)
    x = random_x(rng, (6, 160), "float32")
    weights, ids = random_routing(rng, 6, 2, 4)
    codes, scale = quantized(coded, stacks, x)
    expected = run_codes(coded, params, codes, scale, weights, ids)
    places = [(codes, 0x7F)] if compute != "fp4" else [(scale, 0x7F)]
    places += [(scale, np.nan)] if scale is not None and compute != "fp4" else []
    for tensor, nan in places:
        before = tensor[2, 0]
        tensor[2, 0] = nan
        y = run_codes(coded, params, codes, scale, weights, ids)
        tensor[2, 0] = before
        assert np.isnan(y[2]).all()
        np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(expected, 2, 0))


def test_strides_and_leading_dimensions(rng):
    for algo, compute in CODED:
        coded, _ = both(algo, compute, 4, 160, 64, top_k=2, dtype="float32")
        stacks = stacks_of(rng, algo, compute, 4, 160, 64)
        params = prepared(coded, stacks)
        codes, scale = quantized(coded, stacks, random_x(rng, (6, 160), "float32"))
        weights, ids = random_routing(rng, 6, 2, 4)
        expected = coded(codes, params, weights, ids, x_scale=scale)
        apart = np.full((6, 3 * codes.shape[1]), 0x38, np.uint8)[:, 1::3]
        apart[...] = codes
        columns = None if scale is None else np.asfortranarray(scale)
        assert coded(apart, params, weights, ids, x_scale=columns).tobytes() == expected.tobytes()
        folded = [None if t is None else t.reshape(2, 3, -1) for t in (codes, weights, ids, scale)]
        y = coded(folded[0], params, folded[1], folded[2], x_scale=folded[3])
        assert y.shape == (2, 3, 160)
        assert y.tobytes() == expected.tobytes()


def test_no_tokens():
    method = MoEMethod("FP8_PB_WO", 4, 256, 64, top_k=2, quantized_input=True)
    rng = np.random.default_rng(0)
    params = prepared(method, random_stacks(rng, "FP8_PB_WO", 4, 256, 64))
    slots = np.empty((0, 2), np.float32), np.empty((0, 2), np.int32)
    y = method(np.empty((0, 256), np.uint8), params, *slots, x_scale=np.empty((0, 2), np.float32))
    assert y.shape == (0, 256)


# ---- what is refused ----


@pytest.mark.parametrize(
    "algo, options, text",
    [
        ("NVFP4", {}, 'NVFP4 with compute "exact" multiplies them as they are'),
        ("W4A16_NVFP4", {}, "multiplies them as they are"),
        ("NVFP4_AWQ", {"compute": "fp8"}, "by their own pre_quant_scale before it is quantized"),
        ("NVFP4_AWQ", {"compute": "fp4"}, "by their own pre_quant_scale before it is quantized"),
    ],
)
def test_layers_without_codes_are_refused(algo, options, text):
    with pytest.raises(UnsupportedQuantization, match=f"quantized_input: .*{text}"):
        MoEMethod(algo, 4, 128, 64, top_k=2, quantized_input=True, **options)


@pytest.mark.parametrize("algo, compute", CODED)
def test_values_and_wrong_scales_are_refused(rng, algo, compute):
    coded, plain = both(algo, compute, 4, 160, 64, top_k=2, dtype="float32")
    stacks = stacks_of(rng, algo, compute, 4, 160, 64)
    params = prepared(coded, stacks)
    x = random_x(rng, (3, 160), "float32")
    weights, ids = random_routing(rng, 3, 2, 4)
    codes, scale = quantized(coded, stacks, x)
    kind = "float4_e2m1fn_x2" if compute == "fp4" else "float8_e4m3fn"
    cases = [
        ({"x": x}, TypeError, f'x: expected codes of {kind}, got float32: .*"{scheme_of(coded)}"'),
        ({"x": codes[:, :-1]}, ValueError, rf"x: expected shape \[..., {codes.shape[1]}\]"),
    ]
    if scale is None:
        given = np.ones((3, 1), np.float32)
        cases += [({"x_scale": given}, ValueError, "x_scale: expected None, x was quantized with w13_input")]
    else:
        other = np.zeros(scale.shape, np.float16)
        cases += [
            ({"x_scale": None}, ValueError, r"x_scale: missing, of float.* beside the codes of x"),
            ({"x_scale": scale[:2]}, ValueError, r"x_scale: expected shape \[3, "),
            ({"x_scale": np.hstack([scale, scale])}, ValueError, r"x_scale: expected shape \[3, "),
            ({"x_scale": other}, TypeError, "x_scale: expected float"),
        ]
    good = {"x": codes, "params": params, "topk_weights": weights, "topk_ids": ids, "x_scale": scale}
    for change, error, message in cases:
        out = np.full((3, 160), np.nan, np.float32)
        with pytest.raises(error, match=message):
            coded(**(good | {"out": out} | change))
        assert np.isnan(out).all()
    with pytest.raises(ValueError, match="x_scale: expected None, the layer was made without"):
        plain(x, prepared(plain, stacks), weights, ids, x_scale=np.ones((3, 1), np.float32))


def test_router_weights_cannot_multiply_codes(rng):
    method = MoEMethod("FP8", 4, 64, 32, top_k=1, dtype="float32", quantized_input=True)
    stacks = random_stacks(rng, "FP8", 4, 64, 32)
    codes, _ = quantized(method, stacks, random_x(rng, (3, 64), "float32"))
    weights, ids = random_routing(rng, 3, 1, 4)
    with pytest.raises(ValueError, match="apply_router_weight_on_input: codes cannot be multiplied"):
        method(codes, prepared(method, stacks), weights, ids, apply_router_weight_on_input=True)


def test_experts_share_the_largest_scale_of_w13(rng):
    """Experts of "fp4" have scales of their own where they quantize by themselves; w2 keeps them."""
    coded, plain = both("NVFP4", "fp4", 4, 64, 32, top_k=2)
    stacks = random_stacks(rng, "NVFP4", 4, 64, 32)
    largest = np.nanmax(stacks["w13_input_scale"])
    shared, own = prepared(coded, stacks), prepared(plain, stacks)
    assert (shared["w13_input_scale"] == largest).all()
    assert (own["w13_input_scale"] != largest).any()
    np.testing.assert_array_equal(shared["w2_input_scale"], own["w2_input_scale"])


def test_the_option_is_kept_by_copies_and_told():
    method = MoEMethod("FP8", 2, 16, 16, top_k=1, quantized_input=True)
    for again in (copy.copy(method), pickle.loads(pickle.dumps(method))):
        assert again.quantized_input
    assert not MoEMethod("FP8", 2, 16, 16, top_k=1).quantized_input


def test_tuning_measures_codes(rng):
    for algo, compute in CODED:
        coded, _ = both(algo, compute, 4, 64, 32, top_k=2)
        params = prepared(coded, random_stacks(rng, algo, 4, 64, 32))
        assert coded.tune([3], params)[0].chosen

"""MoEMethod against the float64 reference, on every option, and on random and hostile routing."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqext import _C, LinearMethod, MoEMethod, UnsupportedQuantization, set_num_threads

from .linear_cases import poisoned, random_x
from .moe_calls import as_values, call, check, moved_inputs, options_of, prepared, run
from .moe_cases import (
    ALGOS,
    COMPUTES,
    ROUTINGS,
    random_expert_map,
    random_routing,
    random_stacks,
)
from .work import each


@pytest.fixture(scope="session")
def device():
    """Device of the layers of a test; `cuda/test_moe_cuda.py` runs tests that ask for it elsewhere."""
    return "cpu"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_matches_reference(rng, device, algo, compute, dtype):
    method = MoEMethod(algo, 6, 160, 96, top_k=3, dtype=dtype, compute=compute, device=device)
    stacks = random_stacks(rng, algo, 6, 160, 96)
    x = random_x(rng, (23, 160), dtype)
    weights, ids = random_routing(rng, 23, 3, 6)
    y = call(method, stacks, x, weights, ids)
    check(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("ids_dtype", ["int32", "int64"])
def test_routing(rng, device, kind, ids_dtype):
    method = MoEMethod("NVFP4", 9, 64, 48, top_k=4, device=device)
    stacks = random_stacks(rng, "NVFP4", 9, 64, 48)
    for tokens in (1, 2, 70):
        x = random_x(rng, (tokens, 64), "bfloat16")
        weights, ids = random_routing(rng, tokens, 4, 9, kind, ids_dtype)
        y = call(method, stacks, x, weights, ids)
        check(y, method, stacks, x, weights, ids)


ACTIVATIONS = [
    ("silu", True, {}),
    ("silu", True, {"limit": 0.75}),
    ("silu", True, {"alpha": 1.3, "beta": 0.5, "limit": 2.0}),
    ("silu", False, {}),
    ("gelu", True, {}),
    ("gelu", False, {}),
    ("gelu_tanh", True, {}),
    ("gelu_tanh", False, {}),
    ("relu2", True, {}),
    ("relu2", False, {}),
    ("swigluoai", True, {}),
    ("swigluoai", True, {"limit": 1.0}),
]
GATED = [activation for activation in ACTIVATIONS if activation[1]]


@pytest.mark.parametrize(
    "activation, gated, numbers, interleaved, bias",
    [(*activation, False, "float32") for activation in ACTIVATIONS]
    + [(*activation, True, "bfloat16") for activation in GATED]
    + [("silu", True, {}, True, None), ("silu", True, {}, False, None), ("gelu", False, {}, False, None)],
)
@pytest.mark.parametrize("algo", ["NVFP4", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_activations(rng, device, algo, activation, gated, numbers, interleaved, bias):
    method = MoEMethod(
        algo,
        3,
        64,
        32,
        top_k=2,
        activation=activation,
        gated=gated,
        interleaved=interleaved,
        **numbers,
        device=device,
    )
    stacks = random_stacks(rng, algo, 3, 64, 32, gated=gated, interleaved=interleaved, bias=bias)
    x = random_x(rng, (11, 64), "bfloat16")
    weights, ids = random_routing(rng, 11, 2, 3)
    y = call(method, stacks, x, weights, ids)
    check(y, method, stacks, x, weights, ids)


def test_rows_that_take_turns_need_a_gate(device):
    with pytest.raises(ValueError, match="interleaved: rows of gate and up cannot take turns"):
        MoEMethod("NVFP4", 3, 64, 32, top_k=2, gated=False, interleaved=True, device=device)


@pytest.mark.parametrize("algo", [algo for algo in ALGOS if algo != "FP8_PB_WO"])
def test_interleaved_rows_are_those_of_halves(rng, algo):
    stacks = random_stacks(rng, algo, 4, 64, 32, interleaved=True, bias="float32")
    halves = dict(stacks)
    for name, value in stacks.items():
        if name.startswith("w13_") and value.shape[1:2] == (64,) and not name.endswith("pre_quant_scale"):
            halves[name] = np.concatenate([value[:, 0::2], value[:, 1::2]], axis=1)
    one = MoEMethod(algo, 4, 64, 32, top_k=2, interleaved=True).prepare(stacks)
    two = MoEMethod(algo, 4, 64, 32, top_k=2).prepare(halves)
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(two[name]))


@settings(max_examples=60)
@given(
    st.sampled_from(COMPUTES),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(0, 90),
    st.booleans(),
    st.sampled_from(["bfloat16", "float32"]),
    st.integers(0, 2**32 - 1),
)
def test_shapes(device, way, experts, groups_in, groups_out, top_k, tokens, gated, dtype, seed):
    algo, compute = way
    rng = np.random.default_rng(seed)
    hidden, inner = 32 * groups_in, 32 * groups_out
    method = MoEMethod(
        algo, experts, hidden, inner, top_k=top_k, gated=gated, dtype=dtype, compute=compute, device=device
    )
    stacks = random_stacks(rng, algo, experts, hidden, inner, gated=gated)
    x = random_x(rng, (tokens, hidden), dtype)
    weights, ids = random_routing(rng, tokens, top_k, experts, "hostile")
    y = call(method, stacks, x, weights, ids)
    check(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"])
@pytest.mark.parametrize("hidden, inner", [(37, 19), (130, 1), (1, 145), (16, 272)])
def test_sizes_that_are_no_multiple_of_anything(rng, device, algo, hidden, inner):
    method = MoEMethod(algo, 5, hidden, inner, top_k=2, device=device)
    stacks = random_stacks(rng, algo, 5, hidden, inner, bias="float32")
    x = random_x(rng, (29, hidden), "bfloat16")
    weights, ids = random_routing(rng, 29, 2, 5)
    y = call(method, stacks, x, weights, ids)
    check(y, method, stacks, x, weights, ids)


def test_more_slots_than_a_panel(rng, device):
    method = MoEMethod("FP8", 3, 64, 32, top_k=2, dtype="float32", device=device)
    stacks = random_stacks(rng, "FP8", 3, 64, 32)
    x = random_x(rng, (700, 64), "float32")
    weights, ids = random_routing(rng, 700, 2, 3, "one")
    y = call(method, stacks, x, weights, ids)
    check(y, method, stacks, x, weights, ids)


def test_chunks_of_tokens_are_as_one(rng):
    """Thousands of tokens, whose panels go in chunks: each token has the bits that it has among few."""
    method = MoEMethod("NVFP4", 2, 4096, 32, top_k=1)
    stacks = random_stacks(rng, "NVFP4", 2, 4096, 32)
    tokens = 9000  # of 33 kB and more each
    x = random_x(rng, (64, 4096), "bfloat16")[rng.integers(64, size=tokens)]
    weights, ids = random_routing(rng, tokens, 1, 2)
    params = method.prepare(stacks)
    y = method(x, params, weights, ids)
    some = rng.choice(tokens, 64, replace=False)
    check(y[some], method, stacks, x[some], weights[some], ids[some])


# ---------------------------------------------------------------------------------------- options of a call


@pytest.mark.parametrize("algo", ALGOS)
def test_router_weights_on_the_input(rng, device, algo):
    method = MoEMethod(algo, 4, 64, 32, top_k=1, device=device)
    stacks = random_stacks(rng, algo, 4, 64, 32)
    x = random_x(rng, (19, 64), "bfloat16")
    weights, ids = random_routing(rng, 19, 1, 4)
    weights *= rng.uniform(0.1, 1, weights.shape).astype(np.float32)
    y = call(method, stacks, x, weights, ids, apply_router_weight_on_input=True)
    check(y, method, stacks, x, weights, ids, apply_router_weight_on_input=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_results_are_added_to_out(rng, device, dtype):
    method = MoEMethod("NVFP4", 4, 64, 32, top_k=2, dtype=dtype, device=device)
    stacks = random_stacks(rng, "NVFP4", 4, 64, 32)
    x = random_x(rng, (7, 64), dtype)
    before = random_x(rng, (7, 64), dtype)
    weights, ids = random_routing(rng, 7, 2, 4, "hostile")
    y = call(method, stacks, x, weights, ids, out=before.copy(), accumulate=True)
    check(y, method, stacks, x, weights, ids, out=as_values(before, dtype))
    with pytest.raises(ValueError, match="accumulate: expected out="):
        method(*moved_inputs(method, x, prepared(method, stacks), weights, ids), accumulate=True)


def test_shares_of_experts_add_up_to_the_whole(rng, device):
    """Expert parallelism: each share knows its own experts, and the last adds to what the others made."""
    stacks = random_stacks(rng, "NVFP4", 12, 64, 32)
    x = random_x(rng, (31, 64), "float32")
    weights, ids = random_routing(rng, 31, 4, 12)
    whole = call(
        MoEMethod("NVFP4", 12, 64, 32, top_k=4, dtype="float32", device=device), stacks, x, weights, ids
    )
    order, out = rng.permutation(12), np.zeros_like(x)
    for share in np.split(order, 3):
        method = MoEMethod("NVFP4", 4, 64, 32, top_k=4, dtype="float32", global_num_experts=12, device=device)
        expert_map = np.full(12, -1, np.int32)
        expert_map[share] = np.arange(4)
        own = {name: stack[share] for name, stack in stacks.items()}
        call(method, own, x, weights, ids, expert_map=expert_map, out=out, accumulate=True)
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-5 * np.abs(whole).max())


def test_an_expert_map(rng, device):
    method = MoEMethod("FP8", 5, 64, 32, top_k=3, global_num_experts=16, device=device)
    stacks = random_stacks(rng, "FP8", 5, 64, 32)
    expert_map = random_expert_map(rng, 16, 5)
    x = random_x(rng, (40, 64), "bfloat16")
    weights, ids = random_routing(rng, 40, 3, 16, "hostile")
    y = call(method, stacks, x, weights, ids, expert_map=expert_map)
    check(y, method, stacks, x, weights, ids, expert_map=expert_map, global_num_experts=16)
    with pytest.raises(ValueError, match="expert_map: missing, 5 of 16 experts are here"):
        call(method, stacks, x, weights, ids)


def test_no_tokens_and_no_slots_that_count(rng, device):
    method = MoEMethod("NVFP4", 4, 64, 32, top_k=2, device=device)
    params = prepared(method, random_stacks(rng, "NVFP4", 4, 64, 32))
    nothing = np.empty((0, 64), np.uint16), params, np.empty((0, 2), np.float32), np.empty((0, 2), np.int32)
    assert method(*moved_inputs(method, *nothing)).shape == (0, 64)
    x = random_x(rng, (3, 64), "bfloat16")
    y = run(method, params, x, np.full((3, 2), np.nan, np.float32), np.full((3, 2), -1, np.int32))
    assert not np.any(y)


def test_leading_dimensions_and_strides(rng):
    method = MoEMethod("NVFP4", 4, 64, 32, top_k=2, dtype="float32")
    params = method.prepare(random_stacks(rng, "NVFP4", 4, 64, 32))
    x = random_x(rng, (6, 64), "float32")
    weights, ids = random_routing(rng, 6, 2, 4)
    y = method(x, params, weights, ids)
    folded = method(x.reshape(2, 3, 64), params, weights.reshape(2, 3, 2), ids.reshape(2, 3, 2))
    np.testing.assert_array_equal(folded.reshape(6, 64), y)
    wide, wide_weights = np.zeros((6, 130), np.float32), np.zeros((6, 5), np.float32)
    wide[:, 1:129:2], wide_weights[:, 0:4:2] = x, weights
    columns = np.asfortranarray(ids)
    strided = method(wide[:, 1:129:2], params, wide_weights[:, 0:4:2], columns)
    np.testing.assert_array_equal(strided, y)


@pytest.mark.parametrize("algo", ALGOS)
def test_the_number_of_threads_changes_nothing(rng, algo):
    method = MoEMethod(algo, 8, 256, 128, top_k=4)
    params = method.prepare(random_stacks(rng, algo, 8, 256, 128))
    for tokens in (1, 5, 200):
        x = random_x(rng, (tokens, 256), "bfloat16")
        weights, ids = random_routing(rng, tokens, 4, 8, "skewed")
        results = []
        for threads in (1, 2, 5):
            set_num_threads(threads)
            results.append(method(x, params, weights, ids))
        set_num_threads(0)
        assert all(np.array_equal(result, results[0]) for result in results)


def runnable():
    """The kernels that this processor has, as linears have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MOQEXT_KERNEL", raising=False)
        lines = LinearMethod("FP8", 64, [64]).explain().splitlines()
    return {line.split()[0] for line in lines if " no: " not in line}


@pytest.mark.parametrize("kernel", ["cpu:portable", "cpu:avx2", "cpu:avx512", "cpu:avx512bf16", "cpu:amx"])
@pytest.mark.parametrize("algo", ALGOS)
def test_every_kernel(rng, algo, kernel, monkeypatch):
    monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    if kernel not in runnable():
        with pytest.raises(UnsupportedQuantization, match="needs"):
            MoEMethod(algo, 5, 192, 64, top_k=2)
        return
    method = MoEMethod(algo, 5, 192, 64, top_k=2)
    assert method.backend == kernel
    stacks = random_stacks(rng, algo, 5, 192, 64)
    for tokens in (1, 9, 80):
        x = random_x(rng, (tokens, 192), "bfloat16")
        weights, ids = random_routing(rng, tokens, 2, 5, "skewed")
        y = call(method, stacks, x, weights, ids)
        check(y, method, stacks, x, weights, ids)


def test_many_experts_and_slots(rng, device):
    method = MoEMethod("NVFP4", 512, 32, 32, top_k=32, device=device)
    stacks = random_stacks(rng, "NVFP4", 512, 32, 32)
    x = random_x(rng, (20, 32), "bfloat16")
    weights, ids = random_routing(rng, 20, 32, 512)
    y = call(method, stacks, x, weights, ids)
    check(y, method, stacks, x, weights, ids)


def test_a_nan_in_x_stays_in_its_row(rng, device):
    method = MoEMethod("NVFP4", 4, 64, 32, top_k=2, dtype="float32", device=device)
    stacks = random_stacks(rng, "NVFP4", 4, 64, 32)
    x = random_x(rng, (5, 64), "float32")
    x[2, 7] = np.nan
    weights, ids = random_routing(rng, 5, 2, 4)
    y = call(method, stacks, x, weights, ids)
    assert np.isnan(y[2]).all()
    assert np.isfinite(np.delete(y, 2, axis=0)).all()


# ------------------------------------------------------------------------------------------ activation scales


@pytest.mark.parametrize("algo", ["FP8", "W4A8_NVFP4_FP8"])
def test_one_activation_scale_for_a_layer(rng, algo):
    method = MoEMethod(algo, 5, 64, 32, top_k=2)
    stacks = random_stacks(rng, algo, 5, 64, 32)
    prepared = method.prepare(stacks)
    for name in ("w13_input_scale", "w2_input_scale"):
        assert np.unique(prepared[name]) == stacks[name].max()
        assert prepared[name].shape == stacks[name].shape


def test_nvfp4_has_an_activation_scale_for_each_expert(rng):
    method = MoEMethod("NVFP4", 5, 64, 32, top_k=2, compute="fp4")
    stacks = random_stacks(rng, "NVFP4", 5, 64, 32)
    prepared = method.prepare(stacks)
    np.testing.assert_array_equal(prepared["w2_input_scale"], stacks["w2_input_scale"])
    largest = np.repeat(stacks["w13_input_scale"].max(axis=1, keepdims=True), 2, axis=1)
    np.testing.assert_array_equal(prepared["w13_input_scale"], largest)


def test_experts_without_an_activation_scale(rng):
    method = MoEMethod("FP8", 5, 64, 32, top_k=2)
    stacks = random_stacks(rng, "FP8", 5, 64, 32)
    stacks["w2_input_scale"][3] = np.nan
    with pytest.warns(RuntimeWarning, match="w2_input_scale: 1 of 5 experts have none, expert 3 the first"):
        prepared = method.prepare(stacks)
    assert np.unique(prepared["w2_input_scale"]) == np.nanmax(stacks["w2_input_scale"])
    stacks["w2_input_scale"][:] = np.nan
    with pytest.raises(ValueError, match=r"'w2_input_scale'.: missing in every expert, and FP8 with"):
        method.prepare(stacks)
    del stacks["w2_input_scale"]
    with pytest.raises(ValueError, match=r"'w2_input_scale'.: missing in every expert, and FP8 with"):
        method.prepare(stacks)
    stacks["w2_input_scale"] = np.full(5, 0.1, np.float32)
    stacks["w2_input_scale"][2] = -1
    with pytest.raises(ValueError, match=r"w2_input_scale: expected positive .* got -1 in expert 2"):
        method.prepare(stacks)
    unused = MoEMethod("FP8_PB_WO", 5, 64, 32, top_k=2)
    blocks = random_stacks(rng, "FP8_PB_WO", 5, 64, 32)
    extra = {"w13_input_scale": np.ones((5, 2), np.float32), "w2_input_scale": np.ones(5, np.float32)}
    assert unused.prepare(blocks | extra).keys() == unused.prepare(blocks).keys()
    exact = MoEMethod("NVFP4", 5, 64, 32, top_k=2)
    without = random_stacks(rng, "NVFP4", 5, 64, 32, input_scales=False)
    assert "w13_input_scale" not in exact.prepare(without)


# -------------------------------------------------------------------------------------------------- loading


def parts_of(stacks, gated=True):
    """(name, expert, tensor) of a checkpoint with experts one by one, from stacks of halves."""
    for name, stack in stacks.items():
        weight, _, role = name.partition("_")
        for expert, values in enumerate(stack):
            if weight == "w2":
                yield f"down_proj.{role}", expert, values
            elif not gated:
                yield f"up_proj.{role}", expert, values
            elif role == "pre_quant_scale":
                yield f"w1.{role}", expert, values
                yield f"w3.{role}", expert, values
            else:
                gate, up = np.split(values, 2)
                yield f"gate_proj.{role}", expert, gate[0] if gate.shape == (1,) else gate
                yield f"w3.{role}", expert, up


@each("gated", [True, False])
@each("algo", ALGOS)
def test_stacks_are_filled_one_tensor_at_a_time(rng, algo, gated):
    method = MoEMethod(algo, 4, 160, 96, top_k=2, gated=gated, activation="relu2")
    stacks = random_stacks(rng, algo, 4, 160, 96, gated=gated, bias="bfloat16")
    params = method.new_params()
    parts = list(parts_of(stacks, gated))
    for i in rng.permutation(len(parts)):
        method.load(params, *parts[i])
    loaded, whole = method.prepare(params), method.prepare(stacks)
    assert loaded.keys() == whole.keys()
    for name in whole:
        np.testing.assert_array_equal(
            np.asarray(loaded[name]).view(np.uint8), np.asarray(whole[name]).view(np.uint8)
        )


def test_interleaved_stacks_are_filled(rng):
    method = MoEMethod("NVFP4", 3, 64, 32, top_k=2, interleaved=True, activation="swigluoai")
    stacks = random_stacks(rng, "NVFP4", 3, 64, 32, interleaved=True, bias="float32")
    params = method.new_params()
    for name, stack in stacks.items():
        weight, _, role = name.partition("_")
        for expert, values in enumerate(stack):
            if weight == "w2":
                method.load(params, f"down_proj_{role}", expert, values)
            elif values.shape == (2,):
                method.load(params, f"gate_up_proj_{role}", expert, values)
            else:
                method.load(params, f"gate_proj.{role}", expert, values[0::2])
                method.load(params, f"up_proj.{role}", expert, values[1::2])
    loaded, whole = method.prepare(params), method.prepare(stacks)
    for name in whole:
        np.testing.assert_array_equal(np.asarray(loaded[name]), np.asarray(whole[name]))


def test_a_slot_that_was_never_filled_is_named(rng):
    method = MoEMethod("NVFP4", 4, 64, 32, top_k=2)
    stacks = random_stacks(rng, "NVFP4", 4, 64, 32)
    parts = list(parts_of(stacks))
    required = [part for part in parts if "input_scale" not in part[0]]
    for i in rng.choice(len(required), 6, replace=False):
        params = method.new_params()
        for j, part in enumerate(required):
            if j != i:
                method.load(params, *part)
        name, expert, _ = required[i]
        half = ", gate" if name.startswith("gate") else ", up" if name.startswith("w3") else ""
        stack = ("w2_" if name.startswith("down") else "w13_") + name.partition(".")[2]
        with pytest.raises(ValueError, match=f"params: {stack}: expert {expert}{half} was never loaded"):
            method.prepare(params)
    params = method.new_params()
    for part in required:
        method.load(params, *part)
    method.load(params, "w1.bias", 2, np.zeros(32, np.float32))
    with pytest.raises(ValueError, match="w13_bias: expert 0, gate and 6 more was never loaded"):
        method.prepare(params)


def test_adopted_stacks(rng):
    method = MoEMethod("FP8", 3, 64, 32, top_k=2)
    stacks = random_stacks(rng, "FP8", 3, 64, 32)
    own = {name: np.empty_like(stack) for name, stack in stacks.items()}
    params = method.adopt(own)
    for part in parts_of(stacks):
        method.load(params, *part)
    np.testing.assert_array_equal(own["w13_weight"], stacks["w13_weight"])
    with pytest.raises(ValueError, match=r"tensors..w2_weight..: missing"):
        method.adopt({name: own[name] for name in own if name != "w2_weight"})
    with pytest.raises(ValueError, match="'w3_weight' is no parameter of these experts"):
        method.adopt(own | {"w3_weight": own["w2_weight"]})
    with pytest.raises(
        ValueError, match=r"tensors..w2_weight..: expected shape .3, 64, 32., got .64, 3, 32."
    ):
        method.adopt(own | {"w2_weight": own["w2_weight"].reshape(64, 3, 32)})


@pytest.mark.parametrize(
    "name, expert, shape, message",
    [
        ("gate_proj", 3, (32, 64), "expert: expected 0 to 2, got 3"),
        ("gate_proj", -1, (32, 64), "expert: expected 0 to 2, got -1"),
        ("gate_proj", True, (32, 64), "expert: expected 0 to 2, got True"),
        ("q_proj.weight", 0, (32, 64), "name: expected a projection of an expert and a role"),
        ("gate_proj.color", 0, (32, 64), "name: expected a projection of an expert and a role"),
        ("gate_proj.weight", 0, (64, 64), r"gate_proj.weight of expert 0: expected shape .32, 64."),
        ("gate_proj.weight_scale_2", 0, (1,), "'gate_proj.weight_scale_2' has no place in these experts"),
        ("gate_proj.weight_scale", 0, (3,), "gate_proj.weight_scale of expert 0: expected at most 2 values"),
    ],
)
def test_loading_refuses(rng, name, expert, shape, message):
    method = MoEMethod("FP8", 3, 64, 32, top_k=2)
    params = method.new_params()
    with pytest.raises(ValueError, match=message):
        method.load(params, name, expert, np.zeros(shape, np.uint8 if len(shape) == 2 else np.float32))
    assert not any(filled.any() for filled in params.filled.values())
    with pytest.raises(TypeError, match="params: expected what new_params"):
        method.load(dict(params), "w1.weight", 0, np.zeros((32, 64), np.uint8))
    with pytest.raises(TypeError, match=r"w1.weight of expert 0: expected"):
        method.load(params, "w1.weight", 0, np.zeros((32, 64), np.float32))


def test_gate_and_up_have_one_input(rng):
    method = MoEMethod("NVFP4_AWQ", 2, 64, 32, top_k=1)
    params = method.new_params()
    factors = rng.random(64).astype(np.float32)
    method.load(params, "w1.pre_quant_scale", 1, factors)
    method.load(params, "w3.pre_quant_scale", 1, factors)
    with pytest.raises(ValueError, match="gate and up have one input"):
        method.load(params, "w3.pre_quant_scale", 1, factors + 1)


# ---------------------------------------------------------------------------------------- prepared tensors


@each("algo, compute", COMPUTES)
def test_prepared_tensors_are_those_that_were_told(rng, algo, compute):
    method = MoEMethod(algo, 4, 64, 32, top_k=2, compute=compute)
    prepared = method.prepare(random_stacks(rng, algo, 4, 64, 32, bias="float32"))
    specs = method.prepared_params
    assert prepared.keys() == specs.keys()
    for name, tensor in prepared.items():
        assert tensor.shape == specs[name].shape
        assert tensor.shape[0] == 4
        assert tensor.flags["C_CONTIGUOUS"]


@pytest.mark.parametrize("algo", ALGOS)
def test_experts_change_places_as_rows_do(rng, algo):
    """Re-ordering prepared stacks, as load balancing of experts does, re-orders the experts."""
    method = MoEMethod(algo, 6, 64, 32, top_k=2)
    params = method.prepare(random_stacks(rng, algo, 6, 64, 32, bias="float32"))
    x = random_x(rng, (9, 64), "bfloat16")
    weights, ids = random_routing(rng, 9, 2, 6)
    y = method(x, params, weights, ids)
    order = rng.permutation(6)
    moved = {name: np.ascontiguousarray(tensor[order]) for name, tensor in params.items()}
    place = np.argsort(order).astype(np.int32)
    np.testing.assert_array_equal(method(x, moved, weights, place[ids]), y)
    np.testing.assert_array_equal(method(x, moved, weights, ids, place), y)


@pytest.mark.parametrize("algo", ALGOS)
def test_reload_in_place(rng, algo):
    method = MoEMethod(algo, 4, 64, 32, top_k=2)
    params = method.prepare(random_stacks(rng, algo, 4, 64, 32, bias="float32"))
    addresses = {name: tensor.ctypes.data for name, tensor in params.items()}
    other = random_stacks(rng, algo, 4, 64, 32, bias="bfloat16")
    assert method.prepare(other, out=params) is params
    fresh = method.prepare(other)
    for name, tensor in params.items():
        assert tensor.ctypes.data == addresses[name]
        np.testing.assert_array_equal(
            np.asarray(tensor).view(np.uint8), np.asarray(fresh[name]).view(np.uint8)
        )
    without = {name: stack for name, stack in other.items() if not name.endswith("bias")}
    with pytest.raises(ValueError, match=r'out."w13_bias".: params have no w13_bias'):
        method.prepare(without, out=params)


def test_a_damaged_scale_is_named_with_its_stack_and_expert(rng):
    method = MoEMethod("FP8", 4, 64, 32, top_k=2)
    stacks = random_stacks(rng, "FP8", 4, 64, 32)
    stacks["w13_weight_scale"][2, 1] = np.inf
    with pytest.raises(ValueError, match=r"w13_weight_scale: experts.2: expected"):
        method.prepare(stacks)
    with pytest.raises(ValueError, match="'gate' does not belong to experts of FP8"):
        method.prepare(stacks | {"gate": stacks["w2_weight"]})
    with pytest.raises(ValueError, match='params: "w2_weight" is missing'):
        method.prepare(random_stacks(rng, "FP8", 4, 64, 32) | {"w2_weight": None})


# -------------------------------------------------------------------------------------------- what is refused


@each(
    "change, error, message",
    [
        ({"quant_algo": "FP9"}, ValueError, "quant_algo: expected one of"),
        (
            {"quant_algo": "NVFP4_SVD"},
            UnsupportedQuantization,
            "NVFP4_SVD runs as linears, and not as experts",
        ),
        ({"num_experts": 0}, ValueError, "num_experts"),
        (
            {"hidden_size": 40},
            ValueError,
            r"hidden_size \(columns of w13\): expected a multiple of the group",
        ),
        ({"intermediate_size": 40}, ValueError, r"intermediate_size \(columns of w2\): expected a multiple"),
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_k": 33}, ValueError, "top_k"),
        ({"activation": "swish"}, ValueError, "activation: expected .silu"),
        ({"activation": "swigluoai", "gated": False}, ValueError, "swigluoai. needs gated=True"),
        ({"activation": "gelu", "alpha": 1.0}, ValueError, "alpha: is for .silu"),
        ({"activation": "relu2", "limit": 1.0}, ValueError, "limit: is for .silu"),
        ({"limit": -1.0}, ValueError, "limit: expected a positive number"),
        ({"limit": float("nan")}, ValueError, "limit: expected a number"),
        ({"alpha": "x"}, TypeError, "alpha: expected a number"),
        ({"global_num_experts": 3}, ValueError, "global_num_experts: expected num_experts = 4"),
        ({"dtype": "float64"}, ValueError, "dtype: expected"),
        ({"compute": "int8"}, ValueError, "compute: expected"),
    ],
)
def test_descriptions_that_cannot_be(change, error, message):
    description = {
        "quant_algo": "NVFP4",
        "num_experts": 4,
        "hidden_size": 64,
        "intermediate_size": 32,
        "top_k": 2,
    }
    with pytest.raises(error, match=message):
        MoEMethod(**(description | change))


def test_calls_are_refused_before_anything_is_written(rng):
    method = MoEMethod("FP8", 4, 64, 32, top_k=2)
    params = method.prepare(random_stacks(rng, "FP8", 4, 64, 32))
    x = random_x(rng, (3, 64), "bfloat16")
    weights, ids = random_routing(rng, 3, 2, 4)
    good = {"x": x, "params": params, "topk_weights": weights, "topk_ids": ids}
    cases = [
        ({"x": x[:, :32]}, ValueError, r"x: expected shape \[..., 64\]"),
        ({"x": x.astype(np.float32)}, TypeError, "x: expected bfloat16, got float32"),
        ({"topk_weights": weights[:, :1]}, ValueError, r"topk_weights: expected shape \[3, 2\] .top_k is 2."),
        ({"topk_weights": weights[:2]}, ValueError, r"topk_weights: expected shape \[3, 2\]"),
        ({"topk_weights": weights.astype(np.float64)}, TypeError, "topk_weights: expected float32"),
        ({"topk_weights": None}, TypeError, "topk_weights: expected a tensor, got None"),
        ({"topk_ids": ids.astype(np.int16)}, TypeError, "topk_ids: expected int32 or int64, got int16"),
        ({"topk_ids": weights}, TypeError, "topk_ids: expected int32 or int64, got float32"),
        ({"topk_ids": ids[:, :1]}, ValueError, "topk_ids: expected shape"),
        ({"expert_map": np.zeros(3, np.int32)}, ValueError, r"expert_map: expected shape \[4\]"),
        ({"expert_map": np.zeros(4, np.int64)}, TypeError, "expert_map: expected int32"),
        (
            {"expert_map": np.full(4, 4, np.int32)},
            ValueError,
            "expert_map: expected numbers below num_experts",
        ),
        ({"apply_router_weight_on_input": True}, ValueError, "expected top_k = 1, the layer has 2"),
        ({"params": {}}, ValueError, 'params."w13_weight".: missing'),
        ({"params": params | {"w13_gate": x}}, ValueError, "'w13_gate' is no prepared parameter"),
        ({"params": dict(list(params.items())[1:])}, ValueError, 'params."w13_weight".: missing'),
        (
            {"params": {name: value for name, value in params.items() if name != "w2_input_scale"}},
            ValueError,
            'expected "w13_input_scale" and "w2_input_scale"',
        ),
        ({"stream": 1}, ValueError, "stream"),
        ({"out": x}, BufferError, "out"),
        ({"out": np.empty((3, 32), np.uint16)}, ValueError, r"out: expected shape \[3, 64\]"),
        ({"out": np.empty((3, 64), np.float32)}, TypeError, "out: expected bfloat16"),
        ({"out": np.empty((3, 128), np.uint16)[:, ::2]}, BufferError, "out: expected contiguous rows"),
    ]
    for change, error, message in cases:
        out = poisoned((3, 64), "bfloat16")
        before = out.copy()
        with pytest.raises(error, match=message):
            method(**(good | {"out": out} | change))
        np.testing.assert_array_equal(out, before)


def test_out_may_not_be_what_is_read(rng):
    method = MoEMethod("NVFP4", 2, 64, 32, top_k=2, dtype="float32")
    params = method.prepare(random_stacks(rng, "NVFP4", 2, 64, 32))
    memory = np.zeros((2, 64), np.float32)
    weights, ids = random_routing(rng, 2, 2, 2)
    x = random_x(rng, (2, 64), "float32")
    memory[0, :4] = weights.ravel()
    with pytest.raises(BufferError, match="topk_weights"):
        method(x, params, memory.reshape(-1)[:4].reshape(2, 2), ids, out=memory)


# ------------------------------------------------------------------------------------------- the object


def test_copies_pickles_and_text():
    method = MoEMethod(
        "nvfp4_awq", 8, 64, 32, top_k=2, activation="swigluoai", limit=5.0, interleaved=True, dtype="float16",
        group_size=16, global_num_experts=16,
    )  # fmt: skip
    for other in (copy.copy(method), copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert repr(other) == repr(method)
        assert options_of(other) == options_of(method)
        assert other.global_num_experts == 16
    assert "8 experts, 64 -> 32 -> 64, top_k=2" in repr(method)
    assert method.compute_for(3) == "exact"


def test_explanations_and_tuning(rng):
    method = MoEMethod("NVFP4", 4, 64, 32, top_k=2)
    assert method.backend_for(5) in method.explain(5)
    assert f"{method.backend:12}" in method.explain() or method.backend in method.explain()
    params = method.prepare(random_stacks(rng, "NVFP4", 4, 64, 32))
    timings = method.tune([3], params)
    assert {timing.kernel for timing in timings} <= set(_C.kernels())
    assert sum(timing.chosen for timing in timings) == 1
    assert method.backend_for(3) == timings[0].kernel

"""batch_invariant: a row's bits depend on no other row and not on their number, linears and experts."""

import copy
import pickle
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqext import _C, LinearMethod, MoEMethod, UnsupportedQuantization, reference
from moqext.tools.random_layers import random_experts, random_linear

from .linear_cases import assert_close, random_x
from .moe_calls import moved, prepared, run
from .moe_cases import random_routing

LINEARS = [
    ("FP8", "exact"),
    ("FP8_PER_CHANNEL_PER_TOKEN", "exact"),
    ("FP8_PB_WO", "exact"),
    ("NVFP4", "exact"),
    ("NVFP4", "fp8"),
    ("NVFP4", "fp4"),
    ("NVFP4_SVD", "exact"),
    ("W4A8_NVFP4_FP8", "exact"),
    ("MXFP4", "exact"),
    ("W4A8_MXFP4_FP8", "exact"),
    ("MXFP8", "exact"),
    ("W4A16_AWQ", "exact"),
    ("W4A8_AWQ", "exact"),
    ("W8A16", "exact"),
    ("W8A8_SQ_PER_CHANNEL", "exact"),
]
EXPERTS = [kind for kind in LINEARS if kind[0] != "NVFP4_SVD"]
KERNELS = [name for name, reason in LinearMethod("NVFP4", 32, [8])._plan.explain() if reason is None]


@cache
def stored_linear(algo, rows, columns):
    return random_linear(np.random.default_rng(1), algo, rows, columns)


@cache
def linear(algo, compute, dtype, device, rows=(26, 14), columns=640, kernel=None):
    """A prepared layer of some partitions, and the call of it on arrays of the host."""
    case = stored_linear(algo, rows, columns)
    with pytest.MonkeyPatch.context() as patch:
        if kernel:
            patch.setenv("MOQEXT_KERNEL", kernel)
        method = case.method(batch_invariant=True, compute=compute, dtype=dtype, device=device)
    parts = {role: [moved(method, part) for part in parts] for role, parts in case.listed().items()}
    params = method.prepare(parts)

    def product(x, bias=None):
        return on_host(method(moved(method, x, dtype), params, moved(method, bias)))

    return method, product


def on_host(y):
    """An output of NumPy or torch as an array; bfloat16 as its bits."""
    if hasattr(y, "cpu"):
        from .cuda.cases import to_numpy

        return to_numpy(y)
    return y


def rows_of_all_sizes(rng, tokens, columns, dtype):
    """Rows of which some are far larger or smaller than others, and one in ten holds an infinity or NaN."""
    x = np.asarray(reference.as_float32(random_x(rng, (tokens, columns), dtype)), np.float32)
    reach = 6 if dtype == "float16" else 60
    x *= np.exp2(np.where(rng.random((tokens, 1)) < 0.5, 0, rng.uniform(-reach, reach, (tokens, 1))))
    odd = rng.random(tokens) < 0.1
    x[odd, rng.integers(columns, size=odd.sum())] = rng.choice(
        np.float32([np.inf, -np.inf, np.nan]), odd.sum()
    )
    return reference.encode(x, dtype) if dtype == "bfloat16" else x.astype(dtype)


def assert_same_bits(y, expected, what):
    np.testing.assert_array_equal(
        *(np.ascontiguousarray(value).view(np.uint8) for value in (y, expected)), err_msg=what
    )


def assert_rows_stand_alone(rng, product, x, counts):
    """Rows of a call have the bits that they have among some of them, in another order.

    Of one row a bias takes away the output: what is left shows the last bits of its float32 sums.
    """
    one = int(rng.integers(len(x)))
    bias = -np.nan_to_num(reference.as_float32(product(x)[one]), posinf=0, neginf=0)
    whole = product(x, bias)
    for count in counts:
        some = rng.permutation(len(x))[:count]
        some[rng.integers(len(some))] = one
        assert_same_bits(product(x[some], bias), whole[some], f"{count} of {len(x)} rows")


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=40)
@given(
    st.sampled_from(LINEARS),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.integers(2, 300),
    st.lists(st.integers(1, 100), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_rows_of_linears_stand_alone(kernel, kind, dtype, tokens, counts, seed):
    rng = np.random.default_rng(seed)
    if kernel in ("cpu:avx512bf16", "cpu:amx"):
        dtype = "bfloat16"
    if kernel in ("cpu:avx512bf16", "cpu:amx") and "AWQ" in kind[0]:
        return
    _, product = linear(*kind, dtype, "cpu", kernel=kernel)
    assert_rows_stand_alone(rng, product, rows_of_all_sizes(rng, tokens, 640, dtype), [1, *counts])


@cache
def stored_experts(algo, compute, count, hidden, inner, top_k):
    method = MoEMethod(algo, count, hidden, inner, compute=compute, top_k=top_k)
    return random_experts(np.random.default_rng(2), method)


@cache
def experts(algo, compute, dtype, device, count=6, hidden=256, inner=128, top_k=3, kernel=None):
    """A prepared layer of experts, and the call of it on arrays of the host."""
    with pytest.MonkeyPatch.context() as patch:
        if kernel:
            patch.setenv("MOQEXT_KERNEL", kernel)
        about = {"compute": compute, "dtype": dtype, "device": device, "top_k": top_k}
        method = MoEMethod(algo, count, hidden, inner, batch_invariant=True, **about)
    stacks = stored_experts(algo, compute, count, hidden, inner, top_k)
    params = prepared(method, {name: stack for name, stack in stacks.items() if "bias" not in name})

    def layer(x, weights, ids):
        return run(method, params, x, weights, ids)

    return method, layer


def assert_tokens_stand_alone(rng, layer, x, weights, ids, counts):
    whole = layer(x, weights, ids)
    for count in counts:
        some = rng.permutation(len(x))[:count]
        y = layer(x[some], weights[some], ids[some])
        assert_same_bits(y, whole[some], f"{count} of {len(x)} tokens")


@settings(max_examples=40)
@given(
    st.sampled_from(EXPERTS),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.sampled_from(["random", "skewed", "one", "few", "hostile"]),
    st.integers(2, 120),
    st.lists(st.integers(1, 100), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_tokens_of_experts_stand_alone(kind, dtype, routing, tokens, counts, seed):
    rng = np.random.default_rng(seed)
    _, layer = experts(*kind, dtype, "cpu")
    weights, ids = random_routing(rng, tokens, 3, 6, routing)
    x = rows_of_all_sizes(rng, tokens, 256, dtype)
    assert_tokens_stand_alone(rng, layer, x, weights, ids, [1, *counts])


@pytest.mark.parametrize("algo, compute", LINEARS)
def test_the_result_is_that_of_the_reference(rng, algo, compute):
    case = random_linear(rng, algo, [70, 44], 640)
    method = case.method(compute=compute, dtype="float32", batch_invariant=True)
    plain = case.method(compute=compute, dtype="float32")
    x = random_x(rng, (9, 640), "float32")
    params = plain.prepare(case.listed())
    assert_close(method(x, method.prepare(case.listed())), plain(x, params).astype(np.float64), "float32")


@pytest.mark.parametrize("algo, compute", [("FP8", "exact"), ("NVFP4", "fp4"), ("W4A8_AWQ", "exact")])
def test_one_scale_of_all_rows_has_to_be_the_checkpoints(rng, algo, compute):
    """A scale found from x would be another with other rows."""
    case = random_linear(rng, algo, [40], 128, input_scale=False)
    method = case.method(compute=compute, batch_invariant=True)
    assert method.checkpoint_params["input_scale"].required
    with pytest.raises(ValueError, match=r"input_scale.*missing"):
        method.prepare(case.listed())
    without = {**case.method(compute=compute).prepare(case.listed())}
    with pytest.raises(ValueError, match="input_scale"):
        method(random_x(rng, (2, 128), "bfloat16"), without)


@pytest.mark.parametrize("algo", ["W4A8_MXFP4_FP8", "W8A8_SQ_PER_CHANNEL"])
def test_scales_of_rows_may_be_found(rng, algo):
    case = random_linear(rng, algo, [40], 128, input_scale=False)
    method = case.method(batch_invariant=True)
    params = method.prepare(case.listed())
    x = random_x(rng, (50, 128), "bfloat16")
    whole = method(x, params)
    assert all(np.array_equal(method(x[i : i + 1], params), whole[i : i + 1]) for i in range(50))


def test_copies_and_pickles_are_batch_invariant_too():
    for make in (
        lambda **option: LinearMethod("NVFP4", 64, [32], **option),
        lambda **option: MoEMethod("FP8", 4, 64, 32, top_k=2, **option),
    ):
        method = make(batch_invariant=True)
        assert copy.deepcopy(method).batch_invariant
        assert pickle.loads(pickle.dumps(method)).batch_invariant
        assert not make().batch_invariant


# ---- the choice, of chips that need not be here ----

CHIPS = ("H200 SXM", "8.0", "8.9", "9.0", "10.0")


def linear_plan(kind, chip, rows=4096, columns=4096, dtype="bfloat16", **options):
    algo, compute = kind
    return _C.linear_plan(algo, columns, [rows], None, dtype, "cuda:0", compute, chip, batch_invariant=True)


def moe_plan(kind, chip, *sizes):
    algo, compute = kind
    about = ("silu", True, None, "bfloat16", "cuda:0", compute, None, None, None, None, False, chip)
    return _C.moe_plan(algo, *sizes, *about, batch_invariant=True)


@pytest.mark.parametrize("chip", CHIPS)
def test_one_kernel_runs_all_numbers_of_tokens(chip):
    """In configs that neither split K by the number of tiles nor are a library's."""
    plans = [linear_plan(kind, chip, rows) for kind in LINEARS for rows in (96, 4096, 57344)]
    plans += [
        moe_plan(kind, chip, *sizes)
        for kind in EXPERTS
        for sizes in ((8, 4096, 14336, 2), (128, 2048, 768, 8))
    ]
    for plan in plans:
        kernels = {plan.backend(tokens) for tokens in (0, 1, 7, 16, 64, 300, 4096, 100_000, 1 << 20)}
        assert len(kernels) == 1
        reasons = dict(plan.explain())
        assert [name for name, reason in reasons.items() if reason is None] == [*kernels]
        assert not any(word in kernel for kernel in kernels for word in ("cublaslt", "decode"))


@pytest.mark.parametrize("kind", LINEARS[:5], ids=str)
def test_configs_that_are_kept_sum_in_the_same_order(kind):
    """Tuning tries what the layer may have, and nothing else."""
    plan = linear_plan(kind, "H200 SXM")
    for tokens in (1, 16, 64, 512, 4096):
        usual = plan.config(tokens)
        allowed = {row[1] for row in plan.configs(tokens)}
        assert usual[2] in allowed
        for variant in range(64):
            plan.keep(tokens, usual[0], variant)
            config = plan.config(tokens)
            assert config[2] in allowed
            assert config[3] == usual[3] or config[2] != usual[2]


def test_explain_says_why_others_are_not_taken():
    method = LinearMethod("NVFP4", 64, [32], batch_invariant=True)
    lines = method.explain().splitlines()
    chosen = [line for line in lines if "chosen" in line]
    assert len(chosen) == 1
    others = [
        line for line in lines if line.startswith("cpu:") and "needs" not in line and line not in chosen
    ]
    name = chosen[0].split()[0]
    assert all(f"no: {name} runs all numbers of rows" in line for line in others)


def test_a_kernel_that_is_asked_for_has_to_be_batch_invariant(monkeypatch):
    monkeypatch.setenv("MOQEXT_KERNEL", "cuda:sm90_nvfp4_decode")
    with pytest.raises(UnsupportedQuantization, match="depend on the number of rows"):
        linear_plan(("NVFP4", "exact"), "9.0")
    monkeypatch.setenv("MOQEXT_KERNEL", "cuda:sm90_nvfp4_medium")
    assert linear_plan(("NVFP4", "exact"), "9.0").backend(1) == "cuda:sm90_nvfp4_medium"

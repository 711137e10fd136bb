"""NVFP4_SVD: linears with a low-rank pair of each partition, against the float64 reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqext import _C, LinearMethod, MoEMethod, UnsupportedQuantization, ops, reference

from .linear_cases import (
    assert_close,
    assert_within_rounding,
    poisoned,
    random_case,
    random_x,
    smoothed,
    with_pairs,
)
from .work import each

ISAS = ("portable", "avx2", "avx512", "avx512bf16", "amx")
HERE = ISAS.index(_C.cpu_isa())


def svd_case(rng, columns, rows, rank, smooths=True):
    case = with_pairs(rng, random_case(rng, "NVFP4_SVD", columns, rows), rank)
    return smoothed(rng, case) if smooths else case


def run(case, x, dtype, compute="exact", bias=None, fused=False):
    method = case.method(dtype=dtype, compute=compute)
    params = method.prepare(case.fused() if fused else case.listed())
    out = poisoned((*x.shape[:-1], method.out_features), dtype)
    assert method(x, params, bias, out) is out
    return out


@each("dtype", ["bfloat16", "float16", "float32"])
@each("isa", ISAS)
def test_matches_reference_on_every_instruction_set(rng, monkeypatch, isa, dtype):
    monkeypatch.setenv("MOQEXT_KERNEL", f"cpu:{isa}")
    if ISAS.index(isa) > HERE or (isa in ISAS[3:] and dtype != "bfloat16"):
        return
    case = svd_case(rng, 384, [34, 130, 8], 24)
    bias = rng.standard_normal(172).astype(np.float32)
    for tokens in (1, 5, 37, 300):
        x = random_x(rng, (tokens, 384), dtype)
        expected = case.expected(reference.as_float32(x), bias=bias, x_dtype=dtype)
        assert_close(run(case, x, dtype, bias=bias), expected, dtype)


@pytest.mark.parametrize("compute", ["fp8", "fp4", "auto"])
def test_pair_acts_on_x_that_is_not_quantized(rng, compute):
    case = svd_case(rng, 256, [48, 24], 8)
    x = random_x(rng, (9, 256), "bfloat16")
    values, of_weight = reference.as_float32(x), "exact" if compute == "auto" else compute
    expected = case.expected(values, of_weight, x_dtype="bfloat16")
    assert_close(run(case, x, "bfloat16", compute), expected, "bfloat16")


@settings(max_examples=40)
@given(
    st.integers(1, 20),
    st.lists(st.integers(1, 150), min_size=1, max_size=4),
    st.integers(1, 70),
    st.integers(0, 40),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_any_shape(groups, rows, rank, tokens, smooths, seed):
    rng = np.random.default_rng(seed)
    case = svd_case(rng, 16 * groups, rows, rank, smooths)
    x = random_x(rng, (tokens, 16 * groups), "float32")
    expected = case.expected(x)
    magnitude = np.abs(expected).max(initial=0) + np.abs(x).max(initial=0) * 1e3 * rank
    assert_within_rounding(run(case, x, "float32"), expected, magnitude, "float32", 1e-6)


def test_outputs_are_rounded_once(rng):
    """An output is the difference of two parts that 16 bits would round apart."""
    case = svd_case(rng, 128, [16], 1, smooths=False)
    part = case.parts[0]
    weight = reference.dequantize(part, "NVFP4_SVD")
    part["lora_a"] = -weight[3:4].astype(np.float32)
    part["lora_b"] = np.ones((16, 1), np.float32)
    x = random_x(rng, (4, 128), "bfloat16")
    y = reference.as_float32(run(case, x, "bfloat16"))
    magnitude = np.abs(reference.as_float32(x)) @ np.abs(weight[3])
    assert (np.abs(y[:, 3]) <= 1e-5 * magnitude).all()


def test_inner_sums_keep_float32(rng):
    """A value that bfloat16 or float16 would round, or lose, reaches the output."""
    case = svd_case(rng, 32, [8], 1, smooths=False)
    part = case.parts[0]
    part["weight"][:] = 0
    part["lora_a"] = np.float32([[1, 2.0**-20] + [0] * 30])
    part["lora_b"] = np.full((8, 1), 2.0**100, np.float32)
    x = np.zeros((1, 32), np.float32)
    x[0, :2] = 1, 1
    np.testing.assert_array_equal(run(case, x, "float32"), np.full((1, 8), 2.0**100 * (1 + 2.0**-20)))


def test_fused_on_disk_is_the_list_of_partitions(rng):
    case = svd_case(rng, 256, [48, 16, 7], 5)
    x = random_x(rng, (5, 256), "float32")
    np.testing.assert_array_equal(run(case, x, "float32", fused=True), run(case, x, "float32"))


def test_partitions_have_pairs_of_their_own(rng):
    case = svd_case(rng, 64, [8, 8], 3, smooths=False)
    case.parts[1]["lora_b"][:] = 0
    for part in case.parts:
        part["weight"][:] = 0
    y = run(case, random_x(rng, (3, 64), "float32"), "float32")
    assert (y[:, :8] != 0).any()
    assert (y[:, 8:] == 0).all()


def test_strided_x_and_many_threads_change_nothing(rng):
    case = svd_case(rng, 2048, [600], 64)
    wide = random_x(rng, (7, 4096), "float32")
    x = wide[:, ::2]
    before = _C.num_threads()
    try:
        _C.set_num_threads(1)
        alone = run(case, x, "float32")
        _C.set_num_threads(4)
        np.testing.assert_array_equal(run(case, np.ascontiguousarray(x), "float32"), alone)
    finally:
        _C.set_num_threads(before)


def test_nan_in_x_stays_in_its_row(rng):
    case = svd_case(rng, 128, [16], 4)
    x = random_x(rng, (3, 128), "float32")
    x[1, 5] = np.nan
    y = run(case, x, "float32")
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


def test_call_without_a_method(rng):
    case = svd_case(rng, 128, [16, 8], 6)
    params = case.method(dtype="float32").prepare(case.listed())
    x = random_x(rng, (3, 128), "float32")
    y = ops.linear(x, params, "NVFP4_SVD", [16, 8])
    np.testing.assert_array_equal(y, run(case, x, "float32"))


def test_parameters(rng):
    method = LinearMethod("NVFP4_SVD", 64, [16, 8], rank=5)
    stored, prepared = method.checkpoint_params, method.prepared_params
    for params in (stored, prepared):
        assert (params["lora_a"].shape, params["lora_b"].shape) == ((10, 64), (24, 5))
        assert params["lora_a"].required
        assert params["lora_b"].required
    assert not stored["pre_quant_scale"].required
    assert method.rank == 5
    assert LinearMethod("NVFP4_SVD", 64, [16]).rank == 32
    assert LinearMethod("NVFP4", 64, [16]).rank is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_pairs_of_every_float(rng, dtype):
    case = svd_case(rng, 64, [8], 3)
    part = case.parts[0]
    for role in ("lora_a", "lora_b"):
        values = reference.as_float32(part[role])
        part[role] = reference.encode(values, "bfloat16") if dtype == "bfloat16" else values.astype(dtype)
    prepared = case.method().prepare(case.listed())
    np.testing.assert_array_equal(prepared["lora_a"], reference.as_float32(part["lora_a"]))
    np.testing.assert_array_equal(prepared["lora_b"], reference.as_float32(part["lora_b"]))


def wrong(role, value):
    def change(params):
        params[role] = value(np.asarray(params[role][0]))

    return change


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda params: params.pop("lora_a"), ValueError, "lora_a: missing, NVFP4_SVD needs it"),
        (lambda params: params.pop("lora_b"), ValueError, "lora_b: missing, NVFP4_SVD needs it"),
        (wrong("lora_a", lambda a: a[:3]), ValueError, r"lora_a: expected shape \[4, 64\], got \[3, 64\]"),
        (wrong("lora_a", lambda a: a.T), ValueError, r"lora_a: expected shape \[4, 64\], got \[64, 4\]"),
        (wrong("lora_b", lambda b: b[:, :1]), ValueError, r"lora_b: expected shape \[16, 4\], got \[16, 1\]"),
        (wrong("lora_b", lambda b: b.reshape(-1)), ValueError, r"lora_b: expected shape \[16, 4\]"),
        (wrong("lora_a", lambda a: a.astype(np.int32)), TypeError, "lora_a: "),
        (
            wrong("lora_b", lambda b: np.where(np.arange(4) == 2, np.inf, np.ones((16, 1), np.float32))),
            ValueError,
            "lora_b: expected finite values, got inf at row 0, column 2",
        ),
        (wrong("lora_a", lambda a: a * np.float64(1e300)), ValueError, "lora_a: expected finite values, got"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(rng, change, error, message):
    case = svd_case(rng, 64, [16], 4)
    for part in case.parts:
        part |= {role: reference.as_float32(part[role]) for role in ("lora_a", "lora_b")}
    method = case.method()
    out = method.prepare(case.listed())
    kept = {role: np.array(value).tobytes() for role, value in out.items()}
    params = case.listed()
    params["weight"] = [np.zeros_like(params["weight"][0])]
    change(params)
    with pytest.raises(error, match=message):
        method.prepare(params, out)
    assert {role: np.array(value).tobytes() for role, value in out.items()} == kept


def test_reload_writes_the_same_outputs(rng):
    first, second = (svd_case(rng, 128, [32], 4) for _ in range(2))
    method = first.method(dtype="float32")
    params = method.prepare(first.listed())
    places = {name: value.ctypes.data for name, value in params.items()}
    again = method.prepare(second.listed(), params)
    assert {name: value.ctypes.data for name, value in again.items()} == places
    x = random_x(rng, (5, 128), "float32")
    np.testing.assert_array_equal(method(x, again), run(second, x, "float32"))


@pytest.mark.parametrize("rank", [0, -1, 2**30, 2**31])
def test_a_rank_that_cannot_be(rank):
    with pytest.raises(ValueError, match="rank: expected"):
        LinearMethod("NVFP4_SVD", 64, [16], rank=rank)


def test_a_rank_where_there_is_no_pair():
    with pytest.raises(ValueError, match="rank: NVFP4_AWQ has no low-rank pair"):
        LinearMethod("NVFP4_AWQ", 64, [16], rank=8)


def test_experts_are_refused_by_name():
    with pytest.raises(UnsupportedQuantization, match="NVFP4_SVD runs as linears, and not as experts"):
        MoEMethod("NVFP4_SVD", 4, 64, 32, top_k=2)


@pytest.mark.parametrize("compute", ["exact", "fp8", "auto"])
def test_kernels_that_add(compute):
    """Kernels that multiply NVFP4 as it is add the pair; others say why not."""
    plan = _C.linear_plan(
        "NVFP4_SVD", 4096, [4096], None, "bfloat16", "cuda:0", compute, capability="9.0", rank=8
    )
    reasons = dict(plan.explain())
    exact = {
        f"cuda:{name}"
        for name in ("sm80_nvfp4", *(f"sm90_nvfp4_{n}" for n in ("decode", "medium", "prefill")))
    }
    for name in exact:
        assert (reasons[name] is None) == (compute != "fp8"), reasons[name]
    assert reasons["cuda:simt"] is None
    for name in ("cuda:sm90_nvfp4_fp8_prefill", "cuda:sm90_nvfp4_fp8_medium"):
        assert reasons[name] == "adds nothing to its outputs, NVFP4_SVD has a low-rank part"

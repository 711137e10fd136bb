"""MXFP8, INT8 and INT4 weights on CUDA, against the reference and the CPU's preparation."""

from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod, reference

from ..linear_cases import GENERAL, assert_close, random_case, random_x, smoothed
from ..moe_cases import assert_experts_close, random_routing, random_stacks
from ..work import each
from .cases import params_to_cuda, poisoned, to_cuda, to_numpy, torch

pytestmark = pytest.mark.gpu
COMPUTES = [(algo, "exact") for algo in GENERAL] + [("MXFP8", "fp8")]


def needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize("kernel", ["simt", "sm80_general", "cublaslt_general"])
@each("dtype", ["bfloat16", "float16", "float32"])
@each("algo", GENERAL)
def test_matches_reference(rng: Any, monkeypatch: Any, kernel: str, algo: str, dtype: str) -> None:
    if kernel != "simt" and dtype == "float32":
        return  # multiplies 16-bit numbers
    if kernel == "cublaslt_general" and dtype == "float16" and algo in ("MXFP8", "W4A16_AWQ"):
        return  # float16 does not hold their weights
    monkeypatch.setenv("MOQEXT_KERNEL", f"cuda:{kernel}")
    partitions = [32, 128, 16] if kernel == "cublaslt_general" else [34, 130, 8]
    for input_scale in (True, False):
        case = random_case(rng, algo, 640, partitions, input_scale=input_scale)
        method = case.method(dtype=dtype, device="cuda:0")
        params = method.prepare(params_to_cuda(case.listed()))
        bias = rng.standard_normal(sum(partitions)).astype(np.float32)
        for tokens in (1, 8, 13, 30, 37, 300):
            x = random_x(rng, (tokens, 640), dtype)
            out = poisoned(tokens, sum(partitions), dtype=dtype)
            assert method(to_cuda(x, dtype), params, to_cuda(bias), out) is out
            values = reference.as_float32(x)
            assert_close(to_numpy(out), case.expected(values, bias=bias, x_dtype=dtype), dtype)


HOPPER = [
    ("MXFP8", "bfloat16"),
    *((algo, dtype) for algo in ("W8A16", "W4A16_AWQ") for dtype in ("bfloat16", "float16")),
]
"""Formats whose x stays as it is, with the types of x that the kernel for Hopper takes."""


@pytest.mark.parametrize(("columns", "rows"), [(128, 34), (1152, 690), (2176, 258)])
@each("algo, dtype", HOPPER)
def test_every_config_for_hopper(rng: Any, algo: str, dtype: str, columns: int, rows: int) -> None:
    """Ragged rows and tokens; steps that split unevenly, or are fewer than the parts."""
    needs_hopper()
    case = random_case(rng, algo, columns, [rows - 18, 18])
    method = case.method(dtype=dtype, device="cuda:0")
    params = method.prepare(params_to_cuda(case.listed()))
    bias = rng.standard_normal(rows).astype(np.float32)
    for tokens in (1, 8, 13, 70, 131):
        x = random_x(rng, (tokens, columns), dtype)
        expected = case.expected(reference.as_float32(x), bias=bias, x_dtype=dtype)
        numbers = [n for kernel, n, *_ in method._plan.configs(tokens) if kernel == "cuda:sm90_general"]
        assert len(numbers) >= 13
        for number in numbers:
            method._plan.keep(tokens, "cuda:sm90_general", number + 1)
            assert method.backend_for(tokens) == "cuda:sm90_general"
            out = poisoned(tokens, rows, dtype=dtype)
            method(to_cuda(x, dtype), params, to_cuda(bias), out=out)
            assert_close(to_numpy(out), expected, dtype)


@each("algo, dtype", HOPPER)
def test_no_config_for_hopper_reads_a_stage_too_early_or_too_late(rng: Any, algo: str, dtype: str) -> None:
    """Every stage is filled many times, as races are rare; a call gives what the first one gave."""
    needs_hopper()
    case = random_case(rng, algo, 4096, [4032])
    method = case.method(dtype=dtype, device="cuda:0")
    params = method.prepare(params_to_cuda(case.listed()))
    for tokens in (1, 70, 256):
        x = to_cuda(random_x(rng, (tokens, 4096), dtype), dtype)
        for kernel, number, *_ in method._plan.configs(tokens):
            if kernel == "cuda:sm90_general":
                method._plan.keep(tokens, kernel, number + 1)
                first = method(x, params)
                assert all(torch.equal(method(x, params), first) for _ in range(8)), number


@each("dtype", ["bfloat16", "float16"])
def test_int4_of_extreme_tokens_for_hopper(rng: Any, dtype: str) -> None:
    """Few tokens meet shifted codes, whose sums an infinity or a large x takes out of float32."""
    needs_hopper()

    def value_of(number: float) -> Any:  # NumPy has float16, and bfloat16 as its bits
        return number if dtype == "float16" else reference.encode(np.float32([number]), dtype)[0]

    case = random_case(rng, "W4A16_AWQ", 640, [258])
    method = case.method(dtype=dtype, device="cuda:0")
    params = method.prepare(params_to_cuda(case.listed()))
    for tokens in (4, 8, 16):
        x = random_x(rng, (tokens, 640), dtype)
        x[1, 77] = value_of(np.inf)
        x[2, ::2] = value_of(8 if dtype == "float16" else 1e34)
        with np.errstate(invalid="ignore"):
            expected = case.expected(reference.as_float32(x), x_dtype=dtype)
        others = [0, *range(3, tokens)]
        for kernel, number, *_ in method._plan.configs(tokens):
            if kernel == "cuda:sm90_general":
                method._plan.keep(tokens, kernel, number + 1)
                y = to_numpy(method(to_cuda(x, dtype), params))
                for rows in (others, [2]):
                    assert_close(y[rows], expected[rows], dtype)
                values = reference.as_float32(y[1])
                np.testing.assert_array_equal(np.isnan(values), np.isnan(expected[1]))
                np.testing.assert_array_equal(np.isinf(values), np.isinf(expected[1]))


def test_exponents_at_either_end_for_hopper(rng: Any, monkeypatch: Any) -> None:
    """Rows of every power of two that the kernel holds, and one more, which must not look like a number."""
    needs_hopper()
    monkeypatch.setenv("MOQEXT_KERNEL", "cuda:sm90_general")
    low, high = 127 - 108, 127 + 23
    case = random_case(rng, "MXFP8", 256, [high - low + 2])
    powers = np.arange(low, high + 2, dtype=np.uint8)
    case.parts[0]["weight_scale"] = np.repeat(powers[:, None], 8, 1)
    method = case.method(device="cuda:0")
    params = method.prepare(params_to_cuda(case.listed()))
    x = random_x(rng, (9, 256), "bfloat16")
    y = reference.as_float32(to_numpy(method(to_cuda(x, "bfloat16"), params))).astype(np.float64)
    expected = case.expected(reference.as_float32(x))[:, :-1]
    assert not np.isfinite(y[:, -1]).any()
    errors = np.linalg.norm(y[:, :-1] - expected, axis=0) / np.linalg.norm(expected, axis=0)
    assert errors.max() <= 2**-8  # half of bfloat16's last bit


@each("dtype", ["bfloat16", "float16"])
@each("algo", GENERAL)
def test_large_tiles(rng: Any, monkeypatch: Any, algo: str, dtype: str) -> None:
    """Enough tiles of 128 rows and 64 tokens for every multiprocessor, ragged in all directions."""
    monkeypatch.setenv("MOQEXT_KERNEL", "cuda:sm80_general")
    case = random_case(rng, algo, 384, [1040, 34])
    method = case.method(dtype=dtype, device="cuda:0")
    params = method.prepare(params_to_cuda(case.listed()))
    x = random_x(rng, (1101, 384), dtype)
    y = method(to_cuda(x, dtype), params)
    assert_close(to_numpy(y), case.expected(reference.as_float32(x), x_dtype=dtype), dtype)


@each("algo", ["MXFP8", "W4A16_AWQ", "W8A16", "W8A8_SQ_PER_CHANNEL"])
def test_library_splits_the_rows_of_large_weights(rng: Any, monkeypatch: Any, algo: str) -> None:
    """More numbers than the workspace has at a time: the last segment is shorter."""
    monkeypatch.setenv("MOQEXT_KERNEL", "cuda:cublaslt_general")
    case = random_case(rng, algo, 128, [2064])
    method = case.method(device="cuda:0")
    params = method.prepare(params_to_cuda(case.listed()))
    x = random_x(rng, (35000, 128), "bfloat16")  # sums of 72 million numbers
    out = poisoned(35000, 2064 + 8, dtype="bfloat16")[:, :2064]
    method(to_cuda(x, "bfloat16"), params, out=out)
    assert not torch.isnan(out).any()
    rows = [0, *rng.integers(0, 35000, 40).tolist(), 34999]
    assert_close(to_numpy(out[rows]), case.expected(reference.as_float32(x[rows])), "bfloat16")


@each("algo", ["MXFP8", "W8A16", "W8A8_SQ_PER_CHANNEL"])
def test_library_takes_rows_with_gaps_and_unaligned_outputs(rng: Any, monkeypatch: Any, algo: str) -> None:
    monkeypatch.setenv("MOQEXT_KERNEL", "cuda:cublaslt_general")
    case = random_case(rng, algo, 96, [48])
    method = case.method(device="cuda:0")
    params = method.prepare(params_to_cuda(case.listed()))
    x = random_x(rng, (21, 96), "bfloat16")
    wide = torch.cat([to_cuda(x, "bfloat16"), to_cuda(x, "bfloat16")], 1)
    expected = case.expected(reference.as_float32(x))
    for pad, skip in ((0, 0), (8, 0), (5, 3)):
        out = poisoned(21, 48 + pad + skip, dtype="bfloat16")[:, skip : skip + 48]
        method(wide[:, :96], params, out=out)
        assert_close(to_numpy(out), expected, "bfloat16")


def test_nan_stays_where_x_becomes_int8(rng: Any, monkeypatch: Any) -> None:
    for kernel in ("cuda:simt", "cuda:sm80_general", "cuda:cublaslt_general", "cuda:sm90_int8_prefill"):
        monkeypatch.setenv("MOQEXT_KERNEL", kernel)
        for input_scale in (True, False):
            case = random_case(rng, "W8A8_SQ_PER_CHANNEL", 64, [32], input_scale=input_scale)
            method = case.method(device="cuda:0")
            params = method.prepare(params_to_cuda(case.listed()))
            x = to_cuda(random_x(rng, (5, 64), "bfloat16"), "bfloat16")
            x[3, 17] = float("nan")
            rows = torch.isnan(method(x, params)).all(1).tolist()
            assert rows == [False, False, False, True, False], (kernel, input_scale)


@pytest.mark.parametrize("columns", [16, 48, 80, 1040])
@each("kernel", ["sm80_general", "sm90_general"])
def test_columns_that_fill_no_step(rng: Any, monkeypatch: Any, kernel: str, columns: int) -> None:
    if kernel == "sm90_general":
        needs_hopper()
    monkeypatch.setenv("MOQEXT_KERNEL", f"cuda:{kernel}")
    case = random_case(rng, "W8A16", columns, [24])
    method = case.method(device="cuda:0")
    params = method.prepare(params_to_cuda(case.listed()))
    for tokens in (3, 70):
        x = random_x(rng, (tokens, columns), "bfloat16")
        y = method(to_cuda(x, "bfloat16"), params)
        assert_close(to_numpy(y), case.expected(reference.as_float32(x)), "bfloat16")


@each("dtype", ["bfloat16", "float16"])
def test_mxfp8_as_fp8_is_a_linear_of_fp8(rng: Any, dtype: str) -> None:
    case = random_case(rng, "MXFP8", 640, [34, 130, 8])
    method = case.method(dtype=dtype, compute="fp8", device="cuda:0")
    params = method.prepare(params_to_cuda(case.listed()))
    for tokens in (1, 37, 300):
        x = random_x(rng, (tokens, 640), dtype)
        y = reference.as_float32(to_numpy(method(to_cuda(x, dtype), params))).astype(np.float64)
        expected = case.expected(reference.as_float32(x), "fp8")
        assert np.linalg.norm(y - expected) <= 5e-3 * np.linalg.norm(expected)


@each("algo, compute", COMPUTES)
def test_prepared_bits_are_those_of_the_cpu(rng: Any, algo: str, compute: str) -> None:
    case = random_case(rng, algo, 256, [48, 16])
    case = smoothed(rng, case) if "AWQ" in algo or "W8A8" in algo else case
    here = case.method(compute=compute).prepare(case.listed())
    there = case.method(compute=compute, device="cuda:0").prepare(params_to_cuda(case.listed()))
    assert here.keys() == there.keys()
    for name, value in here.items():
        found = to_numpy(there[name].view(torch.uint8) if there[name].element_size() == 1 else there[name])
        np.testing.assert_array_equal(found, np.asarray(value).view(found.dtype))


def test_reload_writes_the_same_outputs(rng: Any) -> None:
    first, second = (random_case(rng, "MXFP8", 128, [32]) for _ in range(2))
    method = first.method(device="cuda:0")
    params = method.prepare(params_to_cuda(first.listed()))
    places = {name: value.data_ptr() for name, value in params.items()}
    again = method.prepare(params_to_cuda(second.listed()), out=params)
    assert {name: value.data_ptr() for name, value in again.items()} == places
    x = random_x(rng, (5, 128), "float32")
    y = method(to_cuda(x).bfloat16(), again)
    expected = second.expected(x.astype(np.float32))
    assert np.linalg.norm(to_numpy(y.float()) - expected) <= 1e-2 * np.linalg.norm(expected)


@each("dtype", ["bfloat16", "float32"])
@each("algo", GENERAL)
def test_experts_match_the_reference(rng: Any, algo: str, dtype: str) -> None:
    method = MoEMethod(algo, 6, 256, 128, top_k=3, dtype=dtype, device="cuda:0")
    stacks = random_stacks(rng, algo, 6, 256, 128)
    params = method.prepare(params_to_cuda(stacks))
    for tokens in (1, 23):
        x = random_x(rng, (tokens, 256), dtype)
        weights, ids = random_routing(rng, tokens, 3, 6)
        y = method(to_cuda(x, dtype), params, to_cuda(weights), to_cuda(ids))
        options = {"quant_algo": algo, "dtype": dtype}
        values = reference.as_float32(x)
        assert_experts_close(to_numpy(y), values, stacks, weights, ids, **options)


@each("kept", [(), ("w13_input_scale",), ("w2_input_scale",)])
@each(
    "algo, compute",
    [("W4A8_MXFP4_FP8", "exact"), ("W4A8_MXFP4_FP8", "fp8"), ("W8A8_SQ_PER_CHANNEL", "exact")],
)
def test_experts_quantize_by_token_where_there_is_no_input_scale(
    rng: Any, monkeypatch: Any, algo: str, compute: str, kept: tuple[str, ...]
) -> None:
    stacks = random_stacks(rng, algo, 6, 256, 128)
    lost = {"w13_input_scale", "w2_input_scale"} - set(kept)
    stacks = {name: value for name, value in stacks.items() if name not in lost}
    x = random_x(rng, (40, 256), "bfloat16")
    weights, ids = random_routing(rng, 40, 3, 6)
    options = {"quant_algo": algo, "compute": compute, "dtype": "bfloat16"}
    plan = MoEMethod(algo, 6, 256, 128, top_k=3, compute=compute, device="cuda:0")._plan
    for kernel, reason in plan.explain():
        if reason is not None:
            continue
        monkeypatch.setenv("MOQEXT_KERNEL", kernel)
        method = MoEMethod(algo, 6, 256, 128, top_k=3, compute=compute, device="cuda:0")
        params = method.prepare(params_to_cuda(stacks))
        y = method(to_cuda(x, "bfloat16"), params, to_cuda(weights), to_cuda(ids))
        assert_experts_close(to_numpy(y), reference.as_float32(x), stacks, weights, ids, **options)
        monkeypatch.delenv("MOQEXT_KERNEL")


@each("compute", ["exact", "fp8", "auto"])
@each("dtype", ["bfloat16", "float16", "float32"])
def test_rows_have_scales_where_w4a8_mxfp4_fp8_has_none(rng: Any, dtype: str, compute: str) -> None:
    for input_scale in (True, False):
        case = random_case(rng, "W4A8_MXFP4_FP8", 640, [34, 130, 8], input_scale=input_scale)
        method = case.method(dtype=dtype, compute=compute, device="cuda:0")
        params = method.prepare(params_to_cuda(case.listed()))
        for tokens in (1, 13, 70):
            x = random_x(rng, (tokens, 640), dtype)
            y = to_numpy(method(to_cuda(x, dtype), params))
            expected = case.expected(reference.as_float32(x), "fp8" if compute == "fp8" else "exact")
            assert_close(y, expected, dtype)


def test_a_graph_replays_the_call(rng: Any) -> None:
    case = random_case(rng, "W8A8_SQ_PER_CHANNEL", 256, [64], input_scale=False)
    method = case.method(device="cuda:0")
    params = method.prepare(params_to_cuda(case.listed()))
    x = to_cuda(random_x(rng, (9, 256), "bfloat16"), "bfloat16")
    expected, out = method(x, params), poisoned(9, 64, dtype="bfloat16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        method(x, params, out=out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))

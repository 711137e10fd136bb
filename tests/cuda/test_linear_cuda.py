"""FP8 linears of any size on CUDA, weights processed there, against the reference and the CPU's kernels.

What the kernels share (layouts of x and out, forced kernels) is in test_cuda_linear.py.
"""

from typing import Any

import numpy as np
import pytest

from moqext import LinearMethod, ops, reference

from ..linear_cases import FP8_CORE_SUMS, LIMITS, assert_within_core_sums, random_case, random_x
from .cases import params_to_cuda, poisoned, to_cuda, to_numpy, torch

pytestmark = pytest.mark.gpu
FP8 = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"]
DTYPES = ["bfloat16", "float16", "float32"]


class Layer:
    """A random layer, prepared on the device."""

    def __init__(
        self, rng: Any, algo: str, columns: int, rows: list[int], dtype: str, **options: bool
    ) -> None:
        self.rng, self.dtype = rng, dtype
        self.case = random_case(rng, algo, columns, rows, **options)
        self.method = self.case.method(dtype=dtype, device="cuda:0")
        self.params = self.method.prepare(params_to_cuda(self.case.listed()))

    def x(self, tokens: int) -> Any:
        return random_x(self.rng, (tokens, self.method.in_features), self.dtype)

    def run(self, x: Any, bias: Any = None) -> Any:
        """y on the host as float32, out of a poisoned tensor; twice, with the same bits."""
        given = to_cuda(x, self.dtype)
        outs = []
        for _ in range(2):
            out = poisoned(x.shape[0], self.method.out_features, dtype=self.dtype)
            assert self.method(given, self.params, bias, out) is out
            outs.append(out)
        assert torch.equal(outs[0].view(torch.uint8), outs[1].view(torch.uint8))
        return reference.as_float32(to_numpy(outs[0]))

    def by_cpu(self, x: Any) -> Any:
        """The CPU's float32 result: for what would take the reference too long."""
        method = self.case.method(dtype="float32")
        return method(reference.as_float32(x), method.prepare(self.case.listed()))


def assert_near(y: Any, exact: Any, dtype: str) -> None:
    """The limits of the contract against the value before the rounding, which spends two thirds of them."""
    limit, limit_max = LIMITS[dtype]
    difference = np.abs(y.astype(np.float64) - exact)
    assert np.isfinite(difference).all()
    assert np.linalg.norm(difference) <= limit * np.linalg.norm(exact)
    assert (difference <= limit_max * np.abs(exact).max(axis=-1, keepdims=True)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algo", FP8)
def test_tokens(rng: Any, algo: str, dtype: str) -> None:
    layer = Layer(rng, algo, 512, [33, 130, 8], dtype)
    for tokens in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 257, 500):
        x = layer.x(tokens)
        assert_near(layer.run(x), layer.case.expected(reference.as_float32(x)), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("algo", FP8)
@pytest.mark.parametrize("columns", [128, 384, 640, 4096, 7168, 14336, 28672])
def test_widths(rng: Any, algo: str, columns: int) -> None:
    layer = Layer(rng, algo, columns, [100, 300], "bfloat16")
    for tokens in (1, 8, 16, 40, 200):
        x = layer.x(tokens)
        assert_near(layer.run(x), layer.by_cpu(x), "bfloat16")


@pytest.mark.parametrize("algo", FP8)
@pytest.mark.parametrize("columns", [1, 17, 100, 136, 1000])
def test_widths_that_no_kernel_likes(rng: Any, algo: str, columns: int) -> None:
    layer = Layer(rng, algo, columns, [50, 77], "float16")
    for tokens in (1, 16, 130):
        x = layer.x(tokens)
        assert_near(layer.run(x), layer.case.expected(reference.as_float32(x)), "float16")


@pytest.mark.parametrize("algo", FP8)
@pytest.mark.parametrize(
    "rows", [[1], [8], [100], [1, 7, 9, 15, 17], [127, 129, 1], [4104], [1024, 128, 130], [3] * 64]
)
def test_heights_and_partitions(rng: Any, algo: str, rows: list[int]) -> None:
    """Few outputs may be all cancellation, or one that outweighs the rest, so that no norm bounds them."""
    layer = Layer(rng, algo, 384, rows, "bfloat16")
    for tokens in (1, 5, 16, 64, 150):
        x = layer.x(tokens)
        values = reference.as_float32(x)
        y, exact = layer.run(x), layer.case.expected(values)
        assert_within_core_sums(y, exact, layer.case.magnitude(values), "bfloat16")
        if y.size > 2000:
            assert_near(y, exact, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("algo", FP8)
@pytest.mark.parametrize("columns, rows", [(28672, [4104]), (4096, [14336, 1000]), (7168, [2112, 8])])
def test_large_weights(rng: Any, algo: str, columns: int, rows: list[int]) -> None:
    layer = Layer(rng, algo, columns, rows, "bfloat16")
    given = [layer.x(tokens) for tokens in (1, 16, 130)]
    y = np.concatenate([layer.run(x) for x in given])  # of one token, one output may be most of the norm
    assert_near(y, np.concatenate([layer.by_cpu(x) for x in given]), "bfloat16")


@pytest.mark.parametrize("algo", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_of_both_dtypes(rng: Any, algo: str, dtype: str) -> None:
    layer = Layer(rng, algo, 256, [40, 24], dtype)
    for kind in {dtype, "float32"}:
        bias = random_x(rng, (64,), kind)
        for tokens in (5, 80):
            x = layer.x(tokens)
            exact = layer.case.expected(reference.as_float32(x), bias=reference.as_float32(bias))
            assert_near(layer.run(x, to_cuda(bias, kind)), exact, dtype)


def test_missing_input_scale_is_found_from_all_tokens(rng: Any) -> None:
    layer = Layer(rng, "FP8", 640, [70, 9], "bfloat16", input_scale=False)
    assert "input_scale" not in layer.params
    for tokens in (1, 6, 16, 90):
        x = layer.x(tokens)
        assert_near(layer.run(x), layer.case.expected(reference.as_float32(x)), "bfloat16")


@pytest.mark.parametrize("algo", FP8)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 3e38, 1e30, 1e-39])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("tokens", [6, 70])
def test_extreme_activations(rng: Any, algo: str, value: float, scaled: bool, tokens: int) -> None:
    if algo == "FP8_PB_WO" and value == 3e38:
        pytest.skip("the sums of blocks leave float32: infinity or NaN, by the order in which they are added")
    layer = Layer(rng, algo, 256, [16, 20], "bfloat16", input_scale=scaled)
    x = layer.x(tokens)
    x[1, 77] = x[3] = reference.encode(np.float32([value]), "bfloat16")[0]
    y = layer.run(x)
    with np.errstate(all="ignore"):
        exact = layer.by_cpu(x)
        expected = reference.as_float32(reference.encode(exact, "bfloat16"))
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        finite = np.isfinite(y) & np.isfinite(exact)
        assert (finite | np.isnan(y) | (np.abs(exact) > 3.3e38)).all()
        tops = np.abs(np.where(finite, exact, 0)).max(axis=-1, keepdims=True)
        # where others left float32, tops are of what cancelled
        sums = np.where(finite, layer.case.magnitude(reference.as_float32(x)) * FP8_CORE_SUMS, 0)
        assert (np.where(finite, np.abs(y - exact), 0) <= 1e-2 * tops + sums).all()


@pytest.mark.parametrize("algo", FP8)
def test_a_row_alone_and_in_a_batch_have_the_same_bits(rng: Any, algo: str) -> None:
    layer = Layer(rng, algo, 1024, [200], "bfloat16")
    x = to_cuda(layer.x(16), "bfloat16")
    whole = layer.method(x, layer.params)
    for tokens in (1, 3, 8, 9):
        assert torch.equal(layer.method(x[:tokens], layer.params), whole[:tokens])


@pytest.mark.parametrize("algo", FP8)
@pytest.mark.parametrize("tokens", [8, 100])
def test_graph_capture_and_replay(rng: Any, algo: str, tokens: int) -> None:
    layer = Layer(rng, algo, 512, [64, 72], "bfloat16")
    x = to_cuda(layer.x(tokens), "bfloat16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.method(x, layer.params)
        z = layer.method(x, layer.params)  # a dependent launch next to another
    for _ in range(3):
        x.copy_(to_cuda(layer.x(tokens), "bfloat16"))
        y.fill_(float("nan"))
        graph.replay()
        expected = layer.method(x, layer.params)
        assert torch.equal(y, expected)
        assert torch.equal(z, expected)


@pytest.mark.parametrize("tokens", [4, 200])
def test_streams(rng: Any, tokens: int) -> None:
    layer = Layer(rng, "FP8", 4096, [1024], "bfloat16")
    source = to_cuda(layer.x(tokens), "bfloat16")
    expected = layer.method(source, layer.params)
    stream = torch.cuda.Stream()
    for given in (None, stream.cuda_stream, stream):
        if given is stream and not hasattr(stream, "__cuda_stream__"):
            continue
        x, y = torch.zeros_like(source), torch.empty_like(expected)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            x.copy_(source)
            if given is None:
                layer.method(x, layer.params, out=y)
        if given is not None:
            layer.method(x, layer.params, out=y, stream=given)
        stream.synchronize()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("algo", FP8)
def test_ops_linear_is_the_method(rng: Any, algo: str) -> None:
    layer = Layer(rng, algo, 256, [16, 8], "float16")
    x = to_cuda(layer.x(6)).view(2, 3, 256)
    y = ops.linear(x, layer.params, algo, [16, 8])
    assert torch.equal(y, layer.method(x, layer.params))


def test_tensors_of_another_device_are_refused(rng: Any) -> None:
    layer = Layer(rng, "FP8", 128, [8], "float32")
    x = to_cuda(layer.x(2))
    with pytest.raises(ValueError, match=r"^weight: expected a tensor on cuda:0, got one on cpu"):
        layer.method(x, {name: to_numpy(value) for name, value in layer.params.items()})
    with pytest.raises(ValueError, match=r"^bias: expected a tensor on cuda:0, got one on cpu"):
        layer.method(x, layer.params, np.zeros(8, np.float32))


def test_the_kernel_of_a_few_tokens_on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for Hopper")
    method = LinearMethod("FP8", 4096, [28672], device="cuda:0")
    assert method.backend == "cuda:sm90_fp8_decode"
    assert "cuda:sm90_fp8_decode chosen" in " ".join(method.explain().split())

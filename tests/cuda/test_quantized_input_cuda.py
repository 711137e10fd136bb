"""Linears whose x is FP8 codes already, on every CUDA kernel that takes them."""

import numpy as np
import pytest

from moqext import ops, reference

from ..linear_cases import assert_close, random_case, random_x

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from .cases import DTYPES, force, on_host, poisoned, to_cuda, to_numpy  # noqa: E402

FEW = "cuda:sm90_fp8_decode"
KERNELS = (FEW, "cuda:sm90_fp8_prefill", "cuda:sm89_fp8", "cuda:sm80_fp8", "cuda:cublaslt")
COLUMNS = 1408  # no multiple of the steps of 512
TOKENS = (1, 2, 5, 8, 9, 16, 33, 64, 130, 300)


def tokens_of(kernel):
    """Numbers that a kernel takes."""
    return [count for count in TOKENS if kernel != FEW or count <= 16]


class Coded:
    """A layer for codes, beside the one on the same kernel that quantizes by itself."""

    def __init__(self, rng, dtype, kernel, columns=COLUMNS, rows=208):
        self.case = random_case(rng, "FP8", columns, [rows])
        self.scale = self.case.parts[0]["input_scale"]
        self.dtype = dtype
        options = {"dtype": dtype, "device": "cuda:0"}
        self.method = self.case.method(**options, quantized_input=True)
        self.plain = self.case.method(**options)
        host = on_host(self.case, dtype=dtype).prepare(self.case.fused())
        self.params = {name: to_cuda(value) for name, value in host.items()}
        assert kernel is None or self.method.backend == kernel

    def draw(self, rng, tokens):
        """x and its codes."""
        x = random_x(rng, (tokens, self.case.in_features), self.dtype)
        codes = reference.quantize_fp8_static(reference.as_float32(x), self.scale)
        return x, to_cuda(codes).view(torch.float8_e4m3fn)


@pytest.fixture(params=[*KERNELS, None])
def kernel(request, monkeypatch):
    if request.param:
        force(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_are_those_of_the_reference(rng, kernel, dtype):
    layer = Coded(rng, dtype, kernel)
    bias = rng.standard_normal(208).astype(np.float32)
    for tokens in tokens_of(kernel):
        x, codes = layer.draw(rng, tokens)
        out = poisoned(tokens, 208, dtype=dtype)
        assert layer.method(codes, layer.params, to_cuda(bias), out) is out
        assert_close(to_numpy(out), layer.case.expected(reference.as_float32(x), "exact", bias), dtype)
        again = layer.method(codes, layer.params, to_cuda(bias))
        assert again.dtype == DTYPES[dtype]
        assert torch.equal(again, out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_kernel_gives_the_same_bits(rng, monkeypatch, kernel):
    force(monkeypatch, kernel)
    layer = Coded(rng, "bfloat16", kernel)
    for tokens in tokens_of(kernel):
        x, codes = layer.draw(rng, tokens)
        variant = layer.method._plan.config(tokens)[1] if kernel == "cuda:sm90_fp8_prefill" else 0
        layer.plain._plan.keep(tokens, kernel, variant)
        layer.method._plan.keep(tokens, kernel, variant)
        expected = layer.plain(to_cuda(x, "bfloat16"), layer.params)
        assert torch.equal(layer.method(codes, layer.params), expected)


def test_long_rows_in_passes_and_clusters(rng, monkeypatch):
    """Where the kernel of few tokens splits K, and where codes do not fit beside its ring."""
    force(monkeypatch, FEW)
    for columns in (14336, 28672):
        layer = Coded(rng, "bfloat16", FEW, columns=columns, rows=136)
        for tokens in (1, 3, 16):
            x, codes = layer.draw(rng, tokens)
            y = layer.method(codes, layer.params)
            assert torch.equal(y, layer.plain(to_cuda(x, "bfloat16"), layer.params))


def test_every_variant(rng, monkeypatch):
    kernel = "cuda:sm90_fp8_prefill"
    force(monkeypatch, kernel)
    layer = Coded(rng, "bfloat16", kernel, columns=1040, rows=300)
    for tokens in (31, 64, 100, 260, 600):
        x, codes = layer.draw(rng, tokens)
        expected = layer.case.expected(reference.as_float32(x))
        for variant in range(18):
            layer.method._plan.keep(tokens, kernel, variant)
            out = poisoned(tokens, 300, dtype="bfloat16")
            layer.method(codes, layer.params, out=out)
            assert_close(to_numpy(out), expected, "bfloat16")


def test_any_strides_and_addresses(rng, kernel):
    layer = Coded(rng, "bfloat16", kernel)
    _, codes = layer.draw(rng, 13)
    expected = layer.method(codes, layer.params)
    room = torch.full((13 * 1700 + 1,), 0x38, dtype=torch.uint8, device="cuda")
    apart = room[1:].view(13, 1700)[:, 3 : 3 + COLUMNS]
    apart.copy_(codes.view(torch.uint8))
    assert torch.equal(layer.method(apart.view(torch.float8_e4m3fn), layer.params), expected)
    padded = torch.full((13, COLUMNS + 16), 0x38, dtype=torch.uint8, device="cuda")
    padded[:, :COLUMNS] = codes.view(torch.uint8)
    assert torch.equal(layer.method(padded[:, :COLUMNS].view(torch.float8_e4m3fn), layer.params), expected)


def test_what_a_fused_step_quantizes_in_a_graph(rng):
    layer = Coded(rng, "bfloat16", None)
    gates = torch.randn(40, 2 * COLUMNS, device="cuda").bfloat16()
    scale = layer.params["input_scale"]

    def step():
        codes, _ = ops.silu_and_mul_quantize(gates, "fp8_tensor", scale=scale)
        return layer.method(codes, layer.params)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, expected)


def test_torch_sees_an_operation(rng):
    import moqext_torch  # noqa: F401

    layer = Coded(rng, "bfloat16", None)
    _, codes = layer.draw(rng, 7)
    tensors = [
        layer.params.get(role)
        for role in ("weight", "weight_scale", "output_scale", "input_scale", "pre_quant_scale", "fold_scale")
    ]
    arguments = (codes, *tensors, None, "FP8", [208], None, "exact", False, torch.bfloat16)
    y = torch.ops.moqext.linear(*arguments)
    assert torch.equal(y, layer.method(codes, layer.params))
    compiled = torch.compile(lambda: torch.ops.moqext.linear(*arguments), fullgraph=True)
    assert torch.equal(compiled(), y)


def test_tuning_measures_codes(rng):
    layer = Coded(rng, "bfloat16", None)
    found = layer.method.tune([24], layer.params)
    assert found
    x, codes = layer.draw(rng, 24)
    assert_close(
        to_numpy(layer.method(codes, layer.params)), layer.case.expected(reference.as_float32(x)), "bfloat16"
    )

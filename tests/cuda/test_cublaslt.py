"""FP8 linears by cuBLASLt on the device: against the reference and the CPU, and what is refused by name."""

import subprocess
import sys

import numpy as np
import pytest

from moqext import _C, reference

from ..linear_cases import LIMITS, poisoned, random_case, random_x

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
DTYPES = ("bfloat16", "float16")


@pytest.fixture(autouse=True)
def cublaslt(monkeypatch):
    path, _, reason = _C.cublaslt()
    if path is None:
        pytest.skip(reason)
    monkeypatch.setenv("MOQEXT_KERNEL", "cuda:cublaslt")


def on_device(array, dtype=None):
    """A copy as a torch tensor on the device; `dtype` says what 16 bits are."""
    bits = torch.from_numpy(
        np.ascontiguousarray(array).view(np.int16 if dtype == "bfloat16" else array.dtype)
    )
    return bits.cuda().view(torch.bfloat16) if dtype == "bfloat16" else bits.cuda()


def on_host(tensor):
    """The values as an array, bfloat16 as uint16 bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(np.uint16)
    return tensor.cpu().numpy()


class Layer:
    """One layer on the CPU, by whichever kernel, and on the device by cuBLASLt."""

    def __init__(self, monkeypatch, case, dtype, **options):
        self.case, self.dtype = case, dtype
        self.method = case.method(dtype=dtype, device="cuda:0", **options)
        monkeypatch.delenv("MOQEXT_KERNEL")
        self.cpu = case.method(dtype=dtype)
        monkeypatch.setenv("MOQEXT_KERNEL", "cuda:cublaslt")
        self.cpu_params = self.cpu.prepare(case.listed())
        self.params = {name: on_device(np.asarray(p)) for name, p in self.cpu_params.items()}

    def run(self, x, bias=None, bias_dtype=None):
        bias = None if bias is None else on_device(bias, bias_dtype or self.dtype)
        out = on_device(poisoned((*x.shape[:-1], self.method.out_features), self.dtype), self.dtype)
        assert self.method(on_device(x, self.dtype), self.params, bias, out) is out
        return on_host(out)

    def check(self, y, x, bias=None):
        expected = self.cpu(x, self.cpu_params, bias)
        y, expected = (reference.as_float32(np.asarray(v)).astype(np.float64) for v in (y, expected))
        limit, limit_max = LIMITS[self.dtype]
        difference = np.abs(y - expected)
        assert np.isfinite(y).all()
        assert np.linalg.norm(difference) <= limit * np.linalg.norm(expected)
        assert (difference <= limit_max * np.abs(expected).max(axis=-1, keepdims=True, initial=0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algo", ALGOS)
def test_matches_the_cpu(rng, monkeypatch, algo, dtype):
    layer = Layer(monkeypatch, random_case(rng, algo, 1040, [256, 144]), dtype)
    for tokens in (1, 2, 4, 7, 17, 64, 129, 300):
        x = random_x(rng, (tokens, 1040), dtype)
        layer.check(layer.run(x), x)


@pytest.mark.parametrize("algo", ALGOS)
def test_matches_the_reference(rng, monkeypatch, algo):
    case = random_case(rng, algo, 512, [128, 128])
    layer = Layer(monkeypatch, case, "bfloat16")
    x = random_x(rng, (33, 512), "bfloat16")
    y = reference.as_float32(layer.run(x)).astype(np.float64)
    expected = reference.round_to(case.expected(reference.as_float32(x)), "bfloat16").astype(np.float64)
    assert np.linalg.norm(y - expected) <= LIMITS["bfloat16"][0] * np.linalg.norm(expected)


@pytest.mark.parametrize("rows", [[16], [48, 16, 80], [128, 256, 16], [144, 128]])
@pytest.mark.parametrize("algo", ALGOS)
def test_partitions_keep_their_scales(rng, monkeypatch, algo, rows):
    """Partitions of FP8 each have an input scale; a partition of FP8_PB_WO begins a block, whole or not."""
    layer = Layer(monkeypatch, random_case(rng, algo, 384, rows), "bfloat16")
    x = random_x(rng, (50, 384), "bfloat16")
    layer.check(layer.run(x), x)


@pytest.mark.parametrize("bias_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algo", ALGOS)
def test_bias(rng, monkeypatch, algo, dtype, bias_dtype):
    bias_dtype = dtype if bias_dtype == "same" else bias_dtype
    layer = Layer(monkeypatch, random_case(rng, algo, 256, [64, 64]), dtype)
    bias = random_x(rng, (128,), bias_dtype)
    for tokens in (20, 21):
        x = random_x(rng, (tokens, 256), dtype)
        layer.check(layer.run(x, bias, bias_dtype), x, bias)


@pytest.mark.parametrize("algo", ["FP8"])
def test_scale_of_the_whole_tensor_found_from_it(rng, monkeypatch, algo):
    layer = Layer(monkeypatch, random_case(rng, algo, 256, [64, 32], input_scale=False), "bfloat16")
    x = random_x(rng, (40, 256), "bfloat16")
    layer.check(layer.run(x), x)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_partitions_that_share_an_input_scale(rng, monkeypatch, dtype, given):
    """Fused partitions are one product, with a weight scale each; both ways of scaling are right."""
    case = random_case(rng, "FP8", 1024, [512, 40, 8], input_scale=given)
    for part in case.parts[1:] if given else ():
        part["input_scale"] = case.parts[0]["input_scale"]
    layer = Layer(monkeypatch, case, dtype, one_input_scale=True)
    bias = random_x(rng, (560,), dtype)
    for tokens in (17, 64, 260, 1031):
        x = random_x(rng, (tokens, 1024), dtype)
        for variant in (0, 8):
            layer.method._plan.keep(tokens, "cuda:cublaslt", variant)
            layer.check(layer.run(x), x)
            layer.check(layer.run(x, bias), x, bias)


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_fast_accumulation_is_less_exact(rng, monkeypatch, algo):
    """Sums stay in the tensor cores' 14 bits: other outputs, within 1 % of exact ones."""
    case = random_case(rng, algo, 8192, [256])
    layer = Layer(monkeypatch, case, "bfloat16", fast_accum=True)
    x = random_x(rng, (512, 8192), "bfloat16")
    expected = reference.as_float32(np.asarray(layer.cpu(x, layer.cpu_params))).astype(np.float64)
    y = reference.as_float32(layer.run(x)).astype(np.float64)
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    exact = Layer(monkeypatch, case, "bfloat16")
    usual = reference.as_float32(exact.run(x)).astype(np.float64)
    print(
        algo, "relative error", error, "without", np.linalg.norm(usual - expected) / np.linalg.norm(expected)
    )
    assert error <= 1e-2
    assert np.any(y != usual)


@pytest.mark.parametrize("algo", ALGOS)
def test_any_layout_of_x_and_out(rng, monkeypatch, algo):
    layer = Layer(monkeypatch, random_case(rng, algo, 128, [64]), "bfloat16")
    x = random_x(rng, (6, 5, 300), "bfloat16")
    for part in (x[..., :128], x[..., 3:131], x.transpose(1, 0, 2)[..., 100:228], x[..., :256:2]):
        wide = torch.full((*part.shape[:-1], 100), float("nan"), dtype=torch.bfloat16, device="cuda")
        out = wide[..., 5:69]
        whole = on_device(x, "bfloat16")
        strided = torch.as_strided(
            whole, part.shape, [s // 2 for s in part.strides], (part.ctypes.data - x.ctypes.data) // 2
        )
        layer.method(strided, layer.params, out=out)
        layer.check(on_host(out.contiguous()), np.ascontiguousarray(part))
        assert torch.isnan(wide[..., :5]).all()
        assert torch.isnan(wide[..., 69:]).all()


@pytest.mark.parametrize("algo", ALGOS)
def test_the_same_bits_in_every_run_and_in_a_graph(rng, monkeypatch, algo):
    layer = Layer(monkeypatch, random_case(rng, algo, 2048, [1024]), "bfloat16")
    x = on_device(random_x(rng, (70, 2048), "bfloat16"), "bfloat16")
    y = layer.method(x, layer.params)
    for _ in range(3):
        assert torch.equal(y, layer.method(x, layer.params))
    graph, out = torch.cuda.CUDAGraph(), torch.full_like(y, float("nan"))
    with torch.cuda.graph(graph):
        layer.method(x, layer.params, out=out)
    graph.replay()
    assert torch.equal(y, out)


@pytest.mark.parametrize("algo", ALGOS)
def test_scales_anywhere_in_memory(rng, monkeypatch, algo):
    """cuBLASLt wants them at multiples of 16 bytes."""
    layer = Layer(monkeypatch, random_case(rng, algo, 512, [64]), "bfloat16")
    for name in set(layer.params) - {"weight"}:
        values = layer.params[name]
        odd = torch.empty(values.numel() + 1, device="cuda")[1:].reshape(values.shape)
        layer.params[name] = odd.copy_(values)
    x = random_x(rng, (12, 512), "bfloat16")
    layer.check(layer.run(x), x)


@pytest.mark.slow
def test_more_rows_than_a_grid_has(rng, monkeypatch):
    """70,001 rows, an odd number, so that the results of block scales go through the workspace."""
    layer = Layer(monkeypatch, random_case(rng, "FP8_PB_WO", 128, [16]), "bfloat16")
    x = random_x(rng, (70_001, 128), "bfloat16")
    layer.check(layer.run(x), x)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGOS)
def test_every_algorithm_is_right(rng, monkeypatch, algo):
    """Every variant that tune() chooses among keeps the contract and gives equal bits in every run."""
    layer = Layer(monkeypatch, random_case(rng, algo, 4096, [512]), "bfloat16")
    for tokens in (19, 200):
        x = random_x(rng, (tokens, 4096), "bfloat16")
        timings = layer.method.tune([tokens], layer.params)
        assert {timing.kernel for timing in timings} == {"cuda:cublaslt"}
        variants = {timing.variant for timing in timings}
        assert len(variants) == len(timings)
        assert {variant // 8 for variant in variants} == ({0, 1} if algo == ALGOS[1] else {0})
        for variant in variants:
            layer.method._plan.keep(tokens, "cuda:cublaslt", variant)
            y = layer.run(x)
            layer.check(y, x)
            np.testing.assert_array_equal(y, layer.run(x))


@pytest.mark.slow
def test_the_first_call_can_be_captured():
    """In a process of its own: the handle is made, and the library asked, when the layer is made."""
    code = """
import torch
from moqext import LinearMethod
m = LinearMethod("FP8", 64, [32], device="cuda:0")
p = {"weight": torch.full((32, 64), 0x38, dtype=torch.uint8, device="cuda"),
     "output_scale": torch.ones(32, device="cuda"), "input_scale": torch.ones(1, device="cuda")}
x, y = (torch.ones(4, n, dtype=torch.bfloat16, device="cuda") for n in (64, 32))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    m(x, p, out=y)
graph.replay()
print(m.backend_for(4), float(y.min()), float(y.max()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "cuda:cublaslt 64.0 64.0\n", done.stdout + done.stderr


def test_a_layer_is_made_while_another_stream_is_captured():
    """The library is asked on the host alone."""
    code = """
import torch
from moqext import LinearMethod
x = torch.ones(8, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x += 1
    m = LinearMethod("FP8", 64, [32], device="cuda:0")
graph.replay()
print(float(x.sum()), dict(m._plan.explain())["cuda:cublaslt"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "16.0 None\n", done.stdout + done.stderr

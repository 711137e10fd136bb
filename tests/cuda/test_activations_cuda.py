"""`silu_and_mul`, `rms_norm` and `rotary_embedding` on CUDA tensors: the bits of the CPU."""

import numpy as np
import pytest

from moqext import ops

from ..quantize_cases import KINDS, hostile

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

from .test_fused import SHAPES  # noqa: E402
from .test_quantize import DTYPES, on_gpu  # noqa: E402

HEADS = [
    (1, 1, 40, 128),
    (16, 1, 40, 128),
    (1, 77, 8, 64),
    (3, 5, 2, 18),
    (2, 3, 7, 8),
    (1, 70001, 1, 16),
    (2, 0, 3, 8),
    (1, 2, 1, 4096),
]


def same(got, wanted):
    """NaN with NaN, every other value with its bits."""
    got, wanted = got.cpu(), wanted.cpu()
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    kind = torch.int32 if wanted.element_size() == 4 else torch.int16
    alike = (got.contiguous().view(kind) == wanted.contiguous().view(kind)) | (got.isnan() & wanted.isnan())
    assert bool(alike.all())


def compare(function, *args, **options):
    actual = function(*args, **options)
    host = [value.cpu() if hasattr(value, "cpu") else value for value in args]
    expected = function(*host, **{name: value.cpu() for name, value in options.items()})
    if not isinstance(actual, tuple):
        actual, expected = (actual,), (expected,)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.is_cuda
        same(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_and_rms_norm(rng, shape, dtype):
    kinds = KINDS if np.prod(shape) < 10000 else ["normal", str(rng.choice(KINDS))]
    for kind in kinds:
        with np.errstate(over="ignore"):
            x, _ = on_gpu(hostile(rng, (*shape[:-1], 2 * shape[-1]), kind) * 3, dtype)
        compare(ops.silu_and_mul, x)
        x = x[..., : shape[-1]]
        residual, _ = on_gpu(rng.standard_normal(shape), dtype)
        weight, _ = on_gpu(rng.standard_normal(shape[-1]), dtype if rng.integers(2) else "float32")
        for each in (x, x.contiguous()):
            compare(ops.rms_norm, each, weight, 1e-6)
            compare(ops.rms_norm, each, weight, 1e-6, residual=residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_rotary_embedding(rng, shape, dtype):
    batch, tokens, heads, columns = shape
    wide, _ = on_gpu(hostile(rng, (batch, tokens, heads + 3, columns), "normal"), dtype)
    for of_all in {1, batch}:
        turns = rng.uniform(-np.pi, np.pi, (of_all, tokens, columns)).astype(np.float32)
        cos, sin = on_gpu(np.cos(turns), dtype)[0], on_gpu(np.sin(turns), dtype)[0]
        for x in (wide[:, :, :heads], wide[:, :, 1 : heads + 1].contiguous(), wide[:, :, 1 : heads + 1]):
            compare(ops.rotary_embedding, x, cos, sin)
        compare(ops.rotary_embedding, wide.flip(-1)[..., ::2], cos[..., ::2], sin[..., ::2]) if (
            columns % 4 == 0
        ) else None
    for kind in KINDS:
        with np.errstate(over="ignore"):
            x, _ = on_gpu(hostile(rng, (batch, min(tokens, 9), heads, columns), kind), dtype)
        compare(ops.rotary_embedding, x, cos[:1, :9], sin[:1, :9])


def test_values_are_those_that_are_quantized(rng):
    x, _ = on_gpu(rng.standard_normal((5, 8192)), "bfloat16")
    weight, _ = on_gpu(rng.standard_normal(8192), "bfloat16")
    for values, fused in (
        (ops.silu_and_mul(x), ops.silu_and_mul_quantize(x, "fp8_token")),
        (ops.rms_norm(x, weight, 1e-5), ops.rms_norm_quantize(x, weight, 1e-5, "fp8_token")),
    ):
        codes, scales = ops.quantize(values, "fp8_token")
        assert torch.equal(codes.view(torch.uint8), fused[0].view(torch.uint8))
        assert torch.equal(scales, fused[1])


def test_misaligned(rng):
    base, _ = on_gpu(rng.standard_normal(3 * 4096 * 2 + 8), "bfloat16")
    for shift in (1, 4):
        x = base[shift : shift + 3 * 4096].view(3, 4096)
        weight = base[shift : shift + 4096]
        compare(ops.silu_and_mul, x)
        compare(ops.rms_norm, x, weight, 1e-6, residual=x)
        heads = x.view(1, 3, 32, 128)
        compare(ops.rotary_embedding, heads, heads[:, :, 0], heads[:, :, 1])
        out = torch.empty(3 * 4096 + 8, dtype=x.dtype, device="cuda").fill_(float("nan"))
        inside = out[shift : shift + 3 * 4096].view(3, 4096)
        ops.rms_norm(x, weight, 1e-6, out=inside)
        same(inside, ops.rms_norm(x.cpu(), weight.cpu(), 1e-6))
        assert int(out.isnan().sum()) == 8


def test_a_graph_replays_a_chain(rng):
    """Each kernel reads what the one before wrote, so what is launched early has to wait."""
    x, _ = on_gpu(rng.standard_normal((3, 4096)), "bfloat16")
    weight, _ = on_gpu(rng.standard_normal(4096), "bfloat16")
    cos, sin = (on_gpu(rng.standard_normal((1, 3, 128)), "bfloat16")[0] for _ in range(2))

    def chain(x, weight, cos, sin):
        z = x
        for _ in range(8):
            v, z = ops.rms_norm(x, weight, 1e-5, residual=z)
            turned = ops.rotary_embedding(v.view(1, 3, 32, 128), cos, sin)
            x = ops.silu_and_mul(turned.view(3, 1, 4096).expand(3, 2, 4096).reshape(3, 8192))
        return x, z

    chain(x, weight, cos, sin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain(x, weight, cos, sin)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for got, wanted in zip(results, chain(x.cpu(), weight.cpu(), cos.cpu(), sin.cpu()), strict=True):
            same(got, wanted)

"""`silu_and_mul_quantize` and `rms_norm_quantize` on CUDA tensors: the bits of the CPU."""

import numpy as np
import pytest

from moqext import ops, reference

from ..quantize_cases import KINDS, hostile

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

from .test_quantize import DTYPES, SCHEMES, fits, on_gpu, same  # noqa: E402

SHAPES = [
    (1, 128),
    (3, 16),
    (2, 3, 272),
    (9, 7),
    (257, 48),
    (4, 1000),
    (3, 4099),
    (2, 8192),
    (3, 14336),
    (2, 40000),
    (70001, 32),
    (160, 4096),  # too many for the shortest chunks
    (96, 7168),
    (40, 14336),
    (20, 28672),
    (5, 5136),  # on clusters whose last block has less
    (50, 8192),
    (0, 32),
]


def host_of(options):
    return {name: value.cpu() if hasattr(value, "cpu") else value for name, value in options.items()}


def compare(function, x, *args, **options):
    """On the GPU and on copies in host memory."""
    actual = function(x, *args, **options)
    on_host = [value.cpu() if hasattr(value, "cpu") else value for value in args]
    expected = function(x.cpu(), *on_host, **host_of(options))
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        if hasattr(got, "is_cuda") and got is not options.get("scale"):
            assert got.is_cuda
            if wanted.dtype.itemsize == 2:
                np.testing.assert_array_equal(got.cpu().float().numpy(), wanted.float().numpy())
            else:
                same(got, wanted.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_and_mul(rng, shape, dtype):
    kinds = KINDS if np.prod(shape) < 10000 else ["normal", str(rng.choice(KINDS))]
    for kind in kinds:
        with np.errstate(over="ignore"):
            x, _ = on_gpu(hostile(rng, (*shape[:-1], 2 * shape[-1]), kind) * 3, dtype)
        for scheme in SCHEMES:
            if fits(shape, scheme):
                compare(ops.silu_and_mul_quantize, x, scheme)
                if scheme in ("fp8_tensor", "nvfp4", "nvfp4_swizzled"):
                    scale = float(np.exp2(rng.uniform(-10, 4)))
                    compare(ops.silu_and_mul_quantize, x, scheme, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(rng, shape, dtype):
    kinds = KINDS if np.prod(shape) < 10000 else ["normal", str(rng.choice(KINDS))]
    for kind in kinds:
        with np.errstate(over="ignore"):
            x, _ = on_gpu(hostile(rng, shape, kind), dtype)
        residual, _ = on_gpu(rng.standard_normal(shape), dtype)
        weight, _ = on_gpu(rng.standard_normal(shape[-1]), dtype if rng.integers(2) else "float32")
        for scheme in SCHEMES:
            if fits(shape, scheme):
                compare(ops.rms_norm_quantize, x, weight, 1e-6, scheme)
                compare(ops.rms_norm_quantize, x, weight, 1e-6, scheme, residual=residual)
                if scheme in ("fp8_tensor", "nvfp4", "nvfp4_swizzled"):
                    compare(ops.rms_norm_quantize, x, weight, 0.0, scheme, residual=residual, scale=0.25)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_beside_codes(rng, shape, dtype):
    """Values are those of rms_norm; codes, scales and z stay what they are without value_out."""
    x, _ = on_gpu(hostile(rng, shape, "normal"), dtype)
    residual, _ = on_gpu(rng.standard_normal(shape), dtype)
    weight, _ = on_gpu(rng.standard_normal(shape[-1]), dtype if rng.integers(2) else "float32")
    for scheme in SCHEMES:
        for options in ({}, {"residual": residual}):
            if not fits(shape, scheme):
                continue
            v = ops.rms_norm(x, weight, 1e-6, **options)
            out = torch.full_like(x, float("nan"))
            found = ops.rms_norm_quantize(x, weight, 1e-6, scheme, value_out=out, **options)
            assert same_bits(out, v[0] if options else v)
            expected = ops.rms_norm_quantize(x, weight, 1e-6, scheme, **options)
            assert all(same_bits(got, wanted) for got, wanted in zip(found, expected, strict=True))


def same_bits(one, other):
    return one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_gate_of_16_bits(dtype):
    """silu on the device against the reference: up is 1, and three scales show every code E4M3 has."""
    gates = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    x = torch.stack([gates.view(-1, 16), torch.ones_like(gates).view(-1, 16)], dim=1).reshape(-1, 32)
    v = reference.silu_and_mul(x.float().numpy(), dtype)
    for scale in (1.0, 2.0**-20, 2.0**20):
        codes, _ = ops.silu_and_mul_quantize(x.cuda(), "fp8_tensor", scale=scale)
        same(codes, torch.from_numpy(reference.quantize_fp8_static(v, np.float32(scale))).view(codes.dtype))


def test_silu_of_float32(rng):
    """The scale of a group with one value is its magnitude / 448: all bits of silu but the last few."""
    x = torch.zeros(65536, 32)
    x[:, 0] = torch.from_numpy(rng.uniform(-24, 90, 65536).astype(np.float32))
    x[:, 16] = 1.0
    compare(ops.silu_and_mul_quantize, x.cuda(), "fp8_group")


def test_in_place_and_strides(rng):
    base = torch.from_numpy(rng.standard_normal((6, 10, 64)).astype(np.float32)).to(torch.bfloat16).cuda()
    weight = torch.from_numpy(rng.standard_normal(128)).to(torch.bfloat16).cuda()
    for x in (base[::2], base[:, 3:4, ::2], base.transpose(1, 0), base.transpose(2, 0), base[:, :, 1:49]):
        k = x.shape[-1]
        compare(ops.silu_and_mul_quantize, x, "fp8_token")
        compare(ops.rms_norm_quantize, x, weight[: 2 * k : 2], 1e-6, "fp8_token", residual=x)
    x, residual = base, torch.randn_like(base)
    for scheme in SCHEMES:
        expected = ops.rms_norm_quantize(x, weight[:64], 1e-6, scheme, residual=residual)
        inside = residual.clone()
        actual = ops.rms_norm_quantize(x, weight[:64], 1e-6, scheme, residual=inside, residual_out=inside)
        assert actual[-1] is inside
        for got, wanted in zip(actual, expected, strict=True):
            same(got, wanted.cpu())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_graph_replays_them(rng, scheme):
    x, _ = on_gpu(rng.standard_normal((33, 4096)), "bfloat16")
    weight = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    residual = torch.randn_like(x)
    ops.rms_norm_quantize(x, weight, 1e-6, scheme, residual=residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ops.rms_norm_quantize(x, weight, 1e-6, scheme, residual=residual)
        results += ops.silu_and_mul_quantize(x, scheme)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        for result in results:
            result.reshape(-1).view(torch.uint8).fill_(0xA5)
        graph.replay()
        expected = ops.rms_norm_quantize(x.cpu(), weight.cpu(), 1e-6, scheme, residual=residual.cpu())
        expected += ops.silu_and_mul_quantize(x.cpu(), scheme)
        for got, wanted in zip(results, expected, strict=True):
            if wanted.dtype.itemsize == 2:
                np.testing.assert_array_equal(got.cpu().float().numpy(), wanted.float().numpy())
            else:
                same(got, wanted.cpu())

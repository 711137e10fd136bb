"""`moqext.ops.quantize` on CUDA tensors: the bits of the CPU."""

import numpy as np
import pytest

from moqext import ops

from ..quantize_cases import KINDS, hostile

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SCHEMES = ["fp8_tensor", "fp8_token", "fp8_group", "nvfp4", "nvfp4_swizzled"]
SHAPES = [
    (1, 128),
    (3, 16),
    (2, 3, 272),
    (5, 144),
    (257, 48),
    (9, 7),  # ends and rows that are not aligned
    (4, 1000),
    (3, 4099),
    (2, 8192),
    (3, 14336),
    (2, 40000),  # more than threads keep
    (70001, 32),  # more rows than one dimension of a grid but the first
    (1, 300000),
    (160, 4096),  # too many for the shortest chunks
    (96, 7168),
    (40, 14336),
    (20, 28672),
    (0, 32),
    (3, 0),
    (16,),
]


def on_gpu(x, dtype):
    """A tensor on the GPU and the same on the CPU."""
    t = torch.from_numpy(np.asarray(x)).to(DTYPES[dtype])
    return t.cuda(), t


def raw(t):
    return t.cpu().contiguous().view(-1).view(torch.uint8).numpy()


def same(actual, expected):
    """Equal bytes; the sign and payload of NaN are left open."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if expected.dtype == torch.float32:
        np.testing.assert_array_equal(actual.cpu().numpy(), expected.numpy())
        return
    a, b = raw(actual), raw(expected)
    if expected.dtype == torch.float8_e4m3fn:
        nan = (a & 0x7F == 0x7F) & (b & 0x7F == 0x7F)
        a, b = a[~nan], b[~nan]
    np.testing.assert_array_equal(a, b)


def compare(x, host, scheme, **options):
    actual = ops.quantize(x, scheme, **options)
    on_host = {name: value.cpu() if hasattr(value, "cpu") else value for name, value in options.items()}
    expected = ops.quantize(host, scheme, **on_host)
    given = options.get("scale") is not None
    for got, wanted in zip(actual[: len(actual) - given], expected, strict=False):
        assert got.is_cuda
        same(got, wanted)


def fits(shape, scheme):
    if scheme in ("nvfp4", "nvfp4_swizzled"):
        return len(shape) > 0 and shape[-1] % 16 == 0
    return len(shape) > 0 or scheme == "fp8_tensor"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_the_cpu(rng, shape, dtype):
    kinds = KINDS if np.prod(shape) < 10000 else ["normal", str(rng.choice(KINDS))]
    for kind in kinds:
        with np.errstate(over="ignore"):
            x, host = on_gpu(hostile(rng, shape, kind), dtype)
        for scheme in SCHEMES:
            if fits(shape, scheme):
                compare(x, host, scheme)
        for scheme in ("fp8_tensor", "nvfp4", "nvfp4_swizzled"):
            if fits(shape, scheme):
                scale = float(np.exp2(rng.uniform(-10, 4)))
                compare(x, host, scheme, scale=scale)
                compare(x, host, scheme, scale=torch.tensor([scale], device="cuda"))
        if fits(shape, "fp8_group"):
            for group in (7, 32, 200):
                compare(x, host, "fp8_group", group_size=group)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quotients_are_those_of_a_division(rng, dtype):
    """Every 16-bit value under random scales, and under those that lie next to a tie."""
    bits = np.arange(65536, dtype=np.uint16).view(np.int16)
    values = torch.from_numpy(bits).view(DTYPES[dtype])
    values = values[torch.isfinite(values)]
    order = torch.argsort(values.float().abs(), descending=True)
    values = values[order]  # the first of a row is its amax
    rows = []
    for start in rng.integers(0, values.numel() - 4096, 3000):
        rows.append(values[int(start) : int(start) + 4096])
    host = torch.stack(rows)
    compare(host.cuda(), host, "fp8_token")
    compare(host.cuda(), host, "fp8_group")
    compare(host.cuda(), host, "nvfp4")


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bits", [("bfloat16", 7), ("float16", 10)])
def test_every_quotient_by_a_scale_of_its_amax(dtype, bits):
    """All significands under all of amax, 21 binades down, where the kernels multiply by a reciprocal."""
    significands = 1 + np.arange(1 << bits) / (1 << bits)
    values = np.concatenate([significands * 2.0**-e for e in range(21)] + [-significands])
    values = np.pad(values, (0, -len(values) % 127)).reshape(-1, 127)
    for some in np.split(significands, max(1, len(significands) // 128)):
        amax = some[:, None, None]
        x = np.where(np.abs(values)[None] <= amax, values[None], 0)
        x = np.concatenate([np.broadcast_to(amax, (*x.shape[:2], 1)), x], axis=2)  # the amax of each group
        x, host = on_gpu(x.reshape(len(some), -1), dtype)
        compare(x, host, "fp8_token")
        compare(x, host, "fp8_group")


def test_float32_quotients_next_to_ties(rng):
    """x = tie * scale and its neighbours, where one wrong bit of a quotient is another code."""
    ties = np.array([(2 * m + 1) * 2.0**e for e in range(-10, 5) for m in range(8, 16)], np.float32)
    amax = rng.uniform(0.5, 2.0, (4096, 1)).astype(np.float32) * np.exp2(rng.integers(-20, 20, (4096, 1)))
    amax = amax.astype(np.float32)
    scale = amax / np.float32(448)
    x = (ties[None] * scale).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, 0), np.nextafter(x, np.float32(np.inf)), -x], axis=1)
    x = np.minimum(np.maximum(x, -amax), amax)
    x[:, :1] = amax
    x = np.pad(x, [(0, 0), (0, -x.shape[1] % 128)])
    host = torch.from_numpy(x)
    compare(host.cuda(), host, "fp8_token")
    blocks = torch.from_numpy(np.concatenate([amax, x[:, 1:128]], axis=1).astype(np.float32))
    compare(blocks.cuda(), blocks, "fp8_group")


def test_a_scalar_is_a_tensor_too():
    host = torch.tensor(-3.5)
    compare(host.cuda(), host, "fp8_tensor")


def test_strides(rng):
    base = torch.from_numpy(rng.standard_normal((6, 10, 64)).astype(np.float32)).to(torch.bfloat16)
    for view in (
        lambda t: t[::2],
        lambda t: t[:, 3:4, ::2],
        lambda t: t.transpose(1, 0),
        lambda t: t.transpose(2, 0),
        lambda t: t[:, :, 1:49],
        lambda t: t[:1, :1].expand(3, 2, 64),
    ):
        x = view(base.cuda())
        for scheme in SCHEMES:
            if fits(x.shape, scheme):
                compare(x, view(base).contiguous(), scheme)


def test_outputs_are_written_in_place_and_in_full(rng):
    x, host = on_gpu(rng.standard_normal((5, 160)), "bfloat16")
    for scheme, scales in (("fp8_tensor", ()), ("fp8_token", (5, 1)), ("fp8_group", (5, 2))):
        out = torch.full((5, 160), 0xA5, dtype=torch.uint8, device="cuda")
        scale_out = torch.full(scales, -7.0, device="cuda")
        codes, scale = ops.quantize(x, scheme, out=out, scale_out=scale_out)
        assert codes is out
        assert scale is scale_out
        expected = ops.quantize(host, scheme)
        np.testing.assert_array_equal(raw(out), raw(expected[0]))
        same(scale, expected[1])
    out = torch.full((7, 160), 0xA5, dtype=torch.uint8, device="cuda")  # and nothing beside them
    ops.quantize(x, "fp8_token", out=out[1:6])
    assert (out[[0, 6]] == 0xA5).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_graph_replays_it(rng, scheme):
    x, _ = on_gpu(rng.standard_normal((33, 4096)), "bfloat16")
    ops.quantize(x, scheme)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        results = ops.quantize(x, scheme)
    for _ in range(3):
        _, host = on_gpu(rng.standard_normal((33, 4096)), "bfloat16")
        x.copy_(host)
        for result in results:
            result.reshape(-1).view(torch.uint8).fill_(0xA5)
        graph.replay()
        for got, wanted in zip(results, ops.quantize(host, scheme), strict=True):
            same(got, wanted)


def test_a_chain_of_overlapping_launches(rng):
    """Each kernel may start before its predecessor has ended, and must wait for what that one writes."""
    x, host = on_gpu(rng.standard_normal((512, 4096)), "float32")
    for _ in range(20):
        codes, scales = ops.quantize(x, "fp8_group")
        expected, expected_scales = ops.quantize(host, "fp8_group")
        same(codes, expected)
        again, _ = ops.quantize(scales, "fp8_token")
        same(again, ops.quantize(expected_scales, "fp8_token")[0])


def test_streams(rng):
    x, host = on_gpu(rng.standard_normal((64, 512)), "bfloat16")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for given in (stream.cuda_stream, stream):
        codes, _ = ops.quantize(x, "fp8_token", stream=given)
        stream.synchronize()
        same(codes, ops.quantize(host, "fp8_token")[0])


def test_refusals(rng):
    x, host = on_gpu(rng.standard_normal((4, 64)), "bfloat16")
    one = torch.ones(1)
    cases = [
        (
            BufferError,
            r"out: expected a tensor on cuda:0, got one in host memory",
            {"out": host.to(torch.uint8)},
        ),
        (BufferError, "scale_out: expected a tensor on cuda:0", {"scale_out": one.reshape(())}),
        (ValueError, r"scale: expected one element, got shape \[2\]", {"scale": torch.ones(2).cuda()}),
        (TypeError, "scale: expected float32, got float16", {"scale": one.half().cuda()}),
        (ValueError, "scale: expected a positive finite number", {"scale": -1.0}),
    ]
    for error, message, options in cases:
        with pytest.raises(error, match=message):
            ops.quantize(x, "fp8_tensor", **options)
    with pytest.raises(BufferError, match="scale: expected a tensor in host memory, got one on cuda:0"):
        ops.quantize(host, "fp8_tensor", scale=one.cuda())
    with pytest.raises(BufferError, match="out: expected a tensor in host memory, got one on cuda:0"):
        ops.quantize(host, "fp8_token", out=x.to(torch.float8_e4m3fn))


@pytest.mark.slow
def test_more_than_four_gigabytes():
    """Offsets beyond 2^32, checked where they are: at the end."""
    rows, columns = 300000, 8192
    if torch.cuda.mem_get_info()[0] < 9 * 2**30:
        pytest.skip("needs 9 GiB")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, columns, device="cuda").to(torch.bfloat16)
    for scheme in ("fp8_token", "fp8_group"):
        for got, wanted in zip(ops.quantize(x, scheme), ops.quantize(x[-3:].cpu(), scheme), strict=True):
            same(got[-3:], wanted)

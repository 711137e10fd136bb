"""`ops.quantize_weight` on a CUDA device: the bits of the CPU, which are ModelOpt's."""

import numpy as np
import pytest

from moqext import ops
from moqext.algorithms import ALGORITHMS
from moqext.ops.quantize_weights import SEARCHED, WRITTEN, weight_amax

from ..quantize_cases import KINDS, as_dtype, carrier, hostile
from .cases import torch

pytestmark = pytest.mark.gpu

DTYPES = ["bfloat16", "float16", "float32"]
SHAPES = [
    (1, 32),
    (3, 128),
    (130, 288),  # blocks of 128 x 128 that end early
    (257, 96),
    (2, 2080),  # more than the values of a row whose errors are added up at once
    (1, 40960),  # more than the threads of a block keep
    (300, 4096),
]
RAGGED = [(1, 1), (9, 7), (129, 257), (3, 4099), (2, 33001), (1, 100003)]
"""Shapes without whole groups, whose rows begin at any address."""


def on_gpu(array):
    """The array on the device as torch has it, bfloat16 among the types."""
    raw = np.asarray(array)
    if raw.dtype == np.uint16:
        return torch.from_numpy(raw.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(raw).cuda()


def host_bytes(tensor):
    """The bytes of a result, of torch's or of NumPy's."""
    if hasattr(tensor, "is_cuda"):
        tensor = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return carrier(tensor).reshape(-1)


def compare(weight, algo, there=None, **options):
    """Checks that codes and scales of a weight on the device have the bits of the CPU's."""
    expected = ops.quantize_weight(weight, algo, **options)
    got = ops.quantize_weight(on_gpu(weight) if there is None else there, algo, **options)
    assert got.keys() == expected.keys()
    assert got["weight"].is_cuda
    assert got["weight_scale"].is_cuda
    for role, tensor in expected.items():
        assert tuple(got[role].shape) == np.asarray(tensor).shape, role
        np.testing.assert_array_equal(host_bytes(got[role]), host_bytes(tensor), err_msg=f"{algo} {role}")


def searches_of(algo):
    return [None, *(search for search, algos in SEARCHED.items() if algo in algos)]


def amax_for(values):
    """The largest magnitude that is given where some are not finite, None otherwise."""
    return None if np.isfinite(values).all() else 3.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_the_cpu(rng, shape, dtype):
    kinds = KINDS if np.prod(shape) < 10000 else ["normal", str(rng.choice(KINDS))]
    for kind in kinds:
        weight, values = as_dtype(hostile(rng, shape, kind), dtype)
        there = on_gpu(weight)
        for algo in WRITTEN:
            for search in searches_of(algo):
                compare(weight, algo, there, search=search, amax=amax_for(values))
        compare(weight, "NVFP4", there, group_size=32, amax=amax_for(values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_rows_that_end_and_begin_anywhere(rng, shape, dtype):
    kinds = KINDS if np.prod(shape) < 40000 else ["normal", str(rng.choice(KINDS))]
    for kind in kinds:
        weight, values = as_dtype(hostile(rng, shape, kind), dtype)
        there = on_gpu(weight)
        for algo in WRITTEN:
            if ALGORITHMS[algo].scales == "groups":
                continue
            for search in searches_of(algo):
                compare(weight, algo, there, search=search, amax=amax_for(values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_at_any_address(rng, dtype):
    weight, _ = as_dtype(hostile(rng, (65, 160), "normal"), dtype)
    whole = on_gpu(np.concatenate([weight.reshape(-1)[:1], weight.reshape(-1)]))
    there = whole[1:].view(65, 160)
    for algo in WRITTEN:
        for search in searches_of(algo):
            compare(weight, algo, there, search=search)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_value(rng, dtype):
    """All of 16 bits, infinities and NaN too, under scales of any size."""
    bits = rng.permutation(np.arange(65536, dtype=np.uint16)).reshape(256, 256)
    weight = bits if dtype == "bfloat16" else bits.view(np.float16)
    there = on_gpu(weight)
    for algo in WRITTEN:
        for exponent in rng.uniform(-148, 127, 12):
            compare(weight, algo, there, amax=float(np.float32(2.0**exponent)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quotients_beside_ties(rng, dtype):
    """Values whose quotients are midpoints of codes, or a step of the type from them."""
    middle = {"e2m1": [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], "e4m3": 1 + (2 * np.arange(8) + 1) / 16}
    for algo in WRITTEN:
        steps = np.exp2(rng.uniform(-8, 7, (400, 1))).astype(np.float32)
        ties = rng.choice(middle[ALGORITHMS[algo].codes], (400, 256)).astype(np.float32) * steps
        ties[:, ::16] = (6 if ALGORITHMS[algo].codes == "e2m1" else 448) * steps
        near = np.nextafter(ties, np.float32(np.inf) * rng.choice([-1, 1], ties.shape)).astype(np.float32)
        x = np.where(rng.random(ties.shape) < 0.5, ties, near) * rng.choice([-1, 1], ties.shape)
        weight, _ = as_dtype(x.astype(np.float32), dtype)
        there = on_gpu(weight)
        for search in searches_of(algo):
            compare(weight, algo, there, search=search)


def test_memory_of_its_own(rng):
    """A tensor without a framework gives tensors of the same kind."""
    weight = hostile(rng, (64, 128), "normal")
    for algo in WRITTEN:
        expected = ops.quantize_weight(weight, algo)
        got = ops.quantize_weight(ops.to_device(weight), algo)
        for role, tensor in expected.items():
            here = tensor if role == "weight_scale_2" else ops.to_host(got[role])
            assert np.asarray(here).tobytes() == np.asarray(tensor).tobytes(), (algo, role)
            assert role == "weight_scale_2" or got[role].device == "cuda:0"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_magnitude(rng, dtype):
    for shape in [(1,), (3, 70, 5), (4097, 1025)]:
        for kind in KINDS:
            weight, _ = as_dtype(hostile(rng, shape, kind), dtype)
            np.testing.assert_equal(weight_amax(on_gpu(weight)), weight_amax(weight))


def test_the_stream_of_the_caller(rng):
    """Work is queued behind that of torch's current stream."""
    weight = hostile(rng, (512, 4096), "normal")
    target, stream = torch.zeros(512, 4096, device="cuda"), torch.cuda.Stream()
    source = torch.from_numpy(weight).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        target.copy_(source)
        got = ops.quantize_weight(target, "NVFP4")
    expected = ops.quantize_weight(weight, "NVFP4")
    stream.synchronize()
    for role, tensor in expected.items():
        np.testing.assert_array_equal(host_bytes(got[role]), host_bytes(tensor))


def test_calls_in_a_graph(rng):
    weight = hostile(rng, (256, 512), "normal")
    there = torch.from_numpy(weight).cuda()
    graph, results = torch.cuda.CUDAGraph(), {}
    with torch.cuda.graph(graph):
        for algo in WRITTEN:
            results[algo] = ops.quantize_weight(there, algo, amax=5.0)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    for algo, got in results.items():
        for role, tensor in ops.quantize_weight(weight, algo, amax=5.0).items():
            np.testing.assert_array_equal(host_bytes(got[role]), host_bytes(tensor), err_msg=algo)


def test_what_is_refused(rng):
    weight = torch.ones(64, 64, device="cuda")
    with pytest.raises(BufferError, match="weight: expected a contiguous tensor"):
        ops.quantize_weight(weight[:, ::2], "FP8")
    with pytest.raises(ValueError, match=r"weight: expected values, got shape \[0, 64\]"):
        ops.quantize_weight(weight[:0], "FP8")
    for value in (np.nan, np.inf):
        weight[3, 5] = value
        for algo in ("FP8", "NVFP4"):
            with pytest.raises(ValueError, match="weight: expected finite values"):
                ops.quantize_weight(weight, algo)

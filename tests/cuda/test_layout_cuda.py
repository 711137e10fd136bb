"""Rearranging codes and scales on the device: the same bytes as on the CPU."""

from typing import Any

import numpy as np
import pytest

from moqext import ops

from .cases import to_cuda, to_numpy, torch

pytestmark = pytest.mark.gpu


def views(rng: Any, shape: tuple[int, ...]) -> Any:
    """Random bytes of a shape in several layouts, each on the host and on the device."""
    wide = rng.integers(0, 256, (*shape[:-1], shape[-1] * 2 + 48), dtype=np.uint8)
    there = to_cuda(wide)
    for columns in (
        slice(0, shape[-1]),
        slice(16, 16 + shape[-1]),
        slice(3, 3 + shape[-1]),
        slice(0, 2 * shape[-1], 2),
    ):
        yield wide[..., columns], there[..., columns]
    yield np.ascontiguousarray(wide[..., : shape[-1]]), there[..., : shape[-1]].contiguous()


def poisoned_like(array: Any, offset: int = 0) -> Any:
    """Bytes to write to, at an address that is a multiple of 16 plus `offset`."""
    memory = torch.full((array.size + offset,), 0xA5, dtype=torch.uint8, device="cuda")
    return memory[offset:].view(array.shape)


@pytest.mark.parametrize(
    "shape", [(2,), (0, 8), (1, 2), (7, 34), (128, 4096), (3, 5, 16), (2, 3, 4, 96), (70000, 32)]
)
def test_fp4_packing(rng: Any, shape: tuple[int, ...]) -> None:
    for host, device in views(rng, shape):
        for function in (ops.pack_fp4, ops.unpack_fp4):
            expected = function(host)
            np.testing.assert_array_equal(to_numpy(function(device)), expected)
            for offset in (0, 1):
                out = poisoned_like(expected, offset)
                assert function(device, out=out) is out
                np.testing.assert_array_equal(to_numpy(out), expected)


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize(
    "rows, groups", [(1, 1), (16, 2), (65, 3), (130, 7), (64, 16), (77, 129), (4096, 256), (3, 1792)]
)
def test_nvfp4_packing(rng: Any, rows: int, groups: int, group_size: int) -> None:
    """All bits, NaN scales among them, from rows at any address, and back."""
    columns = groups * group_size
    scale = rng.integers(0, 256, (rows, groups), dtype=np.uint8)
    for host, device in views(rng, (rows, columns // 2)):
        if host.strides[1] != 1:
            with pytest.raises(BufferError, match="contiguous rows"):
                ops.pack_nvfp4(device, to_cuda(scale))
            continue
        expected = ops.pack_nvfp4(host, scale)
        packed = poisoned_like(expected)
        assert ops.pack_nvfp4(device, to_cuda(scale), out=packed) is packed
        np.testing.assert_array_equal(to_numpy(packed), expected)
        for offset in (0, 1):
            outs = poisoned_like(host, offset), poisoned_like(scale, offset)
            ops.unpack_nvfp4(packed, (rows, columns), group_size, out=outs[0], scale_out=outs[1])
            np.testing.assert_array_equal(to_numpy(outs[0]), host)
            np.testing.assert_array_equal(to_numpy(outs[1]), np.where(scale == 0x80, 0, scale))
    with pytest.raises(BufferError, match=r"^out: expected an address that is a multiple of 16"):
        ops.pack_nvfp4(device, to_cuda(scale), out=poisoned_like(expected, 8))


@pytest.mark.parametrize(
    "shape", [(1, 1), (128, 4), (129, 5), (300, 64), (4096, 512), (2, 130, 7), (3, 1, 33), (0, 4)]
)
def test_swizzled_block_scales(rng: Any, shape: tuple[int, ...]) -> None:
    for host, device in views(rng, shape):
        expected = ops.swizzle_block_scales(host)
        for offset in (0, 1):
            out = poisoned_like(expected, offset)
            assert ops.swizzle_block_scales(device, out=out) is out
            np.testing.assert_array_equal(to_numpy(out), expected)
            back = poisoned_like(host, offset)
            assert ops.unswizzle_block_scales(out, shape, out=back) is back
            np.testing.assert_array_equal(to_numpy(back), host)


@pytest.mark.parametrize("partitions", [[5], [3, 0, 9], [128, 256, 64]])
@pytest.mark.parametrize("columns", [1, 48, 4096])
def test_requantize_to_max(rng: Any, partitions: list[int], columns: int) -> None:
    scales = np.exp2(rng.uniform(-12, -4, len(partitions))).astype(np.float32)
    for given in (scales, np.full_like(scales, 0.25), scales * (np.arange(len(scales)) > 0)):
        for host, device in views(rng, (sum(partitions), columns)):
            codes, largest = ops.requantize_to_max(host, given, partitions)
            for scale in (given, to_cuda(given), to_cuda(np.repeat(given, 2))[::2], list(map(float, given))):
                there, top = ops.requantize_to_max(device, scale, partitions)
                np.testing.assert_array_equal(to_numpy(there), codes)
                assert float(top) == float(largest)
                assert getattr(top, "is_cuda", False) == getattr(scale, "is_cuda", False)


@pytest.mark.parametrize("partitions", [[5], [3, 3], [128, 128]])
@pytest.mark.parametrize("columns", [1, 48, 1024])
def test_requantize_stacks_to_max(rng: Any, partitions: list[int], columns: int) -> None:
    scales = np.exp2(rng.uniform(-12, -4, (4, len(partitions)))).astype(np.float32)
    scales[0] = scales[0, 0]
    scales[1, 0] = 0
    for host, device in views(rng, (4, sum(partitions), columns)):
        codes, largest = ops.requantize_to_max(host, scales, partitions)
        for scale in (scales, to_cuda(scales), to_cuda(np.repeat(scales, 2, axis=1))[:, ::2]):
            there, top = ops.requantize_to_max(device, scale, partitions)
            np.testing.assert_array_equal(to_numpy(there), codes)
            np.testing.assert_array_equal(to_numpy(top) if hasattr(top, "is_cuda") else top, largest)


@pytest.mark.parametrize("shape", [(3, 2), (4, 6, 5), (2, 64, 256)], ids=str)
def test_gate_and_up_change_places(rng: Any, shape: tuple[int, ...]) -> None:
    for host, device in views(rng, shape):
        expected = ops.swap_gate_up(host)
        for offset in (0, 1):
            out = poisoned_like(expected, offset)
            assert ops.swap_gate_up(device, out=out) is out
            np.testing.assert_array_equal(to_numpy(out), expected)
    scales = rng.standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(to_numpy(ops.swap_gate_up(to_cuda(scales))), ops.swap_gate_up(scales))


def test_a_capture_takes_what_reads_nothing_back(rng: Any) -> None:
    codes = to_cuda(rng.integers(0, 16, (64, 64), dtype=np.uint8))
    scale = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = ops.pack_fp4(codes)
        swizzled = ops.swizzle_block_scales(codes)
        swapped = ops.swap_gate_up(codes)
        with pytest.raises(RuntimeError, match="captured"):
            ops.requantize_to_max(codes, scale, [32, 32])
    codes.copy_(to_cuda(rng.integers(0, 16, (64, 64), dtype=np.uint8)))
    graph.replay()
    assert torch.equal(packed, ops.pack_fp4(codes))
    assert torch.equal(swizzled, ops.swizzle_block_scales(codes))
    assert torch.equal(swapped, ops.swap_gate_up(codes))


def test_tensors_of_different_places_are_refused(rng: Any) -> None:
    codes = rng.integers(0, 16, (64, 64), dtype=np.uint8)
    with pytest.raises(BufferError, match=r"^out: expected a tensor on cuda:0, got one in host memory"):
        ops.pack_fp4(to_cuda(codes), out=np.zeros((64, 32), np.uint8))
    with pytest.raises(BufferError, match=r"^out: expected a tensor in host memory, got one on cuda:0"):
        ops.pack_fp4(codes, out=to_cuda(np.zeros((64, 32), np.uint8)))
    with pytest.raises(
        BufferError, match=r"^weight_scale: expected a tensor in host memory, got one on cuda:0"
    ):
        ops.requantize_to_max(codes, torch.ones(1, device="cuda"), [64])

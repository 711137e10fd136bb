"""Tensors to a device and back without a framework, and what libraries make of them."""

import gc
import re
from typing import Any

import numpy as np
import pytest

from moqext import _C, ops

from .cases import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (3, 5), (2, 3, 1000)])
def test_there_and_back(rng: Any, dtype: str, shape: tuple[int, ...]) -> None:
    x = np.asarray(rng.integers(0, 200, shape)).astype(dtype)
    there = ops.to_device(x)
    assert (there.shape, there.dtype, there.device) == (shape, dtype, "cuda:0")
    assert there.__dlpack_device__() == (2, 0)
    back = ops.to_host(there)
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, x)


def test_torch_shares_it_and_may_outlive_it(rng: Any) -> None:
    x = rng.standard_normal((64, 64)).astype(np.float32)
    there = ops.to_device(x, "cuda")
    shared = torch.from_dlpack(there)
    assert shared.data_ptr() == _C.describe_tensor(there)["pointer"]
    del there
    gc.collect()
    np.testing.assert_array_equal(shared.cpu().numpy(), x)
    np.testing.assert_array_equal(ops.to_host(shared), x)


def test_memory_is_given_back() -> None:
    """Memory comes back; other processes may take and give a part of a gigabyte meanwhile."""
    x = np.zeros(1 << 30, np.uint8)
    ops.to_device(x)
    before = torch.cuda.mem_get_info()[0]
    kept = [ops.to_device(x) for _ in range(4)]
    assert torch.cuda.mem_get_info()[0] <= before - 3 * x.nbytes
    del kept
    assert torch.cuda.mem_get_info()[0] >= before - x.nbytes


def test_bfloat16_of_torch_comes_as_bits() -> None:
    x = torch.arange(6, device="cuda").reshape(2, 3).bfloat16()
    back = ops.to_host(x)
    assert back.dtype.itemsize == 2
    np.testing.assert_array_equal(back.view(np.uint16), x.cpu().view(torch.int16).numpy().view(np.uint16))


def test_a_copy_waits_for_the_work_before_it() -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x += 1
        assert (ops.to_host(x) == 1).all()


def test_memory_that_comes_and_goes_does_not_disturb_a_capture() -> None:
    x = torch.zeros(4, device="cuda")
    old = ops.to_device(np.zeros(4, np.float32))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        del old
        gc.collect()
    graph.replay()
    assert x.cpu().tolist() == [1] * 4


def test_refusals() -> None:
    there = ops.to_device(np.zeros((4, 4), np.float32))
    with pytest.raises(BufferError, match=r"^x: expected a tensor in host memory, got one on cuda:0"):
        ops.to_device(there)
    with pytest.raises(BufferError, match=r"^x: expected a tensor on a CUDA device, got one on cpu"):
        ops.to_host(np.zeros(4, np.float32))
    with pytest.raises(BufferError, match=r"^x: expected a contiguous tensor"):
        ops.to_device(np.zeros((4, 4))[:, ::2])
    with pytest.raises(BufferError, match=r"^x: expected a contiguous tensor"):
        ops.to_host(torch.zeros(4, 4).cuda().T)
    with pytest.raises(ValueError, match=re.escape("no cuda:63")):
        ops.to_device(np.zeros(4), "cuda:63")
    with pytest.raises(ValueError, match='"cuda:N"'):
        ops.to_device(np.zeros(4), "cpu")
    with pytest.raises(MemoryError, match="are free on cuda:0"):
        _C.empty_like(there, (1 << 40,), "float32")

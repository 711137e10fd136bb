"""CUDA tensors at the boundary: torch through the exchange API, CuPy and JAX through `__dlpack__`."""

from typing import Any

import numpy as np
import pytest

from moqext import _C

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "float32", "uint8"]
)
def test_torch(torch: Any, dtype: str) -> None:
    x = torch.empty((4, 6), dtype=getattr(torch, dtype), device="cuda")
    for view in (x, x[1:], x[:, 2:4], x.T):
        seen = _C.describe_tensor(view)
        assert (seen["dtype"], seen["device"]) == (dtype, "cuda:0")
        assert (seen["shape"], seen["strides"]) == (tuple(view.shape), view.stride())
        assert seen["pointer"] == view.data_ptr()
    made = _C.empty_like(x, (3, 5), dtype)
    assert isinstance(made, torch.Tensor)
    assert (made.dtype, made.device, tuple(made.shape)) == (x.dtype, x.device, (3, 5))


def test_torch_outputs(torch: Any) -> None:
    x = torch.zeros(4, 4, device="cuda")
    out = torch.empty(4, 4, device="cuda")
    assert _C.describe_tensor(x, out=out)["pointer"] == out.data_ptr()
    with pytest.raises(BufferError, match=r"^out: shares memory with x"):
        _C.describe_tensor(x, out=x[2:])


def test_pinned_memory_is_host_memory(torch: Any) -> None:
    assert _C.describe_tensor(torch.zeros(4).pin_memory())["device"] == "cpu"


def test_taking_does_not_disturb_a_capture(torch: Any, cupy: Any) -> None:
    x = torch.zeros(4, device="cuda")
    y = cupy.from_dlpack(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        _C.check_tensors(x, y)
        _C.describe_tensor(x, out=torch.empty_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int32"])
def test_cupy(cupy: Any, dtype: str) -> None:
    x = cupy.zeros((4, 6), dtype)
    seen = _C.describe_tensor(x[:, ::2])
    assert (seen["dtype"], seen["device"]) == (dtype, "cuda:0")
    assert (seen["shape"], seen["strides"]) == ((4, 3), (6, 2))
    assert seen["pointer"] == x.data.ptr
    assert _C.describe_tensor(np.zeros(3), out=x)["pointer"] == x.data.ptr
    made = _C.empty_like(x, (3, 5), dtype)
    assert isinstance(made, cupy.ndarray)
    assert (made.dtype, made.shape, made.device) == (x.dtype, (3, 5), x.device)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no CUDA device")
    x = jax.numpy.zeros((2, 3), "bfloat16")
    seen = _C.describe_tensor(x)
    assert (seen["dtype"], seen["device"], seen["shape"]) == ("bfloat16", "cuda:0", (2, 3))
    assert seen["pointer"] == x.unsafe_buffer_pointer()
    with pytest.raises(BufferError, match=r"^out: .*immutable"):
        _C.describe_tensor(np.zeros(3), out=x)
    with pytest.raises(TypeError, match=r"^out: .*pass out= instead"):
        _C.empty_like(x, (3,), "float32")

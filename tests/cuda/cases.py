"""Layers of `linear_cases` on the device: tensors moved there, and calls beside those of the CPU."""

from typing import Any

import numpy as np
import pytest

from moqext import LinearMethod, reference

torch = pytest.importorskip("torch")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def force(patch: pytest.MonkeyPatch, kernel: str, algo: str = "FP8", compute: str = "exact") -> None:
    """Makes layers of the test run on the kernel; skips the test where the device or the build has none."""
    method = LinearMethod(algo, 128, [128], device="cuda:0", compute=compute)
    reason = dict(method._plan.explain())[kernel]
    if reason is not None:
        pytest.skip(f"{kernel}: {reason}")
    patch.setenv("MOQEXT_KERNEL", kernel)


def to_cuda(array: np.ndarray, dtype: str | None = None) -> Any:
    """The array on the device; 16-bit patterns become bfloat16 where `dtype` says so."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).cuda()
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def to_numpy(tensor: Any) -> np.ndarray:
    """Converts to what the reference takes: bfloat16 and FP8 as their bits."""
    carrier = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype)
    return (tensor.view(carrier) if carrier else tensor).cpu().numpy()


def params_to_cuda(params: Any) -> dict[str, Any]:
    """A mapping of arrays, or of lists of them, on the device."""
    return {
        name: [to_cuda(value) for value in values] if isinstance(values, list) else to_cuda(values)
        for name, values in params.items()
    }


def poisoned(*shape: int, dtype: str) -> Any:
    """An output on the device that shows every element that was not written."""
    return torch.full(shape, float("nan"), dtype=DTYPES[dtype], device="cuda")


def on_host(case: Any, **options: str) -> LinearMethod:
    """The layer on the CPU, whatever kernel is forced for those on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MOQEXT_KERNEL", raising=False)
        return case.method(**options)


class OnDevice:
    """A layer with its prepared tensors on the device."""

    def __init__(self, case: Any, dtype: str, compute: str = "exact") -> None:
        self.dtype = dtype
        self.method = case.method(dtype=dtype, device="cuda:0", compute=compute)
        self.params = self.method.prepare(params_to_cuda(case.listed()))

    def __call__(self, x: Any, **options: Any) -> Any:
        """`x` is a NumPy array as `random_x` makes it, or a tensor on the device."""
        if isinstance(x, np.ndarray):
            x = to_cuda(x, self.dtype)
        shape = (*x.shape[:-1], self.method.out_features)
        options.setdefault("out", poisoned(*shape, dtype=self.dtype))
        return self.method(x, self.params, **options)


def assert_writes_only_its_result(layer: OnDevice, x: Any) -> None:
    """Into a part of a larger tensor, at an address that suits no vector."""
    columns = layer.method.out_features
    memory = poisoned(len(x) + 2, columns + 11, dtype=layer.dtype)
    out = memory[1:-1, 3 : columns + 3]
    layer(x, out=out)
    assert to_numpy(out.contiguous()).tobytes() == to_numpy(layer(x)).tobytes()
    assert int((~memory.isnan()).sum()) == out.numel()


def assert_a_graph_replays(layer: OnDevice, x: Any) -> None:
    """Two calls captured one after the other give the bits of a call of its own."""
    expected = to_numpy(layer(x)).tobytes()
    results = [poisoned(len(x), layer.method.out_features, dtype=layer.dtype) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for y in results:
            layer(x, out=y)
    for _ in range(2):
        for y in results:
            y.fill_(float("nan"))
        graph.replay()
        assert [to_numpy(y).tobytes() for y in results] == [expected] * 2


def assert_calls_follow_each_other(layer: OnDevice, x: Any, bias: bool = False) -> None:
    """Calls in a graph: each reads what the call before wrote, as x or bias, and begins before that ends."""

    def call(x: Any, **out: Any) -> Any:
        return layer(x, bias=x[0] if bias else None, **out)

    steps = [poisoned(*x.shape, dtype=layer.dtype) for _ in range(6)]
    expected = [call(x)]
    for _ in steps[1:]:
        torch.cuda.synchronize()
        expected.append(call(expected[-1]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for before, after in zip([x, *steps], steps, strict=False):
            call(before, out=after)
    for _ in range(3):
        for step in steps:
            step.fill_(float("nan"))
        graph.replay()
        for step, y in zip(steps, expected, strict=True):
            assert not step.isnan().any()
            assert to_numpy(step).tobytes() == to_numpy(y).tobytes()


def of_unit_gain(case: Any) -> Any:
    """The square NVFP4 layer with outputs as large as its inputs, for calls that follow each other."""
    weight = reference.dequantize(case.parts[0], "NVFP4")
    case.parts[0]["weight_scale_2"] /= np.float32(weight.std() * weight.shape[1] ** 0.5)
    return case


def assert_streams_do_not_wait(layer: OnDevice, x: Any) -> None:
    """Blocks that wait for sums of others finish although calls on other streams have multiprocessors too."""
    expected = to_numpy(layer(x)).tobytes()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(layer(x))
    torch.cuda.synchronize()
    assert all(to_numpy(y).tobytes() == expected for y in results)

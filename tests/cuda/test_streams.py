"""The stream a call goes to, captures into graphs, and what the environment switches."""

import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from ..linear_cases import random_case, random_x

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from ..work import HANGS  # noqa: E402
from .cases import OnDevice, force, poisoned, to_cuda, to_numpy  # noqa: E402

KERNELS = ["cuda:simt", ""]
COLUMNS, ROWS = 512, 384


@pytest.fixture(params=KERNELS, ids=["simt", "chosen"])
def layer(rng, monkeypatch, request):
    monkeypatch.setenv("MOQEXT_KERNEL", request.param)
    return OnDevice(random_case(rng, "FP8_PER_CHANNEL_PER_TOKEN", COLUMNS, [ROWS]), "bfloat16")


@pytest.fixture
def x(rng):
    return to_cuda(random_x(rng, (5, COLUMNS), "bfloat16"), "bfloat16")


class Protocol:
    """Streams as other libraries make them."""

    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return (0, self.handle)


def delayed(stream, x):
    """A copy of `x` that is NaN until `stream` has slept for a tenth of a second."""
    late = torch.full_like(x, float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(x)
    return late


def test_the_current_stream_of_torch(layer, x):
    y = layer(x)
    stream = torch.cuda.Stream()
    out = poisoned(5, ROWS, dtype="bfloat16")
    late = delayed(stream, x)
    with torch.cuda.stream(stream):
        layer(late, out=out)
    assert not stream.query()  # queued there, nobody waited
    stream.synchronize()
    assert torch.equal(out, y)


@pytest.mark.parametrize("form", ["handle", "protocol", "torch"])
def test_a_given_stream(layer, x, form):
    y = layer(x)
    stream = torch.cuda.Stream()
    given = {"handle": stream.cuda_stream, "protocol": Protocol(stream.cuda_stream), "torch": stream}[form]
    out = poisoned(5, ROWS, dtype="bfloat16")
    layer(delayed(stream, x), out=out, stream=given)
    stream.synchronize()
    assert torch.equal(out, y)


def test_new_memory_is_ordered_with_the_current_stream(layer, x):
    """A result, and a copy of x, are of the current stream's memory: both streams wait for each other."""
    y = layer(x)
    stream = torch.cuda.Stream()
    for _ in range(20):
        late = delayed(stream, x)
        result = layer.method(late, layer.params, stream=stream)
        assert torch.equal(result, y)  # read on the current stream
    wide = torch.zeros(5, COLUMNS + 1, dtype=torch.bfloat16, device="cuda")[:, 1:]
    wide.copy_(x)
    torch.cuda.synchronize()
    out = poisoned(5, ROWS, dtype="bfloat16")
    for _ in range(20):
        out.fill_(float("nan"))
        stream.wait_stream(torch.cuda.current_stream())
        layer(wide, out=out, stream=stream)
        torch.full((5 * (COLUMNS + 8),), float("nan"), dtype=torch.bfloat16, device="cuda")
        assert torch.equal(out, y)


@pytest.mark.parametrize("given", [1.5, "0", object(), True, Protocol("0"), Protocol(None)])
def test_what_is_no_stream_is_refused_by_name(layer, x, given):
    with pytest.raises(TypeError, match=r"^stream: expected"):
        layer(x, stream=given)


def test_a_stream_of_an_odd_protocol_is_refused(layer, x):
    class Odd:
        def __cuda_stream__(self):
            return 7

    with pytest.raises(TypeError, match=r"^stream: expected __cuda_stream__\(\) to return"):
        layer(x, stream=Odd())


# ------------------------------------------------------------------------------------- captures


def test_capture_and_replay(layer, x):
    """A chain of calls, replayed over new values; a strided x is copied within the graph."""
    values = x.clone()
    wide = torch.zeros(5, COLUMNS + 1, dtype=torch.bfloat16, device="cuda")[:, 1:]
    wide.copy_(values)
    out = poisoned(5, ROWS, dtype="bfloat16")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(values, out=out)
        again = layer.method(wide, layer.params)
    for _ in range(3):
        fresh = torch.randn_like(values)
        values.copy_(fresh)
        wide.copy_(fresh)
        out.fill_(float("nan"))
        again.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = layer(fresh)
        assert torch.equal(out, expected)
        assert torch.equal(again, expected)


FIRST = """
import numpy as np, torch
from moqext import LinearMethod
method = LinearMethod("FP8_PER_CHANNEL_PER_TOKEN", 512, [384], device="cuda:0")
params = {
    "weight": torch.full((384, 512), 0x38, dtype=torch.uint8, device="cuda"),
    "output_scale": torch.ones(384, device="cuda"),
}
x = torch.ones(3, 512, dtype=torch.bfloat16, device="cuda")
out = torch.zeros(3, 384, dtype=torch.bfloat16, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    method(x, params, out=out)
graph.replay()
torch.cuda.synchronize()
assert (out == 512).all(), out
print("captured")
"""


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_first_call_of_a_process_may_be_captured(kernel):
    assert run(FIRST, MOQEXT_KERNEL=kernel).stdout.strip() == "captured"


def test_a_slow_path_raises_in_a_capture_and_does_not_break_it(rng, x):
    """Weight processing reads scales back; the capture goes on without it."""
    case = random_case(rng, "FP8", COLUMNS, [ROWS])
    layer = OnDevice(case, "bfloat16")
    host = {name: [to_cuda(np.atleast_1d(v)) for v in values] for name, values in case.listed().items()}
    layer.method.prepare(host)
    out = poisoned(5, ROWS, dtype="bfloat16")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="captur"):
            layer.method.prepare(host)
        layer(x, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, layer(x))


def test_a_capture_of_another_stream_than_the_current_one(layer, x):
    """New memory cannot be ordered between a stream in a capture and one outside."""
    captured, stream = torch.cuda.Stream(), torch.cuda.Stream()  # torch's own for captures may be any of 32
    graph = torch.cuda.CUDAGraph()
    out = poisoned(5, ROWS, dtype="bfloat16")
    layer(x, out=out)
    torch.cuda.synchronize()
    raises = pytest.raises(RuntimeError, match=r"^stream: .*captured")
    with torch.cuda.graph(graph, stream=captured), raises:
        layer.method(x, layer.params, stream=stream)


def test_a_workspace_that_nobody_keeps_cannot_be_captured(layer, x):
    cupy = pytest.importorskip("cupy")
    stream = torch.cuda.Stream()
    bits, out = cupy.from_dlpack(x.view(torch.uint16)), cupy.zeros((5, ROWS), cupy.uint16)
    wide = cupy.zeros((5, COLUMNS + 1), cupy.uint16)[:, 1:]
    wide[:] = bits
    layer.method(wide, layer.params, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), pytest.raises(RuntimeError, match=r"^stream: is being"):
        layer.method(wide, layer.params, out=out, stream=stream)


# ------------------------------------------------------------------------------ other producers


def test_cupy(layer, x):
    """CuPy tells no current stream: the work goes to the default stream, which is also CuPy's."""
    cupy = pytest.importorskip("cupy")
    y = layer(x)
    bits = cupy.from_dlpack(x.view(torch.uint16))
    params = {
        "weight": cupy.from_dlpack(layer.params["weight"].view(torch.uint8)),
        "output_scale": cupy.from_dlpack(layer.params["output_scale"]),
    }
    out = cupy.zeros((5, ROWS), cupy.uint16)
    layer.method(bits, params, out=out)
    np.testing.assert_array_equal(out.get(), to_numpy(y))
    made = layer.method(bits, params)
    assert isinstance(made, cupy.ndarray)
    np.testing.assert_array_equal(made.get(), to_numpy(y))
    wide = cupy.zeros((5, COLUMNS + 1), cupy.uint16)[:, 1:]
    wide[:] = bits
    np.testing.assert_array_equal(layer.method(wide, params).get(), to_numpy(y))


def test_jax(layer, x):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no CUDA device")
    torch.cuda.set_device(0)  # JAX, as it starts, makes the last device current
    y = layer(x)
    values = jax.numpy.from_dlpack(x) * 2
    for _ in range(10):
        values = values * 0.5 * 2  # not ready when the call is made
    out = poisoned(5, ROWS, dtype="bfloat16")
    layer(values, out=out)
    assert torch.equal(out, y * 2)


# --------------------------------------------------------------------------- threads and contexts


def test_threads_each_with_a_stream(layer, x):
    y = layer(x)
    failures = []

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(200):
                if not torch.equal(layer.method(x, layer.params), y):
                    failures.append(stream)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_first_work_of_a_thread(layer, x):
    """A thread that has no context of the device yet."""
    y, out = layer(x), poisoned(5, ROWS, dtype="bfloat16")
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: layer.method(x, layer.params, out=out, stream=0))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(out, y)


@pytest.fixture
def contexts():
    """The driver's own calls; the context that the thread has is given back at the end."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.current_stream().synchronize()
    own = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(own)) == 0
    assert own.value
    yield driver
    assert driver.cuCtxSetCurrent(own) == 0


@pytest.mark.parametrize(
    "kernel", ["", "cuda:simt", "cuda:sm90_fp8_decode", "cuda:sm90_fp8_prefill", "cuda:cublaslt"]
)
def test_a_thread_whose_context_was_taken_away(rng, monkeypatch, contexts, x, kernel):
    """A library may pop the context of a thread, which stays as that library left it."""
    if kernel:
        force(monkeypatch, kernel)
    layer = OnDevice(random_case(rng, "FP8_PER_CHANNEL_PER_TOKEN", COLUMNS, [ROWS]), "bfloat16")
    y, out = layer(x), poisoned(5, ROWS, dtype="bfloat16")
    torch.cuda.synchronize()
    assert contexts.cuCtxSetCurrent(None) == 0
    layer.method(x, layer.params, out=out, stream=0)
    left = ctypes.c_void_p()
    assert contexts.cuCtxGetCurrent(ctypes.byref(left)) == 0
    if kernel != "cuda:cublaslt":  # whose workspace is torch's, which makes a context
        assert not left.value
    torch.cuda.synchronize()
    assert torch.equal(out, y)


# ------------------------------------------------------------------------------ the environment


def run(program, **variables):
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr
    return done


FAILS = """
import cupy, torch
from moqext import LinearMethod
method = LinearMethod("W4A16_NVFP4", 512, [384], device="cuda:0")
x = torch.ones(3, 512, dtype=torch.bfloat16, device="cuda")

# An address that no allocation has.
wild = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 44, 24 * 8 * 576, None, 0), 0)
params = {
    "weight": cupy.ndarray((24, 8, 576), cupy.uint8, memptr=wild),
    "output_scale": torch.ones(384, device="cuda"),
}
try:
    method(x, params)
    print("queued")
    torch.cuda.synchronize()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_sync_names_the_operation_of_an_asynchronous_error():
    pytest.importorskip("cupy")
    quiet = run(FAILS, MOQEXT_SYNC="0", MOQEXT_KERNEL="cuda:simt").stdout
    assert quiet.startswith("queued")
    loud = run(FAILS, MOQEXT_SYNC="1", MOQEXT_KERNEL="cuda:simt").stdout
    assert loud.startswith("RuntimeError linear: ")
    assert "it may come from earlier work on this device" in loud


@pytest.mark.parametrize("value", ["0", "1"])
def test_dependent_launch_can_be_switched_off(value):
    for kernel in KERNELS:
        assert run(FIRST, MOQEXT_PDL=value, MOQEXT_KERNEL=kernel).stdout.strip() == "captured"

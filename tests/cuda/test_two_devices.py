"""A second device while the first is current: the same bits there, and nothing changed for the caller."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from moqext import ops

from ..linear_cases import prepared_for_cuda, random_case, random_x

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from ..work import HANGS  # noqa: E402
from .cases import OnDevice, force, to_cuda, to_numpy  # noqa: E402

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
SECOND = "cuda:1"
FP8_ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
KERNELS = (
    "",
    "cuda:sm90_fp8_decode",
    "cuda:sm90_fp8_prefill",
    "cuda:cublaslt",
    "cuda:simt",
    "cuda:sm80_fp8",
    "cuda:sm89_fp8",
)
COLUMNS, ROWS = 2048, 1536


@pytest.fixture(autouse=True)
def first_stays_current():
    """The caller's device, whatever is done on another."""
    yield
    if torch.cuda.is_available():
        assert torch.cuda.current_device() == 0


class Pair:
    """One layer on both devices."""

    def __init__(self, rng, algo):
        case = random_case(rng, algo, COLUMNS, [ROWS])
        self.first = OnDevice(case, "bfloat16")
        self.second = case.method(device=SECOND)
        self.params = {name: value.to(SECOND) for name, value in self.first.params.items()}

    def check(self, x, **options):
        there = x.to(SECOND)
        y = self.second(there, self.params, **options)
        assert y.device == torch.device(SECOND)
        torch.cuda.synchronize(SECOND)
        assert torch.equal(y.cpu(), self.first(x).cpu())


def bits(tensor):
    """Gives the bits of a tensor; a scalar has none to view before it is reshaped."""
    return tensor.cpu().reshape(-1).view(torch.uint8)


def random_rows(rng, rows):
    return to_cuda(random_x(rng, (rows, COLUMNS), "bfloat16"), "bfloat16")


@needs_two
@pytest.mark.parametrize("tokens", [1, 16, 64, 200, 1100])
@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel or "chosen" for kernel in KERNELS])
@pytest.mark.parametrize("algo", FP8_ALGOS)
def test_linear(rng, monkeypatch, algo, kernel, tokens):
    """Kernels ask each device for more shared memory than there is unasked; x is also copied."""
    if kernel == "cuda:sm90_fp8_decode" and tokens > 16:
        pytest.skip("up to 16 tokens")
    if kernel:
        force(monkeypatch, kernel)
    pair = Pair(rng, algo)
    x = random_rows(rng, tokens)
    pair.check(x)
    wide = torch.zeros(tokens, COLUMNS + 1, dtype=torch.bfloat16, device="cuda")[:, 1:]
    wide.copy_(x)
    pair.check(wide)


@needs_two
@pytest.mark.parametrize("form", ["handle", "torch"])
def test_a_stream_of_the_second_device(rng, form):
    pair = Pair(rng, "FP8_PER_CHANNEL_PER_TOKEN")
    x = random_rows(rng, 5)
    stream = torch.cuda.Stream(SECOND)
    late = torch.full_like(x, float("nan"), device=SECOND)
    out = torch.full((5, ROWS), float("nan"), dtype=torch.bfloat16, device=SECOND)
    there = x.to(SECOND)
    given = stream.cuda_stream if form == "handle" else stream
    pair.second(there, pair.params)  # a kernel's first call loads it, which waits for what runs
    torch.cuda.synchronize(SECOND)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(there)
    pair.second(late, pair.params, out=out, stream=given)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(out.cpu(), pair.first(x).cpu())


@needs_two
def test_a_capture_on_the_second_device(rng):
    pair = Pair(rng, "FP8_PB_WO")
    x = random_rows(rng, 100)
    there = x.to(SECOND)
    pair.second(there, pair.params)
    torch.cuda.synchronize(SECOND)
    with torch.cuda.device(SECOND):
        graph = torch.cuda.CUDAGraph()
        # torch's own stream for captures is of the device of the first capture.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(SECOND)):
            y = pair.second(there, pair.params)
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(y.cpu(), pair.first(x).cpu())


@needs_two
@pytest.mark.parametrize("algo", [*FP8_ALGOS, "NVFP4"])
def test_prepare(rng, algo):
    case = random_case(rng, algo, COLUMNS, [1024, 512])
    expected = prepared_for_cuda(case)
    checkpoint = {
        name: [torch.from_numpy(np.atleast_1d(value)).to(SECOND) for value in values]
        for name, values in case.listed().items()
    }
    prepared = case.method(device=SECOND).prepare(checkpoint)
    for name, value in expected.items():
        assert prepared[name].device == torch.device(SECOND)
        np.testing.assert_array_equal(to_numpy(prepared[name]).view(value.dtype), value)


@needs_two
@pytest.mark.parametrize("rows", [3, 4096])
@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_token", "fp8_group", "nvfp4"])
def test_quantization(rng, scheme, rows):
    """Codes of x, of silu(gate) * up and of a norm, whose kernels take shared memory."""
    x = random_rows(rng, rows)
    weight = random_rows(rng, 1)[0]
    for function, args in (
        (ops.quantize, ()),
        (ops.silu_and_mul_quantize, ()),
        (ops.rms_norm_quantize, (weight, 1e-6)),
    ):
        expected = function(x, *args, scheme)
        args = [value.to(SECOND) if hasattr(value, "to") else value for value in args]
        actual = function(x.to(SECOND), *args, scheme)
        for got, wanted in zip(actual, expected, strict=True):
            assert got.device == torch.device(SECOND)
            assert torch.equal(bits(got), bits(wanted))


@needs_two
def test_tensors_there_and_back(rng):
    x = rng.integers(0, 256, (300, 64), dtype=np.uint8)
    there = ops.to_device(x, SECOND)
    assert there.device == SECOND
    np.testing.assert_array_equal(ops.to_host(there), x)
    swizzled = ops.swizzle_block_scales(torch.from_dlpack(there))
    assert swizzled.device == torch.device(SECOND)
    np.testing.assert_array_equal(swizzled.cpu().numpy(), ops.swizzle_block_scales(x))


@needs_two
def test_tune(rng):
    pair = Pair(rng, "FP8_PER_CHANNEL_PER_TOKEN")
    timings = pair.second.tune([32], pair.params)
    assert timings[0].chosen
    x = random_rows(rng, 32)
    y = pair.second(x.to(SECOND), pair.params).float().cpu().numpy()
    expected = pair.first(x).float().cpu().numpy()  # perhaps of another kernel
    assert np.linalg.norm(y - expected) <= 1e-2 * np.linalg.norm(expected)


@needs_two
def test_tensors_of_both_devices_are_refused(rng):
    pair = Pair(rng, "FP8")
    x = random_rows(rng, 3)
    with pytest.raises(ValueError, match=r"^x: .*cuda:1.*cuda:0"):
        pair.second(x, pair.params)
    with pytest.raises(ValueError, match=r"cuda:1.*cuda:0"):
        pair.second(x.to(SECOND), pair.first.params)


@needs_two
@pytest.mark.parametrize("kernel", ["", "cuda:sm90_fp8_prefill", "cuda:cublaslt"])
def test_a_thread_for_each_device(rng, monkeypatch, kernel):
    """Two threads at once, and a third on both devices in turn; none has a current device when it begins."""
    if kernel:
        force(monkeypatch, kernel)
    pair = Pair(rng, "FP8_PER_CHANNEL_PER_TOKEN")
    x = random_rows(rng, 16)
    there, y = x.to(SECOND), pair.first(x).cpu()
    outs = {i: torch.empty_like(y, device=f"cuda:{i % 2}") for i in range(4)}
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    failures = []

    def work(number):
        for i in range(200):
            device = number if number < 2 else i % 2
            slot = number if number < 2 else 2 + i % 2
            if device == 0:
                pair.first.method(x, pair.first.params, out=outs[slot])
            else:
                pair.second(there, pair.params, out=outs[slot])
            if i % 20 == 0 and not torch.equal(outs[slot].cpu(), y):
                failures.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for out in outs.values():
        assert torch.equal(out.cpu(), y)


ALONE = """
import ctypes, torch
from moqext import LinearMethod
driver = ctypes.CDLL("libcuda.so.1")

def active(device):
    flags, state = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(state)) == 0
    return state.value

params = {
    "weight": torch.full((384, 512), 0x38, dtype=torch.uint8, device="cuda:1"),
    "output_scale": torch.ones(384, device="cuda:1"),
}
x = torch.ones(TOKENS, 512, dtype=torch.bfloat16, device="cuda:1")
out = torch.zeros(TOKENS, 384, dtype=torch.bfloat16, device="cuda:1")
before = active(0)
method = LinearMethod("FP8_PER_CHANNEL_PER_TOKEN", 512, [384], device="cuda:1")
method(x, params, out=out)
method(x, params)
torch.cuda.synchronize(1)
assert (out == 512).all(), out
assert active(0) == before
print("context of the first device", before)
"""


@needs_two
@pytest.mark.parametrize("tokens", [3, 100])
@pytest.mark.parametrize("kernel", ["", "cuda:sm90_fp8_prefill", "cuda:cublaslt"])
def test_a_process_of_the_second_device_alone(kernel, tokens):
    """Each kernel's first use is there; the first device, which is current, is left alone."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE.replace("TOKENS", str(tokens))],
        env={**os.environ, "MOQEXT_KERNEL": kernel},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("context of the first device 0")


def test_a_device_that_is_not_there():
    """A device that is not there is refused by name."""
    if torch.cuda.device_count() > 1:
        pytest.skip("two devices")
    with pytest.raises(ValueError, match="cuda:1"):
        ops.to_device(np.zeros(3, np.uint8), SECOND)

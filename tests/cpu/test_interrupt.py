"""Ctrl-C in the middle of one long call: it ends, nothing is damaged, and no other thread notices.

Each case is a process of its own, of which a timer's signal, or this process, interrupts one call of seconds.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import moqext

from ..work import HANGS

COMMON = """
import signal, sys, threading, time
import numpy as np
import moqext
from moqext import ops

signal.alarm(900)
signal.signal(signal.SIGVTALRM, signal.default_int_handler)
ROWS, K, N = 1 << 18, 8192, 128
SENTINEL = 0x5a

def make_layer(rng):
    method = moqext.LinearMethod("NVFP4", K, [N])
    return method, method.prepare({
        "weight": rng.integers(0, 256, (N, K // 2), dtype=np.uint8),
        "weight_scale": np.full((N, K // 16), 0x38, np.uint8),
        "weight_scale_2": np.float32(0.01),
    })

def untouched(array):
    # The end of what a call that ran to its end would have written.
    return bool((array.reshape(-1).view(np.uint8)[-64:] == SENTINEL).all())

def empty(shape, dtype):
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[-64:] = SENTINEL
    return array

rng = np.random.default_rng(0)
method, params = make_layer(rng)
few = rng.integers(0x3f80, 0x3fff, (5, K), dtype=np.uint16)
many = np.broadcast_to(few[:1], (ROWS, K))  # of one row: no memory
before = np.array(method(few, params), copy=True)

def check():
    assert np.array_equal(np.asarray(method(few, params)), before), "a later call is wrong"
"""

CALLS = {
    "linear": "out = empty((ROWS, N), np.uint16); method(many, params, out=out)",
    "quantize": 'out = empty((ROWS, 1024), np.uint8); ops.quantize(many[:, :1024], "fp8_token", out=out)',
    "one_row": """
out = empty((1, 1 << 29), np.uint8)
ops.quantize(np.broadcast_to(np.float32(1), (1, 1 << 29)), "fp8_token", out=out)""",
    "dequantize": """
out = empty((ROWS, 512), np.float32)
codes = np.broadcast_to(np.uint8(0x38), (ROWS, 512))
ops.dequantize(codes, "FP8", weight_scale=np.float32(1), out=out)""",
    "encode": """
out = empty(1 << 29, np.uint8)
ops.encode(np.broadcast_to(np.float32(1), 1 << 29), "e4m3", out=out)""",
    "unpack": """
out = empty(1 << 30, np.uint8)
ops.unpack_fp4(np.broadcast_to(np.uint8(0x12), 1 << 29), out=out)""",
    "prepare": """
wide = moqext.LinearMethod("NVFP4", K, [1 << 15], compute="fp8")
stored = {"weight": np.zeros((1 << 15, K // 2), np.uint8),
          "weight_scale": np.full((1 << 15, K // 16), 0x38, np.uint8), "weight_scale_2": np.float32(1)}
made = {name: empty(spec.shape, np.uint8 if spec.dtype != "float32" else np.float32)
        for name, spec in wide.prepared_params.items()}
out = made["weight"]
wide.prepare(stored, out=made)""",
}


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", COMMON + code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )


def indent(code):
    return "\n".join("    " + line for line in code.strip().splitlines())


@pytest.mark.parametrize("call, threads", [*((call, 1) for call in CALLS), ("linear", 2), ("quantize", 2)])
def test_ctrl_c_ends_one_long_call(call, threads):
    """One thread has all of the work as one piece, in which each loop looks for itself whether it is to end.
    Members of a team, which is one for all calls, look between their pieces too."""
    done = run(
        f"""
moqext.set_num_threads({threads})
out = None
signal.setitimer(signal.ITIMER_VIRTUAL, 0.15)
try:
{indent(CALLS[call])}
except KeyboardInterrupt:
    pass
assert untouched(out), "the call ran to its end"
check()
""",
        MOQEXT_ISA="portable",
    )
    assert done.returncode == 0, done.stderr


def hear_interrupts():
    """Lets SIGINT end the process; what a shell starts in the background, and its children, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processor_time(process):
    """Reads the seconds that a process has had of processors: Linux has a clock for each."""
    return time.clock_gettime(~process << 3 | 2)


def test_ctrl_c_takes_effect_at_once():
    """A call of seconds ends after a fraction of one, of processor time."""
    code = """
moqext.set_num_threads(2)
out = empty((ROWS, N), np.uint16)
try:
    print("ready", flush=True)
    while True:
        method(many, params, out=out)
except KeyboardInterrupt:
    print(time.process_time(), flush=True)
check()
"""
    command = [sys.executable, "-c", COMMON + code]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts)
    assert child.stdout.readline() == "ready\n"
    begin = processor_time(child.pid)
    while processor_time(child.pid) < begin + 0.3:
        time.sleep(0.01)
    child.send_signal(signal.SIGSTOP)  # so that the clock stands while the signal is sent
    os.waitpid(child.pid, os.WUNTRACED)
    sent = processor_time(child.pid)
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGCONT)
    ended = float(child.communicate(timeout=HANGS)[0])
    assert child.returncode == 0
    assert ended - sent < 1.0  # a tenth of a second is usual


def test_ctrl_c_in_a_benchmark_is_one_line_and_130():
    """Processor time of the process decides when: in the middle of calls that would go on for a minute."""
    code = """
import signal, sys
from moqext.tools import bench
from moqext.__main__ import main

def take_turns(*arguments, original=bench.take_turns):
    signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.2)
    return original(*arguments)

bench.take_turns = take_turns
sys.exit(main())
"""
    options = ["--shapes", "1024x1024", "--tokens", "4096", "--algos", "FP8", "--seconds", "60"]
    command = [sys.executable, "-c", code, "bench", *options, "--rotate", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stderr) == (130, "moqext: interrupted\n")


INTERRUPT_AT_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("INTERRUPTED_IMPORT"):
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
SCRIPT = """
import sys
from moqext.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""


def run_program(tmp_path, *words, **environment):
    """Runs the command line, with what is in a directory among its modules."""
    roots = os.pathsep.join([str(tmp_path), str(Path(moqext.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": roots, **environment},
        capture_output=True,
        text=True,
        timeout=HANGS,
        preexec_fn=hear_interrupts,
    )


# NumPy 1 keeps its array module in another package.
MULTIARRAY = "numpy.core.multiarray" if np.__version__.startswith("1.") else "numpy._core.multiarray"


@pytest.mark.parametrize("started", ["module", "script"])
@pytest.mark.parametrize(
    "module", ["moqext._C", "numpy", MULTIARRAY, "moqext.checkpoint", "moqext.cli.verify"]
)
def test_ctrl_c_during_imports_is_one_line_and_130(tmp_path, module, started):
    """An interrupted import of NumPy had a traceback that named its module of arrays."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT_AT_IMPORT)
    (tmp_path / "moqext").write_text(SCRIPT)
    program = ["-m", "moqext"] if started == "module" else [str(tmp_path / "moqext")]
    done = run_program(tmp_path, *program, "info", INTERRUPTED_IMPORT=module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "moqext: interrupted\n")


def test_other_programs_get_their_exception_during_imports(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT_AT_IMPORT)
    code = "try:\n    import moqext\nexcept KeyboardInterrupt:\n    print('caught')"
    done = run_program(tmp_path, "-c", code, "-m", "moqext", INTERRUPTED_IMPORT="moqext.checkpoint")
    assert (done.returncode, done.stdout) == (0, "caught\n"), done.stderr


@pytest.mark.parametrize("ends", ["raise ModuleNotFoundError('numpy failed to import')", "ready = True"])
def test_ctrl_c_that_an_import_swallows_is_no_absent_module(tmp_path, ends):
    """The benchmark went on, without torch or with it."""
    (tmp_path / "torch.py").write_text(f"""
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    os.getpid()
except BaseException:
    pass
{ends}
""")
    done = run_program(tmp_path, "-m", "moqext", "bench", "--shapes", "64x64", "--tokens", "1")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "moqext: interrupted\n")


def test_handlers_that_return_leave_the_result_alone():
    """Handlers run in the middle of a call, and make calls of their own with its threads and memory."""
    done = run(
        """
moqext.set_num_threads(2)
x = np.ascontiguousarray(np.broadcast_to(few[None], (600, 5, K)).reshape(-1, K))
expected = np.array(method(x, params), copy=True)
calls = 0

def handler(*_):
    global calls
    calls += 1
    check()
    ops.quantize(many[:300], "fp8_token")
    signal.setitimer(signal.ITIMER_REAL, 0.02)  # the next signal, when this one is dealt with

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.02)
assert np.array_equal(np.asarray(method(x, params)), expected)
in_call = calls
signal.setitimer(signal.ITIMER_REAL, 0)
assert in_call > 1, in_call
""",
        MOQEXT_ISA="portable",
    )
    assert done.returncode == 0, done.stderr


def test_other_threads_are_not_interrupted():
    """Signals are the main thread's: its call ends, that of another thread comes to its end."""
    done = run(
        """
moqext.set_num_threads(1)
x = np.broadcast_to(few[:1], (2000, K))
expected = np.array(method(x, params), copy=True)
results = []
thread = threading.Thread(target=lambda: results.append(np.array(method(x, params), copy=True)))
thread.start()
signal.setitimer(signal.ITIMER_VIRTUAL, 0.15)
out = empty((ROWS, N), np.uint16)
try:
    method(many, params, out=out)
except KeyboardInterrupt:
    pass
assert untouched(out)
thread.join()
assert np.array_equal(results[0], expected)
""",
        MOQEXT_ISA="portable",
    )
    assert done.returncode == 0, done.stderr


def test_an_exception_of_a_handler_is_the_one_that_is_raised():
    done = run(
        """
class TooLong(Exception):
    pass

def handler(*_):
    raise TooLong("the deadline")

signal.signal(signal.SIGVTALRM, handler)
signal.setitimer(signal.ITIMER_VIRTUAL, 0.15)
out = empty((ROWS, N), np.uint16)
try:
    method(many, params, out=out)
except TooLong as error:
    assert str(error) == "the deadline" and error.__cause__ is None and error.__context__ is None
    assert untouched(out)
    print("raised")
""",
        MOQEXT_ISA="portable",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "raised\n"


def test_tensors_without_elements_take_no_time():
    """2**40 rows of nothing were walked one by one, for hours."""
    done = run(
        """
nothing = np.empty((1 << 40, 0), np.uint8)
ops.pack_fp4(nothing)
ops.unpack_fp4(nothing)
ops.swizzle_block_scales(nothing)
ops.unswizzle_block_scales(nothing, (1 << 40, 0))
ops.requantize_to_max(nothing, np.float32([1, 2]), [1 << 39, 1 << 39])
"""
    )
    assert done.returncode == 0, done.stderr

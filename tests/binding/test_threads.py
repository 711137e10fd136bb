"""Eight threads of mixed operations: right results, and no memory or reference that stays behind."""

import ctypes
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from operations import OPERATIONS, Operation, layer

import moqext
from moqext import ops

try:
    import torch
except ModuleNotFoundError:
    torch = None  # type: ignore[assignment]

THREADS = 8
PER_ROUND = 40
"""Calls between two looks at the results."""


class Lent:
    """An array that is reached through `__dlpack__` alone."""

    def __init__(self, array: np.ndarray, error: type[Exception] | None = None) -> None:
        self.array = array
        self.error = error

    def __dlpack__(self, **keywords: Any) -> Any:
        if self.error:
            raise self.error("no")
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __array_namespace__(self, api_version: Any = None) -> Any:
        return np

    def __iadd__(self, other: Any) -> Any:
        raise NotImplementedError


class Work:
    """The calls of one thread on tensors of its own, and what they have to give."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.operations = [make(rng) for make in OPERATIONS.values()]
        for operation in self.operations:
            operation.run()
        self.expected = [operation.results() for operation in self.operations]
        method, params = layer(rng, "NVFP4")
        prepared = dict(method.prepare(params))
        x = rng.standard_normal((2, method.in_features)).astype(np.float32)
        raw = np.ones((2, 8), np.uint8)
        self.calls: list[Callable[[], Any]] = [operation.run for operation in self.operations]
        self.calls += [  # results of the library's own making
            lambda: method(x, prepared),
            lambda: method.prepare(params),
            lambda: ops.quantize(x, "nvfp4"),
            lambda: ops.requantize_to_max(raw, np.ones(2, np.float32), [1, 1]),
            lambda: ops.decode(raw, format="e4m3"),
            lambda: moqext._C.describe_tensor(x, out=np.empty(3)),
            lambda: ops.decode(Lent(raw), "e4m3"),
            lambda: ops.encode(x, "e4m3", Lent(np.empty(x.shape, np.uint8))),
            lambda: method(Lent(x), {name: Lent(array) for name, array in prepared.items()}),
            lambda: self.refused(ops.encode, Lent(x, TypeError), "e4m3"),
            lambda: self.refused(ops.encode, x, "e5m3"),
            lambda: self.refused(ops.encode, "x", "e4m3"),
            lambda: self.refused(ops.encode, x, "e4m3", x),
            lambda: self.refused(method, x, {}),
            lambda: self.refused(method, raw, prepared),
            lambda: self.refused(method.prepare, prepared, {}),
            lambda: self.refused(ops.dequantize, raw, "FP8", weight_scale=raw, outt=None),
        ]
        if torch is not None:
            t, out = torch.from_numpy(x), torch.empty(x.shape, dtype=torch.float8_e4m3fn)
            self.calls += [
                lambda: ops.encode(t, "e4m3"),
                lambda: ops.encode(t, "e4m3", out),
                lambda: self.refused(ops.encode, t, "e4m3", t),
            ]
        self.inputs = [x, raw, *prepared.values(), *params.values()]
        self.inputs += [operation.get(slot) for operation in self.operations for slot in operation.slots()]

    def refused(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        try:
            function(*args, **keywords)
        except (TypeError, ValueError, BufferError):
            return
        raise AssertionError(f"{function} took {args} {keywords}")

    def run(self, count: int) -> None:
        for first in range(0, count, PER_ROUND):
            for choice in self.rng.integers(len(self.calls), size=min(PER_ROUND, count - first)).tolist():
                self.calls[choice]()
            self.check()

    def check(self) -> None:
        for operation, expected in zip(self.operations, self.expected, strict=True):
            assert operation.results() == expected, operation


def run_all(works: list[Work], count: int) -> None:
    """`count` calls of each, in a thread of its own."""
    failures: list[BaseException] = []

    def body(work: Work) -> None:
        try:
            work.run(count)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated() -> int:
    """Bytes that malloc has given out, in all arenas; 0 where the C library does not say."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


SHARED = [
    np.ndarray,
    np.dtype(np.float32),
    np.dtype(np.uint8),
    ValueError,
    TypeError,
    moqext.LinearMethod,
    ops,
]


def references(works: list[Work]) -> list[int]:
    """Counts references to all tensors that were passed, and to what their calls share."""
    gc.collect()
    things = [thing for work in works for thing in work.inputs] + SHARED
    # Since 3.12 NumPy's types are immortal: their count is 2**32 or thereabouts and says nothing.
    return [min(sys.getrefcount(thing), 2**31) for thing in things]


def growth(works: list[Work], calls: int) -> tuple[int, int, int, int]:
    """References, blocks of the interpreter, bytes of malloc and resident bytes that calls leave behind."""
    before, blocks, bytes_before, resident_before = (
        references(works),
        sys.getallocatedblocks(),
        allocated(),
        resident(),
    )
    run_all(works, calls)
    after = references(works)
    return (
        max(abs(new - old) for new, old in zip(after, before, strict=True)),
        sys.getallocatedblocks() - blocks,
        allocated() - bytes_before,
        # The sanitizer keeps freed memory resident, to watch it.
        0 if "asan" in os.environ.get("LD_PRELOAD", "") else resident() - resident_before,
    )


LIMITS = (20, 300, 1 << 17, 4 << 20)
"""Growth that is no leak: each kind of call is made at least 500 times, so that one thing a call is more."""


def check_for_leaks(rng: np.random.Generator, calls: int) -> None:
    """A leak shows in every round; a table of the interpreter that grows once does not."""
    works = [Work(np.random.default_rng(seed)) for seed in rng.integers(2**32, size=THREADS)]
    for _ in range(2):  # arenas, caches and tables that are made once
        run_all(works, min(calls, 1000))
    rounds = []
    for _ in range(3):
        rounds.append(growth(works, calls))
        if all(grown < limit for grown, limit in zip(rounds[-1], LIMITS, strict=True)):
            return
    raise AssertionError(f"references, blocks, bytes and resident bytes grew by {rounds}")


def test_threads_leave_nothing_behind(rng: np.random.Generator) -> None:
    check_for_leaks(rng, 3000)


@pytest.mark.slow
def test_threads_leave_nothing_behind_in_the_long_run(rng: np.random.Generator) -> None:
    check_for_leaks(rng, 100_000)


def test_one_layer_and_its_tensors_shared_by_all_threads(rng: np.random.Generator) -> None:
    operation: Operation = OPERATIONS["linear NVFP4"](rng)
    operation.run()
    expected = operation.results()[0]
    arguments = operation.arguments

    def body() -> None:
        for _ in range(300):
            out = np.empty_like(arguments["out"])
            operation.call(arguments | {"out": out})
            assert out.tobytes() == expected

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]

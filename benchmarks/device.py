"""Times of calls on a CUDA device, and what the device allows.

The rules. A call is timed in a CUDA graph of at least 20 of them (fewer where they are long), each on the
next of several weights that together exceed the last cache. The host queues everything behind a short spin,
so that the device never waits for it, and events around each replay tell the time.

- Short calls (few tokens): the graphs of all peers are replayed in turn, in another order each round; the
  figure is the median of the rounds.
- Long calls: each peer alone after an idle pause, a few replays. A heavy kernel pulls the clock down and the
  drop comes late, so that in a common round it is the next peer who pays for it.
- Sustained: one peer for a second and more; the last quarter counts.

The clock is measured by a spin of known cycles right after a burst. torch is imported by the callers.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moqext.tools.bench import Ceilings

LEAST_CALLS = 20
MOST_CALLS = 160
GRAPH_SECONDS = 1e-3
"""Short calls are repeated in a graph until it takes so long: the few microseconds in which a graph starts
count little then."""

ROUNDS = 9
REPLAYS = 3
IDLE = 0.2
SUSTAINED = 1.2
SPIN = 2_000_000
"""Cycles, a millisecond: the host queues a round meanwhile."""

CLOCK_SPIN = 200_000
COPY_BYTES = 1 << 30
PRODUCT = 8192


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one call, in seconds.

    Attributes:
        seconds: Median.
        best_seconds: The fastest replay.
        worst_seconds: The slowest replay.
        calls: Calls in a graph.
        clock_mhz: Clock of the multiprocessors right after the replays, None where it was not measured.
        watts: Power of the whole card, None where it was not measured.
    """

    seconds: float
    best_seconds: float
    worst_seconds: float
    calls: int
    clock_mhz: float | None = None
    watts: float | None = None


class Power:
    """The card's power, from the driver's management library; None where there is none."""

    def __init__(self, index: int = 0) -> None:
        self._library: Any = None
        self._device = ctypes.c_void_p()
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if (
            library.nvmlInit_v2() == 0
            and library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._device)) == 0
        ):
            self._library = library

    def watts(self) -> float | None:
        """Now."""
        milliwatts = ctypes.c_uint()
        if self._library is None:
            return None
        status = self._library.nvmlDeviceGetPowerUsage(self._device, ctypes.byref(milliwatts))
        return None if status else milliwatts.value / 1000

    def driver(self) -> str | None:
        """Version of the driver."""
        text = ctypes.create_string_buffer(96)
        if self._library is None or self._library.nvmlSystemGetDriverVersion(text, len(text)):
            return None
        return text.value.decode()


def calls_for(seconds: float) -> int:
    """How many calls of so many seconds a graph gets."""
    if seconds > 3e-3:
        return 4
    if seconds > 0.4e-3:
        return 8
    return min(max(LEAST_CALLS, round(GRAPH_SECONDS / max(seconds, 1e-7))), MOST_CALLS)


class Graph:
    """Calls in a row as a CUDA graph.

    Args:
        torch: The module.
        call: Runs one of `weights`.
        weights: They take turns.
        calls: How many; None finds a number from the time of a first graph.
        edit: Changes the captured graph, given its handle, before it is made ready to run.
    """

    def __init__(
        self,
        torch: Any,
        call: Callable[[Any], object],
        weights: Sequence[Any],
        calls: int | None = None,
        edit: Callable[[int], object] | None = None,
    ) -> None:
        self._torch = torch
        self._kept = call, weights  # the graph reads and writes their memory
        if calls is None:
            probe = Graph(torch, call, weights, 3)
            calls = calls_for(min(probe.replay_seconds(2)))
        self.calls = calls
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for weight in weights[:2]:
                call(weight)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True) if edit else torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for number in range(calls):
                call(weights[number % len(weights)])
        if edit:
            edit(self._graph.raw_cuda_graph())
            self._graph.instantiate()

    def queue(self) -> tuple[Any, Any]:
        """Queues a replay between two events."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graph.replay()
        end.record()
        return begin, end

    def seconds(self, events: tuple[Any, Any]) -> float:
        """Seconds of a call, from the events of a replay that has ended."""
        return float(events[0].elapsed_time(events[1])) * 1e-3 / self.calls

    def replay_seconds(self, replays: int) -> list[float]:
        """Seconds of a call, for each of some replays in a row."""
        self._torch.cuda._sleep(SPIN // 4)
        events = [self.queue() for _ in range(replays)]
        self._torch.cuda.synchronize()
        return [self.seconds(pair) for pair in events]


def interleaved(torch: Any, graphs: Mapping[Any, Graph], rounds: int = ROUNDS) -> dict[Any, Times]:
    """Times of graphs that take turns."""
    for graph in graphs.values():
        graph.queue()
    torch.cuda.synchronize()
    order = list(graphs)
    times: dict[Any, list[float]] = {key: [] for key in graphs}
    for _ in range(rounds):
        random.shuffle(order)  # so that nobody always follows the same one
        torch.cuda._sleep(SPIN)
        events = {key: graphs[key].queue() for key in order}
        torch.cuda.synchronize()
        for key, pair in events.items():
            times[key].append(graphs[key].seconds(pair))
    return {key: _times(spent, graphs[key].calls) for key, spent in times.items()}


def alone(torch: Any, graph: Graph, replays: int = REPLAYS, idle: float = IDLE) -> Times:
    """Times of one graph after an idle pause."""
    torch.cuda.synchronize()
    time.sleep(idle)
    torch.cuda._sleep(SPIN // 4)
    events = [graph.queue() for _ in range(replays)]
    clock = _queue_clock(torch)
    torch.cuda.synchronize()
    return _times([graph.seconds(pair) for pair in events], graph.calls, _megahertz(clock))


def sustained(torch: Any, graph: Graph, power: Power, seconds: float = SUSTAINED) -> Times:
    """Times of one graph at the end of a long run of it; the queue never runs dry."""
    torch.cuda.synchronize()
    events = [graph.queue()]
    torch.cuda.synchronize()
    replays = max(8, round(seconds / (graph.seconds(events[0]) * graph.calls)))
    events, watts = [], []
    for number in range(replays):
        events.append(graph.queue())
        if number >= 2:
            events[number - 2][1].synchronize()
        if number > replays * 3 // 4:
            watts.append(power.watts())
    clock = _queue_clock(torch)
    torch.cuda.synchronize()
    last = [graph.seconds(pair) for pair in events[-max(2, replays // 4) :]]
    seen = [value for value in watts if value is not None]
    return _times(last, graph.calls, _megahertz(clock), statistics.median(seen) if seen else None)


def _times(
    spent: Sequence[float], calls: int, clock: float | None = None, watts: float | None = None
) -> Times:
    return Times(statistics.median(spent), min(spent), max(spent), calls, clock, watts)


def _queue_clock(torch: Any) -> tuple[Any, Any]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(CLOCK_SPIN)
    end.record()
    return begin, end


def _megahertz(events: tuple[Any, Any]) -> float:
    return float(CLOCK_SPIN / (events[0].elapsed_time(events[1]) * 1e-3) / 1e6)


def host_seconds(
    torch: Any, call: Callable[[Any], object], weights: Sequence[Any], calls: int = 200
) -> Times:
    """Seconds of the host for a call outside of graphs: the device's queue holds all calls of a batch."""
    spent = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(calls):
            call(weights[number % len(weights)])
        spent.append((time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return _times(spent[1:], calls)


def copy_rate(torch: Any) -> float:
    """Bytes a second of an elementwise kernel that reads one gigabyte and writes one."""
    count = COPY_BYTES // 2
    pairs = [
        [
            torch.randn(count, device="cuda", dtype=torch.bfloat16),
            torch.empty(count, device="cuda", dtype=torch.bfloat16),
        ]
        for _ in range(2)
    ]
    copy = Graph(torch, lambda pair: torch.neg(pair[0], out=pair[1]), pairs, 4)
    return 2 * COPY_BYTES / alone(torch, copy, 5).best_seconds


def measure_ceilings(torch: Any) -> dict[str, Ceilings]:
    """The two rates that floors are made of, by what is multiplied ("bfloat16", "fp8").

    Bytes at the speed of an elementwise kernel that reads one gigabyte and writes one; operations at that of
    torch's product of square matrices of normal numbers, in a short burst.
    """
    rate = copy_rate(torch)
    flop = 2 * PRODUCT**3
    a, b = (torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    bf16 = Graph(torch, lambda other: torch.mm(a, other.T, out=out), [b], 4)
    codes = [matrix.to(torch.float8_e4m3fn) for matrix in (a, b)]
    one = torch.ones(1, device="cuda")

    def multiply(other: Any) -> None:
        torch._scaled_mm(codes[0], other.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True, out=out)

    fp8 = Graph(torch, multiply, [codes[1]], 4)
    return {
        "bfloat16": Ceilings(rate, flop / alone(torch, bf16).best_seconds),
        "fp8": Ceilings(rate, flop / alone(torch, fp8).best_seconds),
    }

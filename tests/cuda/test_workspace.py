"""Memory that calls work in: a little of it is kept for the next call on a stream, and for no other."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from moqext import MoEMethod

from ..linear_cases import random_x
from ..moe_calls import moved_inputs, prepared
from ..moe_cases import random_routing, random_stacks

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")


class Layer:
    """A layer whose calls work in memory, and calls of it with their results."""

    def __init__(self, rng: Any, tokens: tuple[int, ...]) -> None:
        self.method = MoEMethod("NVFP4", 16, 256, 128, top_k=4, device="cuda:0")
        params = prepared(self.method, random_stacks(rng, "NVFP4", 16, 256, 128))
        self.calls = []
        for count in tokens:
            x = random_x(rng, (count, 256), "bfloat16")
            inputs = moved_inputs(self.method, x, params, *random_routing(rng, count, 4, 16))
            self.calls.append((inputs, self.method(*inputs)))
        torch.cuda.synchronize()

    def run(self, index: int, out: Any) -> None:
        """Queues a call."""
        self.method(*self.calls[index][0], out=out)


def allocations() -> int:
    """How often torch's allocator was asked."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def allocating(call: Callable[[], None]) -> list[list[str]]:
    """Who asked torch's allocator during a call: for each time the functions on the stack."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1000)
    try:
        call()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    asked = [event for event in events if event["action"] == "alloc"]
    return [[f"{frame['filename']}:{frame['name']}" for frame in event["frames"]] for event in asked]


def test_calls_on_a_stream_ask_for_no_memory(rng):
    layer = Layer(rng, (1, 3, 5))  # in less than is kept: 40 tokens may take more, by their kernel
    outs = [torch.empty_like(result) for _, result in layer.calls]
    for index, out in enumerate(outs):
        layer.run(index, out)
    for _ in range(10):
        for index, out in enumerate(outs):
            out.fill_(float("nan"))
            layer.run(index, out)
            assert torch.equal(out, layer.calls[index][1])
    for index, out in enumerate(outs):  # torch.equal allocates, calls do not
        assert allocating(lambda index=index, out=out: layer.run(index, out)) == [], index


def test_large_memory_goes_back(rng):
    layer = Layer(rng, (6000,))
    out = torch.empty_like(layer.calls[0][1])
    before = torch.cuda.memory_allocated()
    layer.run(0, out)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(out, layer.calls[0][1])


def test_threads_on_one_stream_and_on_their_own(rng):
    """Calls of threads are queued in between each other's kernels, so none may have what another has."""
    layer = Layer(rng, (1, 3, 40, 5))
    wrong: list[str] = []

    def work(index: int, stream: Any) -> None:
        _, expected = layer.calls[index]
        outs = [torch.empty_like(expected) for _ in range(50)]
        with torch.cuda.stream(stream):
            for out in outs:
                layer.run(index, out)
        stream.synchronize()
        if not all(torch.equal(out, expected) for out in outs):
            wrong.append(f"{index} on {stream}")

    shared = torch.cuda.Stream()
    streams = [shared, shared, torch.cuda.Stream(), shared]
    threads = [threading.Thread(target=work, args=(i, s)) for i, s in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_more_streams_than_blocks(rng):
    layer = Layer(rng, (3,))
    streams = [torch.cuda.Stream() for _ in range(20)]
    outs = []
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(torch.empty_like(layer.calls[0][1]))
                layer.run(0, outs[-1])
    torch.cuda.synchronize()
    assert all(torch.equal(out, layer.calls[0][1]) for out in outs)


def test_graphs_have_memory_of_their_own(rng):
    """Replays on one stream while calls run on the one that was captured."""
    layer = Layer(rng, (3, 40))
    first, second = (torch.empty_like(result) for _, result in layer.calls)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        layer.run(0, first)
        layer.run(1, second)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            before = allocations()
            for _ in range(20):
                layer.run(0, first)
            assert allocations() == before + 20
    other = torch.cuda.Stream()
    for _ in range(20):
        first.fill_(float("nan"))
        second.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            graph.replay()
        with torch.cuda.stream(stream):
            for _ in range(20):
                layer.run(1, second)
        torch.cuda.synchronize()
        assert torch.equal(first, layer.calls[0][1])
        assert torch.equal(second, layer.calls[1][1])

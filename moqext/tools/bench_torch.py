"""Experts of torch's in bfloat16, for comparison, and times of torch's layers on a CUDA device.

torch is imported by the callers.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext.layers.moe import MoEMethod
from moqext.tools.bench import PEER, TURNS, Contestant, Tokens, copies, torch_normal, turns_of

ROUNDS = 5
CALLS = 24
LONG = 0.02
WARM = 0.1
"""Calls of a graph and their seconds at most, and seconds to warm up before: those of `moqext tune`."""


def torch_experts(
    torch: Any, method: MoEMethod, rng: np.random.Generator, rotate: int, device: str = "cpu"
) -> Contestant | None:
    """Experts by torch's grouped products: rows sorted by expert, as Transformers does it.

    Args:
        torch: The module.
        method: Of the experts; an activation of less common kind is SiLU here.
        rng: Source of the weights.
        rotate: Bytes of weights that take turns.
        device: "cpu" or "cuda:N".

    Returns:
        None where torch has no such product.
    """
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if multiply is None:
        return None
    number, hidden, inner = method.num_experts, method.hidden_size, method.intermediate_size
    first = torch_normal(torch, (number, (1 + method.gated) * inner, hidden), rng, device)
    second = torch_normal(torch, (number, hidden, inner), rng, device)
    size = first.nbytes + second.nbytes
    count = copies(size, rotate, 1 + (device == "cpu"))
    pairs = [(first, second)] + [(first.clone(), second.clone()) for _ in range(count - 1)]
    numbers = torch.arange(number, device=device, dtype=torch.int32)

    def activate(both: Any) -> Any:
        """Computes an activation of as much work as the layer's own."""
        if not method.gated:
            return torch.relu(both).square()
        gate, up = both.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    def activations(values: NDArray[np.float32]) -> Tokens:
        x = torch.from_numpy(values).to(device, torch.bfloat16)
        ids = [torch.from_numpy(each).to(device) for each in turns_of(method, len(values))]
        return Tokens(x, torch.full(ids[0].shape, 1 / method.top_k, device=device), ids)

    def call(tokens: Tokens, turn: tuple[int, Any, Any]) -> Any:
        number, w13, w2 = turn
        ids, order = tokens.ids[number % len(tokens.ids)].flatten().sort(stable=True)
        ends = torch.searchsorted(ids, numbers, right=True).int()
        rows = tokens.x[order // method.top_k]
        middle = activate(multiply(rows, w13.transpose(1, 2), offs=ends))
        down = multiply(middle, w2.transpose(1, 2), offs=ends) * tokens.weights.flatten()[order, None]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return down[back].unflatten(0, (-1, method.top_k)).sum(1)

    turns = [(turn, *pairs[turn % len(pairs)]) for turn in range(max(TURNS, len(pairs)))]
    return Contestant(PEER, lambda tokens: "torch", turns, size, activations, call)


def device_times(torch: Any, contestant: Contestant, values: NDArray[np.float32], device: str) -> list[float]:
    """Seconds of a call in each of some replays of a CUDA graph of many.

    Args:
        torch: The module.
        contestant: A layer on the device.
        values: float32 [tokens, in_features].
        device: "cuda:N".
    """
    with torch.cuda.device(device), torch.no_grad():
        x = contestant.activations(values)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            contestant.call(x, contestant.weights[0])  # what is done once a process cannot be captured
            stream.synchronize()
            begin = time.perf_counter()
            contestant.call(x, contestant.weights[-1])
            stream.synchronize()
            seconds = time.perf_counter() - begin
        most = max(len(contestant.weights), CALLS)
        calls = int(max(1, min(most, LONG / seconds)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(calls):
                contestant.call(x, contestant.weights[number % len(contestant.weights)])
        end = time.perf_counter() + WARM
        while time.perf_counter() < end:
            _replay(torch, graph, stream)
        return [_replay(torch, graph, stream) / calls for _ in range(ROUNDS)]


def _replay(torch: Any, graph: Any, stream: Any) -> float:
    """Seconds of a replay, on the device's clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        graph.replay()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000

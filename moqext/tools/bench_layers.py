"""Times of layers by numbers of tokens, moqext's beside torch's in bfloat16, on the CPU or a CUDA device.

On the CPU both take turns, as `moqext.tools.bench` has it. On a device the kernel that the layer takes is
timed by moqext's own runtime, as `moqext tune` times one, and torch by graphs of its own, each by itself.
Without torch only moqext's are timed.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext.layers.linear import LinearMethod
from moqext.layers.moe import MoEMethod
from moqext.ops.spelling import Compute
from moqext.tools import bench
from moqext.tools.bench_torch import device_times, torch_experts
from moqext.tools.busy import spread_of

REPEATS = 3
"""Times that a layer is timed on a device, each the median of five rounds."""

DEVICE_ROTATION = 300_000_000
"""Bytes of torch's weights that take turns on a device: five times the largest cache until now."""

MOST_SPREAD = 0.3
"""How far the times of one layer may lie apart, as a part of the fastest: twice what a falling clock does."""

H200_BYTES_PER_SECOND = 2 * 3201e6 * 6016 / 8
"""Rate of an H200's memory by its clock and width, which other chips' rates are told beside."""

Method = LinearMethod | MoEMethod


class Times(NamedTuple):
    """Seconds of calls with one number of tokens.

    Attributes:
        tokens: Rows of x.
        kernel: "family:name".
        own: Of moqext.
        torch: Of torch; empty where there is none, or it cannot run the layer.
    """

    tokens: int
    kernel: str
    own: Sequence[float]
    torch: Sequence[float]


class CpuTimer:
    """Times layers on the CPU.

    Args:
        torch: The module, or None.
        rng: Source of all data.
        threads: Of moqext and torch.
        seconds: To spend on a layer and number of tokens.
        rotate: Bytes of weights that take turns.
    """

    def __init__(
        self, torch: Any, rng: np.random.Generator, threads: int, seconds: float, rotate: int
    ) -> None:
        self._torch, self._rng, self._threads = torch, rng, threads
        self._seconds, self._rotate = seconds, rotate

    def __call__(self, method: Method, counts: Sequence[int]) -> Iterator[Times]:
        """Times a layer with each number of tokens."""
        own = bench.method_contestant(method, self._rng, self._rotate)
        torch = self._torch and _torch_layer(self._torch, method, self._rng, self._rotate, "cpu")
        for count in counts:
            values = _normal(self._rng, count, method)
            with bench.use_threads(self._threads, self._torch):
                found = bench.take_turns([torch, own] if torch else [own], values, self._seconds)
            yield Times(count, method.backend_for(count), found[-1], found[0] if torch else [])


class DeviceTimer:
    """Times layers on a CUDA device.

    Args:
        torch: The module, or None.
        rng: Source of all data.
        device: "cuda:N".
    """

    def __init__(self, torch: Any, rng: np.random.Generator, device: str) -> None:
        self._torch = torch if torch is not None and torch.cuda.is_available() else None
        self._rng, self._device = rng, device

    def __call__(self, method: Method, counts: Sequence[int]) -> Iterator[Times]:
        """Times a layer with each number of tokens."""
        own = self.own(method, counts)
        torch = self.torch(method, counts)
        for count, spent, others in zip(counts, own, torch, strict=True):
            yield Times(count, method.backend_for(count), spent, others)

    def own(self, method: Method, counts: Sequence[int]) -> list[list[float]]:
        """Seconds of the kernel that each number of tokens takes, a few times."""
        params = bench.random_params(method, self._rng)
        plan = method._plan
        return [[plan.measure(count, params, chosen=True)[0][2] for _ in range(REPEATS)] for count in counts]

    def torch(self, layer: Method | tuple[int, int], counts: Sequence[int]) -> list[list[float]]:
        """Seconds of torch on a layer, or a linear of (out_features, in_features); empty where it cannot."""
        if self._torch is None:
            return [[] for _ in counts]
        try:
            return self._torch_times(layer, counts)
        except RuntimeError:  # no such kernel, or no memory
            return [[] for _ in counts]
        finally:
            self._torch.cuda.empty_cache()  # moqext has memory of its own

    def _torch_times(self, layer: Method | tuple[int, int], counts: Sequence[int]) -> list[list[float]]:
        contestant = _torch_layer(self._torch, layer, self._rng, DEVICE_ROTATION, self._device)
        if contestant is None:
            return [[] for _ in counts]
        values = [_normal(self._rng, count, layer) for count in counts]
        return [device_times(self._torch, contestant, each, self._device) for each in values]


def measure_device(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    algos: Sequence[str],
    device: str,
    *,
    compute: Compute = "exact",
    seed: int = 0,
    report: Callable[[bench.Row], object] = lambda row: None,
) -> bench.Measurement:
    """Measures every algorithm on every shape and number of tokens on a device, beside torch where it is.

    Floors are the bytes of a call at the rate of the memory by its clock and width.

    Args:
        shapes: (out_features, in_features) of the layers.
        tokens: Rows of x.
        algos: As for `LinearMethod`.
        device: "cuda:N".
        compute: As for `LinearMethod`.
        seed: Of all data.
        report: Called with each row as soon as there is one.

    Raises:
        UnsupportedQuantization, ValueError: As `LinearMethod`, before anything is measured.
        MemoryError: The device has too little.
    """
    methods = {
        (algo, shape): LinearMethod(algo, shape[1], [shape[0]], device=device, compute=compute)
        for algo, shape in product(algos, shapes)
    }
    timer = DeviceTimer(bench.find_torch(), np.random.default_rng(seed), device)
    rate = H200_BYTES_PER_SECOND * next(iter(methods.values()))._plan.memory
    measured, spread = list[bench.Row](), 0.0
    for shape in shapes:
        found: list[tuple[str, Callable[[int], str], int, list[list[float]]]] = []
        others = timer.torch(shape, tokens)
        if any(others):
            found.append((bench.PEER, lambda count: "torch", 2 * prod(shape), others))
        for algo in algos:
            method = methods[algo, shape]
            own = timer.own(method, tokens)
            found.append((method.quant_algo, method.backend_for, _weight_bytes(method), own))
        for place, count in enumerate(tokens):
            for algo, kernel, weight_bytes, times in found:
                seconds = times[place]
                bytes_ = weight_bytes + 2 * count * sum(shape)
                row = bench.Row(
                    shape,
                    count,
                    algo,
                    kernel(count),
                    len(seconds),
                    statistics.median(seconds),
                    min(seconds),
                    bytes_,
                    2 * count * prod(shape),
                    bytes_ / rate,
                    statistics.median(others[place]) / statistics.median(seconds) if others[place] else None,
                )
                spread = max(spread, spread_of(seconds))
                measured.append(row)
                report(row)
    facts = {"device": device, "seed": seed, "bytes_per_second": rate, "flop_per_second": None}
    return bench.Measurement(facts | {"spread": spread}, measured)


# ---- whole models ----


class ModelLayer(NamedTuple):
    """Layers of a model of one description.

    Attributes:
        method: Method of each of them.
        names: Names of the layers; those that are fused have " + " between theirs.
    """

    method: Method
    names: list[str]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Layers of one description with one number of tokens.

    Attributes:
        names: Of the layers.
        quant_algo: Canonical algorithm.
        shape: (out_features, in_features), or (experts, hidden_size, intermediate_size).
        tokens: Rows of x.
        kernel: "family:name".
        seconds: Median of a call of one of the layers.
        spread: By how much its slowest call, or repeat on a device, exceeds the fastest.
        torch_seconds: Of torch in bfloat16, None without.
    """

    names: tuple[str, ...]
    quant_algo: str
    shape: tuple[int, ...]
    tokens: int
    kernel: str
    seconds: float
    spread: float
    torch_seconds: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Pass:
    """All layers one after another with one number of tokens.

    Attributes:
        tokens: Rows of x.
        seconds: Of all calls.
        tokens_per_second: No more than these can be.
        torch_seconds, torch_tokens_per_second, torch_ratio: The same of torch, and how many times as long it
            takes; None where it did not run each of the layers.
    """

    tokens: int
    seconds: float
    tokens_per_second: float
    torch_seconds: float | None
    torch_tokens_per_second: float | None
    torch_ratio: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def time_layers(
    layers: Sequence[ModelLayer],
    counts: Sequence[int],
    timer: Callable[[Method, Sequence[int]], Iterator[Times]],
    progress: Callable[[int, int, str], object] = lambda done, total, name: None,
) -> list[LayerRow]:
    """Times each description once.

    Args:
        layers: Of a model.
        counts: Numbers of tokens.
        timer: As `CpuTimer` or `DeviceTimer`.
        progress: Told how many descriptions are done, of how many, and the next one's first name.

    Returns:
        For each layer a row for each number of tokens.
    """
    rows = []
    for number, layer in enumerate(layers):
        progress(number, len(layers), layer.names[0])
        for times in timer(layer.method, counts):
            rows.append(
                LayerRow(
                    tuple(layer.names),
                    layer.method.quant_algo,
                    shape_of(layer.method),
                    times.tokens,
                    times.kernel,
                    statistics.median(times.own),
                    spread_of(times.own),
                    statistics.median(times.torch) if times.torch else None,
                )
            )
    return rows


def passes(rows: Sequence[LayerRow]) -> list[Pass]:
    """Sums over the layers, for each number of tokens in the order of the rows."""
    found = []
    for tokens in dict.fromkeys(row.tokens for row in rows):
        own, torch = 0.0, 0.0
        complete = True
        for row in rows:
            if row.tokens == tokens:
                own += len(row.names) * row.seconds
                torch += len(row.names) * (row.torch_seconds or 0.0)
                complete = complete and row.torch_seconds is not None
        beside = (torch, tokens / torch, torch / own) if complete else (None, None, None)
        found.append(Pass(tokens, own, tokens / own, *beside))
    return found


def shape_of(method: Method) -> tuple[int, ...]:
    """Sizes of a layer: out and in features; experts, hidden size and intermediate size."""
    if isinstance(method, MoEMethod):
        return method.num_experts, method.hidden_size, method.intermediate_size
    return sum(method.out_partitions), method.in_features


def doubt(spread: float, what: str) -> str:
    """Why times of a device are not to be trusted, by the largest spread; empty where they are."""
    if spread <= MOST_SPREAD:
        return ""
    return (
        f"repeats of {what} lie {spread:.0%} apart: something else uses the device; measure again when idle"
    )


def _torch_layer(
    torch: Any, layer: Method | tuple[int, int], rng: np.random.Generator, rotate: int, device: str
) -> bench.Contestant | None:
    if isinstance(layer, MoEMethod):
        return torch_experts(torch, layer, rng, rotate, device)
    shape = (sum(layer.out_partitions), layer.in_features) if isinstance(layer, LinearMethod) else layer
    return bench.torch_linear(torch, shape, rng, rotate, device)


def _normal(rng: np.random.Generator, count: int, layer: Method | tuple[int, int]) -> NDArray[np.float32]:
    columns = layer[1] if isinstance(layer, tuple) else shape_of(layer)[1]
    return rng.standard_normal((count, columns), np.float32)


def _weight_bytes(method: LinearMethod) -> int:
    """Bytes of the prepared tensors."""
    return sum(
        prod(spec.shape) * (4 if spec.dtype == "float32" else 1)
        for spec in method.prepared_params.values()
        if spec.required
    )

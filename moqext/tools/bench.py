"""Measures quantized linears on the CPU against torch's bfloat16 and against what the machine allows.

All contestants of a layer take turns in one process, on the same number of threads. A turn begins with a
pause, because threads of an OpenMP runtime go on spinning for some milliseconds after a call, on processors
that the next contestant needs; then comes a call that counts for nothing and wakes the contestant's own
threads, then the calls that are timed. Each call takes the next of several copies of the weight, which
together exceed the last cache several times over, so that weights come from memory, as they do in a model.

The floor of a call is the greater of two times: its bytes at the speed at which NumPy reads memory on as many
threads, and its operations at the speed of torch's fastest product of square matrices. The second is left out
without torch. Activations are normal, codes are random.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext import _C, reference
from moqext.algorithms import ALGORITHMS, LINEARS
from moqext.environment import last_level_cache
from moqext.interrupts import heard
from moqext.layers.linear import LinearMethod
from moqext.layers.method import ParamSpec
from moqext.layers.moe import MoEMethod
from moqext.ops import to_device
from moqext.ops.spelling import Compute

ALGOS = tuple(name for name in LINEARS if not ALGORITHMS[name].pre_quant_scale)
"""Measured unless told otherwise: all that run, but for NVFP4_AWQ, which is NVFP4 with factors for x."""

PEER = "bfloat16"
"""Name that stands for the algorithm in the rows of torch."""

PAUSE = 0.03
"""Seconds before a turn: libgomp's threads spin 300,000 times, up to 140 cycles each on recent processors."""

CALLS = 3
"""Timed calls of a turn."""

ROUNDS = 3
"""Turns that fit into the time given, however long a call takes."""

LEAST_ROTATION = 400_000_000
"""Bytes of weights that take turns at least, four times the last cache of most processors."""

PRODUCT_SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the square matrices by whose products the speed of multiplying is found."""

TURNS = 64
"""Calls with experts of their own, at most."""

LONG_PRODUCT = 0.02
"""Seconds of a product that keeps every thread busy for long enough: larger matrices gain nothing."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that the machine reaches on the threads of a measurement.

    Attributes:
        bytes_per_second: Reading memory.
        flop_per_second: Multiplying matrices, None without torch.
    """

    bytes_per_second: float
    flop_per_second: float | None

    def floor(self, bytes_: int, flop: int) -> float:
        """The least seconds of a call."""
        seconds = bytes_ / self.bytes_per_second
        return max(seconds, flop / self.flop_per_second) if self.flop_per_second else seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant on one layer and number of tokens.

    Attributes:
        shape: (out_features, in_features).
        tokens: Rows of x.
        quant_algo: Canonical algorithm, or `PEER`.
        kernel: "family:name", or "torch".
        calls: How many were timed.
        seconds: Median of a call, activations quantized within it.
        best_seconds: The fastest call.
        bytes: Prepared weight with its scales, x and y.
        flop: Two for each weight and token.
        floor_seconds: See `Ceilings.floor`.
        torch_ratio: Median of torch on the same layer over this one; None without torch.
    """

    shape: tuple[int, int]
    tokens: int
    quant_algo: str
    kernel: str
    calls: int
    seconds: float
    best_seconds: float
    bytes: int
    flop: int
    floor_seconds: float
    torch_ratio: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


class Contestant(NamedTuple):
    """A layer ready to run.

    Attributes:
        quant_algo: Canonical algorithm, or what stands for it.
        kernel: Its name for a number of tokens.
        weights: Copies that take turns.
        weight_bytes: Of one copy, with its scales.
        activations: From float32 (tokens, in_features) to what `call` takes.
        call: Runs activations through one of `weights`.
        value_bytes: Of an element of x and of y.
    """

    quant_algo: str
    kernel: Callable[[int], str]
    weights: Sequence[Any]
    weight_bytes: int
    activations: Callable[[NDArray[np.float32]], Any]
    call: Callable[[Any, Any], Any]
    value_bytes: int = 2


def find_torch() -> Any:
    """The module, or None where it is not installed."""
    try:
        with heard():
            return import_module("torch")
    except ModuleNotFoundError:
        return None


def rotation() -> int:
    """Bytes of weights that have to take turns on this machine so that none is left in a cache."""
    return max(4 * (last_level_cache() or 0), LEAST_ROTATION)


@dataclass(frozen=True, slots=True)
class Measurement:
    """All rows, with what they were measured under.

    Attributes:
        facts: Plain data: threads, seconds, rotate, seed, bytes_per_second, flop_per_second.
        rows: In order of shapes and tokens, torch first.
    """

    facts: dict[str, Any]
    rows: list[Row]


def measure(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    algos: Sequence[str] = ALGOS,
    *,
    threads: int | None = None,
    seconds: float = 5.0,
    rotate: int | None = None,
    seed: int = 0,
    compute: Compute = "exact",
    peers: Callable[[tuple[int, int], np.random.Generator], Sequence[Contestant]] = lambda shape, rng: (),
    report: Callable[[Row], object] = lambda row: None,
) -> Measurement:
    """Measures every algorithm on every shape and number of tokens, beside torch where it is installed.

    Args:
        shapes: (out_features, in_features) of the layers.
        tokens: Rows of x.
        algos: As for `LinearMethod`.
        threads: Of every contestant; None is `moqext.num_threads()`.
        seconds: As for `measure_layer`.
        rotate: As for `measure_layer`; None is `rotation()`.
        seed: Of all data.
        compute: As for `LinearMethod`.
        peers: More contestants of a layer, from its shape and a source of data; on `threads` too.
        report: Called with each row as soon as there is one.

    Raises:
        UnsupportedQuantization, ValueError: as `LinearMethod`, before anything is measured.
    """
    check(shapes, algos, compute=compute)
    rotate = rotate or rotation()
    torch = find_torch()
    threads = threads or _C.num_threads()  # after torch is loaded: its OpenMP runtime is asked
    rng = np.random.default_rng(seed)
    ceilings = measure_ceilings(threads, rotate, torch)
    measured = []
    for shape in shapes:
        contestants = [torch_linear(torch, shape, rng, rotate)] if torch else []
        contestants += peers(shape, rng)
        contestants += [_contestant(algo, shape, rng, rotate, compute) for algo in algos]
        for row in measure_layer(
            shape, tokens, contestants, ceilings, rng, threads=threads, seconds=seconds, torch=torch
        ):
            measured.append(row)
            report(row)
    facts = {"threads": threads, "seconds": seconds, "rotate": rotate, "seed": seed, **asdict(ceilings)}
    return Measurement(facts, measured)


def check(
    shapes: Sequence[tuple[int, int]],
    algos: Sequence[str],
    *,
    device: str = "cpu",
    compute: Compute = "exact",
) -> None:
    """Checks that every algorithm runs on every shape.

    Raises:
        UnsupportedQuantization, ValueError: as `LinearMethod`.
    """
    for algo in algos:
        for rows, columns in shapes:
            LinearMethod(algo, columns, [rows], device=device, compute=compute)


def measure_ceilings(threads: int, rotate: int, torch: Any = None) -> Ceilings:
    """The speeds that floors are made of.

    Args:
        threads: That read and multiply.
        rotate: Bytes to read: more than the caches hold.
        torch: The module, for the speed of multiplying.
    """
    parts = np.array_split(np.ones(max(rotate, 8 * threads) // 8, np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(np.add.reduce, parts)), calls=7)  # sums run without the GIL
    read = sum(part.nbytes for part in parts) / seconds
    if torch is None:
        return Ceilings(read, None)
    with use_threads(threads, torch):
        dtypes = (torch.float32, torch.bfloat16)
        multiply = max(product_speed(partial(_product_seconds, torch, dtype)) for dtype in dtypes)
    return Ceilings(read, multiply)


def product_speed(seconds_of: Callable[[int], float]) -> float:
    """Operations a second at the best of `PRODUCT_SIZES`, up to the first that takes long.

    Args:
        seconds_of: Seconds of a product of two square matrices of so many rows.
    """
    speed = 0.0
    for size in PRODUCT_SIZES:
        seconds = seconds_of(size)
        speed = max(speed, 2 * size**3 / seconds)
        if seconds > LONG_PRODUCT:
            break
    return speed


def _product_seconds(torch: Any, dtype: Any, size: int) -> float:
    matrix = torch.ones(size, size, dtype=dtype)
    return _best(partial(torch.matmul, matrix, matrix), calls=4)


def measure_layer(
    shape: tuple[int, int],
    tokens: Sequence[int],
    contestants: Sequence[Contestant],
    ceilings: Ceilings,
    rng: np.random.Generator,
    *,
    threads: int,
    seconds: float,
    torch: Any = None,
) -> Iterator[Row]:
    """Rows of one layer for each number of tokens.

    Args:
        shape: (out_features, in_features).
        tokens: Rows of x, one measurement each.
        contestants: They take turns; torch is the first where it is given.
        ceilings: Of `measure_ceilings` with as many threads.
        rng: Source of the activations.
        threads: Of moqext and torch, set for the time of each measurement.
        seconds: To spend on one number of tokens, all contestants together; each gets one turn anyway.
        torch: The module, where it is among the contestants.
    """
    for count in tokens:
        values = rng.standard_normal((count, shape[1]), dtype=np.float32)
        with use_threads(threads, torch):
            times = take_turns(contestants, values, seconds)
        medians = [statistics.median(calls) for calls in times]
        for contestant, calls, median in zip(contestants, times, medians, strict=True):
            bytes_ = contestant.weight_bytes + contestant.value_bytes * count * sum(shape)
            flop = 2 * count * shape[0] * shape[1]
            yield Row(
                shape,
                count,
                contestant.quant_algo,
                contestant.kernel(count),
                len(calls),
                median,
                min(calls),
                bytes_,
                flop,
                ceilings.floor(bytes_, flop),
                medians[0] / median if torch else None,
            )


def take_turns(
    contestants: Sequence[Contestant], values: NDArray[np.float32], seconds: float
) -> list[list[float]]:
    """Times of the calls of each contestant."""
    inputs = [contestant.activations(values) for contestant in contestants]
    times: list[list[float]] = [[] for _ in contestants]
    most = seconds / (ROUNDS * len(contestants))
    end = time.perf_counter() + seconds
    while not times[-1] or time.perf_counter() < end:
        for contestant, x, spent in zip(contestants, inputs, times, strict=True):
            time.sleep(PAUSE)
            spent += _turn(contestant, x, len(spent), most)
    return times


def _turn(contestant: Contestant, x: Any, first: int, most: float) -> list[float]:
    """Times of up to `CALLS` calls, fewer where they take longer than `most` seconds."""
    times: list[float] = []
    for number in range(first, first + 1 + CALLS):
        weight = contestant.weights[number % len(contestant.weights)]
        start = time.perf_counter()
        contestant.call(x, weight)
        times.append(time.perf_counter() - start)
        if sum(times) > most:
            break
    return times[1:] or times  # the first wakes the threads, which nobody notices in a long one


def _contestant(
    algo: str, shape: tuple[int, int], rng: np.random.Generator, rotate: int, compute: Compute = "exact"
) -> Contestant:
    rows, columns = shape
    return method_contestant(LinearMethod(algo, columns, [rows], compute=compute), rng, rotate)


def method_contestant(method: LinearMethod | MoEMethod, rng: np.random.Generator, rotate: int) -> Contestant:
    """A layer of moqext's on the CPU, in bfloat16.

    Args:
        method: Of the layer.
        rng: Source of codes and scales.
        rotate: Bytes of weights that take turns.
    """
    prepared = random_params(method, rng)
    weight_bytes = sum(tensor.nbytes for tensor in prepared.values())
    weights = [prepared]
    weights += [
        {name: np.array(tensor) for name, tensor in prepared.items()}
        for _ in range(copies(weight_bytes, rotate) - 1)
    ]
    about = (method.quant_algo, method.backend_for)
    if isinstance(method, LinearMethod):
        return Contestant(
            *about, weights, weight_bytes, lambda values: reference.encode(values, "bfloat16"), method
        )
    top_k, call = method.top_k, method

    def activations(values: NDArray[np.float32]) -> Tokens:
        shares = np.full((len(values), top_k), 1 / top_k, np.float32)
        return Tokens(reference.encode(values, "bfloat16"), shares, turns_of(call, len(values)))

    def run(tokens: Tokens, turn: tuple[int, Any]) -> Any:
        return call(tokens.x, turn[1], tokens.weights, tokens.ids[turn[0] % len(tokens.ids)])

    turns = [(turn, weights[turn % len(weights)]) for turn in range(max(TURNS, len(weights)))]
    return Contestant(*about, turns, weight_bytes, activations, run)


class Tokens(NamedTuple):
    """Arguments of a layer of experts.

    Attributes:
        x: [tokens, hidden_size].
        weights: float32 [tokens, top_k].
        ids: int32 [tokens, top_k] of each turn.
    """

    x: Any
    weights: Any
    ids: Sequence[Any]


def turns_of(method: MoEMethod, tokens: int) -> list[NDArray[np.int32]]:
    """Experts of the tokens of each turn, as `moqext tune` has them.

    A turn has as many experts as tokens of chance ask for on average, all of these as many tokens. It goes on
    where the one before ended.
    """
    experts, top_k = method.num_experts, method.top_k
    active = round(experts * (1 - (1 - min(top_k, experts) / experts) ** tokens))
    slots = np.arange(tokens * top_k) % active
    turns = range(min(TURNS, -(-experts // active)))
    return [((turn * active + slots) % experts).astype(np.int32).reshape(tokens, top_k) for turn in turns]


def torch_linear(
    torch: Any, shape: tuple[int, int], rng: np.random.Generator, rotate: int, device: str = "cpu"
) -> Contestant:
    """A linear of torch's in bfloat16.

    Args:
        torch: The module.
        shape: (out_features, in_features).
        rng: Source of the weight.
        rotate: Bytes of weights that take turns.
        device: "cpu" or "cuda:N".
    """
    weight = torch_normal(torch, shape, rng, device)
    weights = [weight] + [
        weight.clone() for _ in range(copies(weight.nbytes, rotate, 1 + (device == "cpu")) - 1)
    ]
    return Contestant(
        PEER,
        lambda tokens: "torch",
        weights,
        weight.nbytes,
        lambda values: torch.from_numpy(values).to(device, torch.bfloat16),
        torch.nn.functional.linear,
    )


def torch_normal(torch: Any, shape: Sequence[int], rng: np.random.Generator, device: str) -> Any:
    """A tensor of torch's of normal numbers in bfloat16."""
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
    return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)


def copies(weight_bytes: int, rotate: int, least: int = 2) -> int:
    """How many weights of so many bytes have to take turns."""
    return max(least, -(-rotate // weight_bytes))


def random_tensor(spec: ParamSpec, rng: np.random.Generator) -> NDArray[Any]:
    """Codes of any value, scales of a few powers of two around a small one."""
    if spec.dtype == "float32":
        return np.exp2(rng.uniform(-8, -4, spec.shape)).astype(np.float32)
    if spec.dtype == "float8_e8m0fnu":
        return rng.integers(119, 124, spec.shape, np.uint8)  # 2^-8 to 2^-4
    if spec.role == "scale":
        return rng.integers(0x30, 0x48, spec.shape, np.uint8)  # e4m3, 0.5 to 4
    codes = rng.integers(0, 0x100, spec.shape, np.uint8)
    if spec.dtype == "float8_e4m3fn":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    return codes


def random_params(method: LinearMethod | MoEMethod, rng: np.random.Generator) -> Any:
    """Prepared tensors of random codes and scales, where the method runs: for times alone."""
    params: dict[str, Any] = {}
    for name, spec in method.checkpoint_params.items():
        tensor = random_tensor(spec, rng)
        if name.endswith("input_scale"):
            tensor = np.full_like(tensor, 2.0**-5)  # fused layers may have to have one
        is_codes = spec.dtype != "float32" and method.device != "cpu"
        params[name] = to_device(tensor, method.device) if is_codes else tensor
    return method.prepare(params)


def _best(run: Callable[[], object], calls: int) -> float:
    """Seconds of the fastest call."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@contextmanager
def use_threads(threads: int, torch: Any) -> Iterator[None]:
    """Gives moqext and torch as many threads, and afterwards the numbers that each had before."""
    own, theirs = _C.num_threads(), torch.get_num_threads() if torch else 0
    try:
        _C.set_num_threads(threads)
        if torch:
            torch.set_num_threads(threads)
        yield
    finally:
        _C.set_num_threads(own)
        if torch:
            torch.set_num_threads(theirs)

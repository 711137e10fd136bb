"""Times of every config of every CUDA kernel of linears and experts: what `benchmarks.fit` reads.

    python -m benchmarks.configs --output FILE [--seconds S] [--only linears|experts] [--layer ...] ...

A config is one way of a kernel to do a call: its tile shape, split and number of blocks that share. Each is
kept in the plan, captured and replayed in turn with all others of its cell, on weights that take turns, so
that they come from memory; those that are far from the fastest have one replay. A linear follows the end of
the call before it, as it does among the kernels of others; experts run in a chain.

A line of the file is a kernel in a cell, without those that cannot run it:

    chip; kernel; layer; NxK or model; tokens; config:microseconds ...

where a config is its number in the kernel's table (csrc/cuda/choice). The head of the file says what the chip
is.
A file that exists is continued: cells that it has, or that failed, are not measured again, and cells come in
an order in which a cut leaves an even sample.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks import device, graph_edges, layers
from benchmarks.moe_layers import MODELS, UNIFORM, Sizes, draw, expert_map_of
from moqext import _C
from moqext.environment import cuda_attributes
from moqext.tools.selftest_times import variant_of

FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
GENERAL = ("MXFP8", "W8A16", "W8A8_SQ_PER_CHANNEL", "W4A16_AWQ", "W4A8_AWQ")
"""Formats that kernels for Hopper do not have."""
LAYERS = (*FP8, "NVFP4", "NVFP4,fp8", *GENERAL)
SHAPES = (
    *((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (2048, 2048), (7168, 2048)),
    *((10240, 8192), (24576, 1536), (2112, 7168), (28672, 8192), (5120, 25600), (6144, 4096)),
    *((1024, 4096), (32768, 512), (4096, 7168), (3072, 8192), (57344, 8192), (2560, 9728)),
    *((5120, 5120), (8192, 28672), (1280, 8192), (18432, 7168), (7168, 16384), (19456, 2560)),
    *((8192, 3584), (2048, 6144)),
)
"""Rows and columns of projections, the most telling first."""

FIRST_TOKENS = (1, 4, 16, 64, 256, 1024)
OTHER_TOKENS = (2, 8, 32, 128, 512, 2048, 4096)
EXPERT_FIRST = (1, 4, 16, 64, 128, 512)
EXPERT_OTHER = (2, 8, 32, 256, 1024, 2048, 4096)

OWN = ("cuda:sm90_", "cuda:cublaslt", "cuda:sm80_general")
"""How the names of kernels begin that a Hopper chip is left with; others are for other chips."""

ANY_CHIP_TOKENS = 256
"""Up to so many tokens kernels for any chip are measured, and up to so many the one on plain cores:"""
SIMT_TOKENS = 2

PLACE = "cuda:0"
ROUNDS = 5
HEAVY_ROUNDS = 2
NEAR = 1.4
"""How much longer than the fastest a config may take that has more than one round."""

CALLS = 24
"""Calls of a graph, unless they are longer than this all together, in seconds:"""
GRAPH_SECONDS = 1.5e-3
LONG_GRAPH = 4
HEAVY = 150e-6
"""Calls that are expected to take so long are replayed each after an idle pause of so many seconds."""
IDLE = 0.02
COPIES = 64
BATCHES = 8

FAILED = "# failed: "
MOST_FAILED = 3
"""Cells that may fail in a row: a device that is lost fails all."""

CHIPS = {
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA H20": "H20",
    "NVIDIA A100-SXM4-80GB": "A100 SXM",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
}
"""The plan's name of a device."""

SCALES = (0x28, 0x38)
"""Codes of block scales, from 0.25 to 1."""
EXPONENTS = (120, 128)
"""Codes of scales that are powers of two, from 2^-7 to 1."""
UNIT, UNIT_CODES = 576, 512
"""Bytes of a unit of packed NVFP4 weights (csrc/core/nvfp4_packed.h), and those before its scales."""

FACTORS = {"fold": 1.0, "input": 0.02, "scale": 1e-3}
"""Other scales of random experts, by the first of these that is in their name."""


class Config(NamedTuple):
    """A config of a kernel.

    Attributes:
        kernel: "family:name".
        number: In the kernel's table.
        variant: The number by which a plan keeps it.
    """

    kernel: str
    number: int
    variant: int


class Cell(NamedTuple):
    """A layer with a number of tokens.

    Attributes:
        layer: One of `LAYERS`.
        where: "NxK", or a model of experts.
        tokens: Rows of x.
    """

    layer: str
    where: str
    tokens: int


class Subject(NamedTuple):
    """Layer and calls that a cell times.

    Attributes:
        plan: Of the layer.
        call: Runs with the weights, or the routing, of this number.
        turns: How many numbers there are.
        seconds: What a call takes at least.
        ordinary: Whether calls wait for the end of those before them.
    """

    plan: Any
    call: Callable[[int], object]
    turns: int
    seconds: float
    ordinary: bool


class Timer(Protocol):
    """Times configs."""

    def __call__(self, subject: Subject, tokens: int, configs: Sequence[Config]) -> dict[Config, float]:
        """Seconds of each that runs."""


# ---- configs ----


def linear_plan(layer: str, shape: tuple[int, int], chip: str | None = None, place: str = PLACE) -> Any:
    """The plan of a linear, on a chip that need not be here."""
    algo, _, compute = layer.partition(",")
    about = (algo, shape[1], [shape[0]], None, "bfloat16", place, compute or "exact")
    return _C.linear_plan(*about, capability=chip)


def experts_plan(layer: str, sizes: Sizes, chip: str | None = None, place: str = PLACE) -> Any:
    """The plan of experts, on a chip that need not be here."""
    algo, _, compute = layer.partition(",")
    counts = (sizes.experts, sizes.hidden, sizes.intermediate, sizes.top_k)
    kind = (sizes.activation, sizes.gated, None, "bfloat16", place, compute or "exact")
    return _C.moe_plan(algo, *counts, *kind, sizes.of_all, None, None, None, False, chip)


def is_worth_measuring(kernel: str, tokens: int) -> bool:
    """Kernels for other chips are not, with many tokens."""
    if kernel.startswith(OWN):
        return True
    return tokens <= (SIMT_TOKENS if kernel == "cuda:simt" else ANY_CHIP_TOKENS)


def configs_of(plan: Any, tokens: int) -> list[Config]:
    """Every config that is worth measuring of the kernels that can run so many tokens."""
    return [
        Config(kernel, number, variant_of(plan, tokens, kernel, number))
        for kernel, number, *_ in plan.configs(tokens)
        if is_worth_measuring(kernel, tokens)
    ]


# ---- times ----


class GraphTimer:
    """Times configs in CUDA graphs that take turns.

    Args:
        torch: The module.
        warn: Is told of a config that fails.
    """

    def __init__(self, torch: Any, warn: Callable[[str], object]) -> None:
        self._torch, self._warn = torch, warn
        self._stream = torch.cuda.Stream()

    def __call__(self, subject: Subject, tokens: int, configs: Sequence[Config]) -> dict[Config, float]:
        graphs, pool = {}, self._torch.cuda.graph_pool_handle()
        for config in configs:
            try:
                subject.plan.keep(tokens, config.kernel, config.variant)
                graphs[config] = self._capture(subject, pool)
            except Exception as error:  # one config must not cost all others
                self._warn(
                    f"{config.kernel} {config.number}, {tokens} tokens: {type(error).__name__}: {error}"
                )
        return self._replay(graphs, subject.seconds > HEAVY)

    def _capture(self, subject: Subject, pool: Any) -> tuple[Any, int]:
        torch, call = self._torch, subject.call
        fits = max(LONG_GRAPH, min(CALLS, round(GRAPH_SECONDS / subject.seconds)))
        count = max(fits, subject.turns if subject.seconds < HEAVY else 0)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call(0)  # what is done once a process cannot be captured
            self._stream.synchronize()
            graph.capture_begin(pool=pool)
            try:
                for number in range(count):
                    call(number % subject.turns)
            finally:
                graph.capture_end()
        if subject.ordinary:
            graph_edges.apply(graph.raw_cuda_graph(), begins(graph.raw_cuda_graph(), count))
        graph.instantiate()
        return graph, count

    def _replay(self, graphs: Mapping[Config, tuple[Any, int]], heavy: bool) -> dict[Config, float]:
        """The median of a config's rounds; those that are far from the fastest have the first alone."""
        if not heavy:
            self._round(graphs, list(graphs))
        first = self._round(graphs, shuffled(graphs))
        near = [config for config in graphs if first[config] < NEAR * min(first.values())]
        spent: dict[Config, list[float]] = {config: [] for config in near}
        for _ in range(HEAVY_ROUNDS if heavy else ROUNDS):
            for config, seconds in self._round(graphs, shuffled(near), IDLE if heavy else 0).items():
                spent[config].append(seconds)
        return first | {config: statistics.median(times) for config, times in spent.items()}

    def _round(
        self, graphs: Mapping[Config, tuple[Any, int]], order: Sequence[Config], idle: float = 0
    ) -> dict[Config, float]:
        torch = self._torch
        events = {config: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for config in order}
        torch.cuda._sleep(device.SPIN)  # the host queues the round meanwhile
        for config in order:
            if idle:
                torch.cuda.synchronize()
                time.sleep(idle)
                torch.cuda._sleep(device.SPIN // 8)
            events[config][0].record()
            graphs[config][0].replay()
            events[config][1].record()
        torch.cuda.synchronize()
        return {
            config: pair[0].elapsed_time(pair[1]) * 1e-3 / graphs[config][1]
            for config, pair in events.items()
        }


def shuffled(configs: Iterable[Config]) -> list[Config]:
    """Shuffles configs, so that none always follows the same other."""
    order = list(configs)
    random.shuffle(order)
    return order


def begins(graph: int, calls: int) -> graph_edges.Policy:
    """The edges into the first kernels of calls, of a graph that has so many alike.

    Raises:
        ValueError: They are not alike.
    """
    order = graph_edges.in_order(list(graph_edges.edges_of(graph)))
    nodes = [order[0][0], *(after for _, after in order)] if order else []
    if not nodes or len(nodes) % calls:
        raise ValueError(f"expected a graph of {calls} calls, got {len(nodes)} kernels")
    first = set(nodes[:: len(nodes) // calls])
    return lambda edges: [edge for edge in edges if edge[1] in first]


# ---- layers ----


def least_seconds(read: float, products: float) -> float:
    """About what a call takes at least that reads so many bytes and multiplies so many pairs."""
    return 3e-6 + max(read / 4e12, 2 * products / 6e14)


class Linears:
    """Linears with weights of normal values, quantized for real; those of `GENERAL` are random codes."""

    def __init__(self, torch: Any, place: str = PLACE) -> None:
        self._torch, self._place = torch, place
        self._problem: layers.Problem | None = None
        self._made: tuple[str, tuple[int, int]] | None = None

    def subject(self, cell: Cell) -> Subject:
        """Makes the layer and the calls of a cell."""
        shape = layers.shape_of(cell.where)
        if self._made != (cell.layer, shape):
            self._make(cell.layer, shape)
        torch, plan = self._torch, self._plan
        x = torch.randn(cell.tokens, shape[1], device=self._place).to(torch.bfloat16)
        y = torch.empty(cell.tokens, shape[0], dtype=torch.bfloat16, device=self._place)
        bytes_ = self._weights[0]["weight"].numel()  # all of one byte
        seconds = least_seconds(bytes_, math.prod(shape) * cell.tokens)
        weights = self._weights

        def call(number: int) -> object:
            return plan.run(x, weights[number], None, y)

        return Subject(plan, call, len(weights), seconds, True)

    def _make(self, layer: str, shape: tuple[int, int]) -> None:
        torch = self._torch
        self._weights: list[dict[str, Any]] = []
        torch.cuda.empty_cache()
        self._plan = linear_plan(layer, shape, place=self._place)
        made = self._params(layer, shape)
        count = min(COPIES, -(-layers.ROTATION // made["weight"].numel()))
        self._weights = [made] + [made | {"weight": made["weight"].clone()} for _ in range(count - 1)]
        self._made = (layer, shape)

    def _params(self, layer: str, shape: tuple[int, int]) -> dict[str, Any]:
        """Prepared tensors."""
        if layer in GENERAL:
            return random_params(self._torch, self._plan.prepared_params(), self._place)
        if self._problem is None or self._problem.shape != shape:
            self._problem = None
            self._problem = layers.Problem.random(self._torch, shape, 64, self._place, 1, rotate=1)
        return dict(self._plan.prepare(self._problem.layer(layer.replace(",", ", ")).checkpoint(0)))


class ManyExperts:
    """Experts of random codes under scales that keep outputs finite, as only times are wanted."""

    def __init__(self, torch: Any, place: str = PLACE) -> None:
        self._torch, self._place = torch, place
        self._made: tuple[str, str] | None = None
        self._params: dict[str, Any] = {}

    def subject(self, cell: Cell) -> Subject:
        """Makes the layer and the calls of a cell: tokens meet experts drawn anew in each call."""
        sizes, torch = MODELS[cell.where], self._torch
        if self._made != (cell.layer, cell.where):
            self._params = {}
            torch.cuda.empty_cache()
            self._plan = experts_plan(cell.layer, sizes, place=self._place)
            self._params = random_params(torch, self._plan.prepared_params(), self._place)
            self._made = (cell.layer, cell.where)
        plan, params = self._plan, self._params
        source = torch.Generator(self._place).manual_seed(1)
        x = torch.randn(cell.tokens, sizes.hidden, generator=source, device=self._place).to(torch.bfloat16)
        read, products = self._sizes(sizes, cell.tokens)
        seconds = least_seconds(read, products)
        batches = [
            draw(torch, sizes, x, torch.empty_like(x), UNIFORM, source)
            for _ in range(BATCHES if seconds < 1e-3 else 3)
        ]
        local = expert_map_of(torch, sizes, self._place)

        def call(number: int) -> object:
            b = batches[number]
            return plan.run(b.x, params, b.weights, b.ids, local, sizes.on_input, b.out)

        return Subject(plan, call, len(batches), seconds, False)

    def _sizes(self, sizes: Sizes, tokens: int) -> tuple[float, float]:
        """Bytes and products of a call."""
        share = sizes.top_k / sizes.routed
        active = sizes.experts * (1 - (1 - share) ** tokens if share < 1 else 1)
        stacks = sum(stack.numel() for name, stack in self._params.items() if name.endswith("weight"))
        weights = (3 if sizes.gated else 2) * sizes.hidden * sizes.intermediate
        return active / sizes.experts * stacks, weights * tokens * share * sizes.experts


def random_params(torch: Any, specs: Iterable[tuple[Any, ...]], place: str) -> dict[str, Any]:
    """Prepared tensors by what a plan says of them."""
    return {
        name: _random_tensor(torch, name, shape, dtype, place)
        for name, shape, dtype, _, _ in specs
        if not name.endswith(("bias", "pre_quant_scale"))
    }


def _random_tensor(torch: Any, name: str, shape: tuple[int, ...], dtype: str, place: str) -> Any:
    if dtype == "float32":
        value = next(value for part, value in FACTORS.items() if part in name)
        return torch.full(shape, value, device=place)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=place)
    if dtype == "float8_e4m3fn":
        return codes.bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # at most 1.9, and no NaN
    if dtype == "float8_e8m0fnu":
        return torch.randint(*EXPONENTS, shape, dtype=torch.uint8, device=place).view(torch.float8_e8m0fnu)
    if shape[-1] == UNIT:
        scales = codes[..., UNIT_CODES:]
        scales.copy_(torch.randint(*SCALES, scales.shape, dtype=torch.uint8, device=place))
    return codes.view(torch.int8) if dtype == "int8" else codes


# ---- the file ----


def head(torch: Any) -> str:
    """The first line of a file."""
    about = cuda_attributes() | {"torch": torch.__version__, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    return "# " + "; ".join(f"{key}={value}" for key, value in about.items())


def lines_of(chip: str, cell: Cell, times: Mapping[Config, float]) -> Iterator[str]:
    """A cell as a file has it: a line for each kernel."""
    for kernel in dict.fromkeys(config.kernel for config in times):
        own = (
            f"{config.number}:{1e6 * time:.2f}" for config, time in times.items() if config.kernel == kernel
        )
        yield "; ".join((chip, kernel, cell.layer, cell.where, str(cell.tokens), " ".join(own)))


def measured_cells(text: str) -> set[Cell]:
    """The cells that a file has, and those that failed."""
    rows = (line.split("; ") for line in text.splitlines() if line and not line.startswith("#"))
    failed = (line.removeprefix(FAILED).split("; ") for line in text.splitlines() if line.startswith(FAILED))
    return {Cell(row[2], row[3], int(row[4])) for row in rows} | {
        Cell(row[0], row[1], int(row[2])) for row in failed
    }


def linear_cells(tokens: Iterable[int], shapes: Iterable[str], kinds: Iterable[str]) -> Iterator[Cell]:
    """Cells of all formats before those of the next shape."""
    for shape, layer, count in product(shapes, kinds, tokens):
        yield Cell(layer, shape, count)


@cache
def has_experts(layer: str, model: str) -> bool:
    """Whether a format has the experts of a model: groups of int4 divide the columns of some."""
    try:
        experts_plan(layer, MODELS[model], next(iter(CHIPS.values())))
    except ValueError:
        return False
    return True


def grid(options: argparse.Namespace) -> Iterator[Cell]:
    """All cells, the most telling first."""
    shapes = [f"{rows}x{columns}" for rows, columns in options.shapes]
    for linear, expert in ((FIRST_TOKENS, EXPERT_FIRST), (OTHER_TOKENS, EXPERT_OTHER)):
        if options.only != "experts":
            yield from linear_cells(options.tokens or linear, shapes, options.layer)
        if options.only != "linears":
            cells = linear_cells(options.tokens or expert, options.model, options.layer)
            yield from (cell for cell in cells if has_experts(cell.layer, cell.where))
        if options.tokens:
            return


def measure(
    cells: Iterable[Cell],
    subject_of: Callable[[Cell], Subject],
    timer: Timer,
    chip: str,
    write: Callable[[str], object],
    until: float = math.inf,
) -> int:
    """Measures cell by cell, and returns how many; one that fails is said, and skipped."""
    done = failed = 0
    for cell in cells:
        if time.monotonic() > until:
            write(f"# no time was left for {'; '.join(map(str, cell))} and what follows")
            break
        try:
            subject = subject_of(cell)
            times = timer(subject, cell.tokens, configs_of(subject.plan, cell.tokens))
        except Exception as error:  # the rest of the grid is worth more than a traceback
            text = " ".join(f"{type(error).__name__}: {error}".split())
            write(f"{FAILED}{'; '.join(map(str, cell))}; {text}")
            failed += 1
            if failed == MOST_FAILED:
                write("# too many in a row; run it again for the rest")
                break
            continue
        for line in lines_of(chip, cell, times):
            write(line)
        done, failed = done + 1, 0
    return done


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a file to write or continue")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many")
    parser.add_argument("--only", choices=("linears", "experts"))
    parser.add_argument("--layer", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--shapes", nargs="+", type=layers.shape_of, metavar="NxK", default=list(SHAPES))
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int)
    return parser.parse_args(arguments)


def main() -> None:
    """Measures and writes line by line."""
    options = parse()
    until = time.monotonic() + options.seconds
    torch = import_module("torch")
    known = options.output.read_text() if options.output.exists() else ""
    name = torch.cuda.get_device_name(0)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(options.output.open("a"))

        def write(line: str) -> None:
            for out in (file, *([sys.stderr] if line.startswith("#") else [])):
                print(line, file=out, flush=True)

        write(head(torch))
        linears, experts = Linears(torch), ManyExperts(torch)

        def subject_of(cell: Cell) -> Subject:
            return (experts if cell.where in MODELS else linears).subject(cell)

        found = measured_cells(known)
        cells = (cell for cell in grid(options) if cell not in found)
        begin = time.monotonic()
        done = measure(
            cells,
            subject_of,
            GraphTimer(torch, lambda text: write(f"# {text}")),
            CHIPS.get(name, name),
            write,
            until,
        )
        write(f"# {done} cells in {time.monotonic() - begin:.0f} seconds")


if __name__ == "__main__":
    main()

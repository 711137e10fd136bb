"""The subjects of docs/results: what was compared, what else was measured, and what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import llama_plot, pairs, record
from benchmarks.grid import Grid, table
from benchmarks.layers import NVFP4_ALGOS
from benchmarks.moe_layers import UNIFORM
from benchmarks.neighbours import ALL, ALONE
from benchmarks.pairs import Pair
from moqext.cli.bench import title
from moqext.tools.bench import PEER
from moqext.tools.bench_plot import roofline, times

Row = Mapping[str, Any]
Plots = Iterator[tuple[str, str]]
"""Names of files and drawings."""


@dataclass(frozen=True)
class Subject:
    """Results of one kind.

    Attributes:
        benchmarks: Names of the results that it is made of.
        pairs: Makes the comparisons.
        grids: Other tables of the results.
        plots: Makes the drawings.
        by_case: Whether a summary has a line for each case; else means over all of them.
        shown: Tables on the page beside the comparisons.
    """

    benchmarks: Sequence[str]
    pairs: Callable[[], list[Pair]] = list
    grids: Sequence[Grid] = ()
    plots: Callable[[], Plots] = lambda: iter(())
    by_case: bool = False
    shown: Sequence[Grid] = ()

    @property
    def measured(self) -> bool:
        """Whether there is a result of it."""
        return any(record.read_all(benchmark) for benchmark in self.benchmarks)

    def tables(self) -> str:
        """Every table, of all machines."""
        head = [
            "machine",
            "format",
            "case",
            "tokens",
            "moqext",
            "without PDL",
            "other",
            "whose",
            "ratio",
            "goals missed",
        ]
        body = [pair.line() for pair in self.pairs()]
        parts = [table(head, body, 3)] if body else []
        for grid in self.grids:
            for chip, result in record.read_all(grid.benchmark).items():
                where = ", ".join(f"{name} {value}" for name, value in grid.where.items())
                of_list = f", {grid.rows}" if grid.rows != "rows" else ""
                about = f"{grid.benchmark}.{chip}{of_list}: {', '.join(grid.values)}. {where}".strip()
                parts.append(f"{about}\n\n{grid.table(result)}")
        return "\n\n".join(parts)


def linear_plots(benchmark: str, page: str, draw: Callable[[Sequence[Row], str], str]) -> Callable[[], Plots]:
    """A drawing for each chip: moqext and torch in bfloat16 on `PLOTTED`, or on the first three shapes."""

    def plots() -> Plots:
        for chip, result in record.read_all(benchmark).items():
            rows = [row for row in result["rows"] if row["peer"] == "moqext" or row["quant_algo"] == PEER]
            rows = [row for row in rows if row["protocol"] != "sustained"]
            shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
            shapes = [shape for shape in PLOTTED if shape in shapes] or shapes[:3]
            rows = [row for row in rows if tuple(row["shape"]) in shapes]
            yield f"{page}.{chip}.svg", draw(rows, result["environment"]["gpu"])

    return plots


PLOTTED = ((4096, 4096), (8192, 8192), (28672, 4096))


def expert_plots() -> Plots:
    """Operations a second of layers by themselves."""
    for chip, result in record.read_all("moe_cuda").items():
        rows = [
            {**row, "shape": [result["models"][row["model"]][name] for name in ("hidden", "intermediate")]}
            for row in result["rows"]
            if (row["neighbours"], row["policy"], row["routing"]) == (ALONE, ALL, UNIFORM)
        ]
        heading = f"Experts of {', '.join(result['models'])} on an {result['environment']['gpu']}"
        yield f"cuda-experts.{chip}.svg", roofline(rows, heading)


def cpu_plots() -> Plots:
    """Operations a second of linears."""
    for chip, result in record.read_all("linear_cpu").items():
        yield f"cpu-linears.{chip}.svg", roofline(result["rows"], title(result["environment"], result))


def llama_plots() -> Plots:
    """Models as from_pretrained hands them over, where that was measured."""
    for chip, result in record.read_all("llama").items():
        if any(row["form"] == llama_plot.FORM for row in result["rows"]):
            heading = f"Llama, 8 billion weights, {result['gpu']}"
            yield f"llama.{chip}.svg", llama_plot.speedups(result["rows"], heading)


def linear_grids(benchmark: str) -> Sequence[Grid]:
    """Every path, and what calls cost the host."""
    names, algo = ("shape", "tokens"), ("quant_algo",)
    return (
        Grid(benchmark, (*algo, *names), ("peer", "protocol")),
        Grid(benchmark, (*algo, "peer"), ("result",), rows="host"),
    )


PREPARED = ("quant_algo", "experts", "shape", "shapes")
FILES = ("seconds", "gb_per_second")
COPIES = ("seconds", "of_copy", "seconds_into_out", "of_copy_into_out")
CHAIN = ("chain", "forced", "without", "tokens", "quant_algo")

SUBJECTS: Mapping[str, Subject] = {
    "fp8": Subject(
        ("linear_cuda",),
        lambda: pairs.linears("linear_cuda", lambda algo: True),
        linear_grids("linear_cuda"),
        linear_plots("linear_cuda", "cuda-fp8", roofline),
    ),
    "nvfp4": Subject(
        ("nvfp4_cuda",),
        lambda: pairs.linears("nvfp4_cuda", lambda algo: algo in NVFP4_ALGOS),
        linear_grids("nvfp4_cuda"),
        linear_plots("nvfp4_cuda", "cuda-nvfp4", times),
    ),
    "experts": Subject(
        ("moe_cuda", "moe_peers"),
        pairs.experts,
        (
            Grid(
                "moe_cuda",
                ("model", "routing", "tokens"),
                ("quant_algo", "policy"),
                where={"neighbours": ALONE},
            ),
            Grid(
                "moe_cuda",
                ("model", "tokens", "quant_algo"),
                ("neighbours", "policy"),
                where={"routing": "router"},
            ),
            Grid("moe_cuda", ("model", "quant_algo"), rows="host"),
            Grid("moe_peers", ("model", "routing", "tokens"), ("quant_algo", "peer")),
        ),
        expert_plots,
    ),
    "formats": Subject(
        ("format_peers",),
        grids=(Grid("format_peers", ("quant_algo", "where", "tokens"), ("peer",)),),
        shown=(
            Grid(
                "format_peers",
                ("where", "tokens"),
                ("quant_algo", "peer"),
                where={"quant_algo": "MXFP4|MXFP4, auto|MXFP4, fp8"},
            ),
            Grid(
                "format_peers",
                ("where", "tokens"),
                ("quant_algo", "peer"),
                where={"quant_algo": "bfloat16|MXFP8|W8A16|W8A8_SQ_PER_CHANNEL|W4A16_AWQ"},
            ),
        ),
    ),
    "cpu-linears": Subject(
        ("linear_cpu", "ggml_cpu"),
        pairs.cpu_linears,
        tuple(Grid(name, ("shape", "tokens"), ("quant_algo",)) for name in ("linear_cpu", "ggml_cpu")),
        cpu_plots,
    ),
    "cpu-experts": Subject(
        ("moe_cpu",),
        pairs.cpu_experts,
        (Grid("moe_cpu", ("tokens",), ("quant_algo",)),),
        by_case=True,
    ),
    "quantization": Subject(
        ("quantize_cuda", "quantize_cpu"),
        grids=(
            Grid("quantize_cuda", ("columns", "kind", "scheme"), ("tokens",)),
            Grid("quantize_cpu", ("shape", "dtype", "scheme"), (), ("median_gb_per_s", "median_of_copy")),
        ),
        shown=(
            Grid(
                "quantize_cuda",
                ("kind", "scheme"),
                ("tokens",),
                where={"columns": "8192", "tokens": "1|64|8192"},
            ),
            Grid("quantize_cpu", ("scheme",), ("shape",), ("median_of_copy",), {"dtype": "bfloat16"}),
        ),
    ),
    "weight-quantization": Subject(
        ("quantize_weight_cuda", "quantize_files"),
        grids=(
            Grid("quantize_weight_cuda", ("quant_algo", "search"), ("shape",), COPIES[:2]),
            Grid("quantize_files"),
        ),
        shown=(
            Grid("quantize_weight_cuda", ("quant_algo", "search"), ("shape",), where={"search": ""}),
            Grid("quantize_files", ("quant_algo", "cache"), ("device",), FILES),
        ),
    ),
    "batch-invariance": Subject(
        ("batch_invariance",),
        pairs.invariant,
        (Grid("batch_invariance", ("case", "quant_algo", "batch_invariant"), ("tokens",)),),
        by_case=True,
    ),
    "preparation": Subject(
        ("prepare_cuda",),
        grids=(Grid("prepare_cuda", ("compute", *PREPARED), (), COPIES),),
        shown=(Grid("prepare_cuda", PREPARED[1:], PREPARED[:1], ("of_copy",), {"compute": "exact"}),),
    ),
    "neighbours": Subject(
        ("neighbours",),
        pairs.neighbours,
        (Grid("neighbours", CHAIN, ("neighbours", "policy")),),
        by_case=True,
    ),
    "llama": Subject(
        ("llama", "moe_model"),
        pairs.models,
        (
            Grid("llama", ("form", "weights", "compute"), ("what", "tokens"), ("tokens_per_second",)),
            Grid("moe_model", ("form", "weights"), ("tokens",), ("tokens_per_second",)),
        ),
        llama_plots,
        by_case=True,
    ),
    "vllm": Subject(
        tuple(pairs.ENGINE),
        pairs.vllm,
        tuple(Grid(name) for name in pairs.ENGINE),
        by_case=True,
    ),
}

"""Times of linears among ordinary neighbours, with programmatic launch, with some of it, and without.

    python -m benchmarks.neighbours [--tokens M ...] [--seed N] [--output FILE];
    MOQEXT_PDL=1 python -m benchmarks.neighbours --output SECOND;
    MOQEXT_PDL=0 python -m benchmarks.neighbours --output THIRD;
    MOQEXT_PDL=1 python -m benchmarks.neighbours --profile --output FOURTH;
    MOQEXT_PDL=1 MOQEXT_KERNEL=NAME python -m benchmarks.neighbours --algo NVFP4 --tokens 1 --output FIFTH;
    python -m benchmarks.neighbours --merge FILE SECOND THIRD FOURTH FIFTH --output FILE.

A chain is the layers of a decoder one after the other in a CUDA graph (`benchmarks.neighbour_chain`), the
weights of all of them together larger than the last cache. What the linears add is the time of the chain less
that of the same chain without them; what one linear adds, the same with it alone left out. Beside it are the
linears by themselves, as `benchmarks.linear` times them. What is measured depends on MOQEXT_PDL, which a
process reads once. Without it, graphs are as the library captures them:

    default    moqext's kernels may begin early behind kernels of moqext that know programmatic launch

With MOQEXT_PDL=1 a process measures several policies by changing edges of captured graphs
(`benchmarks.graph_edges`):

    all        as captured: moqext's kernels may begin before the kernel ahead of them ends
    knowing    only behind kernels that were launched programmatically themselves
    none       never
    only NAME  one kernel of a layer, no other; with one token

MOQEXT_PDL=0 measures what the launches themselves do without the attribute, as policy "off". --profile has
what a profiler sees of one token's layer: every kernel's time, and the gap before it. A kernel that
MOQEXT_KERNEL forces is named in the rows.

Each linear's output is compared with float64 of what its codes mean, and each graph's outputs with those of
the same calls outside of a graph, bit for bit. Without a GPU (`--device cpu`) that is all that is done.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import device, graph_edges, layers, record
from benchmarks.linear import facts
from benchmarks.neighbour_chain import (
    ALGOS,
    LLAMA,
    NEIGHBOURS,
    OWN,
    TINY,
    TORCH,
    Chain,
    Linear,
    Sizes,
    make_linears,
)
from moqext.tools.bench import PEER

TOKENS = (1, 16, 64)
ALONE = "alone"
"""Linears by themselves; else the name of their neighbours."""

ALL, KNOWING, NONE, OFF, DEFAULT = "all", "knowing", "none", "off", "default"
POLICIES: Mapping[str, graph_edges.Policy] = {
    ALL: graph_edges.nothing,
    KNOWING: graph_edges.behind_strangers,
    NONE: graph_edges.everything,
}

SWITCH = "MOQEXT_PDL"
MEASURED: Mapping[str, Sequence[str]] = {"": (DEFAULT,), "0": (OFF,), "1": tuple(POLICIES)}
"""Policies of a process by the value of `SWITCH`."""

LAUNCHED = {
    TORCH: ("qkv", "o", "gate_up", "down"),
    OWN: ("first norm", "qkv", "o", "second norm", "gate_up", "activation", "down"),
}
"""moqext's kernels of a layer of the chain "llama", in order, where each linear is one kernel."""

SINGLE = {
    (neighbours, f"only {name}"): graph_edges.only(place, len(names))
    for neighbours, names in LAUNCHED.items()
    for place, name in enumerate(names)
}

ALLOWED = 2.5e-3
"""Relative error of a linear: design's, of one rounding to bfloat16."""

FORCING = "MOQEXT_KERNEL"
ROUNDS = 15
PROFILED = "llama"
"""The chain of which one token is profiled, and each kernel launched programmatically by itself."""


class Case(NamedTuple):
    """A graph that is timed.

    Attributes:
        quant_algo: Of the linears; None where all of them are left out.
        neighbours: `ALONE`, or of `NEIGHBOURS`.
        policy: Of `POLICIES` or `SINGLE`, `OFF` or `DEFAULT`.
        without: The linear that is left out, None for none.
    """

    quant_algo: str | None
    neighbours: str
    policy: str
    without: str | None = None


def cases(
    roles: Sequence[str], algos: Sequence[str], policies: Sequence[str], *, single_kernels: bool = False
) -> Iterator[Case]:
    """Everything that is timed of a chain and a number of tokens.

    Args:
        roles: Of the chain.
        algos: Of the linears.
        policies: Of a process, of `MEASURED`.
        single_kernels: Whether each kernel of moqext is launched so by itself, too.
    """
    single = policies[0]
    for neighbours in NEIGHBOURS:
        for policy in policies if neighbours == OWN else [single]:
            yield Case(None, neighbours, policy)
    for algo in algos:
        for policy in policies:
            plain = algo == PEER and policy != single  # nothing of it is moqext's
            yield from () if plain else [Case(algo, ALONE, policy), Case(algo, TORCH, policy)]
            yield Case(algo, OWN, policy)
            if len(roles) > 1 and not plain:
                yield from (Case(algo, TORCH, policy, role) for role in roles)
        if single_kernels and ALL in policies and algo != PEER:
            yield from (Case(algo, *single) for single in SINGLE)


@dataclass
class Run:
    """A measurement on its way.

    Attributes:
        torch: The module.
        sizes: Of the layers.
        place: torch's name of the device.
        seed: Of the data.
        algos: Of the linears.
        policies: Of the process, of `MEASURED`.
        profiled: Whether a profiler watches, and nothing is timed.
        rows: One for each graph.
        checks: One for each linear, number of tokens and kind of neighbours.
        profile: Gaps and times of each kernel of a layer.
        skipped: Graphs that cannot be made here, and why.
    """

    torch: Any
    sizes: Sizes
    place: str
    seed: int
    algos: Sequence[str]
    policies: Sequence[str]
    profiled: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    profile: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, name: str, tokens: Sequence[int], rotate: int) -> None:
        """A chain: every algorithm, kind of neighbours, policy and number of tokens."""
        shapes = self.sizes.shapes[name]
        linears = {
            algo: make_linears(self.torch, shapes, algo, self.place, self.seed, rotate) for algo in self.algos
        }
        for count in tokens:
            chain = Chain.random(self.torch, self.sizes, name, count, self.place, self.seed)
            for algo, ones in linears.items():
                self._check(chain, algo, ones)
            if self.profiled:
                self._watch(chain, linears)
            elif self.place != "cpu":
                self._time(chain, linears)

    def _check(self, chain: Chain, algo: str, linears: Mapping[str, Linear]) -> None:
        for name, make in NEIGHBOURS.items():
            for role, error in chain.errors(linears, make(self.torch)):
                kernel = linears[role].kernel(chain.tokens)
                about = {"chain": chain.name, "tokens": chain.tokens, "quant_algo": algo, "neighbours": name}
                about |= {"forced": os.environ.get(FORCING), "kernel": kernel}
                self.checks.append(about | {"role": role, "error": error})
                if not error < ALLOWED:
                    raise ArithmeticError(f"{self.checks[-1]}: wrong")

    def _time(self, chain: Chain, linears: Mapping[str, Mapping[str, Linear]]) -> None:
        graphs, edges = {}, {}
        single_kernels = chain.name == PROFILED and chain.tokens == 1
        for case in cases(list(chain.y), self.algos, self.policies, single_kernels=single_kernels):
            try:
                graphs[case], edges[case] = self._graph(chain, case, linears)
            except RuntimeError as error:
                self.skipped.append({"chain": chain.name, **case._asdict(), "reason": str(error)})
                continue
            if case.quant_algo and not case.without:
                self._compare(chain, case, linears[case.quant_algo], graphs[case])
        for case, times in device.interleaved(self.torch, graphs, ROUNDS).items():
            row = {"chain": chain.name, "tokens": chain.tokens, **case._asdict(), **asdict(times)}
            row = {name: value for name, value in row.items() if name not in ("clock_mhz", "watts")}
            self.rows.append(row | {"forced": os.environ.get(FORCING), "edges": edges[case]._asdict()})

    def _watch(self, chain: Chain, linears: Mapping[str, Mapping[str, Linear]]) -> None:
        for case in cases(list(chain.y), self.algos, self.policies):
            if case.neighbours != ALONE and not case.without:
                graph = self._graph(chain, case, linears)[0]
                self.profile.append(case._asdict() | kernels_of(self.torch, graph))

    def _graph(
        self, chain: Chain, case: Case, linears: Mapping[str, Mapping[str, Linear]]
    ) -> tuple[device.Graph, graph_edges.Edges]:
        found = []
        policy = POLICIES.get(case.policy) or SINGLE.get(case[1:3], graph_edges.nothing)

        def edit(graph: int) -> None:
            found.append(graph_edges.apply(graph, policy))

        ones = linears[case.quant_algo] if case.quant_algo else {}
        call = self._call(chain, case, ones)
        copies = next(len(linear.weights) for linear in (ones or next(iter(linears.values()))).values())
        calls = device.Graph(self.torch, call, range(copies)).calls
        return device.Graph(self.torch, call, range(copies), calls, edit), found[-1]

    def _call(self, chain: Chain, case: Case, linears: Mapping[str, Linear]) -> Callable[[int], None]:
        ones = {role: linear for role, linear in linears.items() if role != case.without}
        if case.neighbours == ALONE:
            return lambda copy: chain.run_alone(ones, copy)
        neighbours = NEIGHBOURS[case.neighbours](self.torch)
        return lambda copy: chain.run(ones, neighbours, copy)

    def _compare(self, chain: Chain, case: Case, linears: Mapping[str, Linear], graph: device.Graph) -> None:
        """A graph's outputs are those of its calls."""
        call = self._call(chain, case, linears)
        copies = next(len(linear.weights) for linear in linears.values())
        chain.reset()
        for number in range(graph.calls):
            call(number % copies)
        eager = {role: tensor.clone() for role, tensor in chain.y.items()}
        chain.reset()
        self.torch.cuda.synchronize()
        graph.queue()
        self.torch.cuda.synchronize()
        for role, tensor in chain.y.items():
            if not self.torch.equal(tensor, eager[role]):
                raise ArithmeticError(f"{chain.name}, {chain.tokens}, {case}: {role} differs in a graph")


def kernels_of(torch: Any, graph: device.Graph) -> dict[str, Any]:
    """Name, time and gap before it of each kernel of a layer, in us, means of a replay's layers.

    A layer of a replay has the same number of kernels as the next. A gap is negative where kernels overlap.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    graph.queue()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        graph.queue()
        torch.cuda.synchronize()
    seen = [event for event in profile.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
    spans = sorted((event.start_ns(), event.duration_ns(), event.name()) for event in seen)
    spans = [span for span in spans if not span[2].startswith(("Memset", "Memcpy"))]
    each = len(spans) // graph.calls
    rows = []
    for place in range(each if len(spans) == each * graph.calls else 0):
        layers_of = range(each + place, len(spans), each)  # behind the first layer
        gaps = [spans[at][0] - spans[at - 1][0] - spans[at - 1][1] for at in layers_of]
        spent = [spans[at][1] for at in layers_of]
        short = spans[each + place][2][:120]
        rows.append(
            {"kernel": short, "us": sum(spent) / len(spent) / 1e3, "gap_us": sum(gaps) / len(gaps) / 1e3}
        )
    return {"spans": len(spans), "calls": graph.calls, "kernels": rows}


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record of runs on the same machine.

    Raises:
        ValueError: They differ in the chip, the driver, a version or the data.
    """
    first = dict(parts[0])
    for part in parts[1:]:
        for name, value in part["environment"].items():
            if name != "date" and first["environment"].get(name) != value:
                raise ValueError(f"merge: {name} is {first['environment'].get(name)!r} here, {value!r} there")
        if part["seed"] != first["seed"]:
            raise ValueError(f"merge: seed is {first['seed']} here, {part['seed']} there")
    for name in ("rows", "checks", "profile", "skipped"):
        first[name] = [dict(row) for part in parts for row in part[name]]
    return first


def parse() -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a small layer, for a test")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="M", help="rows of x")
    parser.add_argument("--algo", nargs="+", choices=ALGOS, default=ALGOS, help="default: all")
    parser.add_argument("--seed", type=int, help="of the data; a fresh one is drawn and printed")
    parser.add_argument("--profile", action="store_true", help="watch one token's layer, time nothing")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="join results")
    options = parser.parse_args()
    if options.merge and not options.output:
        parser.error("--merge needs --output")
    return options


def main() -> None:
    """Measures, prints a line for each graph and, if asked, writes JSON."""
    options = parse()
    if options.merge:
        record.save(merge([record.read(path) for path in options.merge]), options.output)
        return
    torch = import_module("torch")
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    sizes = TINY if options.tiny else LLAMA
    policies = MEASURED[os.environ.get(SWITCH, "")]
    run = Run(torch, sizes, options.device, seed, options.algo, policies, options.profile)
    chains = [(PROFILED, (1,))] if options.profile else [(name, options.tokens) for name in sizes.shapes]
    with torch.no_grad():
        for name, tokens in chains:
            run.measure(name, tokens, 1 if options.tiny else layers.ROTATION)
    worst = max(check["error"] for check in run.checks)
    print(f"{len(run.checks)} outputs compared, the largest error {worst:.1e}")
    for row in run.rows:
        case = Case(*(row[name] for name in Case._fields))
        print(f"{row['chain']} M={row['tokens']} {case}: {row['seconds'] * 1e6:.2f} us, {row['edges']}")
    for row in [*run.skipped, *run.profile]:
        print(row)
    if options.output:
        about = {"seed": seed, "sizes": asdict(sizes), "checks": run.checks}
        about |= {"profile": run.profile, "skipped": run.skipped}
        if options.device != "cpu":
            about["environment"] = facts(torch, device.Power())
        record.write("neighbours", run.rows, options.output, **about)


if __name__ == "__main__":
    main()

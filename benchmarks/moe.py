"""Layers of experts on a CUDA device: by themselves, and in a decoder layer's block.

    python -m benchmarks.moe [--model NAME ...] [--tokens T ...] [--algo A ...] [--seconds S] [--output FILE].

By themselves, calls follow each other in a CUDA graph (`benchmarks.device`), each on the next of several
batches whose experts are drawn anew, so that weights come from memory. Experts are drawn from normal logits,
or by a power law, where few have most of the tokens. Beside moqext's formats is torch's grouped product in
bfloat16, with its rows sorted by expert on the device.

A block is what a decoder layer does around its experts,

    v = norm(x + y);   logits = router v;   weights, ids = route(logits);   y = experts(v, weights, ids).

Norm and routing are torch's kernels, or moqext's, which launch programmatically. The same block without
experts tells what they add. Every copy of the router sends tokens to other experts.

With edges as captured moqext's kernels may begin before the kernel ahead of them ends (policy "all"), with
ordinary ones never ("none", by themselves only for the first of the routings); `benchmarks.graph_edges`
changes the one into the other. With 1024 tokens and more each graph runs alone after a pause.

Each format's output is compared with float64 of what its codes mean, for a few tokens, and every graph's with
that of the same calls outside of a graph, bit for bit. Without a GPU (`--device cpu`) the comparison with
float64 is all that is done.

`python -m benchmarks.merge` joins runs of some models and numbers of tokens each.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import device, graph_edges, layers, record
from benchmarks.linear import facts
from benchmarks.moe_layers import (
    ALGOS,
    MODELS,
    ROUTINGS,
    TINY,
    Batch,
    Experts,
    Sizes,
    draw,
    peers_of,
    route_by_torch,
)
from benchmarks.neighbour_chain import NEIGHBOURS, OWN
from benchmarks.neighbours import ALL, ALONE, NONE
from moqext import ops
from moqext.tools.bench import PEER, Ceilings
from moqext.tools.expert_slack import rounds_d

TOKENS = (1, 4, 8, 16, 64, 256, 512, 1024, 4096, 8192)
BLOCK_TOKENS = 64
"""Blocks are measured up to so many."""

BATCHES, FEW_BATCHES = 24, 6
ROUTERS = 8
ALONE_FROM = 1024
ALLOWED = 2.5e-3
"""Relative error of a token: design's, of one rounding to bfloat16."""

CUT = ("cuda:sm90_fp8_prefill", "cuda:sm90_nvfp4_fp8_prefill")
SCALED = ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", layers.NVFP4_FP8)
ALLOWED_OF_D = 2**0.5 * ALLOWED
"""Where d is rounded, too, as `rounds_d` tells: the two add up by squares."""

ALLOWED_OF_CUT, ALLOWED_OF_SCALE = 1.5e-2, 4e-2
"""Most tokens of kernels whose sums FP8 cores cut; and the worst one of these, and of layers whose g has
scales that follow from it.

Cut sums move some codes of g to their neighbours, of the largest ones a fourteenth away. Where a scale
follows from g, the largest g of a slot may also be a last place of bfloat16 off, which is up to 3e-2 of what
the slot adds (docs/numerics.md).
"""

POLICIES = {ALL: graph_edges.nothing, NONE: graph_edges.everything}
BLOCKS = "blocks"

Call = Callable[[Batch], Any]


class Case(NamedTuple):
    """A graph that is timed.

    Attributes:
        quant_algo: Of the experts; None for a block without them.
        neighbours: `ALONE`, or of `NEIGHBOURS`.
        policy: Of `POLICIES`.
    """

    quant_algo: str | None
    neighbours: str
    policy: str


@dataclass
class Block:
    """The kernels around experts, and the buffers between.

    Attributes:
        torch: The module.
        sizes: Of the layer.
        neighbours: Norm, of `NEIGHBOURS`.
        own: Whether moqext routes.
        x: bfloat16 [T, H], what every norm adds.
        y: bfloat16 [T, H], the experts' output.
        norm_weight: bfloat16 [H].
        routers: bfloat16 [E, H], which take turns.
        heard: The batch of the last call.
    """

    torch: Any
    sizes: Sizes
    neighbours: Any
    own: bool
    x: Any
    y: Any
    norm_weight: Any
    routers: Sequence[Any]
    heard: Batch | None = None

    @classmethod
    def random(cls, torch: Any, sizes: Sizes, kind: str, tokens: int, place: str, seed: int) -> Block:
        """Fresh normal data."""
        source = torch.Generator(place).manual_seed(seed)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=source, device=place, dtype=torch.bfloat16)

        routers = [normal(sizes.routed, sizes.hidden) * sizes.hidden**-0.5 for _ in range(ROUTERS)]
        x, y = normal(tokens, sizes.hidden), normal(tokens, sizes.hidden)
        weight = 1 + normal(sizes.hidden) / 8
        return cls(torch, sizes, NEIGHBOURS[kind](torch), kind == OWN, x, y, weight, routers)

    def run(self, call: Call | None, copy: int) -> None:
        """A block, or what is around its experts."""
        v = self.neighbours.norm(self.y, self.x, self.norm_weight)
        weights, ids = self._route(v @ self.routers[copy].T)
        if call is not None:
            self.heard = Batch(v, weights, ids, self.y)
            call(self.heard)

    def _route(self, logits: Any) -> tuple[Any, Any]:
        if not self.own:
            return route_by_torch(self.torch, self.sizes, logits)
        renormalize = self.sizes.scoring == "softmax"
        return ops.route(logits, self.sizes.top_k, scoring=self.sizes.scoring, renormalize=renormalize)


@dataclass
class Run:
    """A measurement on its way.

    Attributes:
        torch: The module.
        place: torch's name of the device.
        seed: Of the data.
        ceilings: What floors are made of, None where nothing is timed.
        until: When no more cells begin, by `time.monotonic`.
        policies: Of moqext's edges.
        rows: One for each graph.
        checks: One for each format, number of tokens and routing.
        host: What calls cost the host.
        skipped: What cannot be measured here, and why.
    """

    torch: Any
    place: str
    seed: int
    ceilings: Mapping[str, Ceilings] | None
    until: float = math.inf
    policies: Sequence[str] = tuple(POLICIES)
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    host: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, model: str, sizes: Sizes, algos: Sequence[str], options: argparse.Namespace) -> None:
        """A layer in all its formats: by itself with the first routing, in blocks, with other routings."""
        made = {}
        for algo in algos:
            try:
                made[algo] = Experts.random(self.torch, sizes, algo, self.place, self.seed)
            except (ValueError, RuntimeError) as error:  # what a format does not take, or does not fit
                self.skipped.append({"model": model, "quant_algo": algo, "reason": str(error)})
        peers = peers_of(list(made.values()))
        first, *others = options.routing
        alone = options.tokens if options.only != BLOCKS else []
        for tokens in alone:
            self._alone(model, made, peers, tokens, first, self.policies)
        for tokens in options.tokens if options.only != ALONE else []:
            self._blocks(model, made, peers, tokens)
        for routing, tokens in product(others, alone):
            self._alone(model, made, peers, tokens, routing, (ALL,))

    def _has_time(self, model: str, tokens: int, what: str) -> bool:
        """Whether a cell may still begin; else it is told."""
        if time.monotonic() < self.until:
            return True
        print(f"{model} T={tokens} {what}: no time was left", flush=True)
        return False

    def _alone(
        self,
        model: str,
        made: Mapping[str, Experts],
        peers: Mapping[str, Any],
        tokens: int,
        routing: str,
        policies: Sequence[str],
    ) -> None:
        if not self._has_time(model, tokens, routing):
            return
        sizes = next(iter(made.values())).sizes
        batches = self._draw(sizes, tokens, routing)
        about = {"model": model, "tokens": tokens, "routing": routing}
        for algo, (call, kernel) in peers.items():
            batches[0].out.fill_(float("nan"))
            call(batches[0])
            self._check(about | {"quant_algo": algo, "kernel": kernel(tokens)}, made[algo], batches[0])
        if self.place == "cpu":
            return
        graphs = {}
        for algo, (call, _) in peers.items():
            for policy in policies if algo != PEER else (ALL,):
                case = Case(algo, ALONE, policy)
                graphs[case] = self._graph(call, batches, policy)
                self._compare(case, call, batches, graphs[case], batches[0].out)
        local = [batch.ids < sizes.experts for batch in batches]
        active = sum(
            int(self.torch.unique(b.ids[here]).numel()) for b, here in zip(batches, local, strict=True)
        )
        slots = sum(int(here.sum()) for here in local) / len(batches)
        self._time(about, graphs, made, peers, active / len(batches), slots)
        if tokens == 1:
            for algo, (call, _) in peers.items():
                seconds = device.host_seconds(self.torch, call, batches).seconds
                self.host.append(about | {"quant_algo": algo, "seconds": seconds})

    def _draw(self, sizes: Sizes, tokens: int, routing: str) -> list[Batch]:
        torch, source = self.torch, self.torch.Generator(self.place).manual_seed(self.seed + tokens)
        x = torch.randn((tokens, sizes.hidden), generator=source, device=self.place, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        count = 1 if self.place == "cpu" else BATCHES if tokens < ALONE_FROM else FEW_BATCHES
        return [draw(torch, sizes, x, out, routing, source) for _ in range(count)]

    def _blocks(self, model: str, made: Mapping[str, Experts], peers: Mapping[str, Any], tokens: int) -> None:
        if tokens > BLOCK_TOKENS or not self._has_time(model, tokens, BLOCKS):
            return
        sizes = next(iter(made.values())).sizes
        about = {"model": model, "tokens": tokens, "routing": "router"}
        graphs, counts = {}, []
        for kind in NEIGHBOURS:
            block = Block.random(self.torch, sizes, kind, tokens, self.place, self.seed)
            for algo, (call, kernel) in peers.items():
                counts.append(self._hear(block, call, sizes))
                described = about | {"quant_algo": algo, "kernel": kernel(tokens), "neighbours": kind}
                assert block.heard is not None
                self._check(described, made[algo], block.heard)
            if self.place == "cpu":
                continue
            for case, call in self._cases(kind, peers):
                run = _in_block(block, call)
                graphs[case] = self._graph(run, range(ROUTERS), case.policy)
                self._compare(case, run, range(ROUTERS), graphs[case], block.y)
        if graphs:
            active, slots = (sum(each) / len(counts) for each in zip(*counts, strict=True))
            self._time(about, graphs, made, peers, active, slots)

    def _cases(self, kind: str, peers: Mapping[str, Any]) -> list[tuple[Case, Call | None]]:
        cases: list[tuple[Case, Call | None]] = []
        for algo, call in [(None, None), *((algo, call) for algo, (call, _) in peers.items())]:
            moqexts = algo != PEER and (algo is not None or kind == OWN)
            cases += [(Case(algo, kind, policy), call) for policy in (self.policies if moqexts else (ALL,))]
        return cases

    def _hear(self, block: Block, call: Call, sizes: Sizes) -> tuple[float, float]:
        """Experts with tokens and slots of those here, means of a round of routers."""
        active = slots = 0
        for copy in range(ROUTERS):
            block.run(call, copy)
            assert block.heard is not None
            block.heard = Batch(*(tensor.clone() for tensor in block.heard))
            here = block.heard.ids[block.heard.ids < sizes.experts]
            active, slots = active + int(self.torch.unique(here).numel()), slots + int(here.numel())
        return active / ROUTERS, slots / ROUTERS

    def _check(self, about: Mapping[str, Any], experts: Experts, batch: Batch) -> None:
        errors = experts.errors(batch, batch.out)
        self.checks.append({**about, "error": errors.worst, "median_error": errors.median})
        cut = about["kernel"] in CUT
        once = ALLOWED_OF_D if rounds_d(about["kernel"], "bfloat16") else ALLOWED
        allowed = 4 * ALLOWED if experts.quant_algo == PEER else once  # torch rounds every step
        most = errors.median < (ALLOWED_OF_CUT if cut else allowed)
        scaled = cut or experts.quant_algo in SCALED
        if not (most and errors.worst < (ALLOWED_OF_SCALE if scaled else allowed)):
            raise ArithmeticError(f"{self.checks[-1]}: wrong")

    def _graph(self, call: Callable[[Any], object], weights: Sequence[Any], policy: str) -> device.Graph:
        def edit(graph: int) -> None:
            graph_edges.apply(graph, POLICIES[policy])

        calls = device.Graph(self.torch, call, weights).calls
        return device.Graph(self.torch, call, weights, calls, edit)

    def _compare(
        self, case: Case, call: Callable[[Any], object], weights: Sequence[Any], graph: device.Graph, out: Any
    ) -> None:
        """A graph's output is that of its calls."""
        start = out.clone()
        for number in range(graph.calls):
            call(weights[number % len(weights)])
        eager = out.clone()
        out.copy_(start)
        self.torch.cuda.synchronize()
        graph.queue()
        self.torch.cuda.synchronize()
        if case.quant_algo is not None and not self.torch.equal(out, eager):
            raise ArithmeticError(f"{case}: differs in a graph")

    def _time(
        self,
        about: Mapping[str, Any],
        graphs: Mapping[Case, device.Graph],
        made: Mapping[str, Experts],
        peers: Mapping[str, Any],
        active: float,
        slots: float,
    ) -> None:
        if about["tokens"] < ALONE_FROM:
            times = device.interleaved(self.torch, graphs)
        else:
            times = {case: device.alone(self.torch, graph) for case, graph in graphs.items()}
        for case, spent in times.items():
            row = {**about, **case._asdict(), **asdict(spent), "active_experts": active}
            if case.quant_algo is not None:
                row |= self._floor(made[case.quant_algo], about["tokens"], active, slots)
                row["kernel"] = peers[case.quant_algo][1](about["tokens"])
            self.rows.append(row)
            print(describe(row), flush=True)

    def _floor(self, experts: Experts, tokens: int, active: float, slots: float) -> dict[str, Any]:
        assert self.ceilings is not None
        wide = experts.quant_algo in (PEER, layers.NVFP4)
        moved, flop = experts.bytes(tokens, active), experts.flop(slots)
        floor = self.ceilings["bfloat16" if wide else "fp8"].floor(moved, flop)
        return {"bytes": moved, "flop": flop, "floor_seconds": floor}


def _in_block(block: Block, call: Call | None) -> Callable[[int], None]:
    return lambda copy: block.run(call, copy)


def describe(row: Mapping[str, Any]) -> str:
    """A line of what was measured."""
    share = f", floor {row['floor_seconds'] * 1e6:.1f}" if "floor_seconds" in row else ""
    return (
        f"{row['model']} T={row['tokens']} {row['routing']}, {row['quant_algo']}, {row['neighbours']}, "
        f"{row['policy']}: {row['seconds'] * 1e6:.2f} us{share} {row.get('kernel', '')}"
    )


def parse() -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a small layer, for a test")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS)[:1])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="T", help="rows of x")
    parser.add_argument("--algo", nargs="+", choices=[*ALGOS, PEER], default=[*ALGOS, PEER])
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES), help="of edges")
    parser.add_argument("--only", choices=(ALONE, BLOCKS), help="leave the other out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many")
    parser.add_argument("--seed", type=int, help="of the data; a fresh one is drawn and printed")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result to FILE")
    return parser.parse_args()


def main() -> None:
    """Measures, prints a line for each graph and, if asked, writes JSON."""
    options = parse()
    until = time.monotonic() + options.seconds
    torch = import_module("torch")
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    on_cpu = options.device == "cpu"
    ceilings = None if on_cpu else device.measure_ceilings(torch)
    run = Run(torch, options.device, seed, ceilings, until, options.policy)
    models = {"tiny": TINY} if options.tiny else {name: MODELS[name] for name in options.model}
    try:
        with torch.no_grad():
            for name, sizes in models.items():
                run.measure(name, sizes, options.algo, options)
    finally:  # where a cell is wrong, those before it are kept
        finish(run, models, options.output)


def finish(run: Run, models: Mapping[str, Sizes], output: Path | None) -> None:
    """Says what a run came to and, if asked, writes it."""
    worst = max((check["error"] for check in run.checks), default=0.0)
    print(f"{len(run.checks)} outputs compared, the largest error {worst:.1e}")
    for row in [*run.skipped, *run.host]:
        print(row)
    if output is None:
        return
    about: dict[str, Any] = {
        "seed": run.seed,
        "models": {name: asdict(each) for name, each in models.items()},
        "checks": run.checks,
        "host": run.host,
        "skipped": run.skipped,
    }
    if run.ceilings is not None:
        about["environment"] = facts(run.torch, device.Power())
        about["ceilings"] = {name: asdict(each) for name, each in run.ceilings.items()}
    record.write("moe_cuda", run.rows, output, **about)


if __name__ == "__main__":
    main()

"""FP8 and NVFP4 linears on CUDA against every peer that runs here, in one process on the same data.

A cell is a layer and a number of tokens. Every peer's output is checked against float64 before it is timed;
one that is wrong, or cannot run, is left out with the reason. benchmarks/device.py has the rules of timing,
benchmarks/layers.py the data, benchmarks/peers the peers. Quantizing the activations is part of every call.

    python -m benchmarks.linear [--nvfp4] [--quick] [--part i/n] [--algo NAME ...] [--shapes NxK ...]
                                [--tokens M ...] [--peers PART ...] [--kernels NAME ...] [--compiled]
                                [--no-sustained] [--seconds S] [--json FILE]
    MOQEXT_PDL=0 python -m benchmarks.linear --peers "no PDL" ...
    python -m benchmarks.linear --merge PART.jsonl ... --json FILE

The second one measures moqext without dependent launch; merged with the first it is a column beside it.

Results are kept as benchmarks/results/linear_cuda.*.jsonl, those of `--nvfp4` as nvfp4_cuda.*.jsonl: NVFP4
weights as they are and multiplied as e4m3, beside them moqext's FP8 by token. `python -m benchmarks.merge`
puts peers that were measured anew in the place of their old rows.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import device, layers, record
from benchmarks.goals import FP8_REFERENCE
from benchmarks.peers import Bound, Peer, all_peers, own, select, torch_linear
from moqext.environment import environment
from moqext.tools.bench import PEER, Ceilings

ALONE_FROM = 1024
"""Tokens from which each peer is timed alone."""

WRONG = 1e-2
"""Relative error beyond which a peer does not compute the layer: rounding to bfloat16 is 1.7e-3."""

SUSTAINED_SHAPES = ((8192, 8192), (28672, 4096))
HOST_SHAPE = (4096, 4096)
LIBRARIES = ("triton", "nvidia-cublas", "vllm", "deep_gemm", "flashinfer-python")

Key = tuple[str, str]
"""(quant_algo, name) of a peer."""


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that hold for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Contestant:
    """A peer with its weights of one layer, bound to some tokens when its turn comes."""

    peer: Peer
    layer: layers.Layer
    weights: Sequence[Any]
    bound: Bound | None = None
    error: float | None = None

    @property
    def key(self) -> Key:
        return (self.peer.quant_algo, self.peer.name)


@dataclass
class Run:
    """A measurement on its way.

    Attributes:
        torch: The module.
        peers: Those to ask.
        ceilings: By what is multiplied.
        power: The card's.
        seed: Of the data.
        place: torch's name of the device.
        rows: One for each peer and cell.
        host: Two for each peer: what a call costs the host, into a given result and a new one.
        skipped: Who was left out of which cell, and why.
    """

    torch: Any
    peers: Sequence[Peer]
    ceilings: Mapping[str, Ceilings]
    power: device.Power
    seed: int
    place: str = "cuda"
    rows: list[dict[str, Any]] = field(default_factory=list)
    host: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def measure_shape(self, shape: tuple[int, int], tokens: Sequence[int], *, sustained: bool) -> None:
        """All peers on one shape, for each number of tokens."""
        problem = layers.Problem.random(self.torch, shape, max(tokens), self.place, self.seed)
        contestants = list(self._enter(problem, shape))
        for count in tokens:
            ready = [one for one in contestants if self._bind(problem, one, count)]
            times = self._time(ready, count)
            for one in ready:
                self._add(one, count, "alone" if count >= ALONE_FROM else "interleaved", times[one.key])
            if count == 1 and shape == HOST_SHAPE:
                self._measure_host(ready)
            if sustained and shape in SUSTAINED_SHAPES and count == max(tokens) >= ALONE_FROM:
                self._measure_sustained(ready, count, times)
            self.report(shape, count)

    def _enter(self, problem: layers.Problem, shape: tuple[int, int]) -> Iterator[Contestant]:
        for peer in self.peers:
            layer = problem.layer(peer.quant_algo)
            try:
                with variables(peer.environment):
                    yield Contestant(peer, layer, peer.weights(layer))
            except (RuntimeError, ValueError) as error:
                self._skip(peer, shape, None, str(error))

    def _bind(self, problem: layers.Problem, one: Contestant, tokens: int) -> bool:
        """Ready and right, or left out."""
        torch = self.torch
        try:
            with variables(one.peer.environment):
                one.bound = one.peer.bind(one.layer, one.weights, problem.x[:tokens])
                one.bound.result.fill_(float("nan"))
                one.bound.call(one.weights[-1])
                torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            self._skip(one.peer, one.layer.shape, tokens, str(error))
            return False
        rows = layers.checked_rows(torch, tokens, self.place)
        expected = problem.expected(one.peer.quant_algo, rows)
        one.error = layers.relative_error(torch, one.bound.result[rows], expected)
        written = bool(torch.isfinite(one.bound.result).all())
        if written and one.error <= WRONG:
            return True
        reason = f"wrong: relative error {one.error:.1e}" + ("" if written else ", outputs not written")
        self._skip(one.peer, one.layer.shape, tokens, reason)
        return False

    def _time(self, ready: Sequence[Contestant], tokens: int) -> dict[Key, device.Times]:
        if tokens < ALONE_FROM:
            return device.interleaved(self.torch, {one.key: self._graph(one) for one in ready})
        return {one.key: device.alone(self.torch, self._graph(one)) for one in ready}

    def _graph(self, one: Contestant) -> device.Graph:
        assert one.bound
        with variables(one.peer.environment):
            return device.Graph(self.torch, one.bound.call, one.weights)

    def _measure_sustained(
        self, ready: Sequence[Contestant], tokens: int, times: Mapping[Key, device.Times]
    ) -> None:
        """moqext and the fastest other of each algorithm."""
        for algo in dict.fromkeys(one.peer.quant_algo for one in ready):
            own_algo = [one for one in ready if one.peer.quant_algo == algo]
            chosen = [one for one in own_algo if one.peer.name == own.NAME]
            others = [one for one in own_algo if not one.peer.name.startswith(own.NAME)]
            chosen += sorted(others, key=lambda one: times[one.key].seconds)[:1]
            for one in chosen:
                spent = device.sustained(self.torch, self._graph(one), self.power)
                self._add(one, tokens, "sustained", spent)

    def _measure_host(self, ready: Sequence[Contestant]) -> None:
        for one in ready:
            assert one.bound
            calls = {"given": one.bound.call, "new": one.bound.fresh}
            for result, call in calls.items():
                if call is None:
                    continue
                with variables(one.peer.environment):
                    spent = device.host_seconds(self.torch, call, one.weights)
                about = {"peer": one.peer.name, "quant_algo": one.peer.quant_algo, "result": result}
                self.host.append(about | {"seconds": spent.seconds, "best_seconds": spent.best_seconds})

    def _add(self, one: Contestant, tokens: int, protocol: str, times: device.Times) -> None:
        assert one.bound
        bytes_, flop = one.layer.bytes(tokens), one.layer.flop(tokens)
        row = {
            "shape": list(one.layer.shape),
            "tokens": tokens,
            "quant_algo": one.peer.quant_algo,
            "peer": one.peer.name,
            "kernel": one.bound.kernel,
            "protocol": protocol,
            **{name: value for name, value in asdict(times).items() if value is not None},
            "error": one.error,
            "bytes": bytes_,
            "flop": flop,
            "floor_seconds": self.ceilings[multiplied(one.peer.quant_algo)].floor(bytes_, flop),
        }
        self.rows.append(row)

    def _skip(self, peer: Peer, shape: tuple[int, int], tokens: int | None, reason: str) -> None:
        about = {"shape": list(shape), "tokens": tokens, "quant_algo": peer.quant_algo, "peer": peer.name}
        self.skipped.append(about | {"reason": reason.splitlines()[0] if reason else "no reason given"})

    def report(self, shape: tuple[int, int], tokens: int) -> None:
        """Prints a cell: a line for each algorithm, moqext first, then the others by speed."""
        cell = [row for row in self.rows if tuple(row["shape"]) == shape and row["tokens"] == tokens]
        for algo in dict.fromkeys(row["quant_algo"] for row in cell):
            own_algo = [row for row in cell if row["quant_algo"] == algo and row["protocol"] != "sustained"]
            own_algo.sort(key=lambda row: (row["peer"] != own.NAME, row["seconds"]))
            print(f"{shape[0]}x{shape[1]} M={tokens} {algo}: " + "; ".join(map(_text, own_algo)), flush=True)


def _text(row: Mapping[str, Any]) -> str:
    part = row["floor_seconds"] / row["seconds"]
    return f"{row['peer']} {row['seconds'] * 1e6:.2f} us ({part:.0%}, error {row['error']:.1e})"


def multiplied(quant_algo: str) -> str:
    """Which rate of the matrix units holds."""
    return "bfloat16" if quant_algo in (PEER, layers.NVFP4, layers.W4A16) else "fp8"


def part_of(shapes: Sequence[tuple[int, int]], part: tuple[int, int]) -> list[tuple[int, int]]:
    """The shapes of part i of n; small and large ones are dealt evenly.

    Args:
        shapes: All of them.
        part: (i, n), i from 1 to n.
    """
    index, count = part
    order = sorted(shapes, key=lambda shape: (-shape[0] * shape[1], shape))
    return order[index - 1 :: count]


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record of several runs on the same kind of machine: the best ceilings, floors made anew.

    Raises:
        ValueError: They differ in the chip, the driver or a version.
    """
    first = dict(parts[0])
    for part in parts[1:]:
        for name, value in part["environment"].items():
            if name != "date" and first["environment"].get(name) != value:
                raise ValueError(f"merge: {name} is {first['environment'].get(name)!r} here, {value!r} there")
    best = {
        kind: {
            name: max(part["ceilings"][kind][name] for part in parts)
            for name in ("bytes_per_second", "flop_per_second")
        }
        for kind in first["ceilings"]
    }
    first["ceilings"] = best
    for name in ("rows", "host", "skipped"):
        first[name] = [dict(row) for part in parts for row in part[name]]
    for row in first["rows"]:
        ceilings = Ceilings(**best[multiplied(row["quant_algo"])])
        row["floor_seconds"] = ceilings.floor(row["bytes"], row["flop"])
    return first


def facts(torch: Any, power: device.Power) -> dict[str, Any]:
    """The machine and the software, the GPU's included."""
    properties = torch.cuda.get_device_properties(0)
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return environment() | {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": power.driver(),
        "cuda": torch.version.cuda,
        **found,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="six shapes instead of sixteen")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="i/n", help="a part of the shapes")
    known = (*layers.ALGOS, *layers.NVFP4_ALGOS)
    parser.add_argument("--nvfp4", action="store_true", help="NVFP4 weights instead of FP8 ones")
    parser.add_argument("--algo", nargs="+", choices=known, help="default: all of the weights' format")
    parser.add_argument(
        "--shapes", nargs="+", type=layers.shape_of, metavar="NxK", help="instead of the usual ones"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=layers.TOKENS, metavar="M", help="rows of x")
    parser.add_argument("--peers", nargs="+", default=(), metavar="PART", help="parts of names; default: all")
    parser.add_argument("--kernels", nargs="+", default=(), metavar="NAME", help="kernels of moqext to force")
    parser.add_argument("--compiled", action="store_true", help="also peers that torch.compile quantizes for")
    parser.add_argument("--no-sustained", action="store_true", help="leave the long runs out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no shape after so many")
    parser.add_argument("--seed", type=int, help="of the data; a fresh one is drawn and printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="join results of parts")
    options = parser.parse_args(arguments)
    if options.merge and not options.json:
        parser.error("--merge needs --json")
    options.algo = options.algo or (layers.NVFP4_ALGOS[:2] if options.nvfp4 else layers.ALGOS)
    options.shapes = options.shapes or (layers.QUICK_SHAPES if options.quick else layers.SHAPES)
    return options


def _part(text: str) -> tuple[int, int]:
    try:
        index, count = map(int, text.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 1 <= index <= count:
        raise argparse.ArgumentTypeError(f"expected i/n with 1 <= i <= n, got {text!r}")
    return index, count


def choose_peers(options: argparse.Namespace) -> list[Peer]:
    """Everyone who was asked for and can run here; the others are printed with their reasons."""
    peers = all_peers()
    for kernel in options.kernels:
        peers += own.forced(kernel)
    if options.compiled:
        peers += torch_linear.COMPILED
    chosen = []
    for peer in select(peers, options.peers):
        beside = layers.NVFP4_FP8 in options.algo and (peer.name, peer.quant_algo) == (
            own.NAME,
            FP8_REFERENCE,
        )
        if peer.quant_algo not in (*options.algo, PEER) and not beside:
            continue
        with variables(peer.environment):
            reason = peer.missing()
        if reason:
            print(f"left out: {peer.name} ({peer.quant_algo}): {reason}")
        else:
            chosen.append(peer)
    return chosen


def main() -> None:
    """Measures, prints a line for each cell and algorithm and, if asked, writes JSON."""
    options = parse()
    if options.merge:
        record.save(merge([record.read(path) for path in options.merge]), options.json)
        return
    until = time.monotonic() + options.seconds
    os.environ.update(torch_linear.WORKSPACE)
    torch = import_module("torch")
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    peers = choose_peers(options)
    run = Run(torch, peers, device.measure_ceilings(torch), device.Power(), seed)
    for kind, ceilings in run.ceilings.items():
        bandwidth, rate = ceilings.bytes_per_second / 1e12, ceilings.flop_per_second / 1e12
        print(f"{kind}: {bandwidth:.3f} TB/s, {rate:.0f} Tflop/s")
    try:
        for shape in part_of(options.shapes, options.part):
            if time.monotonic() < until:
                run.measure_shape(shape, sorted(options.tokens), sustained=not options.no_sustained)
            else:
                print(f"{shape[0]}x{shape[1]}: no time was left", flush=True)
    finally:  # where a shape fails, those before it are kept
        finish(run, options.json)


def finish(run: Run, path: Path | None) -> None:
    """Says what beside cells a run came to and, if asked, writes it."""
    for row in run.host:
        print(f"host: {row['quant_algo']} {row['peer']}, {row['result']}: {row['seconds'] * 1e6:.2f} us")
    for row in run.skipped:
        print(f"left out: {row}")
    if path:
        record.write(
            "linear_cuda",
            run.rows,
            path,
            environment=facts(run.torch, run.power),
            seed=run.seed,
            ceilings={kind: asdict(ceilings) for kind, ceilings in run.ceilings.items()},
            host=run.host,
            skipped=run.skipped,
        )


if __name__ == "__main__":
    main()

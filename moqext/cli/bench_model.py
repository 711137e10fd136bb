"""`python -m moqext bench DIR`: how long a pass through a checkpoint's linears and experts takes here."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from moqext import _C
from moqext.checkpoint import Checkpoint
from moqext.cli import open_checkpoint, plain, text
from moqext.cli.progress import Progress
from moqext.cli.timed_layers import model_layers
from moqext.environment import environment
from moqext.errors import CheckpointError
from moqext.reader.naming import name_pattern
from moqext.tools import bench, bench_layers
from moqext.tools.bench_layers import CpuTimer, DeviceTimer, LayerRow, Pass, passes, time_layers
from moqext.tools.busy import calibrate

SCHEMA = 1
"""Version of the JSON output; raised when a key changes its meaning."""

SECONDS = 1.0
"""To spend on a layer and number of tokens on the CPU, unless told otherwise."""

SHOWN = 4
"""Weights that are not counted, and reasons, of which so many are told."""

_HEAD = ("layers", "", "algorithm", "shape", "kernel", "time", "a pass", "torch")


def run(args: argparse.Namespace, device: str, named: str, seed: int) -> int:
    """Times the layers of a checkpoint and returns the exit status."""
    with open_checkpoint(args, headers_only=True) as checkpoint:
        layers, refused = model_layers(checkpoint, device=device, compute=args.compute)
        if not layers:
            why = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:1])
            raise CheckpointError(why or "nothing in it is quantized", file=checkpoint.directory)
        plain_weights = _plain_weights(checkpoint)
        sizes = "" if checkpoint.files.has_weights else ", sizes of config.json"
    torch, rng = bench.find_torch(), np.random.default_rng(seed)
    threads = args.threads or _C.num_threads()
    timer: CpuTimer | DeviceTimer
    if device == "cpu":
        calibration = calibrate(threads)
        seconds, rotate = args.seconds or SECONDS, args.rotate or bench.rotation()
        timer = CpuTimer(torch, rng, threads, seconds, rotate)
    else:
        calibration, timer = None, DeviceTimer(torch, rng, device)
    progress = Progress(quiet=False, what="shapes", rate=False)
    try:
        rows = time_layers(layers, args.tokens, timer, progress)
    finally:
        progress.end()
    if calibration is None:
        warning = bench_layers.doubt(max(row.spread for row in rows), "a layer")
    else:
        warning = calibration.doubt
    sums = passes(rows)
    if args.json:
        told = {
            "schema": SCHEMA,
            "directory": args.directory,
            "environment": environment(),
            "device": device + named,
            "compute": args.compute,
            "seed": seed,
            "calibration": calibration and calibration.as_dict(),
            "warnings": [warning] if warning else [],
            "passes": [each.as_dict() for each in sums],
            "layers": [row.as_dict() for row in rows],
            "unquantized": plain_weights,
            "refused": refused,
        }
        print(json.dumps(told, allow_nan=False))
    else:
        where = f"{device}{named}" if device != "cpu" else f"the CPU, {text.plural(threads, 'thread')}"
        print(text.printable(f"{args.directory} on {where}, bfloat16, random weights{sizes}; seed {seed}"))
        for each in sums:
            text.show(_lines([row for row in rows if row.tokens == each.tokens], each, text.width()))
        text.show(_not_counted(plain_weights, refused, text.width()))
    if warning:
        print(f"moqext: warning: {warning}", file=sys.stderr)
    return 0


def _plain_weights(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Matrices in 16 and 32 bits but the embedding's: what a pass multiplies by besides."""
    found = [
        info
        for info in plain.plain_tensors(checkpoint, checkpoint.findings(values=False))
        if len(info.shape) == 2 and info.name.endswith(".weight") and "embed" not in info.name
    ]
    return plain.as_data(found)


def _lines(rows: Sequence[LayerRow], whole: Pass, columns: int | None) -> list[str]:
    """The table of one number of tokens, and what follows from it."""
    cells: list[tuple[str, ...]] = [_HEAD]
    for row in rows:
        patterns = list(dict.fromkeys(name_pattern(_short(name)) for name in row.names))
        more = f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""
        ratio = "" if row.torch_seconds is None else f"{row.torch_seconds / row.seconds:.2f}×"
        spent = len(row.names) * row.seconds
        cells.append(
            (
                patterns[0] + more,
                text.times(len(row.names)),
                row.quant_algo,
                " × ".join(map(str, row.shape)),
                row.kernel,
                text.duration(row.seconds),
                text.duration(spent),
                ratio,
            )
        )
    beside = any(row.torch_seconds is not None for row in rows)
    shown = cells if beside else [row[:-1] for row in cells]
    table = text.table(shown, "<><<<>>>"[: len(shown[0])], columns)
    line = (
        f"a pass of {text.plural(whole.tokens, 'token')}: {text.duration(whole.seconds)}, so at most "
        f"{_rate(whole.tokens_per_second)} tokens/s"
    )
    if whole.torch_seconds is not None and whole.torch_tokens_per_second is not None:
        line += (
            f"; torch in bfloat16 {text.duration(whole.torch_seconds)}, "
            f"{_rate(whole.torch_tokens_per_second)} tokens/s: {whole.torch_ratio:.2f}×"
        )
    head = ["", text.plural(whole.tokens, "token")]
    return [*head, *(each for lines in table for each in lines), *text.wrap(line, columns, indent=2)]


def _short(names: str) -> str:
    """Names of fused layers, of which all but the first leave out what they share with it."""
    first, *others = names.split(" + ")
    parent = first.rpartition(".")[0]
    return " + ".join([first, *(name.removeprefix(f"{parent}.") for name in others)])


def _not_counted(
    weights: Sequence[dict[str, Any]], refused: dict[str, str], columns: int | None
) -> list[str]:
    """Lines on the layers of a pass that are in no sum; none where all are."""
    lines: list[str] = []
    kinds: dict[str, list[dict[str, Any]]] = {}
    for weight in weights:
        kinds.setdefault(name_pattern(weight["name"]), []).append(weight)
    largest = sorted(kinds.items(), key=lambda kind: -sum(weight["bytes"] for weight in kind[1]))
    told = [
        f"{name} {text.times(len(alike))}".rstrip() + f", {text.size(sum(each['bytes'] for each in alike))}"
        for name, alike in largest[:SHOWN]
    ]
    if told:
        told += [f"{len(largest) - SHOWN} more"] if len(largest) > SHOWN else []
        lines += text.wrap(f"not counted, since not quantized: {'; '.join(told)}", columns)
    for name, reason in list(refused.items())[:SHOWN]:
        lines += text.wrap(f"not counted: {name}: {reason}", columns)
    if len(refused) > SHOWN:
        lines.append(f"not counted: {len(refused) - SHOWN:,} more")
    return ["", *lines] if lines else []


def _rate(value: float) -> str:
    """Tokens a second with three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

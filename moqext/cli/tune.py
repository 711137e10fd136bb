"""`python -m moqext tune`: which kernels are the fastest here for a checkpoint's layers, kept in a file."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from moqext.cli import add_checkpoint, open_checkpoint, text
from moqext.cli.bench import tokens
from moqext.cli.device import add_compute, add_device, choose_device
from moqext.cli.timed_layers import Row, find_layers, time_layer
from moqext.errors import CheckpointError
from moqext.layers import tuning
from moqext.layers.linear import LinearMethod
from moqext.layers.moe import MoEMethod
from moqext.reader.files.whole import output_path
from moqext.tools.bench_layers import ModelLayer

SCHEMA = 1
"""Version of the JSON output; raised when a key changes its meaning."""

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Sizes of batches for which engines record graphs, and prompts."""

MOST_ON_CPU = 512
"""Largest of them that is timed on the CPU by default: kernels for older processors take seconds of more."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "tune",
        help="time the kernels for a checkpoint's layers on this machine, and keep the fastest",
        description="Times every kernel that can run the layers of a checkpoint, each shape once, alone and "
        "fused as engines have them, on random data, and writes the fastest to a cache that everything built "
        "on moqext reads. Results stay within their contract; their last bits may change. Exit status: 0, "
        "2 for wrong arguments, no checkpoint that can be read, nothing in it that runs, or no cache that "
        "can be written.",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--tokens",
        type=tokens,
        metavar="M,...",
        help=f"rows of activations ({','.join(map(str, TOKENS))}; on the CPU up to {MOST_ON_CPU})",
    )
    add_device(parser, "auto")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="of the activations",
    )
    add_compute(parser)
    parser.add_argument(
        "--output",
        type=output_path,
        metavar="FILE",
        help="the cache to write to, instead of the one that MOQEXT_TUNE names or the user's own",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    try:
        chosen, about = choose_device(args.device)
    except RuntimeError as error:
        print(f"moqext: error: {text.printable(str(error))}", file=sys.stderr)
        return 2
    counts = args.tokens or [count for count in TOKENS if chosen != "cpu" or count <= MOST_ON_CPU]
    if len(set(counts)) > tuning.MAX_BUCKETS:
        print(f"moqext: error: --tokens: at most {tuning.MAX_BUCKETS} numbers", file=sys.stderr)
        return 2
    path = args.output or tuning.cache_path()
    if path is None:
        raise CheckpointError("MOQEXT_TUNE=0 and no --output: there is no cache to write to")
    tuning.check(path)
    with open_checkpoint(args, headers_only=True) as checkpoint:
        layers, refused = find_layers(checkpoint, device=chosen, dtype=args.dtype, compute=args.compute)
        if not layers:
            why = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:1])
            raise CheckpointError(why or "nothing in it is quantized", file=checkpoint.directory)
    if not args.json:
        where = chosen + about if chosen != "cpu" else "the CPU"
        print(f"{text.plural(len(layers), 'shape')} on {where}, {args.dtype}", flush=True)
    told = _time_all(layers, counts, path, quiet=args.json)
    if args.json:
        about_run = {"schema": SCHEMA, "file": str(path), "device": chosen, "dtype": args.dtype}
        print(json.dumps(about_run | {"compute": args.compute, "layers": told, "refused": refused}))
    else:
        for name, reason in list(refused.items())[:8]:
            print(text.printable(f"not timed: {name}: {reason}"))
        print(f"written to {text.printable(str(path))}")
    return 0


def _time_all(
    layers: Sequence[ModelLayer], counts: Sequence[int], path: Any, *, quiet: bool
) -> list[dict[str, Any]]:
    """Times layer by layer and writes each when it is done, so that Ctrl-C loses one of them."""
    rng = np.random.default_rng(0)
    told: list[dict[str, Any]] = []
    for number, layer in enumerate(layers):
        try:
            rows, cells = time_layer(layer.method, counts, rng)
        except KeyboardInterrupt:
            done = f"after {number} of {text.plural(len(layers), 'shape')}, which are in {path}"
            raise KeyboardInterrupt(done) from None
        tuning.save(path, layer.method.device, {tuning.layer_key(layer.method): cells})
        about = {"layer": tuning.layer_key(layer.method), "names": layer.names}
        told.append(about | {"rows": [row._asdict() for row in rows]})
        if not quiet:
            _show(layer, rows)
    return told


def _show(layer: ModelLayer, rows: Sequence[Row]) -> None:
    """Prints the table of a layer."""
    names = layer.names
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    print("\n" + text.printable(f"{_describe(layer.method)}: {names[0]}{more}"))
    kernels = max(len("kernel"), *(len(_kernel(row)) for row in rows))
    print(f"  {'tokens':>7}  {'kernel':{kernels}}  {'time':>8}  {'gain':>6}  chosen without")
    for row in rows:
        gain = "" if row.estimated_seconds is None else f"{row.estimated_seconds / row.seconds:.2f}×"
        other = "" if row.estimated == row.kernel else row.estimated
        time = text.duration(row.seconds)
        print(f"  {row.tokens:>7}  {_kernel(row):{kernels}}  {time:>8}  {gain:>6}  {other}".rstrip())
    sys.stdout.flush()


def _kernel(row: Row) -> str:
    return f"{row.kernel}, {row.variant}" if row.variant else row.kernel


def _describe(method: LinearMethod | MoEMethod) -> str:
    """A layer in a few words."""
    if isinstance(method, MoEMethod):
        sizes = f"{method.num_experts} × {method.hidden_size} × {method.intermediate_size}"
        return f"{method.quant_algo}, experts {sizes}, {method.top_k} a token"
    rows = "+".join(map(str, method.out_partitions))
    more = ", one input scale" if method.one_input_scale else ""
    return f"{method.quant_algo}, {rows} × {method.in_features}{more}" + (
        ", x of codes" if method.quantized_input else ""
    )

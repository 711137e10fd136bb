"""`python -m moqext quantize`: a ModelOpt checkpoint made of an unquantized one."""

import argparse
import sys
from functools import partial
from typing import get_args

from moqext.checkpoint import Checkpoint
from moqext.cli import add_checkpoint, text
from moqext.cli.device import add_device, choose_device
from moqext.cli.writing import add_output_options, write_checkpoint
from moqext.ops.quantize_weights import WRITTEN, ScaleSearch
from moqext.tools.quantize import Quantization, check_options
from moqext.tools.quantize.scales import CACHES


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a ModelOpt checkpoint of an unquantized model",
        description="Quantizes the linears of a model, experts among them, with the bits of ModelOpt's max "
        "calibration, on the CPU or a CUDA device. Killed and run again, it goes on where it was. Exit "
        "status: 0, 2 for wrong arguments, a checkpoint that cannot be quantized so, or a target that "
        "cannot be written.",
    )
    add_checkpoint(parser, what="a model in 16 or 32 bits, a directory of safetensors")
    parser.add_argument("out", help="directory to write to")
    parser.add_argument("--to", metavar="ALGORITHM", help=f"{', '.join(WRITTEN)}")
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar='"GLOB ALGORITHM"',
        help="algorithm of linears whose names fit, the last rule that fits; none leaves them as they are",
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="linears that stay as they are"
    )
    parser.add_argument(
        "--scales",
        metavar="FILE",
        help="scales of activations, as moqext_transformers.calibrate writes them; none: write none",
    )
    parser.add_argument(
        "--scale-search",
        choices=get_args(ScaleSearch),
        help="scales of the least squared error instead of those of the largest magnitude",
    )
    parser.add_argument(
        "--kv-cache",
        choices=CACHES,
        help="quantize the cache of keys and values, by the scales of --scales or without any",
    )
    add_device(parser, "cpu")
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    try:
        check_options(args.to, args.rule, args.scale_search)
        chosen, _ = choose_device(args.device)
    except (ValueError, RuntimeError) as error:
        print(f"moqext: error: {text.printable(str(error))}", file=sys.stderr)
        return 2
    write = partial(
        Checkpoint.quantize,
        to=args.to,
        rules=args.rule,
        exclude=args.exclude,
        scales=args.scales,
        scale_search=args.scale_search,
        kv_cache=args.kv_cache,
        device=chosen,
    )
    return write_checkpoint(args, write, report, options={}, facts={})


def report(result: Quantization) -> list[str]:
    """Sentences that say what was written."""
    speed = text.size(int((result.bytes_read - result.bytes_kept) / max(result.seconds, 1e-9)))
    algos = [f"{text.plural(count, 'weight')} {algo}" for algo, count in result.quantized.items()]
    counts = [
        text.plural(len(result.files), "file"),
        text.plural(result.tensors, "tensor"),
        text.size(result.bytes_written),
    ]
    kept = f", {text.size(result.bytes_kept)} of it by an earlier run" if result.bytes_kept else ""
    return [
        f"{result.directory}: {', '.join([*counts, *algos])}",
        f"{text.size(result.bytes_read)} read and {text.size(result.bytes_written)} written{kept} in "
        f"{text.duration(result.seconds)}, {speed}/s read",
        *result.notes,
    ]

"""`python -m moqext generate`: text from a checkpoint, by the package for Transformers."""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from moqext.cli import text
from moqext.cli.device import add_compute, add_device, choose_device
from moqext.cli.values import add_seed, whole

SCHEMA = 1
"""Version of the JSON output; raised when a key changes its meaning."""

PROVIDER = "moqext_transformers.generating"
"""Module of a framework package whose `generate` runs the model; imported when the command runs."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "generate",
        help="print text from a checkpoint, with Transformers",
        description="Continues a text, and prints it as it comes. Needs PyTorch and Transformers. At the end "
        "the speed is told on stderr. Exit status: 0, 2 for wrong arguments, a package that is missing, or a "
        "checkpoint that cannot be run.",
    )
    parser.add_argument(
        "directory",
        help="a checkpoint with its tokenizer, quantized or not, or org/name[@revision] on the Hub",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what is continued")
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt as a question, in the model's own template"
    )
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=128, metavar="N", help="tokens at most (128)"
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="draw tokens at this temperature; 0, the default: the most likely one each time",
    )
    add_seed(parser, "draws")
    add_device(parser, "auto")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of the activations; by default that of the checkpoint",
    )
    add_compute(parser)
    parser.add_argument(
        "--json", action="store_true", help="one object at the end, instead of text that streams"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    try:
        generate = _provider()
        device, about = choose_device(args.device)
        found = generate(
            args.directory,
            args.prompt,
            chat=args.chat,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            seed=args.seed,
            device=device,
            dtype=args.dtype,
            compute=args.compute,
            write=None if args.json else _write,
        )
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"moqext: error: {text.printable(str(error))}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"schema": SCHEMA, "directory": args.directory, **found}, allow_nan=False))
        return 0
    print()
    print(_told(found, "" if device == "cpu" else about), file=sys.stderr)
    return 0


def _provider() -> Callable[..., dict[str, Any]]:
    """The function that generates.

    Raises:
        ImportError: its package, or what that needs, is not installed.
    """
    try:
        generate: Callable[..., dict[str, Any]] = importlib.import_module(PROVIDER).generate
    except ModuleNotFoundError as error:
        package = PROVIDER.partition(".")[0]
        if error.name != package:
            raise
        raise ImportError(
            f"generate needs {package}, which is installed with moqext; in a checkout: "
            "pip install '.[transformers]', or PYTHONPATH=python"
        ) from None
    return generate


def _write(part: str) -> None:
    """Prints a part of the text; a terminal gets no control characters but line ends and tabs."""
    shown = "".join(char if char in "\n\t" else text.printable(char) for char in part)
    print(shown, end="", flush=True)


def _told(found: dict[str, Any], about: str) -> str:
    """One line on how fast it was."""
    rate, seed = found["tokens_per_second"], found["seed"]
    facts = [
        text.plural(found["tokens"], "token") + (f", {rate:.3g} tokens/s" if rate else ""),
        f"the first after {text.duration(found['first_seconds'])} "
        f"(prompt: {text.plural(found['prompt_tokens'], 'token')})",
        f"{found['quant_algo'] or 'not quantized'} in {found['dtype']} on {found['device']}{about}",
        f"loaded in {text.duration(found['load_seconds'])}",
        *([] if seed is None else [f"seed {seed}"]),
    ]
    return "; ".join(facts)


def _positive(given: str) -> int:
    return whole(given, 1, 1_000_000, "a number")


def _temperature(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, got {given!r}")
    return value

"""Numbers that options have, and `--seed`."""

import argparse
import math
import os


def whole(text: str, low: int, high: int, what: str) -> int:
    """The argument, where it is a whole number of a range; `what` is for the message."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"expected {what} from {low} to {high}, got {text!r}")
    return value


def seconds(text: str) -> float:
    """The argument, where it is a time of a day at most."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0 and at most 86400, got {text!r}")
    return value


def add_seed(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the option; `what` is drawn by it."""
    parser.add_argument("--seed", type=_seed, help=f"of the {what}; a fresh one is drawn and printed")


def choose_seed(args: argparse.Namespace) -> int:
    """The seed, a fresh one where the option is not given."""
    return args.seed if args.seed is not None else int.from_bytes(os.urandom(4), "little")


def _seed(text: str) -> int:
    return whole(text, 0, 2**64 - 1, "a seed")

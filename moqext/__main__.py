"""`python -m moqext`: one subcommand per module of `moqext.cli`."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

import moqext
from moqext import interrupts
from moqext.cli import (
    bench,
    compare,
    convert,
    generate,
    info,
    inspect,
    quantize,
    repair,
    selftest,
    text,
    tune,
    verify,
)
from moqext.cli.signals import Terminated, raise_terminated

DESCRIPTION = (
    """Inspect, check, run and convert ModelOpt checkpoints. Quantize models, repair exports, time kernels."""
)
COMMANDS = (inspect, verify, generate, compare, convert, quantize, repair, bench, tune, selftest, info)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status: 2 for bad arguments or an unreadable checkpoint."""
    ended = False
    try:
        ended = interrupts.raise_on_interrupt()
        return _run(arguments)
    except KeyboardInterrupt as interrupt:
        print(f"moqext: interrupted {interrupt}".rstrip(), file=sys.stderr)
        return interrupts.STATUS
    finally:
        if ended:
            interrupts.end_on_interrupt()  # while Python ends


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="moqext", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"moqext {moqext.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(arguments)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a terminal without UTF-8 gets question marks, not a traceback
    try:
        with raise_terminated():
            status: int = args.run(args)
            sys.stdout.flush()
    except (moqext.CheckpointError, moqext.ConfigError, moqext.UnsupportedQuantization) as error:
        print(f"moqext: error: {text.printable(str(error))}", file=sys.stderr)
        return 2
    except Terminated as error:
        print(f"moqext: {str(error).lower()}", file=sys.stderr)
        return 128 + error.number
    except BrokenPipeError:
        # The reader has seen enough (`| head`).
        _drop_output()
        return 141
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"moqext: error: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"moqext: error: out of memory: {error}", file=sys.stderr)
        return 2
    return status


def _drop_output() -> None:
    """Sends what is left to nowhere; else Python would complain again when it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

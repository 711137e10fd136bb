"""`python -m moqext repair`: a damaged checkpoint written again whole, and every change told."""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moqext.cli import add_checkpoint, find, open_checkpoint, text
from moqext.cli import problems as problem_list
from moqext.cli.layout import add_layout_options, layout_options
from moqext.cli.progress import Progress
from moqext.reader.problems import CODES, Problem
from moqext.tools.repair import Change, Repair, RepairPlan

SCHEMA = 1
"""Version of the JSON output; raised when a key changes its meaning."""

NOTHING = 1
"""Exit status where nothing is to be repaired."""

REFUSED = 2
"""Exit status where an error is left that the data cannot decide."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "repair",
        help="write a damaged checkpoint again, mended where the files tell how",
        description="Mends what the files themselves decide (scales in another order or under other names, "
        "lost index entries, wrong exclusion lists, leftovers of an export), tells every change, and writes "
        "the checkpoint to OUT; without OUT only tells. Codes of weights stay. Exit status: 0; 1 where there "
        "is nothing to repair; 2 for wrong arguments, a checkpoint that cannot be read, an error that cannot "
        "be repaired, or a target that cannot be written. But for 0, OUT is as it was.",
    )
    add_checkpoint(parser, whole=True)
    parser.add_argument("out", nargs="?", help="directory to write to")
    parser.add_argument(
        "--nan-blocks",
        choices=("keep", "zero"),
        default="keep",
        help="zero: blocks with a scale and codes of NaN were blocks of zeros; by default they are refused",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint that is in OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress and no report")
    add_layout_options(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    with open_checkpoint(args, **layout_options(args)) as checkpoint:
        if not args.quiet:
            find(checkpoint, block_scales=True)
        plan = checkpoint.plan_repair(nan_blocks=args.nan_blocks)
        result = None
        if args.out is not None and plan.changes and not plan.errors:
            progress = Progress(quiet=args.quiet)
            try:
                result = plan.write(args.out, overwrite=args.overwrite, progress=progress)
            finally:
                progress.end()
    if args.json:
        print(json.dumps({"schema": SCHEMA, "source": args.directory, **as_data(plan, result)}))
    elif not args.quiet:
        text.show(as_text(plan, result, args.directory, text.width()))
    if plan.errors:
        number = text.plural(len(plan.errors), "error")
        print(f"moqext: error: {number} cannot be repaired; nothing is written", file=sys.stderr)
        return REFUSED
    return 0 if plan.changes else NOTHING


def as_data(plan: RepairPlan, result: Repair | None) -> dict[str, Any]:
    """The plan and what was written, as plain data for JSON."""
    problems, reasons = zip(*plan.left, strict=True) if plan.left else ((), ())
    left = problem_list.as_data(problems)
    return {
        "changes": [asdict(change) for change in plan.changes],
        "left": [each | {"reason": reason} for each, reason in zip(left, reasons, strict=True)],
        "written": None if result is None else asdict(result),
    }


def as_text(plan: RepairPlan, result: Repair | None, source: str, columns: int | None) -> list[text.Line]:
    """Every change by code, what is left with the reasons, and what was written."""
    lines: list[text.Line] = []
    if not plan.changes and not plan.errors:
        lines.append(text.Line(f"{source}: nothing to repair"))
    if plan.changes:
        lines += _heading("Repaired" if result else "To repair", len(plan.changes), "change")
        lines += _changes(plan.changes, columns)
    if plan.left:
        lines += _heading("Left", len(plan.left), "problem")
        lines += _left(plan.left, columns)
    if result is not None:
        counts = [
            text.plural(len(result.files), "file"),
            text.plural(result.tensors, "tensor"),
            f"{text.size(result.bytes_written)} in {text.duration(result.seconds)}",
        ]
        written = [f"{result.directory}: {', '.join(counts)}", *result.notes]
        lines += [text.Line(line) for sentence in written for line in text.wrap(sentence, columns)]
    return lines


def _heading(what: str, count: int, noun: str) -> list[text.Line]:
    return [text.Line(f"{what}: {text.plural(count, noun)}")]


def _changes(changes: Sequence[Change], columns: int | None) -> list[text.Line]:
    by_code: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        by_code[change.code].append(change)
    lines = []
    for code, alike in by_code.items():
        lines.append(text.Line(f"  {code} {text.times(len(alike))}".rstrip(), CODES[code].severity))
        for change in alike:
            told = f"{change.subject}: {change.message}" if change.subject else change.message
            lines += [text.Line(line) for line in text.wrap(told, columns, indent=4)]
    return lines


def _left(left: Sequence[tuple[Problem, str]], columns: int | None) -> list[text.Line]:
    lines = []
    for problem, reason in left:
        lines.append(text.Line(f"  {problem.severity:9}{problem.code}", problem.severity))
        told = problem_list.sentence(problem) + (f"; {reason}" if reason else "")
        lines += [text.Line(line) for line in text.wrap(told, columns, indent=4)]
    return lines

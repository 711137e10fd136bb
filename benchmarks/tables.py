"""Prints tables of the results in benchmarks/results.

    python -m benchmarks.tables             names of subjects and of files;
    python -m benchmarks.tables SUBJECT     every cell beside the fastest other path, and tables of the rest;
    python -m benchmarks.tables FILE [--list NAME] [--where NAME=VALUE ...] [--lines NAME ...]
                                     [--columns NAME ...] [--values NAME ...].

A file's rows, or those of another of its lists (`checks`, `host`, `skipped`, ...), become a table: a line for
each value of `--lines`, a column for each of `--columns`, and `--values` in its cells. Without `--lines` each
row is a line, and all that it has are its columns.

    python -m benchmarks.tables llama.h100 --lines form weights --columns what tokens
"""

from __future__ import annotations

import argparse

from benchmarks import record
from benchmarks.grid import Grid
from benchmarks.subjects import SUBJECTS


def main() -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", nargs="?", help="a subject or a file")
    parser.add_argument("--list", default="rows", help="the list of a file; default: %(default)s")
    parser.add_argument(
        "--where", nargs="+", default=[], metavar="NAME=VALUE|VALUE", help="rows that are shown"
    )
    parser.add_argument("--lines", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--columns", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--values", nargs="+", default=["seconds"], metavar="NAME")
    options = parser.parse_args()
    files = {path.stem: path for path in sorted(record.RESULTS.glob("*.jsonl"))}
    if options.name in SUBJECTS:
        print(SUBJECTS[options.name].tables())
    elif options.name in files:
        where = dict(condition.split("=", 1) for condition in options.where)
        about = (options.name, options.lines, options.columns, options.values, where, options.list)
        print(Grid(*about).table(record.read(files[options.name])))
    elif options.name is None:
        print(f"subjects: {', '.join(SUBJECTS)}\nfiles: {', '.join(files)}")
    else:
        parser.error(f"expected a subject ({', '.join(SUBJECTS)}) or a file, got {options.name!r}")


if __name__ == "__main__":
    main()

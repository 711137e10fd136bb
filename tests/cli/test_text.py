"""Text: numbers with units, tables and messages that fit a terminal without cutting a name."""

import pytest

from moqext.cli import text
from moqext.reader.naming import number_ranges


def flat(rows):
    return [line for lines in rows for line in lines]


def test_sizes():
    assert [
        text.size(n) for n in (0, 1, 999, 1000, 1004, 9996, 12_345, 999_499, 999_500, 10**12, 10**16)
    ] == [
        "0 B",
        "1 B",
        "999 B",
        "1.00 kB",
        "1.00 kB",
        "10.0 kB",
        "12.3 kB",
        "999 kB",
        "1.00 MB",
        "1.00 TB",
        "10000 TB",
    ]


def test_ranges():
    assert number_ranges([]) == ""
    assert number_ranges([3]) == "3"
    assert number_ranges([5, 1, 2, 3, 9, 8]) == "1-3,5,8-9"


def test_only_nothing_is_0_percent_and_only_all_is_100():
    shares = [(0, 0), (0, 10), (10, 10), (1, 2), (1, 10**9), (10**9 - 1, 10**9), (1, 3)]
    assert [text.percent(*share) for share in shares] == [
        "0 %",
        "0 %",
        "100 %",
        "50.0 %",
        "0.1 %",
        "99.9 %",
        "33.3 %",
    ]


def test_durations():
    seconds = (3.51e-6, 0.0125, 0.99951, 12.0)
    assert [text.duration(value) for value in seconds] == ["3.51 µs", "12.5 ms", "1.00 s", "12.0 s"]


NAMES = ["short", "model.layers.0." + "deep." * 12 + "gate_proj", "model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize("columns", [20, 30, 40, 60, 80, 100, 200, None])
def test_a_table_never_cuts_a_name(columns):
    rows = [("layer", "algorithm", "size")] + [(name, "NVFP4", "1.00 kB") for name in NAMES]
    lines = flat(text.table(rows, "<<>", columns))
    whole = "".join(line.strip() for line in lines)
    for name in NAMES:
        assert name in whole
    assert whole.count("NVFP4") == whole.count("1.00 kB") == 3
    assert "…" not in whole
    if columns is None:
        assert len(lines) == 4
    else:
        assert max(map(len, lines)) <= max(columns, 22)


def test_one_long_name_takes_two_lines_and_leaves_the_others_alone():
    rows = [("a" * 10, "x"), ("b" * 60, "y"), ("c" * 10, "z")]
    assert flat(text.table(rows, "<<", 40)) == [
        "  " + "a" * 10 + " " * 27 + "x",
        "  " + "b" * 38,
        "    " + "b" * 22,
        " " * 39 + "y",
        "  " + "c" * 10 + " " * 27 + "z",
    ]


def test_where_few_names_fit_all_rows_have_two_lines():
    rows = [("layer", "algorithm", "shape")] + [("n" * 30 + str(i), "FP8", "64 × 64") for i in range(3)]
    lines = flat(text.table(rows, "<<>", 36))
    assert lines[:4] == ["  layer", "    algorithm    shape", "  " + "n" * 30 + "0", "    FP8        64 × 64"]
    assert len(lines) == 8


@pytest.mark.parametrize("columns", [20, 33, 80])
def test_messages_are_wrapped_and_lose_nothing(columns):
    message = "model.layers.0.mlp.gate_proj: expected one of " + ", ".join(f"NVFP4_{i}" for i in range(30))
    lines = text.wrap(message, columns, indent=4)
    assert max(map(len, lines)) <= max(columns, 22)
    assert len(lines) > 1
    assert all(line.startswith("    ") for line in lines)
    assert "".join("".join(lines).split()) == "".join(message.split())
    assert text.wrap(message, None, indent=4) == ["    " + message]
    assert text.wrap("", 80) == [""]


def test_names_cannot_command_the_terminal():
    rows = text.table([("a\x1b[2J", "b\n")], "<<", None)
    assert flat(rows) == ["  a\\x1b[2J  b\\n"]
    assert text.wrap("\x07" * 30, 40)[0].startswith("\\x07")

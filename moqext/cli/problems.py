"""Problems of a checkpoint as text and as data, as `inspect` and `verify` print them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from moqext.cli import text
from moqext.reader.advice import ADVICE
from moqext.reader.problems import CODES, SEVERITIES, Problem

EXAMPLES = 2
"""Problems of one code that are shown where not every one is asked for."""


def as_data(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """The problems as plain data for JSON."""
    return [
        {
            "code": problem.code,
            "severity": problem.severity,
            "layer": problem.layer,
            "tensor": problem.tensor,
            "message": problem.message,
            "repair": CODES[problem.code].repair,
            "advice": ADVICE[problem.code],
        }
        for problem in problems
    ]


def counts(problems: Sequence[Problem]) -> str:
    """How many of each severity, as "2 errors, 1 note"."""
    found = Counter(problem.severity for problem in problems)
    return ", ".join(text.plural(found[severity], severity) for severity in SEVERITIES if found[severity])


def as_text(problems: Sequence[Problem], columns: int | None, *, every: bool) -> list[text.Line]:
    """The problems by code, worst first, with what to do; of each code the first two, or every one."""
    by_code: dict[str, list[Problem]] = defaultdict(list)
    for severity in SEVERITIES:
        for problem in problems:
            if problem.severity == severity:
                by_code[problem.code].append(problem)
    lines = []
    for code, alike in by_code.items():
        severity = alike[0].severity
        lines.append(text.Line(f"  {severity:9}{code} {text.times(len(alike))}".rstrip(), severity))
        shown = alike if every else alike[:EXAMPLES]
        for problem in shown:
            lines += [text.Line(line) for line in text.wrap(sentence(problem), columns, indent=4)]
        if len(shown) < len(alike):
            lines.append(text.Line(f"    and {len(alike) - len(shown):,} more; --problems lists all"))
        if every or severity != "note":
            lines += [text.Line(line) for line in text.wrap(f"to do: {ADVICE[code]}", columns, indent=4)]
    return lines


def sentence(problem: Problem) -> str:
    """Place and text of the problem."""
    where = problem.layer or problem.tensor
    return f"{where}: {problem.message}" if where else problem.message


def repair_hint(problems: Sequence[Problem], columns: int | None) -> list[text.Line]:
    """Lines that name `moqext repair` and the codes that it ends; none where it ends none."""
    codes = dict.fromkeys(problem.code for problem in problems)
    always = [code for code in codes if CODES[code].repair == "yes"]
    perhaps = [code for code in codes if CODES[code].repair == "if"]
    told = [", ".join(always)] if always else []
    told += [f"where the files tell how: {', '.join(perhaps)}"] if perhaps else []
    if not told:
        return []
    return [
        text.Line(line) for line in text.wrap(f"`moqext repair` mends {'; '.join(told)}", columns, indent=2)
    ]

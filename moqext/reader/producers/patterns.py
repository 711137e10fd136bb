"""Regular expressions of other producers' configurations, matched in bounded time.

They come from files that anybody may have written. What makes matching exponential, a repetition of a group,
is refused, and so are more repetitions after each other than genuine patterns have.
"""

import re
import warnings
from collections.abc import Callable
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MAX_PATTERN = 1024
"""Characters of a pattern."""
MAX_NAME = 256
"""Characters of a name that a pattern is matched with; others match nothing."""
MAX_REPEATS = 4
"""Repetitions without end in one branch of a pattern: matching takes the length of a name to this power."""

_REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
_CHARACTERS = (kinds.ANY, kinds.LITERAL, kinds.NOT_LITERAL, kinds.IN)


def matcher(pattern: str) -> Callable[[str], bool] | None:
    """Tells whether a name begins with what the pattern matches; None for a pattern that is not followed."""
    if len(pattern) > MAX_PATTERN:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(pattern)
            compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError, MemoryError):
        return None
    repeats = _repeats(parsed)
    if repeats is None or repeats > MAX_REPEATS:
        return None
    return lambda name: len(name) <= MAX_NAME and compiled.match(name) is not None


def _repeats(parsed: Any) -> int | None:
    """The most repetitions after each other; None where a group is repeated or something rare is used."""
    total = 0
    for kind, value in parsed:
        if kind in _REPEATS:
            _, most, inner = value
            single = len(inner) == 1 and inner[0][0] in _CHARACTERS
            if not single and most > 1:
                return None
            found = int(most > MAX_REPEATS) if single else _repeats(inner)
        elif kind is kinds.BRANCH:
            counts = [_repeats(branch) for branch in value[1]]
            found = None if None in counts else max((count for count in counts if count), default=0)
        elif kind is kinds.SUBPATTERN:
            found = _repeats(value[3])
        elif kind in (kinds.ASSERT, kinds.ASSERT_NOT):
            found = _repeats(value[1])
        else:
            found = 0 if kind in (*_CHARACTERS, kinds.AT) else None
        if found is None:
            return None
        total += found
    return total

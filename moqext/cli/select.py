"""Layers chosen by `--layers`, and what was meant where nothing has such a name."""

from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import islice

from moqext.reader.naming import is_number, name_pattern
from moqext.reader.records import LayerRecord

_COMPARED = 5000
"""Kinds of names that a misspelt one is compared with: more than any model has, few enough for a second."""


def select(layers: Iterable[LayerRecord], glob: str | None) -> Iterator[LayerRecord]:
    """The layers that match; where a group of experts does not, its members that do."""
    for layer in layers:
        if glob is None or fnmatchcase(layer.name, glob):
            yield layer
        else:
            yield from (member for member in layer.members if fnmatchcase(member.name, glob))


def no_match(glob: str, names: Collection[str], plain: Collection[str] = ()) -> str:
    """A message that nothing quantized matches a glob, and why, or what else matches it.

    Args:
        glob: as given.
        names: of everything quantized.
        plain: of the tensors that match and are not quantized.
    """
    if plain:
        others = f" and {len(plain) - 1:,} more" if len(plain) > 1 else ""
        return f"no quantized layer matches {glob!r}; not quantized: {next(iter(plain))}{others}"
    near = _nearest(glob, names)
    if near is not None:
        return f"no quantized layer matches {glob!r}; did you mean {near!r}?"
    example = f"; {len(names):,} do not, as {next(iter(names))}" if names else ""
    return f"no quantized layer matches {glob!r}{example}"


def _nearest(glob: str, names: Collection[str]) -> str | None:
    """A name, or a glob for several, that is spelled much like this one."""
    patterns = list(islice(dict.fromkeys(map(name_pattern, names)), _COMPARED))
    for pattern in get_close_matches(name_pattern(glob), patterns, n=1, cutoff=0.8):
        numbers = iter(part for part in glob.split(".") if is_number(part))
        filled = ".".join(next(numbers, "*") if part == "*" else part for part in pattern.split("."))
        return filled if filled in names else pattern
    lasts = list(dict.fromkeys(pattern.rpartition(".")[2] for pattern in patterns))
    last = get_close_matches(glob.rpartition(".")[2].lstrip("*"), lasts, n=1)
    return f"*.{last[0]}" if last else None

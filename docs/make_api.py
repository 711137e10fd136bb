"""Writes the lists of names in docs/api.md from signatures and docstrings: python docs/make_api.py.

A list stands between `<!-- names: MODULE NAME ... -->` and `<!-- /names -->`.
"""

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "api.md"
LIST = re.compile(r"(<!-- names: ([\w.]+) ([^>]*?) -->\n).*?(<!-- /names -->)", re.DOTALL)
CODE = textwrap.TextWrapper(110, initial_indent=" " * 4, subsequent_indent=" " * 8, break_long_words=False)


def summary(thing: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    text = inspect.getdoc(thing) or ""
    return " ".join(text.split("\n\n")[0].split())


def signature(name: str, thing: Any) -> str:
    """A call as one writes it: names and defaults, without annotations."""
    found = inspect.signature(thing)
    kept = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "self"]
    return f"{name}{inspect.Signature(kept)}"


def members(kind: type) -> list[str]:
    """One line for each public method of a class, and one for what it merely holds."""
    lines, held = [], []
    for name in sorted(n for n in dir(kind) if n == "__call__" or not n.startswith("_")):
        found = inspect.getattr_static(kind, name)
        if name == "__call__" and inspect.isfunction(found):
            lines.insert(0, f"* `{signature(name, found)}`: {summary(found)}")
        elif inspect.isfunction(found) or isinstance(found, (classmethod, staticmethod)):
            lines.append(f"* `{signature(name, getattr(kind, name))}`: {summary(found)}")
        elif name != "__call__":
            held.append(f"`{name}`")
    return [*lines, *([f"* Attributes: {', '.join(held)}"] if held and not is_record(kind) else [])]


def is_record(kind: type) -> bool:
    """Whether the signature of a class names its attributes."""
    return hasattr(kind, "__dataclass_fields__") or issubclass(kind, (tuple, Exception))


def entry(name: str, thing: Any) -> str:
    """A name with its signature, what it is, and its methods."""
    call, text, methods = name, summary(thing), []
    if inspect.isbuiltin(thing):  # its docstring begins with its signature
        call, _, text = text.partition(": ")
    elif not (inspect.isclass(thing) and issubclass(thing, Exception)):
        call = signature(name, thing)
        methods = members(thing) if inspect.isclass(thing) else []
    lines = [*CODE.wrap(call), "", *textwrap.wrap(text, 150), *[""] * bool(methods)]
    for line in methods:
        lines += textwrap.wrap(line, 150, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines)


def made(page: str) -> str:
    """The page with its lists written anew."""

    def fill(found: re.Match[str]) -> str:
        module = importlib.import_module(found[2])
        entries = [entry(name, getattr(module, name)) for name in found[3].split()]
        return found[1] + "\n" + "\n\n".join(entries) + "\n\n" + found[4]

    return LIST.sub(fill, page)


def listed(page: str) -> dict[str, list[str]]:
    """The names of each module that the lists have."""
    names: dict[str, list[str]] = {}
    for _, module, text, _ in LIST.findall(page):
        names.setdefault(module, []).extend(text.split())
    return names


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

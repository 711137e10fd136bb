"""docs/api.md lists every operation, and every function of the reference, with the signature that it has."""

import inspect
import re
from pathlib import Path

import pytest

from moqext import LinearMethod, MoEMethod, ops, reference

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "api.md"


def documented(heading):
    """{name: parameters as text} of the lines of a section that are set as code and look like a signature."""
    section = PAGE.read_text().split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^    (\w+)\(([^)]*)\)", section, re.MULTILINE))


def actual(function):
    """The parameters as one would write them in a call, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    text = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
    return text.removeprefix("(").removesuffix(")")


@pytest.mark.parametrize("heading, module", [("Operations", ops), ("The reference", reference)])
def test_every_function_is_there_as_it_is(heading, module):
    functions = {name: getattr(module, name) for name in module.__all__}
    expected = {name: actual(f) for name, f in functions.items() if inspect.isfunction(f)}
    assert documented(heading) == expected


@pytest.mark.parametrize(
    "method", [LinearMethod("FP8", 32, [8]), MoEMethod("FP8", 2, 32, 16, top_k=1)], ids=["linear", "experts"]
)
def test_attributes_of_a_method_are_there(method):
    section = PAGE.read_text().split(f"\n## `{type(method).__name__}`", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"\bm\.(\w+)", section))
    assert named == {name for name in dir(method) if not name.startswith("_")}

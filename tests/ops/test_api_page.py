"""docs/api.md lists every operation with the signature that it has."""

import inspect
import re
from pathlib import Path

from moqext import ops

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "api.md"


def documented():
    """{name: parameters as text} of the lines of the page that are set as code and look like a signature."""
    section = PAGE.read_text().split("## Operations", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^    (\w+)\(([^)]*)\)", section, re.MULTILINE))


def actual(function):
    """The parameters as one would write them in a call, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    text = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
    return text.removeprefix("(").removesuffix(")")


def test_every_operation_is_there_as_it_is():
    assert documented() == {name: actual(getattr(ops, name)) for name in ops.__all__}

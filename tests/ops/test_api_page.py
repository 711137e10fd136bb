"""docs/api.md lists every public name, with the signature and the first sentence that it has."""

import inspect
import runpy
from pathlib import Path

import moqext
from moqext import ops, reference

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "api.md"
make_api = runpy.run_path(str(PAGE.parent / "make_api.py"))


def test_the_page_is_what_the_docstrings_make():
    """Else: python docs/make_api.py."""
    page = PAGE.read_text()
    assert make_api["made"](page) == page


def test_every_public_name_is_listed():
    listed = make_api["listed"](PAGE.read_text())
    assert sorted([*listed["moqext"], "ops", "route", "__version__"]) == sorted(moqext.__all__)
    assert sorted(listed["moqext.ops"]) == sorted(ops.__all__)
    assert sorted(listed["moqext.reference"]) == sorted(reference.__all__)


def test_signatures_and_methods_are_there():
    page = PAGE.read_text()
    assert (
        "    quantize(x, scheme, *, scale=None, group_size=None, out=None, scale_out=None, format=None,"
        in page
    )
    assert "* `__call__(x, params, bias=None, out=None, stream=None)`: " in page
    for kind in (moqext.LinearMethod, moqext.MoEMethod, moqext.Checkpoint):
        section = make_api["entry"](kind.__name__, kind)
        for name, member in inspect.getmembers(kind):
            if not name.startswith("_"):
                assert (f"* `{name}(" if callable(member) else f"`{name}`") in section, name


def test_the_page_begins_with_programs():
    assert "\n".join(PAGE.read_text().splitlines()[:100]).count("```python") == 3

"""The packages of moqext: each uses only those below it, and no module needs itself on its way."""

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import moqext

ROOT = Path(__file__).resolve().parent.parent
ORDER = (  # from the ground up; a module belongs to the longest name that it begins with
    ("moqext._C", "moqext.errors"),
    ("moqext.algorithms", "moqext.environment", "moqext.interrupts", "moqext.variables"),
    ("moqext.reference",),
    ("moqext.ops",),
    ("moqext.reader.naming", "moqext.reader.problems"),
    ("moqext.reader.records",),
    ("moqext.reader.files",),
    ("moqext.reader.config",),
    ("moqext.reader.formats",),
    ("moqext.reader.findings",),
    ("moqext.reader",),
    ("moqext.layers",),
    ("moqext.tools",),
    ("moqext.checkpoint",),
    ("moqext",),
    ("moqext.cli",),
    ("moqext.__main__",),
)
FLOORS = {name: floor for floor, names in enumerate(ORDER) for name in names}


def dotted(path):
    """The name of a module, of a package where the file is an `__init__.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def modules():
    """The tree of every module by its name."""
    return {dotted(path): ast.parse(path.read_text()) for path in sorted((ROOT / "moqext").rglob("*.py"))}


def parts_of(module):
    """The name of ORDER that a module belongs to."""
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return module


def imported(tree, known):
    """The modules of moqext that a tree imports, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "moqext")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "moqext":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known or name == "moqext._C" else node.module for name in names)


def upward(files):
    """Every import of a module on a higher floor, as (importer, imported)."""
    for module, tree in files.items():
        for other in imported(tree, files):
            if FLOORS[parts_of(other)] > FLOORS[parts_of(module)]:
                yield module, other


def circle(files):
    """A circle among the imports of modules; None where there is none."""
    graph = {module: set(imported(tree, files)) & files.keys() for module, tree in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def guards(tree):
    """The lines that tell type checkers from running code."""
    for node in ast.walk(tree):
        if "TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", "")):
            yield node.lineno


def late_imports(tree):
    """The modules of moqext that functions import when they are called."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imported(node, modules())


def test_the_checks_see_violations():
    empty, down = ast.parse(""), ast.parse("from moqext.reader.files import a\n")
    good = {"moqext.reader.files.a": empty, "moqext.reader.findings.b": down}
    assert list(upward(good)) == []
    assert circle(good) is None
    up = ast.parse("import os\nfrom moqext.reader.findings.b import name\n")
    bad = good | {"moqext.reader.files.a": up}
    assert list(upward(bad)) == [("moqext.reader.files.a", "moqext.reader.findings.b")]
    assert set(circle(bad)) == set(bad)
    assert list(late_imports(ast.parse("def f():\n    from moqext import ops\n"))) == ["moqext.ops"]
    assert list(late_imports(ast.parse("def f():\n    import ml_dtypes\n"))) == []
    for text in ("if TYPE_CHECKING:\n    pass\n", "if typing.TYPE_CHECKING:\n    pass\n"):
        assert list(guards(ast.parse(text))) == [1]


def test_packages_use_the_packages_below():
    assert len(modules()) > 80
    assert list(upward(modules())) == []


def test_no_module_imports_itself_by_way_of_others():
    assert circle(modules()) is None


@pytest.mark.parametrize("find", [guards, late_imports])
def test_no_import_hides_from_the_order(find):
    """An import that is for type checkers alone, or waits for a call, holds a circle open."""
    assert {module: found for module, tree in modules().items() if (found := list(find(tree)))} == {}


def test_every_folder_is_a_package():
    folders = {path.parent for path in (ROOT / "moqext").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_public_modules_and_names_are_there():
    from moqext import algorithms, ops, reference

    assert {module.__name__ for module in (algorithms, ops, reference)} == {
        "moqext.algorithms",
        "moqext.ops",
        "moqext.reference",
    }
    for module in (moqext, ops):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_modules_that_pages_name_exist():
    named = set()
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        named |= set(re.findall(r"(?<![\w/])moqext/[\w/]+\.pyi?\b", page.read_text()))
    assert len(named) > 10
    assert sorted(path for path in named if not (ROOT / path).is_file()) == []

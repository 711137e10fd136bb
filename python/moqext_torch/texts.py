"""Tells whether a function of another project is, word for word, one that is known.

What may take the place of a module's `forward` depends on what that does, which its name does not say: the
same few texts are the forward of a hundred models, and a class that sounds alike may add one to its weights.
Texts are compared without comments, docstrings, annotations and decorators, by their digests.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def digest(function: Callable[..., Any]) -> str:
    """The first digits of the SHA-256 of a function's text; empty where it has none to read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return ""
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef):
        return ""
    return hashlib.sha256(_plain_text(found).encode()).hexdigest()[:12]


def _plain_text(function: ast.FunctionDef) -> str:
    """The text without what changes nothing."""
    function.name, function.decorator_list, function.returns = "f", [], None
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for rest in (arguments.vararg, arguments.kwarg):
        if rest is not None:
            rest.annotation = None
    return ast.unparse(ast.fix_missing_locations(_WithoutAnnotations().visit(function)))


class _WithoutAnnotations(ast.NodeTransformer):
    """Annotated assignments become plain ones."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def global_of(function: Callable[..., Any], name: str) -> Any:
    """Finds what a function sees under a name beyond its own, or None."""
    return getattr(inspect.unwrap(function), "__globals__", {}).get(name)

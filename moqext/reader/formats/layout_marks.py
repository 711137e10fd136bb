"""Puts into the records of layers how they are stored, and what is to be said about it."""

from collections.abc import Iterable
from dataclasses import replace

from moqext.reader.files.tensor_files import TensorFiles
from moqext.reader.formats.layout_statistics import judge_layouts
from moqext.reader.formats.layouts import Layout, Layouts
from moqext.reader.problems import Problem, make_problem
from moqext.reader.records import Findings, LayerRecord, Projection


def mark_layouts(findings: Findings, layouts: Layouts, files: TensorFiles | None) -> Findings:
    """The findings with the layouts of all layers.

    Args:
        findings: without them.
        layouts: of the checkpoint.
        files: for values of scales; None where none is to be read.
    """
    doubts = judge_layouts(files, layouts.by_module) if files is not None else {}
    told = {problem.layer: problem for problem in layouts.problems if problem.layer is not None}
    if not doubts and not told and all(_is_plain(each) for each in layouts.by_module.values()):
        return findings._replace(problems=(*findings.problems, *layouts.problems))
    marker = _Marker(layouts, doubts, told)
    layers = tuple(marker.layer(layer) for layer in findings.layers)
    rest = tuple(problem for problem in layouts.problems if problem.layer not in marker.seen)
    return findings._replace(layers=layers, problems=(*findings.problems, *rest))


def _is_plain(layout: Layout) -> bool:
    return (layout.scale_layout, layout.nibbles) == ("linear", "low")


class _Marker:
    """Marks one layer after the other, and knows which had something said about them."""

    def __init__(self, layouts: Layouts, doubts: dict[str, Problem], told: dict[str, Problem]) -> None:
        self._layouts = layouts.by_module
        self._doubts = doubts
        self._told = told
        self.seen: set[str | None] = set()

    def layer(self, layer: LayerRecord) -> LayerRecord:
        members = tuple(self.layer(member) for member in layer.members)
        projections = tuple(self._projection(projection) for projection in layer.projections)
        parts: tuple[LayerRecord | Projection, ...] = members or projections
        problems = [problem for part in projections for problem in self._problems(part.name)]
        problems += self._problems(layer.name)
        if parts:
            order, nibbles = (_common(getattr(part, name) for part in parts) for name in _FIELDS)
        else:
            order, nibbles = self._orders(layer.name)
        return replace(
            layer,
            members=members,
            projections=projections,
            problems=(*layer.problems, *problems),
            scale_layout=order,
            nibbles=nibbles,
        )

    def _projection(self, projection: Projection) -> Projection:
        order, nibbles = self._orders(projection.name)
        return replace(projection, scale_layout=order, nibbles=nibbles)

    def _orders(self, module: str) -> tuple[str, str]:
        layout = self._layouts.get(module)
        return (layout.scale_layout, layout.nibbles) if layout else ("linear", "low")

    def _problems(self, module: str) -> list[Problem]:
        """Problems and notes of a weight."""
        self.seen.add(module)
        problems = [found[module] for found in (self._doubts, self._told) if module in found]
        layout = self._layouts.get(module)
        if layout is None:
            return problems
        if layout.scale_layout == "swizzled":
            message = f"block scales are swizzled, {layout.evidence}"
            problems.append(make_problem("swizzled_scales", message, layer=module, tensor=layout.scale))
        if layout.nibbles == "high":
            message = "the even column is in the high half of a byte"
            problems.append(make_problem("exchanged_nibbles", message, layer=module, tensor=layout.weight))
        return problems


_FIELDS = ("scale_layout", "nibbles")


def _common(values: Iterable[str]) -> str:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else "mixed"

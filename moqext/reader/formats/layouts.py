"""How block scales and codes lie in the files, and both in the plain order that everything else reads.

Block scales are stored row by row, or swizzled: in the 128 x 4 order of cuBLAS, rows padded to 128 and
columns to 4. Two codes share a byte, the even column in the low nibble or, as ComfyUI writes them, in the
high one. A padded shape proves the swizzle, and so it does for layers beside it; markers tell both. What
nothing tells is taken for plain, and judged by statistics (`moqext.reader.formats.layout_statistics`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from moqext import ops
from moqext.reader.files.tensor_files import TensorFiles, TensorInfo
from moqext.reader.formats.markers import read_markers
from moqext.reader.formats.stored import ceil_div
from moqext.reader.formats.stored_forms import usual_forms
from moqext.reader.naming import parse_tensor_name
from moqext.reader.problems import Problem, make_problem

ScaleLayout = Literal["linear", "swizzled"]
Nibbles = Literal["low", "high"]

TILE = (128, 4)
"""Rows and columns of a tile of swizzled scales."""

_PACKED = {"U8": 2, "F8_E4M3": 1}
_GROUPS = {"F8_E4M3": 16, "F8_E8M0": 32, "U8": 32}
"""Type of the scales -> weights of a block, in formats that have swizzled ones."""
_WIDE = 16
"""Columns of scales that ModelOpt's own padding is a multiple of."""
_SWIZZLED_FORMATS = ("nvfp4", "mxfp8")


class Layout(NamedTuple):
    """How one weight is stored.

    Attributes:
        scale: tensor of its block scales.
        weight: tensor of its codes.
        shape: of the scales in plain order.
        scale_layout: "linear" or "swizzled".
        nibbles: "low" or "high", the half of a byte that holds the even column.
        evidence: what tells so, in words; empty where nothing does.
        is_open: whether the shape fits both orders and no option decides.
        is_marked: whether a marker of ComfyUI belongs to it, whose readers expect the order that it tells.
    """

    scale: str
    weight: str
    shape: tuple[int, ...]
    scale_layout: ScaleLayout = "linear"
    nibbles: Nibbles = "low"
    evidence: str = ""
    is_open: bool = False
    is_marked: bool = False


@dataclass
class Layouts:
    """The layouts of a checkpoint.

    Attributes:
        by_module: module -> its layout, of weights whose scales could be swizzled.
        tensors: every tensor but the markers, scales with their shape in plain order.
        problems: what markers say and nobody understands.
        forms: tensors that are read in another type or shape than the file's; see `stored_forms.py`.
        producer: who writes markers, or metadata for ComfyUI, as are there; empty without any.
    """

    by_module: Mapping[str, Layout]
    tensors: Mapping[str, TensorInfo]
    problems: tuple[Problem, ...]
    forms: Mapping[str, TensorInfo] = field(default_factory=dict)
    producer: str = ""

    def __post_init__(self) -> None:
        layouts = self.by_module.values()
        self._scales = {each.scale: each for each in layouts if each.scale_layout == "swizzled"}
        self._codes = {each.weight for each in layouts if each.nibbles == "high"}

    def tensor(self, files: TensorFiles, name: str, *, raw: bool = False) -> NDArray[Any]:
        """A tensor as `TensorFiles.tensor` reads it, in plain order."""
        array = self._usual(files, name, raw=raw)
        if name in self._codes:
            return _exchanged(array)
        layout = self._scales.get(name)
        return array if layout is None else _unswizzled(array, layout.shape)

    def rows(self, files: TensorFiles, name: str, begin: int, end: int) -> NDArray[Any]:
        """A part along the first axis as `TensorFiles.rows` reads it, in plain order."""
        layout = self._scales.get(name)
        if layout is None:
            rows = self._usual(files, name, (begin, end))
            return _exchanged(rows) if name in self._codes else rows
        if len(layout.shape) == 3:
            return _unswizzled(files.rows(name, begin, end), (end - begin, *layout.shape[1:]))
        if not 0 <= begin <= end <= layout.shape[0]:
            raise ValueError(f"rows: expected a part of {list(layout.shape)}, got [{begin}, {end})")
        first, last = begin // TILE[0] * TILE[0], ceil_div(end, TILE[0]) * TILE[0]
        tiles = files.rows(name, first, max(first, last))
        return _unswizzled(tiles, (len(tiles), layout.shape[1]))[begin - first : end - first]

    def _usual(
        self, files: TensorFiles, name: str, rows: tuple[int, int] | None = None, *, raw: bool = False
    ) -> NDArray[Any]:
        """A tensor, or a part of it along the first axis, in its usual type and shape."""
        form = self.forms.get(name)
        if form is None:
            return files.tensor(name, raw=raw) if rows is None else files.rows(name, *rows)
        count = form.shape[0]
        begin, end = rows or (0, count)
        if not 0 <= begin <= end <= count:
            raise ValueError(f"rows: expected a part of {list(form.shape)}, got [{begin}, {end})")
        if form.dtype == "U8":  # codes of a type that NumPy lacks, or has as numbers
            size = form.nbytes // max(count, 1)
            array: NDArray[Any] = files.raw(name, begin * size, end * size)
        else:
            array = files.tensor(name, raw=raw) if rows is None else files.rows(name, begin, end)
        return array.reshape(end - begin, *form.shape[1:])


def find_layouts(
    files: TensorFiles,
    *,
    scale_layout: ScaleLayout | None = None,
    nibbles: Nibbles | None = None,
    headers_only: bool = False,
) -> Layouts:
    """The layouts of all weights, from shapes, markers and what the caller says.

    Args:
        files: of the checkpoint.
        scale_layout: that of every weight whose shapes allow it; None for what the file says.
        nibbles: that of every weight with two codes in a byte; None for what the file says.
        headers_only: whether no tensor can be read.
    """
    markers = read_markers(files, headers_only=headers_only)
    found: dict[str, Layout] = {}
    fits: dict[str, set[ScaleLayout]] = {}
    forms = usual_forms(files.tensors)
    tensors = {**files.tensors, **forms} if forms else files.tensors
    for module, layout, fitting in _candidates(tensors):
        found[module], fits[module] = layout, fitting
    proved = next((name for name, which in fits.items() if which == {"swizzled"}), None)
    if any(which == {"linear"} and name not in markers.formats for name, which in fits.items()):
        proved = None
    for module, layout in found.items():
        marker = markers.formats.get(module)
        order, evidence, is_open = _decide(fits[module], marker, proved, scale_layout)
        high = nibbles or ("high" if marker == "nvfp4" else "low")
        if marker in _SWIZZLED_FORMATS and order == "linear" and scale_layout is None:
            message = f"its marker says {marker}, of swizzled scales, and their shape is that of linear ones"
            markers.problems.append(
                make_problem("doubtful_scale_layout", message, layer=module, tensor=layout.scale)
            )
        is_packed = tensors[layout.weight].dtype == "U8"
        found[module] = layout._replace(
            scale_layout=order,
            nibbles=high if is_packed else "low",
            evidence=evidence,
            is_open=is_open,
            is_marked=marker is not None,
        )
    infos = _plain_infos(tensors, found, markers.tensors)
    return Layouts(found, infos, tuple(markers.problems), forms, markers.producer)


def _decide(
    fits: set[ScaleLayout], marker: str | None, proved: str | None, told: ScaleLayout | None
) -> tuple[ScaleLayout, str, bool]:
    """The order of the scales of a weight, what tells it, and whether statistics have a say."""
    if len(fits) == 1:
        (order,) = fits
        return order, f"their shape is that of {order} ones", False
    if told is not None:
        return told, f"as scale_layout={told!r} says", False
    if marker in _SWIZZLED_FORMATS:
        return "swizzled", f"as its marker, {marker}, says", True
    if proved is not None:
        return "swizzled", f"as the shape of those of {proved} proves", True
    return "linear", "", True


def _candidates(
    tensors: Mapping[str, TensorInfo],
) -> Iterator[tuple[str, Layout, set[ScaleLayout]]]:
    """Every weight whose scales could be swizzled, and the orders that their shape fits."""
    for name, info in tensors.items():
        group = _GROUPS.get(info.dtype)
        if group is None or len(info.shape) not in (2, 3) or not name.endswith(("scale", "scale_inv")):
            continue
        named = parse_tensor_name(name)
        if named is None or named.role != "weight_scale":
            continue
        of_linear = f"{named.module}.weight"
        weight = tensors.get(of_linear if of_linear in tensors else named.module)
        packed = _PACKED.get(weight.dtype) if weight else None
        if weight is None or packed is None or len(weight.shape) != len(info.shape):
            continue
        if (packed == 1) == (info.dtype == "F8_E4M3"):
            continue
        *outer, rows, width = weight.shape
        columns, rest = divmod(width * packed, group)
        shape = (*outer, rows, columns)
        if rest or 0 in shape:
            continue
        if fits := _fitting(info.shape, shape):
            yield named.module, Layout(name, weight.name, shape), fits


def _fitting(dims: tuple[int, ...], shape: tuple[int, ...]) -> set[ScaleLayout]:
    """The orders that scales of `dims` may be in, where `shape` is theirs in plain order."""
    *outer, rows, columns = shape
    padded = (*outer, ceil_div(rows, TILE[0]) * TILE[0], ceil_div(columns, TILE[1]) * TILE[1])
    wide = (*padded[:-1], ceil_div(columns, _WIDE) * _WIDE)
    fits: set[ScaleLayout] = {"linear"} if dims == shape else set()
    # Padding to 16 columns is done to plain scales as well, of which only the rows tell.
    if dims == padded or (dims == wide and padded[-2] != rows):
        fits.add("swizzled")
    return fits


def _plain_infos(
    tensors: Mapping[str, TensorInfo], layouts: Mapping[str, Layout], markers: set[str]
) -> Mapping[str, TensorInfo]:
    """The tensors but for markers, with shapes in plain order."""
    padded = {
        each.scale: replace(tensors[each.scale], shape=each.shape)
        for each in layouts.values()
        if tensors[each.scale].shape != each.shape
    }
    if not padded and not markers:
        return tensors
    return {name: padded.get(name, info) for name, info in tensors.items() if name not in markers}


def _exchanged(codes: NDArray[Any]) -> NDArray[Any]:
    """The bytes with their nibbles exchanged."""
    exchanged: NDArray[Any] = codes << 4 | codes >> 4
    return exchanged


def _unswizzled(scales: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Scales in plain order, padding dropped."""
    if 0 in scales.shape:
        return np.empty(shape, scales.dtype)
    whole = ops.unswizzle_block_scales(scales.view(np.uint8), scales.shape)
    plain = np.asarray(whole).view(scales.dtype)[..., : shape[-2], : shape[-1]]
    return np.ascontiguousarray(plain)


def check_options(scale_layout: object, nibbles: object) -> None:
    """Raises ValueError for an option that is none of those there are."""
    for name, value, known in (
        ("scale_layout", scale_layout, get_args(ScaleLayout)),
        ("nibbles", nibbles, get_args(Nibbles)),
    ):
        if value is not None and value not in known:
            raise ValueError(f"{name}: expected None, {' or '.join(map(repr, known))}, got {value!r}")

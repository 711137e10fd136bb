"""Parts of drawings as SVG."""

from collections.abc import Iterable
from xml.sax.saxutils import escape


def points(places: Iterable[tuple[float, float]]) -> str:
    """Places as the attribute of a polyline."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def label(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
    colour: str = "#222222",
) -> str:
    """A line of text."""
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'

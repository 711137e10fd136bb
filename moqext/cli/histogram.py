"""How the values of scales are distributed: counted by powers of two, drawn as inline SVG."""

from dataclasses import dataclass, field
from html import escape

import numpy as np
from numpy.typing import NDArray

from moqext.cli import text

LOWEST, HIGHEST, STEPS = -64, 64, 4
"""Exponents of two that are told apart, and steps between two of them."""

BARS = 48
"""Bars of a drawing, at most."""

_WIDTH, _HEIGHT, _BASE = 288, 84, 18
_ROOM = 140
"""Width of bars under which two numbers fit."""


@dataclass
class Histogram:
    """Values counted as they come.

    Attributes:
        counts: of positive values, by power of two.
        zeros: how many are 0.
        odd: how many are negative, infinite or NaN.
        low, high: the least and the largest of the positive ones.
    """

    counts: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros((HIGHEST - LOWEST) * STEPS, np.int64), repr=False
    )
    zeros: int = 0
    odd: int = 0
    low: float = np.inf
    high: float = 0.0

    def add(self, values: NDArray[np.float32]) -> None:
        """Counts some values."""
        values = values.reshape(-1)
        positive = values[(values > 0) & (values < np.inf)]
        zeros = int((values == 0).sum())
        self.zeros += zeros
        self.odd += values.size - zeros - positive.size
        if positive.size:
            self.low = min(self.low, float(positive.min()))
            self.high = max(self.high, float(positive.max()))
            places = ((np.log2(positive) - LOWEST) * STEPS).astype(np.int64)
            np.clip(places, 0, len(self.counts) - 1, out=places)
            self.counts += np.bincount(places, minlength=len(self.counts))

    @property
    def total(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum()) + self.zeros + self.odd

    def bars(self) -> list[int]:
        """The counts from the first to the last that is not 0, neighbours in one where they are too many."""
        found = np.flatnonzero(self.counts)
        if not found.size:
            return []
        span = self.counts[found[0] : found[-1] + 1]
        merged = -(-len(span) // BARS)
        padded = np.pad(span, (0, -len(span) % merged))
        return [int(count) for count in padded.reshape(-1, merged).sum(1)]

    def svg(self) -> str:
        """The drawing, in the colours of the page, with what it shows in words."""
        bars = self.bars()
        told = text.plural(self.total, "value")
        if bars:
            told += f" from {self.low:.3g} to {self.high:.3g}"
        parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(told)}">',
            f'<path class="axis" d="M0 {_HEIGHT - _BASE + 0.5}H{_WIDTH}"/>',
        ]
        width = min(_WIDTH / max(len(bars), 1), 24)
        first = (_WIDTH - width * len(bars)) / 2
        for number, count in enumerate(bars):
            height = max((_HEIGHT - _BASE - 4) * count / max(bars), 1.0 if count else 0.0)
            x, y = first + number * width, _HEIGHT - _BASE - height
            parts.append(
                f'<rect class="bar" x="{x + 0.5:.1f}" y="{y:.1f}" width="{max(width - 1, 0.8):.1f}" '
                f'height="{height:.1f}"><title>{count:,}</title></rect>'
            )
        if bars:
            ends = [(first, "start", f"{self.low:.3g}"), (_WIDTH - first, "end", f"{self.high:.3g}")]
            if _WIDTH - 2 * first < _ROOM:
                both = dict.fromkeys(shown for _, _, shown in ends)
                ends = [(_WIDTH / 2, "middle", " to ".join(both))]
            parts += [
                f'<text x="{x:.1f}" y="{_HEIGHT - 4}" text-anchor="{anchor}">{shown}</text>'
                for x, anchor, shown in ends
            ]
        return "".join([*parts, "</svg>"])

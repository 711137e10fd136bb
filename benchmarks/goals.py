"""Goals of linears and experts on CUDA, and whether linears reach them.

The least time of a few tokens is a start and the floor at nearly the full rate of memory; beyond, no peer of
the same run may be faster. Published figures come from benchmarks/published_h200.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.layers import NVFP4, NVFP4_ALGOS, NVFP4_FP8
from moqext.tools.bench import PEER

PUBLISHED = Path(__file__).parent / "published_h200.json"
OWN = "moqext"
FAST = ", fast"
"""In the name of a peer whose sums stay in the tensor cores' 14 bits; moqext's are promoted without it."""

DECODE_TOKENS = ((1, 16, 1.6e-6, 0.97), (17, 64, 2.0e-6, 0.95))
"""(tokens from, to, seconds to start, part of the floor's rate)."""

NVFP4_FEW_TOKENS = ((1, 16, 1.9e-6, 0.90), (64, 64, 0.0, 0.75))

NVFP4_OVER_BFLOAT16 = ((1, 64, 1.5), (65, 1023, 0.97), (1024, 1 << 40, 0.95))
"""(tokens from, to, how many times as fast as the weight in bfloat16)."""

ENGINES, ENGINE_TOKENS = 1.2, (32, 128, 256)
"""NVFP4 over the better of Marlin and Humming, as published or measured."""

AS_FP8 = ((128, 1 << 40, 1 / 1.05),)
"""NVFP4 multiplied as e4m3 over FP8_PER_CHANNEL_PER_TOKEN, both of moqext and the same run."""

AS_FP8_OVER_BFLOAT16 = ((1024, 1 << 40, 1.65),)
FP8_REFERENCE = "FP8_PER_CHANNEL_PER_TOKEN"

GEOMEAN = 1.3
"""Over the best public path, 64 tokens and fewer, of all shapes together."""

BLOCKWISE = 1.5
"""FP8_PB_WO over torch's product by blocks, 64 tokens and fewer."""

BLOCK_RATE = 1250e12
LARGE_FLOP = 2 * 4096 * 7168 * 16384
"""FP8_PB_WO reaches that many operations a second on products of so many and more."""

ALONE_FROM = 1024

EXPERTS_FEW, EXPERTS_START = 64, 5e-6
EXPERTS_PARTS = {NVFP4: 0.87}
"""Part of the floor's rate that is asked behind a start, up to `EXPERTS_FEW` tokens; of others 0.95."""

EXPERTS_MANY = 4096
EXPERTS_RATES = {NVFP4: 600e12, NVFP4_FP8: 850e12}
"""Operations a second that are asked with `EXPERTS_MANY` tokens; of others 900e12."""

Row = Mapping[str, Any]
Key = tuple[tuple[int, int], int, str]
"""(shape, tokens, quant_algo)"""


class Figure(NamedTuple):
    """A published time."""

    peer: str
    protocol: str
    seconds: float


class Goal(NamedTuple):
    """One thing to reach in a cell; `reached` and `target` have the same unit."""

    name: str
    reached: float
    target: float
    met: bool


class Cell(NamedTuple):
    """One algorithm on one shape and number of tokens.

    Attributes:
        key: Which.
        own: The row of moqext as its plan chose, None where it was not measured.
        without: The row without dependent launch, None where it was not measured.
        peers: Rows of all others that compute the same, fastest first; torch in bfloat16 is among them.
        published: The fastest published figure, None where there is none.
        bfloat16: torch with the weight in bfloat16, None where it was not measured.
        fp8: moqext's FP8_PER_CHANNEL_PER_TOKEN, None where it was not measured.
    """

    key: Key
    own: Row | None
    without: Row | None
    peers: Sequence[Row]
    published: Figure | None
    bfloat16: Row | None = None
    fp8: Row | None = None

    @property
    def best(self) -> Row | None:
        """The fastest peer of the run."""
        return self.peers[0] if self.peers else None

    @property
    def least(self) -> float | None:
        """Seconds of the fastest of the run's peers and the published ones."""
        seconds = [row["seconds"] for row in self.peers[:1]]
        seconds += [self.published.seconds] if self.published else []
        return min(seconds, default=None)

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best known path; more than 1 is faster."""
        return None if self.own is None or self.least is None else self.least / self.own["seconds"]

    def over(self, other: Row | None) -> float | None:
        """How many times as fast as another row."""
        return None if self.own is None or other is None else float(other["seconds"] / self.own["seconds"])


def read_published(path: Path = PUBLISHED) -> dict[Key, list[Figure]]:
    """All figures by cell."""
    figures: dict[Key, list[Figure]] = {}
    for outs, ins, tokens, algo, peer, protocol, microseconds in json.loads(path.read_text())["cells"]:
        figure = Figure(peer, protocol, microseconds * 1e-6)
        figures.setdefault(((outs, ins), tokens, algo), []).append(figure)
    return figures


def best_published(figures: Sequence[Figure], tokens: int) -> Figure | None:
    """The fastest; figures of peers in turn count at many tokens only where none was alone."""
    fair = [figure for figure in figures if tokens < ALONE_FROM or figure.protocol != "interleaved"]
    return min(fair or figures, key=lambda figure: figure.seconds, default=None)


def cells(rows: Iterable[Row], published: Mapping[Key, Sequence[Figure]]) -> list[Cell]:
    """All of a quantized algorithm, in order of the rows. Sustained runs are not among them.

    Those that are fast by less exact sums are compared among themselves, as an algorithm of their own, where
    moqext was measured so; elsewhere they count as any other.
    """
    timed = [(_key(row), row) for row in rows if row["protocol"] != "sustained"]
    apart = {key for key, row in timed if row["peer"] == OWN + FAST}
    groups: dict[Key, list[Row]] = {}
    for key, row in timed:
        algo = key[2] + (FAST if key in apart and FAST in row["peer"] else "")
        groups.setdefault((key[0], key[1], algo), []).append(row)
    made = []
    for key, group in groups.items():
        if key[2] == PEER:
            continue
        fast = FAST if key[2].endswith(FAST) else ""
        own = next((row for row in group if row["peer"] == OWN + fast), None)
        without = next((row for row in group if row["peer"] == f"{OWN}, no PDL"), None)
        others = [row for row in group if not row["peer"].startswith(OWN)]
        others += groups.get((key[0], key[1], PEER), [])
        others.sort(key=lambda row: row["seconds"])
        figure = best_published(published.get((*key[:2], key[2].removesuffix(FAST)), []), key[1])
        wide = groups.get((key[0], key[1], PEER), [None])[0]
        fp8 = [row for row in groups.get((key[0], key[1], FP8_REFERENCE), []) if row["peer"] == OWN]
        made.append(Cell(key, own, without, others, figure, wide, fp8[0] if fp8 else None))
    return made


def _key(row: Row) -> Key:
    return (tuple(row["shape"]), row["tokens"], row["quant_algo"])


def goals(cell: Cell) -> list[Goal]:
    """Goals of a cell; none where moqext was not measured."""
    (_, tokens, algo), own = cell.key, cell.own
    found: list[Goal] = []
    if own is None:
        return found
    limits = NVFP4_FEW_TOKENS if algo in NVFP4_ALGOS else DECODE_TOKENS
    limit = None if algo == NVFP4_FP8 else time_limit(tokens, own["floor_seconds"], limits)
    if limit is not None:
        found.append(Goal("time", own["seconds"], limit, own["seconds"] <= limit))
    if algo in NVFP4_ALGOS:
        found += nvfp4_goals(cell)
    elif cell.ratio is not None:
        found.append(Goal("no slower than any", cell.ratio, 1.0, cell.ratio >= 1.0))
    if cell.without and cell.best:
        ratio = cell.best["seconds"] / cell.without["seconds"]
        found.append(Goal("without PDL", ratio, 1.0, ratio >= 1.0))
    if algo == "FP8_PB_WO":
        found += block_goals(cell, own)
    return found


def time_limit(
    tokens: int, floor: float, limits: Sequence[tuple[int, int, float, float]] = DECODE_TOKENS
) -> float | None:
    """Seconds that a call of a few tokens may take."""
    for least, most, start, part in limits:
        if least <= tokens <= most:
            return start + floor / part
    return None


def nvfp4_goals(cell: Cell) -> list[Goal]:
    """Goals of NVFP4 weights but for their time."""
    tokens, exact = cell.key[1], cell.key[2] != NVFP4_FP8
    engines = [row["seconds"] for row in cell.peers if row["peer"] in ("Marlin", "Humming")]
    engines += [cell.published.seconds] if cell.published else []
    asked = [
        ("bfloat16", cell.over(cell.bfloat16), NVFP4_OVER_BFLOAT16 if exact else AS_FP8_OVER_BFLOAT16),
        ("FP8", cell.over(cell.fp8), () if exact else AS_FP8),
    ]
    if exact and engines and cell.own:
        limits = [(count, count, ENGINES) for count in ENGINE_TOKENS]
        asked.append(("Marlin and Humming", min(engines) / cell.own["seconds"], limits))
    found = []
    for name, ratio, ranges in asked:
        for least, most, target in ranges:
            if ratio is not None and least <= tokens <= most:
                found.append(Goal(name, ratio, target, ratio >= target))
    return found


def block_goals(cell: Cell, own: Row) -> list[Goal]:
    """Goals that products by blocks alone have."""
    tokens = cell.key[1]
    torch = next((row for row in cell.peers if row["peer"].startswith("torch blockwise")), None)
    found = []
    if torch and tokens <= DECODE_TOKENS[-1][1]:
        ratio = torch["seconds"] / own["seconds"]
        found.append(Goal("torch blockwise", ratio, BLOCKWISE, ratio >= BLOCKWISE))
    if own["flop"] >= LARGE_FLOP:
        rate = own["flop"] / own["seconds"]
        found.append(Goal("rate", rate, BLOCK_RATE, rate >= BLOCK_RATE))
    return found


def experts_limit(algo: str, tokens: int, floor: float, flop: float) -> float | None:
    """Seconds that a layer of experts may take; None where nothing is asked."""
    if tokens <= EXPERTS_FEW:
        return EXPERTS_START + floor / EXPERTS_PARTS.get(algo, 0.95)
    return flop / EXPERTS_RATES.get(algo, 900e12) if tokens == EXPERTS_MANY else None


def geomean(values: Sequence[float]) -> float:
    """Geometric mean.

    Raises:
        ValueError: No values.
    """
    if not values:
        raise ValueError("geomean: expected at least one value")
    return math.exp(sum(map(math.log, values)) / len(values))

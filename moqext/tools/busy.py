"""Whether a machine is too busy to be measured on.

A fixed loop runs on every thread a few times. Where nothing else wants the processors a thread has one as
long as the loop lasts, and every repeat takes as long as the others.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

REPEATS = 7

BYTES = 1 << 24
"""Bytes that a loop hashes, in some ten milliseconds and without the GIL."""

LEAST_SHARE = 0.9
MOST_SPREAD = 0.2
"""How far repeats may lie apart, as a part of the fastest."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Findings of the loop.

    Attributes:
        share: Part of the time for which threads that only calculate had a processor.
        spread: By how much the median repeat was slower than the fastest, as a part of that one.
    """

    share: float
    spread: float

    @property
    def doubt(self) -> str:
        """Why times are not to be trusted; empty where they are."""
        if self.share >= LEAST_SHARE and self.spread <= MOST_SPREAD:
            return ""
        return (
            f"the machine is busy: threads had a processor for {self.share:.0%} of their time, and repeats "
            f"of one loop took {self.spread:.0%} longer than the fastest; measure again when it is idle"
        )

    def as_dict(self) -> dict[str, float]:
        """Plain data for JSON."""
        return asdict(self)


def calibrate(
    threads: int,
    clock: Callable[[], float] = time.perf_counter,
    spent: Callable[[], float] = time.thread_time,
) -> Calibration:
    """Runs the loop, for a tenth of a second or so.

    Args:
        threads: That run it at once.
        clock: Seconds since some moment.
        spent: Seconds of a processor that the calling thread has had.
    """
    work = bytes(BYTES)

    def loop(_: int) -> tuple[float, float]:
        begin, before = clock(), spent()
        hashlib.sha256(work)
        return spent() - before, clock() - begin

    with ThreadPoolExecutor(threads) as pool:
        repeats = [list(pool.map(loop, range(threads))) for _ in range(REPEATS)]
    had, passed = (sum(pair[side] for repeat in repeats for pair in repeat) for side in (0, 1))
    longest = [max(wall for _, wall in repeat) for repeat in repeats]
    return Calibration(had / passed, spread_of([statistics.median(longest), min(longest)]))


def spread_of(times: Sequence[float]) -> float:
    """By how much the slowest of some times exceeds the fastest, as a part of that one."""
    return max(times) / min(times) - 1

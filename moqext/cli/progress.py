"""How far a long command is, on stderr: a bar with the time left on a terminal, else a line now and then."""

import shutil
import sys
import time

from moqext.cli import text

LINES_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""

DRAWN_EVERY = 0.1
"""Seconds between two drawings of the bar."""


class Progress:
    """Called with what is done, what there is to do, and the name of what is being done.

    Both are numbers of bytes, or of whatever else `what` says; with `rate` so many a second are told.
    """

    def __init__(self, *, quiet: bool, what: str = "", rate: bool = True) -> None:
        self._quiet = quiet
        self._what, self._rate = what, rate
        self._terminal = sys.stderr.isatty()
        self._begin: float | None = None
        self._next = 0.0
        self._drawn = False

    def __call__(self, done: int, total: int, name: str, count: str = "") -> None:
        """Tells it, if it is time to; `count` stands before the share, as "3/70"."""
        now = time.monotonic()
        if self._begin is None:
            self._begin = now
            self._next = now if self._terminal else now + LINES_EVERY
        if self._quiet or now < self._next:
            return
        seconds = now - self._begin
        count = f"{count} · " if count else ""
        speed = f", {self._amount(int(done / max(seconds, 1e-9)))}/s" if done and self._rate else ""
        left = f", {clock(seconds / done * (total - done))} left" if done else ""
        if self._terminal:
            self._next = now + DRAWN_EVERY
            told = f" {count}{100 * done // max(total, 1)} %{speed}{left} "
            width = shutil.get_terminal_size().columns
            bar = draw(done, total, max(10, min(40, width - len(told) - 32)))
            room = width - len(bar) - len(told) - 1
            shown = text.shorten(text.printable(name), room) if room > 8 else ""
            self._drawn = True  # before it is so: an interrupt may come between the two
            print(f"\r\x1b[K{bar}{told}{shown}", end="", file=sys.stderr, flush=True)
        else:
            self._next = now + LINES_EVERY
            line = f"{count}{self._amount(done)} of {self._amount(total)}{speed}{left}"
            print(line, file=sys.stderr, flush=True)

    def _amount(self, count: int) -> str:
        if not self._what:
            return text.size(count)
        return f"{count / 1e6:,.0f} million {self._what}" if count >= 1e6 else f"{count:,} {self._what}"

    def end(self) -> None:
        """Wipes the bar, if there is one; what is printed then takes its line."""
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn, self._next = False, 0.0


def draw(done: int, total: int, width: int) -> str:
    """A bar of so many columns between its brackets."""
    filled = width * done // max(total, 1)
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def clock(seconds: float) -> str:
    """Whole seconds as 0:05, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

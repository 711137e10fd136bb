"""Ctrl-C during imports, which swallow it, or make an ImportError or pages of traceback of it."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = 130
"""Exit status that shells expect of a program ended by Ctrl-C."""


def is_program() -> bool:
    """Whether this process is the command line, as `python -m moqext` or as its script."""
    words = getattr(sys, "argv", [])[:1]
    if words == ["-m"]:  # Python is looking for the module
        return sys.orig_argv[-len(sys.argv)] in ("moqext", "-mmoqext")
    return [os.path.basename(word) for word in words] == ["moqext"]


def end_on_interrupt() -> bool:
    """Lets Ctrl-C end the process in one line, at once; whether it would have been a KeyboardInterrupt."""
    if not _raises():
        return False
    signal.signal(signal.SIGINT, _end)
    return True


def raise_on_interrupt() -> bool:
    """Lets Ctrl-C be a KeyboardInterrupt again; whether it would have ended the process."""
    if signal.getsignal(signal.SIGINT) is not _end:
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True


@contextmanager
def heard() -> Iterator[None]:
    """Raises KeyboardInterrupt at the end of a block that had one and did not let it out."""
    if not _raises():
        yield
        return
    interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt


def _raises() -> bool:
    """Whether Ctrl-C is a KeyboardInterrupt here and now, and may be made something else."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"moqext: interrupted\n")
    os._exit(STATUS)

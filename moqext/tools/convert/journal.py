"""The jobs of a run that are done, by name, for a later run that goes on where a killed one ended.

A name is added when the bytes of its job were handed to the system, which keeps them when the process dies,
but not when the machine does. So the key of a journal names the boot of the machine, too.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def journal_key(parts: Any) -> str | None:
    """A text for all that decides what is written; None where this system cannot tell its boots apart.

    Args:
        parts: JSON values.
    """
    try:
        boot = _BOOT.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return hashlib.sha256(json.dumps([boot, parts], sort_keys=True).encode()).hexdigest()


class Journal:
    """A file with a line for each job that is done."""

    def __init__(self, path: Path) -> None:
        """Reads what is in the file, and opens it to add to it; a line without its end does not count."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with open(self._descriptor, "rb", closefd=False) as file:
            whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        os.truncate(self._descriptor, len(whole))
        os.lseek(self._descriptor, len(whole), os.SEEK_SET)
        self._done = set(whole.decode(errors="replace").splitlines())

    def __contains__(self, job: str) -> bool:
        return job in self._done

    def add(self, job: str) -> None:
        """Marks a job as done."""
        self._done.add(job)
        os.write(self._descriptor, f"{job}\n".encode())

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

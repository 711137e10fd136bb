"""Fixtures of the commands: a terminal to run them in, and genuine checkpoints to be broken."""

import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

import moqext
from moqext.tensor_files import TensorFiles

PACKAGES = str(Path(moqext.__file__).parents[1])


@pytest.fixture
def terminal() -> Callable[..., tuple[int, str]]:
    """Runs the program with its output on a terminal: exit status and what the terminal got."""

    def run(*arguments: object, columns: int = 80, errors: bool = False, **variables: str) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "moqext", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs if errors else subprocess.DEVNULL,
            env=environment | {"TERM": "xterm", "PYTHONPATH": PACKAGES, "PYTHONUTF8": "1"} | variables,
        )
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux's answer when the other side is closed
                break
            if not part:
                break
            written += part
        os.close(ours)
        return process.wait(60), written.decode().replace("\r\n", "\n")

    return run


@pytest.fixture
def copied(data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a genuine checkpoint, as "exports/NAME" or "checkpoints/NAME", to be changed."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(data / name, tmp_path / name.replace("/", "-")))

    return copy


@pytest.fixture
def overwrite() -> Callable[..., None]:
    """Puts bytes into a tensor of a checkpoint, at an offset from its first."""

    def change(directory: Path, tensor: str, content: bytes, offset: int = 0) -> None:
        with TensorFiles(directory) as files:
            info = files.tensors[tensor]
        with open(info.file, "r+b") as file:
            file.seek(info.begin + offset)
            file.write(content)

    return change

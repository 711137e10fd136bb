"""Fixtures of the commands: a terminal to run them in, and genuine checkpoints to be broken."""

import fcntl
import json
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
from moqext.reader.files.tensor_files import TensorFiles

from ..work import HANGS

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
        return process.wait(HANGS), written.decode().replace("\r\n", "\n")

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


@pytest.fixture
def halved(copied: Callable[[str], Path]) -> Callable[[str], Path]:
    """A copy of a genuine checkpoint in five files, of which the third is spoilt, or all are gone."""

    def spoil(how: str) -> Path:
        directory = copied("exports/nvfp4_sharded")
        shards = sorted(directory.glob("*.safetensors"))
        if how == "a shard is missing":
            shards[2].unlink()
        elif how == "all shards are missing":
            for shard in shards:
                shard.unlink()
        elif how == "a shard is cut":
            shards[2].write_bytes(shards[2].read_bytes()[:-10])
        elif how == "a shard is a pointer of Git LFS":
            shards[2].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 19960\n")
        else:
            assert how == "the index points to the wrong file"
            path = directory / "model.safetensors.index.json"
            index = json.loads(path.read_text())
            for name in index["weight_map"]:
                if name.startswith("model.layers.10.mlp.up_proj."):
                    index["weight_map"][name] = shards[0].name
            path.write_text(json.dumps(index))
        return directory

    return spoil

"""Files that a command writes: whole or not at all, and refused before the work where they cannot be."""

import os
import stat
import tempfile
from pathlib import Path

from moqext.errors import CheckpointError
from moqext.reader.files.untrusted import expand_home


def output_path(name: str) -> Path:
    """The path of a file to write; a leading `~` is the home directory."""
    return Path(expand_home(name))


def refuse_unwritable(path: Path) -> None:
    """Refuses a file that could not be written, before anything is done for it; leaves nothing behind.

    Raises:
        CheckpointError: it is a directory, or its directory is none or takes no files.
    """
    if path.is_dir():
        raise CheckpointError("is a directory, expected the name of a file to write", file=path)
    if _is_special(path):
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror}", file=path) from error


def write_whole(path: Path, text: str) -> None:
    """Writes the file under another name, and renames it when it is whole."""
    if _is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()  # a link goes on being one
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        os.chmod(name, mode)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _is_special(path: Path) -> bool:
    """Whether it is there and no regular file: a device or a pipe is written to, not replaced."""
    return path.exists() and not path.is_file()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""Staging of a new checkpoint: a temporary folder in the target directory, swapped in at the end.

The folder holds `new`, the files of the new checkpoint, and `old`, where the files that they replace go.
All moves are listed in `moves.json` before the first one. While that list is there the old checkpoint can be
put back, by this process after a failure, by the next command that writes to the directory after a kill. A
lock on the directory tells a command that runs from what a killed one left.

A run may be given a key. Then a folder that one with the same key left is gone on with: its journal names the
jobs whose bytes are there.
"""

import errno
import fcntl
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from moqext.errors import CheckpointError
from moqext.reader.files.places import INDEX
from moqext.tools.convert.files import QUANTIZATION_FILES
from moqext.tools.convert.journal import Journal

STAGING = ".moqext-convert-"
"""How the name of the temporary folder begins."""

_REPLACED = ("*.safetensors", "*.safetensors.index.json", "config.json", *QUANTIZATION_FILES)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Contents(NamedTuple):
    """Files that a conversion reads and is going to write.

    Attributes:
        source: the directory that it reads.
        read: files of it that are read.
        names: files that are written, relative to the target.
        nbytes: how many bytes they take.
    """

    source: Path
    read: Sequence[Path]
    names: Sequence[str]
    nbytes: int


class Staging:
    """The temporary folder, as a context manager; whatever fails in it leaves the target as it was.

    With a key the folder stays where the run was ended or the disk was full.

    Attributes:
        folder: where the files of the conversion are written to, until `publish`.
    """

    folder: Path

    def __init__(
        self, out: str | os.PathLike[str], contents: Contents, *, overwrite: bool, key: str | None = None
    ) -> None:
        """See `__enter__`, which does the work.

        Args:
            out: the target.
            contents: what is read and written.
            overwrite: whether a checkpoint in the target may be replaced.
            key: equal for runs that write the same bytes, see `journal_key`; None never goes on with another.
        """
        if not os.fspath(out):
            raise CheckpointError("expected a directory to write to, got an empty name")
        self._out = Path(out)
        self._contents = contents
        self._overwrite = overwrite
        self._made: list[Path] = []
        self._lock = -1
        self._root: Path | None = None
        self._key = key
        self._journal: Journal | None = None

    def __enter__(self) -> Self:
        """Locks the directory, removes what killed conversions left in it, and makes the folder.

        Raises:
            CheckpointError: the target is no directory, is not empty without `overwrite`, or has another
                conversion running; it or a file of it is part of the source, or the source lies in it; the
                disk is too full.
        """
        try:
            self._refuse_overlap()
            if os.path.lexists(self._out):
                if not self._out.is_dir():
                    raise CheckpointError("exists and is no directory", file=self._out)
                self._clear()
                self._refuse_contents()
            self._refuse_full_disk()
            self._make()
        except BaseException:
            self._release(keep=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release(keep=error is not None and not isinstance(error, (CheckpointError, ValueError)))
        if isinstance(error, OSError) and error.errno in _FULL:
            place, free = self._room()
            message = (
                f"could not be written to its end ({os.strerror(error.errno)}); it takes "
                f"{_size(self._contents.nbytes)}, {_size(free)} are free now on the file system of {place}"
            )
            if self._key is not None and self._root is not None:
                message += f"; the same command goes on from {self._root.name} in it"
            raise CheckpointError(message, file=self._out) from error

    def is_done(self, job: str) -> bool:
        """Whether an earlier run with the key has written what the job writes."""
        return self._journal is not None and job in self._journal

    def mark_done(self, job: str) -> None:
        """Remembers a job for a later run with the key."""
        if self._journal is not None:
            self._journal.add(job)

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a JSON file."""
        (self.folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def copy(self, files: Mapping[str, Path]) -> None:
        """Copies files as they are: name in the folder -> source."""
        for name, path in files.items():
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    def publish(self) -> None:
        """Moves the checkpoint that is in the directory aside and the new files there, or neither.

        The configuration goes first and comes last: in between a loader finds no checkpoint.
        """
        assert self._root is not None
        moves = list(self._moves(self._root.name))
        draft = self._root / "moves"
        draft.write_text(json.dumps(moves), encoding="utf-8")
        os.replace(draft, self._root / "moves.json")
        try:
            for begin, end in moves:
                (self._out / end).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self._out / begin, self._out / end)
        except BaseException:
            _put_back(self._out, self._root)
            raise
        (self._root / "moves.json").unlink()
        self._made.clear()

    def _moves(self, root: str) -> Iterator[tuple[str, str]]:
        """Names below the directory, before and after."""
        new = [path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file()]
        old = {path.relative_to(self._out) for pattern in _REPLACED for path in self._out.glob(pattern)}
        old = {name for name in old | set(new) if _is_file(self._out / name)}

        def order(name: Path) -> tuple[bool, bool, str]:
            return str(name) == "config.json", name.name.endswith(INDEX), str(name)

        for name in sorted(old, key=order, reverse=True):
            yield str(name), f"{root}/old/{name}"
        for name in sorted(new, key=order):
            yield f"{root}/new/{name}", str(name)

    def _refuse_overlap(self) -> None:
        """Refuses a target and a source of which one lies in the other, whatever links lead there."""
        source, out = (Path(os.path.realpath(path)) for path in (self._contents.source, self._out))
        if out.is_relative_to(source):
            raise CheckpointError(
                f"lies in the checkpoint that is read, {self._contents.source}", file=self._out
            )
        if source.is_relative_to(out):
            message = f"the checkpoint that is read lies in it, {self._contents.source}"
            raise CheckpointError(message, file=self._out)
        for path in self._contents.read:
            if Path(os.path.realpath(path)).is_relative_to(out):
                message = f"{path} of the checkpoint that is read is a link to a file in it"
                raise CheckpointError(message, file=self._out)

    def _clear(self) -> None:
        """Takes the lock; undoes and removes what conversions that were killed left."""
        stale = sorted(self._out.glob(f"{STAGING}*"))
        if not self._take_lock() and stale:
            message = (
                "another command writes to it or was killed (this file system has no locks to tell "
                "which); remove it if none is running"
            )
            raise CheckpointError(message, file=stale[0])
        for folder in stale:
            if folder.is_symlink() or not folder.is_dir():
                raise CheckpointError("is named as a temporary folder and is none; remove it", file=folder)
            if (folder / "moves.json").exists():
                _put_back(self._out, folder)
            if self._root is None and self._key is not None and _read_key(folder) == self._key:
                self._root = folder
            else:
                shutil.rmtree(folder)

    def _take_lock(self) -> bool:
        """Locks the directory for as long as this process lives; False where the file system cannot."""
        self._lock = os.open(self._out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError("another command is writing to it", file=self._out) from None
        except OSError:
            return False
        return True

    def _refuse_contents(self) -> None:
        """Refuses a directory with files, unless they may be replaced and can be."""
        present = next((path for path in self._out.iterdir() if path != self._root), None)
        if present is not None and not self._overwrite:
            checkpoint = any(any(self._out.glob(pattern)) for pattern in _REPLACED)
            does = "replaces the checkpoint in it" if checkpoint else f"writes there, beside {present.name}"
            raise CheckpointError(f"is not empty; --overwrite (overwrite=True) {does}", file=self._out)
        home = os.path.realpath(self._out)
        for name in self._contents.names:
            target = self._out / name
            if target.is_dir() and not target.is_symlink():
                raise CheckpointError("is a directory, and a file is to be written there", file=target)
            folder = target.parent
            if os.path.lexists(folder) and not folder.is_dir():
                raise CheckpointError("is no directory, and files are to be written below it", file=folder)
            if not Path(os.path.realpath(folder)).is_relative_to(home):
                raise CheckpointError(f"is a link that leads out of {self._out}", file=folder)

    def _refuse_full_disk(self) -> None:
        """Refuses what the file system has no room for, as far as it tells."""
        place, free = self._room()
        if free + self._written() < self._contents.nbytes:
            kept = ", beside the checkpoint that is replaced" if self._overwrite else ""
            message = (
                f"not enough space: {_size(self._contents.nbytes)} are needed{kept}, {_size(free)} are free "
                f"on the file system of {place}"
            )
            raise CheckpointError(message, file=self._out)

    def _room(self) -> tuple[Path, int]:
        """The directory on whose file system the target lies or will, and the free bytes there."""
        place = Path(os.path.abspath(self._out))
        place = next(path for path in (place, *place.parents) if path.is_dir())
        usage = shutil.disk_usage(place)
        return place, usage.free if usage.total else sys.maxsize  # some network file systems do not tell

    def _written(self) -> int:
        """Bytes on the disk of what an earlier run has left."""
        if self._root is None:
            return 0
        files = (path for path in self._root.rglob("*") if path.is_file())
        return sum(path.stat().st_blocks * 512 for path in files)

    def _make(self) -> None:
        """The folder, and the directory with those above it where they are not there."""
        missing = [path for path in (self._out, *self._out.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir()
            self._made.append(path)
        if missing:
            self._take_lock()
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix=STAGING, dir=self._out))
        self.folder = self._root / "new"
        self.folder.mkdir(exist_ok=True)
        if self._key is not None:
            self._journal = Journal(self._root / "journal")
            (self._root / "key").write_text(self._key, encoding="ascii")

    def _release(self, *, keep: bool = False) -> None:
        """Removes the folder, but not an old checkpoint in it, and directories made for nothing.

        Args:
            keep: leaves the folder for a later run with the key.
        """
        if self._journal is not None:
            self._journal.close()
        kept = keep and self._key is not None
        if self._root is not None and not kept and not (self._root / "moves.json").exists():
            shutil.rmtree(self._root, ignore_errors=True)
        for path in reversed(self._made):
            with suppress(OSError):
                path.rmdir()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _read_key(folder: Path) -> str | None:
    """The key of the run that made a folder; None where it had none."""
    try:
        return (folder / "key").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None


def _put_back(out: Path, folder: Path) -> None:
    """Undoes the moves that a folder lists, whichever were made, unless all were; may be called again."""
    moves = _read_moves(out, folder)
    if any(os.path.lexists(out / begin) for begin, _ in moves if begin.startswith(f"{folder.name}/")):
        for begin, end in reversed(moves):
            if os.path.lexists(out / end) and not os.path.lexists(out / begin):
                os.replace(out / end, out / begin)
                _remove_empty((out / end).parent, out)
    (folder / "moves.json").unlink()


def _read_moves(out: Path, folder: Path) -> list[tuple[str, str]]:
    """The list in a folder, each of whose moves stays in the directory: it may come from somebody else."""
    path = folder / "moves.json"
    home = os.path.realpath(out)
    try:
        moves = [(str(begin), str(end)) for begin, end in json.loads(path.read_bytes())]
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError("is no list of moves; remove its folder", file=path) from None
    for name in itertools.chain.from_iterable(moves):
        parent = Path(os.path.realpath((out / name).parent))
        if Path(name).name in ("", "..") or not parent.is_relative_to(home):
            raise CheckpointError(f"its move of {name!r} leaves {out}; remove its folder", file=path)
    return moves


def _remove_empty(path: Path, top: Path) -> None:
    """Removes directories that are empty, up to `top`."""
    with suppress(OSError):
        while path != top:
            path.rmdir()
            path = path.parent


def _is_file(path: Path) -> bool:
    return os.path.lexists(path) and (path.is_symlink() or not path.is_dir())


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 10**9 else f"{count:,} bytes"

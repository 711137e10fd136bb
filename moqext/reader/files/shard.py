"""One file of a checkpoint, read where its header said the tensors are, as long as it is still that file.

Files are replaced, cut and rewritten while somebody has them open: a download that goes on, an export that
runs again. A header read from one file says nothing about another of its name, so the file is recognised by
device, inode, size and time of the last change, before the first read and after every one. Bytes are copied,
not mapped: a map of a file that is cut kills the process, a read comes back short.
"""

import os
import stat
from pathlib import Path
from typing import NamedTuple

from moqext.errors import CheckpointError
from moqext.reader.files.untrusted import open_at_once

READ_AT_ONCE = 64 << 20
"""Bytes of one read, after which a signal is heard."""


class Identity(NamedTuple):
    """Marks that tell one file, as it was at one moment, from every other."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Identity":
        """The identity of the file that `os.stat` or `os.fstat` described."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Shard:
    """A file held open until its last reference is gone: one thread may let go of it while another reads."""

    __slots__ = ("_descriptor", "_identity", "_path")

    def __init__(self, path: Path, identity: Identity) -> None:
        """Opens the file.

        Raises:
            CheckpointError: it cannot be opened, or is not the file that `identity` was taken of.
        """
        self._descriptor = -1
        self._path = path
        self._identity = identity
        try:
            self._descriptor = open_at_once(path, os.O_RDONLY)
            self._refuse_changed()
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=path) from error

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read_into(self, target: memoryview, begin: int) -> None:
        """Fills `target` with the bytes of the file from `begin` on.

        Raises:
            CheckpointError: they cannot be read, or the file changed since its identity was taken.
        """
        done = 0
        try:
            while done < len(target):
                piece = target[done : done + READ_AT_ONCE]
                count = os.preadv(self._descriptor, [piece], begin + done)
                if count == 0:
                    break
                done += count
            self._refuse_changed()
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=self._path) from error
        if done < len(target):
            message = f"ends at byte {begin + done}, {len(target) - done} before the end of the tensor"
            raise CheckpointError(message, file=self._path)

    def _refuse_changed(self) -> None:
        status = os.fstat(self._descriptor)
        now = Identity.of(status)
        if not stat.S_ISREG(status.st_mode):
            changed = "it is no regular file any more"
        elif now.size != self._identity.size:
            changed = f"it had {self._identity.size} bytes and has {now.size}"
        elif now[:2] != self._identity[:2]:
            changed = "another file has taken its place"
        elif now.mtime_ns != self._identity.mtime_ns:
            changed = "it was written to"
        else:
            return
        message = f"the file has changed since the checkpoint was opened: {changed}; open it again"
        raise CheckpointError(message, file=self._path)

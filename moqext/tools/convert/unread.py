"""Weights of a model that lie beside the files which its index names, as an exporter's `mtp.safetensors`.

Loaders follow the index, so they never see such a file. A conversion writes an index of its own: it takes the
modules in that the checkpoint does not have yet. Files with the same modules once more, in another precision
or under other names, stay out.
"""

from typing import NamedTuple

from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.files.tensor_header import read_header
from moqext.reader.naming import parse_tensor_name

_OTHERS = ("consolidated", "adapter_")
"""How names of files begin whose tensors are not of this model, or are it once more under other names."""


class Taken(NamedTuple):
    """A file that was not read, and how many of its tensors are now."""

    file: str
    tensors: int
    total: int

    @property
    def note(self) -> str:
        """A sentence about it."""
        which = "" if self.tensors == self.total else f"{self.tensors:,} of "
        return f"{self.file}, which no index names: {which}{self.total:,} tensors written too"


def take_in_unread(checkpoint: CheckpointReader) -> tuple[CheckpointReader, list[Taken]]:
    """The checkpoint with the modules of files that it does not read, and these files.

    Raises:
        CheckpointError: such a file is malformed.
    """
    taken = []
    read = {*checkpoint.files.files, *checkpoint.files.named.values()}
    modules = set(map(_module, checkpoint.tensors))
    for path in sorted(checkpoint.directory.glob("*.safetensors")):
        if path in read or path.name.startswith(_OTHERS):
            continue
        header = read_header(path)
        known_as = checkpoint.files.known_as
        new = [name for name in header.tensors if _module(known_as(name)) not in modules]
        if not new:
            continue
        modules.update(_module(known_as(name)) for name in new)
        checkpoint = checkpoint.with_files(checkpoint.files.with_file(path, header, new))
        taken.append(Taken(path.name, len(new), len(header.tensors)))
    return checkpoint, taken


def _module(tensor: str) -> str:
    named = parse_tensor_name(tensor)
    return named.module if named else tensor

"""The exception for files that cannot be read as a checkpoint."""

import os
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint file that is malformed, incomplete or not what its index promises.

    Attributes:
        file: the file (or directory) at fault, None when no single one is.
        tensor: the name of the tensor at fault, None when no single one is.
        reason: the message without the two.
    """

    file: Path | None
    tensor: str | None
    reason: str

    def __init__(
        self, message: str, *, file: str | os.PathLike[str] | None = None, tensor: str | None = None
    ) -> None:
        self.file = None if file is None else Path(file)
        self.tensor = tensor
        self.reason = message
        where = "" if self.file is None else f"{self.file}: "
        what = "" if tensor is None else f"tensor {tensor!r}: "
        super().__init__(f"{where}{what}{message}")

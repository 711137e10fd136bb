"""Files that came from somebody else: opened safely, and JSON parsed strictly.

Strict means UTF-8, one object at the top, and no key twice in an object: two readers that resolve a repeated
key differently would read two different checkpoints out of one file. NaN and Infinity, which JSON does not
have, are taken, since config.json of some models holds them.
"""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from moqext.errors import CheckpointError

HEAD_BYTES = 256
"""Bytes at the beginning of a file that `foreign_content` needs."""

# How files begin that stand where another one should, and what to do. Compared in lower case, after spaces.
_FOREIGN = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the file itself; run `git lfs pull` in its directory",
    ),
    (b"<!doctype html", "an HTML page, not the file itself, as a failed download leaves; download it again"),
    (b"<html", "an HTML page, not the file itself, as a failed download leaves; download it again"),
    (b"<?xml", "an XML page, not the file itself, as a failed download leaves; download it again"),
)
# Files of weights that are not safetensors, by the ends of their names, and what reads them.
_OTHER_FORMS = (
    ((".gguf",), "GGUF, which llama.cpp and Ollama read; moqext reads safetensors"),
    (
        (".bin", ".pt", ".pth", ".ckpt"),
        "weights as torch.save writes them, which PyTorch reads; save_pretrained of Transformers writes them "
        "as safetensors, which moqext reads",
    ),
    ((".onnx",), "ONNX, which ONNX Runtime reads; moqext reads safetensors"),
    ((".engine", ".plan"), "an engine of TensorRT; moqext reads the safetensors that it was built from"),
    ((".h5", ".msgpack"), "weights of TensorFlow or Flax; moqext reads safetensors"),
)
_ZIP = b"PK\x03\x04"

# Names that the Hugging Face Hub allows: an owner and a model; behind @ a branch, tag or commit.
HUB_NAME = re.compile(
    r"(?:https?:/+huggingface\.co/)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w./-]+?))?/?"
)
# A value takes up to 200 bytes once it is parsed, and as little as three in the text (`[],`), so values are
# counted before they are parsed. Every value but the first of its container follows a comma, and every
# container has a bracket. Genuine documents are far from the limit: a tensor of a header takes 130 bytes with
# 8 commas and brackets, one of an index 100 bytes with 1 comma. The largest known model, of 276,000 tensors,
# would have 2.2 million of them in one header of 36 MB, which may have 3.3 million.
FREE_VALUES = 1 << 20
BYTES_PER_VALUE = 16


class RepeatedKeys(dict[str, Any]):
    """An object whose `repeated` keys occurred more than once; kept until the caller can say where it is."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs)
        self.repeated = tuple(name for name, count in counts.items() if count > 1)


@contextmanager
def open_file(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The file open for reading, and its size.

    Raises:
        CheckpointError: it cannot be opened or read, or is not a regular file.
    """
    try:
        with open(file, "rb", opener=open_at_once) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError("not a regular file", file=file)
            yield stream, status.st_size
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=file) from error


def directory_fault(directory: str | os.PathLike[str]) -> str | None:
    """Why no checkpoint can be opened there and what to give instead; None for a directory."""
    path = Path(expand_home(directory))
    name = os.fspath(directory)
    if not name:
        return "expected a directory, got an empty name"
    if os.path.isdir(path):
        return None
    if os.path.exists(path):
        if (form := other_form(path.name)) is not None:
            return f"not a directory of safetensors files; {form}"
        return f"not a directory but a file; give the directory that it lies in, {path.parent}"
    hub = HUB_NAME.fullmatch(name)
    if hub and not os.path.exists(name.split("/")[0]):
        return (
            "no such directory; it looks like a model of the Hugging Face Hub: `hf download "
            f"{hub['repo']} --local-dir DIR` (or huggingface-cli download), then give DIR; or "
            "`pip install huggingface_hub`, with which the name does"
        )
    return "no such file" if name.endswith(".safetensors") else "no such directory"


def expand_home(path: str | os.PathLike[str]) -> str:
    """The path with a leading `~` or `~user` replaced, unless something here has that very name."""
    name = os.fspath(path)
    return name if not name.startswith("~") or os.path.lexists(name) else os.path.expanduser(name)


def other_form(name: str) -> str | None:
    """The form of a file of weights that is not read here and its reader, by its name; None for others."""
    return next((form for endings, form in _OTHER_FORMS if name.lower().endswith(endings)), None)


def foreign_content(head: bytes) -> str | None:
    """The kind of a file with this beginning, where that is neither JSON nor safetensors; else None."""
    if head.startswith(_ZIP) and any(head[4:8]):  # with four zeros it could be the length of a header
        return "a zip archive, as torch.save writes; only safetensors files can be read"
    plain = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return next((what for beginning, what in _FOREIGN if plain.startswith(beginning)), None)


def parse_object(text: bytes, file: Path, what: str) -> dict[str, Any]:
    """The object in `text`, in which any object with a repeated key is a RepeatedKeys.

    Args:
        text: the bytes of one JSON document.
        file: where they come from, for the message.
        what: what they are, for the message ("the header", "the index").

    Raises:
        CheckpointError: empty, a Git LFS pointer, a web page, not UTF-8, not JSON, nested too deeply, a
            number too long, too many values for its size, or not an object.
    """
    if not text:
        raise CheckpointError(f"{what} is not JSON: the file is empty", file=file)
    if (foreign := foreign_content(text[:HEAD_BYTES])) is not None:
        raise CheckpointError(foreign, file=file)
    refuse_many_values(text, file, what)
    try:
        document = _parse(text.decode())
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{what} is not UTF-8: {error}", file=file) from None
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply", file=file) from None
    except ValueError as error:
        raise CheckpointError(f"{what} is not JSON: {error}", file=file) from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{what}: expected an object, found {type_name(document)}", file=file)
    return document


def refuse_many_values(text: bytes, file: Path, what: str) -> None:
    """Raises CheckpointError for a document whose values would take far more memory than its text."""
    if len(text) <= FREE_VALUES:
        return
    values = sum(map(text.count, (b",", b"[", b"{")))
    limit = FREE_VALUES + len(text) // BYTES_PER_VALUE
    if values > limit:
        message = (
            f"{what} has {values} commas and opening brackets in {len(text)} bytes, at most {limit} are read"
        )
        raise CheckpointError(message, file=file)


def type_name(value: object) -> str:
    """The name that JSON has for the type of a parsed value."""
    if isinstance(value, dict):
        return "an object"
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def is_text(name: str) -> bool:
    """False for what no UTF-8 file could spell: a lone surrogate, which JSON can smuggle in as an escape."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def open_at_once(path: str | Path, flags: int) -> int:
    """A descriptor of the file, opened without waiting, as a pipe would make it, for somebody to write."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _parse(text: str) -> Any:
    """The document; Python is called for each of its objects only where a key may be in one twice.

    Every key that was written has a colon behind it. So no key was lost to another one where as many are in
    the document, or in the two outer levels of it, as there are colons.
    """
    document = json.loads(text)
    if isinstance(document, dict):
        inner = [len(value) for value in document.values() if isinstance(value, dict)]
        if len(document) + sum(inner) == text.count(":"):
            return document
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    return document if len(document) == len(pairs) else RepeatedKeys(pairs)

"""Plain tensors of a checkpoint: all but those of quantized layers and cache scales."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from moqext.checkpoint import Checkpoint
from moqext.cli import text
from moqext.reader.files.tensor_files import TensorInfo
from moqext.reader.naming import name_pattern
from moqext.reader.records import Findings


def plain_tensors(checkpoint: Checkpoint, findings: Findings, glob: str | None = None) -> list[TensorInfo]:
    """The tensors, in the order of the files; with a glob those that match it, or whose module does."""
    owned: set[str] = set()
    for layer in findings.layers:
        for linear in layer.linears():
            owned.update(linear.tensors.values())
    for kv in findings.kv:
        owned.update(kv.tensors.values())
    return [
        info
        for name, info in checkpoint.tensors.items()
        if name not in owned
        and (glob is None or fnmatchcase(name, glob) or fnmatchcase(name.rpartition(".")[0], glob))
    ]


def as_data(tensors: Sequence[TensorInfo]) -> list[dict[str, Any]]:
    """The tensors as plain data for JSON."""
    return [
        {"name": info.name, "dtype": info.dtype, "shape": list(info.shape), "bytes": info.nbytes}
        for info in tensors
    ]


def as_text(
    tensors: Sequence[TensorInfo], quantized: Iterable[str], columns: int | None, *, indent: int = 2
) -> list[str]:
    """One row for those that differ only in the numbers of their names, the largest first.

    Args:
        tensors: what is not quantized.
        quantized: names of the layers that are; where one has the like of a tensor here, or several rows
            have one name, the numbers tell which are meant.
        columns: the width to stay within; None for any.
        indent: spaces before each line.
    """
    if not tensors:
        return []
    kinds: dict[tuple[str, str, str], list[TensorInfo]] = defaultdict(list)
    for info in tensors:
        kinds[name_pattern(info.name), info.dtype, " × ".join(map(str, info.shape)) or "1"].append(info)
    sizes = {kind: sum(info.nbytes for info in alike) for kind, alike in kinds.items()}
    variants = Counter(pattern for pattern, _, _ in kinds)
    variants.update({f"{name_pattern(name)}.weight" for name in quantized})
    rows = [("not quantized", "", "type", "shape", "size")]
    for kind in sorted(kinds, key=lambda kind: -sizes[kind]):
        pattern, dtype, shape = kind
        alike = kinds[kind]
        several = variants[pattern] > 1
        name = text.numbered(pattern, [info.name for info in alike]) if several else pattern
        count = f"× {len(alike):,}" if "*" in pattern else ""
        rows.append((name, count, dtype, shape, text.size(sizes[kind])))
    if len(rows) > 2:
        rows.append((f"all {len(tensors):,}", "", "", "", text.size(sum(sizes.values()))))
    return [line for lines in text.table(rows, "<><>>", columns, indent=indent) for line in lines]

"""Checks a checkpoint as a whole, by the headers of its files, before vLLM loads anything.

The methods of layers see what reaches them, one layer after the other; a file that is missing, or a scale
that was lost, is seen here first, with its name and all the others.
"""

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from moqext import Checkpoint, CheckpointError, ConfigError, LayerRecord, UnsupportedQuantization

logger = logging.getLogger("vllm.moqext")

SHOWN = 10
"""Problems that an error tells; the rest are counted."""


class Stored(NamedTuple):
    """A quantized layer, with as much of its `moqext.LayerRecord` as other processes are told."""

    name: str
    kind: str
    quant_algo: str
    shape: tuple[int, ...]


class Seen(NamedTuple):
    """Findings in the headers of a checkpoint; None where they are not looked at.

    Attributes:
        stored: the quantized layers that stand outside of numbered ones.
        rank: of the low-rank pairs, also None where there are none.
    """

    stored: tuple[Stored, ...] | None = None
    rank: int | None = None


def check_checkpoint(model: str, has_unknown: bool = False) -> Seen:
    """Reads the headers of a checkpoint's files, nothing else; with MOQEXT_VLLM_CHECK=0 nothing at all.

    Args:
        model: its directory; of a name of the Hub, and of files of other kinds, nothing is known.
        has_unknown: whether vLLM may run layers of algorithms that moqext does not know.

    Raises:
        CheckpointError: with them a layer would be wrong.
        UnsupportedQuantization: low-rank pairs have several ranks.
        ConfigError: the configuration cannot be understood.
    """
    if os.environ.get("MOQEXT_VLLM_CHECK") == "0" or not Path(model).is_dir():
        return Seen()
    try:
        with _without_collections(), Checkpoint(model) as checkpoint:
            if not checkpoint.tensors:
                return Seen()
            findings = checkpoint.findings(values=False)
            problems = (*checkpoint.file_problems, *findings.all_problems())
    except ConfigError as error:
        if not has_unknown:
            raise
        logger.warning("%s: headers are not looked at: %s", model, error)
        return Seen()
    layers = findings.layers
    _refuse_other_orders(model, layers)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        lines = [
            f"{problem.code}: {' '.join(part for part in (problem.layer, problem.message) if part)}"
            for problem in errors[:SHOWN]
        ]
        more = [f"and {len(errors) - SHOWN} more (moqext inspect tells all)"] if len(errors) > SHOWN else []
        raise CheckpointError("\n  ".join([f"{len(errors)} errors:", *lines, *more]), file=model)
    warnings = Counter(problem.code for problem in problems if problem.severity == "warning")
    if warnings:
        told = ", ".join(f"{code} × {count}" for code, count in sorted(warnings.items()))
        logger.warning("%s: %s; moqext inspect tells where", model, told)
    stored = tuple(
        Stored(layer.name, layer.kind, layer.quant_algo, layer.shape)
        for layer in layers
        if not any(part.isdigit() for part in layer.name.split("."))
    )
    return Seen(stored, _find_rank(layers))


def _find_rank(layers: Iterable[LayerRecord]) -> int | None:
    """The rank that all low-rank pairs have, None where there are none."""
    first: dict[int, str] = {}
    for layer in layers:
        if layer.rank is not None:
            first.setdefault(layer.rank, layer.name)
    if len(first) > 1:
        told = " and ".join(f"{rank} ({name})" for rank, name in sorted(first.items())[:2])
        raise UnsupportedQuantization(f"low-rank pairs: expected one rank in all layers, got {told}")
    return next(iter(first), None)


def _refuse_other_orders(model: str, layers: Iterable[LayerRecord]) -> None:
    """Raises for layers whose headers tell another order of block scales or nibbles than vLLM hands over."""
    other = [layer for layer in layers if not layer.is_plain]
    if other:
        raise CheckpointError(
            f"{other[0].name} is stored as {other[0].stored_form} ({len(other)} layers are), and vLLM hands "
            "scales and codes over as they are stored; `python -m moqext convert` writes plain weights",
            file=model,
        )


def is_unquantized_head(layer: Any, name: str, stored: Iterable[Stored] | None) -> bool:
    """Whether a checkpoint stores no quantized linear that an output head of vLLM's may be.

    Heads have other names in files than in vLLM (`embed_out`), or none in vLLM, so that no rule of a
    configuration tells; their sizes do.

    Args:
        layer: the head.
        name: its name in vLLM's model.
        stored: of `check_checkpoint`.
    """
    if stored is None or any(part.isdigit() for part in name.split(".")):
        return False
    rows = {layer.num_embeddings, layer.org_vocab_size}
    return not any(
        record.kind == "linear" and record.shape[0] in rows and record.shape[1] == layer.embedding_dim
        for record in stored
    )


def refuse_stored_table(layer: Any, prefix: str, stored: Iterable[Stored] | None) -> None:
    """Raises for an embedding that a checkpoint stores quantized: vLLM would take its codes for numbers.

    Args:
        layer: what is no linear and no experts.
        prefix: its name in vLLM's model.
        stored: of `check_checkpoint`.

    Raises:
        UnsupportedQuantization: it is such a table.
    """
    width = getattr(layer, "embedding_dim", None)
    for record in stored or ():
        if record.kind == "embedding" and width == record.shape[1]:
            raise UnsupportedQuantization(
                f"{prefix or record.name}: an embedding in {record.quant_algo}, which is looked up and not "
                "multiplied, runs neither in moqext nor in vLLM"
            )


@contextmanager
def _without_collections() -> Iterator[None]:
    """Has Python not look for garbage among 100,000 new objects of which none is: a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

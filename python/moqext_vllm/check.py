"""What is wrong with a checkpoint as a whole, told by the headers of its files before vLLM loads anything.

The methods of layers see what reaches them, one layer after the other; a file that is missing, or a scale
that was lost, is seen here first, with its name and all the others.
"""

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moqext import Checkpoint, CheckpointError

logger = logging.getLogger("vllm.moqext")

SHOWN = 10
"""Problems that an error tells; the rest are counted."""


def check_checkpoint(model: str) -> None:
    """Reads the headers of a checkpoint's files, nothing else; with MOQEXT_VLLM_CHECK=0 nothing at all.

    Args:
        model: its directory; of a name of the Hub, and of files of other kinds, nothing is known.

    Raises:
        CheckpointError: with them a layer would be wrong, or there is no way to run it.
    """
    if os.environ.get("MOQEXT_VLLM_CHECK") == "0" or not Path(model).is_dir():
        return
    with _without_collections(), Checkpoint(model) as checkpoint:
        if not checkpoint.tensors:
            return
        findings = checkpoint.findings(values=False)
        problems = (*checkpoint.file_problems, *findings.all_problems())
    other = [layer for layer in findings.layers if not layer.is_plain]
    if other:
        raise CheckpointError(
            f"{other[0].name} is stored as {other[0].stored_form} ({len(other)} layers are), and vLLM hands "
            "scales and codes over as they are stored; `python -m moqext convert` writes plain weights",
            file=model,
        )
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

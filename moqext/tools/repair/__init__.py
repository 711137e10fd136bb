"""A damaged checkpoint written again whole: `Checkpoint.plan_repair`.

Findings drive it: each rule ends the findings of some codes where the files tell what is meant, and says so.
Nothing else is changed; tensors stay in their files, byte for byte. The result is read again before it takes
its place: a finding that should have ended and did not, or a new error, refuses it.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moqext.errors import CheckpointError
from moqext.reader.checkpoint_reader import CheckpointReader, Progress
from moqext.reader.files.tensor_files import SINGLE_FILES
from moqext.reader.formats.layouts import ScaleLayout
from moqext.reader.problems import Problem
from moqext.tools.convert.assemble import Files, assemble, files_beside
from moqext.tools.convert.files import INDEX_FILE
from moqext.tools.convert.jobs import Job
from moqext.tools.convert.unread import take_in_unread
from moqext.tools.repair.algorithms import repair_algorithms
from moqext.tools.repair.cache_names import repair_cache_names
from moqext.tools.repair.draft import Change, Draft
from moqext.tools.repair.exclusions import repair_exclusions
from moqext.tools.repair.file_places import find_misplaced, repair_files
from moqext.tools.repair.inner_state import repair_inner_state
from moqext.tools.repair.orders import repair_orders
from moqext.tools.repair.scale_names import drop_repeated, repair_scale_names
from moqext.tools.repair.scale_values import NanBlocks, repair_zero_layers

__all__ = ["Change", "NanBlocks", "Repair", "RepairPlan", "plan_repair"]


@dataclass(frozen=True, slots=True)
class Repair:
    """The result of a repair.

    Attributes:
        directory: where.
        files: names of the safetensors files.
        tensors: number of tensors.
        bytes_written: of tensors.
        seconds: wall time of reading and writing them.
        notes: what was left out, in sentences.
    """

    directory: str
    files: tuple[str, ...]
    tensors: int
    bytes_written: int
    seconds: float
    notes: tuple[str, ...]


class RepairPlan:
    """All that a repair changes, before anything is written; made by `Checkpoint.plan_repair`.

    Attributes:
        changes: every change, with the code of the problem that it ends.
        left: problems that stay, with the reason where a repair was tried; notes only where one was.
    """

    def __init__(self, draft: Draft, solved: frozenset[Problem]) -> None:
        """See `plan_repair`."""
        self._draft = draft
        self._solved = solved
        self.changes: tuple[Change, ...] = tuple(draft.changes)
        self.left: tuple[tuple[Problem, str], ...] = tuple(
            (problem, draft.reasons.get(problem, ""))
            for problem in draft.unsolved()
            if problem.severity != "note" or problem in draft.reasons
        )

    @property
    def errors(self) -> tuple[tuple[Problem, str], ...]:
        """The errors among what is left, with which nothing is written."""
        return tuple(each for each in self.left if each[0].severity == "error")

    def write(
        self,
        out: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> Repair:
        """Writes the repaired checkpoint. Memory holds a piece of a tensor at a time.

        Args:
            out: the directory to write to, made if it is not there.
            overwrite: whether a checkpoint that is in `out` may be replaced; other files there stay.
            progress: called as progress(bytes written, bytes in all, name of the tensor).

        Raises:
            CheckpointError: there is nothing to repair; an error is left that the data cannot decide; too
                little room; an `out` that is not empty, is no directory, has files of this checkpoint, lies
                in it or around it, or is being written to. Then `out` has what was in it.
            OSError: it cannot be written.
        """
        checkpoint, draft = self._draft.checkpoint, self._draft
        if self.errors:
            raise CheckpointError(_refusal(self.errors), file=checkpoint.directory)
        if not self.changes:
            raise CheckpointError("nothing to repair", file=checkpoint.directory)
        shards, metadata = _shards(draft)
        documents, copied = draft.documents.written(), draft.documents.copied()
        others, notes = files_beside(checkpoint)
        index = _index_name(checkpoint, len(shards))
        files = Files(shards, index, documents, copied | others, metadata)
        written = assemble(checkpoint, out, files, overwrite=overwrite, progress=progress, check=self._check)
        tensors = sum(len(job.tensors) for jobs in shards.values() for job in jobs)
        return Repair(os.fspath(out), tuple(shards), tensors, written.nbytes, written.seconds, tuple(notes))

    def _check(self, folder: Path) -> None:
        """Reads what was written, and refuses it where a finding has not ended or an error has come."""
        said = self._draft.checkpoint.scale_layout
        told: ScaleLayout | None = "linear" if said == "linear" else None
        with CheckpointReader(folder, scale_layout=told) as repaired:
            findings = repaired.findings(block_scales=True)
            problems = (*repaired.file_problems, *findings.all_problems())
        ended = {_identity(problem) for problem in self._solved}
        wrong = [each for each in problems if each.severity == "error" or _identity(each) in ended]
        if wrong:
            message = f"still wrong after the repair: {_sentence(wrong[0])}"
            raise CheckpointError(message, file=self._draft.checkpoint.directory)


def plan_repair(checkpoint: CheckpointReader, *, nan_blocks: Literal["keep", "zero"] = "keep") -> RepairPlan:
    """See `Checkpoint.plan_repair`."""
    if nan_blocks not in ("keep", "zero"):
        raise ValueError(f"nan_blocks: expected 'keep' or 'zero', got {nan_blocks!r}")
    if checkpoint.file is not None:
        message = f"cannot be repaired alone; give its directory, {checkpoint.directory}"
        raise CheckpointError(message, file=checkpoint.file)
    if checkpoint.headers_only or not checkpoint.files.has_weights:
        raise CheckpointError("nothing to repair: no safetensors files", file=checkpoint.directory)
    checkpoint, _ = take_in_unread(find_misplaced(checkpoint))
    problems = [*checkpoint.file_problems, *checkpoint.findings(block_scales=True).all_problems()]
    draft = Draft(checkpoint, problems)
    rules: tuple[Callable[[Draft], None], ...] = (
        repair_files,
        repair_orders,
        repair_inner_state,
        repair_cache_names,
        drop_repeated,
        repair_scale_names,
        repair_zero_layers,
        NanBlocks(nan_blocks).repair,
        repair_algorithms,
        repair_exclusions,
    )
    for rule in rules:
        rule(draft)
    return RepairPlan(draft, frozenset(problems) - frozenset(draft.unsolved()))


def _shards(draft: Draft) -> tuple[dict[str, list[Job]], dict[str, Mapping[str, str]]]:
    """The jobs of each file, which has its name in the source, and the text entries of their headers.

    Of several files none may be called as a single one is: readers would take it for all.
    """
    checkpoint = draft.checkpoint
    jobs: dict[Path, list[Job]] = {}
    for output in (*draft.outputs.values(), *draft.copies):
        jobs.setdefault(output.beside.file, []).append(output.job(checkpoint))
    names = {path: path.relative_to(checkpoint.directory).as_posix() for path in jobs}
    if len(names) > 1 and not SINGLE_FILES.isdisjoint(names.values()):
        count = len(names)
        names = {path: f"model-{number:05}-of-{count:05}.safetensors" for number, path in enumerate(names, 1)}
    metadata = {names[path]: checkpoint.files.metadata.get(path, {}) for path in jobs}
    return (
        {names[path]: each for path, each in jobs.items()},
        {name: texts for name, texts in metadata.items() if texts},
    )


def _index_name(checkpoint: CheckpointReader, files: int) -> str | None:
    if checkpoint.files.index is not None:
        return checkpoint.files.index.name
    return INDEX_FILE if files > 1 else None


def _identity(problem: Problem) -> tuple[str, str | None, str | None, str]:
    told = problem.message if problem.layer is problem.tensor is None else ""
    return problem.code, problem.layer, problem.tensor, told


def _refusal(errors: tuple[tuple[Problem, str], ...]) -> str:
    problem, reason = errors[0]
    others = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"cannot be repaired: {_sentence(problem)}{f'; {reason}' if reason else ''}{others}"


def _sentence(problem: Problem) -> str:
    where = problem.layer or problem.tensor
    return f"{where}: {problem.code}: {problem.message}" if where else f"{problem.code}: {problem.message}"

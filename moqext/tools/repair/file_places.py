"""Findings about the files themselves, which end when all tensors are written with a new index."""

from pathlib import Path

from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.files.tensor_header import read_header
from moqext.reader.problems import Problem
from moqext.tools.repair.draft import Draft

_ALWAYS = {
    "hole": "written without it",
    "duplicate_tensor": "the one that the index names is written, the other is not",
    "unindexed_tensor": "named by the new index",
    "index_ignored": "the index that is not read is left out",
}
"""Code -> the change that writing the files anew makes."""


def find_misplaced(checkpoint: CheckpointReader) -> CheckpointReader:
    """The checkpoint with tensors that its index looks for in one file, and that one other has."""
    files = checkpoint.files
    wanted = set(files.absent)
    if not wanted:
        return checkpoint
    headers = {path: read_header(path) for path in files.files}
    places: dict[str, list[Path]] = {}
    for path, header in headers.items():
        for name in wanted & header.tensors.keys():
            places.setdefault(name, []).append(path)
    for path, header in headers.items():
        if names := [name for name, having in places.items() if having == [path]]:
            files = files.with_file(path, header, names)
    return checkpoint.with_files(files)


def repair_files(draft: Draft) -> None:
    """Ends what is wrong with places of tensors; tensors that no file has are not made up."""
    misplaced = {problem.tensor for problem in draft.unsolved("missing_tensor")}
    for problem in draft.unsolved(*_ALWAYS):
        subject = problem.tensor if problem.tensor is not None else _file(problem)
        only = problem.code == "duplicate_tensor" and problem.tensor in misplaced
        draft.solve(problem, "the only one is written" if only else _ALWAYS[problem.code], subject)
    for problem in draft.unsolved("missing_tensor"):
        if (info := draft.checkpoint.tensors.get(problem.tensor or "")) is not None:
            draft.solve(problem, f"the new index names {info.file.name}, which has it")
        else:
            draft.refuse(problem, "none of the other files has it, or two of them have")
    _take_in(draft)


def _take_in(draft: Draft) -> None:
    """Ends the findings about files that were not read, where all that they alone have is written now."""
    files = draft.checkpoint.files
    for problem, (path, names) in zip(draft.unsolved("unread_tensors"), files.lost.items(), strict=True):
        inside = [name for name in names if name in files.tensors]
        if len(inside) == len(names):
            draft.solve(problem, f"named by the new index, {len(names):,} tensors", path.name)
        else:
            lost = next(name for name in names if name not in files.tensors)
            reason = (
                f"{lost} is of a module that the other files have: which of the two is meant, nothing tells"
            )
            draft.refuse(problem, reason)


def _file(problem: Problem) -> str:
    """The file that a message begins with."""
    return problem.message.split(":")[0].split(" ")[0]

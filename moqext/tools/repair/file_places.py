"""Findings about the files themselves, which end when all tensors are written with a new index."""

from moqext.reader.problems import Problem
from moqext.tools.repair.draft import Draft

_ALWAYS = {
    "hole": "written without it",
    "duplicate_tensor": "the one that the index names is written, the other is not",
    "unindexed_tensor": "named by the new index",
    "index_ignored": "the index that is not read is left out",
}
"""Code -> the change that writing the files anew makes."""


def repair_files(draft: Draft) -> None:
    """Ends what is wrong with places of tensors; tensors that no file has are not made up."""
    for problem in draft.unsolved(*_ALWAYS):
        subject = problem.tensor if problem.tensor is not None else _file(problem)
        draft.solve(problem, _ALWAYS[problem.code], subject)
    for problem in draft.unsolved("missing_tensor"):
        if (info := draft.checkpoint.tensors.get(problem.tensor or "")) is not None:
            draft.solve(problem, f"the new index names {info.file.name}, which has it")
        else:
            draft.refuse(problem, "no file has it")
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

"""Cache scales under names of earlier exporters and other tools, written under ModelOpt's."""

from moqext.reader.problems import Problem
from moqext.reader.records import KVRecord
from moqext.tools.repair.draft import Draft

_NAMES = {"k_scale": "k_proj.k_scale", "v_scale": "v_proj.v_scale", "q_scale": "q_scale"}
"""Role -> the name below the attention."""


def repair_cache_names(draft: Draft) -> None:
    """Renames the scales; one that stands for keys and values is written twice."""
    records = {record.name: record for record in draft.checkpoint.kv_scales()}
    for problem in draft.unsolved("old_kv_scale_name"):
        _rename(draft, problem, records[problem.layer or ""])


def _rename(draft: Draft, problem: Problem, record: KVRecord) -> None:
    tensor = problem.tensor or ""
    names = [f"{record.name}.{_NAMES[role]}" for role, each in record.tensors.items() if each == tensor]
    if not names:  # another tensor has its role, and counts
        draft.drop(tensor)
        draft.solve(problem, "left out: another tensor has its role", tensor)
        return
    first, *rest = names
    if draft.rename(tensor, first) and all(draft.copy(tensor, name) for name in rest):
        draft.solve(problem, f"written as {' and '.join(names)}", tensor)
    else:
        draft.refuse(problem, f"one of {', '.join(names)} is there as well")

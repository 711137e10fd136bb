"""Scales of weights under names of other producers, and scales that are there twice."""

from moqext.reader.config.quant_config import QuantConfig
from moqext.tools.repair.draft import Draft

_SPELLED = ("weight_scale_inv", "scale_weight", "scale")


def drop_repeated(draft: Draft) -> None:
    """Leaves out the second of two tensors with one role and one value."""
    for problem in draft.unsolved("repeated_scale"):
        tensor = problem.tensor or ""
        if tensor in draft.outputs and draft.outputs[tensor].name == tensor:
            draft.drop(tensor)
        draft.solve(problem, f"written once: {problem.message}", tensor)


def repair_scale_names(draft: Draft) -> None:
    """Gives weight scales ModelOpt's name, and square blocks of a linear its shape, [rows, 1, columns, 1]."""
    for problem in draft.unsolved("foreign_scale_name"):
        tensor = problem.tensor or ""
        if (why := _keeps_names(draft.checkpoint.config)) is not None:
            draft.refuse(problem, why)
            continue
        name = _usual_name(tensor)
        record, _ = draft.records[tensor]
        shape = draft.outputs[tensor].shape
        if record.quant_algo == "FP8_PB_WO" and len(shape) == len(record.shape) == 2:
            shape = (shape[0], 1, shape[1], 1)
        if draft.rename(tensor, name, shape):
            reshaped = f", as {list(shape)}" if len(shape) == 4 else ""
            draft.solve(problem, f"named {name}{reshaped}", tensor)
        else:
            draft.refuse(problem, f"there is a {name} as well")


def _keeps_names(config: QuantConfig | None) -> str | None:
    """Why the names stay, as of readers that expect them; None where ModelOpt's are expected."""
    if config is None:
        return "no configuration says that engines will look for ModelOpt's names"
    method = config.quant_method
    if method is None or method.startswith("modelopt"):
        return None
    return f"quant_method {method} has that name"


def _usual_name(tensor: str) -> str:
    """ModelOpt's name of a weight scale: joined by a dot, or in a stack of experts by an underscore."""
    stem = next(tensor.removesuffix(spelled) for spelled in _SPELLED if tensor.endswith(spelled))
    return f"{stem}weight_scale"

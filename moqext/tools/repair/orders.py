"""Block scales in the order of cuBLAS, and codes with exchanged nibbles, written in ModelOpt's order."""

from moqext.tools.repair.draft import Draft

_RELAID = {
    "swizzled_scales": "block scales written row by row",
    "exchanged_nibbles": "codes written with the even column in the low half of a byte",
}


def repair_orders(draft: Draft) -> None:
    """Writes scales and codes in plain order, but for weights whose markers tell readers otherwise."""
    layouts = draft.checkpoint.layouts
    of_scale = {layout.scale: layout for layout in layouts.values()}
    of_weight = {layout.weight: layout for layout in layouts.values()}
    for problem in draft.unsolved(*_RELAID):
        tensor = problem.tensor or ""
        layout = of_scale.get(tensor) or of_weight[tensor]
        if layout.is_marked:
            draft.refuse(problem, "a marker beside it tells readers so: for ComfyUI it is right as it is")
            continue
        draft.relay(tensor)
        draft.solve(problem, _RELAID[problem.code], tensor)
    for problem in draft.unsolved("doubtful_scale_layout"):
        draft.refuse(problem, "with that option a repair writes them row by row")

"""`torch.ops.moqext.add_rms_norm_linear`: a norm and the FP8 linear behind it as one operation.

For graphs that torch.compile made, in which the two stand behind each other and nobody else reads what is
between them: the norm then writes the codes that the linear would make, and no values. A graph has one
operation for any number of tokens, and few of them a linear quantizes itself; so what runs is decided call by
call. y and z are those of `add_rms_norm` and `linear`.
"""

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch

from moqext import ops
from moqext_torch.op import register_autograd, run_linear

FEW_TOKENS = 4
"""Up to so many are quantized by the linear's own kernel; with more it takes 1 to 2 us longer than with codes
(H200, docs/lab/pdl.md)."""

STRIDES = "eager_input_vals"
"""Name of the attribute from which Inductor learns the strides of a traced operation."""
NAMES = tuple(argument.name for argument in torch.ops.moqext.linear.default._schema.arguments)
"""Arguments of `torch.ops.moqext.linear`."""

torch.library.define(
    "moqext::add_rms_norm_linear",
    "(Tensor x, Tensor residual, Tensor norm_weight, float eps, Tensor weight, Tensor? weight_scale, "
    "Tensor? output_scale, Tensor input_scale, Tensor? bias, int[] out_partitions, bool one_input_scale, "
    "str compute, bool fast_accum) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("moqext::add_rms_norm_linear", ("cpu", "cuda"))
def _run(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    input_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_partitions: list[int],
    one_input_scale: bool,
    compute: str,
    fast_accum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, residual, norm_weight = x.detach(), residual.detach(), norm_weight.detach()
    out_dtype: torch.dtype | None = None
    if x.numel() <= FEW_TOKENS * x.shape[-1]:
        rows, z = ops.rms_norm(rows, norm_weight, eps, residual=residual)
    else:
        out_dtype, scale = x.dtype, input_scale.detach().view(-1)[:1]
        rows, _, z = ops.rms_norm_quantize(
            rows, norm_weight, eps, "fp8_tensor", residual=residual, scale=scale
        )
    y = run_linear(
        rows,
        weight,
        weight_scale,
        output_scale,
        input_scale,
        None,
        None,
        bias,
        "FP8",
        out_partitions,
        None,
        compute,
        one_input_scale,
        out_dtype,
        fast_accum,
    )
    return y, z


@torch.library.register_fake("moqext::add_rms_norm_linear")
def _shapes(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out_partitions = rest[8]
    return x.new_empty((*x.shape[:-1], sum(out_partitions))), x.new_empty(x.shape)


register_autograd("add_rms_norm_linear")


def join_norms(graph: torch.fx.Graph) -> int:
    """Puts the operation in the place of each pair of a norm and a linear that it can stand for.

    These are linears in FP8 with one `input_scale` that alone read what the norm makes.

    Args:
        graph: of functional operations, as torch.compile hands them to passes; it is changed.

    Returns:
        How many pairs there were.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    linears = graph.find_nodes(op="call_function", target=torch.ops.moqext.linear.default)
    return sum(_join(graph, linear, order) for linear in linears)


def _join(graph: torch.fx.Graph, linear: torch.fx.Node, order: Mapping[torch.fx.Node, int]) -> bool:
    """Joins a linear with the norm in front of it, where there is one that fits."""
    options = _options(linear)
    value = linear.args[0]
    if options is None or not isinstance(value, torch.fx.Node) or value.target is not getitem:
        return False
    norm = value.args[0]
    if not isinstance(norm, torch.fx.Node) or norm.target is not torch.ops.moqext.add_rms_norm.default:
        return False
    sums = [node for node in norm.users if node is not value]
    if value.args[1] != 0 or len(value.users) != 1 or any(node.target is not getitem for node in sums):
        return False
    if any(order[user] < order[linear] for node in sums for user in node.users):
        return False  # the sum is read before the linear runs, which makes both here
    with graph.inserting_before(linear):
        pair = graph.call_function(torch.ops.moqext.add_rms_norm_linear.default, (*norm.args, *options))
        y, z = (graph.call_function(getitem, (pair, index)) for index in (0, 1))
    made, total = linear.meta.get("val"), norm.meta.get("val", (None, None))[1]
    for node, what in ((pair, (made, total)), (y, made), (z, total)):
        node.meta = {"val": what, "stack_trace": linear.meta.get("stack_trace")}
    seen = [node.meta.get(STRIDES) for node in (norm, linear)]
    if None not in seen:
        of_norm, of_linear = seen
        pair.meta[STRIDES] = ((*of_norm[0], *_selected(*of_linear)), {})
    linear.replace_all_uses_with(y)
    for node in sums:
        node.replace_all_uses_with(z)
    for node in (linear, value, *sums, norm):
        graph.erase_node(node)
    return True


def _options(linear: torch.fx.Node) -> tuple[Any, ...] | None:
    """The arguments of a linear that the operation takes over, None where it cannot stand for the linear."""
    given = dict(zip(NAMES, linear.args, strict=False)) | linear.kwargs
    partitions, one_scale = given["out_partitions"], given["one_input_scale"]
    if given["quant_algo"] != "FP8" or given["input_scale"] is None or given.get("out_dtype") is not None:
        return None
    if (len(partitions) > 1 and not one_scale) or given.get("batch_invariant"):
        return None
    return _selected(linear.args, linear.kwargs)


def _selected(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Picks the arguments of a linear that the operation has."""
    given = dict(zip(NAMES, args, strict=False)) | kwargs
    tensors = (given["weight"], given["weight_scale"], given["output_scale"], given["input_scale"])
    partitions, one_scale = given["out_partitions"], given["one_input_scale"]
    fast_accum = given.get("fast_accum", False)
    return (*tensors, given["bias"], partitions, one_scale, given["compute"], fast_accum)

"""The weights that a layer stands for: vLLM asks for them to quantize anew, and for those of MLA."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moqext import LayerQuant, ops
from moqext.algorithms import ALGORITHMS
from moqext_vllm.parameters import slots


def linear_weight(
    given: Mapping[str, torch.Tensor], quant: LayerQuant, partitions: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight of fused layers, [rows, columns], of what a checkpoint holds.

    `pre_quant_scale` and low-rank pairs are in it.

    Args:
        given: tensors by their names in the checkpoint.
        quant: how they are quantized.
        partitions: rows of each layer that is fused.
        dtype: of the result.
    """
    roles = [role for role in ("weight", "weight_scale", "weight_scale_2") if role in given]
    parts = zip(*(slots(given[role].cpu(), partitions) for role in roles), strict=True)
    found = [_dequantize(quant, *part) for part in parts]
    if "lora_b" in given:
        pairs = (slots(given[role].cpu(), partitions, role) for role in ("lora_b", "lora_a"))
        found = [part + b @ a for part, b, a in zip(found, *pairs, strict=True)]
    weight = torch.cat(found)
    return _finish(weight, given.get("pre_quant_scale"), given["weight"].device, dtype)


def expert_weights(
    given: Mapping[str, torch.Tensor], quant: LayerQuant, gated: bool, interleaved: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of experts, rows as they are stored: w13 [experts, rows, columns], and w2.

    Args:
        given: stacks by their names in the layer.
        quant: how they are quantized.
        gated: whether w13 has rows of gate and of up.
        interleaved: whether those take turns.
        dtype: of the results.
    """
    found = []
    by_row = ALGORITHMS[str(quant.quant_algo)].codes in ("int4", "int8")
    wanted = ("weight", "weight_scale") if by_row else ("weight", "weight_scale", "weight_scale_2")
    for name in ("w13", "w2"):
        roles = [role for role in wanted if f"{name}_{role}" in given]
        stacks = [given[f"{name}_{role}"].cpu() for role in roles]
        if name == "w13" and gated and not by_row:
            halves = [
                _dequantize(quant, *half) for half in zip(*map(_halves(interleaved), stacks), strict=True)
            ]
            weight = torch.stack(halves, 2).flatten(1, 2) if interleaved else torch.cat(halves, 1)
        else:
            weight = _dequantize(quant, *stacks)
        factor = given.get(f"{name}_pre_quant_scale")
        factor = None if factor is None else factor[:, None]
        found.append(_finish(weight, factor, given[f"{name}_weight"].device, dtype))
    return found[0], found[1]


def is_identity(x: torch.Tensor, columns: int) -> bool:
    """Whether x is the identity matrix of so many columns."""
    if x.shape != (columns, columns):
        return False
    return bool(torch.equal(x, torch.eye(columns, dtype=x.dtype, device=x.device)))


def _halves(interleaved: bool) -> Any:
    """A function that tells gate from up in a stack of w13; of scales that both have, each gets them."""

    def split(stack: torch.Tensor) -> Sequence[torch.Tensor]:
        if stack.dim() == 1:
            return stack, stack
        if stack.dim() == 2 and stack.shape[1] == 2:
            return stack[:, 0], stack[:, 1]
        return (stack[:, 0::2], stack[:, 1::2]) if interleaved else stack.chunk(2, 1)

    return split


def _dequantize(quant: LayerQuant, weight: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    named = {}
    for name, scale in zip(("weight_scale", "weight_scale_2")[: len(scales)], scales, strict=True):
        if weight.dim() == 3 and scale.dim() == 2:  # one of an expert, or one of each of its rows
            scale = scale.flatten() if scale.shape[1] == 1 else scale[:, :, None]
        named[name] = scale.contiguous()
    found = ops.dequantize(weight.contiguous(), str(quant.quant_algo), group_size=quant.group_size, **named)
    assert isinstance(found, torch.Tensor)  # of the framework of the weight
    return found


def _finish(
    weight: torch.Tensor, factor: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    weight = weight if factor is None else weight * factor.cpu().float()
    return weight.to(dtype).to(device)

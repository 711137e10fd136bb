"""Quantized linears whose weight a model reads by itself, past the call.

Some look at the dtype before they call a linear (T5, the indexer of DeepSeek-V3.2), some multiply with the
weight themselves (Mamba). They find a weight in the dtype of activations, dequantized when it is used.
"""

import ast
import inspect
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from moqext import ops
from moqext_torch import QuantLinear
from moqext_torch.op import LOW_RANK


class ReadableLinear(QuantLinear):
    """A quantized linear whose `weight`, once it is prepared, is the dequantized one."""

    @property
    def weight(self) -> Any:
        """A `DequantizedWeight` [out, in]; codes before preparation, for those who load them."""
        codes = self._parameters.get("weight")
        if codes is None:
            raise AttributeError("weight")
        return _readable(self) if self.is_prepared else codes

    def _held(self, name: str) -> Any:
        return self._parameters.get(name) if name == "weight" else super()._held(name)


class DequantizedWeight(torch.Tensor):
    """The weight of a quantized linear as a tensor, dequantized anew by each operation that uses it.

    Dtype, shape and device are there without that.
    """

    @staticmethod
    def __new__(cls, linear: QuantLinear) -> "DequantizedWeight":
        """A tensor without memory of its own."""
        made: DequantizedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            (linear.out_features, linear.in_features),
            dtype=linear.dtype,
            device=linear._codes.device,
        )
        return made

    def __init__(self, linear: QuantLinear) -> None:
        self._linear = linear

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation with the values.

        Raises:
            RuntimeError: it would change them, which the codes cannot follow.
        """
        kwargs = kwargs or {}
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(given.get(argument.name), cls):
                raise RuntimeError(
                    f"{func}: the model changes the weight of a quantized linear in place, which "
                    "codes cannot follow; `python -m moqext convert DIR OUT --to bf16` makes plain ones"
                )
        args, kwargs = tree_map_only(cls, lambda weight: dequantized(weight._linear), (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DequantizedWeight({list(self.shape)}, {self.dtype}, {self._linear.quant_algo})"


@torch.compiler.disable
def _readable(linear: QuantLinear) -> DequantizedWeight:
    """The weight, made outside of graphs: torch.compile splits them where a model reads one."""
    return DequantizedWeight(linear)


@torch.compiler.disable
def dequantized(linear: QuantLinear) -> torch.Tensor:
    """The weight that the linear multiplies x with, [out, in] in the dtype of its activations.

    Raises:
        RuntimeError: its codes are folded for good; see `QuantLinear.stored_tensors`.
    """
    stored = linear.stored_tensors()
    stored.pop("bias", None)
    stored.pop("input_scale", None)
    factors = stored.pop("pre_quant_scale", None)
    pair = [stored.pop(role, None) for role in LOW_RANK]
    codes = stored.pop("weight")
    scales = {role: tensor.cpu() for role, tensor in stored.items()}
    if len(linear.out_partitions) > 1:  # FP8 with a scale for each part
        rows = torch.tensor(linear.out_partitions)
        scales["weight_scale"] = scales["weight_scale"].reshape(-1).expand(len(rows)).repeat_interleave(rows)
    weight = torch.empty(linear.out_features, linear.in_features)
    ops.dequantize(codes.cpu(), linear.quant_algo, **scales, group_size=linear.group_size, out=weight)
    if pair[0] is not None:
        weight += _product_of_pairs(*pair, linear.out_partitions)
    if factors is not None:
        weight *= factors.cpu().reshape(-1)
    return weight.to(codes.device, linear.dtype)


def _product_of_pairs(a: torch.Tensor, b: torch.Tensor, partitions: Sequence[int]) -> torch.Tensor:
    """The weight that low-rank pairs stand for, [out, in]: the rows of each part by its own pair."""
    ranks = a.cpu().split(b.shape[1])
    return torch.cat([rows @ own for rows, own in zip(b.cpu().split(list(partitions)), ranks, strict=True)])


def make_readable(model: torch.nn.Module) -> None:
    """Turns the quantized linears whose weight the code of a model reads into `ReadableLinear`s."""
    classes = {type(module) for module in model.modules()}
    names = frozenset[str]().union(*(_weights_read_by(each) for each in classes))
    for name, module in model.named_modules():
        if type(module) is QuantLinear and name.rpartition(".")[2] in names:
            module.__class__ = ReadableLinear


@cache
def _weights_read_by(kind: type) -> frozenset[str]:
    """The names of modules whose `weight` the text of a class asks for, initialization aside."""
    if kind.__module__.startswith(("torch.", "moqext_torch", "moqext_transformers")):
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    found = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name == "_init_weights":
            continue
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "weight"
                and isinstance(node.value, ast.Attribute)
            ):
                found.add(node.value.attr)
    return frozenset(found)

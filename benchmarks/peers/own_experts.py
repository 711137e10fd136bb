"""moqext's layer of experts on stacks that somebody else quantized, as a harness of others' kernels calls it.

Libraries that ship kernels for experts have their own harnesses, with their own weights; what is wanted of
moqext there is a function of tokens, router weights and experts' numbers that returns a new result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moqext import MoEMethod
from moqext.ops.spelling import Compute


class Shape(NamedTuple):
    """Sizes of a layer of experts.

    Attributes:
        experts: All of them.
        top_k: Of a token.
        hidden: Columns of x.
        intermediate: Rows of a gate.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int


class OwnExperts:
    """A layer, prepared at its first call.

    Args:
        quant_algo: As for `MoEMethod`, like `compute`.
        shape: Of the layer.
        stacks: Returns the tensors of a checkpoint by name. It is asked at the first call: static scales of
            activations may be set after the layer is made.
        compute: What is multiplied.
    """

    def __init__(
        self,
        quant_algo: str,
        shape: Shape,
        stacks: Callable[[], Mapping[str, Any]],
        compute: Compute = "exact",
    ) -> None:
        self._about = quant_algo, shape, compute
        self._stacks = stacks
        self._ready: tuple[MoEMethod, Mapping[str, Any]] | None = None

    def kernel(self, tokens: int) -> str:
        """The name of the kernel for so many tokens."""
        return self._prepared()[0].backend_for(tokens)

    def __call__(self, x: Any, weights: Any, ids: Any, tokens: int) -> Any:
        """A new result for x, bfloat16 [tokens, hidden]."""
        method, params = self._prepared()
        assert tokens == len(x)
        return method(x, params, weights, ids)

    def _prepared(self) -> tuple[MoEMethod, Mapping[str, Any]]:
        if self._ready is None:
            stacks = self._stacks()
            quant_algo, shape, compute = self._about
            method = MoEMethod(
                quant_algo,
                shape.experts,
                shape.hidden,
                shape.intermediate,
                top_k=shape.top_k,
                device=str(stacks["w2_weight"].device),
                compute=compute,
            )
            self._ready = method, method.prepare(stacks)
        return self._ready

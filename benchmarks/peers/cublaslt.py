"""cuBLASLt with its eight likeliest algorithms timed, behind moqext's quantization of x.

moqext calls the library and finds the candidates; `LinearMethod.tune` times them for a number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.layers import ALGOS, Layer
from benchmarks.peers import Bound
from benchmarks.peers.own import Own, bound
from moqext.layers.linear import LinearMethod

KERNEL = "cuda:cublaslt"
LEAST_TOKENS = 33
"""Below, cuBLASLt's first choice stands for it (torch): tuning takes its time."""


class Tuned(Own):
    """The library's kernel, tuned before it is bound."""

    def missing(self) -> str | None:
        if not hasattr(LinearMethod, "tune"):
            return "this moqext does not tune"
        return super().missing()

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        if len(x) < LEAST_TOKENS:
            raise ValueError(f"not tuned for fewer than {LEAST_TOKENS} tokens")
        method = self.method(layer)
        out = x.new_empty(len(x), layer.shape[0])
        method.tune([len(x)], weights[0])
        return bound(method, x, out)


PEERS = [Tuned("cuBLASLt, best of 8", algo, {"MOQEXT_KERNEL": KERNEL}) for algo in ALGOS]

"""moqext itself, through its public methods: as its plan chooses, or one kernel by name.

A process with MOQEXT_PDL=0 measures it without dependent launch, under another name: the variable is read
once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.layers import ALGOS, NVFP4_ALGOS, Layer, method_arguments
from benchmarks.peers import Bound
from moqext.layers.linear import LinearMethod

NAME = "moqext"
WITHOUT_PDL = "moqext, no PDL"


@dataclass(frozen=True)
class Own:
    """`LinearMethod` on the device of x."""

    name: str
    quant_algo: str
    environment: Mapping[str, str] = field(default_factory=dict)
    fast_accum: bool = False

    def missing(self) -> str | None:
        try:
            self._method(4096, 4096, "cuda:0")
        except (ValueError, RuntimeError) as error:
            return str(error)
        return None

    def method(self, layer: Layer) -> LinearMethod:
        """For a layer of one partition."""
        return self._method(*layer.shape, str(layer.codes[0].device))

    def _method(self, rows: int, columns: int, device: str) -> LinearMethod:
        options: dict[str, Any] = {"device": device, "fast_accum": self.fast_accum}
        return LinearMethod(
            in_features=columns, out_partitions=[rows], **options, **method_arguments(self.quant_algo)
        )

    def weights(self, layer: Layer) -> Sequence[Any]:
        method = self.method(layer)
        return [method.prepare(layer.checkpoint(copy)) for copy in range(len(layer.codes))]

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        method = self.method(layer)
        return bound(method, x, x.new_empty(len(x), layer.shape[0]))


def bound(method: LinearMethod, x: Any, out: Any) -> Bound:
    """A method that runs x."""
    return Bound(
        lambda weight: method(x, weight, None, out),
        out,
        method.backend_for(len(x)),
        lambda weight: method(x, weight),
    )


def forced(kernel: str) -> list[Own]:
    """One kernel by its name, "family:name", for every algorithm."""
    return [Own(f"{NAME}, {kernel}", algo, {"MOQEXT_KERNEL": kernel}) for algo in (*ALGOS, *NVFP4_ALGOS)]


def usual(environment: Mapping[str, str]) -> list[Own]:
    """moqext as its plan chooses, for each algorithm, and with less exact sums where there is a choice."""
    if environment.get("MOQEXT_PDL") == "0":
        return [Own(WITHOUT_PDL, algo) for algo in (*ALGOS, *NVFP4_ALGOS)]
    fast = [Own(f"{NAME}, fast", algo, fast_accum=True) for algo in ALGOS if algo != "FP8_PB_WO"]
    return [*(Own(NAME, algo) for algo in (*ALGOS, *NVFP4_ALGOS)), *fast]


PEERS = usual(os.environ)

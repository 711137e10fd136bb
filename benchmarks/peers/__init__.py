"""The peers of the CUDA benchmark: who else multiplies a quantized layer, and how each is called.

A peer computes one algorithm, or the layer in bfloat16, from x in bfloat16 to y in bfloat16, quantizing x
within the call. What it cannot do on this machine it says by a reason, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from benchmarks.layers import Layer


class Bound(NamedTuple):
    """A peer ready to run some tokens.

    Attributes:
        call: Runs one of the peer's weights.
        result: [tokens, out_features] bfloat16, what each call overwrites.
        kernel: What it runs, where it can tell.
        fresh: The same into a new result, where the peer can do both.
    """

    call: Callable[[Any], object]
    result: Any
    kernel: str
    fresh: Callable[[Any], object] | None = None


class Peer(Protocol):
    """Who multiplies.

    Attributes:
        name: Tells it from the others of its algorithm.
        quant_algo: What it computes: of `layers.ALGOS` or `layers.NVFP4_ALGOS`, or `PEER`.
        environment: Variables that hold while it is made and called.
    """

    name: str
    quant_algo: str
    environment: Mapping[str, str]

    def missing(self) -> str | None:
        """Why it cannot run on this machine at all."""

    def weights(self, layer: Layer) -> Sequence[Any]:
        """The copies of the weight as it wants them."""

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        """Ready for x, bfloat16 [tokens, in_features], contiguous.

        Raises:
            RuntimeError, ValueError: it cannot run this layer or as many tokens.
        """


def all_peers() -> list[Peer]:
    """Everyone, whether they can run here or not; moqext first."""
    from benchmarks.peers import cublaslt, engines, nvfp4, own, torch_linear

    return [*own.PEERS, *cublaslt.PEERS, *torch_linear.PEERS, *engines.PEERS, *nvfp4.PEERS]


def select(peers: Sequence[Peer], names: Sequence[str]) -> list[Peer]:
    """The peers whose name contains one of `names`; all without names.

    Raises:
        ValueError: A name that nobody has.
    """
    for name in names:
        if not any(name in peer.name for peer in peers):
            known = ", ".join(sorted({peer.name for peer in peers}))
            raise ValueError(f"--peers: expected parts of {known}; got {name!r}")
    return [peer for peer in peers if not names or any(name in peer.name for name in names)]

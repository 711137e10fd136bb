"""Linears among the kernels of a decoder layer, as `benchmarks.neighbours` runs them.

    v = norm(x + d)    qkv    attention    o    v = norm(x + o)    gate_up    silu(gate) * up    d = down

Attention is one elementwise kernel of torch's that has its inputs and outputs: every query head times the
values of its group. Norm and activation are torch's (the sum and the norm a kernel each, the activation two)
or moqext's, one kernel each, which launch programmatically. The chain "square" is a norm and a linear of
4096 x 4096 in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import layers
from moqext import ops
from moqext.layers.linear import LinearMethod
from moqext.tools.bench import PEER, copies

EPS = 1e-5
INPUT_AMAX = {"qkv": 6.0, "square": 6.0, "o": 24.0, "gate_up": 6.0, "down": 24.0}
"""Largest inputs that the static scales of FP8 cover: normal inputs, and products of two."""

TORCH, OWN = "torch", "moqext"
ALGOS = (layers.NVFP4, "FP8", PEER)


@dataclass(frozen=True)
class Sizes:
    """A decoder layer's."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int

    @property
    def shapes(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Chain -> role -> (out_features, in_features)."""
        width = self.hidden // self.heads
        llama = {
            "qkv": (self.hidden + 2 * self.kv_heads * width, self.hidden),
            "o": (self.hidden, self.hidden),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }
        return {"llama": llama, "square": {"square": (self.hidden, self.hidden)}}


LLAMA = Sizes(4096, 14336, 32, 8)
TINY = Sizes(256, 512, 8, 2)


@dataclass
class Linear:
    """A role's weights, all copies of them the same numbers.

    Attributes:
        layer: The weight as a checkpoint has it.
        weights: What `call` takes.
        call: Multiplies x by one of the weights into a result.
        kernel: What would multiply so many tokens.
    """

    layer: layers.Layer
    weights: Sequence[Any]
    call: Callable[[Any, Any, Any], object]
    kernel: Callable[[int], str]

    def error(self, torch: Any, x: Any, y: Any) -> float:
        """Relative error of y for x to what the codes mean, in float64."""
        meant = layers.activation_meaning(torch, x, self.layer) @ layers.weight_meaning(torch, self.layer).T
        return layers.relative_error(torch, y, meant)


def make_linears(
    torch: Any, shapes: Mapping[str, tuple[int, int]], quant_algo: str, device: str, seed: int, rotate: int
) -> dict[str, Linear]:
    """By role, in as many copies as exceed `rotate` bytes together."""
    one = {}
    for number, (role, shape) in enumerate(shapes.items()):
        problem = layers.Problem.random(torch, shape, 1, device, seed + number, rotate=1)
        problem.weight *= shape[1] ** -0.5
        layer = problem.layer(quant_algo)
        if layer.input_scale is not None:
            scale = torch.full_like(layer.input_scale, INPUT_AMAX[role] / layers.E4M3_MAX)
            layer = replace(layer, input_scale=scale)
        one[role] = layer
    count = copies(sum(layer.weight_bytes for layer in one.values()), rotate)
    return {role: make_linear(torch, layer, count) for role, layer in one.items()}


def make_linear(torch: Any, layer: layers.Layer, count: int) -> Linear:
    """`count` copies of a layer's first."""
    layer = replace(layer, codes=[layer.codes[0].clone() for _ in range(count)])
    if layer.quant_algo == PEER:
        return Linear(
            layer, layer.codes, lambda x, weight, out: torch.mm(x, weight.T, out=out), lambda _: "torch.mm"
        )
    method = LinearMethod(
        layer.quant_algo, layer.shape[1], [layer.shape[0]], device=str(layer.codes[0].device)
    )
    weights = [method.prepare(layer.checkpoint(copy)) for copy in range(count)]
    layer = replace(layer, codes=layer.codes[:1])
    return Linear(
        layer, weights, lambda x, weight, out: method(x, weight, None, out), lambda m: method.backend_for(m)
    )


class TorchNeighbours:
    """Norm and activation by torch."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def norm(self, x: Any, more: Any, weight: Any) -> Any:
        """The RMS norm of x + more, [M, K]."""
        functional = self.torch.nn.functional
        return functional.rms_norm(self.torch.add(x, more), (x.shape[1],), weight, EPS)

    def activate(self, gate_up: Any) -> Any:
        """silu(gate) * up of [M, 2I]."""
        gate, up = gate_up.chunk(2, 1)
        return self.torch.nn.functional.silu(gate) * up


class OwnNeighbours:
    """Norm and activation by moqext."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def norm(self, x: Any, more: Any, weight: Any) -> Any:
        """The RMS norm of x + more as one kernel, [M, K]."""
        return ops.rms_norm(x, weight, EPS, residual=more)[0]

    def activate(self, gate_up: Any) -> Any:
        """silu(gate) * up of [M, 2I], as one kernel."""
        return ops.silu_and_mul(gate_up)


NEIGHBOURS: Mapping[str, Callable[[Any], Any]] = {TORCH: TorchNeighbours, OWN: OwnNeighbours}


@dataclass
class Chain:
    """Buffers of some tokens, through which layers of a chain run one after the other.

    Attributes:
        torch: The module.
        sizes: Of a layer.
        name: "llama" or "square".
        tokens: Rows.
        x: bfloat16 [tokens, hidden], what every norm adds.
        y: By role, a linear's output.
        inputs: By role, normal numbers for linears by themselves.
        norm_weight: bfloat16 [hidden].
        heard: By role, the last input and output of a linear, while it is listened to.
    """

    torch: Any
    sizes: Sizes
    name: str
    tokens: int
    x: Any
    y: dict[str, Any]
    inputs: dict[str, Any]
    norm_weight: Any
    heard: dict[str, tuple[Any, Any]] | None = None
    start: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def random(cls, torch: Any, sizes: Sizes, name: str, tokens: int, device: str, seed: int) -> Chain:
        """Fresh normal data."""
        source = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=source, device=device, dtype=torch.bfloat16)

        shapes = sizes.shapes[name]
        y = {role: normal(tokens, shape[0]) for role, shape in shapes.items()}
        inputs = {role: normal(tokens, shape[1]) for role, shape in shapes.items()}
        weight = 1 + normal(sizes.hidden) / 8
        chain = cls(torch, sizes, name, tokens, normal(tokens, sizes.hidden), y, inputs, weight)
        chain.start = {role: tensor.clone() for role, tensor in y.items()}
        return chain

    def reset(self) -> None:
        """Outputs as at first where a layer begins with one, else NaN, so that what is not written shows."""
        first = list(self.y)[-1]
        for role, tensor in self.y.items():
            tensor.copy_(self.start[role]) if role == first else tensor.fill_(float("nan"))

    def run(self, linears: Mapping[str, Linear], neighbours: Any, copy: int) -> None:
        """A layer; a role that is not in `linears` is left out, and its last output taken for it."""
        if self.name == "square":
            self._multiply(linears, "square", copy, self._norm(neighbours, "square"))
            return
        self._multiply(linears, "qkv", copy, self._norm(neighbours, "down"))
        self._multiply(linears, "o", copy, self._attend())
        self._multiply(linears, "gate_up", copy, self._norm(neighbours, "o"))
        self._multiply(linears, "down", copy, neighbours.activate(self.y["gate_up"]))

    def run_alone(self, linears: Mapping[str, Linear], copy: int) -> None:
        """The linears of a layer with nothing between them."""
        for role, linear in linears.items():
            linear.call(self.inputs[role], linear.weights[copy], self.y[role])

    def _norm(self, neighbours: Any, role: str) -> Any:
        return neighbours.norm(self.y[role], self.x, self.norm_weight)

    def _attend(self) -> Any:
        kv_heads, qkv = self.sizes.kv_heads, self.y["qkv"]
        width = self.sizes.hidden // self.sizes.heads
        queries = qkv[:, : self.sizes.hidden].unflatten(1, (kv_heads, -1, width))
        values = qkv[:, -kv_heads * width :].unflatten(1, (kv_heads, 1, width))
        return (queries * values).flatten(1)

    def _multiply(self, linears: Mapping[str, Linear], role: str, copy: int, x: Any) -> None:
        if role not in linears:
            return
        linear = linears[role]
        linear.call(x, linear.weights[copy], self.y[role])
        if self.heard is not None:
            self.heard[role] = (x.clone(), self.y[role].clone())

    def errors(self, linears: Mapping[str, Linear], neighbours: Any) -> Iterator[tuple[str, float]]:
        """(role, relative error of its output for the input it has in the chain)."""
        self.reset()
        self.heard = {}
        self.run(linears, neighbours, 0)
        heard, self.heard = self.heard, None
        for role, (x, y) in heard.items():
            yield role, linears[role].error(self.torch, x, y)

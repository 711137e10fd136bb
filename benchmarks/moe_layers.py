"""Layers of experts that the CUDA benchmarks run, and what their outputs have to be.

Every expert has normal weights of its own, quantized for real as `benchmarks.layers` does it, gate and up
apart. The reference takes the codes' meaning in float64, rounds what is between the projections as a layer
does, and is computed for a few tokens.

torch is imported by the callers; this module works on any of its devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from benchmarks import layers, nvfp4
from moqext import MoEMethod, reference
from moqext.ops.spelling import Activation
from moqext.tools.bench import PEER

ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", layers.NVFP4, layers.NVFP4_FP8)
Scoring = Literal["softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"]

UNIFORM, POWER = "uniform", "power law"
ROUTINGS = (UNIFORM, POWER)
EXPONENT = 1.2
"""Exponent of the power law: the expert of rank r is asked for in proportion to r ** -EXPONENT."""

INPUT_AMAX = {"w13": 6.0, "w2": 24.0}
"""Largest inputs that the static scales of FP8 cover: normal inputs, and products of two."""

CHECKED_TOKENS = 8
"""Outputs that are compared, from the first to the last."""


@dataclass(frozen=True)
class Sizes:
    """A layer of experts.

    Attributes:
        experts: Those of this device.
        top_k: Of a token.
        hidden: Columns of x.
        intermediate: Rows of a gate.
        of_all: Experts of the layer on all devices, None for as many as are here.
        activation: As for `MoEMethod`.
        gated: Whether an expert has a gate beside up.
        biases: Whether projections have some.
        scoring: Of the router, which renormalizes what is chosen but with "sigmoid".
        on_input: Whether weights multiply x.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    of_all: int | None = None
    activation: Activation = "silu"
    gated: bool = True
    biases: bool = False
    scoring: Scoring = "softmax"
    on_input: bool = False

    @property
    def routed(self) -> int:
        """Experts that a router chooses among."""
        return self.of_all or self.experts


MODELS: Mapping[str, Sizes] = {
    "Qwen3-30B-A3B": Sizes(128, 8, 2048, 768),
    "Qwen3-235B-A22B": Sizes(128, 8, 4096, 1536),
    "Mixtral-8x7B": Sizes(8, 2, 4096, 14336),
    "DeepSeek-V3, TP8": Sizes(256, 8, 7168, 256),
    "DeepSeek-V3, EP8": Sizes(32, 8, 7168, 2048, of_all=256),
    "Llama-4-Maverick": Sizes(128, 1, 5120, 8192, scoring="sigmoid", on_input=True),
    "Nemotron-3-Nano": Sizes(128, 6, 2688, 1856, activation="relu2", gated=False, scoring="sigmoid"),
    "gpt-oss-120b": Sizes(128, 4, 2880, 2880, activation="swigluoai", biases=True, scoring="topk_softmax"),
}
TINY = Sizes(8, 2, 256, 128)


class Batch(NamedTuple):
    """Tokens with their experts.

    Attributes:
        x: bfloat16 [T, H].
        weights: float32 [T, top_k].
        ids: int32 [T, top_k], of all experts of the layer.
        out: bfloat16 [T, H], to be written.
    """

    x: Any
    weights: Any
    ids: Any
    out: Any


def draw(torch: Any, sizes: Sizes, x: Any, out: Any, routing: str, source: Any) -> Batch:
    """Fresh experts for tokens: the best of normal logits, or drawn by a power law without repetition."""
    shape = (len(x), sizes.routed)
    logits = torch.randn(shape, generator=source, device=x.device)
    if routing == POWER:
        order = torch.randperm(sizes.routed, generator=source, device=x.device)
        chances = -EXPONENT * torch.log(1.0 + order.float())
        noise = torch.rand(shape, generator=source, device=x.device).clamp(1e-20, 1 - 1e-7)
        logits = chances - torch.log(-torch.log(noise))
    weights, ids = route_by_torch(torch, sizes, logits)
    return Batch(x, weights, ids, out)


def expert_map_of(torch: Any, sizes: Sizes, device: str) -> Any:
    """int32: the first experts of all are here; None where all are."""
    if sizes.of_all is None:
        return None
    local = torch.full((sizes.of_all,), -1, dtype=torch.int32, device=device)
    local[: sizes.experts] = torch.arange(sizes.experts, device=device)
    return local


def route_by_torch(torch: Any, sizes: Sizes, logits: Any) -> tuple[Any, Any]:
    """Weights and ids by torch's kernels, as models have them in Python."""
    best, ids = logits.float().topk(sizes.top_k)
    weights = torch.sigmoid(best) if sizes.scoring == "sigmoid" else torch.softmax(best, -1)
    return weights.contiguous(), ids.int()


@dataclass(frozen=True)
class Part:
    """A projection of one expert as a checkpoint has it, in views of stacks.

    Attributes:
        layer: Its codes and scales.
        bias: [rows], or None.
    """

    layer: layers.Layer
    bias: Any

    def multiply(self, torch: Any, x: Any) -> Any:
        """float64 [rows of x, rows]."""
        y = layers.activation_meaning(torch, x, self.layer) @ layers.weight_meaning(torch, self.layer).T
        return y if self.bias is None else y + self.bias.double()


class Errors(NamedTuple):
    """How far tokens are off; NaN where one of them is.

    Attributes:
        median: Of the tokens that were compared.
        worst: Of them.
    """

    median: float
    worst: float


@dataclass
class Experts:
    """A layer in one format.

    Attributes:
        torch: The module.
        sizes: Of the layer.
        quant_algo: One of `ALGOS`, or `PEER` for weights in bfloat16.
        stacks: The tensors of a checkpoint.
        parts: Of each expert gate, if there is one, up and down, in views of the stacks.
    """

    torch: Any
    sizes: Sizes
    quant_algo: str
    stacks: dict[str, Any]
    parts: list[tuple[Part | None, Part, Part]] = field(default_factory=list)

    @classmethod
    def random(cls, torch: Any, sizes: Sizes, quant_algo: str, device: str, seed: int) -> Experts:
        """Fresh weights; the same numbers for every format."""
        made = cls(torch, sizes, quant_algo, _empty_stacks(torch, sizes, quant_algo, device))
        source = torch.Generator(device).manual_seed(seed)
        for expert in range(sizes.experts):
            gate = made._fill("w13", expert, 0, source) if sizes.gated else None
            up = made._fill("w13", expert, 1 if sizes.gated else None, source)
            made.parts.append((gate, up, made._fill("w2", expert, None, source)))
        return made

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert's codes, scales and biases."""
        sizes = (stack.numel() * stack.element_size() for stack in self.stacks.values())
        return sum(sizes) / self.sizes.experts

    def bytes(self, tokens: int, active: float) -> int:
        """Bytes that a call has to move: active experts, x and y in bfloat16, each once."""
        return round(active * self.expert_bytes) + 4 * tokens * self.sizes.hidden

    def flop(self, slots: float) -> int:
        """Two for each weight of so many slots' experts."""
        matrices = 3 if self.sizes.gated else 2
        return round(2 * matrices * slots * self.sizes.hidden * self.sizes.intermediate)

    def method(self) -> MoEMethod:
        """The method that runs these experts."""
        return _method(self.sizes, self.quant_algo, str(self.stacks["w2_weight"].device))

    def prepare(self) -> tuple[MoEMethod, Mapping[str, Any]]:
        """The method and its stacks, in the memory of the checkpoint's where bytes stay."""
        method, room = self.method(), {}
        for name, spec in method.prepared_params.items():
            if method.keeps(name):
                room[name] = self.stacks[name]
            elif spec.required or name in self.stacks:
                device = self.stacks["w2_weight"].device
                room[name] = self.torch.empty(spec.shape, dtype=_dtype(self.torch, spec.dtype), device=device)
        return method, method.prepare(self.stacks, room)

    def errors(self, batch: Batch, y: Any) -> Errors:
        """Relative errors of some tokens, the first and last among them, to what the codes mean, in float64.

        Of those that have an expert here; others have to have zeros.
        """
        torch = self.torch
        local = (batch.ids < self.sizes.experts).any(1)
        if bool(y[~local].any()):
            return Errors(math.inf, math.inf)
        rows = torch.nonzero(local)[:, 0]
        if len(rows) == 0:
            return Errors(0.0, 0.0)
        some = torch.linspace(0, len(rows) - 1, CHECKED_TOKENS, device=rows.device).round().long()
        rows = rows[some.unique()]
        expected = self._expected(batch, rows)
        each = torch.linalg.norm(y[rows].double() - expected, dim=1) / torch.linalg.norm(expected, dim=1)
        return Errors(float(each.median()), float(each.max()))

    def _expected(self, batch: Batch, rows: Any) -> Any:
        torch, sizes = self.torch, self.sizes
        x, weights, ids = batch.x[rows], batch.weights[rows], batch.ids[rows]
        y = torch.zeros(len(rows), sizes.hidden, dtype=torch.float64, device=x.device)
        for expert in torch.unique(ids[ids < sizes.experts]).tolist():
            tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
            weight = weights[tokens, slots][:, None]
            inputs = x[tokens]
            if sizes.on_input:
                inputs, weight = (inputs * weight).to(x.dtype), torch.ones_like(weight)
            gate, up, down = self.parts[expert]
            both = [part.multiply(torch, inputs) for part in (gate, up) if part]
            middle = self._activate(*both)
            y.index_add_(0, tokens, weight.double() * down.multiply(torch, middle.to(x.dtype)))
        return y

    def _activate(self, *both: Any) -> Any:
        """The activation of gate and up, or of up alone."""
        arrays = [part.cpu().numpy() for part in both]
        values = reference.expert_activation(*arrays, activation=self.sizes.activation)
        return self.torch.from_numpy(values).to(both[0].device)

    def _fill(self, stack: str, expert: int, half: int | None, source: Any) -> Part:
        """Quantizes one projection into its place."""
        torch, stacks = self.torch, self.stacks
        places = {name: value[expert] for name, value in stacks.items() if name.startswith(f"{stack}_")}
        if half is not None:
            places = {name: _half(value, half) for name, value in places.items()}
        codes = places[f"{stack}_weight"]
        columns = self.sizes.hidden if stack == "w13" else self.sizes.intermediate
        shape = (codes.shape[0], columns)
        weight = torch.randn(shape, generator=source, device=codes.device) * columns**-0.5
        found = _quantize(torch, weight, self.quant_algo)
        for name, value in found.items():
            place = places[f"{stack}_{name}"]
            place.copy_(value.view(place.dtype) if value.dtype != place.dtype else value.reshape(place.shape))
        if f"{stack}_input_scale" in places:
            places[f"{stack}_input_scale"].fill_(INPUT_AMAX[stack] / layers.E4M3_MAX)
        bias = places.get(f"{stack}_bias")
        if bias is not None:
            bias.copy_(torch.randn(bias.shape, generator=source, device=bias.device) / 8)
        second = places.get(f"{stack}_weight_scale_2")
        layer = layers.Layer(
            torch,
            self.quant_algo,
            shape,
            [codes],
            places.get(f"{stack}_weight_scale"),
            _one(places.get(f"{stack}_input_scale")),
            _one(second),
        )
        return Part(layer, bias)


def _method(sizes: Sizes, quant_algo: str, device: str) -> MoEMethod:
    about = layers.method_arguments(quant_algo)
    return MoEMethod(
        about["quant_algo"],
        sizes.experts,
        sizes.hidden,
        sizes.intermediate,
        top_k=sizes.top_k,
        activation=sizes.activation,
        gated=sizes.gated,
        device=device,
        compute="fp8" if about["compute"] == "fp8" else "exact",
        global_num_experts=sizes.of_all,
    )


def _dtype(torch: Any, name: str) -> Any:
    return {"float32": torch.float32, "float8_e4m3fn": torch.float8_e4m3fn}.get(name, torch.uint8)


def _empty_stacks(torch: Any, sizes: Sizes, quant_algo: str, device: str) -> dict[str, Any]:
    if quant_algo == PEER:
        shapes = {
            "w13_weight": (sizes.experts, (2 if sizes.gated else 1) * sizes.intermediate, sizes.hidden),
            "w2_weight": (sizes.experts, sizes.hidden, sizes.intermediate),
        }
        if sizes.biases:
            shapes |= {name.replace("weight", "bias"): shape[:2] for name, shape in shapes.items()}
        return {name: torch.empty(s, dtype=torch.bfloat16, device=device) for name, s in shapes.items()}
    stacks = {}
    for name, spec in _method(sizes, quant_algo, "cpu").checkpoint_params.items():
        if name.endswith("bias") and not sizes.biases:
            continue
        if spec.required or name.endswith("bias") or (quant_algo == "FP8" and name.endswith("input_scale")):
            stacks[name] = torch.empty(spec.shape, dtype=_dtype(torch, spec.dtype), device=device)
    return stacks


def _half(value: Any, half: int) -> Any:
    rows = value.shape[0] // 2
    return value[half * rows : (half + 1) * rows]


def _one(scale: Any) -> Any:
    return None if scale is None else scale.reshape(1)


def _quantize(torch: Any, weight: Any, quant_algo: str) -> dict[str, Any]:
    """The tensors of a projection by role."""
    if quant_algo == PEER:
        return {"weight": weight.to(torch.bfloat16)}
    if quant_algo in (layers.NVFP4, layers.NVFP4_FP8):
        codes, scale, second = nvfp4.quantize(torch, weight)
        return {"weight": codes, "weight_scale": scale, "weight_scale_2": second}
    codes, scale = layers.quantize_weight(torch, weight, quant_algo)
    return {"weight": codes, "weight_scale": scale}


def moqext_call(experts: Experts) -> tuple[Callable[[Batch], Any], Callable[[int], str]]:
    """A call of moqext on a batch, and the name of its kernel by tokens."""
    method, params = experts.prepare()
    local = expert_map_of(experts.torch, experts.sizes, str(experts.stacks["w2_weight"].device))
    on_input = experts.sizes.on_input

    def call(batch: Batch) -> Any:
        return method(batch.x, params, batch.weights, batch.ids, local, on_input, batch.out)

    return call, method.backend_for


def torch_call(experts: Experts) -> Callable[[Batch], Any]:
    """A call on a batch by torch's grouped products: rows sorted by expert, as Transformers does it.

    Raises:
        NotImplementedError: torch has no such product, or some experts are elsewhere.
    """
    torch, sizes = experts.torch, experts.sizes
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if multiply is None or sizes.of_all is not None:
        raise NotImplementedError("no grouped product of torch for these experts")
    w13, w2 = (experts.stacks[name].transpose(1, 2) for name in ("w13_weight", "w2_weight"))
    numbers = torch.arange(sizes.experts, device=w2.device, dtype=torch.int32)

    def biased(y: Any, name: str, ids: Any) -> Any:
        return y + experts.stacks[name][ids] if sizes.biases else y

    def activate(both: Any) -> Any:
        if not sizes.gated:
            return torch.relu(both).square()
        gate, up = both.chunk(2, 1)
        if sizes.activation == "silu":
            return torch.nn.functional.silu(gate) * up
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    def call(batch: Batch) -> Any:
        ids, order = batch.ids.flatten().sort(stable=True)
        ends = torch.searchsorted(ids, numbers, right=True).int()
        weights = batch.weights.flatten()[order, None]
        rows = batch.x[order // sizes.top_k]
        rows = (rows * weights).to(rows.dtype) if sizes.on_input else rows
        middle = activate(biased(multiply(rows, w13, offs=ends), "w13_bias", ids))
        down = biased(multiply(middle, w2, offs=ends), "w2_bias", ids)
        down = down if sizes.on_input else down * weights
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        y = down[back].unflatten(0, (-1, sizes.top_k)).sum(1)
        return batch.out.copy_(y)

    return call


def peers_of(experts: Sequence[Experts]) -> dict[str, tuple[Callable[[Batch], Any], Callable[[int], str]]]:
    """By format, a call on a batch and the kernel's name; formats that cannot run are left out."""
    found = {}
    for each in experts:
        if each.quant_algo != PEER:
            found[each.quant_algo] = moqext_call(each)
            continue
        try:
            found[PEER] = torch_call(each), lambda tokens: "torch.grouped_mm"
        except NotImplementedError:
            continue
    return found

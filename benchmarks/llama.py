"""Tokens a second of a Llama of 8 billion weights: bfloat16 beside FP8 and NVFP4 through moqext.

    PYTHONPATH=.:python python3 -m benchmarks.llama --output FILE

Weights are normal numbers made and quantized on the device; every linear of the decoder layers is quantized,
embedding and head stay bfloat16 in all models. Each model is measured in up to four forms:

    modules    Transformers' LlamaForCausalLM with `moqext_torch.QuantLinear` for nn.Linear, else unchanged
    transformers  after `moqext_transformers.fuse`, as from_pretrained hands it over; nothing of bfloat16 is
               fused, which is that of "modules"
    fused      its decoder layers replaced by `benchmarks.llama_fused`: q/k/v and gate/up are one linear each,
               and what is between linears is one kernel each
    fused+pdl  the same with those kernels launched programmatically

moqext's quantizing norm and activation do not help here: its linears take float activations, which NVFP4 does
not quantize at all and FP8 quantizes within the linear.

Decoding is a step of one token for each sequence at the last place of a full static cache, in a CUDA graph.
The weights are larger than every cache, so each step reads them from memory. Prefill is one sequence, eager,
each time after an idle pause. Times are medians between events of the device. MOQEXT_PDL=0 in the
environment takes programmatic launch from moqext's kernels; "fused+pdl" is left out then.

Before anything is timed, models of two layers are compared with one in bfloat16 whose weights are what the
quantized codes mean, and the forms with each other.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks import nvfp4, record
from benchmarks.layers import E4M3_MAX, to_e4m3
from benchmarks.llama_fused import FusedLayer, FusedNorm, TorchNeighbours
from moqext import ops
from moqext_torch import QuantLinear
from moqext_transformers import fuse
from moqext_transformers.fused_linear import Part

ROLES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The linears of a layer; those of one role have one input."""

INPUT_AMAX = {"qkv": 8.0, "o": 8.0, "gate_up": 8.0, "down": 64.0}
"""Largest inputs that the static scales of FP8 cover: inputs of normal size, and products of two."""

SPREAD = 0.02
"""Standard deviation of weights, usual for a model that begins to be trained."""

REST = 1_000_000
"""The first seed of what is no linear of a layer."""

BF16, FP8, NVFP4 = "bfloat16", "FP8", "NVFP4"
CONFIGS = ((BF16, "exact"), (FP8, "exact"), (NVFP4, "exact"), (NVFP4, "auto"))
FORMS = ("modules", "transformers", "fused", "fused+pdl")
OWN = ("modules", "transformers")
"""Forms of Transformers' own decoder layers."""

DECODE_REPLAYS = 40
PREFILL_RUNS = 7
IDLE = 0.2

GOALS = {("decode", NVFP4): 2.4, ("decode", FP8): 1.65, ("prefill", "exact"): 1.0, ("prefill", "auto"): 1.3}
"""Times the speed of bfloat16 in the same form; decode with one sequence."""

ALLOWED = 0.02
"""Relative error of the logits of two layers to what the codes mean: bfloat16 rounds after every step."""

ALLOWED_LINEAR = 5e-3
"""Relative error of a linear to what its codes mean, two roundings to bfloat16.

Logits are not held where activations are quantized: what differs in a last bit may give the next code.
"""


def make_config(tiny: bool) -> transformers.LlamaConfig:
    """Llama 3.1 8B's sizes, or small ones for a test."""
    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    if tiny:
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        }
    return transformers.LlamaConfig(**sizes, max_position_embeddings=8192, tie_word_embeddings=False)


class MeantLinear(nn.Linear):
    """A bfloat16 linear of the values that quantized codes mean, with an input as FP8 quantizes it."""

    input_scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The product of x, quantized where there is a scale."""
        if self.input_scale is not None:
            codes = to_e4m3(torch, x.float() / self.input_scale)
            x = (codes.float() * self.input_scale).to(x.dtype)
        return super().forward(x)


class Weights:
    """The weights of a model's linears: the same numbers at every call, made on the device when asked for."""

    def __init__(self, device: str) -> None:
        self.device = device

    def normal(self, seed: int, *shape: int) -> Tensor:
        """bfloat16."""
        source = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randn(shape, generator=source, device=self.device, dtype=torch.float32)
        return (drawn * SPREAD).to(torch.bfloat16)

    def linear(self, layer: int, name: str, linear: nn.Linear) -> Tensor:
        """The weight of a linear of a layer."""
        names = [name for names in ROLES.values() for name in names]
        return self.normal(1 + layer * len(names) + names.index(name), *linear.weight.shape)

    def fill_rest(self, model: Any) -> None:
        """Embedding, head and norms."""
        model.model.embed_tokens.weight.data = (
            self.normal(REST, *model.model.embed_tokens.weight.shape) / SPREAD
        )
        model.lm_head.weight.data = self.normal(REST + 1, *model.lm_head.weight.shape)
        norms = [module for name, module in model.named_modules() if name.endswith("norm")]
        for number, norm in enumerate(norms):
            norm.weight.data = 1 + 5 * self.normal(REST + 2 + number, *norm.weight.shape)


def quantize(weight: Tensor, quant_algo: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, without the scale of the input."""
    if quant_algo == FP8:
        codes, scale = ops.quantize(weight, "fp8_tensor")
        return {"weight": codes, "weight_scale": scale.reshape(1)}
    codes, scale, second = ops.quantize(weight, "nvfp4")
    return {
        "weight": codes.view(torch.uint8),
        "weight_scale": scale.view(torch.float8_e4m3fn),
        "weight_scale_2": second.reshape(1),
    }


def meaning(tensors: dict[str, Tensor]) -> Tensor:
    """bfloat16 values of quantized codes."""
    if "weight_scale_2" in tensors:
        values = nvfp4.values(torch, tensors["weight"], tensors["weight_scale"]) * tensors["weight_scale_2"]
    else:
        values = tensors["weight"].float() * tensors["weight_scale"]
    return values.to(torch.bfloat16)


def make_linear(parts: list[Tensor], role: str, quant_algo: str, compute: str, meant: bool) -> nn.Module:
    """One linear of one or several weights that share their input.

    Args:
        parts: the weights, bfloat16.
        role: one of `ROLES`.
        quant_algo: one of `BF16`, `FP8`, `NVFP4`.
        compute: of `QuantLinear`.
        meant: a linear of bfloat16 with what the quantized codes mean.
    """
    device, columns = parts[0].device, parts[0].shape[1]
    if quant_algo == BF16 or meant:
        if meant:
            parts = [meaning(quantize(part, quant_algo)) for part in parts]
        plain = MeantLinear(columns, 1, bias=False, device="meta")
        plain.out_features = sum(map(len, parts))
        plain.weight = nn.Parameter(torch.cat(parts), requires_grad=False)
        if meant and quant_algo == FP8:
            plain.input_scale = INPUT_AMAX[role] / E4M3_MAX
        return plain
    optional = ["input_scale"] if quant_algo == FP8 else []
    rows = [len(part) for part in parts]
    linear = QuantLinear(
        columns, rows, quant_algo, compute=compute, dtype=torch.bfloat16, device=device, optional=optional
    )
    quantized = [quantize(part, quant_algo) for part in parts]
    tensors = {}
    for name, first in quantized[0].items():
        joined = torch.cat([tensors[name].view(carrier(first)) for tensors in quantized])
        tensors[name] = joined.view(first.dtype)
    if optional:
        tensors["input_scale"] = torch.full((len(parts),), INPUT_AMAX[role] / E4M3_MAX, device=device)
    linear.load_state_dict(tensors)
    return linear.prepare()


def carrier(tensor: Tensor) -> torch.dtype:
    """A dtype that torch can join tensors of."""
    return torch.uint8 if tensor.element_size() == 1 else tensor.dtype


def make_model(
    config: transformers.LlamaConfig,
    device: str,
    quant_algo: str = BF16,
    compute: str = "exact",
    form: str = "modules",
    meant: bool = False,
) -> Any:
    """A model in one of `FORMS`."""
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    weights = Weights(device)
    weights.fill_rest(model)
    neighbours = make_neighbours(form, device)
    for index, layer in enumerate(model.model.layers):
        fused = {}
        for role, names in ROLES.items():
            parts = [weights.linear(index, name, layer.get_submodule(name)) for name in names]
            if form in OWN:
                for name, part in zip(names, parts, strict=True):
                    layer.set_submodule(name, make_linear([part], role, quant_algo, compute, meant))
            else:
                fused[role] = make_linear(parts, role, quant_algo, compute, meant)
        if fused:
            model.model.layers[index] = FusedLayer(layer, fused, neighbours)
    if form not in OWN:
        model.model.norm = FusedNorm(model.model.norm, neighbours)
    elif form == "transformers" and not meant:
        fuse(model)
    return model.eval().requires_grad_(False)


def make_neighbours(form: str, device: str) -> Any:
    """The kernels that a form has between linears."""
    if form in OWN:
        return None
    if device == "cpu":
        return TorchNeighbours()
    from benchmarks.llama_triton import TritonNeighbours

    return TritonNeighbours(form == "fused+pdl")


def quantized_bytes(model: Any) -> int:
    """Bytes of all that a step reads of weights: all but the embedding."""
    tensors = [*model.parameters(), *model.buffers()]
    embedding = model.model.embed_tokens.weight
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not embedding)


class Call:
    """A forward pass over tokens that end where a static cache ends.

    Args:
        model: one of `make_model`.
        batch: sequences.
        tokens: new ones of each.
        context: places of the cache; those before the tokens hold normal keys and values.
    """

    def __init__(self, model: Any, batch: int, tokens: int, context: int) -> None:
        config, weight = model.config, model.lm_head.weight
        source = torch.Generator(weight.device).manual_seed(7)
        self.model = model
        self.first = context - tokens
        self.cache = transformers.StaticCache(config=config, max_cache_len=context)
        self.cache.early_initialization(
            batch, config.num_key_value_heads, config.head_dim, weight.dtype, weight.device
        )
        for layer in self.cache.layers:
            layer.keys.normal_(generator=source)
            layer.values.normal_(generator=source)
        self.arguments: dict[str, Any] = {
            "input_ids": torch.randint(
                config.vocab_size, (batch, tokens), generator=source, device=weight.device
            ),
            "position_ids": torch.arange(self.first, context, device=weight.device)[None],
            "past_key_values": self.cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        if tokens == 1:  # ready-made, as `generate` hands it over; a whole prompt needs none
            shape = (batch, 1, 1, context)
            self.arguments["attention_mask"] = torch.ones(shape, dtype=torch.bool, device=weight.device)

    def reset(self) -> None:
        """Makes the next call the same one again: Transformers' cache counts its tokens."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.first)

    def __call__(self) -> Tensor:
        """The logits of the last token of each sequence."""
        logits: Tensor = self.model(**self.arguments).logits
        return logits

    def eager(self) -> Tensor:
        """The logits, from the start."""
        self.reset()
        return self()


def decode(call: Call) -> tuple[list[float], float]:
    """Seconds of replays of a step, and how far the logits of the last one are from eager ones."""
    expected = call.eager().clone()
    if expected.device.type == "cpu":
        return [seconds_on_cpu(call) for _ in range(2)], apart(call.eager(), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call.eager()
    torch.cuda.current_stream().wait_stream(stream)
    call.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(DECODE_REPLAYS)]
    for begin, end in events:
        call.reset()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    spent = [begin.elapsed_time(end) * 1e-3 for begin, end in events]
    return spent[DECODE_REPLAYS // 4 :], apart(logits, expected)


def prefill(call: Call) -> list[float]:
    """Seconds of forward passes in eager mode, after one that does not count."""
    call.eager()
    if call.model.device.type == "cpu":
        return [seconds_on_cpu(call) for _ in range(2)]
    spent = []
    for _ in range(PREFILL_RUNS):
        call.reset()
        torch.cuda.synchronize()
        time.sleep(IDLE)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        spent.append(begin.elapsed_time(end) * 1e-3)
    return spent


def seconds_on_cpu(call: Call) -> float:
    """Seconds of a call where the host computes."""
    call.reset()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def apart(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of what was expected."""
    expected = expected.double()
    return float(torch.linalg.norm(got.double() - expected) / torch.linalg.norm(expected))


def check(config: transformers.LlamaConfig, device: str, form: str) -> Iterator[dict[str, Any]]:
    """Errors of the logits of two layers, by weights: a prompt of 96 tokens, and a step of 3 sequences."""
    small = transformers.LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 2})
    shapes = {"prefill": (1, 96, 96), "decode": (3, 1, 64)}
    for quant_algo in (FP8, NVFP4) if form == "transformers" else (BF16, FP8, NVFP4):
        meant = make_model(small, device, quant_algo, form=form, meant=quant_algo != BF16)
        model = make_model(small, device, quant_algo, form=form)
        for what, shape in shapes.items():
            error = apart(Call(model, *shape).eager(), Call(meant, *shape).eager())
            linear = max(errors_of_linears(Call(model, *shape), meant), default=0.0)
            print(
                f"{form:12}  {quant_algo:8}  {what:7}  error of logits {error:.1e}, of a linear {linear:.1e}",
                flush=True,
            )
            yield {"form": form, "weights": quant_algo, "what": what, "error": error, "linear": linear}
            if not linear < ALLOWED_LINEAR:
                raise ArithmeticError(f"{form}, {quant_algo}, {what}: a linear is off by {linear:.2e}")
            if quant_algo != FP8 and not error < ALLOWED:
                raise ArithmeticError(f"{form}, {quant_algo}, {what}: logits are off by {error:.2e}")


def errors_of_linears(call: Call, meant: Any) -> Iterator[float]:
    """How far each quantized linear is from what its codes mean, for the input that it has in the model."""
    heard: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _, x, y, name=name: heard.update({name: (x[0].clone(), y.clone())})
        )
        for name, module in call.model.named_modules()
        if isinstance(module, QuantLinear)
    ]
    call.eager()
    for hook in hooks:
        hook.remove()
    for name, (x, y) in heard.items():
        yield apart(y, torch.cat([linear(x) for linear in linears_of(call.model, meant, name)], -1))


def linears_of(model: Any, meant: Any, name: str) -> list[nn.Module]:
    """The linears of another model in the place of this one: its parts, where it is fused."""
    above = name.rpartition(".")[0]
    linear = model.get_submodule(name)
    parts = [
        f"{above}.{own}"
        for own, child in model.get_submodule(above).named_children()
        if isinstance(child, Part) and child.fused is linear
    ]
    return [meant.get_submodule(part) for part in parts or [name]]


def measure(
    config: transformers.LlamaConfig, options: argparse.Namespace, form: str, quant_algo: str, compute: str
) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    batches = options.batch if compute == "exact" else []  # with "auto" few tokens go the same way
    tokens = options.prefill if form != "fused+pdl" else 0
    if not batches and not tokens:
        return
    model = make_model(config, options.device, quant_algo, compute, form)
    about = {"form": form, "weights": quant_algo, "compute": compute, "bytes": quantized_bytes(model)}
    for batch in batches:
        spent, error = decode(Call(model, batch, 1, options.context))
        yield make_row(about | {"what": "decode", "tokens": batch, "graph_error": error}, spent)
    if tokens:
        yield make_row(about | {"what": "prefill", "tokens": tokens}, prefill(Call(model, 1, tokens, tokens)))


def make_row(about: dict[str, Any], spent: list[float]) -> dict[str, Any]:
    """A row with its figures."""
    seconds = statistics.median(spent)
    return about | {
        "seconds": seconds,
        "best_seconds": min(spent),
        "worst_seconds": max(spent),
        "tokens_per_second": about["tokens"] / seconds,
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row how many times as fast as bfloat16 it is, in that form and in "modules"."""
    plain = {(r["form"], r["what"], r["tokens"]): r["seconds"] for r in rows if r["weights"] == BF16}
    plain |= {("transformers", *case[1:]): seconds for case, seconds in plain.items() if case[0] == "modules"}
    for r in rows:
        case = (r["what"], r["tokens"])
        forms = {"ratio": r["form"], "ratio_to_modules": "modules"}
        r |= {
            name: plain[form, *case] / r["seconds"] for name, form in forms.items() if (form, *case) in plain
        }
        goal = r["compute"] if r["what"] == "prefill" else r["weights"]
        if r["weights"] != BF16 and (r["what"] == "prefill" or r["tokens"] == 1):
            r["goal"] = GOALS[r["what"], goal]


def table(rows: list[dict[str, Any]]) -> str:
    """Lines to read."""
    head = ("form", "weights", "compute", "what", "tokens", "ms", "tokens/s", "x bf16", "x modules", "goal")
    lines = [head]
    for r in rows:
        cells = [r[name] for name in head[:5]]
        cells += [f"{1e3 * r['seconds']:.3f}", f"{r['tokens_per_second']:.0f}"]
        cells += [f"{r[name]:.2f}" if name in r else "" for name in ("ratio", "ratio_to_modules", "goal")]
        lines.append(tuple(map(str, cells)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def numbers(text: str) -> list[int]:
    """An option's "1,16,64"."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Measures all models, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="a file for the results, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a test")
    parser.add_argument("--batch", type=numbers, default=[1, 16, 64], help="sequences (1,16,64)")
    parser.add_argument("--context", type=int, default=512, help="places of the cache of a step (512)")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the prompt, 0 for none (4096)")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"some of {','.join(FORMS)}")
    options = parser.parse_args()
    forms = [form for form in FORMS if form in options.forms.split(",")]
    pdl = os.environ.get("MOQEXT_PDL", "1") != "0"
    if options.device == "cpu" or not pdl:
        forms = [form for form in forms if form != "fused+pdl"]
    config = make_config(options.tiny)
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    failed: list[str] = []
    with torch.no_grad():
        for form in forms:
            attempt(checks, check(config, options.device, form), failed)
        for form in forms:
            for quant_algo, compute in CONFIGS[form == "transformers" :]:
                attempt(rows, measure(config, options, form, quant_algo, compute), failed)
                gc.collect()
                if options.device != "cpu":
                    torch.cuda.empty_cache()
    compare(rows)
    print(table(rows))
    print(f"{time.perf_counter() - started:.0f} s", *failed, sep="\n")
    if options.output:
        facts = {
            "transformers": transformers.__version__,
            "gpu": torch.cuda.get_device_name() if options.device != "cpu" else None,
            "pdl": pdl,
            "context": options.context,
            "checks": checks,
            "failed": failed,
        }
        record.write("llama", rows, options.output, **facts)
    if failed:
        raise SystemExit(1)


def attempt(rows: list[dict[str, Any]], found: Iterator[dict[str, Any]], failed: list[str]) -> None:
    """Adds what is found; what goes wrong is kept, so that the other models are measured."""
    try:
        for row in found:
            rows.append(row)
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}")
        print(failed[-1], flush=True)


if __name__ == "__main__":
    main()

"""Tokens a second of a model of experts with the sizes of Qwen3-30B-A3B: bfloat16 beside FP8 and NVFP4.

    PYTHONPATH=.:python python3 -m benchmarks.moe_model [--output FILE] [--weights W ...] [--forms F ...]

Weights are normal numbers made and quantized on the device; the experts and linears of decoder layers are
quantized, embedding, routers and head stay bfloat16 in all models. Forms:

    grouped_mm, batched_mm   Transformers' own model in bfloat16, with either way of it to multiply experts;
    modules       the same with `moqext_torch.QuantExperts` and `QuantLinear` in the place of its own modules;
    transformers  after `moqext_transformers.fuse`, as from_pretrained hands it over.

Decoding is a step of one token for each sequence at the last place of a full static cache, in a CUDA graph,
as `benchmarks.llama` does it, whose steps these are. Every replay routes the same tokens, and the experts
that they ask for are more than every cache holds, so each step reads them from memory.

Before anything is timed, a model of two layers is compared with one in bfloat16 whose weights are what the
NVFP4 codes mean: the median token, since a router whose logits differ in a last bit may choose others.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks import record
from benchmarks.layers import E4M3_MAX
from benchmarks.llama import (
    ALLOWED,
    BF16,
    FP8,
    INPUT_AMAX,
    NVFP4,
    REST,
    ROLES,
    SPREAD,
    Call,
    Weights,
    attempt,
    decode,
    make_linear,
    make_row,
    meaning,
    quantize,
)
from moqext_torch import QuantExperts, QuantMoE
from moqext_transformers import fuse

GROUPED, BATCHED, MODULES, FUSED = "grouped_mm", "batched_mm", "modules", "transformers"
PLAIN = (GROUPED, BATCHED)
"""Ways of Transformers to multiply experts in bfloat16."""

FORMS = (*PLAIN, MODULES, FUSED)
WEIGHTS = (BF16, FP8, NVFP4)
EXPERTS = 2 * REST
"""The first seed of experts."""

ROUTERS = 3 * REST


def make_config(tiny: bool, layers: int | None = None) -> Any:
    """Qwen3-30B-A3B's sizes, or small ones for a test."""
    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    if tiny:
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 512,
        }
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    return transformers.Qwen3MoeConfig(
        **sizes, max_position_embeddings=8192, tie_word_embeddings=False, norm_topk_prob=True
    )


def frozen(tensor: Tensor) -> nn.Parameter:
    """A weight that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


def expert_stacks(config: Any, weights: Weights, layer: int) -> dict[str, Tensor]:
    """The weights of a layer's experts, bfloat16: w13 [E, 2 I, H] and w2 [E, H, I]."""
    experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    return {
        "w13": weights.normal(EXPERTS + 2 * layer, experts, 2 * inner, hidden),
        "w2": weights.normal(EXPERTS + 2 * layer + 1, experts, hidden, inner),
    }


def quantize_stack(stack: Tensor, quant_algo: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint of one stack by kind, with one scale for all of its experts."""
    tensors = quantize(stack.flatten(0, 1), quant_algo)
    return {kind: t if kind.endswith("_2") or t.numel() == 1 else t.unflatten(0, stack.shape[:2])
            for kind, t in tensors.items()}  # fmt: skip


def quantized_experts(config: Any, stacks: dict[str, Tensor], quant_algo: str) -> QuantExperts:
    """Experts for a model, prepared."""
    experts, device = config.num_experts, stacks["w2"].device
    tensors = {}
    for name, role in (("w13", "gate_up"), ("w2", "down")):
        shape = (experts, 2) if name == "w13" else (experts,)
        for kind, tensor in quantize_stack(stacks[name], quant_algo).items():
            one = tensor.numel() == 1
            tensors[f"{name}_{kind}"] = tensor.reshape(()).expand(shape).contiguous() if one else tensor
        if quant_algo == FP8:
            tensors[f"{name}_input_scale"] = torch.full(shape, INPUT_AMAX[role] / E4M3_MAX, device=device)
    moe = QuantMoE(
        quant_algo,
        experts,
        config.hidden_size,
        config.moe_intermediate_size,
        top_k=config.num_experts_per_tok,
        device=device,
        optional=[name for name in tensors if name.endswith("input_scale")],
    )
    moe.load_state_dict(tensors)
    moe.prepare()
    return QuantExperts(moe)


def put_experts(config: Any, block: Any, stacks: dict[str, Tensor], quant_algo: str, meant: bool) -> None:
    """Gives a block its experts."""
    if quant_algo != BF16 and not meant:
        block.experts = quantized_experts(config, stacks, quant_algo)
        return
    if meant:
        stacks = {
            name: meaning(quantize(stack.flatten(0, 1), quant_algo)).unflatten(0, stack.shape[:2])
            for name, stack in stacks.items()
        }
    block.experts.gate_up_proj, block.experts.down_proj = frozen(stacks["w13"]), frozen(stacks["w2"])


def make_model(config: Any, device: str, quant_algo: str, form: str, meant: bool = False) -> Any:
    """A model in one of `FORMS`, each tensor made once and where it stays."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            experts_implementation=form if form in PLAIN else GROUPED,
        )
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    weights = Weights(device)
    for number, module in enumerate((model.model.embed_tokens, model.lm_head)):
        module.weight = frozen(weights.normal(REST + number, *module.weight.shape) / SPREAD ** (number == 0))
    norms = [module for name, module in model.named_modules() if name.endswith("norm")]
    for number, norm in enumerate(norms):
        norm.weight = frozen(1 + 5 * weights.normal(REST + 2 + number, *norm.weight.shape))
    for index, layer in enumerate(model.model.layers):
        for role in ("qkv", "o"):
            for name in ROLES[role]:
                part = weights.linear(index, name, layer.get_submodule(name))
                layer.set_submodule(name, make_linear([part], role, quant_algo, "exact", meant))
        router = layer.mlp.gate
        router.weight = frozen(weights.normal(ROUTERS + index, *router.weight.shape))
        put_experts(config, layer.mlp, expert_stacks(config, weights, index), quant_algo, meant)
    if form == FUSED:
        counts = fuse(model)
        print(f"fused: {counts}", flush=True)
    return model.eval().requires_grad_(False)


def step_bytes(model: Any) -> int:
    """Bytes of all weights but the embedding and experts: what a step of few tokens reads besides these."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    kept = (t for name, t in tensors.items() if ".experts." not in name and "embed_tokens" not in name)
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def check(config: Any, device: str, form: str) -> Iterator[dict[str, Any]]:
    """The error of the logits of two layers, median of the tokens of a prompt and of a step."""
    for what, shape in {"prefill": (1, 64, 64), "decode": (16, 1, 64)}.items():
        got, expected = (
            Call(make_model(config, device, NVFP4, form, meant), *shape).eager().flatten(0, -2).double()
            for meant in (False, True)
        )
        errors = torch.linalg.norm(got - expected, dim=1) / torch.linalg.norm(expected, dim=1)
        error = float(errors.median())
        print(f"{form}, {what}: error of logits {error:.1e}", flush=True)
        yield {"form": form, "what": what, "error": error}
        if not error < ALLOWED:
            raise ArithmeticError(f"{form}, {what}: logits are off by {error:.2e}")


def measure(config: Any, options: argparse.Namespace, form: str, quant_algo: str) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    model = make_model(config, options.device, quant_algo, form)
    for batch in options.batch:
        spent, error = decode(Call(model, batch, 1, options.context))
        about = {"form": form, "weights": quant_algo, "tokens": batch, "graph_error": error}
        row = make_row(about | {"bytes_beside_experts": step_bytes(model)}, spent)
        print(f"{form} {quant_algo} {batch}: {row['tokens_per_second']:.0f} tokens/s", flush=True)
        yield row


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row how many times as fast it is as the faster one of bfloat16."""
    best: dict[int, float] = {}
    for row in rows:
        if row["weights"] == BF16:
            best[row["tokens"]] = min(row["seconds"], best.get(row["tokens"], row["seconds"]))
    for row in rows:
        if row["tokens"] in best:
            row["ratio"] = best[row["tokens"]] / row["seconds"]


def cases(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Forms with their weights."""
    plain = [(form, BF16) for form in PLAIN]
    quantized = [(form, algo) for form in (MODULES, FUSED) for algo in (FP8, NVFP4)]
    return [c for c in plain + quantized if c[0] in options.forms and c[1] in options.weights]


def main() -> None:
    """Measures all models, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="a file for the results, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a test")
    parser.add_argument("--layers", type=int, help="decoder layers (48)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], help="sequences (1 16 64)")
    parser.add_argument("--context", type=int, default=512, help="places of the cache of a step (512)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    options = parser.parse_args()
    config = make_config(options.tiny, options.layers)
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    failed: list[str] = []
    chosen = cases(options)
    with torch.no_grad():
        for form in dict.fromkeys(form for form, algo in chosen if algo != BF16):
            attempt(checks, check(make_config(options.tiny, 2), options.device, form), failed)
        for form, quant_algo in chosen:
            attempt(rows, measure(config, options, form, quant_algo), failed)
            gc.collect()
            if options.device != "cpu":
                torch.cuda.empty_cache()
    compare(rows)
    print(f"{time.perf_counter() - started:.0f} s", *failed, sep="\n")
    if options.output:
        facts = {
            "transformers": transformers.__version__,
            "gpu": torch.cuda.get_device_name() if options.device != "cpu" else None,
            "layers": config.num_hidden_layers,
            "context": options.context,
            "checks": checks,
            "failed": failed,
        }
        record.write("moe_model", rows, options.output, **facts)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Layers of experts on the CPU, beside torch's bfloat16 on the experts that are asked for.

A layer has the sizes of one of Qwen3-30B-A3B: 128 experts, top 8, hidden size 2048, intermediate size 768.
Contestants take turns in one process on as many threads (`tools.bench`). Each call has the next of several
batches, whose experts are drawn anew, so that weights come from memory. torch's layer gathers the rows of
each expert that has some, multiplies them by its two weights in bfloat16, and adds the weighted results:
what Transformers does without quantization, and no expert that nobody asked for is touched.

    python -m benchmarks.moe_cpu [--tokens T ...] [--threads N] [--seconds S] [--ggml FOLDER]

With `--ggml`, llama.cpp's three products by experts (`ggml_mul_mat_id`) and the activation between them, on
NVFP4 weights, without the sum over experts; see `benchmarks.ggml_cpu` for the folder. ggml rounds activations
to 8 bits.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import moqext
from benchmarks import record
from benchmarks.linear_cpu import default_output
from moqext import MoEMethod
from moqext.tools import bench

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4")
TOKENS = (1, 4, 16, 64, 256)
BATCHES = 24
"""Batches of a number of tokens that take turns, fewer of many tokens."""
GOALS = {("NVFP4", 1): 2.5, ("FP8", 1): 1.5, ("NVFP4", 64): 1.2, ("FP8", 64): 1.2}
"""(algorithm, tokens) -> times as fast as torch."""


class Batch(NamedTuple):
    """Tokens and their experts.

    Attributes:
        x: float32 [T, H].
        weights: float32 [T, top_k].
        ids: int64 [T, top_k].
    """

    x: np.ndarray
    weights: np.ndarray
    ids: np.ndarray


def batches(rng: np.random.Generator, tokens: int) -> list[Batch]:
    """Normal tokens, and the best experts of normal logits."""
    made = []
    for _ in range(max(3, min(BATCHES, 256 // tokens))):
        x = rng.standard_normal((tokens, HIDDEN), np.float32)
        weights, ids = moqext.route(
            rng.standard_normal((tokens, EXPERTS), np.float32), TOP_K, scoring="softmax"
        )
        made.append(Batch(x, np.asarray(weights), np.asarray(ids).astype(np.int64)))
    return made


def random_stacks(method: MoEMethod, rng: np.random.Generator) -> dict[str, Any]:
    """Random codes, and scales of one size; what is optional is left out but activation scales."""
    stacks = {}
    for name, spec in method.checkpoint_params.items():
        if name.endswith(("bias", "pre_quant_scale")):
            continue
        if spec.dtype == "float32":
            stacks[name] = np.full(spec.shape, 2.0**-9, np.float32)
        elif spec.role == "scale":
            stacks[name] = rng.integers(0x28, 0x48, spec.shape, dtype=np.uint8)
        else:  # no NaN among e4m3
            codes = rng.integers(0, 256, spec.shape, dtype=np.uint8)
            stacks[name] = codes if spec.dtype.startswith("float4") else codes & 0xF7
    return stacks


def weight_bytes(params: dict[str, Any]) -> float:
    """Bytes of one expert, prepared."""
    return sum(tensor.nbytes for tensor in params.values()) / EXPERTS


class Layer(NamedTuple):
    """A layer of experts that takes turns with others.

    Attributes:
        contestant: whose weights are batches, which take turns, and whose weight_bytes those of one expert.
        inputs: From batches to what its calls get.
    """

    contestant: bench.Contestant
    inputs: Callable[[Sequence[Batch]], Sequence[Any]]


def on_torch(torch: Any) -> Callable[[Sequence[Batch]], Sequence[Any]]:
    """Batches as tensors, tokens in bfloat16."""
    return lambda drawn: [
        (
            torch.from_numpy(batch.x).to(torch.bfloat16),
            torch.from_numpy(batch.weights),
            torch.from_numpy(batch.ids),
        )
        for batch in drawn
    ]


def moqext_layer(algo: str, rng: np.random.Generator, torch: Any) -> Layer:
    """The layer of an algorithm."""
    method = MoEMethod(algo, EXPERTS, HIDDEN, INTERMEDIATE, top_k=TOP_K)
    params = method.prepare(random_stacks(method, rng))

    def call(_: Any, batch: Any) -> Any:
        x, weights, ids = batch
        return method(x, params, weights, ids)

    size = int(weight_bytes(dict(params)))
    return Layer(bench.Contestant(algo, method.backend_for, [], size, lambda x: x, call), on_torch(torch))


def torch_layer(rng: np.random.Generator, torch: Any) -> Layer:
    """The layer in bfloat16."""
    source = torch.Generator().manual_seed(int(rng.integers(2**31)))
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=source, dtype=torch.bfloat16)
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=source, dtype=torch.bfloat16)
    functional = torch.nn.functional

    def call(_: Any, batch: Any) -> Any:
        x, weights, ids = batch
        y = torch.zeros(len(x), HIDDEN)
        order = torch.argsort(ids.flatten(), stable=True)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
        at = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            slots = order[at : at + count]
            at += count
            tokens = slots // TOP_K
            gate, up = functional.linear(x[tokens], w13[expert]).chunk(2, -1)
            down = functional.linear(functional.silu(gate) * up, w2[expert])
            y.index_add_(0, tokens, down.float() * weights.flatten()[slots, None])
        return y.to(torch.bfloat16)

    size = 2 * 3 * HIDDEN * INTERMEDIATE
    contestant = bench.Contestant(bench.PEER, lambda tokens: "torch", [], size, lambda x: x, call)
    return Layer(contestant, on_torch(torch))


def measure(
    layers: Sequence[Layer],
    tokens: Sequence[int],
    rng: np.random.Generator,
    ceilings: bench.Ceilings,
    *,
    threads: int,
    seconds: float,
    torch: Any,
) -> Iterator[dict[str, Any]]:
    """Rows of every contestant, torch first, for each number of tokens."""
    for count in tokens:
        drawn = batches(rng, count)
        turning = [layer.contestant._replace(weights=layer.inputs(drawn)) for layer in layers]
        with bench.use_threads(threads, torch):
            times = bench.take_turns(turning, drawn[0].x, seconds)
        active = statistics.mean(np.unique(batch.ids).size for batch in drawn)
        medians = [statistics.median(calls) for calls in times]
        for contestant, calls, median in zip(turning, times, medians, strict=True):
            moved = active * contestant.weight_bytes + 4 * count * HIDDEN
            flop = 6 * count * TOP_K * HIDDEN * INTERMEDIATE
            yield {
                "tokens": count,
                "quant_algo": contestant.quant_algo,
                "kernel": contestant.kernel(count),
                "calls": len(calls),
                "seconds": median,
                "best_seconds": min(calls),
                "active_experts": active,
                "bytes": int(moved),
                "flop": flop,
                "floor_seconds": ceilings.floor(int(moved), flop),
                "torch_ratio": medians[0] / median,
                "goal": GOALS.get((contestant.quant_algo, count)),
            }


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=default_output("moe_cpu"), metavar="FILE")
    parser.add_argument("--threads", type=int, default=moqext.num_threads(), help="default: all")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each number of tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="T")
    parser.add_argument("--algos", nargs="+", default=ALGOS, metavar="ALGO")
    parser.add_argument("--ggml", type=Path, metavar="FOLDER", help="with libggml-cpu.so")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch = bench.find_torch()
    if torch is None:
        parser.error("torch is what moqext is measured against; install it")
    rng = np.random.default_rng(options.seed)
    ceilings = bench.measure_ceilings(options.threads, bench.rotation(), torch)
    layers = [torch_layer(rng, torch)]
    if options.ggml:
        from benchmarks.ggml_moe import ggml_layer  # needs its libraries

        layers.append(ggml_layer(options.ggml, rng, options.threads))
    layers += [moqext_layer(algo, rng, torch) for algo in options.algos]
    rows = []
    with torch.no_grad():
        for row in measure(
            layers,
            options.tokens,
            rng,
            ceilings,
            threads=options.threads,
            seconds=options.seconds,
            torch=torch,
        ):
            rows.append(row)
            share = row["floor_seconds"] / row["seconds"]
            print(
                f"{row['tokens']:5} {row['quant_algo']:26} {row['kernel']:16} "
                f"{row['seconds'] * 1e3:8.2f} ms  {share:4.0%} of floor  {row['torch_ratio']:5.2f} x torch",
                flush=True,
            )
    facts = {
        "threads": options.threads,
        "experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "bytes_per_second": ceilings.bytes_per_second,
        "flop_per_second": ceilings.flop_per_second,
    }
    record.write("moe_cpu", rows, options.output, **facts)
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()

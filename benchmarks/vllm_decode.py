"""Tokens a second of a Llama of 8 billion weights in vLLM, with moqext's norms and activations and without.

    PYTHONPATH=.:python python3 -m benchmarks.vllm_decode --json FILE

A checkpoint of random codes is written to memory (`--folder`), and served by engines of one process each,
one for each way of running it (`graphs` alone, or `compiled` by torch, too) with MOQEXT_VLLM_OPS=1 and =0.
All are made first, at the same time. Then they take turns, several times, so that none has the device warmer
than another: greedy tokens for 1 and for 16 sequences, less the time of the first token. The best time of
each counts. Last a profile of one engine after the other tells how long each kernel took in a step, and how
many there were; profiling slows down what it measures: the times before it are those to quote.

Some greedy tokens are kept, too: those of random weights follow from small differences, so they are no check
(tests/vllm has those), but equal ones say much. On a CPU, times are those of a few steps, and mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
SEQUENCES = (1, 16)
HOWS = ("graphs", "compiled")
ROUNDS = 3
PROMPT = [1, 5, 9, 7]


# ------------------------------------------------------------------------------------------ the checkpoint


def make_config(algo: str, sizes: dict[str, int]) -> dict[str, Any]:
    """config.json of a Llama whose linears are of a format, all but the head."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **sizes,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": algo,
            "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.46.0"},
        },
    }


def linear_tensors(algo: str, rows: int, columns: int) -> dict[str, Any]:
    """Random codes of a linear, and scales with which its outputs are about as large as its inputs."""
    import torch

    spread = columns**-0.5
    if algo == "FP8":
        codes = torch.randn(rows, columns).mul_(64).to(torch.float8_e4m3fn)
        scale = {"weight_scale": torch.tensor(spread / 64), "input_scale": torch.tensor(8.0 / 448)}
        return {"weight": codes, **scale}
    return {
        "weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        "weight_scale": (torch.rand(rows, columns // 16) + 0.5).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(spread / 3),
    }


def write_checkpoint(folder: Path, algo: str, sizes: dict[str, int]) -> None:
    """A file of each layer, all of the same numbers, and one of the rest."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(7)
    wide, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, wide),
        "self_attn.k_proj": (keys, wide),
        "self_attn.v_proj": (keys, wide),
        "self_attn.o_proj": (wide, queries),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
    }
    layer = {
        f"{name}.{role}": tensor
        for name, shape in shapes.items()
        for role, tensor in linear_tensors(algo, *shape).items()
    }
    ones = torch.ones(wide, dtype=torch.bfloat16)
    layer |= {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones.clone()}
    for index in range(sizes["num_hidden_layers"]):
        named = {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
        save_file(named, folder / f"layer_{index:03}.safetensors")
    rest = {
        name: torch.randn(sizes["vocab_size"], wide, dtype=torch.bfloat16).mul_(0.02)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    save_file(rest | {"model.norm.weight": ones}, folder / "rest.safetensors")
    (folder / "config.json").write_text(json.dumps(make_config(algo, sizes)))


# ---------------------------------------------------------------------------------------------- one engine


def make_engine(folder: str, how: str, on_device: bool) -> Any:
    """vLLM's engine in this process, in bfloat16."""
    from vllm import LLM

    import moqext_vllm

    moqext_vllm.register()
    options: dict[str, Any] = {}
    if on_device:
        sizes = {"cudagraph_capture_sizes": list(SEQUENCES)}
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if how == "graphs" else {}
        options = {"compilation_config": sizes | graphs, "kv_cache_memory_bytes": 1 << 30}
        options["gpu_memory_utilization"] = 0.04
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(SEQUENCES),
        max_num_batched_tokens=2048,
        disable_log_stats=True,
        **options,
    )


def generate(llm: Any, sequences: int, tokens: int) -> list[int]:
    """The greedy tokens of the first of so many sequences."""
    from vllm import SamplingParams

    how = SamplingParams(max_tokens=tokens, detokenize=False, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [*PROMPT, 10 + index]} for index in range(sequences)]
    return list(llm.generate(prompts, how, use_tqdm=False)[0].outputs[0].token_ids)


def time_token(llm: Any, sequences: int, tokens: int) -> float:
    """Seconds of a step after the first."""
    times = []
    for count in (1, tokens):
        begin = time.perf_counter()
        generate(llm, sequences, count)
        times.append(time.perf_counter() - begin)
    return (times[1] - times[0]) / (tokens - 1)


def profile(llm: Any, tokens: int) -> list[dict[str, Any]]:
    """Kernels of steps of one sequence: name, how many a step, microseconds a step, the longest first."""
    import torch

    def total(count: int) -> dict[str, tuple[int, float]]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            generate(llm, 1, count)
        return {each.key: (each.count, each.self_device_time_total) for each in found.key_averages()}

    first, all_steps = total(1), total(tokens + 1)
    rows = []
    for name, (count, us) in all_steps.items():
        before = first.get(name, (0, 0.0))
        if count > before[0]:
            rows.append(
                {"kernel": name, "count": (count - before[0]) / tokens, "us": (us - before[1]) / tokens}
            )
    return sorted(rows, key=lambda row: -row["us"])


def serve(folder: str, how: str, tokens: int) -> None:
    """Answers lines: "time N" with the seconds of a step, "tokens" with some, "profile" with kernels."""
    import torch

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = make_engine(folder, how, torch.cuda.is_available())
    for sequences in SEQUENCES:
        generate(llm, sequences, 4)
    answer: Any = "ready"
    print("ANSWER", json.dumps(answer), flush=True)
    for line in sys.stdin:
        what, *rest = line.split()
        if what == "time":
            answer = time_token(llm, int(rest[0]), tokens)
        elif what == "tokens":
            answer = generate(llm, 1, 16)
        else:
            answer = profile(llm, 8) if torch.cuda.is_available() else []
        print("ANSWER", json.dumps(answer), flush=True)
    os._exit(0)  # the engine's threads would wait


# --------------------------------------------------------------------------------------------- all engines


class Engine:
    """An engine in a process of its own, which is asked by lines."""

    def __init__(self, folder: str, how: str, ops: str, tokens: int) -> None:
        self.how, self.ops = how, ops
        self.log = Path(folder) / f"{how}_{ops}.log"
        variables = {
            "MOQEXT_VLLM_OPS": ops,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        own = [sys.executable, "-m", "benchmarks.vllm_decode"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*own, "--serve", folder, how, "--tokens", str(tokens)],
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def answer(self) -> Any:
        """The next answer.

        Raises:
            RuntimeError: the process has ended instead.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"{self.how}, MOQEXT_VLLM_OPS={self.ops}: {self.log.read_text()[-4000:]}")

    def ask(self, question: str) -> Any:
        """What it answers to a line; raises as `answer`."""
        assert self.process.stdin is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self.answer()


def measure(folder: str, algo: str, hows: list[str], tokens: int) -> list[dict[str, Any]]:
    """A row for each engine and number of sequences, and prints them."""
    engines = [Engine(folder, how, ops, tokens) for how in hows for ops in ("0", "1")]
    try:
        for engine in engines:
            engine.answer()
        best: dict[tuple[int, int], float] = {}
        for _ in range(ROUNDS):
            for sequences in SEQUENCES:
                for index, engine in enumerate(engines):
                    seconds = engine.ask(f"time {sequences}")
                    best[index, sequences] = min(seconds, best.get((index, sequences), seconds))
        rows = []
        for index, engine in enumerate(engines):
            found = engine.ask("tokens")
            kernels = engine.ask("profile")
            for sequences in SEQUENCES:
                seconds = best[index, sequences]
                about = {"quant_algo": algo, "how": engine.how, "ops": engine.ops, "sequences": sequences}
                rows.append(about | {"seconds": seconds, "tokens": found, "kernels": kernels})
                print(
                    f"{algo:12} {engine.how:9} ops {engine.ops} {sequences:3} sequences: "
                    f"{seconds * 1e3:7.3f} ms a step, {sequences / seconds:8.1f} tokens/s",
                    flush=True,
                )
        return rows
    finally:
        for engine in engines:
            engine.process.kill()
            engine.process.wait()


def print_kernels(rows: list[dict[str, Any]], count: int = 14, width: int = 64) -> None:
    """The kernels of a step of one sequence that take longest, for each engine."""
    for row in rows:
        if row["sequences"] == 1 and row["kernels"]:
            total = sum(kernel["us"] for kernel in row["kernels"])
            print(f"{row['quant_algo']} {row['how']} ops {row['ops']}: kernels of a step, {total:.0f} us")
            for kernel in row["kernels"][:count]:
                print(f"  {kernel['us']:8.1f} us {kernel['count']:6.1f} x {kernel['kernel'][:width]}")


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--algo", nargs="+", default=["W4A16_NVFP4", "FP8"], help="formats of the linears")
    parser.add_argument("--how", nargs="+", default=list(HOWS), choices=HOWS, help="how engines run")
    parser.add_argument("--tokens", type=int, default=257, help="of a measurement")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try this file")
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="where checkpoints go for a while"
    )
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve, options.tokens)
        return
    rows = []
    for algo in options.algo:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            write_checkpoint(Path(folder), algo, TINY if options.tiny else SIZES)
            rows += measure(folder, algo, options.how, options.tokens)
    print_kernels(rows)
    if options.json:
        record.write("vllm_decode", rows, options.json, sizes=TINY if options.tiny else SIZES)


if __name__ == "__main__":
    main()

"""Whole models in vLLM: moqext's layers beside vLLM's own, in engines of one machine.

    PYTHONPATH=.:python python3 -m benchmarks.vllm_speed --output FILE [--ways NAME ...] [--directory DIR]

A Llama of 8 billion weights from files, or with `--model moe` a mixture of experts of 30 billion from none.
With `--filled` neither has files, and weights are made in seconds. Other arguments are those of
`benchmarks.vllm_engine`: `--ranks 2 --expert-parallel` has two GPUs share each model.

Needs a Python with vLLM 0.33 or later and the plug-in's entry point. Every way is a process of its own
(`benchmarks.vllm_engine`); several start at once and measure one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import record, vllm_random

WAYS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "bfloat16": ("bfloat16", {}, ["--dummy"]),
    "NVFP4 moqext": ("NVFP4", {}, []),
    "NVFP4 moqext auto": ("NVFP4", {"MOQEXT_VLLM_COMPUTE": "auto"}, []),
    "NVFP4 moqext, vLLM's norms": ("NVFP4", {"MOQEXT_VLLM_OPS": "0"}, []),
    "NVFP4 moqext, MOQEXT_PDL=1": ("NVFP4", {"MOQEXT_PDL": "1"}, []),
    "NVFP4 Marlin": ("NVFP4", {"VLLM_PLUGINS": "none"}, ["--backend", "marlin"]),
    "NVFP4 Humming": ("NVFP4", {"VLLM_PLUGINS": "none"}, ["--backend", "humming"]),
    "FP8 moqext": ("FP8", {}, []),
    "FP8 moqext, vLLM's norms": ("FP8", {"MOQEXT_VLLM_OPS": "0"}, []),
    "FP8 moqext, fast_accum": ("FP8", {"MOQEXT_VLLM_FAST_ACCUM": "1"}, []),
    "FP8 vLLM": ("FP8", {"VLLM_PLUGINS": "none"}, []),
}
"""Format of the checkpoint, variables of the environment, arguments of the engine."""
MOE_WAYS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "experts in bfloat16": ("bfloat16", {}, []),
    "experts in NVFP4 moqext": ("NVFP4", {}, []),
    "experts in NVFP4 moqext, vLLM's norms and routing": ("NVFP4", {"MOQEXT_VLLM_OPS": "0"}, []),
    "experts in NVFP4 Marlin": (
        "NVFP4",
        {"VLLM_PLUGINS": "none"},
        ["--backend", "marlin", "--moe-backend", "marlin"],
    ),
    "experts in NVFP4 moqext auto": ("NVFP4", {"MOQEXT_VLLM_COMPUTE": "auto"}, []),
    "experts in FP8 moqext": ("FP8", {}, []),
    "experts in FP8 vLLM": ("FP8", {"VLLM_PLUGINS": "none"}, []),
}
"""Ways to serve a mixture of experts. vLLM's own experts of FP8 want FlashInfer, or run Triton's kernels."""
ALL_WAYS = {
    **WAYS,
    **{name: (algo, env, [*more, "--random"]) for name, (algo, env, more) in MOE_WAYS.items()},
}

AT_ONCE = 4


def make_checkpoints(directory: Path, formats: set[str]) -> None:
    """Writes those that are missing; of bfloat16 no weights."""
    from benchmarks import vllm_checkpoint
    from benchmarks.llama import make_config

    for quant_algo in sorted(formats):
        if quant_algo != "bfloat16":
            vllm_checkpoint.write(directory / quant_algo, quant_algo, "cuda")
        else:
            (directory / quant_algo).mkdir(parents=True, exist_ok=True)
            config = {
                **make_config(False).to_dict(),
                "architectures": ["LlamaForCausalLM"],
                "dtype": "bfloat16",
            }
            (directory / quant_algo / "config.json").write_text(json.dumps(config))


def start(directory: Path, way: str, compiled: bool, more: list[str]) -> subprocess.Popen[str]:
    """The process of a way."""
    quant_algo, variables, arguments = ALL_WAYS[way]
    command = [sys.executable, "-m", "benchmarks.vllm_engine", str(directory / quant_algo), "--name", way]
    command += [*arguments, *(["--compile"] if compiled else []), *more]
    return subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], way: str) -> dict[str, Any]:
    """The row that a process measured; prints its profiles, or why it failed."""
    text = process.communicate()[0]
    lines = text.splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("ROW ")]
    if not rows:
        print(f"{way} failed:", *lines[-25:], sep="\n  ", flush=True)
        return {"name": way, "failed": lines[-1] if lines else ""}
    row: dict[str, Any] = json.loads(lines[rows[0]].removeprefix("ROW "))
    decode = "  ".join(f"{batch}: {speed:7.1f}" for batch, speed in row["decode"].items())
    kind = "torch.compile" if row["compile"] else "graphs"
    prompt = f"prompt {row['prefill']:.0f}" if row["prefill"] else ""
    print(f"{way:32} {kind:13} tokens/s a sequence  {decode}  {prompt}  {row['methods']}", flush=True)
    for line in lines[rows[0] + 1 :]:
        if line.startswith("profile") or line[:9].strip().replace(".", "").isdigit():
            print(line)
    return row


def main() -> None:
    """Measures the ways asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--directory", type=Path, default=Path("/tmp/moqext-llama"))
    parser.add_argument("--model", choices=["llama", "moe"], default="llama")
    parser.add_argument("--ways", nargs="+", choices=ALL_WAYS, help="of the model; all without")
    parser.add_argument("--layers", type=int, help="of the mixture of experts, instead of its 48")
    parser.add_argument("--filled", action="store_true", help="weights of no files, for times alone")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="engines that the memory has room for")
    parser.add_argument("--modes", nargs="+", default=["graphs", "compile"], choices=["graphs", "compile"])
    options, more = parser.parse_known_args()
    import torch

    facts = {"gpu": torch.cuda.get_device_name(0), "vllm": version("vllm"), "note": ""}
    begin = time.perf_counter()
    ways = options.ways or list(MOE_WAYS if options.model == "moe" else WAYS)
    formats = {ALL_WAYS[way][0] for way in ways}
    if options.model == "moe" or options.filled:
        name = f"{options.directory.name}-{options.model}"
        options.directory = options.directory.with_name(name)
        more += ["--filled"] if options.filled else []
        for quant_algo in formats:
            directory = options.directory / quant_algo
            vllm_random.write_config(directory, quant_algo, layers=options.layers, model=options.model)
    else:
        make_checkpoints(options.directory, formats)
    print(f"checkpoints: {time.perf_counter() - begin:.0f} s", flush=True)
    waiting = [(way, mode == "compile") for mode in options.modes for way in ways]
    running: list[tuple[str, subprocess.Popen[str]]] = []
    rows = []
    while waiting or running:
        while waiting and len(running) < options.at_once:
            way, compiled = waiting.pop(0)
            running.append((way, start(options.directory, way, compiled, more)))
        way, process = running.pop(0)
        rows.append(finish(process, way))
        if options.output:
            record.write("vllm", rows, options.output, **facts)


if __name__ == "__main__":
    main()

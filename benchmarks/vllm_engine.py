"""One engine of vLLM: tokens a second of decoding and of a prompt, as one line of JSON.

    python3 -m benchmarks.vllm_engine DIRECTORY [--compile] [--backend NAME] [--profile] ...

Decoding: B sequences with prompts of 16 random tokens, greedy; seconds of N more tokens after the first, the
difference of the least of three runs with and without them. A prompt: one of P random tokens, up to its first
token, the median of five. Engines of several processes may be made at once; a file's lock has them measure
one after the other, while none is being made. With `--rounds` they take turns, and the median round counts.
What the environment says (MOQEXT_..., VLLM_PLUGINS) holds.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from benchmarks import vllm_random

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # models of ranks are asked for their methods

PROMPT = 16
MORE = {1: 256, 16: 128, 64: 128, 256: 64}
"""Tokens that are timed, by the number of sequences."""
LOCK = Path("/tmp/moqext-vllm.lock")
"""Held by the process that measures alone, shared by those that make engines."""
SETTLE = 2
"""Seconds in which what the process before had on the device goes away."""
CACHE_GIB = 4
PROFILED = 28
"""Lines of a profile."""


def make_engine(options: argparse.Namespace) -> Any:
    """vLLM with CUDA graphs of the batches that are timed."""
    from vllm import LLM

    compilation: dict[str, Any] = {"cudagraph_capture_sizes": sorted(options.batches)}
    if not options.compile:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    more: dict[str, Any] = {"linear_backend": options.backend} if options.backend else {}
    if options.moe_backend:
        more["moe_backend"] = options.moe_backend
    if options.dummy:
        more["load_format"] = "dummy"
    if options.random or options.filled:
        vllm_random.register()
        more["load_format"] = vllm_random.FILLED if options.filled else vllm_random.LOAD_FORMAT
    return LLM(
        options.directory,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        disable_log_stats=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=options.cache << 30,
        gpu_memory_utilization=0.04,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=max(options.prompt, 2048),
        max_model_len=max(options.prompt + 16, 2048),
        compilation_config=compilation,
        tensor_parallel_size=options.ranks,
        enable_expert_parallel=options.expert_parallel,
        **more,
    )


class Engine:
    """An engine and the random prompts it is given."""

    def __init__(self, options: argparse.Namespace) -> None:
        begin = time.perf_counter()
        self.llm = make_engine(options)
        self.start_seconds = time.perf_counter() - begin
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self.random = random.Random(7)
        self.more: int | None = options.more

    def prompts(self, count: int, tokens: int) -> list[dict[str, list[int]]]:
        """Random ones."""
        draw = self.random.randrange
        return [{"prompt_token_ids": [draw(self.vocabulary) for _ in range(tokens)]} for _ in range(count)]

    def seconds(self, prompts: list[dict[str, list[int]]], new: int) -> float:
        """Seconds of `new` tokens of each prompt."""
        from vllm import SamplingParams

        how = SamplingParams(max_tokens=new, detokenize=False, temperature=0, ignore_eos=True)
        begin = time.perf_counter()
        found = self.llm.generate(prompts, how, use_tqdm=False)
        spent = time.perf_counter() - begin
        assert all(len(each.outputs[0].token_ids) == new for each in found)
        return spent

    def decode(self, batch: int) -> float:
        """Tokens a second of each of `batch` sequences."""
        more = self.more or MORE.get(batch, 64)
        for _ in range(2):
            self.seconds(self.prompts(batch, PROMPT), 2)  # what is compiled or chosen at the first calls
        runs = [self.prompts(batch, PROMPT) for _ in range(3)]
        first = min(self.seconds(prompts, 1) for prompts in runs)
        return more / (min(self.seconds(prompts, 1 + more) for prompts in runs) - first)

    def in_turn(self, lock: TextIO, batches: Sequence[int], rounds: int) -> dict[int, list[float]]:
        """Tokens a second of each of so many sequences, a round at a time; holds the lock at the end."""
        found: dict[int, list[float]] = {batch: [] for batch in batches}
        for left in reversed(range(rounds)):
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(SETTLE)
            for batch in batches:
                found[batch].append(round(self.decode(batch), 2))
            if left:
                fcntl.flock(lock, fcntl.LOCK_UN)
                time.sleep(SETTLE / 4)  # those that wait come first
        return found

    def prefill(self, tokens: int) -> float:
        """Tokens a second of one prompt."""
        found = [self.seconds(self.prompts(1, tokens), 1) for _ in range(6)][1:]
        return tokens / statistics.median(found)

    def methods(self) -> dict[str, int]:
        """How many linears of the first rank's model have which method and kernel."""
        found: dict[str, int] = self.llm.apply_model(count_methods)[0]
        return found

    def profile(self, batch: int, tokens: int = PROMPT, steps: int = 8) -> None:
        """Prints what kernels take in a step of decoding, by name, in us; with no steps in a prompt."""
        prompts = self.prompts(batch, tokens)
        times, calls = self.kernels(prompts, 1 + steps)
        if steps:  # less the prompts' step
            for whole, first in zip((times, calls), self.kernels(prompts, 1), strict=True):
                whole.subtract(first)
        count = max(steps, 1)
        what = f"{steps} steps" if steps else "the prompt"
        print(
            f"profile of {what}, {batch} sequences of {tokens} tokens: {times.total() / count:.1f} us a step"
        )
        for name, spent in times.most_common(PROFILED):
            if calls[name] > 0:
                print(f"{spent / count:9.1f} {calls[name] / count:7.1f} {spent / calls[name]:7.2f}  {name}")

    def kernels(self, prompts: list[dict[str, list[int]]], new: int) -> tuple[Counter[str], Counter[str]]:
        """Microseconds of kernels on the device, and their number, both by name."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiler

        self.seconds(prompts, new)
        with profiler(activities=[ProfilerActivity.CUDA]) as found:
            self.seconds(prompts, new)
        times: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in found.profiler.kineto_results.events():  # `found.events()` takes seconds
            if event.device_type() == DeviceType.CUDA:
                times[shorten(event.name())] += event.duration_ns() / 1e3
                calls[shorten(event.name())] += 1
        return times, calls


def count_methods(model: Any) -> dict[str, int]:
    """How many layers of a model have which method and kernel."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            kernel = getattr(method, "kernel", None)
            counts[" ".join(type(each).__name__ for each in (method, kernel) if each is not None)] += 1
    return dict(counts)


def shorten(name: str) -> str:
    """A kernel's name without what all have in common, its arguments and the middle of a long one."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "").split("(")[0]
    return name if len(name) <= 90 else f"{name[:50]}..{name[-38:]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the engine, measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--name", default="")
    parser.add_argument("--compile", action="store_true", help="by torch.compile, with piecewise graphs")
    parser.add_argument("--backend", help="of vLLM's own linears")
    parser.add_argument("--moe-backend", help="of vLLM's own experts")
    parser.add_argument("--dummy", action="store_true", help="weights that vLLM makes up")
    parser.add_argument("--random", action="store_true", help="weights of benchmarks.vllm_random")
    parser.add_argument("--filled", action="store_true", help="the same kind of weights, in seconds")
    parser.add_argument("--ranks", type=int, default=1, help="that share the model, each with a GPU")
    parser.add_argument("--expert-parallel", action="store_true", help="ranks have whole experts")
    parser.add_argument("--more", type=int, help="tokens that are timed, whatever the number of sequences")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=1, help="in turn with the engines of other processes")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--cache", type=int, default=CACHE_GIB, help="GiB of keys and values")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batches")
    options = parser.parse_args(arguments)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        engine = Engine(options)
        fcntl.flock(lock, fcntl.LOCK_UN)
        rounds = engine.in_turn(lock, options.batches, options.rounds)
        row: dict[str, Any] = {"name": options.name, "compile": options.compile}
        row["decode"] = {batch: statistics.median(speeds) for batch, speeds in rounds.items()}
        if options.rounds > 1:
            row["rounds"] = rounds
        row["prefill"] = round(engine.prefill(options.prompt), 1) if options.prompt else None
        row |= {"start_seconds": round(engine.start_seconds, 1), "methods": engine.methods()}
        print("ROW", json.dumps(row), flush=True)
        for batch in options.profile:
            engine.profile(batch)
        if options.profile and options.prompt:
            engine.profile(1, options.prompt, 0)
        sys.stdout.flush()
        fcntl.flock(lock, fcntl.LOCK_UN)  # ranks have the lock as well, and end a little later
        os._exit(0)  # or the engine would be taken down while the next one is measured


if __name__ == "__main__":
    main()

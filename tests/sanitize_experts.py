"""Calls of one kernel of experts in all its configs, for a tool of compute-sanitizer.

Nothing is compared, so that a tool's time goes to kernels: tests take ten times as long. Layers come out even
or do not, experts have no slot, one, or many; the order of calls is drawn. Prints how many calls there were.

    compute-sanitizer --tool racecheck python tests/sanitize_experts.py KERNEL ALGORITHM --seconds 40
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZES = ((20, 320, 448, 3), (6, 1024, 256, 2), (9, 2048, 192, 4), (3, 2880, 384, 2))
"""Experts, hidden and intermediate size, top k."""

ACTIVATIONS = (("silu", True), ("swigluoai", True), ("relu2", False))
"""Activations that have code of their own, and whether there is a gate; layers take turns."""

DECODE_TOKENS, DECODE_CONFIGS = (1, 2, 24, 70), 6
PREFILL_TOKENS, PREFILL_CONFIGS = (5, 90, 700), 6


def prepare_layers(rng: Any, kernel: str, algo: str, compute: str) -> list[tuple[Any, Any]]:
    """Methods with their prepared parameters, in both types."""
    from moqext import MoEMethod
    from tests.moe_calls import prepared
    from tests.moe_cases import random_stacks

    layers, kinds = [], itertools.cycle(ACTIVATIONS)
    for dtype, (experts, hidden, inner, top_k) in itertools.product(("bfloat16", "float16"), SIZES):
        activation, gated = next(kinds)
        options = {"activation": activation, "gated": gated, "compute": compute, "device": "cuda:0"}
        options |= {"top_k": top_k, "dtype": dtype}
        method = MoEMethod(algo, experts, hidden, inner, **options)
        assert method.backend == kernel, f"{kernel} was asked for, {method.backend} runs"
        layers.append(
            (method, prepared(method, random_stacks(rng, algo, experts, hidden, inner, gated=gated)))
        )
    return layers


def call(rng: Any, method: Any, params: Any, tokens: int) -> None:
    from tests.linear_cases import random_x
    from tests.moe_calls import run
    from tests.moe_cases import random_routing

    kind = str(rng.choice(["random", "skewed"]))
    weights, ids = random_routing(rng, tokens, method.top_k, method.global_num_experts, kind, "int32")
    run(method, params, random_x(rng, (tokens, method.hidden_size), method.dtype), weights, ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kernel")
    parser.add_argument("algo")
    parser.add_argument("--compute", default="exact")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no call begins after them")
    parser.add_argument("--config", type=int, help="this variant alone")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    os.environ["MOQEXT_KERNEL"] = asked.kernel
    sys.path.insert(0, str(Path(__file__).parent.parent))
    rng, decode = np.random.default_rng(asked.seed), asked.kernel.endswith("_decode")
    layers = prepare_layers(rng, asked.kernel, asked.algo, asked.compute)
    configs = [(DECODE_TOKENS, DECODE_CONFIGS), (PREFILL_TOKENS, PREFILL_CONFIGS)][not decode]
    variants = range(configs[1]) if asked.config is None else [asked.config]
    cases = list(itertools.product(layers, configs[0], variants))
    done = 0
    for i in rng.permutation(len(cases)):
        if time.monotonic() > end:
            break
        (method, params), tokens, config = cases[i]
        method._plan.keep(tokens, asked.kernel, config)
        call(rng, method, params, tokens)
        done += 1
    print(f"{asked.kernel} {asked.algo}: {done} of {len(cases)} calls; seed {asked.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

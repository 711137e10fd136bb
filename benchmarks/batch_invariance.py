"""Times of `batch_invariant`: layers that have it beside those that choose for each number of tokens.

    python -m benchmarks.batch_invariance

prints microseconds on the device of both, and their ratio. benchmarks/device.py has how times are taken.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import device
from moqext import LinearMethod, MoEMethod
from moqext.tools.random_layers import random_experts, random_linear

LINEARS = (("FP8", "exact"), ("FP8_PB_WO", "exact"), ("NVFP4", "exact"), ("NVFP4", "fp8"))
SHAPES = ((4096, 4096), (28672, 4096))
"""Rows and columns."""
TOKENS = (1, 16, 64, 256, 4096)
EXPERTS = (("FP8", "exact"), ("NVFP4", "exact"), ("NVFP4", "fp8"))
EXPERT_SIZES = (128, 2048, 768, 8)
"""Experts, hidden size, intermediate size and top k of Qwen3-30B-A3B."""
EXPERT_TOKENS = (1, 64, 1024)
WEIGHT_BYTES = 1 << 28
"""Copies of a weight have so many together, several times the last cache of an H200."""
FEW_ROWS = 512
"""Rows of a weight that are made; all others are like them."""
MANY = 1024
"""From so many tokens on each is timed alone."""


def main() -> None:
    """Prints a table of linears and one of experts."""
    argparse.ArgumentParser(description=__doc__, allow_abbrev=False).parse_args()
    _print_heads("linear", TOKENS)
    for kind in LINEARS:
        for rows, columns in SHAPES:
            _print_linear(kind, rows, columns)
    print()
    _print_heads("experts", EXPERT_TOKENS)
    for kind in EXPERTS:
        _print_experts(kind)


def _print_heads(what: str, tokens: Sequence[int]) -> None:
    print(f"| {what} | " + " | ".join(map(str, tokens)) + " |\n| --- |" + " ---: |" * len(tokens))


def _print_linear(kind: tuple[str, str], rows: int, columns: int) -> None:
    about = {"compute": kind[1], "device": "cuda:0"}
    pair = [LinearMethod(kind[0], columns, [rows], batch_invariant=fixed, **about) for fixed in (False, True)]
    part = random_linear(np.random.default_rng(0), kind[0], [FEW_ROWS], columns).parts[0]
    times = rows // FEW_ROWS
    stored = {role: np.tile(value, (times, 1)) if value.ndim == 2 else value for role, value in part.items()}

    def call_of(method: LinearMethod, tokens: int) -> Callable[[Any], None]:
        x = _normal(tokens, columns)
        return lambda params: method(x, params)

    _print_line(f"{_named(kind)} {rows} × {columns}", pair, stored, call_of, TOKENS)


def _print_experts(kind: tuple[str, str]) -> None:
    *sizes, top_k = EXPERT_SIZES
    about = {"top_k": top_k, "compute": kind[1], "device": "cuda:0"}
    pair = [MoEMethod(kind[0], *sizes, batch_invariant=fixed, **about) for fixed in (False, True)]

    def call_of(method: MoEMethod, tokens: int) -> Callable[[Any], None]:
        import torch

        x, scores = _normal(tokens, sizes[1]), torch.randn(tokens, sizes[0], device="cuda")
        weights, ids = scores.softmax(1).topk(top_k)
        return lambda params: method(x, params, weights, ids)

    one = random_experts(
        np.random.default_rng(0), MoEMethod(kind[0], 1, *sizes[1:], top_k=1, compute=kind[1])
    )
    stored = {name: np.repeat(stack, sizes[0], 0) for name, stack in one.items() if "bias" not in name}
    _print_line(_named(kind), pair, stored, call_of, EXPERT_TOKENS)


def _named(kind: tuple[str, str]) -> str:
    return kind[0] if kind[1] == "exact" else f"{kind[0]}, {kind[1]}"


def _normal(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _print_line(
    name: str, pair: Sequence[Any], stored: Mapping[str, Any], call_of: Any, tokens: Sequence[int]
) -> None:
    """Times both methods, from copies of the weight that they read in turn."""
    import torch

    tensors = {role: torch.from_numpy(np.asarray(value)).cuda() for role, value in stored.items()}
    copies = max(1, WEIGHT_BYTES // sum(tensor.nbytes for tensor in tensors.values()))
    params = [[method.prepare(tensors) for _ in range(copies)] for method in pair]
    cells = []
    for count in tokens:
        graphs = {
            at: device.Graph(torch, call_of(method, count), params[at]) for at, method in enumerate(pair)
        }
        if count < MANY:
            times = device.interleaved(torch, graphs)
        else:
            times = {at: device.alone(torch, graph) for at, graph in graphs.items()}
        usual, fixed = (1e6 * times[at].seconds for at in range(2))
        cells.append(f"{usual:.1f} / {fixed:.1f} ({fixed / usual:.2f}×)")
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

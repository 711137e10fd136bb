"""Experts of two ranks, tokens going from one to the other as codes: `two_ranks.py RANK MEETING DEVICE SEED`.

This process is one of the ranks. Each has half of the experts and tokens of its own; it sends a row of
codes and its scales to the rank that has experts for it, and gets back what they give. It prints for each
format the sum's largest distance from what the whole layer gives on this rank alone, as a share of that.
"""

import json
import sys

import numpy as np
import torch
import torch.distributed as dist

from moqext import MoEMethod
from tests.linear_cases import random_x
from tests.moe_calls import prepared
from tests.moe_cases import random_routing, random_stacks
from tests.moe_code_cases import CODED, quantized, run_codes
from tests.test_moe_shares import EXPERTS, HIDDEN, INNER, TOP_K, expert_share, unify

TOKENS = (30, 7)
"""Tokens of each rank."""


def swap(array: np.ndarray, rank: int, device: str) -> np.ndarray:
    """Rows of the other rank, of the same kind; they go by the group's own library, from `device`."""
    rows = torch.tensor([len(array)], device=device)
    others = torch.empty_like(rows)
    _swap_tensors(rows, others, rank)
    flat = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).reshape(-1).to(device)
    found = torch.empty(int(others) * array[:1].nbytes, dtype=torch.uint8, device=device)
    _swap_tensors(flat, found, rank)
    return found.cpu().numpy().view(array.dtype).reshape(int(others), *array.shape[1:])


def _swap_tensors(given: torch.Tensor, found: torch.Tensor, rank: int) -> None:
    calls = [dist.P2POp(dist.isend, given, 1 - rank), dist.P2POp(dist.irecv, found, 1 - rank)]
    for call in dist.batch_isend_irecv(calls):
        call.wait()


def distance(algo: str, compute: str, rank: int, device: str, seed: int) -> float:
    """How far the sum of both ranks' experts is from the whole layer's."""
    rng = np.random.default_rng(seed)
    stacks = random_stacks(rng, algo, EXPERTS, HIDDEN, INNER)
    unify(stacks)
    shares = np.split(rng.permutation(EXPERTS), 2)
    inputs = [
        (random_x(rng, (tokens, HIDDEN), "float32"), *random_routing(rng, tokens, TOP_K, EXPERTS))
        for tokens in TOKENS
    ]
    x, weights, ids = inputs[rank]
    options = {"top_k": TOP_K, "dtype": "float32", "compute": compute, "quantized_input": True}
    whole = MoEMethod(algo, EXPERTS, HIDDEN, INNER, device=device, **options)
    codes, scale = quantized(whole, stacks, x)
    own, expert_map = expert_share(stacks, shares[rank])
    _, map_there = expert_share(stacks, shares[1 - rank])
    method = MoEMethod(
        algo, len(shares[rank]), HIDDEN, INNER, device=device, global_num_experts=EXPERTS, **options
    )
    params = prepared(method, own)

    sent = np.flatnonzero((map_there[ids] >= 0).any(axis=1))
    given = [None if each is None else each[sent] for each in (codes, scale, weights, ids)]
    there = [None if each is None else swap(each, rank, device) for each in given]
    for_them = run_codes(method, params, *there, expert_map=expert_map)
    back = swap(for_them, rank, device)
    y = run_codes(method, params, codes, scale, weights, ids, expert_map=expert_map)
    y[sent] += back
    expected = run_codes(whole, prepared(whole, stacks), codes, scale, weights, ids)
    return float(np.abs(y - expected).max() / np.abs(expected).max())


def main(rank: int, meeting: str, device: str, seed: int) -> None:
    """Prints a line of JSON for each format."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    backend = "nccl" if device != "cpu" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=2)
    for algo, compute in CODED:
        found = distance(algo, compute, rank, device, seed)
        print("RESULT", json.dumps([algo, compute, found]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))

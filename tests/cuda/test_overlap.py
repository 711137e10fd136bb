"""Which kernels are launched programmatically: edges of captured graphs, counted, and what they compute."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..work import HANGS

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, os, sys
import torch
from benchmarks import graph_edges, layers
from moqext import LinearMethod, ops

WIDE = 512
torch.manual_seed(int(sys.argv[1]))
problem = layers.Problem.random(torch, (WIDE, WIDE), 64, "cuda:0", int(sys.argv[1]), rotate=1)


def linear(algo, kernel):
    os.environ["MOQEXT_KERNEL"] = kernel
    method = LinearMethod(algo, WIDE, [WIDE], device="cuda:0")
    params = method.prepare(problem.layer(algo).checkpoint(0))
    return lambda x: method(x, params)


few = linear("NVFP4", "cuda:sm90_nvfp4_decode")
dynamic = linear("FP8_PER_CHANNEL_PER_TOKEN", "cuda:sm90_fp8_prefill")
weight = torch.ones(WIDE, device="cuda", dtype=torch.bfloat16)
other = torch.cuda.Stream()


def norm(x):
    return ops.rms_norm(x, weight, 1e-5, residual=x)[0]


def elsewhere(x):
    here = torch.cuda.current_stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        y = few(x)
    here.wait_stream(other)
    return y


CHAINS = {
    "strangers": ([torch.neg, few] * 3, 4),
    "own": ([norm, few] * 3, 4),
    "mixed": ([torch.neg, norm, few] * 2, 4),
    "one call": ([torch.neg, dynamic] * 3, 64),
    "another stream": ([few, elsewhere, torch.neg], 4),
}


def through(steps, x):
    for step in steps:
        x = step(x)
    return x


def measure(steps, tokens):
    x = torch.randn(tokens, WIDE, device="cuda", dtype=torch.bfloat16)
    expected = through(steps, x)
    torch.cuda.synchronize()
    values, found = x.clone(), []
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        y = through(steps, x)
    edges = [edge.type for edge in graph_edges.edges_of(graph.raw_cuda_graph()).values()]
    graph.instantiate()
    for _ in range(3):
        y.fill_(float("nan"))
        x.fill_(float("nan"))
        graph.replay()
        assert y.isnan().all()  # of what is in x now
        x.copy_(values)
        graph.replay()
        assert torch.equal(y, expected)
    return len(edges), edges.count(graph_edges.PROGRAMMATIC)


print(json.dumps({name: measure(*chain) for name, chain in CHAINS.items()}))
"""

ORDINARY = {"strangers": 0, "own": 0, "mixed": 0, "one call": 0, "another stream": 0}
BEHIND_OWN = {"strangers": 0, "own": 5, "mixed": 2, "one call": 3, "another stream": 0}
ALWAYS = {"strangers": 3, "own": 5, "mixed": 4, "one call": 6}
"""Programmatic edges. Of "one call" a linear is two kernels; what follows a fork may have any edge there."""


@pytest.mark.parametrize(
    "value, expected", [("", BEHIND_OWN), ("1", ALWAYS), ("0", ORDINARY)], ids=["unset", "1", "0"]
)
def test_kernels_are_launched_programmatically_behind_those_that_know_it(rng, value, expected):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("counts kernels of compute capability 9.0")
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        pytest.skip("this torch does not hand out a captured graph")
    seed = int(rng.integers(1 << 31))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(seed)],
        env={**os.environ, "MOQEXT_PDL": value},
        capture_output=True,
        text=True,
        timeout=HANGS,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: found[name][1] for name in expected} == expected
    edges = {name: count for name, (count, _) in found.items()}
    assert edges == {"strangers": 5, "own": 5, "mixed": 5, "one call": 8, "another stream": 3}

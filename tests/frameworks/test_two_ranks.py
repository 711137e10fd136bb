"""Experts that two processes share, tokens sent as codes: by gloo between CPUs, by NCCL between two GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.moe_code_cases import CODED

torch = pytest.importorskip("torch")

PROGRAM = Path(__file__).resolve().parent / "two_ranks.py"
ROOT = PROGRAM.parent.parent.parent
SECONDS = 600
CLOSE = 1e-5
"""Share of the largest output: sums of float32 in another order."""


@pytest.mark.unsanitized
def test_codes_that_are_sent_to_another_rank(rng, device, tmp_path):
    """Each rank gets for its tokens what one rank with all experts gives."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    path = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    rest = [str(tmp_path / "meeting"), device, str(rng.integers(1 << 31))]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), *rest],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, texts, strict=True):
        assert rank.returncode == 0, text[-4000:]
        lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
        found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
        assert [(algo, compute) for algo, compute, _ in found] == CODED
        assert all(distance <= CLOSE for _, _, distance in found), found

"""The tile of block-scaled products of 12.x with the instruction emulated, on any machine."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from moqext import _C, reference

from ..quantize_cases import swizzled
from ..work import each

SOURCE = Path(__file__).with_name("block_tile.cpp")
CSRC = Path(__file__).resolve().parents[2] / "csrc"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("tile") / "block_tile"
    subprocess.run(["g++", "-std=c++17", "-O2", f"-I{CSRC}", SOURCE, "-o", path, "-lpthread"], check=True)
    return path


def operand(rng, rows, columns):
    """Codes, scales in rows and their values; scales of all sizes that are no NaN, with zeros."""
    codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (rows, columns // 16), dtype=np.uint8)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, columns)
    values = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibbles & 7] * np.where(nibbles & 8, -1, 1)
    return codes, scales, values * np.repeat(reference.decode(scales, "e4m3"), 16, axis=1)


@each("rows, tokens, columns", [(64, 64, 64), (16, 1, 32), (80, 7, 96), (144, 70, 256), (128, 130, 544)])
def test_fragments_and_schedule_are_those_of_the_instruction(rng, program, tmp_path, rows, tokens, columns):
    """Exact but for sums, with rows, tokens and columns that fill no tile and no step."""
    w, x = operand(rng, rows, columns), operand(rng, tokens, columns)
    files = []
    for name, (codes, scales, _) in (("w", w), ("x", x)):
        for part, array in (("codes", codes), ("scales", swizzled(scales))):
            files.append(tmp_path / f"{name}_{part}")
            files[-1].write_bytes(np.ascontiguousarray(array).tobytes())
    sizes = [str(size) for size in (rows, tokens, columns)]
    done = subprocess.run([program, *sizes, *files], capture_output=True, check=True)
    y = np.frombuffer(done.stdout, np.float32).reshape(tokens, rows)
    magnitude = np.abs(x[2]) @ np.abs(w[2]).T
    assert (np.abs(y - x[2] @ w[2].T) <= -(-columns // 64) * 2.0**-24 * 1.01 * magnitude).all()


NAME = "cuda:sm120_nvfp4_block"


def plan(capability="12.0", compute="fp4", columns=4096, rows=(4096,)):
    about = ("NVFP4", columns, rows, None, "bfloat16", "cuda:0", compute)
    return _C.linear_plan(*about, capability=capability)


def test_it_runs_only_where_it_is_named(monkeypatch):
    for compute in ("fp4", "auto"):
        assert dict(plan(compute=compute).explain())[NAME] == "runs only where MOQEXT_KERNEL names it"
        assert NAME not in {plan(compute=compute).backend(tokens) for tokens in (1, 64, 8192)}
    assert "never run on its chip" in dict(plan().notes())[NAME]
    monkeypatch.setenv("MOQEXT_KERNEL", NAME)
    for capability in ("12.0", "12.1"):
        assert {plan(capability).backend(tokens) for tokens in (1, 64, 8192)} == {NAME}
        assert plan(capability, "auto").compute_for(1) == "fp4"


@each(
    "options, text",
    [
        ({"capability": "10.0"}, "needs compute capability 12.0 or 12.1, this device has 10.0"),
        ({"capability": "9.0"}, "needs compute capability 12.0 or 12.1, this device has 9.0"),
        ({"compute": "exact"}, "multiplies NVFP4 codes to 16-bit outputs"),
        ({"columns": 4112}, "in_features to be a multiple of 32, got 4112"),
        ({"rows": (40,)}, "each of out_partitions to be a multiple of 16, got 40"),
    ],
)
def test_others_are_refused_by_name(monkeypatch, options, text):
    monkeypatch.setenv("MOQEXT_KERNEL", NAME)
    with pytest.raises(_C.UnsupportedQuantization, match=text):
        plan(**options)

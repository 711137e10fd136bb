"""The row kernels of every level this machine can run give the bits of the portable ones, on any threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moqext
from moqext import _C, ops

OUTPUTS = Path(__file__).parent / "row_outputs.py"
LEVELS = ("avx2", "avx512")  # those with row kernels of their own


def run(level, *arguments):
    """The lines that row_outputs.py prints at a level; skips where this machine runs another."""
    done = subprocess.run(
        [sys.executable, str(OUTPUTS), *map(str, arguments)],
        env={**os.environ, "MOQEXT_ISA": level, "PYTHONPATH": str(Path(moqext.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    found, *lines = done.stdout.split()
    if found != level:
        pytest.skip(f"this machine has no {level}")
    return lines


@pytest.fixture(scope="module")
def portable(tmp_path_factory):
    """A seed, and what the portable kernels make of it."""
    seed = int(os.environ.get("MOQEXT_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
    file = tmp_path_factory.mktemp("rows") / "portable.json"
    run("portable", "outputs", seed, file)
    return seed, json.loads(file.read_text())


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_gives_the_bits_of_the_portable_kernels(level, portable, tmp_path):
    seed, expected = portable
    print(f"MOQEXT_SEED={seed}")
    run(level, "outputs", seed, tmp_path / "level.json")
    actual = json.loads((tmp_path / "level.json").read_text())
    assert list(actual) == list(expected)
    assert len(actual) > 1000
    different = [name for name in expected if actual[name] != expected[name]]
    assert not different, f"{len(different)} of {len(expected)}: {different[:5]}"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["e4m3", "e2m1", "bf16", "fp16"])
def test_every_float32_encodes_to_the_portable_code(format):
    level = _C.cpu_isa()
    if level == "portable":
        pytest.skip("this machine has the portable kernels only")
    level = "avx2" if level == "avx2" else "avx512"
    expected, actual = run("portable", "every", format), run(level, "every", format)
    assert len(actual) == 256
    assert [i for i in range(256) if actual[i] != expected[i]] == []


@pytest.fixture
def default_threads():
    yield
    moqext.set_num_threads(0)


@pytest.mark.usefixtures("default_threads")
@pytest.mark.parametrize("shape", [(700, 1040), (3, 262144), (1_000_000,), (40_000, 16)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(shape, rng):
    x = rng.standard_normal(shape).astype(np.float32)
    special = x.copy()
    special.flat[rng.integers(x.size, size=3)] = [np.nan, -np.nan, np.inf]
    for tensor in (x, x.astype(np.float16), special, x[::-1], np.asfortranarray(x)):
        for scheme in ("fp8_tensor", "fp8_token", "fp8_group", "nvfp4"):
            moqext.set_num_threads(1)
            expected = ops.quantize(tensor, scheme)
            for threads in (2, 3, 7):
                moqext.set_num_threads(threads)
                for one, other in zip(ops.quantize(tensor, scheme), expected, strict=True):
                    assert one.tobytes() == other.tobytes(), f"{scheme}, {threads} threads"


@pytest.mark.usefixtures("default_threads")
def test_any_number_of_threads_dequantizes_to_the_same_bits(rng):
    codes = rng.integers(0, 256, (3, 200, 1040), dtype=np.uint8)
    second = np.float32(0.3).reshape(())
    for algo, scale, rest in (
        ("FP8", rng.random((3, 200, 1), np.float32), {}),
        ("NVFP4", codes[..., :130] & 127, {"weight_scale_2": second}),
    ):
        for dtype in ("float32", "float16"):
            moqext.set_num_threads(1)
            expected = ops.dequantize(codes, algo, weight_scale=scale, dtype=dtype, **rest)
            for threads in (2, 3, 7):
                moqext.set_num_threads(threads)
                actual = ops.dequantize(codes, algo, weight_scale=scale, dtype=dtype, **rest)
                assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes(), (
                    f"{algo}, {threads} threads"
                )

"""Products of NVFP4 codes on the device by a stand-in for cuBLASLt: what the library gets, on any chip.

The layer is planned for a chip with FP4 tensor cores and runs on the one that is here. The stand-in
multiplies on the host, and takes nothing that the library is not documented to take.
"""

import pytest

from .stand_in import StandIn

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

LAYER = """
import numpy as np
import torch
from moqext import _C, reference
from moqext.ops.scalars import as_tensors
from tests.linear_cases import assert_close, random_case, random_x, smoothed, with_pairs
from tests.cuda.cases import params_to_cuda, poisoned, to_cuda, to_numpy

rng = np.random.default_rng(%d)
FP4 = "cuda:cublaslt_fp4"

class Layer:
    def __init__(self, case, compute, dtype="bfloat16"):
        about = (case.algo, case.in_features, case.out_partitions, None, dtype, "cuda:0", compute)
        self.case, self.dtype = case, dtype
        self.plan = _C.linear_plan(*about, capability="10.0", pretend=True, rank=case.rank)
        listed = {name: as_tensors(parts) for name, parts in params_to_cuda(case.listed()).items()}
        self.params = self.plan.prepare(listed, None)
    def keep(self, tokens):
        self.plan.keep(tokens, FP4, 0)
        assert self.plan.backend(tokens) == FP4 and self.plan.compute_for(tokens) == "fp4"
    def __call__(self, x, bias=None, out=None):
        rows = sum(self.case.out_partitions)
        out = poisoned(*x.shape[:-1], rows, dtype=self.dtype) if out is None else out
        bias = None if bias is None else to_cuda(bias)
        return self.plan.run(to_cuda(x, self.dtype), self.params, bias, out, None)
    def check(self, x, bias=None):
        y = to_numpy(self(x, bias))
        expected = self.case.expected(reference.as_float32(x), "fp4", bias=bias, x_dtype=self.dtype)
        assert_close(y, expected, self.dtype)
        return y
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return StandIn(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture
def run(rng, library):
    head = LAYER % int(rng.integers(2**31))
    return lambda code, **variables: library.run(head + code, MOQEXT_KERNEL="", **variables)


def test_codes_and_scales_are_those_of_the_layer(run):
    """Rows that fill no tile of scales, columns that fill no four, a scale of x for each partition."""
    run("""
for columns, rows in ((1024, [256]), (544, [16, 144, 48]), (96, [400])):
    case = random_case(rng, "NVFP4", columns, rows)
    for dtype in ("bfloat16", "float16"):
        layer = Layer(case, "fp4", dtype)
        bias = rng.standard_normal(sum(rows)).astype(np.float32)
        for tokens in (1, 3, 128, 130):
            layer.check(random_x(rng, (tokens, columns), dtype))
            layer.check(random_x(rng, (tokens, columns), dtype), bias)
""")


def test_packed_weights_are_unpacked_to_the_bits_of_fp4(run):
    """Tensors prepared for "auto" are those of exact kernels."""
    run("""
for algo, columns, rows in (("NVFP4", 1024, [256]), ("NVFP4", 544, [16, 144, 48]), ("NVFP4_AWQ", 96, [400])):
    case = random_case(rng, algo, columns, rows)
    case = smoothed(rng, case) if algo == "NVFP4_AWQ" else case
    auto, fp4 = Layer(case, "auto"), Layer(case, "fp4")
    assert "fold_scale" not in auto.params
    bias = rng.standard_normal(sum(rows)).astype(np.float32)
    for tokens in (5, 160):
        auto.keep(tokens)
        for given in (None, bias):
            x = random_x(rng, (tokens, columns), "bfloat16")
            assert auto.check(x, given).tobytes() == to_numpy(fp4(x, given)).tobytes()
""")


def test_pairs_and_odd_results_go_through_the_workspace(run):
    run("""
case = with_pairs(rng, random_case(rng, "NVFP4_SVD", 640, [32, 128, 16]), 24)
layer = Layer(case, "auto")
layer.keep(33)
x = random_x(rng, (33, 640), "bfloat16")
y = to_numpy(layer(x)).tobytes()
expected = case.expected(reference.as_float32(x), "fp4", x_dtype="bfloat16")
difference = reference.as_float32(np.frombuffer(y, np.uint16).reshape(33, 176)).astype(np.float64) - expected
assert np.linalg.norm(difference) <= 4e-3 * np.linalg.norm(expected)
memory = poisoned(35, 187, dtype="bfloat16")
layer(x, out=memory[1:-1, 3:179])
assert to_numpy(memory[1:-1, 3:179].contiguous()).tobytes() == y
assert int((~memory.isnan()).sum()) == 33 * 176
""")


def test_a_call_without_a_scale_of_x_is_exact(run):
    """The checkpoint may have none; "fp4" finds it, "auto" leaves x as it is."""
    run("""
case = random_case(rng, "NVFP4", 512, [128], input_scale=False)
auto, fp4 = Layer(case, "auto"), Layer(case, "fp4")
assert "input_scale" not in auto.params
auto.keep(64)
for tokens in (1, 64, 64, 1024):
    x = random_x(rng, (tokens, 512), "bfloat16")
    assert_close(to_numpy(auto(x)), case.expected(reference.as_float32(x)), "bfloat16")
fp4.check(random_x(rng, (17, 512), "bfloat16"))
""")


def test_the_next_kernel_runs_what_the_library_has_nothing_for(run):
    """Numbers of tokens between others are exact with "auto", and emulated with "fp4"."""
    run(
        """
case = random_case(rng, "NVFP4", 512, [128, 64])
fp4, auto = Layer(case, "fp4"), Layer(case, "auto")
auto.keep(16)
for tokens, kernel in ((16, FP4), (40, "cuda:simt"), (200, FP4)):
    assert fp4.plan.backend(tokens) == kernel
    fp4.check(random_x(rng, (tokens, 512), "bfloat16"))
x = random_x(rng, (40, 512), "bfloat16")
assert auto.plan.compute_for(40) == "exact"
assert_close(to_numpy(auto(x)), case.expected(reference.as_float32(x)), "bfloat16")
""",
        lacks="fp4 32 100",
    )

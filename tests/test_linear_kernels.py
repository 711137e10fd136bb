"""Every CPU kernel of the plan table that this machine can run, against the float64 reference."""

import numpy as np
import pytest

from moqext import LinearMethod, reference, set_num_threads

from .linear_cases import (
    ALGOS,
    COMPUTES,
    assert_close,
    assert_within_rounding,
    poisoned,
    random_case,
    random_x,
)


def run(case, x, dtype, compute="exact"):
    method = case.method(dtype=dtype, compute=compute)
    out = poisoned((*x.shape[:-1], method.out_features), dtype)
    return method(x, method.prepare(case.listed()), out=out)


KERNELS = [name for name, reason in LinearMethod("NVFP4", 32, [8])._plan.explain() if reason is None]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_every_kernel_this_cpu_can_run(rng, monkeypatch, algo, compute, kernel):
    """Shapes around every tile size, few and many rows of x, K that leaves a part of every step."""
    monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    columns = 1232 if algo.endswith("NVFP4") else 1205
    case = random_case(rng, algo, columns, [130, 31])
    for tokens in (1, 3, 5, 9, 33, 260):
        x = random_x(rng, (tokens, columns), "bfloat16")
        values = reference.as_float32(x)
        y = run(case, x, "bfloat16", compute)
        expected = case.expected(values, compute)
        assert_within_rounding(y, expected, case.magnitude(values, compute), "bfloat16")
        assert_close(y, expected, "bfloat16")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("algo", ALGOS)
def test_the_number_of_threads_changes_nothing(rng, monkeypatch, algo, kernel):
    monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    case = random_case(rng, algo, 256, [200, 300])
    x = random_x(rng, (40, 256), "bfloat16")
    try:
        outputs = []
        for threads in (1, 2, 3, 7, 16):
            set_num_threads(threads)
            outputs.append(run(case, x, "bfloat16"))
    finally:
        set_num_threads(0)
    for y in outputs[1:]:
        np.testing.assert_array_equal(y, outputs[0])


def test_bfloat16_kernels_leave_other_activations_alone():
    """float32 and float16 values do not fit bfloat16; quantized ones do."""
    kernels = dict(LinearMethod("NVFP4", 32, [8], dtype="float16")._plan.explain())
    for name in ("cpu:avx512bf16", "cpu:amx"):
        assert kernels[name] is not None

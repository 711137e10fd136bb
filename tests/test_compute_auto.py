"""compute="auto": which of its products a call takes, on any machine, and results on the CPU."""

import numpy as np
import pytest

from moqext import _C, LinearMethod

from .linear_cases import random_case, random_x

FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
ALGOS = (*FP8, "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
TOKENS = (1, 16, 64, 200, 1024, 8192)


def plan(compute, algo="NVFP4", capability="9.0", dtype="bfloat16", shape=(8192, 8192)):
    rows, columns = shape
    return _C.linear_plan(algo, columns, [rows], None, dtype, "cuda:0", compute, capability=capability)


def runnable(of):
    return {name for name, reason in of.explain() if reason is None}


@pytest.mark.parametrize("algo", ALGOS)
def test_it_is_exact_on_the_cpu(rng, algo):
    case = random_case(rng, algo, 544, [70, 24])
    exact, auto = case.method(), case.method(compute="auto")
    assert auto.prepared_params == exact.prepared_params
    x = random_x(rng, (40, 544), "bfloat16")
    y = [method(x, method.prepare(case.listed())) for method in (exact, auto)]
    np.testing.assert_array_equal(*y)
    assert [auto.compute_for(tokens) for tokens in TOKENS] == ["exact"] * len(TOKENS)


@pytest.mark.parametrize("algo", ["NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"])
def test_on_hopper_the_kernels_of_both_can_run_and_the_faster_one_does(algo):
    exact, fp8, auto = (plan(compute, algo) for compute in ("exact", "fp8", "auto"))
    assert runnable(auto) == runnable(exact) | runnable(fp8)
    for tokens in (*TOKENS, 2**33):
        by = {"exact": exact, "fp8": fp8}[auto.compute_for(tokens)]
        assert auto.backend(tokens) == by.backend(tokens)
    assert auto.compute_for(1) == auto.compute_for(64) == "exact"
    assert auto.compute_for(1024) == auto.compute_for(8192) == "fp8"


def test_the_prepared_tensors_are_those_of_fp8():
    exact, fp8, auto = (plan(compute).prepared_params() for compute in ("exact", "fp8", "auto"))
    assert auto == fp8
    assert [param for param in auto if param[0] != "fold_scale"] == exact


def test_a_choice_that_is_kept_says_what_is_multiplied():
    auto = plan("auto")
    auto.keep(1, "cuda:sm90_nvfp4_fp8_medium", 0)
    auto.keep(1024, "cuda:sm90_nvfp4_prefill", 0)
    assert auto.compute_for(1) == "fp8"
    assert auto.compute_for(1024) == "exact"


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"])
def test_mxfp8_is_fp8_on_cuda_and_exact_on_the_cpu(capability):
    exact, fp8, auto = (plan(compute, "MXFP8", capability) for compute in ("exact", "fp8", "auto"))
    assert auto.prepared_params() == fp8.prepared_params() != exact.prepared_params()
    for tokens in TOKENS:
        assert auto.compute_for(tokens) == "fp8"
        assert auto.backend(tokens) == fp8.backend(tokens)
    here = LinearMethod("MXFP8", 64, [32], compute="auto")
    assert {here.compute_for(tokens) for tokens in TOKENS} == {"exact"}
    assert here.prepared_params == LinearMethod("MXFP8", 64, [32]).prepared_params


@pytest.mark.parametrize("capability", ["8.0", "8.9"])
def test_it_is_exact_on_older_chips(capability):
    auto = plan("auto", capability=capability)
    assert {auto.compute_for(tokens) for tokens in TOKENS} == {"exact"}
    assert auto.backend(1024) == plan("exact", capability=capability).backend(1024) == "cuda:sm80_nvfp4"


SHAPES = ((8192, 8192), (28672, 4096), (4096, 14336), (4096, 4096), (1024, 1024))


@pytest.mark.parametrize("chip", ["10.0", "10.3", "12.0", "12.1", "RTX 5090"])
@pytest.mark.parametrize("algo", ["NVFP4", "NVFP4_AWQ", "NVFP4_SVD"])
def test_many_tokens_are_fp4_on_blackwell(chip, algo):
    """Weights that were calibrated for NVFP4 activations are multiplied so, beyond the tokens of decode."""
    for shape in SHAPES:
        auto, exact = (plan(compute, algo, chip, shape=shape) for compute in ("auto", "exact"))
        computes = [
            auto.compute_for(tokens) for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 8192)
        ]
        assert computes == sorted(computes)  # exact, then fp4
        assert computes[:4] == ["exact"] * 4
        assert computes[-2:] == ["fp4"] * 2
        assert auto.backend(1) == exact.backend(1) == "cuda:sm80_nvfp4"
        assert auto.backend(8192) == "cuda:cublaslt_fp4"
        assert runnable(auto) == runnable(exact) | {"cuda:cublaslt_fp4"}


def test_prepared_tensors_of_blackwell_are_exact_ones_and_the_scale_of_x():
    exact, auto = (plan(compute, capability="10.0").prepared_params() for compute in ("exact", "auto"))
    assert auto == [*exact, ("input_scale", (1,), "float32", "scale", False)]


@pytest.mark.parametrize("algo", ["W4A16_NVFP4", "MXFP4"])
def test_weights_without_a_scale_of_x_are_exact_on_blackwell(algo):
    auto = plan("auto", algo, "10.0")
    assert {auto.compute_for(tokens) for tokens in TOKENS} == {"exact"}
    assert {auto.backend(tokens) for tokens in TOKENS} == {"cuda:sm80_nvfp4"}


def test_a_call_without_a_scale_of_x_is_exact_on_blackwell():
    auto = plan("auto", capability="10.0")
    auto.keep(1024, "cuda:cublaslt_fp4", 0)
    for tokens in (*TOKENS, 1024):
        assert auto.compute_for(tokens, False) == "exact"
        assert auto.backend(tokens, input_scale=False) == "cuda:sm80_nvfp4"
    assert auto.compute_for(1024) == "fp4"
    assert plan("fp4", capability="10.0").backend(1024, False) == "cuda:cublaslt_fp4"


def test_sizes_that_the_library_does_not_take_are_exact_on_blackwell():
    for shape in ((8200, 8192), (8192, 8208)):
        auto = plan("auto", capability="10.0", shape=shape)
        assert {auto.compute_for(tokens) for tokens in TOKENS} == {"exact"}


@pytest.mark.parametrize("algo", [*FP8, "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_AWQ"])
def test_an_algorithm_that_quantizes_x_itself_has_no_choice(algo):
    exact, auto = plan("exact", algo), plan("auto", algo)
    assert runnable(auto) == runnable(exact)
    assert auto.prepared_params() == exact.prepared_params()
    assert {auto.compute_for(tokens) for tokens in TOKENS} == {"exact"}


def test_float32_is_exact():
    for capability in ("9.0", "10.0"):
        auto = plan("auto", dtype="float32", capability=capability)
        assert {auto.compute_for(tokens) for tokens in TOKENS} == {"exact"}
        assert auto.backend(1024) == "cuda:simt"


@pytest.mark.parametrize("compute", ["exact", "fp8", "fp4"])
def test_other_computes_are_what_was_asked_for(compute):
    method = LinearMethod("NVFP4", 64, [32], compute=compute)
    assert method.compute_for(1) == method.compute_for(5000) == compute


def test_sums_of_the_tensor_cores_may_be_allowed():
    assert LinearMethod("NVFP4", 64, [32], compute="auto", fast_accum=True).fast_accum


def test_an_unknown_compute_is_told_what_there_is():
    with pytest.raises(ValueError, match='compute: expected "exact", "fp8", "fp4" or "auto", got "best"'):
        LinearMethod("NVFP4", 64, [32], compute="best")

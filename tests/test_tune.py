"""LinearMethod.tune: what it measures, what it keeps and for whom, on the CPU kernels."""

import copy

import numpy as np
import pytest

from moqext import _C

from .linear_cases import random_case, random_x


def runnable(method):
    return {name for name, reason in method._plan.explain() if reason is None}


@pytest.fixture
def layer(rng):
    case = random_case(rng, "FP8", 256, [96, 32])
    method = case.method(dtype="bfloat16")
    return method, method.prepare(case.listed())


def test_every_kernel_is_measured_and_the_fastest_kept(layer):
    method, params = layer
    timings = method.tune([1, 40], params)
    for tokens in (1, 40):
        rows = [timing for timing in timings if timing.tokens == tokens]
        assert {row.kernel for row in rows} == runnable(method)
        assert {row.variant for row in rows} == {0}
        assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
        assert rows[0].seconds > 0
        assert [row.chosen for row in rows] == [True] + [False] * (len(rows) - 1)
        assert method._plan.backend(tokens) == rows[0].kernel


@pytest.mark.parametrize(
    ("tokens", "near"),
    [
        (1, [1]),
        (15, [15]),
        (16, [16]),
        (17, [17, 18]),
        (33, range(33, 37)),
        (64, range(61, 65)),
        (65, range(65, 73)),
    ],
)
def test_a_choice_holds_for_the_numbers_near_it(layer, tokens, near):
    method, _ = layer
    usual = [method._plan.backend(count) for count in range(80)]
    other = min(runnable(method) - {usual[tokens]})
    method._plan.keep(tokens, other, 0)
    now = [method._plan.backend(count) for count in range(80)]
    assert [count for count in range(80) if now[count] != usual[count]] == list(near)


def test_a_second_choice_replaces_the_first(layer):
    method, _ = layer
    for kernel in runnable(method):
        method._plan.keep(7, kernel, 0)
        assert method._plan.backend(7) == kernel


@pytest.mark.parametrize(
    ("kernel", "variant"),
    [("cuda:cublaslt", 0), ("cpu", 0), ("", 0), ("cpu:portable", 64), ("cpu:portable", -1)],
)
def test_a_choice_has_to_be_one_of_the_plan(layer, kernel, variant):
    method, _ = layer
    with pytest.raises(ValueError, match="variant" if variant else "kernel"):
        method._plan.keep(1, kernel, variant)


def test_copies_are_not_tuned(layer):
    method, params = layer
    before = [method._plan.backend(count) for count in range(70)]
    method.tune([1, 8, 64], params)
    assert [copy.copy(method)._plan.backend(count) for count in range(70)] == before


def test_a_forced_kernel_is_the_only_one(rng, monkeypatch):
    monkeypatch.setenv("MOQEXT_KERNEL", "cpu:portable")
    case = random_case(rng, "NVFP4", 64, [16])
    method = case.method(dtype="float32")
    timings = method.tune([3], method.prepare(case.listed()))
    assert [(row.kernel, row.chosen) for row in timings] == [("cpu:portable", True)]


@pytest.mark.parametrize("algo", ["FP8", "FP8_PB_WO", "NVFP4"])
def test_results_stay_within_the_contract(rng, algo):
    case = random_case(rng, algo, 128, [64])
    method = case.method(dtype="float32")
    params = method.prepare(case.listed())
    x = random_x(rng, (24, 128), "float32")
    before = method(x, params)
    method.tune([24], params)
    np.testing.assert_allclose(method(x, params), before, rtol=0, atol=1e-5 * np.abs(before).max())


def test_only_so_many_numbers(layer):
    method, _ = layer
    different = [2**power + 2 ** (power - 3) * part for power in range(3, 12) for part in range(8)]
    for tokens in different[:64]:
        method._plan.keep(tokens, "cpu:portable", 0)
    method._plan.keep(different[63], "cpu:portable", 0)
    with pytest.raises(ValueError, match="tuned for 64 numbers"):
        method._plan.keep(different[64], "cpu:portable", 0)


@pytest.mark.parametrize("tokens", [0, -1, 1.5, "1"])
def test_what_is_no_number_of_tokens_is_refused(layer, tokens):
    method, params = layer
    with pytest.raises((ValueError, TypeError), match="tokens"):
        method.tune([tokens], params)


def test_parameters_of_another_layer_are_refused(layer):
    method, params = layer
    with pytest.raises(ValueError, match="weight"):
        method.tune([1], params | {"weight": np.zeros((4, 4), np.uint8)})
    with pytest.raises(TypeError, match="params"):
        method.tune([1], [])


def test_a_plan_for_a_chip_that_is_not_here_cannot_be_measured():
    if any(device["capability"] == (9, 0) for device in _devices()):
        pytest.skip("it is here")
    plan = _C.linear_plan("FP8", 256, [64], None, "bfloat16", "cuda:0", "exact", "9.0")
    weight = np.zeros((64, 256), np.uint8)
    with pytest.raises(ValueError, match="weight: expected a tensor on cuda:0"):
        plan.measure(1, {"weight": weight, "output_scale": np.ones(64, np.float32)})


def _devices():
    try:
        return _C.cuda_devices()
    except RuntimeError:
        return []


@pytest.mark.parametrize("algo", ["FP8", "FP8_PB_WO", "NVFP4"])
@pytest.mark.parametrize("tokens", [1, 24, 100, 4096])
def test_a_plan_knows_the_variants_of_its_kernels(algo, tokens):
    """No GPU is needed. A variant that does not exist stands for the kernel's choice."""
    plan = _C.linear_plan(algo, 4096, [4096], None, "bfloat16", "cuda:0", "exact", "9.0")
    for kernel, chosen, _ in plan.estimates(tokens):
        known = {variant for variant in range(64) if plan.has_variant(tokens, kernel, variant)}
        assert {0, chosen} <= known
        assert len(known) < 64 or kernel == "cuda:cublaslt"
        assert not plan.has_variant(tokens, f"{kernel}_gone", 0)
        for variant in range(64):
            plan.keep(tokens, kernel, variant)
            assert plan.is_tuned(tokens)
            assert {plan.config(tokens)[0], plan.config(plan.bucket(tokens))[0]} == {kernel}


def test_the_chosen_kernel_alone_is_measured(layer):
    method, params = layer
    plan = method._plan
    for kernel in runnable(method):
        plan.keep(3, kernel, 0)
        ((name, variant, seconds),) = plan.measure(3, params, chosen=True)
        assert (name, variant) == (kernel, 0)
        assert seconds > 0
    assert len(plan.measure(3, params, chosen=False)) == len(runnable(method))

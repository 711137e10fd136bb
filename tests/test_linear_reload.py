"""Prepared parameters that are given: to `prepare(out=)` for a reload, and to a call.

A reload gives the bits of a fresh prepare or is refused before anything is written, and a layer refuses
parameters of another one instead of dropping what it does not know.
"""

from collections.abc import Mapping

import numpy as np
import pytest

from moqext import LinearMethod, ops

from .linear_cases import random_case, random_x, smoothed
from .work import each

# Tensors that a checkpoint of the algorithm may lack and a call reads: algo, compute, name.
OPTIONAL = [
    ("FP8", "exact", "input_scale"),
    ("NVFP4", "fp4", "input_scale"),
    ("NVFP4_AWQ", "fp4", "input_scale"),
    ("W4A8_NVFP4_FP8", "exact", "input_scale"),
    ("W4A8_NVFP4_FP8", "fp8", "input_scale"),
    ("NVFP4_AWQ", "exact", "pre_quant_scale"),
    ("NVFP4_AWQ", "fp8", "pre_quant_scale"),
    ("NVFP4_AWQ", "fp4", "pre_quant_scale"),
]
each_optional = pytest.mark.parametrize("algo, compute, name", OPTIONAL)


class Pairs(Mapping):
    """A mapping that is no dict."""

    def __init__(self, pairs):
        self._pairs = dict(pairs)

    def __getitem__(self, key):
        return self._pairs[key]

    def __iter__(self):
        return iter(self._pairs)

    def __len__(self):
        return len(self._pairs)


def case_of(rng, algo, columns=64, rows=(8, 24)):
    case = random_case(rng, algo, columns, list(rows))
    return smoothed(rng, case) if algo == "NVFP4_AWQ" else case


def without(mapping, name):
    return {key: value for key, value in mapping.items() if key != name}


def unchanged(call, params):
    """The call's exception; the tensors of `params` have the bytes they had."""
    before = {name: array.tobytes() for name, array in params.items() if array is not None}
    with pytest.raises(ValueError) as caught:
        call()
    for name, content in before.items():
        assert params[name].tobytes() == content, name
    return str(caught.value)


@each_optional
@pytest.mark.parametrize("kind", [dict, Pairs])
def test_a_reload_without_an_optional_tensor_does_not_keep_the_previous_checkpoints(
    rng, algo, compute, name, kind
):
    first, second = case_of(rng, algo), case_of(rng, algo)
    method = first.method(dtype="float32", compute=compute)
    params = method.prepare(first.listed())
    assert name in params
    source = without(second.listed(), name)
    message = unchanged(lambda: method.prepare(source, out=kind(params)), params)
    assert message.startswith(f'out["{name}"]: params have no {name} to write there')
    # Without the entry, or with None in its place, it is the reload that was meant.
    fresh = method.prepare(source)
    x = random_x(rng, (3, 64), "float32")
    for out in (without(params, name), params | {name: None}):
        again = method.prepare(source, out=kind(out))
        assert {key for key in again if again[key] is not None} == set(fresh)
        for key, value in fresh.items():
            np.testing.assert_array_equal(again[key], value, key)
        np.testing.assert_array_equal(method(x, again), method(x, fresh))


@each_optional
def test_a_reload_with_an_optional_tensor_that_out_lacks_is_refused(rng, algo, compute, name):
    first, second = case_of(rng, algo), case_of(rng, algo)
    method = first.method(dtype="float32", compute=compute)
    params = method.prepare(without(first.listed(), name))
    for out in (params, params | {name: None}):
        message = unchanged(lambda out=out: method.prepare(second.listed(), out=out), params)
        assert message == f'out["{name}"]: missing, and params have one'


@pytest.mark.parametrize("extra", ["fold_scale", "bias", "weight_scale_2", 3])
def test_a_reload_into_tensors_that_are_not_of_the_layer_is_refused(rng, extra):
    case = case_of(rng, "NVFP4")
    method = case.method(dtype="float32")
    params = method.prepare(case.listed())
    out = params | {extra: np.ones(32, np.float32)}
    message = unchanged(lambda: method.prepare(case_of(rng, "NVFP4").listed(), out=out), params)
    assert message == (
        f"out: {extra!r} is no prepared parameter of NVFP4 32x64, compute exact, float32 on cpu, "
        "which has weight, weight_scale, output_scale"
    )


def test_a_required_tensor_given_as_none_is_not_lost(rng):
    """A tensor given as None was made anew, filled and thrown away."""
    case = case_of(rng, "FP8")
    method = case.method()
    params = method.prepare(case.listed())
    for name in ("weight", "output_scale"):
        message = unchanged(
            lambda name=name: method.prepare(case_of(rng, "FP8").listed(), out=params | {name: None}), params
        )
        assert message == f'out["{name}"]: missing'


@pytest.mark.parametrize(
    "algo, compute, one, other",
    [
        ("FP8", "exact", "output_scale", "input_scale"),
        ("FP8", "exact", "weight", "output_scale"),
        ("NVFP4", "exact", "weight", "weight_scale"),
        ("NVFP4_AWQ", "fp4", "output_scale", "pre_quant_scale"),
        ("FP8_PB_WO", "exact", "weight", "weight_scale"),
    ],
)
def test_outputs_of_prepare_that_share_memory_are_refused(rng, algo, compute, one, other):
    case = case_of(rng, algo, columns=128, rows=(128, 128))
    method = case.method(compute=compute)
    params = method.prepare(case.listed())
    larger, smaller = sorted((one, other), key=lambda name: -params[name].nbytes)
    view = params[larger].reshape(-1).view(np.uint8)
    for first in (0, params[larger].nbytes - params[smaller].nbytes):
        part = view[first:][: params[smaller].nbytes].view(params[smaller].dtype)
        out = params | {smaller: part.reshape(params[smaller].shape)}
        before = {name: array.copy() for name, array in params.items()}
        with pytest.raises(BufferError, match=r'^out\["\w+"\]: shares memory with out\["\w+"\]') as caught:
            method.prepare(case.listed(), out=out)
        assert f'"{one}"' in str(caught.value)
        assert f'"{other}"' in str(caught.value)
        for name, value in before.items():
            np.testing.assert_array_equal(params[name], value, name)


def test_one_tensor_given_for_two_outputs_is_refused(rng):
    case = case_of(rng, "NVFP4", columns=64, rows=(64,))
    method = case.method()
    params = method.prepare(case.listed())
    both = np.zeros((64, 64), np.uint8)
    out = params | {"weight": both[:, :32], "weight_scale": both[:, :4]}
    with pytest.raises((BufferError, ValueError), match="weight"):
        method.prepare(case.listed(), out=out)


# --- a call with parameters of another layer


@each("kind", [dict, Pairs])
@each(
    "prepared_as, run_as, name",
    [
        (("NVFP4_AWQ", "exact"), ("NVFP4", "exact"), "pre_quant_scale"),
        (("NVFP4_AWQ", "exact"), ("W4A16_NVFP4", "exact"), "pre_quant_scale"),
        (("NVFP4_AWQ", "fp4"), ("NVFP4_AWQ", "exact"), "input_scale"),
        (("NVFP4", "fp4"), ("NVFP4", "exact"), "input_scale"),
        (("FP8", "exact"), ("FP8_PER_CHANNEL_PER_TOKEN", "exact"), "input_scale"),
    ],
)
def test_parameters_of_another_method_are_refused_by_name(rng, prepared_as, run_as, name, kind):
    """NVFP4 ran NVFP4_AWQ's as if there were no pre_quant_scale."""
    case = case_of(rng, prepared_as[0])
    params = kind(case.method(dtype="float32", compute=prepared_as[1]).prepare(case.listed()))
    method = LinearMethod(run_as[0], 64, [8, 24], dtype="float32", compute=run_as[1])
    x, y = random_x(rng, (2, 64), "float32"), np.full((2, 32), 7, np.float32)
    expected = rf"^params: '{name}' is no prepared parameter of {run_as[0]} 32x64, compute {run_as[1]}"
    with pytest.raises(ValueError, match=expected):
        method(x, params, out=y)
    assert (y == 7).all()
    with pytest.raises(ValueError, match=expected):
        method.tune([2], params)
    with pytest.raises(ValueError, match=expected):
        ops.linear(x, params, run_as[0], [8, 24], compute=run_as[1])


@pytest.mark.parametrize("name", ["bias", "fold_scale", "weigth", "", 3, None])
def test_an_entry_that_no_layer_knows_is_refused(rng, name):
    case = case_of(rng, "FP8")
    method = case.method(dtype="float32")
    params = method.prepare(case.listed()) | {name: np.zeros(32, np.float32)}
    with pytest.raises(ValueError, match="is no prepared parameter of FP8") as caught:
        method(random_x(rng, (2, 64), "float32"), params)
    assert f"params: {name!r} is" in str(caught.value)


def test_none_is_as_good_as_no_entry(rng):
    case = case_of(rng, "FP8")
    method = case.method(dtype="float32")
    params = method.prepare(without(case.listed(), "input_scale"))
    x = random_x(rng, (2, 64), "float32")
    np.testing.assert_array_equal(method(x, params | {"input_scale": None}), method(x, params))
    with pytest.raises(ValueError, match=r'params\["weight"\]: missing'):
        method(x, params | {"weight": None})
    with pytest.raises(ValueError, match=r"params: 'bias' is no prepared parameter"):
        method(x, params | {"bias": None})


def test_tensors_of_a_checkpoint_are_no_prepared_ones(rng):
    """Parameters of somebody who has not called `prepare`."""
    case = case_of(rng, "FP8")
    with pytest.raises(ValueError, match=r"'weight_scale' is no .*; pass what prepare\(\) returned$"):
        case.method(dtype="float32")(random_x(rng, (2, 64), "float32"), case.fused())


class Unsized:
    """Passes for a mapping and does not say how long it is."""

    def __init__(self, pairs):
        self._pairs = pairs

    def __getitem__(self, key):
        return self._pairs[key]

    def keys(self):
        return list(self._pairs)


def test_a_mapping_without_a_length_is_looked_through(rng):
    case = case_of(rng, "FP8")
    method = case.method(dtype="float32")
    params = method.prepare(case.listed())
    x = random_x(rng, (2, 64), "float32")
    np.testing.assert_array_equal(method(x, Unsized(params)), method(x, params))
    with pytest.raises(ValueError, match="'fold_scale' is no prepared parameter"):
        method(x, Unsized(params | {"fold_scale": x}))


# --- x of another dtype


@pytest.mark.parametrize(
    "wants, got, ways",
    [
        (
            "bfloat16",
            "float32",
            'make or load the layer with dtype="float32", or convert x, by x.to(torch.bfloat16), '
            "x.astype(ml_dtypes.bfloat16) or to its bits as uint16",
        ),
        (
            "bfloat16",
            "float64",
            "convert x, by x.to(torch.bfloat16), x.astype(ml_dtypes.bfloat16) or to its bits as uint16",
        ),
        (
            "float16",
            "float32",
            'make or load the layer with dtype="float32", or convert x, by x.to(torch.float16) or '
            "x.astype(numpy.float16)",
        ),
        (
            "float32",
            "float16",
            'make or load the layer with dtype="float16", or convert x, by x.to(torch.float32) or '
            "x.astype(numpy.float32)",
        ),
    ],
)
def test_x_of_another_dtype_says_what_to_do(rng, wants, got, ways):
    case = case_of(rng, "FP8")
    method = case.method(dtype=wants)
    params = method.prepare(case.listed())
    with pytest.raises(TypeError) as caught:
        method(np.zeros((2, 64), got), params)
    assert str(caught.value) == f"x: expected {wants}, got {got}: {ways}"

"""Modules that share tensors: a reload of one leaves the others what they were."""

import copy

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

from moqext_torch import QuantLinear, QuantMoE  # noqa: E402

from .torch_cases import case_of, filled, random_x, tensors_of  # noqa: E402
from .torch_moe_cases import TOP_K, filled_moe, moe_case, random_call, stacks_of  # noqa: E402


def assigned(layer, case):
    """A second module with the tensors of the first, as from a state dict."""
    state = layer.state_dict()
    other = QuantLinear(
        case.in_features, case.out_partitions, case.algo, device="meta", optional=optional(state)
    )
    other.load_state_dict(state, assign=True)
    return other


def optional(state):
    return [role for role in ("input_scale", "pre_quant_scale") if role in state]


def assigned_when_prepared(layer, case):
    return assigned(layer.prepare(), case)


def copied(layer, case):
    return copy.copy(layer.prepare())


def tied(layer, case):
    other = filled(case)
    other.weight = layer.weight
    return other


@pytest.mark.parametrize("share", [assigned, assigned_when_prepared, copied, tied])
@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_a_reload_leaves_the_other_what_it_was(rng, algo, share):
    """Each way round: one had new codes under old scales."""
    first, second = case_of(rng, algo), case_of(rng, algo)
    x = random_x(rng, first, 3)
    before, after = filled(first)(x), filled(second)(x)
    for reloaded in (0, 1):
        layer = filled(first)
        pair = [layer, share(layer, first)]
        assert all(each.prepare()(x).equal(before) for each in pair)
        pair[reloaded].load_state_dict(tensors_of(second))
        assert pair[reloaded](x).equal(after)
        assert pair[1 - reloaded](x).equal(before)


def test_a_module_that_is_not_prepared_leaves_the_other_what_it_was(rng):
    first, second = case_of(rng, "NVFP4"), case_of(rng, "NVFP4")
    x = random_x(rng, first, 3)
    layer = filled(first).prepare()
    other = assigned(layer, first)
    other.load_state_dict(tensors_of(second))
    assert layer(x).equal(filled(first)(x))
    assert other(x).equal(filled(second)(x))


def test_a_scale_of_zero_leaves_the_others_codes(rng):
    """Preparing makes codes under it zeros, where they are."""
    case = case_of(rng, "NVFP4")
    x = random_x(rng, case, 3)
    layer = filled(case).prepare()
    other = assigned(layer, case).prepare()
    expected = layer(x)
    zeros = torch.zeros_like(tensors_of(case)["weight_scale"].view(torch.uint8))
    other.load_state_dict({"weight_scale": zeros.view(torch.float8_e4m3fn)}, strict=False)
    assert not other(x).any()
    assert layer(x).equal(expected)


def test_a_module_alone_is_reloaded_in_place(rng):
    """For graphs that read its memory: it is alone again when the other is gone."""
    first, second = case_of(rng, "FP8"), case_of(rng, "FP8")
    layer = filled(first).prepare()
    other = assigned(layer, first).prepare()
    del layer
    where = other.weight.data_ptr()
    other.load_state_dict(tensors_of(second))
    assert other.weight.data_ptr() == where


def test_experts_too(rng):
    first, second = moe_case(rng, "NVFP4"), moe_case(rng, "NVFP4")
    layer, call = filled_moe(first).prepare(), random_call(rng, 3)
    other = QuantMoE(*first.about, top_k=TOP_K, device="meta", optional=stacks_of(first))
    other.load_state_dict(layer.state_dict(), assign=True)
    before = layer(*call)
    assert other(*call).equal(before)
    other.load_state_dict(stacks_of(second))
    assert layer(*call).equal(before)
    assert other(*call).equal(filled_moe(second)(*call))

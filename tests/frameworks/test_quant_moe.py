"""QuantMoE: the experts of a checkpoint as a module, and what torch does with modules."""

import copy
import io
import pickle

import numpy as np
import pytest

import moqext

from ..linear_cases import LIMITS
from ..moe_cases import ALGOS

torch = pytest.importorskip("torch", minversion="2.10")

import moqext_torch.quant_moe  # noqa: E402
from moqext_torch import QuantMoE  # noqa: E402
from moqext_torch.moe_op import find_moe_method  # noqa: E402

from .torch_cases import FLOATS  # noqa: E402
from .torch_moe_cases import (  # noqa: E402
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOP_K,
    filled_moe,
    moe_case,
    random_call,
    stacks_of,
)

LAYOUTS = [
    {},
    {"gated": False, "activation": "relu2"},
    {"interleaved": True, "activation": "swigluoai", "bias": "bfloat16", "alpha": 1.5, "limit": 5.0},
    {"bias": "float32", "activation": "gelu_tanh"},
]


def possible(algo, layout):
    return not (algo == "FP8_PB_WO" and layout.get("interleaved"))


CASES = [(algo, layout) for algo in ALGOS for layout in LAYOUTS if possible(algo, layout)]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("algo, layout", CASES)
def test_equals_the_reference(rng, algo, layout, dtype):
    case = moe_case(rng, algo, **layout)
    call = random_call(rng, 2, 5, dtype=FLOATS[dtype])
    y = filled_moe(case, dtype=FLOATS[dtype])(*call)
    assert (y.dtype, y.shape) == (call[0].dtype, (2, 5, HIDDEN))
    expected = case.expected(*call, dtype=dtype)
    # Codes of activations flip where float32 and float64 differ, and g is rounded to the dtype, too.
    quiet = algo in ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")
    limit = 2 * (LIMITS[dtype][0] if quiet else LIMITS["bfloat16"][0])
    assert np.linalg.norm(y.float().numpy() - expected) <= limit * np.linalg.norm(expected)


@pytest.mark.parametrize("algo, layout", CASES)
def test_equals_the_method_bit_for_bit(rng, algo, layout):
    """The tensors of torch and its dispatcher change nothing."""
    case = moe_case(rng, algo, **layout)
    call = random_call(rng, 7, dtype=torch.float32, kind="hostile", ids_dtype="int64")
    method = case.method(dtype="float32")
    expected = method(call[0], method.prepare(stacks_of(case)), *call[1:])
    layer = filled_moe(case, dtype=torch.float32)
    torch.testing.assert_close(layer(*call), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(layer._dispatch(*call, None, False), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("algo, layout", CASES)
def test_tensors_are_typed_as_in_the_checkpoint_and_come_back(rng, algo, layout):
    case = moe_case(rng, algo, **layout)
    given, layer = stacks_of(case), filled_moe(case)
    for prepare in (False, True):
        if prepare:
            layer.prepare()
        state = layer.state_dict()
        assert state.keys() == given.keys()
        for role, tensor in given.items():
            kept = tensor.float() if role.endswith("pre_quant_scale") else tensor
            assert state[role].dtype == kept.dtype, role
            assert state[role].equal(kept), role
    assert {name for name, _ in layer.named_parameters()} == {"w13_weight", "w2_weight"}
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert layer.w13_weight.dtype == (torch.uint8 if "FP4" in algo else torch.float8_e4m3fn)


def test_nothing_is_kept_twice(rng):
    """Prepared codes have the memory of the checkpoint's; folded ones take their place."""
    layer = filled_moe(moe_case(rng, "NVFP4"))
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    before = [getattr(layer, name).data_ptr() for name in names]
    layer.prepare()
    assert [getattr(layer, name).data_ptr() for name in names] == before
    folded = filled_moe(moe_case(rng, "NVFP4"), compute="fp8").prepare()
    assert folded.w13_weight.shape == (EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    assert folded.w13_weight_scale is None
    sizes = {name: buffer.numel() for name, buffer in folded.named_buffers()}
    assert max(sizes.values()) == EXPERTS * 2 * INTERMEDIATE, sizes  # factors of rows


@pytest.mark.parametrize("algo", ["NVFP4", "MXFP8"])
def test_folded_codes_have_no_checkpoint_form(rng, algo):
    case = moe_case(rng, algo)
    layer = filled_moe(moe_case(rng, algo), compute="fp8").prepare()
    for ask in (layer.state_dict, layer.half):
        with pytest.raises(RuntimeError, match="compute='fp8' has the checkpoint's tensors no more"):
            ask()
    layer.load_state_dict(stacks_of(case))  # but they can be loaded over
    call = random_call(rng, 2)
    assert layer(*call).equal(filled_moe(case, compute="fp8")(*call))


@pytest.mark.parametrize("algo, layout", CASES)
def test_a_load_after_prepare_prepares_in_place(rng, algo, layout):
    first, second = moe_case(rng, algo, **layout), moe_case(rng, algo, **layout)
    layer, call = filled_moe(first), random_call(rng, 3)
    before = layer(*call)
    places = {role: tensor.data_ptr() for role, tensor in layer._prepared.items()}
    held = layer.w13_weight
    layer.load_state_dict(stacks_of(second))
    assert layer.is_prepared
    assert {role: tensor.data_ptr() for role, tensor in layer._prepared.items()} == places
    assert layer.w13_weight is held
    assert layer(*call).equal(filled_moe(second)(*call))
    assert not layer(*call).equal(before)
    state = layer.state_dict()
    assert all(
        state[role].equal(t) for role, t in stacks_of(second).items() if not role.endswith("pre_quant_scale")
    )


def test_activation_scales_may_come_and_go(rng):
    """One that the new checkpoint lacks must not stay in use; without any, FP8 does not run."""
    case = moe_case(rng, "FP8")
    tensors, call = stacks_of(case), random_call(rng, 3)
    layer = filled_moe(case)
    expected = layer(*call)
    without = {role: tensor for role, tensor in tensors.items() if "input_scale" not in role}
    with pytest.raises(RuntimeError, match=r"Missing key.*w13_input_scale"):
        layer.load_state_dict(without)
    fresh = QuantMoE(*case.about, top_k=TOP_K)
    fresh.load_state_dict(without)
    assert "w2_input_scale" not in fresh.state_dict()
    with pytest.raises(ValueError, match=r"w13_input_scale.*: missing in every expert"):
        fresh(*call)
    fresh.load_state_dict(tensors)
    assert fresh(*call).equal(expected)


def test_experts_without_an_activation_scale(rng):
    """NaN is no scale: they have the largest of the others, and the checkpoint's own come back."""
    case = moe_case(rng, "FP8")
    stacks = stacks_of(case)
    stacks["w13_input_scale"][[0, 2]] = torch.nan
    layer = QuantMoE(*case.about, top_k=TOP_K)
    layer.load_state_dict(stacks)
    with pytest.warns(RuntimeWarning, match="w13_input_scale"):
        layer.prepare()
    largest = float(np.nanmax(stacks["w13_input_scale"].numpy()))
    assert layer.prepared_w13_input_scale.eq(largest).all()
    torch.testing.assert_close(
        layer.state_dict()["w13_input_scale"], stacks["w13_input_scale"], rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("prepared", [False, True])
def test_what_does_not_belong_is_refused_and_nothing_changes(rng, prepared):
    case = moe_case(rng, "NVFP4")
    layer, call = filled_moe(case), random_call(rng, 3)
    expected = layer(*call) if prepared else copy.deepcopy(layer)(*call)
    good = stacks_of(moe_case(rng, "NVFP4"))
    scale = "w13_weight_scale"
    for role, wrong, words in (
        ("w13_weight", good["w13_weight"][:3], r"w13_weight: expected shape \[4, 192, 64\], got \[3"),
        ("w2_weight", good["w2_weight"].float(), "w2_weight: expected torch.uint8"),
        (scale, good[scale].float(), "w13_weight_scale: expected torch.float8_e4m3fn"),
        ("w13_weight_scale_2", torch.ones(7), r"w13_weight_scale_2: expected shape \[4, 2\], got \[7\]"),
        ("w2_weight_scale_2", torch.ones(4, dtype=torch.int32), "w2_weight_scale_2: expected float32"),
    ):
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict(good | {role: wrong})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*w13_zero_point"):
        layer.load_state_dict(good | {"w13_zero_point": torch.ones(1)})
    layer.load_state_dict(stacks_of(case))
    if prepared:
        broken = good["w2_weight_scale_2"].clone()
        broken[2] = torch.nan
        with pytest.raises(RuntimeError, match=r"w2_weight_scale_2: experts\.2: expected a non-neg"):
            layer.load_state_dict(good | {"w2_weight_scale_2": broken})
    assert layer(*call).equal(expected)


def test_a_part_of_a_state_dict(rng):
    case, other = moe_case(rng, "FP8"), moe_case(rng, "FP8")
    layer, call = filled_moe(case).prepare(), random_call(rng, 2)
    part = {"w2_weight_scale": stacks_of(other)["w2_weight_scale"]}
    missing, unexpected = layer.load_state_dict(part, strict=False)
    assert set(missing) == stacks_of(case).keys() - part.keys()
    assert unexpected == []
    mixed = QuantMoE(*case.about, top_k=TOP_K)
    mixed.load_state_dict(stacks_of(case) | part)
    assert layer(*call).equal(mixed(*call))


@pytest.mark.parametrize("algo, layout", CASES)
@pytest.mark.parametrize("prepared", [False, True])
def test_copies_and_pickles(rng, algo, layout, prepared):
    def saved(layer):
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    layer, call = filled_moe(moe_case(rng, algo, **layout)), random_call(rng, 3)
    if prepared:
        layer.prepare()
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved(layer)]
    expected = layer(*call)
    for other in copies:
        assert other.is_prepared == prepared
        assert other.w13_weight.data_ptr() != layer.w13_weight.data_ptr()
        assert other(*call).equal(expected)
        assert all(t.equal(other.state_dict()[role]) for role, t in layer.state_dict().items())
    assert copies[0].method is layer.method


@pytest.mark.parametrize("prepared", [False, True])
def test_a_dtype_is_that_of_activations_alone(rng, prepared):
    case = moe_case(rng, "NVFP4", bias="bfloat16")
    layer, before = filled_moe(case), stacks_of(case)
    if prepared:
        layer.prepare()
    assert layer.half() is layer
    assert layer.is_prepared == prepared
    state = layer.state_dict()
    assert all(state[role].equal(tensor) for role, tensor in before.items())
    call = random_call(rng, 2, dtype=torch.float16)
    assert layer(*call).equal(filled_moe(case, dtype=torch.float16)(*call))
    with pytest.raises(ValueError, match=r"QuantMoE: runs in .* not in torch.float64"):
        layer.double()
    assert layer(*call).dtype == torch.float16


def test_moves_that_move_nothing_keep_everything(rng):
    layer = filled_moe(moe_case(rng, "FP8")).prepare()
    places = {role: id(tensor) for role, tensor in layer._prepared.items()}
    layer.to("cpu").to(torch.bfloat16).share_memory()
    assert {role: id(tensor) for role, tensor in layer._prepared.items()} == places
    assert layer.w13_weight.is_shared()


def test_meta(rng):
    case = moe_case(rng, "NVFP4")
    layer = QuantMoE(*case.about, top_k=TOP_K, device="meta", optional=["w13_input_scale", "w2_input_scale"])
    with pytest.raises(RuntimeError, match="the layer is on meta"):
        layer.prepare()
    layer.load_state_dict(stacks_of(case), assign=True)
    call = random_call(rng, 2)
    assert layer(*call).equal(filled_moe(case)(*call))
    assert layer.to("meta").w13_weight.is_meta
    assert not layer.is_prepared


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_any_shape_of_x(rng, shape):
    layer = filled_moe(moe_case(rng, "NVFP4"))
    assert layer(*random_call(rng, *shape)).shape == (*shape, HIDDEN)


def test_hostile_calls(rng):
    """Refused by the name of the argument, and the layer runs as before."""
    case = moe_case(rng, "NVFP4")
    layer, (x, weights, ids) = filled_moe(case), random_call(rng, 3)
    expected = layer(x, weights, ids)
    no_map = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    for call, error, words in (
        ((x[:, :-1], weights, ids), ValueError, "x: "),
        ((x.float(), weights, ids), TypeError, "x: expected bfloat16, got float32"),
        ((x, weights[:2], ids), ValueError, "topk_weights"),
        ((x, weights.double(), ids), TypeError, "topk_weights: expected float32"),
        ((x, weights, ids[:, :1]), ValueError, "topk_ids"),
        ((x, weights, ids.float()), TypeError, "topk_ids: expected int"),
        ((x, weights, ids, no_map), ValueError, "expert_map"),
        ((x, weights, ids, None, True), ValueError, "apply_router_weight_on_input"),
    ):
        with pytest.raises(error, match=words):
            layer(*call)
        if call[0].dtype == x.dtype:  # the operation has the dtype of x
            with pytest.raises(error, match=words):
                layer._dispatch(*call, *(None, False)[len(call) - 3 :])
    assert layer(x, weights, ids).equal(expected)


def test_ids_and_weights_that_count_nothing(rng):
    """Ids that are no expert's, whatever they weigh, and NaN weights in their own rows only."""
    layer, (x, weights, ids) = filled_moe(moe_case(rng, "FP8")), random_call(rng, 4)
    expected = layer(x, weights, ids)
    ids[1] = torch.tensor([-1, EXPERTS])
    weights[1], weights[2, 0] = torch.nan, torch.nan
    y = layer(x, weights, ids)
    assert y[1].eq(0).all()
    assert y[2].isnan().all()
    # Fewer tokens of an expert may be summed in another order.
    torch.testing.assert_close(y[[0, 3]], expected[[0, 3]], rtol=2**-7, atol=1e-2)


def test_expert_map(rng):
    """Experts that are elsewhere add nothing: two layers with halves of them give the whole's sum."""
    case = moe_case(rng, "NVFP4")
    call = random_call(rng, 5, dtype=torch.float32)
    whole = filled_moe(case, dtype=torch.float32)(*call)
    parts = []
    for first in (0, 2):
        here = {role: tensor[first : first + 2].clone() for role, tensor in stacks_of(case).items()}
        layer = QuantMoE(
            case.algo, 2, HIDDEN, INTERMEDIATE, top_k=TOP_K, global_num_experts=EXPERTS, dtype=torch.float32
        )
        layer.load_state_dict(here)
        numbers = torch.full((EXPERTS,), -1, dtype=torch.int32)
        numbers[first : first + 2] = torch.arange(2)
        parts.append(layer(*call, expert_map=numbers))
        assert layer._dispatch(*call, numbers, False).equal(parts[-1])
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


def test_weights_on_the_input(rng):
    case = moe_case(rng, "FP8")
    layer, call = filled_moe(case, top_k=1), random_call(rng, 6, top_k=1)
    call[1].copy_(torch.from_numpy(rng.uniform(0.2, 0.8, (6, 1))))
    y = layer(*call, apply_router_weight_on_input=True)
    expected = case.expected(*call, apply_router_weight_on_input=True)
    assert np.linalg.norm(y.float().numpy() - expected) <= 5e-3 * np.linalg.norm(expected)
    assert not y.equal(layer(*call))


def test_arguments_that_cannot_be():
    sizes = (EXPERTS, HIDDEN, INTERMEDIATE)
    with pytest.raises(ValueError, match="optional: FP8 has no w13_zero_point"):
        QuantMoE("FP8", *sizes, top_k=2, optional=["w13_zero_point"])
    with pytest.raises(moqext.UnsupportedQuantization, match="NVFP4_SVD runs as linears"):
        QuantMoE("NVFP4_SVD", *sizes, top_k=2)
    with pytest.raises(ValueError, match="activation"):
        QuantMoE("FP8", *sizes, top_k=2, activation="sigmoid")
    with pytest.raises(ValueError, match="interleaved"):
        QuantMoE("FP8_PB_WO", *sizes, top_k=2, interleaved=True)


def test_a_device_that_experts_do_not_run_on_is_refused():
    """By name, before anything is prepared."""
    about = QuantMoE("NVFP4", EXPERTS, HIDDEN, INTERMEDIATE, top_k=2).description
    with pytest.raises(
        moqext.UnsupportedQuantization, match=r"no kernel can run NVFP4 4 experts .* on cuda:63"
    ):
        find_moe_method(about, torch.bfloat16, torch.device("cuda", 63))


@pytest.mark.parametrize("prepared", [False, True])
def test_a_move_that_is_refused_changes_nothing(rng, monkeypatch, prepared):
    """A device or dtype that experts do not run on: here one that is made up."""
    layer, call = filled_moe(moe_case(rng, "NVFP4")), random_call(rng, 2)
    expected = layer(*call) if prepared else None

    def only_bfloat16(about, dtype, device):
        if dtype != torch.bfloat16:
            raise moqext.UnsupportedQuantization("experts (NVFP4) do not run there")
        return find_moe_method(about, dtype, device)

    monkeypatch.setattr(moqext_torch.quant_moe, "find_moe_method", only_bfloat16)
    before = {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()}
    with pytest.raises(moqext.UnsupportedQuantization, match="do not run there"):
        layer.half()
    assert {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()} == before
    assert (layer.dtype, layer.is_prepared) == (torch.bfloat16, prepared)
    if prepared:
        assert layer(*call).equal(expected)


def test_what_it_is_is_shown(rng):
    layer = filled_moe(moe_case(rng, "NVFP4", bias="float32")).prepare()
    assert repr(layer).startswith("QuantMoE(4 x 128 -> 96, top 2, NVFP4 g16, silu, compute=exact, bias=True")
    assert layer.method.backend in repr(layer)


def test_what_is_no_name_of_experts_is_refused(data):
    with moqext.Checkpoint(data / "exports" / "llama4_nvfp4") as ckpt:
        for wrong in (None, 3):
            with pytest.raises(TypeError, match="layer: expected a name or a record, got <class"):
                QuantMoE.from_checkpoint(ckpt, wrong)

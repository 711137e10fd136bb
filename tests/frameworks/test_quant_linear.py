"""QuantLinear: a linear of a checkpoint as a module, and what torch does with modules."""

import copy
import io
import pickle

import numpy as np
import pytest

import moqext

from ..linear_cases import LIMITS, random_case
from ..svd_files import LAYER, QKV, write_svd

torch = pytest.importorskip("torch", minversion="2.10")

from moqext_torch import QuantLinear, as_torch, prepared_tensors  # noqa: E402

from .torch_cases import ALGOS, FLOATS, case_of, filled, random_x, tensors_of  # noqa: E402


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("algo", ALGOS)
def test_equals_the_reference(rng, algo, dtype):
    case = case_of(rng, algo, (40, 24))
    x = random_x(rng, case, 2, 3, dtype=FLOATS[dtype])
    given = x.reshape(-1, case.in_features).float().numpy()
    expected = case.expected(given, x_dtype=dtype)
    y = filled(case, dtype=FLOATS[dtype])(x)
    assert (y.dtype, y.shape) == (x.dtype, (2, 3, 64))
    found = y.float().numpy().reshape(expected.shape)
    relative, largest = LIMITS[dtype]
    assert np.linalg.norm(found - expected) <= relative * np.linalg.norm(expected)
    tops = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(found - expected) <= largest * tops).all()


def test_int8_weights_have_the_bits_of_the_method(rng):
    """No genuine checkpoint is W8A16: tensors as an exporter would store them."""
    case = random_case(rng, "W8A16", 128, (40,))
    layer = QuantLinear(128, case.out_partitions, "W8A16")
    layer.load_state_dict({role: torch.from_numpy(array) for role, array in case.fused().items()})
    x = random_x(rng, case, 5)
    method = case.method(dtype="bfloat16")
    assert layer(x).equal(method(x, method.prepare(case.listed())))


@pytest.mark.parametrize("algo", ALGOS)
def test_tensors_are_typed_as_in_the_checkpoint_and_come_back(rng, algo):
    case = case_of(rng, algo)
    bias = torch.from_numpy(rng.standard_normal(40)).bfloat16()
    given = tensors_of(case) | {"bias": bias}
    layer = filled(case, bias)
    for prepare in (False, True):
        if prepare:
            layer.prepare()
        state = layer.state_dict()
        assert state.keys() == given.keys()
        for role, tensor in given.items():
            kept = tensor.float() if role == "pre_quant_scale" else tensor
            assert state[role].dtype == kept.dtype, role
            assert state[role].reshape(kept.shape).equal(kept), role
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"}
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_nothing_is_kept_twice(rng):
    """Prepared codes have the memory of the checkpoint's; folded ones take their place."""
    layer = filled(case_of(rng, "NVFP4"))
    before = layer.weight.data_ptr(), layer.weight_scale.data_ptr()
    layer.prepare()
    assert (layer.weight.data_ptr(), layer.weight_scale.data_ptr()) == before
    folded = filled(case_of(rng, "NVFP4"), compute="fp8").prepare()
    assert folded.weight.shape == (40, 128)
    assert folded.weight_scale is None
    sizes = {name: buffer.numel() for name, buffer in folded.named_buffers()}
    assert max(sizes.values()) == 40, sizes  # factors of rows


@pytest.mark.parametrize("algo", ["NVFP4", "MXFP8"])
def test_folded_codes_have_no_checkpoint_form(rng, algo):
    layer = filled(case_of(rng, algo), compute="fp8").prepare()
    for ask in (layer.state_dict, layer.half):
        with pytest.raises(RuntimeError, match="compute='fp8' on cpu has the checkpoint's tensors no more"):
            ask()
    case = case_of(rng, algo)  # but they can be loaded over
    layer.load_state_dict(tensors_of(case))
    x = random_x(rng, case, 2)
    assert layer(x).equal(filled(case, compute="fp8")(x))


@pytest.mark.parametrize("algo", ALGOS)
def test_a_load_after_prepare_prepares_in_place(rng, algo):
    first, second = case_of(rng, algo), case_of(rng, algo)
    bias = torch.zeros(40, dtype=torch.bfloat16)
    layer, x = filled(first, bias), random_x(rng, first, 3)
    layer(x)
    places = {role: tensor.data_ptr() for role, tensor in layer._prepared.items()}
    held = layer.weight
    layer.load_state_dict(tensors_of(second) | {"bias": bias + 1})
    assert layer.is_prepared
    assert {role: tensor.data_ptr() for role, tensor in layer._prepared.items()} == places
    assert layer.weight is held
    assert layer(x).equal(filled(second, bias + 1)(x))
    state = layer.state_dict()
    assert all(state[role].equal(t) for role, t in tensors_of(second).items() if role != "pre_quant_scale")


def test_a_bias_of_another_dtype_is_loaded_in_place_too(rng):
    """The float32 copy that the kernel reads kept the bias of the earlier checkpoint's place."""
    case = case_of(rng, "NVFP4")
    bias = torch.ones(40, dtype=torch.bfloat16)
    layer, x = filled(case, bias, dtype=torch.float16), random_x(rng, case, 2, dtype=torch.float16)
    first = layer(x)
    held = layer.prepared_bias
    layer.load_state_dict(tensors_of(case) | {"bias": bias + 7})
    assert layer.prepared_bias is held
    assert held.eq(8).all()
    assert layer(x).equal(filled(case, bias + 7, dtype=torch.float16)(x))
    assert not layer(x).equal(first)


def test_layers_made_in_inference_mode(rng):
    case, other = case_of(rng, "FP8"), case_of(rng, "FP8")
    with torch.inference_mode():
        layer, x = filled(case, torch.ones(40)), random_x(rng, case, 2)
        y = layer(x)
    layer.load_state_dict(tensors_of(other) | {"bias": torch.zeros(40)})
    assert layer(x.clone()).equal(filled(other, torch.zeros(40))(x.clone()))
    assert not layer(x.clone()).equal(y)


def test_an_activation_scale_may_come_and_go(rng):
    """One that the new checkpoint lacks must not stay in use."""
    with_scale = case_of(rng, "FP8")
    tensors = tensors_of(with_scale)
    layer, x = filled(with_scale).prepare(), random_x(rng, with_scale, 3)
    without = {role: tensor for role, tensor in tensors.items() if role != "input_scale"}
    with pytest.raises(RuntimeError, match=r"Missing key.*input_scale"):
        layer.load_state_dict(without)
    fresh = QuantLinear(128, 40, "FP8")
    fresh.load_state_dict(without)
    assert "input_scale" not in fresh.state_dict()
    dynamic = fresh(x)
    fresh.load_state_dict(tensors)
    assert fresh(x).equal(layer(x))
    assert not dynamic.equal(layer(x))


@pytest.mark.parametrize("prepared", [False, True])
def test_what_does_not_belong_is_refused_and_nothing_changes(rng, prepared):
    case = case_of(rng, "NVFP4")
    layer, x = filled(case), random_x(rng, case, 3)
    expected = layer(x) if prepared else copy.deepcopy(layer)(x)
    good = tensors_of(case_of(rng, "NVFP4"))
    for role, wrong, words in (
        ("weight", good["weight"][:8], r"weight: expected shape \[40, 64\], got \[8, 64\]"),
        ("weight", good["weight"].float(), "weight: expected torch.uint8"),
        ("weight_scale", good["weight_scale"].float(), "weight_scale: expected torch.float8_e4m3fn"),
        ("weight_scale_2", torch.ones(7), r"weight_scale_2: expected shape \[1\], got \[7\]"),
        ("weight_scale_2", torch.ones(1, dtype=torch.int32), "weight_scale_2: expected float32"),
    ):
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict(good | {role: wrong})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*zero_point"):
        layer.load_state_dict(good | {"zero_point": torch.ones(1)})
    layer.load_state_dict(tensors_of(case))
    if prepared:
        with pytest.raises(RuntimeError, match="weight_scale_2: expected a non-negative finite"):
            layer.load_state_dict(good | {"weight_scale_2": torch.tensor(float("nan"))})
    assert layer(x).equal(expected)


def test_a_part_of_a_state_dict(rng):
    case, other = case_of(rng, "FP8"), case_of(rng, "FP8")
    layer, x = filled(case).prepare(), random_x(rng, case, 2)
    missing, unexpected = layer.load_state_dict(
        {"weight_scale": tensors_of(other)["weight_scale"]}, strict=False
    )
    assert (missing, unexpected) == (["weight", "input_scale"], [])
    mixed = QuantLinear(128, 40, "FP8")
    mixed.load_state_dict(tensors_of(case) | {"weight_scale": tensors_of(other)["weight_scale"]})
    assert layer(x).equal(mixed(x))


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("prepared", [False, True])
def test_copies_and_pickles(rng, algo, prepared):
    def saved(layer):
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    case = case_of(rng, algo)
    layer, x = filled(case, torch.ones(40)), random_x(rng, case, 3)
    if prepared:
        layer.prepare()
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved(layer)]
    expected = layer(x)
    for other in copies:
        assert other.is_prepared == prepared
        assert other.weight.data_ptr() != layer.weight.data_ptr()
        assert other(x).equal(expected)
        assert all(t.equal(other.state_dict()[role]) for role, t in layer.state_dict().items())


@pytest.mark.parametrize("prepared", [False, True])
def test_a_dtype_is_that_of_activations_alone(rng, prepared):
    case = case_of(rng, "NVFP4")
    layer, before = filled(case, torch.ones(40, dtype=torch.bfloat16)), tensors_of(case)
    if prepared:
        layer.prepare()
    assert layer.half() is layer
    assert layer.is_prepared == prepared
    state = layer.state_dict()
    assert all(state[role].equal(tensor) for role, tensor in before.items())
    x = random_x(rng, case, 2, dtype=torch.float16)
    assert layer(x).equal(filled(case, torch.ones(40), dtype=torch.float16)(x))
    with pytest.raises(ValueError, match=r"not in torch.float64"):
        layer.double()
    assert layer(x).dtype == torch.float16


def test_moves_that_move_nothing_keep_everything(rng):
    layer = filled(case_of(rng, "FP8")).prepare()
    places = {role: id(tensor) for role, tensor in layer._prepared.items()}
    layer.to("cpu").to(torch.bfloat16).share_memory()
    assert {role: id(tensor) for role, tensor in layer._prepared.items()} == places
    assert layer.weight.is_shared()


def test_meta(rng):
    case = case_of(rng, "NVFP4")
    layer = QuantLinear(128, 40, "NVFP4", device="meta", optional=["input_scale"])
    with pytest.raises(RuntimeError, match="the layer is on meta"):
        layer.prepare()
    layer.load_state_dict(tensors_of(case), assign=True)
    x = random_x(rng, case, 2)
    assert layer(x).equal(filled(case)(x))
    assert layer.to("meta").weight.is_meta
    assert not layer.is_prepared


@pytest.mark.parametrize("shape", [(128,), (0, 128), (2, 0, 128)])
def test_any_shape_of_x(rng, shape):
    layer = filled(case_of(rng, "NVFP4"))
    assert layer(torch.zeros(shape, dtype=torch.bfloat16)).shape == (*shape[:-1], 40)
    with pytest.raises(ValueError, match="x: "):
        layer(torch.zeros(3, 127, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="x: expected bfloat16, got float32"):
        layer(torch.zeros(3, 128))


def test_arguments_that_cannot_be():
    with pytest.raises(ValueError, match="optional: FP8 has no zero_point"):
        QuantLinear(128, 40, "FP8", optional=["zero_point"])
    with pytest.raises(moqext.UnsupportedQuantization, match="MIXED_PRECISION"):
        QuantLinear(128, 48, "MIXED_PRECISION")


def test_what_is_no_tensor_of_torch_is_named(rng):
    linear = filled(case_of(rng, "FP8"))
    for x in (np.zeros((2, 128), np.float32), [0.0] * 128, None):
        with pytest.raises(TypeError, match=r"x: expected a torch\.Tensor, got <class"):
            linear(x)


CASES = [
    "nvfp4_bias_kvnvfp4",
    "fp8_bias_kvfp8",
    "fp8_pb_real",
    "fp8_pc_pt_bias",
    "w4a8_nvfp4_fp8",
    "fp8_uncalibrated",
]


@pytest.mark.parametrize("export", CASES)
def test_layers_of_a_checkpoint(rng, data, export):
    with moqext.Checkpoint(data / "exports" / export) as ckpt:
        attention = "model.layers.0.self_attn"
        for names in (f"{attention}.o_proj", [f"{attention}.{name}_proj" for name in "qkv"]):
            layer, expected = QuantLinear.from_checkpoint(ckpt, names), ckpt.load(names)
            x = torch.from_numpy(rng.standard_normal((3, layer.in_features), dtype=np.float32)).bfloat16()
            assert layer(x).equal(expected(x))
        record = ckpt.layer(f"{attention}.o_proj")
        alone = QuantLinear.from_checkpoint(ckpt, record).state_dict()
        assert alone.keys() == record.tensors.keys()
        for role, name in record.tensors.items():
            array = ckpt.tensor(name)
            assert as_torch(array).equal(alone[role])


def test_layers_that_cannot_be_one(data, tmp_path, rng):
    with moqext.Checkpoint(data / "exports" / "mixed_in_qkv") as ckpt:
        names = [f"model.layers.0.self_attn.{name}_proj" for name in "qk"]
        with pytest.raises(moqext.UnsupportedQuantization, match=r"q_proj is FP8, .*k_proj NVFP4"):
            QuantLinear.from_checkpoint(ckpt, names)
    ckpt = moqext.Checkpoint(write_svd(tmp_path / "svd", rng, layers=QKV, ranks=(4, 8, 4)))
    with pytest.raises(moqext.UnsupportedQuantization, match=r"q_proj has a pair of rank 4, .*k_proj of 8"):
        QuantLinear.from_checkpoint(ckpt, QKV)


@pytest.mark.parametrize("names", [LAYER, QKV])
def test_low_rank_pairs(tmp_path, rng, names):
    """A layer of a checkpoint, saved, loaded into another one, moved to another dtype, and compiled."""
    ckpt = moqext.Checkpoint(write_svd(tmp_path / "svd", rng, layers=QKV if names is QKV else [LAYER]))
    layer, expected = QuantLinear.from_checkpoint(ckpt, names), ckpt.load(names)
    x = torch.from_numpy(rng.standard_normal((3, 128), dtype=np.float32)).bfloat16()
    y = layer(x)
    assert y.equal(expected(x))
    state = layer.state_dict()
    partitions = layer.out_partitions
    assert state["lora_a"].shape == (4 * len(partitions), 128)
    other = QuantLinear(128, partitions, "NVFP4_SVD", rank=4)
    other.load_state_dict(state)
    assert other(x).equal(y)
    other.load_state_dict({role: state[role] for role in ("lora_a", "lora_b")}, strict=False)
    assert other(x).equal(y)
    assert copy.deepcopy(other)(x).equal(y)
    assert torch.compile(other, fullgraph=True, backend="eager")(x).equal(y)
    assert other.float()(x.float()).bfloat16().sub(y).abs().max() <= 0.02 * y.abs().max()
    with pytest.raises(RuntimeError, match="lora_a: expected shape"):
        QuantLinear(128, partitions, "NVFP4_SVD", rank=8).load_state_dict(state)


def test_what_is_no_linear_is_refused_by_name(data):
    with moqext.Checkpoint(data / "exports" / "llama4_nvfp4") as ckpt:
        experts = next(layer for layer in ckpt.layers() if layer.kind == "moe")
        for name in (experts.name, experts.projections[0].name):
            with pytest.raises(moqext.UnsupportedQuantization, match=f"{name}: .*is no linear; QuantMoE"):
                QuantLinear.from_checkpoint(ckpt, name)
            with pytest.raises(moqext.UnsupportedQuantization, match=f"{name}: .*is no linear; QuantMoE"):
                QuantLinear.from_checkpoint(ckpt, experts if name == experts.name else experts.projections[0])
        for wrong in (None, 3):
            with pytest.raises(TypeError, match="names: expected a name, a record or several"):
                QuantLinear.from_checkpoint(ckpt, wrong)
        with pytest.raises(ValueError, match="names: expected at least one name"):
            QuantLinear.from_checkpoint(ckpt, [])


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_prepared_parameters_of_a_layer_are_shared(data, algo):
    export = {"FP8": "llama_fp8_kvfp8", "NVFP4": "llama_nvfp4_kvfp8"}[algo]
    layer = moqext.Checkpoint(data / "checkpoints" / export).load("model.layers.0.mlp.up_proj")
    tensors = prepared_tensors(layer)
    assert tensors.keys() == layer.params.keys()
    assert tensors["weight"].dtype == (torch.float8_e4m3fn if algo == "FP8" else torch.uint8)
    for role, array in layer.params.items():
        assert tensors[role].data_ptr() == array.__array_interface__["data"][0]
    x = torch.ones(2, layer.in_features, dtype=torch.bfloat16)
    assert layer.method(x, tensors).equal(layer(x))
    with pytest.raises(TypeError, match="expected one of 1 bytes"):
        as_torch(layer.params["weight"], torch.bfloat16)


def test_bytes_of_another_type_are_not_taken_for_codes():
    """They have one byte, and other numbers."""
    e5m2 = torch.zeros(4, dtype=torch.float8_e5m2)
    for array in (np.zeros(4, np.int8), e5m2):
        with pytest.raises(TypeError, match=r"^tensor: expected torch\.float8_e4m3fn or its bytes"):
            as_torch(array, torch.float8_e4m3fn)
    assert as_torch(np.zeros(4, np.uint8), torch.float8_e4m3fn).dtype == torch.float8_e4m3fn

"""Quantized linears in models that read a weight, or its dtype, by themselves; and under autocast."""

import copy
import pickle

import pytest

import moqext
from moqext import reference

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")

import moqext_transformers  # noqa: E402, F401
from moqext_transformers.readable import DequantizedWeight, ReadableLinear  # noqa: E402

from .test_transformers import error, export, is_linear_of_file  # noqa: E402
from .torch_cases import ALGOS, FLOATS, case_of, filled, random_x  # noqa: E402


def readable(rng, algo, **options):
    layer = filled(case_of(rng, algo), **options)
    layer.__class__ = ReadableLinear
    return layer.prepare()


@pytest.mark.parametrize("algo", ALGOS)
def test_a_weight_has_dtype_and_shape_and_multiplies(rng, algo):
    """The values are those that codes and scales stand for."""
    case = case_of(rng, algo)
    layer = filled(case, dtype=torch.float32)
    layer.__class__ = ReadableLinear
    layer.prepare()
    weight = layer.weight
    assert isinstance(weight, DequantizedWeight)
    assert (weight.dtype, weight.shape, weight.device.type) == (torch.float32, (40, 128), "cpu")
    meant = reference.dequantize(case.parts[0], algo, effective=True)
    torch.testing.assert_close(torch.clone(weight), torch.from_numpy(meant), rtol=2**-23, atol=0)
    x = random_x(rng, case, 3, dtype=torch.float32)
    product = x @ torch.clone(weight).T
    assert (x @ weight.T).equal(product)
    assert torch.nn.functional.linear(x, weight).equal(product)


def test_a_weight_is_in_the_dtype_of_activations(rng):
    for dtype in FLOATS.values():
        assert readable(rng, "NVFP4", dtype=dtype).weight.to("cpu").dtype == dtype
    layer = readable(rng, "NVFP4").to(torch.float16)
    assert layer.weight.dtype == torch.float16


def test_each_part_of_a_weight_has_its_own_scale(rng):
    case = case_of(rng, "FP8", rows=(24, 16))
    layer = filled(case, dtype=torch.float32)
    layer.__class__ = ReadableLinear
    layer.prepare()
    parts = layer.stored_tensors()
    expected = [
        rows.float() * scale
        for rows, scale in zip(parts["weight"].split((24, 16)), parts["weight_scale"], strict=True)
    ]
    assert torch.clone(layer.weight).equal(torch.cat(expected))


def test_a_weight_is_not_changed_in_place(rng):
    layer = readable(rng, "FP8")
    with pytest.raises(RuntimeError, match="changes the weight of a quantized linear in place"):
        layer.weight.div_(2)
    layer.weight.clone().div_(2)


def test_a_readable_linear_is_saved_copied_and_moved_like_another(rng):
    layer = readable(rng, "NVFP4")
    other = filled(case_of(rng, "NVFP4"))
    state = layer.state_dict()
    assert state["weight"].dtype == torch.uint8
    other.load_state_dict(state)
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.clone(made.weight).equal(torch.clone(layer.weight))
    layer.load_state_dict(other.state_dict())
    assert {name for name, _ in layer.named_parameters()} == {"weight"}
    assert layer.to(torch.float32).weight.dtype == torch.float32


def test_a_weight_that_is_read_splits_a_compiled_graph(rng):
    torch._dynamo.reset()
    case = case_of(rng, "NVFP4")
    layer = readable(rng, "NVFP4")
    x = random_x(rng, case, 3)

    def call(x):
        return layer(x.to(layer.weight.dtype)) + torch.nn.functional.linear(x, layer.weight)

    with torch.no_grad():
        assert torch.compile(call, backend="eager")(x).equal(call(x))


# -------------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("x_dtype", FLOATS)
def test_autocast_casts_x_as_for_other_linears(rng, x_dtype):
    """The result has the dtype of autocast, whatever those of x and of the layer."""
    case = case_of(rng, "NVFP4")
    x = random_x(rng, case, 3, dtype=FLOATS[x_dtype])
    for dtype in FLOATS.values():
        layer = filled(case, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(x)
            assert found.dtype == torch.nn.Linear(128, 40)(x).dtype == torch.bfloat16
        assert found.equal(layer(x.to(dtype)).to(torch.bfloat16))


def test_autocast_leaves_what_is_no_float_of_a_layer(rng):
    layer = filled(case_of(rng, "NVFP4"))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="x: expected bfloat16"):
        layer(torch.zeros(3, 128, dtype=torch.int32))


def test_autocast_in_a_compiled_layer(rng):
    torch._dynamo.reset()
    case = case_of(rng, "NVFP4")
    layer = filled(case).prepare()
    x = random_x(rng, case, 3, dtype=torch.float32)

    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert compiled(x).equal(call(x))


# ---------------------------------------------------------------------------------------------------- models


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, decoder_start_token_id=0
        )
    )


def mamba():
    config = transformers.MambaConfig(
        vocab_size=96, hidden_size=64, state_size=16, num_hidden_layers=2, time_step_rank=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.MambaForCausalLM(config)


def zamba2():
    config = transformers.Zamba2Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, hybrid_layer_ids=[2],
        layers_block_type=["mamba", "mamba", "hybrid", "mamba"], mamba_d_state=16, mamba_headdim=32,
        mamba_expand=2, mamba_ngroups=1, n_mamba_heads=4,
        num_attention_heads=4, attention_head_dim=32, adapter_rank=16, num_mem_blocks=1, chunk_size=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.Zamba2ForCausalLM(config)


def deepseek_v32():
    config = transformers.DeepseekV32Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, index_n_heads=4, index_head_dim=16, index_topk=8, first_k_dense_replace=1,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.DeepseekV32ForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [t5, mamba, zamba2, deepseek_v32])
@torch.no_grad()
def test_models_that_read_weights(rng, tmp_path, make, dtype):
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = make().to(torch.bfloat16).eval()
    narrow = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.in_features % 16
    ]
    export(tmp_path, model, "W4A16_NVFP4", exclude=["lm_head", *narrow])
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert any(type(module) is ReadableLinear for module in loaded.modules())
    plain = model.float()
    with moqext.Checkpoint(tmp_path) as checkpoint:
        for layer in checkpoint.layers():
            assert is_linear_of_file(loaded.get_submodule(layer.name))
            weight = torch.from_numpy(checkpoint.dequantize(layer))
            plain.get_submodule(layer.name).weight.copy_(weight)
    call = {"input_ids": torch.arange(3, 11).reshape(2, 4)}
    if model.config.is_encoder_decoder:
        call["decoder_input_ids"] = call["input_ids"]
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    assert error(loaded(**call).logits, plain(**call).logits) <= limit


@torch.no_grad()
def test_a_sequence_classifier_under_autocast(rng, tmp_path):
    torch.manual_seed(int(rng.integers(1 << 30)))
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.BertForSequenceClassification(config).to(torch.bfloat16)
    export(tmp_path, model, "W4A16_NVFP4", exclude=("classifier",), tied=False)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(3, 11).reshape(2, 4)
    expected = loaded(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert error(loaded(ids).logits, expected) <= 5e-2

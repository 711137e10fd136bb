"""from_pretrained of mixtures of experts, against the plain model and, layer by layer, the reference."""

import copy
import json
import shutil

import numpy as np
import pytest

import moqext
from moqext import reference

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
safetensors = pytest.importorskip("safetensors.torch")

from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402

import moqext_transformers  # noqa: E402
from moqext_torch import QuantExperts, QuantLinear, QuantMoE, replace_linears  # noqa: E402
from moqext_transformers.naming import Names  # noqa: E402

from .greedy import GREEDY, assert_same_tokens  # noqa: E402

EXPORTS = (
    "mixtral_fp8",
    "mixtral_nvfp4",
    "deepseek_nvfp4",
    "llama4_fp8",
    "llama4_nvfp4",
    "gpt_oss_fp8",
    "gpt_oss_nvfp4",
    "nemotron_h_mixed",
    "nemotron_h_nvfp4",
    "qwen3moe_mixed",
)
GENUINE = [f"exports/{name}" for name in EXPORTS] + ["checkpoints/qwen3moe_fp8", "checkpoints/qwen3moe_nvfp4"]
WEIGHTS_ALONE = {"NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"}
QWEN2 = ("FP8", "NVFP4", "W4A16_NVFP4", "FP8_PER_CHANNEL_PER_TOKEN")


def random_ids(rng, model, *shape):
    """Any but the first, which some models embed as zeros: no logits to choose among."""
    return torch.from_numpy(rng.integers(1, model.config.get_text_config().vocab_size, shape))


def error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def quantized(model):
    """The modules of moqext, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, (QuantLinear, QuantMoE))}


def algorithm(module):
    return module.description.quant_algo if isinstance(module, QuantMoE) else module.quant_algo


def quiet(model):
    """Whether no activation is quantized."""
    return {algorithm(module) for module in quantized(model).values()} <= WEIGHTS_ALONE


def chain(model):
    """Products that an activation passes one after the other: four in a layer, and the head."""
    return 4 * model.config.get_text_config().num_hidden_layers + 1


def plain_model(directory, out, model):
    """The model of the same weights, dequantized and run by Transformers alone, in float32."""
    with moqext.Checkpoint(directory) as ckpt:
        ckpt.convert(out, to="fp32")
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert not quantized(plain)
    table = plain.get_input_embeddings()
    table.weight.data.copy_(model.get_input_embeddings().weight)  # Nemotron-H spells its name in two ways
    return plain


def loaded(directory, **options):
    return AutoModelForCausalLM.from_pretrained(directory, **options)


def separate(directory, **options):
    """Loaded with a module for each linear, as the checkpoint has them."""
    return moqext_transformers.from_pretrained(directory, fuse=False, **options)


def heard(model, ids):
    """Logits, and the inputs and the output of each quantized module, by name."""
    calls = {}

    def hear(name):
        def hook(module, args, kwargs, y):
            calls[name] = (args, kwargs, y)

        return hook

    hooks = [
        module.register_forward_hook(hear(name), with_kwargs=True)
        for name, module in quantized(model).items()
    ]
    logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return logits, calls


def reference_linear(ckpt, record, x):
    params = {role: ckpt.tensor(name) for role, name in record.tensors.items()}
    bias = params.pop("bias", None)
    return reference.linear(
        x.numpy(),
        params,
        record.quant_algo,
        bias=None if bias is None else reference.as_float32(bias),
        group_size=record.group_size,
        out_dtype="float64",
    )


def reference_moe(ckpt, record, args, kwargs):
    options, stacks = moqext.stack_experts(ckpt, record)
    for name in ("num_experts", "hidden_size", "intermediate_size", "top_k"):
        options.pop(name, None)
    x, weights, ids = (tensor.numpy() for tensor in args)
    on_input = kwargs.get("apply_router_weight_on_input", False)
    return reference.experts_reference(
        x, stacks, weights, ids, **options, dtype="float32", apply_router_weight_on_input=on_input
    )


@pytest.mark.parametrize("directory", GENUINE)
@torch.no_grad()
def test_every_layer_is_the_references(rng, data, directory):
    """In float32, each for its own input: off by 1e-5, or by 2.5e-3 where codes of activations may flip."""
    model = separate(data / directory, dtype=torch.float32)
    with moqext.Checkpoint(data / directory) as ckpt:
        names = Names(model, ckpt)
        records = {record.name: record for layer in ckpt.layers() for record in layer.linears()}
        records |= {layer.name: layer for layer in ckpt.layers() if layer.kind == "moe"}
        _, calls = heard(model, random_ids(rng, model, 2, 9))
        kinds = {type(module) for module in quantized(model).values()}
        assert calls.keys() == quantized(model).keys()
        assert QuantMoE in kinds
        for name, (args, kwargs, y) in calls.items():
            module = model.get_submodule(name)
            if isinstance(module, QuantMoE):
                expected = reference_moe(ckpt, records[names(name.removesuffix(".moe"))], args, kwargs)
            else:
                expected = reference_linear(ckpt, records[names(name)], args[0])
            limit = 2e-5 if algorithm(module) in WEIGHTS_ALONE else 5e-3
            assert error(y, torch.from_numpy(np.asarray(expected))) <= limit, name


@pytest.mark.parametrize("directory", GENUINE)
@torch.no_grad()
def test_logits_and_greedy_tokens_are_the_plain_models(rng, data, directory, tmp_path):
    """Weights dequantized, and Transformers' own experts: equal where activations are not quantized."""
    model = loaded(data / directory, dtype=torch.float32)
    plain = plain_model(data / directory, tmp_path, model)
    ids = random_ids(rng, model, 2, 9)
    if quiet(model):
        limit = 1e-5 * chain(model)
        assert error(model(ids).logits, plain(ids).logits) <= limit
        assert_same_tokens(model, plain, ids, limit)
    else:  # E4M3 has a relative step of 2^-3; a token whose experts change is any other
        off = torch.stack(
            [(model(ids).logits - plain(ids).logits).norm(dim=-1), plain(ids).logits.norm(dim=-1)]
        )
        assert (off[0] / off[1]).median() <= 2**-4 / 3**0.5 * chain(model)
        assert model.generate(ids, **GREEDY).shape == (2, 21)


@pytest.mark.parametrize("directory", GENUINE)
@torch.no_grad()
def test_in_bfloat16(rng, data, directory):
    """Loads as from_pretrained does; the model in float32 rounds less."""
    model = loaded(data / directory)
    assert model.dtype == torch.bfloat16
    assert {module.dtype for module in quantized(model).values()} == {torch.bfloat16}
    ids = random_ids(rng, model, 2, 9)
    exact = loaded(data / directory, dtype=torch.float32)(ids).logits
    off = (model(ids).logits.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert off.median() <= (2.5e-3 + (0 if quiet(model) else 2**-4 / 3**0.5)) * 4 * chain(model)


@pytest.mark.parametrize("directory", GENUINE)
def test_every_tensor_of_the_file_is_saved_again(data, directory, tmp_path):
    model = loaded(data / directory)
    model.save_pretrained(tmp_path)
    with moqext.Checkpoint(data / directory) as before, moqext.Checkpoint(tmp_path) as after:
        assert after.tensors.keys() == before.tensors.keys()
        for name, info in before.tensors.items():
            if "gate.weight" in name or "correction_bias" in name:  # kept in float32 by some models
                expected = reference.as_float32(before.tensor(name))
                np.testing.assert_array_equal(reference.as_float32(after.tensor(name)), expected)
                continue
            assert (after.tensors[name].dtype, after.tensors[name].shape) == (info.dtype, info.shape), name
            assert after.tensor(name).tobytes() == before.tensor(name).tobytes(), name
        assert [layer.format for layer in after.layers()] == [layer.format for layer in before.layers()]
    again = loaded(tmp_path)
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        assert again(ids).logits.equal(model(ids).logits)


@pytest.mark.parametrize("directory", GENUINE)
def test_models_without_a_head(data, directory, tmp_path):
    """Loaded from the file of a whole model, and saved and loaded again."""
    whole, base = loaded(data / directory), AutoModel.from_pretrained(data / directory)
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        expected = whole.model(ids).last_hidden_state
        assert base(ids).last_hidden_state.equal(expected)
        base.save_pretrained(tmp_path)
        assert AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state.equal(expected)


@pytest.mark.parametrize("directory", GENUINE)
def test_nothing_is_reported_missing_or_unexpected(data, directory):
    _, info = loaded(data / directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.parametrize("directory", GENUINE)
@torch.no_grad()
def test_copies_and_state_dicts(rng, data, directory):
    model = loaded(data / directory)
    ids = random_ids(rng, model, 1, 5)
    expected = model(ids).logits
    other = copy.deepcopy(model)
    assert other(ids).logits.equal(expected)
    other.load_state_dict(model.state_dict())
    assert other(ids).logits.equal(expected)


@pytest.mark.parametrize("name", ["mixtral_nvfp4", "gpt_oss_fp8", "llama4_nvfp4", "deepseek_nvfp4"])
@torch.no_grad()
def test_a_compiled_model_equals_an_eager_one(rng, data, name):
    torch._dynamo.reset()
    model = loaded(data / "exports" / name)
    ids = random_ids(rng, model, 2, 6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert compiled(ids, use_cache=False).logits.equal(model(ids, use_cache=False).logits)


# ------------------------------------------------------------------------------------------- other models


def write_qwen2(directory, rng, algo, exclude=()):
    """A Qwen2-MoE model as ModelOpt writes one: attention, a shared expert and experts one by one."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    config = transformers.Qwen2MoeConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=48, shared_expert_intermediate_size=80, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tensors = {}
    for name, tensor in safetensors.load_file(directory / "model.safetensors").items():
        module, _, role = name.rpartition(".")
        if not module.endswith("_proj") or role != "weight" or any(part in module for part in exclude):
            tensors[name] = tensor
            continue
        for part, array in reference.quantize_weight(tensor.float().numpy(), algo).items():
            value = torch.from_numpy(np.array(array))
            if part == ("weight_scale" if "NVFP4" in algo else "weight"):
                value = value.view(torch.float8_e4m3fn)
            tensors[f"{module}.{part}"] = value
        if algo in ("FP8", "NVFP4"):
            tensors[f"{module}.input_scale"] = torch.tensor(float(rng.uniform(0.01, 0.02)))
    safetensors.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    written = json.loads((directory / "config.json").read_text())
    ignore = ["lm_head", "*.mlp.gate", "*.shared_expert_gate", *(f"*{part}*" for part in exclude)]
    written["quantization_config"] = {"quant_method": "modelopt", "quant_algo": algo, "ignore": ignore}
    (directory / "config.json").write_text(json.dumps(written))
    return directory


@pytest.mark.parametrize("algo", QWEN2)
@torch.no_grad()
def test_qwen2_moe(rng, tmp_path, algo):
    directory = write_qwen2(tmp_path / "model", rng, algo)
    test_every_layer_is_the_references(rng, tmp_path, "model")
    test_every_tensor_of_the_file_is_saved_again(tmp_path, "model", tmp_path / "saved")
    model = separate(directory, dtype=torch.float32)
    assert sum(isinstance(module, QuantMoE) for module in model.modules()) == 2
    assert type(model.model.layers[1].mlp.shared_expert.up_proj) is QuantLinear
    assert type(model.model.layers[1].mlp.gate).__name__ == "Qwen2MoeTopKRouter"
    test_logits_and_greedy_tokens_are_the_plain_models(rng, tmp_path, "model", tmp_path / "plain")


@torch.no_grad()
def test_experts_that_are_excluded_stay_the_models_own(rng, tmp_path):
    """In one layer; Transformers stacks them as ever, beside those that moqext has."""
    directory = write_qwen2(tmp_path / "model", rng, "NVFP4", exclude=["layers.1.mlp.experts"])
    model = loaded(directory, dtype=torch.float32)
    assert isinstance(model.model.layers[0].mlp.experts, QuantExperts)
    assert type(model.model.layers[1].mlp.experts).__name__ == "Qwen2MoeExperts"
    test_every_tensor_of_the_file_is_saved_again(tmp_path, "model", tmp_path / "saved")
    test_nothing_is_reported_missing_or_unexpected(tmp_path, "model")
    test_logits_and_greedy_tokens_are_the_plain_models(rng, tmp_path, "model", tmp_path / "plain")


@pytest.mark.filterwarnings("ignore:w13_input_scale")
def test_experts_without_an_activation_scale(data, tmp_path):
    """They have the largest of the others, and the file is saved again without it."""

    def change(config, tensors):
        for name in ("gate_proj", "up_proj"):
            del tensors[f"model.layers.0.mlp.experts.2.{name}.input_scale"]

    source = data / "checkpoints" / "qwen3moe_fp8"
    changed(source, tmp_path / "model", change)
    model, whole = loaded(tmp_path / "model"), loaded(source)
    scale = model.model.layers[0].mlp.experts.moe.prepared_w13_input_scale
    given = whole.model.layers[0].mlp.experts.moe.state_dict()["w13_input_scale"]
    assert scale.eq(given[[0, 1, 3]].max()).all()
    test_every_tensor_of_the_file_is_saved_again(tmp_path, "model", tmp_path / "saved")


# -------------------------------------------------------------------------------------------- plain PyTorch


@pytest.mark.parametrize("directory", [name for name in GENUINE if "nemotron" not in name])
@torch.no_grad()
def test_replace_linears_replaces_experts_too(rng, data, directory):
    model = separate(data / directory)
    config = copy.deepcopy(model.config)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def rename(name):
        return name.replace(".mlp", ".block_sparse_moe") if "mixtral" in directory else name

    assert replace_linears(plain, data / directory, load=True, rename=rename) is plain
    assert quantized(plain).keys() == quantized(model).keys()
    ids = random_ids(rng, model, 2, 5)
    assert plain.eval()(ids).logits.equal(model(ids).logits)


def test_experts_by_themselves(data):
    """A module of experts alone becomes the module in its place."""
    directory = data / "checkpoints" / "qwen3moe_nvfp4"
    model = loaded(directory)
    config = copy.deepcopy(model.config)
    del config.quantization_config
    own = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).model.layers[0].mlp.experts
    with moqext.Checkpoint(directory) as ckpt:
        name = next(layer.name for layer in ckpt.layers() if layer.kind == "moe")
        alone = QuantMoE.from_checkpoint(ckpt, name)
        with pytest.raises(ValueError, match="quantized in the checkpoint, no"):
            replace_linears(own, ckpt)
    x, ids = torch.randn(3, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, 3], [1, 0]])
    weights = torch.tensor([[0.5, 0.5]] * 3)
    expected = model.get_submodule(f"{name}.moe")(x, weights, ids)
    assert alone(x, weights, ids).equal(expected)
    assert QuantExperts(alone)(x, ids, weights.bfloat16()).equal(expected)


# ------------------------------------------------------------------------------------------- what is refused


def changed(source, target, change):
    """A checkpoint whose configuration and tensors `change` has seen."""
    shutil.copytree(source, target)
    tensors = safetensors.load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    change(config, tensors)
    (target / "config.json").write_text(json.dumps(config))
    safetensors.save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture
def before_loading(monkeypatch):
    """Fails where weights are loaded."""
    monkeypatch.setattr(
        "transformers.modeling_utils.PreTrainedModel._load_pretrained_model",
        lambda *a, **k: pytest.fail("loaded"),
    )


@pytest.mark.usefixtures("before_loading")
def test_formats_that_have_no_experts(data):
    with pytest.raises(
        moqext.UnsupportedQuantization,
        match=r"layers\.0\.mlp\.experts: the blocks of .* \(MXFP8 g32\) lie along its output",
    ):
        loaded(data / "exports" / "gpt_oss_mxfp8")


@pytest.mark.parametrize(
    "device_map", [{"": 63}, {"": "cuda:62"}, {"model": "cpu", "lm_head": torch.device("cuda", 61)}]
)
def test_a_device_that_experts_do_not_run_on(data, device_map):
    """Before anything is loaded: the hook alone, as Transformers wants another package for such maps."""
    directory = data / "exports" / "mixtral_nvfp4"
    config = moqext_transformers.load_config(directory)
    said = moqext_transformers.ModelOptConfig(**config.quantization_config)
    quantizer = moqext_transformers.ModelOptQuantizer(said, pre_quantized=True)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    with pytest.raises(
        moqext.UnsupportedQuantization, match=r"moe\.experts: no kernel can run .* on cuda:6[123]"
    ):
        quantizer.preprocess_model(
            model=model, checkpoint_files=[directory / "model.safetensors"], device_map=device_map
        )
    assert not quantized(model)


def mix(config, tensors):
    """Expert 1 of a Qwen3-MoE becomes FP8."""
    for name in [name for name in tensors if ".experts.1." in name and name.endswith(".weight")]:
        module = name.removesuffix(".weight")
        shape = (tensors[name].shape[0], tensors[name].shape[1] * 2)
        tensors[name] = torch.zeros(shape).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = torch.tensor(1.0)
        del tensors[f"{module}.weight_scale_2"]


@pytest.mark.usefixtures("before_loading")
def test_experts_in_several_formats(data, tmp_path):
    directory = changed(data / "checkpoints" / "qwen3moe_nvfp4", tmp_path / "mixed", mix)
    with pytest.raises((moqext.UnsupportedQuantization, moqext.CheckpointError), match="format"):
        loaded(directory)


@pytest.mark.usefixtures("before_loading")
def test_problems_of_experts_are_raised_first(data, tmp_path):
    def damage(config, tensors):
        tensors["model.layers.0.mlp.experts.2.up_proj.weight_scale_2"].fill_(float("nan"))

    directory = changed(data / "checkpoints" / "qwen3moe_nvfp4", tmp_path / "damaged", damage)
    with pytest.raises(moqext.CheckpointError, match=r"experts\.2\.up_proj: scale_not_finite"):
        loaded(directory)


@pytest.mark.usefixtures("before_loading")
@pytest.mark.parametrize(
    "setting, told",
    [
        ("num_local_experts", r"experts: missing_expert: 12 of 24 are missing"),
        ("moe_intermediate_size", r"experts: shape_mismatch: experts are 64 wide, config.json names 128"),
    ],
)
def test_models_of_other_sizes(data, tmp_path, setting, told):
    def change(config, tensors):
        config[setting] *= 2

    directory = changed(data / "checkpoints" / "qwen3moe_nvfp4", tmp_path / "other", change)
    with pytest.raises(moqext.CheckpointError, match=told):
        loaded(directory)


@pytest.mark.usefixtures("before_loading")
def test_activations_that_there_are_not(data, tmp_path):
    def change(config, tensors):
        config["hidden_act"] = "mish"

    directory = changed(data / "checkpoints" / "qwen3moe_nvfp4", tmp_path / "mish", change)
    with pytest.raises(moqext.UnsupportedQuantization, match=r"experts: no experts with the activation Mish"):
        loaded(directory)


def test_values_that_the_file_has_once(data, tmp_path):
    """One scale of all experts in the file, and another one now: not saved as if it were one."""
    model = loaded(data / "exports" / "llama4_fp8")
    moe = next(module for module in model.modules() if isinstance(module, QuantMoE))
    state = moe.state_dict()
    state["w13_weight_scale"][1] *= 2
    moe.load_state_dict(state)
    with pytest.raises(ValueError, match=r"gate_up_proj_weight_scale: holds one value for several"):
        model.save_pretrained(tmp_path)


def test_gradients_are_refused(data):
    model = loaded(data / "exports" / "mixtral_fp8")
    with pytest.raises(RuntimeError, match="no gradient"):
        model(torch.zeros(1, 2, dtype=torch.long))


def test_compute_is_chosen(data):
    directory = data / "exports" / "mixtral_nvfp4"
    model = moqext_transformers.from_pretrained(directory, compute="fp8")
    assert {m.description.compute for m in model.modules() if isinstance(m, QuantMoE)} == {"fp8"}
    with pytest.raises(RuntimeError, match="has the checkpoint's tensors no more"):
        model.state_dict()

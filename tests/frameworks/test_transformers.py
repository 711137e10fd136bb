"""from_pretrained of ModelOpt checkpoints, against the plain model with dequantized weights."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moqext
from moqext import reference

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
safetensors = pytest.importorskip("safetensors.torch")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

import moqext_transformers  # noqa: E402
from moqext_torch import QuantLinear, as_torch  # noqa: E402
from moqext_transformers.fused_linear import FusedLinear, Part  # noqa: E402

from .greedy import GREEDY, assert_same_tokens  # noqa: E402

EXPORTS = (
    "fp8_bias_kvfp8",
    "fp8_embedding",
    "fp8_excluded",
    "fp8_kvcast",
    "fp8_lm_head",
    "fp8_pb_real",
    "fp8_pb_wo_one_block",
    "fp8_pb_wo_unaligned",
    "fp8_pc_pt_bias",
    "fp8_uncalibrated",
    "fp8_zero",
    "mixed_fp8_nvfp4",
    "mixed_in_qkv",
    "mixed_three",
    "nvfp4_bias_kvnvfp4",
    "nvfp4_kvaffine",
    "nvfp4_lm_head",
    "nvfp4_mlp_only",
    "nvfp4_sharded",
    "nvfp4_uncalibrated",
    "nvfp4_zero",
    "w4a16_nvfp4",
    "w4a16_nvfp4_group_32",
    "w4a8_nvfp4_fp8",
)
CHECKPOINTS = ("fp8_kvfp8", "fp8_pb_wo", "fp8_pc_pt", "nvfp4_kvfp8", "w4a16_nvfp4", "w4a8_nvfp4_fp8")
DENSE = [f"exports/{name}" for name in EXPORTS] + [f"checkpoints/llama_{name}" for name in CHECKPOINTS]
WEIGHTS_ALONE = {"NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"}  # the other formats quantize activations, too


class ReferenceLinear(torch.nn.Module):
    """A linear of a checkpoint by moqext.reference: float64, rounded once."""

    def __init__(self, ckpt, record):
        super().__init__()
        self.record = record
        self.params = {role: ckpt.tensor(name) for role, name in record.tensors.items()}
        bias = self.params.pop("bias", None)
        self.bias_values = None if bias is None else reference.as_float32(bias)

    def forward(self, x):
        y = reference.linear(
            x.numpy(),
            self.params,
            self.record.quant_algo,
            bias=self.bias_values,
            group_size=self.record.group_size,
            out_dtype="float32",
        )
        return torch.from_numpy(np.asarray(y, np.float32))


def records(ckpt):
    return {record.name: record for layer in ckpt.layers() for record in layer.linears()}


def plain_model(directory, dtype, exact=False):
    """The model without moqext: dequantized weights, or every quantized linear by the reference."""
    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with moqext.Checkpoint(directory) as ckpt:
        quantized, state = records(ckpt), {}
        for name in model.state_dict():
            module, _, role = name.rpartition(".")
            if module in quantized and role == "weight":
                state[name] = torch.from_numpy(ckpt.dequantize(module))
            elif name in ckpt.tensors:
                state[name] = as_torch(ckpt.tensor(name))
            elif name == "lm_head.weight" and config.get_text_config().tie_word_embeddings:
                state[name] = state["model.embed_tokens.weight"]
        model.load_state_dict(state)
        for name, record in quantized.items():
            if exact and record.kind == "linear":
                model.set_submodule(name, ReferenceLinear(ckpt, record))
    return model


def chain(model):
    """Linears that an activation passes one after the other: four in a layer, and the head."""
    return 4 * model.config.get_text_config().num_hidden_layers + 1


def quiet(model):
    """Whether no activation is quantized."""
    linears = [module for module in model.modules() if isinstance(module, QuantLinear)]
    return {linear.quant_algo for linear in linears} <= WEIGHTS_ALONE


def is_linear_of_file(module):
    """Whether a module is a quantized linear of the checkpoint, alone or a part of a fused one."""
    return isinstance(module, (Part, QuantLinear)) and not isinstance(module, FusedLinear)


def random_ids(rng, model, *shape):
    return torch.from_numpy(rng.integers(0, model.config.get_text_config().vocab_size, shape))


def error(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("directory", DENSE)
@torch.no_grad()
def test_logits_and_greedy_tokens_are_the_references(rng, data, directory):
    """In float32: a linear may be off by 1e-5, or by 2.5e-3 where codes of activations may flip."""
    model = AutoModelForCausalLM.from_pretrained(data / directory, dtype=torch.float32)
    plain = plain_model(data / directory, torch.float32, exact=True)
    ids = random_ids(rng, model, 2, 9)
    limit = (1e-5 if quiet(model) else 2.5e-3) * chain(model)
    assert error(model(ids).logits, plain(ids).logits) <= limit
    assert_same_tokens(model, plain, ids, limit)


@pytest.mark.parametrize("directory", DENSE)
@torch.no_grad()
def test_logits_in_bfloat16(rng, data, directory):
    """Each linear of both models rounds by 2.5e-3 at most. Weights alone: FP8 activations are noise."""
    model = AutoModelForCausalLM.from_pretrained(data / directory)
    assert model.dtype == torch.bfloat16
    plain = plain_model(data / directory, torch.bfloat16)
    ids = random_ids(rng, model, 2, 9)
    # E4M3 has a relative step of 2^-3: rounding errors are uniform within half of it, 2^-4 / sqrt(3) at most.
    step = 2 * 2.5e-3 if quiet(model) else 2 * 2.5e-3 + 2**-4 / 3**0.5
    assert error(model(ids).logits, plain(ids).logits) <= step * chain(model)


@pytest.mark.parametrize("name", ["int4_awq", "int8_sq", "mxfp8", "w4a8_awq", "w4a8_mxfp4_fp8"])
@torch.no_grad()
def test_every_linear_of_other_formats_is_the_layer_that_loads(rng, data, name):
    """Layers of MXFP8, int8, int4 and W4A8_MXFP4_FP8 have the bits of those that `load` makes."""
    directory = data / "checkpoints" / f"llama_{name}"
    model = AutoModelForCausalLM.from_pretrained(directory)
    logits, calls = heard(model, random_ids(rng, model, 2, 9))
    assert logits.isfinite().all()
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    parts = {
        f"{attention}fused_qkv": [f"{attention}{part}_proj" for part in "qkv"],
        f"{mlp}fused_gate_up": [f"{mlp}gate_proj", f"{mlp}up_proj"],
    }
    with moqext.Checkpoint(directory) as ckpt:
        ran = [part for layer in calls for part in parts.get(layer, [layer])]
        assert sorted(ran) == sorted(record.name for record in ckpt.layers())
        for layer, (x, y) in calls.items():
            loaded = ckpt.load(parts.get(layer, layer), dtype=torch.bfloat16)
            assert y.equal(loaded(x)), layer


@pytest.mark.parametrize("directory", DENSE)
def test_every_tensor_of_the_file_is_saved_again(data, directory, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(data / directory)
    if "embedding" in directory:
        with pytest.raises(ValueError, match="not serializable"):
            model.save_pretrained(tmp_path)
        return
    model.save_pretrained(tmp_path)
    with moqext.Checkpoint(data / directory) as before, moqext.Checkpoint(tmp_path) as after:
        assert after.tensors.keys() == before.tensors.keys()
        zero = {problem.layer for problem in before.problems if problem.code == "all_zero_layer"}
        for name, info in before.tensors.items():
            assert (after.tensors[name].dtype, after.tensors[name].shape) == (info.dtype, info.shape), name
            if name.removesuffix("_scale").removesuffix(".weight") not in zero:
                assert after.tensor(name).tobytes() == before.tensor(name).tobytes(), name
        for layer in before.layers():
            np.testing.assert_array_equal(after.dequantize(layer.name), before.dequantize(layer.name))
        assert [layer.format for layer in after.layers()] == [layer.format for layer in before.layers()]
        assert after.config.kv_cache_quant_algo == before.config.kv_cache_quant_algo
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        assert again(ids).logits.equal(model(ids).logits)


# ------------------------------------------------------------------------------------------- other models


def small(kind):
    """Configurations of dense models: biases, tied heads, norms of queries, fused projections."""
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    heads = {"head_dim": 16}
    return {
        "qwen2": lambda: transformers.Qwen2Config(**sizes, tie_word_embeddings=True),
        "qwen3": lambda: transformers.Qwen3Config(**sizes, **heads),
        "gemma": lambda: transformers.GemmaConfig(**sizes, **heads),
        "gemma2": lambda: transformers.Gemma2Config(**sizes, **heads),
        "gemma3": lambda: transformers.Gemma3TextConfig(**sizes, **heads),
        "mistral": lambda: transformers.MistralConfig(**sizes, **heads),
        "phi": lambda: transformers.PhiConfig(**sizes),
        "phi3": lambda: transformers.Phi3Config(**sizes),
        "granite": lambda: transformers.GraniteConfig(**sizes),
    }[kind]()


def export(directory, model, algo, exclude=("lm_head",), **changes):
    """Writes a model as ModelOpt does; `changes` go to the quantization's configuration."""
    tensors, linears = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in exclude:
            linears[name] = module
    for name, tensor in model.state_dict().items():
        module, _, role = name.rpartition(".")
        if module not in linears or role != "weight":
            tensors[name] = tensor.clone()
            continue
        for part, array in reference.quantize_weight(tensor.float().numpy(), algo).items():
            value = torch.from_numpy(np.array(array))
            if part == ("weight_scale" if "NVFP4" in algo else "weight"):
                value = value.view(torch.float8_e4m3fn)
            tensors[f"{module}.{part}"] = value
        if algo in ("FP8", "NVFP4"):
            tensors[f"{module}.input_scale"] = torch.tensor(0.01)
    if model.config.tie_word_embeddings and "lm_head" in exclude:
        del tensors["lm_head.weight"]
    directory.mkdir(exist_ok=True)
    safetensors.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"], config["dtype"] = [type(model).__name__], "bfloat16"
    quantization = {"quant_method": "modelopt", "quant_algo": algo, "ignore": list(exclude)} | changes
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral", "phi", "phi3", "granite"]
)
@torch.no_grad()
def test_dense_models(rng, tmp_path, kind, algo):
    torch.manual_seed(int(rng.integers(1 << 30)))
    config = small(kind)
    original = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in original.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    export(tmp_path, original, algo)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    quantized = {name for name, module in model.named_modules() if is_linear_of_file(module)}
    assert quantized == {
        name for name, module in original.named_modules() if isinstance(module, torch.nn.Linear)
    } - {"lm_head"}
    assert type(model.lm_head) is torch.nn.Linear
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == config.tie_word_embeddings
    plain = plain_model(tmp_path, torch.float32, exact=True)
    ids = random_ids(rng, model, 2, 7)
    limit = (1e-5 if algo == "NVFP4" else 2.5e-3) * chain(model)
    assert error(model(ids).logits, plain(ids).logits) <= limit
    assert_same_tokens(model, plain, ids, limit)


@torch.no_grad()
def test_a_quantized_head_is_not_tied(rng, tmp_path):
    """Whatever config.json says: the head has a weight of its own in the file."""
    model = AutoModelForCausalLM.from_config(small("qwen2"), dtype=torch.bfloat16)
    export(tmp_path, model, "FP8", exclude=())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.lm_head) is QuantLinear
    loaded.tie_weights()
    assert loaded.lm_head.weight.dtype == torch.float8_e4m3fn
    assert loaded.get_input_embeddings().weight.dtype == torch.bfloat16
    loaded(random_ids(rng, loaded, 1, 3))


def test_models_without_a_head(rng, data):
    whole = AutoModelForCausalLM.from_pretrained(data / "exports" / "nvfp4_lm_head")
    base = AutoModel.from_pretrained(data / "exports" / "nvfp4_lm_head")
    assert type(base.layers[0].mlp.down_proj) is QuantLinear
    ids = random_ids(rng, whole, 2, 5)
    with torch.no_grad():
        assert base(ids).last_hidden_state.equal(whole.model(ids).last_hidden_state)


@pytest.mark.parametrize(
    "name, shape", [("weight_scale_inv", ()), ("weight_scale", (1,)), ("weight_scale", (1, 1))]
)
def test_scales_of_other_names_and_shapes(rng, tmp_path, name, shape):
    model = AutoModelForCausalLM.from_config(small("mistral"), dtype=torch.bfloat16)
    tensors = export(tmp_path, model, "FP8")
    before = AutoModelForCausalLM.from_pretrained(tmp_path)
    changed = {
        key.replace("weight_scale", name): value.reshape(shape) if key.endswith("weight_scale") else value
        for key, value in tensors.items()
    }
    safetensors.save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    after = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(rng, before, 2, 5)
    with torch.no_grad():
        assert after(ids).logits.equal(before(ids).logits)


def test_scales_of_rows_with_an_axis_of_one(rng, tmp_path):
    model = AutoModelForCausalLM.from_config(small("mistral"), dtype=torch.bfloat16)
    tensors = export(tmp_path, model, "FP8_PER_CHANNEL_PER_TOKEN")
    before = AutoModelForCausalLM.from_pretrained(tmp_path)
    changed = {
        key: value[:, None] if key.endswith("weight_scale") else value for key, value in tensors.items()
    }
    safetensors.save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    after = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(rng, before, 2, 5)
    with torch.no_grad():
        assert after(ids).logits.equal(before(ids).logits)


def test_a_fused_linear_with_a_scale_for_each_part(rng, tmp_path):
    """Phi-3 has q, k and v, and gate and up, in one linear; here each part has the scale of all."""
    model = AutoModelForCausalLM.from_config(small("phi3"), dtype=torch.bfloat16)
    tensors = export(tmp_path, model, "FP8")
    before = AutoModelForCausalLM.from_pretrained(tmp_path)
    counts = {"qkv_proj.weight_scale": 3, "gate_up_proj.weight_scale": 2}
    changed = {
        key: value.reshape(1).repeat(counts[".".join(key.split(".")[-2:])])
        if ".".join(key.split(".")[-2:]) in counts
        else value
        for key, value in tensors.items()
    }
    safetensors.save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    after = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert after.model.layers[0].self_attn.qkv_proj.out_partitions == (64, 32, 32)
    assert after.model.layers[0].mlp.gate_up_proj.out_partitions == (96, 96)
    ids = random_ids(rng, before, 2, 5)
    with torch.no_grad():
        assert after(ids).logits.equal(before(ids).logits)


# ------------------------------------------------------------------------------------------- what is refused


def copied(source, target, change):
    """A checkpoint whose configuration and tensors `change` has seen."""
    shutil.copytree(source, target)
    tensors = safetensors.load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    change(config, tensors)
    (target / "config.json").write_text(json.dumps(config))
    safetensors.save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_problems_are_raised_before_weights_are_loaded(data, tmp_path, monkeypatch):
    def damage(config, tensors):
        tensors["model.layers.0.mlp.up_proj.weight_scale_2"].fill_(float("nan"))
        del tensors["model.layers.0.mlp.gate_proj.weight_scale"]

    directory = copied(data / "exports" / "nvfp4_bias_kvnvfp4", tmp_path / "damaged", damage)
    monkeypatch.setattr(
        "transformers.modeling_utils.PreTrainedModel._load_pretrained_model",
        lambda *a, **k: pytest.fail("loaded"),
    )
    with pytest.raises(
        moqext.CheckpointError, match=r"(?s)gate_proj: missing_scale.*up_proj: scale_not_finite"
    ):
        AutoModelForCausalLM.from_pretrained(directory)


def test_swizzled_scales_are_refused_by_name(data, tmp_path):
    name = "model.layers.0.mlp.up_proj"

    def swizzle(config, tensors):
        scale = tensors[f"{name}.weight_scale"]
        moved = np.asarray(moqext.ops.swizzle_block_scales(scale.view(torch.uint8).numpy()))
        assert moved.shape != tuple(scale.shape)
        tensors[f"{name}.weight_scale"] = torch.from_numpy(moved).view(torch.float8_e4m3fn)

    directory = copied(data / "exports" / "nvfp4_bias_kvnvfp4", tmp_path / "swizzled", swizzle)
    with pytest.raises(moqext.CheckpointError, match=f"{name} is stored as NVFP4 g16, swizzled"):
        AutoModelForCausalLM.from_pretrained(directory)


def test_codes_of_the_type_f4_are_refused_by_name(data, tmp_path):
    """Transformers failed in a reshape of what it had read."""
    directory = tmp_path / "f4"
    shutil.copytree(data / "exports" / "nvfp4_bias_kvnvfp4", directory)
    path = directory / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = "model.layers.0.mlp.up_proj.weight"
    rows, bytes_of_row = header[name]["shape"]
    header[name] |= {"dtype": "F4", "shape": [rows, 2 * bytes_of_row]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(moqext.CheckpointError, match=f"{name} has the type F4, which Transformers does not"):
        AutoModelForCausalLM.from_pretrained(directory)


def test_what_does_not_run_is_refused_by_name(data):
    with pytest.raises(moqext.UnsupportedQuantization, match=r'model.layers.0.*compute "fp4" needs NVFP4'):
        moqext_transformers.from_pretrained(data / "exports" / "w4a16_nvfp4", compute="fp4")


def test_what_cannot_be_is_refused(data):
    directory = data / "exports" / "fp8_bias_kvfp8"
    with pytest.raises(ValueError, match=r"dtype: expected bfloat16, float16 or float32, got torch.float64"):
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    quantizer = moqext_transformers.ModelOptQuantizer(moqext_transformers.ModelOptConfig())
    with pytest.raises(ValueError, match="offloaded to disk"):
        quantizer.validate_environment(device_map={"": "disk"}, weights_only=True)
    state = safetensors.load_file(directory / "model.safetensors")
    config = AutoConfig.from_pretrained(directory)
    with pytest.raises(ValueError, match="was given a state dict"):
        transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)


# ------------------------------------------------------------------------------------------ configurations


@pytest.mark.parametrize("place", ["own file", "no quant_method"])
def test_configurations_that_transformers_does_not_know(rng, data, tmp_path, place):
    def change(config, tensors):
        if place == "own file":
            del config["quantization_config"]
        else:
            del config["quantization_config"]["quant_method"]

    source = data / "exports" / "fp8_bias_kvfp8"
    directory = copied(source, tmp_path / "changed", change)
    expected = AutoModelForCausalLM.from_pretrained(source)
    model = moqext_transformers.from_pretrained(directory)
    ids = random_ids(rng, model, 1, 6)
    with torch.no_grad():
        assert model(ids).logits.equal(expected(ids).logits)
    config = moqext_transformers.load_config(directory)
    again = AutoModelForCausalLM.from_pretrained(directory, config=config)
    assert type(again.model.layers[0].mlp.down_proj) is QuantLinear
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "modelopt"
    assert "compute" not in saved
    assert (
        type(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").model.layers[0].mlp.down_proj)
        is QuantLinear
    )


def test_what_modelopt_did_not_quantize(data, tmp_path):
    def change(config, tensors):
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}

    directory = copied(data / "exports" / "fp8_bias_kvfp8", tmp_path / "changed", change)
    with pytest.raises(moqext.ConfigError, match="quantized by 'gptq'"):
        moqext_transformers.load_config(directory)
    (directory / "hf_quant_config.json").unlink()
    copied(directory, tmp_path / "plain", lambda config, tensors: config.pop("quantization_config"))
    with pytest.raises(moqext.ConfigError, match=r"neither config\.json nor hf_quant_config"):
        moqext_transformers.load_config(tmp_path / "plain")


def test_compute_is_chosen(data):
    model = moqext_transformers.from_pretrained(data / "exports" / "nvfp4_bias_kvnvfp4", compute="fp8")
    assert {m.compute for m in model.modules() if isinstance(m, QuantLinear)} == {"fp8"}
    with pytest.raises(ValueError, match="compute"):
        moqext_transformers.from_pretrained(data / "exports" / "nvfp4_bias_kvnvfp4", compute="exakt")


def test_a_name_that_is_taken_is_left_alone(data):
    program = f"""
import sys, warnings
sys.path[:0] = {sys.path!r}
from transformers.quantizers import register_quantization_config, register_quantizer, HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin
@register_quantization_config("modelopt")
class Config(QuantizationConfigMixin): pass
@register_quantizer("modelopt")
class Quantizer(HfQuantizer): pass
with warnings.catch_warnings(record=True) as caught:
    import moqext_transformers
assert "reader for quant_method 'modelopt' already" in str(caught[0].message), caught
assert AUTO_QUANTIZER_MAPPING["modelopt"] is Quantizer
model = moqext_transformers.from_pretrained({str(data / "exports" / "fp8_bias_kvfp8")!r})
print(type(model.lm_head).__name__, type(model.model.layers[0].mlp.down_proj).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["Linear", "QuantLinear"], done.stderr


# ------------------------------------------------------------------------------------------------- running


def test_the_cache_has_the_scales_of_the_checkpoint(rng, data):
    pytest.importorskip("transformers", minversion="5.23")
    model = AutoModelForCausalLM.from_pretrained(data / "checkpoints" / "llama_fp8_kvfp8")
    with moqext.Checkpoint(data / "checkpoints" / "llama_fp8_kvfp8") as ckpt:
        found = {record.name: record.values for record in ckpt.kv_scales()}
    assert model.hf_quantizer.kv_scales == found
    cache = moqext_transformers.kv_cache(model)
    ids = random_ids(rng, model, 2, 9)
    model.generate(ids, past_key_values=cache, **GREEDY)
    for number, layer in enumerate(cache.layers):
        scales = found[f"model.layers.{number}.self_attn"]
        assert (layer.k_scale, layer.v_scale) == (scales["k_scale"], scales["v_scale"])
        codes, scale = layer._quantized_keys
        assert codes.dtype == torch.float8_e4m3fn
        assert scale == scales["k_scale"]
        assert codes.shape[-2] == 9 + 11  # the last token is not cached
        assert torch.isfinite(codes.float()).all()


def test_values_beyond_a_cache_scale_saturate(data):
    pytest.importorskip("transformers", minversion="5.23")
    model = AutoModelForCausalLM.from_pretrained(data / "checkpoints" / "llama_fp8_kvfp8")
    layer = moqext_transformers.kv_cache(model).layers[0]
    codes, scale = layer._quantize(torch.tensor([1e9, -1e9, 0.0]), layer.k_scale)
    assert codes.float().tolist() == [448.0, -448.0, 0.0]
    assert scale == layer.k_scale


def test_caches_that_there_are_not(data):
    plain = AutoModelForCausalLM.from_pretrained(data / "exports" / "nvfp4_bias_kvnvfp4")
    with pytest.raises(moqext.UnsupportedQuantization, match="NVFP4, not FP8"):
        moqext_transformers.kv_cache(plain)
    with pytest.raises(ValueError, match="expected one that moqext_transformers has loaded"):
        moqext_transformers.kv_cache(torch.nn.Linear(1, 1))


@torch.no_grad()
def test_a_compiled_model_equals_an_eager_one(rng, data):
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_pretrained(data / "exports" / "mixed_fp8_nvfp4")
    ids = random_ids(rng, model, 2, 6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert compiled(ids, use_cache=False).logits.equal(model(ids, use_cache=False).logits)


def test_gradients_are_refused(data):
    model = AutoModelForCausalLM.from_pretrained(data / "exports" / "fp8_bias_kvfp8")
    with pytest.raises(RuntimeError, match=r"no gradient: .*no_grad.*fuse=False"):
        model(torch.zeros(1, 2, dtype=torch.long))


def heard(model, ids):
    """Logits, and of each quantized linear its input and its output, by name."""
    calls = {}
    hooks = [
        module.register_forward_hook(lambda _, x, y, name=name: calls.update({name: (x[0].cpu(), y.cpu())}))
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
    ]
    logits = model(ids).logits.cpu()
    for hook in hooks:
        hook.remove()
    return logits, calls


@pytest.mark.gpu
@pytest.mark.parametrize("directory", DENSE)
@torch.no_grad()
def test_a_device_gives_what_the_cpu_gives(rng, data, directory, tmp_path):
    """Every linear for its own input; greedy tokens on the exact path; the checkpoint's bytes when saved.

    Where activations are quantized, a sum that differs in its last bit may give the next code, which is a
    sixteenth off: whole models are compared only where none is.
    """
    model = AutoModelForCausalLM.from_pretrained(data / directory, dtype=torch.float32)
    there = AutoModelForCausalLM.from_pretrained(data / directory, dtype=torch.float32).to("cuda")
    ids = random_ids(rng, model, 2, 9)
    logits, calls = heard(there, ids.cuda())
    assert calls
    for name, (x, y) in calls.items():
        expected = model.get_submodule(name)(x)
        assert y.equal(expected) or error(y, expected) <= 1e-5, name  # an error of zeros is no number
    if quiet(model):
        assert error(logits, model(ids).logits) <= 1e-5 * chain(model)
        assert_same_tokens(there, model, ids, 1e-5 * chain(model))
    if "embedding" in directory or "zero" in directory:
        return  # a dequantized embedding is not saved; codes under a scale of zero become zeros
    there.save_pretrained(tmp_path)
    with moqext.Checkpoint(data / directory) as before, moqext.Checkpoint(tmp_path) as after:
        for name in before.tensors:
            was, now = before.tensor(name), after.tensor(name)
            if was.dtype != now.dtype:  # what is not quantized was loaded as float32
                assert np.array_equal(reference.as_float32(now), reference.as_float32(was)), name
            elif not name.endswith("weight_scale"):  # packing drops the sign of a zero scale
                assert now.tobytes() == was.tobytes(), name


def test_the_package_is_found_beside_moqext():
    assert Path(moqext_transformers.__file__).parent.parent in (
        Path(moqext.__file__).parent.parent,
        Path(moqext.__file__).parent.parent / "python",
    )

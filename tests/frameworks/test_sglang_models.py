"""SGLang's own models over genuine checkpoints: made, loaded by SGLang, prepared; attention does not run."""

import json
import shutil

import numpy as np
import pytest

from .sglang_stand_ins import stand_in

stand_in()

from safetensors.torch import load_file, save_file  # noqa: E402
from sglang.srt.layers.quantization import get_quantization_config  # noqa: E402
from transformers import AutoConfig  # noqa: E402

import moqext  # noqa: E402
from moqext import Checkpoint, reference  # noqa: E402
from moqext.algorithms import ALGORITHMS  # noqa: E402
from moqext_sglang import config as plugin  # noqa: E402
from moqext_sglang import register  # noqa: E402
from moqext_sglang.experts import MoqextFusedMoEMethod  # noqa: E402
from moqext_sglang.hand_back import is_runnable  # noqa: E402
from moqext_sglang.linear import MoqextLinearMethod  # noqa: E402
from moqext_torch.exchange import as_torch, stored_tensor  # noqa: E402
from moqext_torch.stepping_aside import ReadConfig  # noqa: E402

from . import sglang_cases as cases  # noqa: E402
from .sglang_cases import torch  # noqa: E402
from .test_sglang_config import CHECKPOINTS  # noqa: E402

pytestmark = pytest.mark.sglang
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(autouse=True)
def _rank(device):
    register()
    with cases.engine(device), torch.inference_mode():
        yield


def runnable():
    for path in CHECKPOINTS:
        config = moqext.QuantConfig.from_pretrained(path)
        if all(map(is_runnable, ReadConfig(config, {}).algorithms())):
            yield path


def loaded(path, config):
    """A model of SGLang with the checkpoint's weights, through its own load_weights."""
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

    about = AutoConfig.from_pretrained(path)
    about.quantization_config = None
    kinds = {"LlamaForCausalLM": LlamaForCausalLM, "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM}
    kind = kinds[about.architectures[0]]
    name = plugin.sglang_name(config)
    quant = get_quantization_config(name).from_config(
        {**config.to_dict(), "packed_modules_mapping": getattr(kind, "packed_modules_mapping", {})}
    )
    with cases.bfloat16_by_default():
        model = kind(config=about, quant_config=quant)
    checkpoint = Checkpoint(path)
    model.load_weights((tensor, stored_tensor(checkpoint, tensor)) for tensor in checkpoint.tensors)
    for _, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    return model, checkpoint


@pytest.mark.parametrize("path", list(runnable()), ids=lambda path: path.name)
def test_a_genuine_checkpoint(path, rng, device):
    check(path, rng, device)


def made_anew(path, rng, directory, algo, group_size):
    """A copy of a checkpoint in NVFP4 as one of another algorithm: random weights that its producer rounds,
    factors of each input, and low-rank pairs where it has them."""
    facts = ALGORITHMS[algo]
    shutil.copytree(path, directory)
    for name in ("config.json", "hf_quant_config.json"):
        document = json.loads((directory / name).read_text())
        inner = document.get("quantization_config") or document["quantization"]
        inner.pop("config_groups", None)
        inner |= {"quant_algo": algo, "group_size": group_size}
        (directory / name).write_text(json.dumps(document))
    with torch.inference_mode(False):
        tensors = load_file(directory / "model.safetensors")
    factors, random = {}, lambda *shape: rng.standard_normal(shape, dtype="float32")
    for layer in [name.removesuffix(".weight_scale_2") for name in tensors if name.endswith("_scale_2")]:
        rows, half = tensors[f"{layer}.weight"].shape
        for role in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{layer}.{role}"]
        made = reference.quantize_weight(random(rows, 2 * half), algo, group_size=group_size)
        for role, value in made.items():
            tensor = torch.from_numpy(np.array(value))
            is_e4m3 = (role, facts.scale_dtype) == ("weight_scale", "float8_e4m3fn")
            tensors[f"{layer}.{role}"] = tensor.view(torch.float8_e4m3fn) if is_e4m3 else tensor
        if facts.pre_quant_scale:  # fused layers have one input
            own = layer if layer.endswith(("o_proj", "down_proj")) else layer.rpartition(".")[0]
            factor = factors.setdefault(own, np.abs(random(2 * half)) + 0.5)
            tensors[f"{layer}.pre_quant_scale"] = torch.from_numpy(factor).bfloat16()
        if facts.low_rank:
            pair = {"a": (8, 2 * half), "b": (rows, 8)}
            for letter, shape in pair.items():
                tensor = torch.from_numpy(random(*shape)).bfloat16()
                tensors[f"{layer}.weight_quantizer._svdquant_lora_{letter}"] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    "name, algo, group_size",
    [
        ("llama_nvfp4_kvfp8", "NVFP4_SVD", 16),
        ("qwen3moe_nvfp4", "W4A16_AWQ", 64),
        ("qwen3moe_nvfp4", "W8A8_SQ_PER_CHANNEL", None),
        ("qwen3moe_nvfp4", "W8A16", None),
    ],
)
def test_a_checkpoint_that_no_producer_wrote(tmp_path, rng, device, name, algo, group_size):
    path = next(path for path in CHECKPOINTS if path.name == name)
    check(made_anew(path, rng, tmp_path / algo, algo, group_size), rng, device)


def check(path, rng, device):
    """Each layer, called in the model's place, gives what Checkpoint.load gives; the cache has its scales."""
    config = moqext.QuantConfig.from_pretrained(path)
    model, checkpoint = loaded(path, config)
    found = 0
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if type(method) is MoqextLinearMethod:
            parent, _, own = name.rpartition(".")
            names = [f"{parent}.{part}" for part in FUSED.get(own, (own,))]
            layer = checkpoint.load(names, device=device, dtype="bfloat16")
            values = rng.standard_normal((3, method.method.in_features), dtype="float32")
            x = torch.from_numpy(values).to(device, torch.bfloat16)
            assert torch.equal(method.apply(module, x), layer(x)), name
            found += len(names)
        elif type(method) is MoqextFusedMoEMethod:
            layer = checkpoint.load(
                name, device=device, dtype="bfloat16", top_k=method.about.top_k, activation="silu"
            )
            for role, tensor in layer.params.items():
                mine = method.prepared[role]
                theirs = as_torch(tensor, mine.dtype).reshape(mine.shape)
                assert torch.equal(mine.view(torch.uint8), theirs.contiguous().view(torch.uint8)), (
                    name,
                    role,
                )
            found += 1
    assert found == sum(record.kind in ("linear", "moe") for record in checkpoint.layers())
    for record in checkpoint.kv_scales():
        attention = model.get_submodule(f"{record.name}.attn")
        values = dict(record.values)
        assert attention.k_scale_float == values["k_scale"]
        assert attention.v_scale_float == values["v_scale"]

"""SGLang's own models over genuine checkpoints: made, loaded by SGLang, prepared; attention does not run."""

import json
import shutil

import pytest

from .sglang_stand_ins import stand_in

stand_in()

from safetensors.torch import load_file, save_file  # noqa: E402
from sglang.srt.layers.quantization import get_quantization_config  # noqa: E402
from transformers import AutoConfig  # noqa: E402

import moqext  # noqa: E402
from moqext import Checkpoint  # noqa: E402
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


def with_low_rank_pairs(path, rng, directory):
    """A copy of a checkpoint in NVFP4 as one of NVFP4_SVD: factors of inputs, and a pair of each linear."""
    shutil.copytree(path, directory)
    for name in ("config.json", "hf_quant_config.json"):
        document = json.loads((directory / name).read_text())
        inner = document.get("quantization_config") or document["quantization"]
        inner["quant_algo"] = "NVFP4_SVD"
        (directory / name).write_text(json.dumps(document))
    random = lambda *shape: torch.from_numpy(rng.standard_normal(shape, dtype="float32")).bfloat16()  # noqa: E731
    with torch.inference_mode(False):
        tensors = load_file(directory / "model.safetensors")
    factors = {}
    for name in [name.removesuffix("_scale_2") for name in tensors if name.endswith(".weight_scale_2")]:
        layer, (rows, half) = name.removesuffix(".weight"), tensors[name].shape
        width, parent = 2 * half, layer.rpartition(".")[0]
        own = layer if layer.endswith(("o_proj", "down_proj")) else parent  # fused layers have one input
        tensors[f"{layer}.pre_quant_scale"] = factors.setdefault(own, random(width).abs() + 0.5).clone()
        tensors[f"{layer}.weight_quantizer._svdquant_lora_a"] = random(8, width)
        tensors[f"{layer}.weight_quantizer._svdquant_lora_b"] = random(rows, 8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_checkpoint_with_low_rank_pairs(tmp_path, rng, device):
    path = next(path for path in CHECKPOINTS if path.name == "llama_nvfp4_kvfp8")
    check(with_low_rank_pairs(path, rng, tmp_path / "svd"), rng, device)


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

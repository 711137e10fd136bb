"""Adapters (LoRA) that vLLM serves beside moqext's linears, and batches that change no row."""

import json

import pytest

from tests.vllm.conftest import assert_same, on_cuda
from tests.vllm_cases import DATA

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

RANK, ALPHA = 8, 16
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def adapter(tmp_path):
    """A directory of a random adapter of the tiny Llama, as PEFT writes one."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    torch.manual_seed(3)
    sizes = dict.fromkeys(("q_proj", "o_proj"), (128, 128))
    sizes |= dict.fromkeys(("k_proj", "v_proj"), (64, 128))
    sizes |= {"gate_proj": (256, 128), "up_proj": (256, 128), "down_proj": (128, 256)}
    tensors = {}
    for name, (rows, columns) in sizes.items():
        place = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        key = f"base_model.model.model.layers.0.{place}.{name}.lora_"
        tensors[f"{key}A.weight"] = torch.randn(RANK, columns) / columns**0.5
        tensors[f"{key}B.weight"] = torch.randn(rows, RANK) / 4
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    about |= {"target_modules": list(NAMES), "base_model_name_or_path": "", "use_dora": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    return tmp_path


def test_tokens_are_those_of_merged_weights(engine, adapter):
    directory = DATA / "checkpoints" / "llama_w4a16_nvfp4"
    plain, adapted, methods = engine("adapted", directory, adapter)[0]
    assert methods["MoqextModelOptLinearMethod"] > 0
    assert_same(adapted, engine("merged", directory, adapter)[0])
    assert adapted != plain


@pytest.mark.skipif(not on_cuda(), reason="what vLLM does for it are kernels of Triton")
@pytest.mark.parametrize("name", ["llama_nvfp4_kvfp8", "llama_fp8_kvfp8", "qwen3moe_fp8"])
def test_a_batch_changes_no_bit_of_a_prompt(engine, name):
    found = engine("batches", DATA / "checkpoints" / name, VLLM_BATCH_INVARIANT="1")[0]
    alone, together, (layers, invariant) = found
    assert layers > 0
    assert invariant == layers
    assert alone == together

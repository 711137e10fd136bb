"""Loaders of vLLM's, beside moqext's parameters: what was filled, and by tensors of which data type."""

from types import SimpleNamespace

import pytest

import moqext

pytest.importorskip("vllm")
import torch

from tests.vllm.test_step_aside import experts, make_config

pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One rank, without groups."""
    from vllm.model_executor import parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)


def make_linear(quant_algo, partitions):
    from moqext_vllm.linear import MoqextModelOptLinearMethod

    quant = make_config(quant_algo).layer_quant(NAME)
    method, layer = MoqextModelOptLinearMethod(quant, NAME, "exact"), torch.nn.Module()
    rows = sum(partitions)

    def load(param, loaded, loaded_shard_id=None):
        slots = param.data.split(list(partitions)) if loaded_shard_id is not None else [param.data]
        part = slots[loaded_shard_id or 0]
        part.copy_(loaded.reshape(part.shape))

    method.create_weights(layer, 64, list(partitions), 64, rows, torch.bfloat16, weight_loader=load)
    return method, layer


def make_experts():
    from moqext_vllm.experts import MoqextModelOptMoEMethod

    layer = experts()
    object.__setattr__(layer, "_map_global_expert_id_to_local_expert_id", lambda expert: expert)
    quant = make_config("NVFP4").layer_quant("model.layers.0.mlp.experts")
    method = MoqextModelOptMoEMethod(quant, "model.layers.0.mlp.experts", "exact", layer.moe_config)

    def load(param, loaded, weight_name, shard_id, expert_id, return_success=False):
        data = param.data[expert_id]
        whole = shard_id == "w2" or data.shape[0] == 1
        (data if whole else data.chunk(2)[shard_id == "w3"]).copy_(loaded)
        return True

    method.create_weights(layer, 4, 64, 64, torch.bfloat16, weight_loader=load)
    return method, layer


def fill(layer, role, expert, shard, rng, zero=False):
    """Loads a tensor of an expert: random, or what an exporter writes for weights of zeros."""
    param = getattr(layer, role)
    shape = list(param.shape[1:])
    if role.startswith("w13") and len(shape) > 1:
        shape[0] //= 2
    if param.dtype == torch.float32:
        loaded = torch.tensor(0.0 if zero else 0.01)
    else:
        codes = torch.from_numpy(rng.integers(0, 0x70, shape).astype("uint8"))
        if zero:
            codes.fill_(0x88 if param.dtype == torch.uint8 else 0x7F)
        loaded = codes.view(param.dtype)
    param.weight_loader(param, loaded, role, shard_id=shard, expert_id=expert)


def test_an_expert_of_zeros_was_loaded(rng):
    """A layer of zeros has block scales that are all NaN, and codes that may be all minus zero."""
    method, layer = make_experts()
    roles = [role for role in method.method.checkpoint_params if hasattr(layer, role)]
    roles = [role for role in roles if not role.endswith(("input_scale", "pre_quant_scale"))]
    for expert in range(4):
        for role in roles:
            for shard in ("w1", "w3") if role.startswith("w13") else ("w2",):
                if (role, expert, shard) != ("w13_weight", 3, "w3"):
                    fill(layer, role, expert, shard, rng, zero=expert == 2)
    with pytest.raises(moqext.CheckpointError, match=r"w13_weight was .* up of expert 3 \(1 of 8"):
        method._loaded(layer)
    fill(layer, "w13_weight", 3, "w3", rng)
    assert set(roles) <= method._loaded(layer).keys()


def test_a_linear_of_zeros_was_loaded():
    method, layer = make_linear("NVFP4", (32, 64))
    for index, rows in enumerate((32, 64)):
        codes = torch.full((rows, 32), 0x88, dtype=torch.uint8)
        layer.weight.weight_loader(layer.weight, codes, index)
    layer.weight_scale_2.weight_loader(layer.weight_scale_2, torch.tensor(0.0), (0, 1))
    scale = torch.full((32, 4), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    layer.weight_scale.weight_loader(layer.weight_scale, scale, 0)
    with pytest.raises(moqext.CheckpointError, match="weight_scale was never loaded for part 1 of the 2"):
        method._loaded(layer)
    layer.weight_scale.weight_loader(layer.weight_scale, scale.repeat(2, 1), loaded_shard_id=1)
    assert method._loaded(layer).keys() >= {"weight", "weight_scale", "weight_scale_2"}


@pytest.mark.parametrize(
    "quant_algo, role, dtype, expected",
    [
        ("FP8", "weight", torch.float8_e5m2, "float8_e4m3fn"),
        ("FP8", "weight", torch.bfloat16, "float8_e4m3fn"),
        ("FP8", "weight_scale", torch.float8_e4m3fn, "a float of 16 bits or more"),
        ("NVFP4", "weight", torch.int8, "uint8"),
        ("NVFP4", "weight_scale", torch.uint8, "float8_e4m3fn"),
    ],
)
def test_a_tensor_of_another_data_type_is_no_number(quant_algo, role, dtype, expected):
    _, layer = make_linear(quant_algo, (64,))
    param = getattr(layer, role)
    loaded = torch.zeros(param.shape, dtype=torch.uint8)
    loaded = loaded.view(dtype) if dtype.itemsize == 1 else loaded.to(dtype)
    with pytest.raises(TypeError, match=f"{NAME}.{role}: expected {expected}, got a tensor of {dtype}"[:60]):
        param.weight_loader(param, loaded)


def test_a_stack_of_another_data_type_is_no_number():
    _, layer = make_experts()
    codes = torch.zeros(64, 32, dtype=torch.int8)
    with pytest.raises(TypeError, match="w2_weight of expert 1: expected uint8, got a tensor of int8"):
        layer.w2_weight.weight_loader(layer.w2_weight, codes, "w2_weight", shard_id="w2", expert_id=1)


def test_floats_of_other_widths_are_scales():
    _, layer = make_linear("FP8", (64,))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        layer.weight_scale.weight_loader(layer.weight_scale, torch.tensor(0.5, dtype=dtype))
        assert layer.weight_scale.item() == 0.5


def test_a_cache_scale_of_minus_one_is_damage(monkeypatch):
    """To vLLM it says that there is none."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    from moqext_vllm.kv_cache import MoqextKVCacheMethod

    monkeypatch.setattr(BaseKVCacheMethod, "process_weights_after_loading", lambda self, layer: None)
    config = SimpleNamespace(config=SimpleNamespace(kv_cache_quant_algo="FP8"))
    method, layer = MoqextKVCacheMethod(config, "model.layers.0.self_attn.attn"), torch.nn.Module()
    method.create_weights(layer)
    method.process_weights_after_loading(layer)
    assert layer.k_scale.item() == layer.v_scale.item() == -1.0
    method.create_weights(layer)
    layer.k_scale.data.fill_(-1.0)
    with pytest.raises(moqext.CheckpointError, match=r"self_attn.attn: .*k_scale"):
        method.process_weights_after_loading(layer)

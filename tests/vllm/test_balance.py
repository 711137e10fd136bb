"""Balancing of experts: vLLM exchanges rows of what `get_expert_weights` gives, and the experts go along."""

from types import SimpleNamespace

import pytest

from tests.vllm_cases import DATA

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]


@pytest.mark.parametrize("name, algo", [("qwen3moe_fp8", "FP8"), ("qwen3moe_nvfp4", "NVFP4")])
def test_experts_change_places_with_all_that_is_theirs(rng, name, algo):
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from moqext import LayerQuant
    from moqext_vllm.experts import MoqextModelOptMoEMethod

    parallel = SimpleNamespace(enable_eplb=True, use_ep=False, ep_size=1)
    moe = SimpleNamespace(
        tp_size=1, experts_per_token=2, is_act_and_mul=True, has_bias=False, moe_parallel_config=parallel
    )
    layer = torch.nn.Module()
    layer.activation, layer.local_num_experts = "silu", 4
    layer.expert_map, layer.apply_router_weight_on_input = None, False
    method = MoqextModelOptMoEMethod(LayerQuant(algo, None, "quant_algo"), "experts", "exact", moe)
    assert method.supports_eplb
    method.create_weights(layer, 4, 128, 64, torch.float32, weight_loader=None)
    shards = {"gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", None)}
    for full, tensor in load_file(DATA / "checkpoints" / name / "model.safetensors").items():
        if ".mlp.experts." in full:
            expert, shard, role = full.split(".mlp.experts.")[1].split(".")
            stack, half = shards[shard]
            slot = getattr(layer, f"{stack}_{role}").data[int(expert)]
            slot = slot if half is None else slot.chunk(2)[half]
            slot.copy_(tensor.reshape(slot.shape))
    method.process_weights_after_loading(layer)

    x = torch.from_numpy(rng.standard_normal((7, 128)).astype(np.float32))
    ids = torch.from_numpy(np.stack([rng.permutation(4)[:2] for _ in x]).astype(np.int32))
    weights = torch.from_numpy(rng.random((7, 2), np.float32))
    before = method.apply(layer, x, weights, ids)
    places = torch.tensor([2, 0, 3, 1])  # which expert stands in each place
    moved = RoutedExperts.get_expert_weights(layer)
    for rows in moved:
        rows.copy_(rows[places])
    assert torch.equal(method.apply(layer, x, weights, places.argsort()[ids.long()].int()), before)
    assert not torch.equal(method.apply(layer, x, weights, ids), before)

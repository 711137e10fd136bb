"""Experts as vLLM's balancing has them: rows of tensors, which it moves between ranks.

`balanced.py NAME ALGO SEED` is one rank of two. Each has three places for a layer's four experts, two of
which have two places, and vLLM's own exchange gives the places to others. It prints how far outputs of both
ranks' experts are from one rank's that has all: before, after, and after with the places of before, as
shares of the largest output.
"""

import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.model_executor.layers.fused_moe import RoutedExperts

from moqext import LayerQuant
from moqext_vllm import experts as plugin
from moqext_vllm.experts import MoqextModelOptMoEMethod
from tests.vllm_cases import DATA

HIDDEN, INNER, EXPERTS, TOP_K = 128, 64, 4, 2
SHARDS = {"gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", None)}
PLACES = 6
"""Places of both ranks together, for four experts."""


def make_layer(name, algo, held, places=EXPERTS, ranks=1):
    """A layer and its method, with the experts of a genuine checkpoint that a rank has in its places.

    Args:
        name: the checkpoint's.
        algo: of its experts.
        held: the expert in each of this rank's places.
        places: of all ranks.
        ranks: how many there are.
    """
    parallel = SimpleNamespace(enable_eplb=True, use_ep=ranks > 1, ep_size=ranks)
    moe = SimpleNamespace(
        tp_size=1, experts_per_token=TOP_K, is_act_and_mul=True, has_bias=False, moe_parallel_config=parallel
    )
    layer = torch.nn.Module()
    layer.activation, layer.local_num_experts = "silu", len(held)
    layer.expert_map, layer.apply_router_weight_on_input = None, False
    method = MoqextModelOptMoEMethod(LayerQuant(algo, None, "quant_algo"), "experts", "exact", moe)
    assert method.supports_eplb
    options = {"weight_loader": None, "global_num_experts": places}
    method.create_weights(layer, len(held), HIDDEN, INNER, torch.float32, **options)
    for full, tensor in load_file(DATA / "checkpoints" / name / "model.safetensors").items():
        if ".mlp.experts." in full:
            expert, shard, role = full.split(".mlp.experts.")[1].split(".")
            stack, half = SHARDS[shard]
            for place in (place for place, one in enumerate(held) if one == int(expert)):
                slot = getattr(layer, f"{stack}_{role}").data[place]
                slot = slot if half is None else slot.chunk(2)[half]
                slot.copy_(tensor.reshape(slot.shape))
    method.process_weights_after_loading(layer)
    return layer, method


def random_inputs(rng):
    """x, weights and ids of seven tokens."""
    x = torch.from_numpy(rng.standard_normal((7, HIDDEN)).astype(np.float32))
    ids = torch.from_numpy(np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in x]).astype(np.int32))
    return x, torch.from_numpy(rng.random((7, TOP_K), np.float32)), ids


def random_places(rng):
    """The expert of each place: all four, and two of them once more."""
    return rng.permutation(np.concatenate([np.arange(EXPERTS), rng.permutation(EXPERTS)[: PLACES - EXPERTS]]))


def first_places(places):
    """The first place of each expert."""
    return np.array([np.flatnonzero(places == expert)[0] for expert in range(EXPERTS)])


def other_places(rng, places):
    """Places in which no expert is where it first was, and each rank has another set of experts."""
    while True:
        found = random_places(rng)
        sets = [set(half) for each in (places, found) for half in np.split(each, 2)]
        if (found[first_places(places)] != np.arange(EXPERTS)).all() and sets[:2] != sets[2:]:
            return found


def main(name, algo, seed):
    from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=2)
    group = dist.group.WORLD
    plugin.get_ep_group = lambda: SimpleNamespace(cpu_group=group)
    rng = np.random.default_rng(int(seed))
    x, weights, ids = random_inputs(rng)
    whole, method = make_layer(name, algo, range(EXPERTS))
    expected = method.apply(whole, x, weights, ids)
    first = random_places(rng)
    second = other_places(rng, first)
    own = slice(rank * PLACES // 2, (rank + 1) * PLACES // 2)
    layer, method = make_layer(name, algo, first[own].tolist(), PLACES, 2)
    layer.expert_map = torch.full((PLACES,), -1, dtype=torch.int32)
    layer.expert_map[own] = torch.arange(PLACES // 2, dtype=torch.int32)

    def distance(places):
        found = torch.from_numpy(first_places(places))
        y = method.apply(layer, x, weights, found[ids.long()].int())
        dist.all_reduce(y)
        return float((y - expected).abs().max() / expected.abs().max())

    before = distance(first)
    rows = list(RoutedExperts.get_expert_weights(layer))
    rearrange_expert_weights_inplace(
        torch.from_numpy(first)[None],
        torch.from_numpy(second)[None],
        [rows],
        [torch.empty_like(each) for each in rows],
        group,
        TorchDistNcclEplbCommunicator(group),
    )
    print("RESULT", json.dumps([before, distance(second), distance(first)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

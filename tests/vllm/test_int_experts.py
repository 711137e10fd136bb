"""Experts of int4 and int8 weights, filled by vLLM's own loader: whole, and split between two ranks."""

import numpy as np
import pytest

import moqext
from moqext import reference
from tests.expert_files import halves
from tests.moe_cases import random_stacks
from tests.vllm.test_step_aside import experts, make_config

pytest.importorskip("vllm")
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

ALGOS = ("W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "W8A16")
NAME = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INNER, TOP_K = 4, 128, 256, 2
SHARDS = {"gate": ("w13", "w1"), "up": ("w13", "w3"), "w2": ("w2", "w2")}


def make_layer(algo, rank=0, size=1, local=None):
    """Experts of vLLM's, unloaded; `local` are those of this rank."""
    from moqext_vllm.experts import MoqextModelOptMoEMethod

    own = list(range(EXPERTS)) if local is None else local
    layer = experts(
        num_experts=EXPERTS,
        num_local_experts=len(own),
        hidden_dim=HIDDEN,
        intermediate_size_per_partition=INNER // size,
        tp_size=size,
        tp_rank=rank,
        tp_shard_with_padding=False,
    )
    layer.params_dtype = torch.float32
    layer.moe_config.moe_parallel_config.tp_size = size
    layer.quant_config, layer._fused_shared_expert_quantizer = None, None
    object.__setattr__(
        layer,
        "_map_global_expert_id_to_local_expert_id",
        lambda expert: own.index(expert) if expert in own else -1,
    )
    layer.apply_router_weight_on_input, layer._expert_map = False, None
    if local is not None:
        layer._expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        layer._expert_map[own] = torch.arange(len(own), dtype=torch.int32)
    quant = make_config(algo).layer_quant(NAME)
    method = MoqextModelOptMoEMethod(quant, NAME, "exact", layer.moe_config)
    layer.quant_method = method
    method.create_weights(
        layer,
        len(own),
        HIDDEN,
        INNER // size,
        torch.float32,
        global_num_experts=EXPERTS,
        weight_loader=layer.weight_loader,
    )
    return layer


def make_stacks(rng, algo):
    return random_stacks(rng, algo, EXPERTS, HIDDEN, INNER)


def load(layer, stacks, *but):
    """Fills experts one by one; `but` names (expert, projection, role) to leave out."""
    for projection, roles in halves(stacks, True).items():
        stem, shard = SHARDS[projection]
        for role, stack in roles.items():
            for expert, value in enumerate(stack):
                if (expert, projection, role) in but:
                    continue
                loaded = torch.from_numpy(np.array(value))
                loaded = loaded.view(torch.bfloat16) if loaded.dtype == torch.uint16 else loaded
                name, param = f"{stem}_{role}", getattr(layer, f"{stem}_{role}")
                assert param.weight_loader(
                    param, loaded, name, shard_id=shard, expert_id=expert, return_success=True
                ) == (layer._map_global_expert_id_to_local_expert_id(expert) >= 0)


def expected(algo, stacks, x, weights, ids):
    method = moqext.MoEMethod(algo, EXPERTS, HIDDEN, INNER, top_k=TOP_K, dtype="float32")
    found = method(x.numpy(), method.prepare(stacks), weights.numpy(), ids.numpy())
    return torch.from_numpy(np.asarray(found))


def make_call(rng, tokens=5):
    x = torch.from_numpy(rng.standard_normal((tokens, HIDDEN)).astype(np.float32))
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
    return x, torch.from_numpy(rng.random((tokens, TOP_K)).astype(np.float32)), torch.from_numpy(ids)


def run(layer, call):
    layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method.apply(layer, *call)


@pytest.mark.parametrize("algo", ALGOS)
def test_experts_have_the_bits_of_moqext(rng, algo):
    """Experts give their weights out, too, and a reload is in place."""
    layer, call = make_layer(algo), make_call(rng)
    assert layer.quant_method.find_fault(layer) is None
    places = None
    for _ in range(2):
        stacks = make_stacks(rng, algo)
        load(layer, stacks)
        if places is None:
            weights = layer.quant_method.dequantize_weight(layer)
            assert_weights(weights, algo, stacks)
        assert torch.equal(run(layer, call), expected(algo, stacks, *call))
        held = {
            name: tensor.data_ptr() for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
        }
        assert places in (None, held)
        places = held


def assert_weights(found, algo, stacks):
    for stem, weight in zip(("w13", "w2"), found, strict=True):
        for expert in range(EXPERTS):
            parts = {role: stacks[f"{stem}_{role}"][expert] for role in ("weight", "weight_scale")}
            meant = reference.dequantize(parts, algo)
            if f"{stem}_pre_quant_scale" in stacks:
                meant = meant * reference.decode(stacks[f"{stem}_pre_quant_scale"][expert], "bfloat16")
            torch.testing.assert_close(weight[expert], torch.from_numpy(meant.astype(np.float32)))


@pytest.mark.parametrize("algo", ALGOS)
def test_ranks_share_rows_and_columns_of_experts(rng, algo):
    """Their results add up to that of one rank, but for scales of x that each finds of its columns."""
    stacks, call = make_stacks(rng, algo), make_call(rng)
    whole, sums = expected(algo, stacks, *call), 0
    for rank in (0, 1):
        layer = make_layer(algo, rank, 2)
        load(layer, stacks)
        sums = sums + run(layer, call)
    assert (sums - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("algo", ALGOS)
def test_ranks_have_experts_of_their_own(rng, algo):
    stacks, call, sums = share(make_stacks(rng, algo)), make_call(rng), 0
    for local in ([0, 2], [1, 3]):
        layer = make_layer(algo, local=local)
        load(layer, stacks)
        sums = sums + run(layer, call)
    whole = expected(algo, stacks, *call)
    assert (sums - whole).norm() < 1e-5 * whole.norm()


def share(stacks):
    """Stacks with one scale of x in all experts, as ranks that exchange theirs have it."""
    largest = {
        role: np.full_like(value, value.max()) for role, value in stacks.items() if "input_scale" in role
    }
    return stacks | largest


@pytest.mark.parametrize("algo", ALGOS)
def test_what_an_expert_lacks_is_named(rng, algo):
    stacks = make_stacks(rng, algo)
    for role in ("weight", "weight_scale", "pre_quant_scale"):
        if f"w13_{role}" not in stacks:
            continue
        for projection, stem, which in (("up", "w13", " up"), ("w2", "w2", "")):
            layer = make_layer(algo)
            load(layer, stacks, (2, projection, role))
            text = rf"{NAME}: {stem}_{role} was never loaded for{which} of expert 2 \(1 of"
            with pytest.raises(moqext.CheckpointError, match=text):
                layer.quant_method.process_weights_after_loading(layer)


def test_factors_of_gate_and_up_that_differ_are_refused(rng):
    layer, stacks = make_layer("W4A16_AWQ"), make_stacks(rng, "W4A16_AWQ")
    load(layer, stacks)
    param, other = layer.w13_pre_quant_scale, torch.full((HIDDEN,), 3.0)
    param.weight_loader(param, other, "w13_pre_quant_scale", shard_id="w3", expert_id=1)
    text = "w13_pre_quant_scale: expected the same for gate and up, got others in expert 1"
    with pytest.raises(moqext.CheckpointError, match=text):
        layer.quant_method.process_weights_after_loading(layer)
    with pytest.raises(ValueError, match=r"pre_quant_scale: expected shape \[128\], got \[64\]"):
        param.weight_loader(param, other[:64], "w13_pre_quant_scale", shard_id="w1", expert_id=1)


def test_low_rank_pairs_of_experts_are_refused():
    config = make_config("NVFP4_SVD")
    with pytest.raises(moqext.UnsupportedQuantization, match="runs as linears, and not as experts"):
        config.get_quant_method(experts(), NAME)


def test_a_split_through_a_group_of_an_expert_is_refused():
    with pytest.raises(moqext.UnsupportedQuantization, match=f"{NAME}: .*64 rows of an expert"):
        make_layer("W4A16_AWQ", 0, 4)

"""Layers of SGLang over random checkpoints, on one rank or one of two, without processes beside it.

They are made and called within `engine(device)`, where new tensors are on the device, as while SGLang loads
a model; tensors of a checkpoint are on the CPU.
"""

import types
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from .sglang_stand_ins import stand_in

stand_in()

from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.linear import (  # noqa: E402
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE  # noqa: E402
from sglang.srt.layers.quantization import QUANTIZATION_METHODS  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

from moqext_sglang.prepared import STORED_AS  # noqa: E402

from .torch_cases import tensors_of  # noqa: E402

GROUP = {"W4A8_NVFP4_FP8": 32}
HEADS, KV_HEADS = 4, 2
ALONE = types.SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1)
RANK = {
    **dict.fromkeys(("tp_size", "attn_tp_size", "moe_ep_size", "moe_tp_size", "moe_dp_size", "pp_size"), 1),
    "tp_group": None,
    "tp_rank": 0,
    "moe_ep_rank": 0,
    "moe_tp_rank": 0,
    "moe_dp_rank": 0,
    "attn_tp_group": None,
    "attn_tp_rank": 0,
    "pp_group": ALONE,
    "pp_rank": 0,
}


@contextmanager
def engine(device="cpu"):
    """One rank of SGLang, without processes beside it."""
    with (
        get_context().override_server_args(device=device),
        get_parallel().override(**RANK),
        patch.multiple(parallel_state, _TP=ALONE, _PP=ALONE),  # what SGLang 0.5.17 asks beside it
        torch.device(device),
    ):
        yield


@contextmanager
def bfloat16_by_default():
    """New tensors have the dtype of the model, as while SGLang makes one."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def one_of_two(rank, experts="rows"):
    """This process as one of two ranks, which share rows, or experts where those are whole ("experts")."""
    kind = "ep" if experts == "experts" else "tp"
    two = {"tp": 2, "attn_tp": 2, f"moe_{kind}": 2}
    sizes = {f"{name}_size": size for name, size in two.items()}
    return get_parallel().override(**sizes, **{f"{name}_rank": rank for name in two})


def config_for(algo, packed=None, **fields):
    """The configuration of a checkpoint in one algorithm, made as SGLang makes it."""
    inner = {"quant_algo": algo, "exclude_modules": ["lm_head"], **fields}
    name = "modelopt_fp4" if "FP4" in algo else "modelopt_fp8"
    document = {
        "producer": {"name": "modelopt"},
        "quantization": inner,
        "packed_modules_mapping": packed or {},
    }
    return QUANTIZATION_METHODS[name].from_config(document)


def cut(case, rank, ranks, axis):
    """Takes the share of one of several ranks: its rows of each part (axis 0), or its columns (axis 1)."""
    parts, whole = [], ("lora_a", "lora_b")[axis]
    for part in case.parts:
        mine = dict(part)
        for role, array in part.items():
            if role == whole:
                continue
            if array.ndim == 2 or (array.ndim == 1 and (role == "pre_quant_scale") == (axis == 1)):
                mine[role] = np.split(array, ranks, axis=min(axis, array.ndim - 1))[rank]
        parts.append(mine)
    if axis == 1:
        return replace(case, parts=parts, in_features=case.in_features // ranks)
    return replace(case, parts=parts, out_partitions=[rows // ranks for rows in case.out_partitions])


def part_tensors(case):
    """The tensors of each part of a case as its file has them: scalars are scalars."""
    for rows, part in zip(case.out_partitions, case.parts, strict=True):
        alone = replace(case, parts=[part], out_partitions=[rows])
        yield {
            role: tensor.reshape(()) if part[role].ndim == 0 else tensor
            for role, tensor in tensors_of(alone).items()
        }


def linear_of(kind, case, config, prefix="model.layers.0.mlp.x", dtype=torch.bfloat16, bias=False):
    """A layer of SGLang for a case, empty, and the names of its parts."""
    options = {"bias": bias, "params_dtype": dtype, "quant_config": config, "prefix": prefix}
    columns, rows = case.in_features, case.out_partitions
    if kind == "qkv":
        return QKVParallelLinear(columns, rows[1] // KV_HEADS, HEADS, KV_HEADS, **options), ("q", "k", "v")
    if kind == "merged":
        return MergedColumnParallelLinear(columns, list(rows), **options), tuple(range(len(rows)))
    made = {"replicated": ReplicatedLinear, "column": ColumnParallelLinear, "row": RowParallelLinear}[kind]
    return made(columns, rows[0], **options), (None,)


def load_linear(layer, case, names, skip=()):
    """Loads the tensors of each part as a model of SGLang does, but for those that are skipped."""
    params = dict(layer.named_parameters())
    for name, tensors in zip(names, part_tensors(case), strict=True):
        for role, tensor in tensors.items():
            if (name, role) not in skip:
                shard = () if name is None else (name,)
                param = params[STORED_AS.get(role, role)]
                param.weight_loader(param, tensor, *shard)


def expert_tensors(case):
    """(stack, expert, shard, tensor) of each tensor that a file of these experts has."""
    specs = case.method().checkpoint_params
    from .torch_moe_cases import stacks_of

    for role, stack in stacks_of(case).items():
        for expert in range(specs[role].shape[0]):
            tensor = stack[expert]
            if role.startswith("w2_"):
                yield role, expert, "w2", tensor
            elif role.endswith("pre_quant_scale"):
                yield role, expert, "w1", tensor
                yield role, expert, "w3", tensor
            elif not case.options.get("gated", True):
                yield role, expert, "w1", tensor
            else:
                for shard, half in zip(("w1", "w3"), tensor.chunk(2), strict=True):
                    yield (
                        role,
                        expert,
                        shard,
                        half.reshape(()) if half.dim() == 1 and len(half) == 1 else half,
                    )


def experts_of(case, config, prefix="model.layers.0.mlp.experts", dtype=torch.bfloat16, **options):
    """The experts of a case as SGLang's layer, empty."""
    from .torch_moe_cases import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K

    about = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "top_k": TOP_K}
    gated = case.options.get("gated", True)
    activation = case.options.get("activation", "silu")
    return FusedMoE(
        **about,
        layer_id=0,
        params_dtype=dtype,
        quant_config=config,
        prefix=prefix,
        is_gated=gated,
        activation=activation,
        **options,
    )


def load_experts(layer, case, skip=()):
    """Loads each tensor of each expert as a model of SGLang does, but for those that are skipped."""
    params = dict(layer.named_parameters())
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for role, expert, shard, tensor in expert_tensors(case):
        if (role, expert, shard) not in skip:
            kind = role.partition("_")[2]
            name = f"model.layers.0.mlp.experts.{expert}.{names[shard]}.{kind}"
            params[role].weight_loader(params[role], tensor, name, shard_id=shard, expert_id=expert)

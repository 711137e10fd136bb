"""The weights that layers hand out: for vLLM to quantize anew, and through an identity matrix."""

import pytest

from tests.vllm_cases import DATA

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

NAMES = (
    *("checkpoints/llama_fp8_kvfp8", "checkpoints/llama_fp8_pc_pt", "checkpoints/llama_w4a8_nvfp4_fp8"),
    *("checkpoints/llama_nvfp4_kvfp8", "exports/fp8_pb_wo_unaligned", "exports/nvfp4_lm_head"),
    *("checkpoints/llama_int4_awq", "checkpoints/llama_w4a8_awq", "checkpoints/llama_int8_sq"),
    *("checkpoints/qwen3moe_fp8", "checkpoints/qwen3moe_nvfp4", "exports/mixtral_nvfp4"),
)
ROUNDINGS = 8 * 2.0**-24
"""Rounding of float32, of a product with scales and back."""


@pytest.fixture(scope="module")
def errors(engine):
    return dict(zip(NAMES, engine("weights", *(DATA / name for name in NAMES)), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_what_the_checkpoint_means(errors, name):
    layers = errors[name]
    assert any(layer.endswith("qkv_proj") for layer in layers)
    assert any("w13" in found for found in layers.values()) == ("qwen3moe" in name or "mixtral" in name)
    for layer, found in layers.items():
        for where, error in found.items():
            assert error <= (0 if where in ("stored", "w13", "w2") else ROUNDINGS), (layer, where)


ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A8_NVFP4_FP8", "NVFP4_AWQ", "MXFP4")


@pytest.mark.parametrize("algo", ALGOS)
def test_fused_layers_and_experts_keep_their_own_scales(rng, algo):
    import numpy as np
    import torch

    from moqext import LayerQuant, reference
    from moqext_vllm.dequantize import expert_weights, linear_weight

    rows, columns, experts = 128, 256, 3
    weights = rng.standard_normal((experts, 3, rows, columns)) * rng.uniform(0.5, 2, (experts, 3, 1, 1))
    stored = [[reference.quantize_weight(weight, algo) for weight in each] for each in weights]
    meant = np.array([[reference.dequantize(parts, algo) for parts in each] for each in stored], np.float32)
    quant = LayerQuant(algo, None, "quant_algo")

    def tensor(role, value):
        value = torch.from_numpy(np.ascontiguousarray(value))
        codes = value.dtype == torch.uint8 and not (role == "weight" and "FP4" in algo)
        codes = codes and algo != "MXFP4"
        return value.view(torch.float8_e4m3fn) if codes else value

    def fuse(role, values):
        values = [np.asarray(value) for value in values]
        if role == "weight_scale" and algo == "FP8_PB_WO":
            values = [value.reshape(-(-rows // 128), -(-columns // 128)) for value in values]
        return tensor(role, np.concatenate([np.atleast_1d(value) for value in values]))

    roles = stored[0][0]
    given = {role: fuse(role, [parts[role] for parts in stored[0][:2]]) for role in roles}
    factor = None
    if algo == "NVFP4_AWQ":
        factor = given["pre_quant_scale"] = torch.from_numpy(rng.uniform(0.5, 2, columns).astype(np.float32))
    expected = torch.from_numpy(meant[0][:2].reshape(2 * rows, columns))
    found = linear_weight(given, quant, (rows, rows), torch.float32)
    assert torch.equal(found, expected if factor is None else expected * factor)

    stacks = {}
    for role in roles:
        stacks[f"w13_{role}"] = torch.stack(
            [fuse(role, [part[role] for part in each[:2]]) for each in stored]
        )
        stacks[f"w2_{role}"] = torch.stack([fuse(role, [each[2][role]]) for each in stored])
        if role == "weight_scale_2" or (algo == "FP8" and role == "weight_scale"):
            stacks[f"w2_{role}"] = stacks[f"w2_{role}"].flatten()
    w13, w2 = expert_weights(stacks, quant, True, False, torch.float32)
    assert torch.equal(w13, torch.from_numpy(meant[:, :2].reshape(experts, 2 * rows, columns)))
    assert torch.equal(w2, torch.from_numpy(meant[:, 2]))

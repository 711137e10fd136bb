"""Gradients through frozen quantized linears: those of torch on the dequantized weights."""

import copy
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moqext import ops, reference  # noqa: E402
from moqext.algorithms import ALGORITHMS  # noqa: E402
from moqext.tools.random_layers import random_linear  # noqa: E402
from moqext_torch import as_torch  # noqa: E402
from moqext_torch.dequantized import weight_of  # noqa: E402

from ..linear_cases import with_pairs  # noqa: E402
from ..test_batch_invariance import LINEARS  # noqa: E402
from .torch_cases import ALGOS, case_of, filled, random_x  # noqa: E402


def stored_weight(case):
    """The weight of the partitions of a case in float64, as the checkpoint means it."""
    parts = []
    for part in case.parts:
        own = np.asarray(reference.dequantize(part, case.quant_algo, group_size=case.group_size), np.float64)
        if "lora_b" in part:
            own = own + part["lora_b"].astype(np.float64) @ part["lora_a"]
        parts.append(own * np.asarray(part.get("pre_quant_scale", 1.0), np.float64))
    return np.concatenate(parts)


@pytest.mark.parametrize("algo, compute", LINEARS)
def test_the_weight_of_prepared_tensors(rng, algo, compute):
    """All formats, rows of several partitions that end within tiles; folded codes are what is multiplied."""
    case = random_linear(rng, algo, [130, 70], 384)
    method = case.method(compute=compute)
    params = {role: as_torch(tensor) for role, tensor in method.prepare(case.listed()).items()}
    codes = params["weight"]
    if ALGORITHMS[algo].codes == "e4m3" or (compute == "fp8" and codes.shape[1] == 384):
        params["weight"] = codes.view(torch.float8_e4m3fn)
    weight = weight_of(params, (200, 384), [130, 70], method.group_size, torch.float32).double().numpy()
    expected = stored_weight(case)
    if compute == "fp8":
        error = np.linalg.norm(weight - expected) / np.linalg.norm(expected)
        assert 1e-3 < error < 0.03
    else:
        np.testing.assert_allclose(weight, expected, rtol=3e-7, atol=3e-7 * np.abs(expected).max())


def test_swizzled_scales_begin_a_tile_in_every_partition(rng):
    """Scales lie so with `compute="fp4"` on a device."""
    case = random_linear(rng, "NVFP4", [130, 70], 384)
    method = case.method()
    params = {role: as_torch(tensor) for role, tensor in method.prepare(case.listed()).items()}
    line = weight_of(params, (200, 384), [130, 70], 16, torch.float32)
    parts = [ops.swizzle_block_scales(part) for part in params["weight_scale"].split([130, 70])]
    swizzled = params | {"weight_scale": torch.cat([as_torch(part) for part in parts])}
    assert swizzled["weight_scale"].shape == (384, 24)
    assert weight_of(swizzled, (200, 384), [130, 70], 16, torch.float32).equal(line)


def gradients(layer, x, out):
    x = x.clone().requires_grad_()
    layer(x).backward(out)
    return x.grad


@pytest.mark.parametrize("algo", ALGOS)
def test_gradients_of_x_and_of_the_bias(rng, algo):
    """Against torch in float64: of float32 to the last bits, of bfloat16 to the roundings of W and of dx."""
    case = case_of(rng, algo, (40, 24), 256)
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        layer = filled(case, torch.ones(64, dtype=dtype), dtype=dtype).prepare()
        layer.bias.requires_grad_(True)
        x = random_x(rng, case, 3, 5, dtype=dtype)
        out = torch.from_numpy(rng.standard_normal((3, 5, 64))).to(dtype)
        found = gradients(layer, x, out).double()
        weight = np.concatenate(
            [reference.dequantize(part, algo, group_size=case.group_size) for part in case.parts]
        ).astype(np.float64)
        if algo == "NVFP4_AWQ":
            weight = weight * reference.as_float32(case.parts[0]["pre_quant_scale"]).astype(np.float64)
        expected = out.double() @ torch.from_numpy(weight)
        assert torch.linalg.norm(found - expected) <= limit * torch.linalg.norm(expected)
        torch.testing.assert_close(layer.bias.grad, out.float().sum((0, 1)).to(dtype), rtol=1e-2, atol=1e-5)
        assert layer.dequantize().dtype == dtype


def test_low_rank_pairs_are_part_of_the_gradient(rng):
    case = with_pairs(rng, case_of(rng, "NVFP4", (48,), 128), 8)
    case = replace(case, algo="NVFP4_SVD")
    from moqext_torch import QuantLinear

    layer = QuantLinear(128, 48, "NVFP4_SVD", dtype=torch.float32, rank=8, optional=["input_scale"])
    tensors = {role: torch.from_numpy(np.ascontiguousarray(value)) for role, value in case.fused().items()}
    tensors["weight_scale"] = tensors["weight_scale"].view(torch.float8_e4m3fn)
    for role in ("lora_a", "lora_b"):
        tensors[role] = tensors[role].view(torch.int16).view(torch.bfloat16).float()
    tensors["pre_quant_scale"] = torch.linspace(0.5, 2, 128)
    layer.load_state_dict(tensors)
    x, out = random_x(rng, case, 4, dtype=torch.float32), torch.randn(4, 48)
    weight = torch.from_numpy(np.asarray(reference.dequantize(case.parts[0], "NVFP4"), np.float64))
    weight = (weight + tensors["lora_b"].double() @ tensors["lora_a"].double()) * tensors["pre_quant_scale"]
    torch.testing.assert_close(
        gradients(layer, x, out).double(),
        out.double() @ weight,
        rtol=1e-5,
        atol=1e-5 * float(weight.abs().max()),
    )


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_gradients_under_compile_checkpointing_and_autocast(rng, algo):
    case = case_of(rng, algo)
    layer = filled(case, torch.ones(40)).prepare()
    x, out = random_x(rng, case, 6), torch.randn(6, 40).bfloat16()
    expected = gradients(layer, x, out)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert gradients(compiled, x, out).equal(expected)

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    assert gradients(checkpointed, x, out).equal(expected)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gradients(layer, x.float(), out)
    assert cast.dtype == torch.float32
    assert cast.equal(expected.float())


def test_what_has_no_gradient_says_so(rng):
    case = case_of(rng, "FP8")
    layer, x = filled(case).prepare(), random_x(rng, case, 2).requires_grad_()
    (first,) = torch.autograd.grad(layer(x).sum(), x)
    assert not first.requires_grad
    out = torch.ones(2, 40, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="backward and once"):
        torch.autograd.grad(layer(x), x, out, create_graph=True)
    with pytest.raises(RuntimeError, match=r"torch\.func neither"):
        torch.func.grad(lambda x: layer(x).sum())(x.detach())
    layer.requires_grad_(True)
    with pytest.raises(RuntimeError, match="the weight is frozen"):
        layer(x)
    with torch.no_grad():
        layer(x)


def test_a_bias_of_another_dtype_has_its_gradient(rng):
    case = case_of(rng, "FP8")
    layer = filled(case, torch.ones(40, dtype=torch.bfloat16)).to(torch.float16).prepare()
    layer.bias.requires_grad_(True)
    layer(random_x(rng, case, 4, dtype=torch.float16)).sum().backward()
    assert layer.bias.grad.dtype == torch.bfloat16
    assert layer.bias.grad.equal(torch.full((40,), 4.0, dtype=torch.bfloat16))


def test_copies_have_gradients_too(rng):
    case = case_of(rng, "NVFP4")
    layer, x = filled(case).prepare(), random_x(rng, case, 2)
    out = torch.ones(2, 40, dtype=torch.bfloat16)
    assert gradients(copy.deepcopy(layer), x, out).equal(gradients(layer, x, out))

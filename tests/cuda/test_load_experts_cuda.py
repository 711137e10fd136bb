"""`Checkpoint.load` of experts on a CUDA device, and what `MoEMethod.prepare` does with biases there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moqext import Checkpoint, ExpertLayer, MoEMethod, ops, reference

from ..moe_cases import ALGOS, random_routing, random_stacks
from .cases import to_cuda, to_numpy, torch

pytestmark = pytest.mark.gpu

GENUINE = [
    "checkpoints/qwen3moe_fp8",
    "checkpoints/qwen3moe_nvfp4",
    "exports/mixtral_fp8",
    "exports/mixtral_nvfp4",
    "exports/deepseek_nvfp4",
    "exports/llama4_fp8",
    "exports/gpt_oss_nvfp4",
    "exports/nemotron_h_nvfp4",
    "exports/qwen3moe_mixed",
]
EXPERTS, HIDDEN, INTERMEDIATE = 4, 128, 96


def random_call(rng: Any, layer: ExpertLayer, tokens: int = 9) -> tuple[Any, ...]:
    x = rng.standard_normal((tokens, layer.hidden_size)).astype(np.float32)
    weights, ids = random_routing(rng, tokens, layer.top_k, layer.global_num_experts, "random", "int32")
    return torch.from_numpy(x), torch.from_numpy(weights), torch.from_numpy(ids)


def apart(found: Any, expected: Any) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


def first_container(ckpt: Checkpoint) -> str:
    return next(record.name for record in ckpt.layers() if record.kind == "moe")


@pytest.mark.parametrize("name", GENUINE)
def test_experts_there_are_those_here(rng: Any, data: Path, name: str) -> None:
    """By way of float32; tensors of any framework, and memory of moqext's own."""
    with Checkpoint(data / name) as ckpt:
        container = first_container(ckpt)
        here = ckpt.load(container, dtype="float32")
        there = ckpt.load(container, dtype="float32", device="cuda")
    assert isinstance(there, ExpertLayer)
    assert {part.method.device for part in there.parts} == {"cuda:0"}
    call = random_call(rng, here)
    y = there(*(tensor.cuda() for tensor in call))
    assert y.is_cuda
    # codes of activations may flip after a last bit
    assert apart(y, here(*call)) <= 2.5e-3
    own = there(*(ops.to_device(tensor.numpy(), "cuda:0") for tensor in call))
    assert np.array_equal(ops.to_host(own), y.cpu().numpy())
    graph = torch.cuda.CUDAGraph()
    held = [tensor.cuda() for tensor in call]
    with torch.cuda.graph(graph):
        captured = there(*held)
    for target, fresh in zip(held, random_call(rng, here), strict=True):
        target.copy_(fresh)
    graph.replay()
    assert captured.equal(there(*held))


@pytest.mark.parametrize("name", ["checkpoints/qwen3moe_fp8", "exports/qwen3moe_mixed"])
def test_some_experts_and_maps(rng: Any, data: Path, name: str) -> None:
    """In one format and in several; a map on the device."""
    with Checkpoint(data / name) as ckpt:
        container = first_container(ckpt)
        whole = ckpt.load(container, dtype="float32", device="cuda")
        count = whole.global_num_experts
        chosen = [int(number) for number in rng.permutation(count)[: count // 2]]
        some = ckpt.load(container, dtype="float32", device="cuda", experts=chosen)
    x, weights, ids = (tensor.cuda() for tensor in random_call(rng, whole))
    others = ~torch.isin(ids, torch.tensor(chosen, device="cuda"))
    expected = whole(x, weights.masked_fill(others, 0), ids)
    assert apart(some(x, weights, ids), expected) <= 1e-5
    places = torch.full((count,), -1, dtype=torch.int32)
    places[chosen] = torch.arange(len(chosen), dtype=torch.int32)
    assert some(x, weights, ids, places.cuda()).equal(some(x, weights, ids))


@pytest.mark.parametrize("algo", ["FP8", "FP8_PB_WO"])
def test_codes_stay_where_they_were_copied_to(rng: Any, algo: str) -> None:
    """`load` hands to `prepare` codes on the device, which are its result, and scales on the host."""
    stacks = random_stacks(rng, algo, EXPERTS, HIDDEN, INTERMEDIATE, bias="bfloat16")
    method = MoEMethod(algo, EXPERTS, HIDDEN, INTERMEDIATE, top_k=2, device="cuda:0")
    codes = {name: to_cuda(stacks[name]) for name in ("w13_weight", "w2_weight")}
    assert all(method.keeps(name) for name in codes)
    out = dict(codes)
    for name, spec in method.prepared_params.items():
        if name not in codes and (spec.required or name in stacks):
            out[name] = torch.full(spec.shape, float("nan"), device="cuda")
    assert method.prepare(stacks | codes, out) is out
    fresh = method.prepare({name: to_cuda(value) for name, value in stacks.items()})
    assert fresh.keys() == out.keys()
    for name, value in fresh.items():
        assert to_numpy(out[name]).tobytes() == to_numpy(value).tobytes(), name


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_biases(rng: Any, dtype: Any, interleaved: bool) -> None:
    """On the host or the device, in any type; on the device as float32, halves one behind the other."""
    stacks = random_stacks(rng, "NVFP4", EXPERTS, HIDDEN, INTERMEDIATE, interleaved=interleaved)
    method = MoEMethod(
        "NVFP4", EXPERTS, HIDDEN, INTERMEDIATE, top_k=2, device="cuda:0", interleaved=interleaved
    )
    params = {name: to_cuda(value) for name, value in stacks.items()}
    w13 = torch.from_numpy(rng.standard_normal((EXPERTS, 2 * INTERMEDIATE))).to(dtype)
    w2 = torch.from_numpy(rng.standard_normal((EXPERTS, HIDDEN))).to(dtype)
    expected = torch.cat([w13[:, 0::2], w13[:, 1::2]], 1) if interleaved else w13
    for place in ("cpu", "cuda"):
        given = {"w13_bias": w13.to(place), "w2_bias": w2.to(place)}
        prepared = method.prepare(params | given)
        assert prepared["w13_bias"].cpu().equal(expected.float())
        assert prepared["w2_bias"].cpu().equal(w2.float())
    every_other = torch.stack([w2, -w2], 1).cuda()[:, 0]
    assert not every_other.is_contiguous()
    prepared = method.prepare(params | {"w13_bias": w13, "w2_bias": every_other})
    assert prepared["w2_bias"].cpu().equal(w2.float())


def test_biases_that_do_not_fit_are_named(rng: Any) -> None:
    stacks = random_stacks(rng, "FP8", EXPERTS, HIDDEN, INTERMEDIATE)
    method = MoEMethod("FP8", EXPERTS, HIDDEN, INTERMEDIATE, top_k=2, device="cuda:0")
    params = {name: to_cuda(value) for name, value in stacks.items()}
    for place in ("cpu", "cuda"):
        short = torch.zeros(EXPERTS, HIDDEN - 1, device=place)
        with pytest.raises(ValueError, match=r"^w2_bias: expected shape \[4, 128\], got \[4, 127\]"):
            method.prepare(params | {"w2_bias": short})
        with pytest.raises(TypeError, match=r"^w2_bias: expected float32"):
            method.prepare(
                params | {"w2_bias": torch.zeros(EXPERTS, HIDDEN, dtype=torch.int32, device=place)}
            )


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("at_home", [False, True])
def test_what_is_refused_leaves_both_stacks_as_they_were(rng: Any, algo: str, at_home: bool) -> None:
    """A bad code or scale of the second one, and a bias that does not fit, with scales here or there."""
    good, other = (random_stacks(rng, algo, EXPERTS, HIDDEN, INTERMEDIATE, bias="float32") for _ in range(2))
    method = MoEMethod(algo, EXPERTS, HIDDEN, INTERMEDIATE, top_k=2, device="cuda:0")
    out = method.prepare({name: to_cuda(value) for name, value in good.items()})
    before = {name: to_numpy(value).tobytes() for name, value in out.items()}
    codes = "w2_weight_scale" if "FP4" in algo else "w2_weight"
    scale = "w2_weight_scale_2" if "FP4" in algo else "w2_weight_scale"
    faults = {codes: 0xFF, scale: np.nan, "w2_bias": None}
    for name, value in ((name, faults[name]) for name in faults if name in other):
        stacks = {key: np.array(stack) for key, stack in other.items()}
        if value is None:
            stacks[name] = stacks[name][:, 1:]
        else:
            stacks[name].reshape(EXPERTS, -1)[2, -1] = value
        specs = method.checkpoint_params
        params = {
            key: stack if at_home and specs[key].dtype == "float32" else to_cuda(stack)
            for key, stack in stacks.items()
        }
        with pytest.raises(ValueError, match=f"^{name}: "):
            method.prepare(params, out)
        assert {key: to_numpy(tensor).tobytes() for key, tensor in out.items()} == before
    method.prepare({name: to_cuda(value) for name, value in other.items()}, out)
    fresh = method.prepare({name: to_cuda(value) for name, value in other.items()})
    assert all(to_numpy(out[name]).tobytes() == to_numpy(value).tobytes() for name, value in fresh.items())


def test_experts_of_a_checkpoint_are_what_its_numbers_say(rng: Any, data: Path) -> None:
    """Without the CPU's kernels between."""
    with Checkpoint(data / "checkpoints" / "qwen3moe_nvfp4") as ckpt:
        container = first_container(ckpt)
        layer = ckpt.load(container, dtype="float32", device="cuda")
        x, weights, ids = random_call(rng, layer)
        expected = np.zeros((len(x), layer.hidden_size))
        for expert in range(layer.num_experts):
            gate, up, down = (
                ckpt.dequantize(f"{container}.{expert}.{part}_proj").astype(np.float64)
                for part in ("gate", "up", "down")
            )
            for token, slot in zip(*np.nonzero(ids.numpy() == expert), strict=True):
                row = x[token].double().numpy()
                middle = reference.expert_activation(row @ gate.T, row @ up.T, "silu")
                expected[token] += float(weights[token, slot]) * (down @ middle.astype(np.float32))
    y = layer(x.cuda(), weights.cuda(), ids.cuda())
    assert apart(y, torch.from_numpy(expected)) <= 1e-5

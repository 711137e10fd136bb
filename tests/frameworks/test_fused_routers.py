"""Routers that `fuse` knows: the experts and weights of the model's own, in one kernel behind the logits."""

import copy
import logging
import pickle

import pytest

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")
pytest.importorskip("safetensors.torch")

import moqext_torch  # noqa: E402
import moqext_transformers  # noqa: E402
from moqext_torch import QuantExperts, stepping_aside  # noqa: E402
from moqext_torch.texts import digest  # noqa: E402
from moqext_transformers.fused_class import Fused  # noqa: E402
from moqext_transformers.routers import BLOCKS, ROUTERS  # noqa: E402

from .test_transformers import error, random_ids  # noqa: E402

KNOWN = ("checkpoints/qwen3moe_fp8", "checkpoints/qwen3moe_nvfp4", "exports/mixtral_nvfp4")
OTHERS = ("exports/deepseek_nvfp4", "exports/gpt_oss_nvfp4", "exports/llama4_nvfp4")


def routers(model):
    """Routers that are fused, with their blocks."""
    found = [(block.gate, block) for block in model.modules() if hasattr(block, "gate")]
    return [(gate, block) for gate, block in found if isinstance(gate, Fused)]


def known(model):
    """Whether this version of Transformers has the texts."""
    for block in model.modules():
        if isinstance(getattr(block, "experts", None), QuantExperts) and hasattr(block, "gate"):
            kind = type(block.gate).__mro__[2] if isinstance(block.gate, Fused) else type(block.gate)
            return digest(kind.forward) in ROUTERS and digest(type(block).forward) in BLOCKS
    return False


def pair(directory, **options):
    plain, fused = (
        moqext_transformers.from_pretrained(directory, fuse=fuse, **options) for fuse in (False, True)
    )
    if not known(plain):
        pytest.skip("this version of Transformers has routers of another text")
    return plain, fused


def by_expert(choice, experts):
    """Weights [T, E] of weights and numbers in any order."""
    weights, ids = choice
    return torch.zeros(len(ids), experts).scatter_(1, ids.long().cpu(), weights.float().cpu())


@pytest.mark.parametrize("directory", KNOWN)
@torch.no_grad()
def test_what_a_router_chooses(rng, data, directory):
    plain, fused = pair(data / directory, dtype=torch.bfloat16)
    assert not routers(plain)
    assert len(routers(fused)) == fused.config.num_hidden_layers
    for (gate, block), own in zip(
        routers(fused), [b for b in plain.modules() if hasattr(b, "gate")], strict=True
    ):
        assert isinstance(gate, type(own.gate))
        x = torch.from_numpy(rng.standard_normal((33, gate.weight.shape[1]))).to(torch.bfloat16)
        (logits, *choice), (expected, *others) = gate(x), own.gate(x)
        assert logits.equal(expected)
        assert choice[0].dtype == others[0].dtype
        step = max(torch.finfo(choice[0].dtype).eps, 2.0**-20)  # two exponentials, sums and quotients
        best = logits.float().sort(descending=True).values
        clear = best[:, gate.top_k - 1] > best[:, gate.top_k]  # of equals torch takes any
        assert clear.any()
        found, wanted = (by_expert(each, logits.shape[1])[clear] for each in (choice, others))
        torch.testing.assert_close(found, wanted, rtol=step, atol=0)
        assert choice[1].shape == others[1].shape
        assert block(x[None]).shape == x[None].shape


@pytest.mark.parametrize("directory", KNOWN)
@torch.no_grad()
def test_models_are_what_they_were(rng, data, directory):
    """Logits within a rounding, the same state, and nothing in float32."""
    plain, fused = pair(data / directory, dtype=torch.bfloat16)
    ids, chosen = random_ids(rng, plain, 2, 9), []
    for gate, _ in routers(fused):
        gate.register_forward_hook(lambda gate, args, result: chosen.append(result))
    found = fused(ids).logits
    for block in plain.modules():
        if hasattr(block, "gate"):  # of equal logits torch takes any
            block.gate.register_forward_hook(lambda gate, args, result: chosen.pop(0))
    limit = 2.5e-3 * (4 * fused.config.num_hidden_layers + 1)
    assert error(found, plain(ids).logits) <= 4 * limit  # bfloat16 all the way
    assert not chosen
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert moqext_transformers.fuse(fused)["routers"] == 0, "fused twice"
    plain, fused = pair(data / directory, dtype=torch.float32)
    assert error(fused(ids).logits, plain(ids).logits) <= 1e-4


@torch.no_grad()
def test_copies_pickles_and_compiling(rng, data):
    _, fused = pair(data / KNOWN[1], dtype=torch.bfloat16)
    (gate, _), *_ = routers(fused)
    x = torch.randn(5, gate.weight.shape[1], dtype=torch.bfloat16)
    expected = gate(x)
    for again in (copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        assert all(one.equal(two) for one, two in zip(again(x), expected, strict=True))
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    assert all(one.equal(two) for one, two in zip(compiled(x), expected, strict=True))


def test_gradients_go_the_models_own_way(data):
    _, fused = pair(data / KNOWN[1], dtype=torch.bfloat16)
    (gate, _), *_ = routers(fused)
    gate.weight.requires_grad_()
    x = torch.randn(5, gate.weight.shape[1], dtype=torch.bfloat16)
    _, weights, ids = gate(x)
    assert weights.requires_grad
    assert ids.dtype == torch.int64


@pytest.mark.parametrize("directory", OTHERS)
def test_others_are_left_alone_with_a_line(data, directory, monkeypatch, caplog):
    monkeypatch.setattr(stepping_aside, "_said", set())
    with caplog.at_level(logging.INFO, "moqext_transformers.fusing"):
        model = moqext_transformers.from_pretrained(data / directory, dtype=torch.bfloat16)
        assert not routers(model)
        assert moqext_transformers.fuse(model)["routers"] == 0
    assert len([line for line in caplog.records if line.getMessage().startswith("routers are not")]) == 1


def test_experts_that_are_not_moqexts_keep_their_router(data):
    config = transformers.AutoConfig.from_pretrained(data / KNOWN[0])
    config.quantization_config = None
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert moqext_transformers.fuse(model)["routers"] == 0


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_device(rng, data):
    _, fused = pair(data / KNOWN[1], dtype=torch.bfloat16)
    (gate, _), *_ = routers(fused)
    x = torch.from_numpy(rng.standard_normal((7, gate.weight.shape[1]))).to(torch.bfloat16).cuda()
    there = copy.deepcopy(gate).cuda()
    logits, weights, ids = there(x)
    found = moqext_torch.route(logits.cpu(), gate.top_k, scoring="softmax", renormalize=gate.norm_topk_prob)
    assert weights.cpu().equal(found[0].to(weights.dtype))
    assert ids.cpu().equal(found[1])

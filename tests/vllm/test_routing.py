"""Routing by moqext in front of its experts: the experts and weights of vLLM's own, where it may route."""

from types import SimpleNamespace

import pytest

from tests.vllm.conftest import on_cuda
from tests.vllm_cases import DATA, write_deepseek

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

STEPS = 16  # of decoding, the first of them the prompts' own
ROUNDINGS = 32 * 2.0**-24
"""Rounding of float32, of exp, of sums of a few scores and of a quotient."""
GROUPS = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
BIASED = {"scoring_func": "sigmoid", "bias": True, "renormalize": True, "routed_scaling_factor": 2.5}
KNOWN = {
    "Mixtral": {"renormalize": True},
    "OLMoE": {"renormalize": False},
    "a factor that vLLM has no use for": {"renormalize": True, "routed_scaling_factor": 2.5},
    "DeepSeek-V2": {"renormalize": False, "routed_scaling_factor": 16.0, **GROUPS},
    "groups of sigmoids": {"renormalize": True, "scoring_func": "sigmoid", **GROUPS},
    "DeepSeek-V3": {**BIASED, **GROUPS},
}
LEFT = {
    "a function": {"custom_routing_function": print},
    "a table": {"hash_indices_table": 1},
    "softplus": {"scoring_func": "sqrtsoftplus", "renormalize": True},
    "a bias on softmax": {"bias": True},
    "experts that are not like groups": {**GROUPS, "num_expert_group": 5},
    "many experts": {"experts": 2048},
    "balancing": {"enable_eplb": True},
    "tokens of other ranks": {"dp_size": 2},
    "adapters": {"is_lora_enabled": True},
    "a step between": {"require_decomposed_backend": True},
    "MOQEXT_VLLM_OPS=0": {"MOQEXT_VLLM_OPS": "0"},
    "results that do not depend on the batch": {"VLLM_BATCH_INVARIANT": "1"},
}


@pytest.fixture
def make(monkeypatch):
    """`make(**facts)`: a layer of 16 experts, two for each token, and vLLM's description and router of it."""
    from vllm.model_executor.layers.fused_moe.config import get_routing_method_type
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

    monkeypatch.setenv("MOQEXT_VLLM_OPS", "1")

    def layer_and_router(**facts):
        import torch

        for name in [name for name in facts if name.isupper()]:
            monkeypatch.setenv(name, facts.pop(name))
        layer = SimpleNamespace(
            global_num_experts=facts.pop("experts", 16),
            top_k=2,
            renormalize=True,
            use_grouped_topk=False,
            num_expert_group=None,
            topk_group=None,
            scoring_func="softmax",
            routed_scaling_factor=1.0,
            custom_routing_function=None,
            hash_indices_table=None,
            e_score_correction_bias=None,
        )
        if facts.pop("bias", False):
            bias = torch.linspace(-0.3, 0.4, layer.global_num_experts).roll(5)
            layer.e_score_correction_bias = torch.nn.Parameter(bias)
        own = {name: facts.pop(name) for name in list(facts) if hasattr(layer, name)}
        vars(layer).update(own)
        parallel = SimpleNamespace(enable_eplb=False, dp_size=1, pcp_size=1, is_sequence_parallel=False)
        vars(parallel).update({name: facts.pop(name) for name in list(facts) if hasattr(parallel, name)})
        method = get_routing_method_type(
            scoring_func=layer.scoring_func,
            top_k=layer.top_k,
            renormalize=layer.renormalize,
            num_expert_group=layer.num_expert_group,
            has_e_score_bias=layer.e_score_correction_bias is not None,
        )
        moe = SimpleNamespace(moe_parallel_config=parallel, routing_method=method, is_lora_enabled=False)
        vars(moe).update(facts)

        def router():
            options = {**vars(layer)}
            return create_fused_moe_router(top_k=options.pop("top_k"), **options)

        return layer, moe, router

    return layer_and_router


@pytest.mark.parametrize("name", KNOWN)
def test_experts_are_those_of_vllms_router(make, rng, name):
    import torch

    from moqext_vllm.routing import find_routing

    if on_cuda() and not hasattr(torch.ops._moe_C, "topk_softmax"):
        pytest.skip("vLLM's own kernels of experts are a library of their own, which is not here")
    layer, moe, router = make(**KNOWN[name])
    device = "cuda" if on_cuda() else "cpu"
    if layer.e_score_correction_bias is not None:
        layer.e_score_correction_bias = torch.nn.Parameter(layer.e_score_correction_bias.data.to(device))
    logits = torch.from_numpy(rng.permuted(rng.standard_normal((64, 16)).astype("float32"), axis=1)).to(
        device
    )
    routing = find_routing(layer, moe)
    assert routing is not None
    weights, ids = routing(logits)
    expected, chosen = router()._compute_routing(logits, logits, None)
    chosen, order = chosen.sort(1)
    ids, own = ids.sort(1)
    assert torch.equal(ids, chosen.to(ids.dtype))
    expected = expected.gather(1, order)
    assert ((weights.gather(1, own) - expected).abs() <= ROUNDINGS * expected.abs()).all()


@pytest.mark.parametrize("name", LEFT)
def test_what_moqext_does_not_have_is_vllms_and_said_once(make, said, name):
    from moqext_vllm.routing import find_routing

    layer, moe, _ = make(**LEFT[name])
    assert [find_routing(layer, moe) for _ in range(2)] == [None, None]
    asked_for = any(option.isupper() for option in LEFT[name])
    assert [line.partition(":")[0] for line in said()] == ["routing and experts are not fused"] * (
        not asked_for
    )


def test_a_record_of_the_chosen_keeps_vllms_router(make):
    from vllm.config import VllmConfig, set_current_vllm_config

    from moqext_vllm.routing import find_routing

    layer, moe, _ = make()
    config = VllmConfig()
    with set_current_vllm_config(config, check_compile=False):
        assert find_routing(layer, moe) is not None
        config.aux_output_config.enable_return_routed_experts = True
        assert find_routing(layer, moe) is None


def test_tokens_that_are_padding_have_no_experts(make, rng, monkeypatch):
    import torch

    from moqext_vllm import routing

    layer, moe, _ = make()
    logits = torch.from_numpy(rng.standard_normal((5, 16)).astype("float32"))
    route = routing.find_routing(layer, moe)
    weights, ids = route(logits)
    padding = torch.tensor([False, False, False, True, True, False])
    monkeypatch.setattr(routing, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(routing, "get_forward_context", lambda: SimpleNamespace(is_padding=padding))
    kept, found = route(logits)
    assert torch.equal(kept, weights)
    assert torch.equal(found[:3], ids[:3])
    assert (found[3:] == -1).all()
    assert torch.equal(route(logits[3:4])[1], ids[3:4])  # a graph of one token has no other
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "0")
    assert torch.equal(route(logits)[1], ids)


# ----------------------------------------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    import numpy as np

    made = tmp_path_factory.mktemp("deepseek") / "deepseek"
    write_deepseek(made, "NVFP4", np.random.default_rng(3))
    names = ("qwen3moe_fp8", "qwen3moe_nvfp4")
    return {name: DATA / "checkpoints" / name for name in names} | {"deepseek": made}


@pytest.mark.parametrize(
    "name, how", [("qwen3moe_fp8", "eager"), ("qwen3moe_nvfp4", "compiled"), ("deepseek", "eager")]
)
def test_tokens_are_those_of_vllms_routing(engine, directories, name, how):
    if on_cuda():
        pytest.skip("vLLM routes by its own kernels there: the tokens are compared with Transformers'")
    own, calls, routers = engine("routed", directories[name], how, MOQEXT_VLLM_OPS="0")[0]
    assert (calls, set(routers.values())) == (0, {False})
    tokens, calls, routers = engine("routed", directories[name], how, MOQEXT_VLLM_OPS="1")[0]
    assert set(routers.values()) == {True}
    assert calls >= (STEPS if how == "eager" else 1)
    assert tokens == own

"""`moqext.route` chooses and weighs as the routers of Transformers' own models do."""

import numpy as np
import pytest

from moqext import route

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

HIDDEN, TOKENS = 64, 200


def filled(router, rng):
    """A router with random weights, biases included."""
    with torch.no_grad():
        for tensor in [*router.parameters(), *router.buffers()]:
            values = rng.standard_normal(tuple(tensor.shape)) * (HIDDEN**-0.5 if tensor.ndim == 2 else 0.3)
            tensor.copy_(torch.from_numpy(values))
    return router.eval()


def hidden_states(rng):
    return torch.from_numpy(rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32))


def by_expert(weights, ids, experts):
    """[tokens, experts], zero where a token does not go: the order of the chosen is not compared."""
    dense = torch.zeros(weights.shape[0], experts, dtype=torch.float32)
    return dense.scatter_(1, ids.long(), weights.float())


def compare(router, rng, top_k, experts, **keys):
    with torch.no_grad():
        logits, weights, expected_ids = router(hidden_states(rng))
        got_weights, ids = route(logits, top_k, **keys)
    assert (got_weights.shape, ids.dtype) == ((TOKENS, top_k), torch.int32)
    assert torch.equal(ids.long().sort(-1).values, expected_ids.sort(-1).values)
    torch.testing.assert_close(
        by_expert(got_weights, ids, experts), by_expert(weights, expected_ids, experts), rtol=2e-6, atol=1e-9
    )


def model(name):
    """The module of a model and its configuration's; skips where this version of Transformers has none."""
    return (
        pytest.importorskip(f"transformers.models.{name}.modeling_{name}"),
        pytest.importorskip(f"transformers.models.{name}.configuration_{name}"),
    )


def router_of(module, name):
    if not hasattr(module, name):
        pytest.skip(f"this version of Transformers has no {name}")
    return getattr(module, name)


def test_mixtral(rng):
    module, config = model("mixtral")
    router = router_of(module, "MixtralTopKRouter")(
        config.MixtralConfig(hidden_size=HIDDEN, num_local_experts=8, num_experts_per_tok=2)
    )
    compare(filled(router, rng), rng, 2, 8, scoring="softmax", renormalize=True)


@pytest.mark.parametrize("renormalize", [False, True])
def test_qwen3_moe(rng, renormalize):
    module, config = model("qwen3_moe")
    settings = {"hidden_size": HIDDEN, "num_experts": 128, "num_experts_per_tok": 8}
    router = router_of(module, "Qwen3MoeTopKRouter")(
        config.Qwen3MoeConfig(**settings, norm_topk_prob=renormalize)
    )
    compare(filled(router, rng), rng, 8, 128, scoring="softmax", renormalize=renormalize)


@pytest.mark.parametrize(
    "name, words", [("deepseek_v3", "DeepseekV3"), ("glm4_moe", "Glm4Moe"), ("nemotron_h", "NemotronH")]
)
def test_deepseek_v3_and_its_kin(rng, name, words):
    module, config = model(name)
    kind = "TopkRouter"
    settings = {"hidden_size": HIDDEN, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 8}
    settings |= {"topk_group": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    router = router_of(module, words + kind)(getattr(config, words + "Config")(**settings))
    compare(
        router := filled(router, rng),
        rng,
        6,
        64,
        scoring="sigmoid",
        renormalize=True,
        num_groups=8,
        topk_groups=3,
        correction_bias=router.e_score_correction_bias,
        routed_scaling_factor=2.5,
    )


def test_deepseek_v2(rng):
    module, config = model("deepseek_v2")
    settings = {"hidden_size": HIDDEN, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 8}
    settings |= {"topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
    router = router_of(module, "DeepseekV2TopkRouter")(config.DeepseekV2Config(**settings))
    keys = {"num_groups": 8, "topk_groups": 3, "routed_scaling_factor": 16.0}
    compare(filled(router, rng), rng, 6, 64, scoring="softmax", **keys)


def test_deepseek_v4(rng):
    module, config = model("deepseek_v4")
    router = router_of(module, "DeepseekV4TopKRouter")(
        config.DeepseekV4Config(
            hidden_size=HIDDEN,
            n_routed_experts=64,
            num_experts_per_tok=6,
            scoring_func="sqrtsoftplus",
            routed_scaling_factor=1.5,
        )
    )
    compare(
        router := filled(router, rng),
        rng,
        6,
        64,
        scoring="sqrtsoftplus",
        renormalize=True,
        correction_bias=router.e_score_correction_bias,
        routed_scaling_factor=1.5,
    )


def test_gpt_oss(rng):
    module, config = model("gpt_oss")
    router = router_of(module, "GptOssTopKRouter")(
        config.GptOssConfig(hidden_size=HIDDEN, num_local_experts=32, num_experts_per_tok=4)
    )
    compare(filled(router, rng), rng, 4, 32, scoring="topk_softmax")


def test_llama4(rng):
    module, config = model("llama4")
    router = filled(
        router_of(module, "Llama4Router")(
            config.Llama4TextConfig(hidden_size=HIDDEN, num_local_experts=16, num_experts_per_tok=1)
        ),
        rng,
    )
    with torch.no_grad():
        scores, logits = router(hidden_states(rng))
        weights, ids = route(logits, 1, scoring="sigmoid")
    torch.testing.assert_close(by_expert(weights, ids, 16), scores, rtol=2e-6, atol=0)

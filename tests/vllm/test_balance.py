"""Balancing of experts: vLLM exchanges rows of what `get_expert_weights` gives, and the experts go along."""

import pytest

from tests.vllm.conftest import results

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

CHECKPOINTS = [("qwen3moe_fp8", "FP8"), ("qwen3moe_nvfp4", "NVFP4")]
CLOSE = 1e-5
"""Share of the largest output: sums of float32 in another order."""


@pytest.mark.parametrize("name, algo", CHECKPOINTS)
def test_experts_change_places_with_all_that_is_theirs(rng, name, algo):
    import torch
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from tests.vllm.balanced import EXPERTS, make_layer, random_inputs

    layer, method = make_layer(name, algo, range(EXPERTS))
    x, weights, ids = random_inputs(rng)
    before = method.apply(layer, x, weights, ids)
    places = torch.tensor([2, 0, 3, 1])  # which expert stands in each place
    moved = RoutedExperts.get_expert_weights(layer)
    for rows in moved:
        rows.copy_(rows[places])
    assert torch.equal(method.apply(layer, x, weights, places.argsort()[ids.long()].int()), before)
    assert not torch.equal(method.apply(layer, x, weights, ids), before)


@pytest.mark.parametrize("name, algo", CHECKPOINTS)
def test_experts_go_to_the_other_rank(rng, two_ranks, name, algo):
    """Two processes, vLLM's own exchange, experts with more than one place."""
    seed = int(rng.integers(1 << 31))
    for found in results(two_ranks("balanced.py", name, algo, seed), 1):
        before, after, with_places_of_before = found[0]
        assert before <= CLOSE, (seed, found)
        assert after <= CLOSE, (seed, found)
        assert with_places_of_before > 100 * CLOSE, (seed, found)

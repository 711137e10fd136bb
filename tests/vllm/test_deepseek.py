"""DeepSeek-V3: attention over a latent cache, shared experts, routing by groups with a bias."""

import numpy as np
import pytest

from tests.vllm_cases import write_deepseek

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

ALGOS = ("FP8", "NVFP4")
ROUNDINGS = 8 * 2.0**-24
"""Rounding of float32, of a product with scales and back."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("deepseek")
    rng = np.random.default_rng(3)  # one model, whose tokens do not hang on a last bit
    return {algo: write_deepseek(place / algo, algo, rng) for algo in ALGOS}


@pytest.fixture(scope="module")
def served(engine, made):
    """Tokens and methods by format, and of NVFP4's weights in float32."""
    import moqext

    plain = made["NVFP4"].parent / "plain"
    with moqext.Checkpoint(made["NVFP4"]) as checkpoint:
        checkpoint.convert(plain, to="fp32")
    names = (*ALGOS, "plain")
    return dict(zip(names, engine("tokens", *made.values(), plain), strict=True))


def test_tokens_are_those_of_the_dequantized_model(served):
    assert served["plain"][1] == {}
    assert served["NVFP4"][0] == served["plain"][0]


@pytest.mark.parametrize("algo", ALGOS)
def test_all_layers_are_of_moqext(served, algo):
    methods = served[algo][1]
    assert methods["MoqextModelOptMoEMethod"] == 1
    assert methods["MoqextModelOptLinearMethod"] == 12
    assert len({tuple(tokens) for tokens in served[algo][0]}) == 3


def test_the_weights_that_attention_asks_for_are_not_rounded(engine, made):
    """Through kv_b_proj's static scale of FP8 the ones of an identity matrix would be other numbers."""
    found = engine("weights", made["FP8"])[0]
    for layer in range(2):
        errors = found[f"model.layers.{layer}.self_attn.kv_b_proj"]
        assert errors["stored"] == 0
        assert errors["product"] <= ROUNDINGS

"""vLLM's own norms and activations run by moqext: which, when, and with which numbers."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

CHECKPOINTS = Path(__file__).resolve().parent.parent / "data" / "checkpoints"
NAME = "llama_nvfp4_kvfp8"
NEITHER = {"rms_norm": 0, "silu_and_mul": 0}
STEPS = 16  # of decoding, the first of them the prompts' own
BOTH = {"rms_norm": 3 * STEPS, "silu_and_mul": STEPS}  # one layer, and the norm behind the last
NEAR = 2 * 2.0**-4  # two logits of bfloat16, from 8 to 16, that are each a last place off
MADE = {"MoqextRMSNorm": 3, "MoqextSiluAndMul": 1}


def on_device():
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def served(engine):
    """Answers of the task "ops", by how the engine runs and by the switch, and of "values"."""
    cases = [("ops", how, switch) for how in ("eager", "compiled") for switch in ("0", "1")]
    cases.append(("values", json.dumps({"dtype": "bfloat16"}), "1"))

    def run(case):
        task, argument, switch = case
        return engine(task, CHECKPOINTS / NAME, argument, MOQEXT_VLLM_OPS=switch)[0]

    with ThreadPoolExecutor(len(cases) if on_device() else 1) as pool:
        found = dict(zip(cases, pool.map(run, cases), strict=True))
    return {case[1:] if case[0] == "ops" else "values": each for case, each in found.items()}


def first_difference(tokens, own):
    """Compares two runs of a prompt at the step at which their tokens part; None if they never do."""
    for one, other in zip(tokens, own, strict=True):
        if one[0] != other[0]:
            return one, other
    return None


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_tokens_are_those_of_vllms_own_kernels(served, how):
    tokens, layers, calls, _ = served[how, "1"]
    assert layers == MADE
    assert all(calls.values()) if on_device() else calls == BOTH
    own, layers, calls, _ = served[how, "0"]
    assert layers == {}
    assert calls == NEITHER
    parted = [first_difference(*pair) for pair in zip(tokens, own, strict=True)]
    if not on_device():  # float32
        assert parted == [None] * len(tokens)
    for one, other in filter(None, parted):  # bfloat16: only between two that are near each other
        assert sorted(one[::2]) == sorted(other[::2])
        assert max(one[1] - one[3], other[1] - other[3]) <= NEAR


def test_graphs_compiled_with_and_without_are_kept_apart(served):
    keys = {switch: served["compiled", switch][3] for switch in ("0", "1")}
    assert keys["0"] != keys["1"]


def test_values_are_near_vllms_own(served):
    """An inner rounding may fall the other way; times a weight or the other half that is two last places."""
    apart = served["values"]
    assert len(apart) == sum(MADE.values())
    assert {name: places for name, places in apart.items() if max(places) > 2} == {}


# ------------------------------------------------------------------------------------- layers by themselves


@pytest.fixture
def config(monkeypatch):
    """A model's configuration inside of which layers are made, with moqext's among them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import custom_op

    from moqext_vllm import activations
    from moqext_vllm.config import CONFIGS

    monkeypatch.setattr(custom_op, "op_registry_oot", registry := {})
    monkeypatch.setattr(activations, "op_registry_oot", registry)
    monkeypatch.setenv("MOQEXT_VLLM_OPS", "1")
    activations.register_layers()
    assert sorted(registry) == ["RMSNorm", "SiluAndMul"]
    found = VllmConfig()
    found.model_config = SimpleNamespace(get_hidden_size=lambda: 64)
    found.quant_config = CONFIGS[1].from_config(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
    )
    with set_current_vllm_config(found, check_compile=False):
        yield found


def make_layers():
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    return RMSNorm(64), SiluAndMul()


def run_by_moqext(*layers):
    """Whether each is; else it is of vLLM's very type, which vLLM looks up producers of codes by."""
    found = [layer._forward_method.__name__ == "moqext_forward" for layer in layers]
    for layer, by_moqext in zip(layers, found, strict=True):
        assert (type(layer).__module__ == "moqext_vllm.activations") == by_moqext
        assert hasattr(layer, "vllm_forward") == by_moqext
    return found


def test_layers_keep_the_names_that_users_know(config):
    norm, activation = make_layers()
    assert (norm.name, activation.name) == ("rms_norm", "silu_and_mul")
    assert run_by_moqext(norm, activation) == [True, True]


def test_registering_again_changes_nothing(config):
    from moqext_vllm import activations

    before = dict(activations.op_registry_oot)
    activations.register_layers()
    assert activations.op_registry_oot == before


def test_another_plug_in_keeps_its_place(config, monkeypatch):
    from vllm.model_executor.layers.layernorm import RMSNorm

    from moqext_vllm import activations

    class Other(RMSNorm):
        pass

    monkeypatch.setitem(activations.op_registry_oot, "RMSNorm", Other)
    activations.register_layers()
    norm, activation = make_layers()
    assert type(norm) is Other
    assert run_by_moqext(activation) == [True]


def test_what_a_user_turns_off_stays_vllms(config):
    config.compilation_config.custom_ops.append("-rms_norm")
    assert run_by_moqext(*make_layers()) == [False, True]


def test_models_without_linears_of_moqext_are_left_alone(config):
    config.quant_config = None
    assert run_by_moqext(*make_layers()) == [False, False]


def test_sums_of_ranks_that_vllm_joins_with_norms(config, said):
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    assert run_by_moqext(*make_layers()) == [False, True]
    assert run_by_moqext(*make_layers()) == [False, True]
    (line,) = said()
    assert "fuse_allreduce_rms" in line


def test_a_pass_of_the_users_own_stays(config, said):
    from vllm.platforms import current_platform

    from moqext_vllm.compiled import NormsAndLinears, install_pass

    passes = config.compilation_config.inductor_compile_config
    for _ in range(2):
        install_pass()
    assert isinstance(passes[current_platform.pass_key], NormsAndLinears)
    assert not said()
    passes[current_platform.pass_key] = print
    for _ in range(2):
        install_pass()
    assert passes[current_platform.pass_key] is print
    (line,) = said()
    assert line.endswith(f"the engine has a {current_platform.pass_key} of its own")


def test_an_attention_that_is_not_known_keeps_its_forward(monkeypatch, said):
    from moqext_vllm import attention

    class Attention:
        def forward(self, positions, hidden_states):
            return hidden_states

    monkeypatch.setitem(sys.modules, f"{attention.MODELS}.novel", SimpleNamespace(Attention=Attention))
    monkeypatch.setattr(attention, "CLASSES", (("novel", "Attention"), ("absent", "Attention")))
    before = dict(vars(Attention))
    for _ in range(2):
        attention.take_over()
    assert dict(vars(Attention)) == before
    assert said() == [f"{attention.HEADS} are not fused: the forward of Attention is none that moqext knows"]


def test_the_attentions_of_this_vllm_are_known():
    """Their sources are those of 0.32 and 0.33; of another version the log says that heads are not fused."""
    from importlib import import_module

    from moqext_torch.texts import digest
    from moqext_vllm import attention

    for module, name in attention.CLASSES:
        forward = getattr(import_module(f"{attention.MODELS}.{module}"), name).forward
        own = {attention.forward, attention.forward_with_norms}
        assert forward in own or digest(forward) in (attention.WITHOUT_NORMS, attention.WITH_NORMS)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"is_neox_style": False}, "interleaved"),
        ({"rotary_dim": 32}, "a part of a head"),
        ({"head_size": 96, "rotary_dim": 96}, "heads of 96 values"),
        ({"use_flashinfer": True}, "another library"),
    ],
)
def test_rotary_embeddings_that_moqext_does_not_have(config, changed, why):
    import torch
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from moqext_vllm.attention import _find_unusual

    rotary = RotaryEmbedding(64, 64, 128, 10000.0, True, torch.bfloat16)
    vars(rotary).update({"use_flashinfer": False} | changed)
    assert why in _find_unusual(rotary, None, None)
    assert bool(_find_unusual(rotary, None, None)) == bool(why)
    assert _find_unusual(rotary, None, torch.nn.LayerNorm(64)) == (
        _find_unusual(rotary, None, None) or "norms of heads are no usual ones"
    )
    assert "is a Identity" in _find_unusual(torch.nn.Identity(), None, None)


def test_codes_come_from_moqexts_activation_too(config, rng, monkeypatch):
    """vLLM looks for the producer by the type of the activation."""
    quantized_input = pytest.importorskip("moqext_vllm.quantized_input")
    if quantized_input.PRODUCERS is None:
        pytest.skip("this vLLM has no producers of codes")
    import torch
    from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant

    from moqext_torch.activations import silu_and_mul_quantize

    known = dict(quantized_input.PRODUCERS)
    linear = torch.nn.Module()
    linear.moqext_input_scale = torch.tensor([0.25])
    x = torch.from_numpy(rng.standard_normal((64, 64))).to(torch.bfloat16)  # more than few tokens
    _, activation = make_layers()
    try:
        monkeypatch.setenv("MOQEXT_VLLM_OPS", "0")
        quantized_input.offer(linear)
        assert maybe_fused_act_quant(activation, x, linear).dtype == torch.bfloat16
        monkeypatch.setenv("MOQEXT_VLLM_OPS", "1")
        quantized_input.offer(linear)
        found = maybe_fused_act_quant(activation, x, linear)
        assert found.data.equal(silu_and_mul_quantize(x, linear.moqext_input_scale))
    finally:
        quantized_input.PRODUCERS.clear()
        quantized_input.PRODUCERS.update(known)


@pytest.fixture
def norm_and_linear(config, rng, monkeypatch):
    """A norm, a function that has a linear of moqext in FP8 read its values, and what was read."""
    import torch

    from moqext_vllm import quantized_input

    monkeypatch.setattr(quantized_input, "FEW_TOKENS", 2)
    norm, _ = make_layers()
    norm.to(torch.bfloat16)
    norm.weight.data.copy_(torch.from_numpy(rng.standard_normal(64)))
    linear = torch.nn.Module()
    linear.moqext_code_scale = torch.tensor([0.03])

    def read(x, layer=linear, takes_codes=True):
        found, dtype = quantized_input.read(x, layer, takes_codes)
        assert (dtype is None) == (found is x)
        return found

    return norm, linear, read


def rows(rng, count):
    import torch

    return torch.from_numpy(rng.standard_normal((count, 64))).to(torch.bfloat16)


def test_a_norm_writes_codes_for_the_linear_that_read_its_values(norm_and_linear, rng):
    import torch

    from moqext import ops

    norm, linear, read = norm_and_linear
    x, residual = rows(rng, 3), rows(rng, 3)
    expected = norm(x, residual)
    assert read(expected[0]) is expected[0]  # nobody had told the norm
    for other in (None, residual):
        v = norm(x, other)
        if other is not None:
            v, z = v
            assert v.equal(expected[0])
            assert z.equal(expected[1])
        codes = ops.quantize(v, "fp8_tensor", scale=linear.moqext_code_scale)[0]
        assert read(v).view(torch.uint8).equal(codes.view(torch.uint8))
        assert read(v, torch.nn.Module()) is v  # another linear, which has another scale
        assert read(v, takes_codes=False) is v
        assert read(v[:2]).equal(v[:2])
    assert read(few := norm(rows(rng, 2))) is few


def test_a_linear_that_is_gone_gets_no_codes(norm_and_linear, rng):
    import torch

    norm, _, read = norm_and_linear
    gone = torch.nn.Module()
    read(norm(rows(rng, 3)), gone)
    del gone
    assert read(v := norm(rows(rng, 3))) is v


def test_values_that_a_model_changes_in_place_are_read_as_they_are(norm_and_linear, rng, said):
    norm, _, read = norm_and_linear
    read(norm(rows(rng, 3)))
    for _ in range(2):
        assert read(v := norm(rows(rng, 3)).mul_(2)) is v
    assert read(v := norm(rows(rng, 3))) is v  # no codes any more
    (line,) = said()
    assert line.startswith("norms and FP8 linears are not fused")


@pytest.mark.parametrize(
    "name, value", [("MOQEXT_VLLM_OPS", "0"), ("VLLM_BATCH_INVARIANT", "1"), ("MOQEXT_VLLM_OPS", "")]
)
def test_variables_that_leave_layers_to_vllm(config, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    expected = on_device() and value == ""
    assert run_by_moqext(*make_layers()) == [expected, expected]


def test_an_unknown_value_of_the_switch_is_refused(config, monkeypatch):
    monkeypatch.setenv("MOQEXT_VLLM_OPS", "yes")
    with pytest.raises(ValueError, match="MOQEXT_VLLM_OPS: expected 0 or 1, got 'yes'"):
        make_layers()


def test_norms_of_another_kind_are_vllms(config, said):
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    made = [RMSNorm(64, var_hidden_size=32), RMSNorm(64, has_weight=False)]
    assert run_by_moqext(*made) == [False, False]
    assert len(said()) == 1
    assert type(GemmaRMSNorm(64)) is GemmaRMSNorm


def test_calls_that_moqext_does_not_have_are_vllms(config, rng, monkeypatch):
    import torch

    def normal(*shape, dtype=torch.bfloat16):
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    norm, activation = make_layers()
    heads = type(norm)(32)
    for layer in (norm, heads):
        layer.to(torch.bfloat16)
    fitting = [
        (norm, (normal(3, 64),)),
        (norm, (normal(3, 64), normal(3, 64))),
        (norm, (normal(2, 3, 64),)),
        (heads, (normal(3, 32),)),
        (activation, (normal(3, 64),)),
    ]
    others = [
        (norm, (normal(3, 64, dtype=torch.float32),)),
        (norm, (normal(3, 64), normal(3, 64, dtype=torch.float32))),
        (heads, (normal(3, 4, 32),)),
        (activation, (normal(3, 64, dtype=torch.float64),)),
    ]
    calls = []
    for layer in (norm, heads, activation):
        layer.vllm_forward = lambda *args: calls.append(args)
    for layer, args in fitting + others:
        before = len(calls)
        layer(*args)
        assert len(calls) - before == any(args is other for _, other in others)

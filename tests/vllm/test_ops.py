"""vLLM's own norms and activations run by moqext: which, when, and with which numbers."""

import json
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
MADE = {"MoqextRMSNorm": 3, "MoqextSiluAndMul": 1}


def on_device():
    import torch

    return torch.cuda.is_available()


def settings(**more):
    """Options of the engine: on a GPU the dtype that its attention has, and a share of the memory."""
    device = {"dtype": "bfloat16", "gpu_memory_utilization": 0.04, "kv_cache_memory_bytes": 1 << 28}
    return json.dumps((device if on_device() else {}) | more)


@pytest.fixture(scope="module")
def served(engine):
    """What the task "ops" says, by how the engine runs and by the switch."""

    def run(case):
        how, switch = case
        return engine("ops", CHECKPOINTS / NAME, how, settings(), MOQEXT_VLLM_OPS=switch)[0]

    cases = [(how, switch) for how in ("eager", "compiled") for switch in ("0", "1")]
    with ThreadPoolExecutor(len(cases) if on_device() else 1) as pool:
        return dict(zip(cases, pool.map(run, cases), strict=True))


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_tokens_are_those_of_vllms_own_kernels(served, how):
    tokens, layers, calls, _ = served[how, "1"]
    assert layers == {name: [count, count] for name, count in MADE.items()}
    # Where graphs of the device are replayed, functions are called while they are captured alone.
    assert all(calls.values()) if on_device() else calls == BOTH
    own, layers, calls, _ = served[how, "0"]
    assert layers == {name: [count, 0] for name, count in MADE.items()}
    assert calls == NEITHER
    assert tokens == own


def test_graphs_compiled_with_and_without_are_kept_apart(served):
    keys = {switch: served["compiled", switch][3] for switch in ("0", "1")}
    assert keys["0"] != keys["1"]


def test_values_are_near_vllms_own(engine):
    """An inner rounding may fall the other way; times a weight or the other half that is two last places."""
    apart = engine("values", CHECKPOINTS / NAME, settings(dtype="bfloat16"), MOQEXT_VLLM_OPS="1")[0]
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
    return [layer._forward_method.__name__ == "moqext_forward" for layer in layers]


def test_layers_keep_the_names_that_users_know(config):
    norm, activation = make_layers()
    assert (norm.name, activation.name) == ("rms_norm", "silu_and_mul")
    assert run_by_moqext(norm, activation) == [True, True]
    assert config.additional_config["moqext"] == {"rms_norm": True, "silu_and_mul": True}


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
    assert "moqext" not in config.additional_config


def test_sums_of_ranks_that_vllm_joins_with_norms(config):
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    assert run_by_moqext(*make_layers()) == [False, True]


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


def test_norms_of_another_kind_are_vllms(config):
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    made = [RMSNorm(64, var_hidden_size=32), RMSNorm(64, has_weight=False)]
    assert run_by_moqext(*made) == [False, False]
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

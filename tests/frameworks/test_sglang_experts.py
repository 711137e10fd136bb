"""Experts of SGLang over moqext: created, loaded tensor by tensor, prepared, called and loaded again."""

from dataclasses import replace

import numpy as np
import pytest

from .sglang_stand_ins import stand_in

stand_in()

from sglang.srt.layers.moe.token_dispatcher import standard  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402

from moqext import CheckpointError, MoEMethod, UnsupportedQuantization  # noqa: E402
from moqext.ops import pack_nvfp4, unpack_nvfp4  # noqa: E402
from moqext_sglang import experts, register  # noqa: E402
from moqext_sglang.experts import MoqextFusedMoEMethod  # noqa: E402
from moqext_torch.moe_op import find_moe_method  # noqa: E402

from .. import moe_cases  # noqa: E402
from . import sglang_cases as cases  # noqa: E402
from .sglang_cases import config_for, experts_of, load_experts, one_of_two, torch  # noqa: E402
from .torch_moe_cases import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, moe_case, random_call, stacks_of  # noqa: E402

pytestmark = pytest.mark.sglang
INTEGERS = ("W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "W8A16")
ALGOS = (*moe_cases.ALGOS, *INTEGERS)


def case_of(rng, algo):
    """Random experts; groups of int4 are of 16 columns, which half of the rows are a multiple of."""
    return moe_case(rng, algo, **({"group_size": 16} if algo.endswith("_AWQ") else {}))


@pytest.fixture(autouse=True)
def _rank(device):
    register()
    with cases.engine(device), torch.inference_mode(), cases.bfloat16_by_default():
        yield


def config_of(case):
    group_size = case.options.get("group_size")
    return config_for(case.algo, **({} if group_size is None else {"group_size": group_size}))


def ready(case, **options):
    layer = experts_of(case, config_of(case), **options)
    load_experts(layer, case)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.fixture
def routed(rng, device):
    """`routed()`: activations of some tokens, and the experts of each, on the device of the test."""

    def made():
        x, weights, ids = (tensor.to(device) for tensor in random_call(rng, 7))
        return x, StandardTopKOutput(weights, ids, torch.zeros(7, EXPERTS))

    return made


def direct(case, x, chosen):
    """Computes these experts by MoEMethod alone."""
    method = case.method(device=x.device)
    params = method.prepare({role: tensor.to(x.device) for role, tensor in stacks_of(case).items()})
    return method(x, params, chosen.topk_weights, chosen.topk_ids)


@pytest.mark.parametrize("algo", ALGOS)
def test_equals_moe_method(rng, algo, routed):
    case = case_of(rng, algo)
    layer = ready(case)
    assert type(layer.quant_method) is MoqextFusedMoEMethod
    assert getattr(layer, "runner_backend", None) is None  # 0.5.17 has no such attribute
    x, chosen = routed()
    before = x.clone()
    assert torch.equal(layer(x, chosen), direct(case, x, chosen))
    assert torch.equal(x, before)


@pytest.mark.parametrize("algo", ["FP8", "NVFP4", "W8A16"])
def test_experts_without_a_gate(rng, algo, routed):
    case = moe_case(rng, algo, gated=False, activation="relu2")
    layer = ready(case)
    x, chosen = routed()
    assert torch.equal(layer(x, chosen), direct(case, x, chosen))


def test_the_factor_of_all_weights(rng, routed):
    case = moe_case(rng, "NVFP4")
    layer = ready(case, routed_scaling_factor=2.5)
    assert not layer.should_fuse_routed_scaling_factor_in_topk
    x, chosen = routed()
    scaled = chosen._replace(topk_weights=chosen.topk_weights * 2.5)
    assert torch.equal(layer(x, chosen), direct(case, x, scaled))


def test_padding_counts_nothing(rng, routed):
    case = moe_case(rng, "FP8")
    layer = ready(case)
    x, chosen = routed()
    ids = chosen.topk_ids.clone()
    ids[2] = -1
    y = layer(x, chosen._replace(topk_ids=ids))
    assert not y[2].any()
    assert torch.equal(y[3], layer(x, chosen)[3])


@pytest.mark.parametrize("algo", ["FP8", "NVFP4", "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL"])
def test_experts_of_one_rank(rng, algo, monkeypatch, device, routed):
    """Two ranks have half of the experts each; what they give sums to the whole."""
    if device == "cpu":  # SGLang asks for its own where experts are on several ranks
        monkeypatch.setattr(standard, "get_device", lambda: "cpu")
    case = case_of(rng, algo)
    x, chosen = routed()
    total = torch.zeros(x.shape, dtype=torch.float32)
    for rank in (0, 1):
        with one_of_two(rank, "experts"):
            layer = ready(case)
            assert layer.w13_weight.shape[0] == EXPERTS // 2
            total += layer(x, chosen).float()
    expected = direct(case, x, chosen).float()
    assert (total - expected).abs().max() <= 1e-2 * expected.abs().max()


def rows_of_a_rank(case, rank):
    """Takes the share of one of two ranks: half of the rows of gate and up, and columns of down."""
    found = {}
    for role, stack in stacks_of(case).items():
        kind, stack = stack.dtype, stack.view(torch.uint8) if stack.itemsize == 1 else stack
        factors = role.endswith("pre_quant_scale")
        if role.startswith("w13") and not factors and stack.shape[1] > 2:
            stack = torch.cat([part.chunk(2, dim=1)[rank] for part in stack.chunk(2, dim=1)], dim=1)
        elif role.startswith("w2") and (factors or stack.dim() == 3):
            stack = stack.chunk(2, dim=-1)[rank]
        found[role] = stack.contiguous().view(kind)
    return found


@pytest.mark.parametrize("algo", ["FP8", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4_AWQ", *INTEGERS])
def test_rows_of_one_rank(rng, algo, device, routed):
    """Two ranks have half of the rows of gate and up each, under the scales of the whole."""
    case = case_of(rng, algo)
    x, chosen = routed()
    method = MoEMethod(algo, EXPERTS, HIDDEN, INTERMEDIATE // 2, top_k=TOP_K, device=device, **case.options)
    for rank in (0, 1):
        with one_of_two(rank):
            layer = ready(case)
        stacks = rows_of_a_rank(case, rank)
        expected = method.prepare({role: stack.to(device) for role, stack in stacks.items()})
        assert layer.quant_method.prepared.keys() == expected.keys()
        for role, tensor in expected.items():
            found = layer.quant_method.prepared[role]
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), role
        y = layer.quant_method.apply(layer, standard.StandardDispatchOutput(x, None, chosen)).hidden_states
        assert torch.equal(y, method(x, expected, chosen.topk_weights, chosen.topk_ids))


def test_ranks_that_would_share_a_scale_are_refused(rng):
    case = moe_case(rng, "FP8_PB_WO")
    with (
        one_of_two(0),
        pytest.raises(
            UnsupportedQuantization, match=r"mlp\.experts: FP8_PB_WO: 48 of 96 rows .* multiple of the 128"
        ),
    ):
        experts_of(case, config_for("FP8_PB_WO"))
    case = moe_case(rng, "W4A16_AWQ", group_size=32)
    with (
        one_of_two(0),
        pytest.raises(
            UnsupportedQuantization, match=r"experts: W4A16_AWQ: 48 of 96 rows .* multiple of the 32 that"
        ),
    ):
        experts_of(case, config_of(case))


def test_factors_of_another_size_are_refused(rng):
    case = case_of(rng, "W4A16_AWQ")
    layer = experts_of(case, config_of(case))
    load = layer.w2_pre_quant_scale.weight_loader
    with pytest.raises(
        CheckpointError, match=r"w2_pre_quant_scale of expert 1: expected 96 factors, got shape \[48\]"
    ):
        load(layer.w2_pre_quant_scale, torch.ones(48), "w2_pre_quant_scale", shard_id="w2", expert_id=1)


@pytest.mark.parametrize(
    "algo, skip, told",
    [
        ("NVFP4", ("w13_weight", 2, "w3"), "w13_weight: expert 2, up was never loaded"),
        ("NVFP4", ("w13_weight_scale_2", 0, "w1"), "w13_weight_scale_2: expert 0, gate was never loaded"),
        ("NVFP4", ("w2_weight_scale", 3, "w2"), "w2_weight_scale: expert 3 was never loaded"),
        ("W4A16_AWQ", ("w13_weight", 2, "w3"), "w13_weight: expert 2, up was never loaded"),
        ("W4A16_AWQ", ("w2_pre_quant_scale", 1, "w2"), "w2_pre_quant_scale: expert 1 was never loaded"),
        ("W8A16", ("w13_weight_scale", 0, "w1"), "w13_weight_scale: expert 0, gate was never loaded"),
    ],
)
def test_a_slot_that_was_never_filled_is_named(rng, algo, skip, told):
    case = case_of(rng, algo)
    layer = experts_of(case, config_of(case), prefix="model.layers.7.mlp.experts")
    load_experts(layer, case, skip={skip})
    with pytest.raises(CheckpointError, match=rf"model\.layers\.7\.mlp\.experts: .*{told}"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_call_before_loading_is_refused(rng, routed):
    case = moe_case(rng, "FP8")
    layer = experts_of(case, config_for("FP8"))
    with pytest.raises(RuntimeError, match="before its weights were loaded"):
        layer(*routed())


def test_input_scales_of_gate_and_up_are_kept_apart(rng):
    """SGLang's loader has one place for both; the larger of all serves the layer, as in MoEMethod."""
    case = moe_case(rng, "FP8")
    layer = ready(case)
    stacks = stacks_of(case)
    assert torch.equal(layer.w13_input_scale.cpu(), stacks["w13_input_scale"])
    assert torch.equal(layer.w2_input_scale.cpu(), stacks["w2_input_scale"])


@pytest.mark.parametrize("algo", ALGOS)
def test_reload_in_place(rng, algo, routed):
    first, second = case_of(rng, algo), case_of(rng, algo)
    layer = ready(first)
    method = layer.quant_method
    before = {role: tensor.data_ptr() for role, tensor in method.prepared.items()}
    method.process_weights_after_loading(layer)  # nothing was loaded: nothing happens
    method.restore_weights_before_loading(layer)
    x, chosen = routed()
    assert torch.equal(layer(x, chosen), direct(first, x, chosen))
    load_experts(layer, second)
    method.process_weights_after_loading(layer)
    assert {role: tensor.data_ptr() for role, tensor in method.prepared.items()} == before
    assert torch.equal(layer(x, chosen), direct(second, x, chosen))


@pytest.mark.parametrize(
    "options, told",
    [
        ({"activation": "situ"}, "no experts with the activation situ"),
        ({"with_bias": True}, "do not run with experts with biases"),
        ({"gemm1_alpha": 1.7}, "do not run with gemm1_alpha"),
        ({"no_combine": True}, "results of experts that are not summed"),
        ({"use_weight_loader_fused": True}, "experts that one tensor of the checkpoint has together"),
    ],
)
def test_other_ways_are_refused_by_name(rng, options, told):
    activation = options.pop("activation", None)
    case = moe_case(rng, "NVFP4")
    if activation is not None:
        case.options["activation"] = activation
    with pytest.raises(UnsupportedQuantization, match=rf"model\.layers\.0\.mlp\.experts: .*{told}"):
        experts_of(case, config_for("NVFP4"), **options)


def test_experts_without_a_kernel_are_refused_by_name(rng, monkeypatch):
    def refuse(about, dtype, device):
        raise UnsupportedQuantization("no kernel for experts here")

    monkeypatch.setattr(experts, "find_moe_method", refuse)
    case = moe_case(rng, "NVFP4")
    with pytest.raises(UnsupportedQuantization, match=r"model\.layers\.0\.mlp\.experts: NVFP4: no kernel"):
        experts_of(case, config_for("NVFP4"))


def test_compiles_without_a_break(rng, routed):
    case = moe_case(rng, "FP8")
    layer = ready(case)
    x, chosen = routed()
    expected = layer(x, chosen)

    def call(x, weights, ids):
        from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput

        output = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, weights))
        return layer.quant_method.apply(layer, output).hidden_states

    with torch.inference_mode(False), torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        given = (t.clone() for t in (x, chosen.topk_weights, chosen.topk_ids))
        assert torch.equal(compiled(*given), expected)


class _Packed:
    """MoEMethod of NVFP4 as it is on CUDA: codes and block scales of a stack are one tensor, packed."""

    def __init__(self, method):
        self.method = method
        self.prepared_params = {
            role: spec for role, spec in method.prepared_params.items() if not role.endswith("weight_scale")
        }
        for role in ("w13_weight", "w2_weight"):
            count, rows, half = method.checkpoint_params[role].shape
            shape = (count, 4 * -(-rows // 64), -(-half // 32), 576)
            self.prepared_params[role] = method.prepared_params[role]._replace(shape=shape, dtype="uint8")

    def __getattr__(self, name):
        return getattr(self.method, name)

    def keeps(self, name):
        return False

    def prepare(self, params, out):
        plain = self.method.prepare(params)
        for role, tensor in out.items():
            if role.endswith("_weight"):
                pack_nvfp4(plain[role], plain[f"{role}_scale"], out=tensor)
            else:
                tensor.copy_(plain[role])
        return out

    def __call__(self, x, params, *call, **options):
        plain = dict(params)
        for role in ("w13_weight", "w2_weight"):
            count, rows, half = self.method.checkpoint_params[role].shape
            plain[role], scales = unpack_nvfp4(params[role], (count, rows, 2 * half))
            plain[f"{role}_scale"] = scales.view(torch.float8_e4m3fn)
        return self.method(x, plain, *call, **options)


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "unasked"])
def test_packed_codes_are_unpacked_for_a_reload(rng, monkeypatch, device, asked, routed):
    """Packed stacks keep their places; what is loaded again of the checkpoint is all, a part or nothing."""
    if device == "cpu":
        monkeypatch.setattr(experts, "find_moe_method", lambda *about: _Packed(find_moe_method(*about)))
    first, second = (moe_case(rng, "NVFP4") for _ in range(2))
    layer = ready(first)
    method = layer.quant_method
    before = {role: tensor.data_ptr() for role, tensor in method.prepared.items()}
    assert layer.w13_weight.shape == (EXPERTS, 4 * 2 * INTERMEDIATE // 64, HIDDEN // 64, 576)
    assert layer.w13_weight_scale.numel() == layer.w2_weight_scale.numel() == 0
    x, chosen = routed()
    assert torch.equal(layer(x, chosen), direct(first, x, chosen))
    skipped = {(role, 1, shard) for role in second.stacks for shard in ("w1", "w2", "w3")}
    mixed = replace(first, stacks={role: np.array(stack) for role, stack in second.stacks.items()})
    for role, stack in mixed.stacks.items():
        stack[1] = first.stacks[role][1]
    for given, skip, expected in ((None, (), first), (second, skipped, mixed), (second, (), second)):
        if asked:  # SGLang 0.5.17 does not
            method.restore_weights_before_loading(layer)
            assert layer.w2_weight.shape == (EXPERTS, HIDDEN, INTERMEDIATE // 2)
        if given is not None:
            load_experts(layer, given, skip)
        method.process_weights_after_loading(layer)
        assert {role: tensor.data_ptr() for role, tensor in method.prepared.items()} == before
        assert layer.w2_weight.data_ptr() == before["w2_weight"]
        assert layer.w2_weight_scale.numel() == 0
        assert torch.equal(layer(x, chosen), direct(expected, x, chosen))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_folded_stacks_are_not_loaded_again(rng, monkeypatch):
    monkeypatch.setenv("MOQEXT_SGLANG_COMPUTE", "fp8")
    layer = ready(moe_case(rng, "NVFP4"))
    with pytest.raises(UnsupportedQuantization, match=r"model\.layers\.0\.mlp\.experts: .* cannot be loaded"):
        layer.quant_method.restore_weights_before_loading(layer)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("algo", ALGOS)
def test_a_graph_of_a_layer(rng, algo, routed):
    """Nothing of a call waits for the device, or it could not be captured; other activations, experts and
    weights reach the graph."""
    first, second = case_of(rng, algo), case_of(rng, algo)
    layer = ready(first)
    x, chosen = routed()
    layer(x, chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x, chosen)

    def replayed():
        captured.fill_(float("nan"))
        graph.replay()
        return captured

    assert torch.equal(replayed(), direct(first, x, chosen))
    other_x, other = routed()
    x.copy_(other_x)
    chosen.topk_weights.copy_(other.topk_weights)
    chosen.topk_ids.copy_(other.topk_ids)
    assert torch.equal(replayed(), direct(first, x, chosen))
    layer.quant_method.restore_weights_before_loading(layer)
    load_experts(layer, second)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(replayed(), direct(second, x, chosen))

"""Experts of SGLang over moqext: created, loaded tensor by tensor, prepared, called and loaded again."""

import pytest

from .sglang_stand_ins import stand_in

stand_in()

from sglang.srt.layers.moe.token_dispatcher import standard  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402

from moqext import CheckpointError, UnsupportedQuantization  # noqa: E402
from moqext.ops import pack_nvfp4, unpack_nvfp4  # noqa: E402
from moqext_sglang import experts, register  # noqa: E402
from moqext_sglang.experts import MoqextFusedMoEMethod  # noqa: E402
from moqext_torch.moe_op import find_moe_method  # noqa: E402

from ..moe_cases import ALGOS  # noqa: E402
from . import sglang_cases as cases  # noqa: E402
from .sglang_cases import config_for, experts_of, load_experts, one_of_two, torch  # noqa: E402
from .torch_moe_cases import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, moe_case, stacks_of  # noqa: E402

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def _rank():
    register()
    with cases.engine(), torch.inference_mode():
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # as SGLang does while it makes a model
        yield
        torch.set_default_dtype(default)


def ready(case, **options):
    layer = experts_of(case, config_for(case.algo), **options)
    load_experts(layer, case)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def routed(rng, tokens=7):
    x = torch.from_numpy(rng.standard_normal((tokens, HIDDEN), dtype="float32")).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, TOP_K, dtype=torch.float32)
    return x, StandardTopKOutput(weights, ids, torch.zeros(tokens, EXPERTS))


def direct(case, x, chosen):
    """The same experts by MoEMethod alone."""
    method = case.method()
    params = method.prepare(stacks_of(case))
    return method(x, params, chosen.topk_weights, chosen.topk_ids)


@pytest.mark.parametrize("algo", ALGOS)
def test_equals_moe_method(rng, algo):
    case = moe_case(rng, algo)
    layer = ready(case)
    assert type(layer.quant_method) is MoqextFusedMoEMethod
    assert layer.runner_backend is None
    x, chosen = routed(rng)
    before = x.clone()
    assert torch.equal(layer(x, chosen), direct(case, x, chosen))
    assert torch.equal(x, before)


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_experts_without_a_gate(rng, algo):
    case = moe_case(rng, algo, gated=False, activation="relu2")
    layer = ready(case)
    x, chosen = routed(rng)
    assert torch.equal(layer(x, chosen), direct(case, x, chosen))


def test_the_factor_of_all_weights(rng):
    case = moe_case(rng, "NVFP4")
    layer = ready(case, routed_scaling_factor=2.5)
    assert not layer.should_fuse_routed_scaling_factor_in_topk
    x, chosen = routed(rng)
    scaled = chosen._replace(topk_weights=chosen.topk_weights * 2.5)
    assert torch.equal(layer(x, chosen), direct(case, x, scaled))


def test_padding_counts_nothing(rng):
    case = moe_case(rng, "FP8")
    layer = ready(case)
    x, chosen = routed(rng)
    ids = chosen.topk_ids.clone()
    ids[2] = -1
    y = layer(x, chosen._replace(topk_ids=ids))
    assert not y[2].any()
    assert torch.equal(y[3], layer(x, chosen)[3])


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_experts_of_one_rank(rng, algo, monkeypatch):
    """Each of two ranks has half of the experts; what they give sums to the whole."""
    monkeypatch.setattr(standard, "get_device", lambda: "cpu")  # asked for where experts are on several ranks
    case = moe_case(rng, algo)
    x, chosen = routed(rng)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for rank in (0, 1):
        with one_of_two(rank, "experts"):
            layer = ready(case)
            assert layer.w13_weight.shape[0] == EXPERTS // 2
            total += layer(x, chosen).float()
    expected = direct(case, x, chosen).float()
    assert (total - expected).abs().max() <= 1e-2 * expected.abs().max()


@pytest.mark.parametrize("algo", ["FP8", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_rows_of_one_rank(rng, algo):
    """Each of two ranks has half of the rows of gate and up, under the scales of the whole."""
    case = moe_case(rng, algo)
    stacks = stacks_of(case)
    for rank in (0, 1):
        with one_of_two(rank):
            layer = ready(case)
        half = INTERMEDIATE // 2
        for part in (0, 1):
            whole = stacks["w13_weight"][:, part * INTERMEDIATE + rank * half :][:, :half]
            mine = layer.w13_weight[:, part * half : part * half + half]
            assert torch.equal(mine.view(torch.uint8), whole.view(torch.uint8))
        whole = stacks["w2_weight"].chunk(2, dim=2)[rank]
        assert torch.equal(layer.w2_weight.view(torch.uint8), whole.view(torch.uint8))
        if algo != "FP8_PER_CHANNEL_PER_TOKEN":
            role = "weight_scale" if algo == "FP8" else "weight_scale_2"
            assert torch.equal(getattr(layer, f"w13_{role}"), stacks[f"w13_{role}"])


def test_ranks_that_would_share_a_scale_are_refused(rng):
    case = moe_case(rng, "FP8_PB_WO")
    with (
        one_of_two(0),
        pytest.raises(UnsupportedQuantization, match=r"mlp\.experts: 48 of 96 rows .* multiple of the 128"),
    ):
        experts_of(case, config_for("FP8_PB_WO"))


@pytest.mark.parametrize(
    "skip, told",
    [
        (("w13_weight", 2, "w3"), "w13_weight: expert 2, up was never loaded"),
        (("w13_weight_scale_2", 0, "w1"), "w13_weight_scale_2: expert 0, gate was never loaded"),
        (("w2_weight_scale", 3, "w2"), "w2_weight_scale: expert 3 was never loaded"),
    ],
)
def test_a_slot_that_was_never_filled_is_named(rng, skip, told):
    case = moe_case(rng, "NVFP4")
    layer = experts_of(case, config_for("NVFP4"), prefix="model.layers.7.mlp.experts")
    load_experts(layer, case, skip={skip})
    with pytest.raises(CheckpointError, match=rf"model\.layers\.7\.mlp\.experts: .*{told}"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_call_before_loading_is_refused(rng):
    case = moe_case(rng, "FP8")
    layer = experts_of(case, config_for("FP8"))
    with pytest.raises(RuntimeError, match="before its weights were loaded"):
        layer(*routed(rng))


def test_input_scales_of_gate_and_up_are_kept_apart(rng):
    """SGLang's loader has one place for both; the larger of all serves the layer, as in MoEMethod."""
    case = moe_case(rng, "FP8")
    layer = ready(case)
    stacks = stacks_of(case)
    assert torch.equal(layer.w13_input_scale, stacks["w13_input_scale"])
    assert torch.equal(layer.w2_input_scale, stacks["w2_input_scale"])


@pytest.mark.parametrize("algo", ALGOS)
def test_reload_in_place(rng, algo):
    first, second = moe_case(rng, algo), moe_case(rng, algo)
    layer = ready(first)
    method = layer.quant_method
    before = {role: tensor.data_ptr() for role, tensor in method.prepared.items()}
    method.process_weights_after_loading(layer)  # nothing was loaded: nothing happens
    method.restore_weights_before_loading(layer)
    x, chosen = routed(rng)
    assert torch.equal(layer(x, chosen), direct(first, x, chosen))
    load_experts(layer, second)
    method.process_weights_after_loading(layer)
    assert {role: tensor.data_ptr() for role, tensor in method.prepared.items()} == before
    assert torch.equal(layer(x, chosen), direct(second, x, chosen))


class _Packed:
    """MoEMethod of NVFP4 as it is on CUDA: codes and block scales are one prepared stack, packed."""

    STACKS = ("w13", "w2")

    def __init__(self, method):
        self.method = method
        self.shapes, specs = {}, method.prepared_params
        for stack in self.STACKS:
            experts, rows, half = specs[f"{stack}_weight"].shape
            self.shapes[stack] = (experts, rows, 2 * half)
            shape = (experts, 4 * -(-rows // 64), -(-2 * half // 64), 576)
            specs[f"{stack}_weight"] = specs[f"{stack}_weight"]._replace(shape=shape, dtype="uint8")
            del specs[f"{stack}_weight_scale"]
        self.prepared_params = specs

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

    def __call__(self, x, params, weights, ids, **options):
        plain = dict(params)
        for stack, shape in self.shapes.items():
            codes, scales = unpack_nvfp4(params[f"{stack}_weight"], shape, 16)
            plain |= {f"{stack}_weight": codes, f"{stack}_weight_scale": scales.view(torch.float8_e4m3fn)}
        return self.method(x, plain, weights, ids, **options)


def test_packed_stacks_are_unpacked_for_a_reload(rng, monkeypatch):
    """Packed ones keep their places, and no stack of the checkpoint stays beside them."""
    monkeypatch.setattr(experts, "find_moe_method", lambda *about: _Packed(find_moe_method(*about)))
    first, second = (moe_case(rng, "NVFP4") for _ in range(2))
    layer = ready(first)
    method, (x, chosen) = layer.quant_method, routed(rng)
    before = {role: tensor.data_ptr() for role, tensor in method.prepared.items()}
    for given, case in ((None, first), (None, first), (second, second)):
        for stack in _Packed.STACKS:
            assert getattr(layer, f"{stack}_weight").data_ptr() == before[f"{stack}_weight"]
            assert getattr(layer, f"{stack}_weight_scale").numel() == 0
        method.restore_weights_before_loading(layer)
        for role in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
            assert tuple(getattr(layer, role).shape) == method.method.checkpoint_params[role].shape
        if given is not None:
            load_experts(layer, given)
        method.process_weights_after_loading(layer)
        assert {role: tensor.data_ptr() for role, tensor in method.prepared.items()} == before
        assert torch.equal(layer(x, chosen), direct(case, x, chosen))


def test_folded_stacks_are_not_loaded_again(rng, monkeypatch):
    monkeypatch.setenv("MOQEXT_SGLANG_COMPUTE", "fp8")
    layer = ready(moe_case(rng, "NVFP4"))
    with pytest.raises(UnsupportedQuantization, match=r"model\.layers\.0\.mlp\.experts: .* cannot be loaded"):
        layer.quant_method.restore_weights_before_loading(layer)


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
        raise UnsupportedQuantization("no kernel for experts on cuda:0")

    monkeypatch.setattr(experts, "find_moe_method", refuse)
    case = moe_case(rng, "NVFP4")
    with pytest.raises(UnsupportedQuantization, match=r"model\.layers\.0\.mlp\.experts: no kernel"):
        experts_of(case, config_for("NVFP4"))


def test_compiles_without_a_break(rng):
    case = moe_case(rng, "FP8")
    layer = ready(case)
    x, chosen = routed(rng)
    expected = layer(x, chosen)

    def call(x, weights, ids):
        from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput

        output = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, weights))
        return layer.quant_method.apply(layer, output).hidden_states

    with torch.inference_mode(False), torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        given = (t.clone() for t in (x, chosen.topk_weights, chosen.topk_ids))
        assert torch.equal(compiled(*given), expected)

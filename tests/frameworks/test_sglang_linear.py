"""Linears of SGLang over moqext: created, loaded shard by shard, prepared, called and loaded again."""

import re
from dataclasses import replace

import numpy as np
import pytest

from .sglang_stand_ins import stand_in

stand_in()

from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead  # noqa: E402

from moqext import CheckpointError, UnsupportedQuantization  # noqa: E402
from moqext.ops import pack_nvfp4, unpack_nvfp4  # noqa: E402
from moqext_sglang import linear, register  # noqa: E402
from moqext_sglang.linear import MoqextLinearMethod  # noqa: E402
from moqext_sglang.prepared import STORED_AS  # noqa: E402
from moqext_torch.op import find_method  # noqa: E402

from ..linear_cases import random_case, with_pairs  # noqa: E402
from . import sglang_cases as cases  # noqa: E402
from . import torch_cases  # noqa: E402
from .sglang_cases import config_for, cut, linear_of, load_linear, one_of_two, torch  # noqa: E402
from .torch_cases import case_of, tensors_of  # noqa: E402

pytestmark = pytest.mark.sglang
INTEGERS = ("W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "W8A16")
OTHERS = (*INTEGERS, "NVFP4_SVD")
ALGOS = (*torch_cases.ALGOS, *OTHERS)
KINDS = {
    "replicated": (256,),
    "column": (256,),
    "row": (256,),
    "merged": (128, 128),
    "qkv": (256, 128, 128),
}


@pytest.fixture(autouse=True)
def _rank(device):
    register()
    with cases.engine(device), torch.inference_mode(), cases.bfloat16_by_default():
        yield


@pytest.fixture
def random_x(rng, device):
    """`random_x(case, *shape, **options)`: activations on the device of the test."""
    return lambda case, *shape, **options: torch_cases.random_x(rng, case, *shape, **options).to(device)


def alone(case, x):
    """Makes the layer by LinearMethod alone, and its prepared tensors."""
    method = case.method(dtype=x.dtype, device=x.device)
    return method, method.prepare({role: tensor.to(x.device) for role, tensor in tensors_of(case).items()})


def direct(case, x, bias=None):
    """Computes by LinearMethod alone."""
    method, params = alone(case, x)
    return method(x, params, bias)


def by_row(case):
    """The tensors of a case of one part that are cut with its rows."""
    shared = ("pre_quant_scale", "lora_a")
    return {role: array for role, array in case.parts[0].items() if array.ndim and role not in shared}


def ready(kind, case, **options):
    layer, names = linear_of(kind, case, config_for(case.algo), **options)
    load_linear(layer, case, names)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algo", ALGOS)
def test_equals_linear_method(rng, algo, kind, random_x):
    case = case_of(rng, algo, KINDS[kind], 256)
    layer, _ = ready(kind, case)
    assert type(layer.quant_method) is MoqextLinearMethod
    x = random_x(case, 5)
    y, bias = layer(x)
    assert bias is None
    assert torch.equal(y, direct(case, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bias_and_dtypes(rng, dtype, random_x):
    case = case_of(rng, "NVFP4", (64, 64))
    layer, _ = linear_of("merged", case, config_for("NVFP4"), dtype=dtype, bias=True)
    load_linear(layer, case, (0, 1))
    bias = torch.randn(128, dtype=dtype)
    for part in (0, 1):
        layer.bias.weight_loader(layer.bias, bias[64 * part : 64 * part + 64], part)
    layer.quant_method.process_weights_after_loading(layer)
    x = random_x(case, 3, dtype=dtype)
    assert torch.equal(layer(x)[0], direct(case, x, bias))


@pytest.mark.parametrize(
    "algo", ["FP8", "NVFP4", "FP8_PB_WO", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "NVFP4_SVD"]
)
@pytest.mark.parametrize("kind", ["merged", "qkv"])
def test_one_rank_of_two(rng, algo, kind, random_x):
    """Each part has the rows of its rank, under the scales of the whole."""
    rows = {"merged": (256, 256), "qkv": (512, 256, 256)}[kind]
    case = case_of(rng, algo, rows, 128)
    x = random_x(case, 4)
    for rank in (0, 1):
        with one_of_two(rank):
            layer, _ = ready(kind, case)
        assert layer.quant_method.method.out_partitions == tuple(n // 2 for n in rows)
        assert torch.equal(layer(x)[0], direct(cut(case, rank, 2, axis=0), x))


@pytest.mark.parametrize("algo", ["NVFP4", "FP8", "NVFP4_AWQ", *OTHERS])
def test_columns_of_one_rank(rng, algo, random_x):
    case = case_of(rng, algo, (64,), 256)
    for rank in (0, 1):
        with one_of_two(rank):
            layer, _ = ready("row", case)
        part = cut(case, rank, 2, axis=1)
        x = random_x(part, 4)
        method, expected = alone(part, x)
        found = layer.quant_method.prepared
        assert found.keys() == expected.keys()
        for role, tensor in expected.items():
            assert torch.equal(found[role].view(torch.uint8), tensor.view(torch.uint8)), role
        assert torch.equal(layer.quant_method.apply(layer, x), method(x, expected))


def test_ranks_that_would_share_a_scale_are_refused(rng):
    case = case_of(rng, "NVFP4", (64,), 48)
    with (
        one_of_two(0),
        pytest.raises(
            UnsupportedQuantization, match=r"mlp\.down_proj: NVFP4: 48 columns on 2 ranks are 24 each"
        ),
    ):
        linear_of("row", case, config_for("NVFP4"), prefix="model.layers.0.mlp.down_proj")
    case = case_of(rng, "FP8_PB_WO", (192, 192), 128)
    with (
        one_of_two(0),
        pytest.raises(UnsupportedQuantization, match=r"gate_up_proj: FP8_PB_WO: a part of 96 rows"),
    ):
        linear_of("merged", case, config_for("FP8_PB_WO"), prefix="model.layers.0.mlp.gate_up_proj")
    case = case_of(rng, "W4A16_AWQ", (64,), 384)
    with (
        one_of_two(0),
        pytest.raises(
            UnsupportedQuantization,
            match=r"down_proj: W4A16_AWQ: 384 columns on 2 ranks are 192 each, .* multiple of the 128",
        ),
    ):
        linear_of("row", case, config_for("W4A16_AWQ"), prefix="model.layers.0.mlp.down_proj")


def test_ranks_that_would_share_a_byte_are_refused(rng):
    """Two rows of int4 are one of bytes."""
    case = case_of(rng, "W4A16_AWQ", (64, 6), 128)
    with (
        one_of_two(0),
        pytest.raises(
            UnsupportedQuantization,
            match=r"gate_up_proj: W4A16_AWQ: out_partitions\[1\]: expected an even size .*, got 3",
        ),
    ):
        linear_of("merged", case, config_for("W4A16_AWQ"), prefix="model.layers.0.mlp.gate_up_proj")


def test_groups_of_another_size(rng, random_x):
    """The configuration says it; a group of int4 may have any."""
    case = random_case(rng, "W4A16_AWQ", 192, (64, 32), group_size=64)
    layer, names = linear_of("merged", case, config_for("W4A16_AWQ", group_size=64))
    load_linear(layer, case, names)
    layer.quant_method.process_weights_after_loading(layer)
    x = random_x(case, 3)
    assert torch.equal(layer(x)[0], direct(case, x))


@pytest.mark.parametrize("algo", ["NVFP4", *OTHERS])
@pytest.mark.parametrize("kind", ["merged", "qkv"])
def test_one_tensor_of_all_parts(rng, algo, kind, random_x):
    """Files have it so where the model's own layer is fused: parts share what belongs to no row."""
    rows = KINDS[kind]
    whole = case_of(rng, algo, (sum(rows),), 256)
    parts = [dict(whole.parts[0]) for _ in rows]
    for role, array in by_row(whole).items():
        ends = np.cumsum(rows)[:-1] * len(array) // sum(rows)
        for part, share in zip(parts, np.split(array, ends), strict=True):
            part[role] = share
    case = replace(whole, out_partitions=list(rows), parts=parts)
    layer, _ = linear_of(kind, case, config_for(algo))
    load_linear(layer, whole, (None,))
    layer.quant_method.process_weights_after_loading(layer)
    x, method = random_x(whole, 3), layer.quant_method.method
    params = method.prepare({role: tensor.to(x.device) for role, tensor in tensors_of(case).items()})
    assert torch.equal(layer(x)[0], method(x, params))


def test_parts_that_end_within_a_block(rng, random_x):
    """Each part begins with a block of its own, as its file has it."""
    case = case_of(rng, "FP8_PB_WO", (192, 64, 40), 130)
    layer, _ = ready("merged", case)
    x = random_x(case, 3)
    assert torch.equal(layer(x)[0], direct(case, x))


@pytest.mark.parametrize(
    "algo, role",
    [
        (algo, role)
        for algo in ("FP8", "NVFP4", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL")
        for role in ("weight", "weight_scale", "input_scale")
    ]
    + [("NVFP4_SVD", "lora_a"), ("NVFP4_SVD", "lora_b")],
)
def test_a_slot_that_was_never_filled_is_named(rng, algo, role):
    case = case_of(rng, algo, (64, 32, 32))
    layer, names = linear_of("qkv", case, config_for(algo), prefix="model.layers.3.self_attn.qkv_proj")
    load_linear(layer, case, names, skip={("k", role)})
    with pytest.raises(
        CheckpointError, match=rf"layers\.3\.self_attn\.qkv_proj: {role} of part 1 was never loaded"
    ):
        layer.quant_method.process_weights_after_loading(layer)


def test_nothing_loaded_is_refused_and_a_call_before_it_too(rng, random_x):
    case = case_of(rng, "FP8")
    layer, _ = linear_of("column", case, config_for("FP8"))
    with pytest.raises(RuntimeError, match="before its weights were loaded"):
        layer(random_x(case, 1))
    with pytest.raises(CheckpointError, match=r"mlp\.x: weight was never loaded"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_damaged_scale_names_the_layer(rng):
    case = case_of(rng, "FP8", (40,))
    layer, names = linear_of("column", case, config_for("FP8"))
    load_linear(layer, case, names)
    layer.weight_scale.weight_loader(layer.weight_scale, torch.tensor(float("nan")))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.x: .*weight_scale"):
        layer.quant_method.process_weights_after_loading(layer)


def test_an_absent_input_scale_stays_absent(rng, random_x):
    case = case_of(rng, "FP8", (40,))
    del case.parts[0]["input_scale"]
    layer, _ = ready("column", case)
    x = random_x(case, 3)
    assert "input_scale" not in layer.quant_method.prepared
    assert torch.equal(layer(x)[0], direct(case, x))


@pytest.mark.parametrize("algo", ALGOS)
def test_reload_in_place(rng, algo, random_x):
    """New weights go to the memory of the old ones, which graphs hold, whichever tensors come."""
    first, second = (case_of(rng, algo, KINDS["merged"], 256) for _ in range(2))
    layer, names = ready("merged", first)
    method = layer.quant_method
    before = {role: tensor.data_ptr() for role, tensor in method.prepared.items()}
    parameters = dict(layer.named_parameters())
    method.process_weights_after_loading(layer)  # nothing was loaded: nothing happens
    x = random_x(first, 4)
    assert torch.equal(layer(x)[0], direct(first, x))
    method.restore_weights_before_loading(layer)
    load_linear(layer, second, names)
    method.process_weights_after_loading(layer)
    assert {role: tensor.data_ptr() for role, tensor in method.prepared.items()} == before
    assert all(value is parameters[name] for name, value in layer.named_parameters())
    assert torch.equal(layer(x)[0], direct(second, x))


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_AWQ", "W8A16", "NVFP4_SVD"])
def test_a_head_pads_its_vocabulary(rng, algo, random_x):
    case = case_of(rng, algo, (100,), 128)
    config = config_for(algo, exclude_modules=[])
    layer = ParallelLMHead(100, 128, params_dtype=torch.bfloat16, quant_config=config, prefix="lm_head")
    load_linear(layer, case, (None,))
    layer.quant_method.process_weights_after_loading(layer)
    x = random_x(case, 2)
    y = layer.quant_method.apply(layer, x)
    assert y.shape == (2, 128)
    pads = {role: [(0, len(a) * 28 // 100)] + [(0, 0)] * (a.ndim - 1) for role, a in by_row(case).items()}
    part = {role: np.pad(a, pads[role]) if role in pads else a for role, a in case.parts[0].items()}
    assert torch.equal(y, direct(replace(case, out_partitions=[128], parts=[part]), x))
    assert not y[:, 100:].any()
    layer.weight = torch.nn.Parameter(torch.zeros(128, 128, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(RuntimeError, match="lm_head: another weight was put in the place"):
        layer.quant_method.apply(layer, x)


@pytest.mark.parametrize("algo", ["FP8", "W4A16_AWQ", "NVFP4_SVD"])
def test_compiles_without_a_break(rng, algo, random_x):
    case = case_of(rng, algo, (64,))
    layer, _ = ready("column", case)
    x = random_x(case, 4)
    with torch.inference_mode(False), torch.no_grad():
        compiled = torch.compile(
            lambda x: layer.quant_method.apply(layer, x), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(compiled(x.clone()), layer(x)[0])


def test_the_weight_that_sglang_reads_itself_is_sglangs(rng):
    """Or of nobody: its methods read FP8_PB_WO of a whole checkpoint as plain FP8."""
    name = "model.layers.0.self_attn.kv_b_proj"
    layer, _ = linear_of("column", case_of(rng, "FP8"), config_for("FP8"), prefix=name)
    assert type(layer.quant_method).__module__.startswith("sglang.")
    case = case_of(rng, "FP8_PB_WO")
    with pytest.raises(UnsupportedQuantization, match=re.escape(f"{name}: FP8_PB_WO: SGLang reads")):
        linear_of("column", case, config_for("FP8_PB_WO"), prefix=name)


def test_parts_with_factors_of_their_own_are_refused(rng):
    one, other = (case_of(rng, "NVFP4_AWQ", (64, 64)) for _ in range(2))
    one.parts[1] = one.parts[1] | {"pre_quant_scale": other.parts[1]["pre_quant_scale"]}
    layer, names = linear_of("merged", one, config_for("NVFP4_AWQ"))
    with pytest.raises(CheckpointError, match="one pre_quant_scale, but differ"):
        load_linear(layer, one, names)


def test_pairs_of_other_ranks_are_refused(rng):
    """Pairs of fused parts are one tensor, and graphs hold those of a layer."""
    without = case_of(rng, "NVFP4_SVD", (64, 32))
    case, other = (with_pairs(rng, without, rank) for rank in (4, 16))
    layer, _ = linear_of("merged", case, config_for("NVFP4_SVD"))
    load_linear(layer, case, (0, 1))
    assert layer.quant_method.slots.rank == 4
    told = r"mlp\.x: lora_a: expected one of a pair of rank 4, got shape \[16, 128\]"
    with pytest.raises(CheckpointError, match=told):
        load_linear(layer, other, (0, 1))
    told = r"mlp\.x: lora_b: expected one of a pair of rank 4, got shape \[32\]"
    param = layer.get_parameter(STORED_AS["lora_b"])
    with pytest.raises(CheckpointError, match=told):
        param.weight_loader(param, torch.zeros(32), 1)


class _Packed:
    """LinearMethod of NVFP4 as it is on CUDA: codes and block scales are one prepared tensor, packed."""

    def __init__(self, method):
        self.method = method
        rows, columns = method.out_features, method.in_features
        shape = (4 * -(-rows // 64), -(-columns // 64), 576)
        weight = method.prepared_params["weight"]._replace(shape=shape, dtype="uint8")
        rest = {role: spec for role, spec in method.prepared_params.items() if role != "weight_scale"}
        self.prepared_params = rest | {"weight": weight}

    def __getattr__(self, name):
        return getattr(self.method, name)

    def keeps(self, name):
        return False

    def prepare(self, params, out):
        plain = self.method.prepare(params)
        pack_nvfp4(plain["weight"], plain["weight_scale"], out=out["weight"])
        for role in out.keys() - {"weight"}:
            out[role].copy_(plain[role])
        return out

    def __call__(self, x, params, bias):
        shape = (self.method.out_features, self.method.in_features)
        codes, scales = unpack_nvfp4(params["weight"], shape, 16)
        plain = {**params, "weight": codes, "weight_scale": scales.view(torch.float8_e4m3fn)}
        return self.method(x, plain, bias)


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "unasked"])
@pytest.mark.parametrize("algo", ["NVFP4", "NVFP4_SVD"])
def test_packed_codes_are_unpacked_for_a_reload(rng, monkeypatch, device, algo, asked, random_x):
    """The packed tensor keeps its place; what is loaded again of the checkpoint is all, a part or nothing."""
    if device == "cpu":
        monkeypatch.setattr(
            linear, "find_method", lambda *about, **rank: _Packed(find_method(*about, **rank))
        )
    first, second = (case_of(rng, algo, (64, 64), 128) for _ in range(2))
    if algo == "NVFP4_SVD":  # the part that is not loaded again has the factors of the one that is
        factors = first.parts[0]["pre_quant_scale"]
        second.parts[:] = [part | {"pre_quant_scale": factors} for part in second.parts]
    layer, names = ready("merged", first)
    method, x = layer.quant_method, random_x(first, 4)
    before = {role: tensor.data_ptr() for role, tensor in method.prepared.items()}
    assert layer.weight.shape == (8, 2, 576)
    assert layer.weight_scale.numel() == 0
    assert torch.equal(layer(x)[0], direct(first, x))
    skipped = {(1, role) for role in first.parts[0]}
    mixed = replace(first, parts=[first.parts[0], second.parts[1]])
    calls = [(None, (), first), (second, (), second), (first, skipped, mixed)]
    if algo == "NVFP4_SVD":  # a pair alone
        pair = {role: second.parts[0][role] for role in ("lora_a", "lora_b")}
        rest = {(part, role) for part in names for role in second.parts[0] if part or role not in pair}
        calls.append((second, rest, replace(first, parts=[first.parts[0] | pair, second.parts[1]])))
    for given, skip, case in calls:
        if asked:  # SGLang 0.5.17 does not
            method.restore_weights_before_loading(layer)
            assert layer.weight.shape == (128, 64)
        if given is not None:
            load_linear(layer, given, names, skip)
        method.process_weights_after_loading(layer)
        assert {role: tensor.data_ptr() for role, tensor in method.prepared.items()} == before
        assert layer.weight.data_ptr() == before["weight"]
        assert layer.weight_scale.numel() == 0
        assert torch.equal(layer(x)[0], direct(case, x))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("algo", ALGOS)
def test_a_graph_of_a_layer(rng, algo, random_x):
    """Nothing of a call waits for the device, or it could not be captured; other activations and weights
    reach the graph."""
    first, second = (case_of(rng, algo, KINDS["merged"], 256) for _ in range(2))
    layer, names = ready("merged", first)
    x = random_x(first, 4)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)[0]

    def replayed():
        captured.fill_(float("nan"))
        graph.replay()
        return captured

    assert torch.equal(replayed(), direct(first, x))
    x.copy_(random_x(first, 4))
    assert torch.equal(replayed(), direct(first, x))
    layer.quant_method.restore_weights_before_loading(layer)
    load_linear(layer, second, names)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(replayed(), direct(second, x))

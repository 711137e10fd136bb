"""Int4, int8 and low-rank pairs in layers of vLLM's own, filled by its loaders: whole, fused and split."""

import numpy as np
import pytest

import moqext
from moqext import reference
from tests.vllm.test_step_aside import linear, make_config

pytest.importorskip("vllm")
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

ALGOS = ("W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "W8A16", "NVFP4_SVD")
RANK = 32
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
COLUMNS = 256
LAYERS = {  # by name: the names of its parts and their rows
    "qkv_proj": {"q": 128, "k": 64, "v": 64},
    "gate_up_proj": {0: 96, 1: 96},
    "down_proj": {None: 32},
}
STATIC = ("W4A8_AWQ", "W8A8_SQ_PER_CHANNEL")
SMOOTHED = (*STATIC, "W4A16_AWQ", "NVFP4_SVD")


@pytest.fixture
def ranks(monkeypatch):
    """`ranks(rank, size)`: takes this process for a rank of so many."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    def pretend(rank, size):
        for module in (parameter, linear):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

    pretend(0, 1)
    with set_current_vllm_config(VllmConfig()):
        yield pretend


def make_layer(algo, name, columns=COLUMNS, kv_heads=2, config=None):
    """A layer of vLLM's, unloaded."""
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )

    about = {"bias": False, "params_dtype": torch.float32, "quant_config": config or make_config(algo)}
    if name == "qkv_proj":
        return QKVParallelLinear(columns, 32, 4, kv_heads, prefix=f"{ATTENTION}.qkv_proj", **about)
    if name == "gate_up_proj":
        return MergedColumnParallelLinear(columns, [96, 96], prefix=f"{MLP}.gate_up_proj", **about)
    return RowParallelLinear(columns, 32, prefix=f"{MLP}.down_proj", reduce_results=False, **about)


def make_parts(algo, name, rng, columns=COLUMNS):
    """The checkpoint's tensors of each part, scales unequal and factors of x the same, in NumPy."""
    smooth = np.exp2(rng.integers(-2, 3, columns)).astype(np.float32)
    found = {}
    for index, (part, rows) in enumerate(LAYERS[name].items()):
        weight = rng.standard_normal((rows, columns)) * 2.0**index
        found[part] = {
            role: np.asarray(value) for role, value in reference.quantize_weight(weight, algo).items()
        }
        if algo in STATIC:
            found[part]["input_scale"] = np.float32(0.05 * (index + 1))
        if algo in SMOOTHED:
            found[part]["pre_quant_scale"] = smooth
        if algo == "NVFP4_SVD":
            found[part] |= make_pair(rng, rows, columns)
    return found


def make_pair(rng, rows, columns=COLUMNS):
    shapes = {"lora_a": (RANK, columns), "lora_b": (rows, RANK)}
    return {role: rng.standard_normal(shape).astype(np.float32) / 4 for role, shape in shapes.items()}


def load(layer, parts, *but):
    """Fills a layer as models of vLLM's do; `but` names (part, role) to leave out."""
    for part, tensors in parts.items():
        for role, value in tensors.items():
            if (part, role) not in but:
                param, loaded = getattr(layer, role), torch.from_numpy(np.array(value))
                loaded = loaded.view(param.dtype) if param.dtype.itemsize == 1 else loaded
                param.weight_loader(param, loaded, *(() if part is None else (part,)))


def rows_of(tensors, algo, first, last):
    """Rows of a part's tensors."""
    step = 2 if "AWQ" in algo else 1
    cut = dict.fromkeys(("weight_scale", "lora_b"), slice(first, last))
    cut["weight"] = slice(first // step, last // step)
    return {role: value[cut[role]] if role in cut else value for role, value in tensors.items()}


def columns_of(tensors, algo, first, last):
    """Columns of a part's tensors."""
    groups = {"weight": 2 if "FP4" in algo else 1, "pre_quant_scale": 1, "lora_a": 1}
    if tensors["weight_scale"].ndim == 2:
        groups["weight_scale"] = 16 if "FP4" in algo else 128
    cut = {
        role: tensors[role][..., first // each : last // each]
        for role, each in groups.items()
        if role in tensors
    }
    return tensors | cut


def expected(algo, parts, x):
    """The result of `moqext.LinearMethod` for the tensors of parts."""
    rows = [len(tensors["weight_scale"]) for tensors in parts]
    rank = parts[0]["lora_b"].shape[1] if "lora_b" in parts[0] else None
    method = moqext.LinearMethod(algo, x.shape[1], rows, dtype="float32", rank=rank)
    given = {role: [np.ascontiguousarray(tensors[role]) for tensors in parts] for role in parts[0]}
    if "pre_quant_scale" in given:
        given["pre_quant_scale"] = given["pre_quant_scale"][0]
    return torch.from_numpy(np.asarray(method(x.numpy(), method.prepare(given))))


def run(layer, x):
    layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method.apply(layer, x)


def make_x(rng, columns=COLUMNS):
    return torch.from_numpy(rng.standard_normal((5, columns)).astype(np.float32))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("algo", ALGOS)
def test_a_layer_has_the_bits_of_moqext(ranks, rng, algo, name):
    layer, parts, x = make_layer(algo, name), make_parts(algo, name, rng), make_x(rng)
    assert type(layer.quant_method).__name__ == "MoqextModelOptLinearMethod"
    load(layer, parts)
    before = layer.quant_method.dequantize_weight(layer)
    by_identity = run(layer, torch.eye(COLUMNS))  # as vLLM asks for the weight of MLA's kv_b_proj
    assert torch.equal(layer.quant_method.apply(layer, x), expected(algo, list(parts.values()), x))
    weight = np.concatenate([reference.dequantize(part, algo, effective=True) for part in parts.values()])
    weight = torch.from_numpy(weight.astype(np.float32))
    places = 2.0**-16 if algo == "NVFP4_SVD" else 0  # products of pairs are rounded
    for found in (before, layer.quant_method.dequantize_weight(layer), by_identity.T):
        torch.testing.assert_close(found, weight, rtol=places, atol=places)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("algo", ALGOS)
def test_a_reload_is_in_place(ranks, rng, algo, name):
    layer, x = make_layer(algo, name), make_x(rng)
    load(layer, make_parts(algo, name, rng))
    first = run(layer, x)
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    places = {key: tensor.data_ptr() for key, tensor in tensors}
    parts = make_parts(algo, name, rng)
    load(layer, parts)
    again = run(layer, x)
    assert not torch.equal(first, again)
    assert torch.equal(again, expected(algo, list(parts.values()), x))
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    assert places == {key: tensor.data_ptr() for key, tensor in tensors}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("algo", ALGOS)
def test_ranks_have_rows_of_each_part(ranks, rng, algo, kv_heads, rank):
    """With one head of k and v both ranks have it."""
    parts, x = make_parts(algo, "qkv_proj", rng), make_x(rng)
    heads = {"k": kv_heads, "v": kv_heads}
    if kv_heads == 1:
        parts = {part: rows_of(each, algo, 0, 32) if part in heads else each for part, each in parts.items()}
    ranks(rank, 2)
    layer = make_layer(algo, "qkv_proj", kv_heads=kv_heads)
    load(layer, parts)
    own = []
    for part, each in parts.items():
        rows = len(each["weight_scale"]) // (1 if heads.get(part) == 1 else 2)
        first = 0 if heads.get(part) == 1 else rank * rows
        own.append(rows_of(each, algo, first, first + rows))
    assert torch.equal(run(layer, x), expected(algo, own, x))


@pytest.mark.parametrize("algo", ALGOS)
def test_ranks_have_columns(ranks, rng, algo):
    """Their results add up to that of one rank, but for scales of x that each finds of its columns."""
    parts, x = make_parts(algo, "down_proj", rng), make_x(rng)
    (part,) = parts.values()
    sums = torch.zeros(5, 32)
    for rank in (0, 1):
        ranks(rank, 2)
        layer, cut = make_layer(algo, "down_proj"), slice(rank * 128, rank * 128 + 128)
        load(layer, parts)
        own = columns_of(part, algo, cut.start, cut.stop)
        found = run(layer, x[:, cut].contiguous())
        assert torch.equal(found, expected(algo, [own], x[:, cut]))
        sums += found
    torch.testing.assert_close(sums, expected(algo, [part], x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "name, columns, size, texts",
    [
        ("down_proj", 256, 4, ("group size 128", "each rank 64 of 256 columns")),
        ("gate_up_proj", 256, 32, ("even size", "got 3", "each rank 6 of 192 rows")),
    ],
)
def test_a_split_through_a_group_or_a_byte_is_refused(ranks, name, columns, size, texts):
    ranks(0, size)
    with pytest.raises(moqext.UnsupportedQuantization) as found:
        make_layer("W4A16_AWQ", name, columns)
    for text in (f"{MLP}.{name}", *texts):
        assert text in str(found.value)


@pytest.mark.parametrize("algo", ALGOS)
def test_layers_that_are_fused_on_disk(ranks, rng, algo):
    """One tensor of all rows, and one scale of x; as for Phi-3."""
    x = make_x(rng)
    whole = reference.quantize_weight(rng.standard_normal((192, COLUMNS)), algo)
    whole = {role: np.asarray(value) for role, value in whole.items()}
    if algo in STATIC:
        whole["input_scale"] = np.float32(0.05)
    if algo in SMOOTHED:
        whole["pre_quant_scale"] = np.exp2(rng.integers(-2, 3, COLUMNS)).astype(np.float32)
    if algo == "NVFP4_SVD":
        whole |= make_pair(rng, 192)
    layer = make_layer(algo, "gate_up_proj")
    load(layer, {None: whole})
    assert torch.equal(run(layer, x), expected(algo, [whole], x))


@pytest.mark.parametrize("algo", ALGOS)
def test_what_is_missing_is_named(ranks, rng, algo):
    parts = make_parts(algo, "qkv_proj", rng)
    for role in parts["k"]:
        layer = make_layer(algo, "qkv_proj")
        load(layer, parts, ("k", role))
        text = rf"{ATTENTION}\.qkv_proj: {role} was never loaded for part 1 of the 3"
        with pytest.raises(moqext.CheckpointError, match=text):
            layer.quant_method.process_weights_after_loading(layer)


def test_factors_of_x_that_differ_are_refused(ranks, rng):
    """Fused layers have one x."""
    layer, parts = make_layer("W4A16_AWQ", "qkv_proj"), make_parts("W4A16_AWQ", "qkv_proj", rng)
    parts["v"]["pre_quant_scale"] = parts["v"]["pre_quant_scale"] * 2
    load(layer, parts)
    text = r"qkv_proj: pre_quant_scale: expected the same in all 3 layers .* in part 2 than in part 0"
    with pytest.raises(moqext.CheckpointError, match=text):
        layer.quant_method.process_weights_after_loading(layer)
    with pytest.raises(ValueError, match=r"pre_quant_scale: expected shape \[256\], got \[128\]"):
        layer.pre_quant_scale.weight_loader(layer.pre_quant_scale, torch.ones(128), "q")


@pytest.mark.parametrize("algo", SMOOTHED)
def test_factors_of_x_may_be_absent(ranks, rng, algo):
    layer, parts, x = make_layer(algo, "qkv_proj"), make_parts(algo, "qkv_proj", rng), make_x(rng)
    for tensors in parts.values():
        del tensors["pre_quant_scale"]
    load(layer, parts)
    assert torch.equal(run(layer, x), expected(algo, list(parts.values()), x))


@pytest.mark.parametrize("algo, dtype", [("W8A16", torch.uint8), ("W4A16_AWQ", torch.int8)])
def test_codes_of_another_data_type_are_no_numbers(ranks, algo, dtype):
    layer = make_layer(algo, "down_proj")
    wanted = str(layer.weight.dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"{MLP}.down_proj.weight: expected {wanted}, got a tensor of"):
        layer.weight.weight_loader(layer.weight, torch.zeros(layer.weight.shape, dtype=dtype))


@pytest.mark.parametrize("algo", ALGOS)
def test_a_graph_has_the_bits_of_the_layer(ranks, rng, algo):
    layer, x = make_layer(algo, "qkv_proj"), make_x(rng)
    load(layer, make_parts(algo, "qkv_proj", rng))
    found = run(layer, x)
    compiled = torch.compile(lambda x: layer.quant_method.apply(layer, x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), found)


@pytest.mark.parametrize("name", LAYERS)
def test_pairs_have_the_rank_of_the_checkpoint(ranks, rng, name):
    config, x = make_config("NVFP4_SVD"), make_x(rng)
    config.rank = 8
    layer, parts = make_layer("NVFP4_SVD", name, config=config), make_parts("NVFP4_SVD", name, rng)
    part, tensors = next(iter(parts.items()))
    for role, shape in (("lora_a", [32, 256]), ("lora_b", list(tensors["lora_b"].shape))):
        param, given = getattr(layer, role), () if part is None else (part,)
        with pytest.raises(ValueError, match=f"{name}.{role}: expected a pair of rank 8, got shape") as found:
            param.weight_loader(param, torch.from_numpy(tensors[role]), *given)
        assert str(found.value).endswith(str(shape))
    for tensors in parts.values():
        tensors |= {"lora_a": tensors["lora_a"][:8], "lora_b": tensors["lora_b"][:, :8]}
    load(layer, parts)
    assert torch.equal(run(layer, x), expected("NVFP4_SVD", list(parts.values()), x))


def test_names_and_ranks_of_pairs_are_read(rng, tmp_path):
    """Files have other names for pairs than moqext."""
    from tests.svd_files import QKV, write_svd

    config = make_config("NVFP4_SVD")
    names = [f"{QKV[0]}.weight_quantizer._svdquant_lora_{part}" for part in "ab"]
    assert config.get_checkpoint_weight_mapper().apply_list(names) == [
        f"{QKV[0]}.lora_{part}" for part in "ab"
    ]
    config.maybe_update_config(str(write_svd(tmp_path / "one", rng, layers=QKV, ranks=(4,))))
    assert config.rank == 4
    assert config.get_quant_method(linear(128, 64), f"{ATTENTION}.o_proj").rank == 4
    several = write_svd(tmp_path / "several", rng, layers=QKV, ranks=(4, 8))
    text = r"expected one rank in all layers, got 4 \(.*q_proj\) and 8 \(.*k_proj\)"
    with pytest.raises(moqext.UnsupportedQuantization, match=text):
        config.maybe_update_config(str(several))
    config.maybe_update_config("organisation/model")
    assert config.rank is None

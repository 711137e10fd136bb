"""`Checkpoint.load` of a container of experts: outputs are the reference's, whatever the stored form."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moqext
from moqext import Checkpoint, CheckpointError, ExpertLayer, UnsupportedQuantization, reference, stack_experts

from .expert_files import CONTAINER, dotted_experts, single_experts, stacked_experts, write_checkpoint
from .linear_cases import poisoned, random_x
from .moe_cases import ALGOS, assert_experts_close, random_routing, random_stacks

DATA = Path(__file__).parent / "data"
E, H, W = 6, 160, 96  # experts, hidden size, expert width
CONFIG = {"hidden_act": "silu", "num_experts_per_tok": 2}
ORIGINALS = {
    "checkpoints/qwen3moe_fp8": "qwen3moe_bf16",
    "checkpoints/qwen3moe_nvfp4": "qwen3moe_bf16",
    "exports/deepseek_nvfp4": "deepseek_bf16",
    "exports/gpt_oss_fp8": "gpt_oss_bf16",
    "exports/gpt_oss_nvfp4": "gpt_oss_bf16",
    "exports/llama4_fp8": "llama4_bf16",
    "exports/llama4_nvfp4": "llama4_bf16",
    "exports/mixtral_fp8": "mixtral_bf16",
    "exports/mixtral_nvfp4": "mixtral_bf16",
    "exports/nemotron_h_mixed": "nemotron_h_bf16",
    "exports/nemotron_h_nvfp4": "nemotron_h_bf16",
    "exports/qwen3moe_mixed": "qwen3moe_bf16",
}
KEPT = ("gated", "interleaved", "group_size", "activation", "alpha", "beta", "limit", "quant_algo")


def container(checkpoint: Checkpoint) -> Any:
    (record,) = [layer for layer in checkpoint.layers() if layer.kind == "moe"]
    return record


def loaded(directory: Path, **options: Any) -> ExpertLayer:
    with Checkpoint(directory) as checkpoint:
        layer = checkpoint.load(container(checkpoint), **options)
    assert isinstance(layer, ExpertLayer)
    return layer


def run(rng: Any, layer: ExpertLayer, dtype: str, tokens: int = 11, kind: str = "random") -> Any:
    """x, router weights, ids and y."""
    x = random_x(rng, (tokens, layer.hidden_size), dtype)
    weights, ids = random_routing(rng, tokens, layer.top_k, layer.global_num_experts, kind)
    out = poisoned(x.shape, dtype)
    assert layer(x, weights, ids, out=out) is out
    return x, weights, ids, out


# Genuine exports


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", ORIGINALS)
def test_genuine_experts_are_the_reference(rng: Any, case: str, dtype: str) -> None:
    with Checkpoint(DATA / case) as checkpoint:
        record = container(checkpoint)
        layer = checkpoint.load(record.name, dtype=dtype)
        options, stacks = stack_experts(checkpoint, record)
    assert isinstance(layer, ExpertLayer)
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == record.shape
    assert layer.names == (record.name,)
    for kind in ("random", "skewed", "hostile"):
        x, weights, ids, y = run(rng, layer, dtype, kind=kind)
        kept = {name: options[name] for name in KEPT if name in options}
        assert_experts_close(y, reference.as_float32(x), stacks, weights, ids, dtype=dtype, **kept)


def original_experts(case: str) -> tuple[list[Any], Any]:
    """The bf16 model's own weights of each expert as (w13 rows gate first or up alone, w2), and biases."""
    safetensors = pytest.importorskip("safetensors.numpy")
    pytest.importorskip("ml_dtypes")
    folder = DATA / case.partition("/")[0]
    tensors = safetensors.load_file(folder / f"{ORIGINALS[case]}.safetensors")
    tensors = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    with Checkpoint(DATA / case) as checkpoint:
        record = container(checkpoint)
    experts, biases = [], None
    for expert in range(record.shape[0]):
        if f"{record.name}.gate_up_proj" in tensors:
            gate_up, down = (tensors[f"{record.name}.{name}_proj"][expert] for name in ("gate_up", "down"))
            if record.projections:  # [in, out]
                gate_up, down = gate_up.T, down.T
        else:
            names = [m.name for m in record.members if m.name.startswith(f"{record.name}.{expert}.")]
            *first, down = (tensors[f"{name}.weight"] for name in names)
            gate_up = np.concatenate(first)
        if "gpt_oss" in case:
            gate_up = np.concatenate([gate_up[0::2], gate_up[1::2]])
        experts.append((gate_up, down))
    if "gpt_oss" in case:
        both = tensors[f"{record.name}.gate_up_proj_bias"]
        halves = np.concatenate([both[:, 0::2], both[:, 1::2]], axis=1)
        biases = (halves, tensors[f"{record.name}.down_proj_bias"])
    return experts, biases


def of_the_original(case: str, layer: ExpertLayer, x: Any, weights: Any, ids: Any) -> np.ndarray:
    """Computes the layer of the bf16 model, in float64 and nothing quantized."""
    experts, biases = original_experts(case)
    method = layer.method
    y = np.zeros(x.shape)
    for token, slot in np.ndindex(ids.shape):
        expert = ids[token, slot]
        gate_up, down = experts[expert]
        u = gate_up @ x[token] + (0 if biases is None else biases[0][expert])
        gate, up = np.split(u, 2) if method.gated else (u, None)
        g = reference.expert_activation(
            gate, up, method.activation, alpha=method.alpha, beta=method.beta, limit=method.limit
        )
        y[token] += weights[token, slot] * (down @ g + (0 if biases is None else biases[1][expert]))
    return y


def sqnr(y: np.ndarray, exact: np.ndarray) -> float:
    """Signal over quantization noise in decibels."""
    return float(20 * np.log10(np.linalg.norm(exact) / np.linalg.norm(y - exact)))


@pytest.mark.parametrize("case", ORIGINALS)
def test_outputs_are_those_of_the_original_model(rng: Any, case: str) -> None:
    """Against the bf16 model's weights: the noise of the formats, and not more.

    A code of e4m3 is up to 2^-4 of its value off, which makes 31.5 dB, and one of e2m1 with a scale for 16
    weights about 20.5 dB. The noise of gate, up and down adds up in power, for FP8 also that of both
    activations: 31.5 - 10 log10(6) = 23.7 dB and 20.5 - 10 log10(3) = 15.7 dB, more where biases have none.
    Less noise than that would be a comparison with oneself.
    """
    layer = loaded(DATA / case, dtype="float32")
    x = rng.standard_normal((64, layer.hidden_size)).astype(np.float32)
    x *= np.float32(0.5 * calibrated(case) / np.abs(x).max())  # nothing saturates in the middle either
    weights, ids = random_routing(rng, len(x), layer.top_k, layer.num_experts)
    exact = of_the_original(case, layer, x, weights, ids)
    db = sqnr(layer(x, weights, ids), exact)
    print(f"{case}: {db:.2f} dB")
    low, high = (22.0, 26.0) if "fp8" in case else (14.0, 18.5)
    assert low < db < high + (4 if "gpt_oss" in case else 0)  # biases, which are most of its outputs
    assert sqnr(layer(x, weights, (ids + 1) % layer.num_experts), exact) < 5


def calibrated(case: str) -> float:
    """The largest activation of the calibration."""
    with Checkpoint(DATA / case) as checkpoint:
        _, stacks = stack_experts(checkpoint, container(checkpoint))
    return float(stacks["w13_input_scale"].max()) * (448 if "fp8" in case else 2688)


# Every form, from stacks


FORMS = [
    (algo, form)
    for algo in ALGOS
    for form in ("one by one", "dotted", "stacked", "turns")
    if form in ("one by one", "dotted") or algo not in ("FP8_PB_WO", "W4A8_NVFP4_FP8")
]
"""The last two have no stack of gate and up in one that runs."""


@pytest.mark.parametrize(("algo", "form"), FORMS)
def test_every_form_computes_what_its_stacks_mean(rng: Any, tmp_path: Path, algo: str, form: str) -> None:
    config: dict[str, Any] = dict(CONFIG)
    options: dict[str, Any] = {}
    stacks = random_stacks(rng, algo, E, H, W, bias="bfloat16" if form != "dotted" else None)
    if form == "one by one":
        tensors = single_experts(stacks, algo, names="w1")
    elif form == "dotted":
        tensors = dotted_experts(stacks, algo)
    else:
        if form == "turns":
            stacks = random_stacks(rng, algo, E, H, W, bias="bfloat16", interleaved=True)
            config |= {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 3.0}
            options = {"interleaved": True, "activation": "swigluoai", "limit": 3.0}
        else:
            config |= {"architectures": ["Llama4ForCausalLM"]}
        second = "weight_scale" if algo == "FP8" else "weight_scale_2"
        if algo == "FP8" or (form == "turns" and f"w13_{second}" in stacks):  # gate and up have one
            stacks[f"w13_{second}"][:, 1] = stacks[f"w13_{second}"][:, 0]
        tensors = stacked_experts(stacks, algo)
        if algo == "FP8" or form == "turns":
            name = f"{CONTAINER}.gate_up_proj_{second}"
            tensors |= {name: ("F32", tensors[name][1][:, 0])} if name in tensors else {}
    layer = loaded(write_checkpoint(tmp_path, tensors, algo, **config))
    x, weights, ids, y = run(rng, layer, "bfloat16")
    assert_experts_close(y, reference.as_float32(x), stacks, weights, ids, quant_algo=algo, **options)


@pytest.mark.parametrize("compute", ["fp8", "fp4"])
def test_other_computes(rng: Any, tmp_path: Path, compute: str) -> None:
    stacks = random_stacks(rng, "NVFP4", E, H, W, missing_input_scales=0.3)
    directory = write_checkpoint(tmp_path, single_experts(stacks, "NVFP4"), "NVFP4", **CONFIG)
    layer = loaded(directory, compute=compute)
    x, weights, ids, y = run(rng, layer, "bfloat16")
    values = reference.as_float32(x)
    assert_experts_close(y, values, stacks, weights, ids, quant_algo="NVFP4", compute=compute)


@pytest.mark.parametrize("algo", ["FP8", "W4A8_NVFP4_FP8"])
def test_experts_without_an_input_scale_have_the_others_largest(
    rng: Any, tmp_path: Path, algo: str, recwarn: Any
) -> None:
    stacks = random_stacks(rng, algo, E, H, W, missing_input_scales=0.6)
    stacks["w13_input_scale"][0] = np.nan
    stacks["w13_input_scale"][1] = 0.2
    directory = write_checkpoint(tmp_path, single_experts(stacks, algo), algo, **CONFIG)
    with Checkpoint(directory) as checkpoint:
        assert "missing_expert_input_scale" in {problem.code for problem in checkpoint.problems}
        layer = checkpoint.load(CONTAINER)
    assert not recwarn.list  # the problem's record says it
    x, weights, ids, y = run(rng, layer, "bfloat16")
    assert_experts_close(y, reference.as_float32(x), stacks, weights, ids, quant_algo=algo)


@pytest.mark.parametrize("lost", ["gate", "down"])
def test_no_input_scale_at_all_is_an_error(rng: Any, tmp_path: Path, lost: str) -> None:
    tensors = single_experts(random_stacks(rng, "FP8", E, H, W), "FP8")
    names = ("gate_proj.input_scale", "up_proj.input_scale") if lost == "gate" else ("down_proj.input_scale",)
    tensors = {name: value for name, value in tensors.items() if not name.endswith(names)}
    with pytest.raises(CheckpointError, match=f"FP8 without input_scale in any {lost} projection"):
        loaded(write_checkpoint(tmp_path, tensors, "FP8", **CONFIG))


# Experts in several formats


def mixed(rng: Any, directory: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Experts 1 and 4 in FP8 and the others in NVFP4, with the stacks of each."""
    fp8, nvfp4 = (random_stacks(rng, algo, E, H, W) for algo in ("FP8", "NVFP4"))
    fp8 = {name: stack[[1, 4]] for name, stack in fp8.items()}
    nvfp4 = {name: stack[[0, 2, 3, 5]] for name, stack in nvfp4.items()}
    tensors = {}
    for stacks, algo, numbers in ((fp8, "FP8", (1, 4)), (nvfp4, "NVFP4", (0, 2, 3, 5))):
        for name, value in single_experts(stacks, algo).items():
            head, _, tail = name.removeprefix(f"{CONTAINER}.").partition(".")
            tensors[f"{CONTAINER}.{numbers[int(head)]}.{tail}"] = value
    layers = {
        f"{CONTAINER}.{number}.{projection}": {"quant_algo": "FP8" if number in (1, 4) else "NVFP4"}
        for number in range(E)
        for projection in ("gate_proj", "up_proj", "down_proj")
    }
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return write_checkpoint(directory, tensors, quantization, **CONFIG), fp8, nvfp4


def expected_mixed(x: Any, fp8: Any, nvfp4: Any, weights: Any, ids: Any) -> np.ndarray:
    maps = {"FP8": [-1, 0, -1, -1, 1, -1], "NVFP4": [0, -1, 1, 2, -1, 3]}
    return sum(
        reference.experts_reference(
            x, stacks, weights, ids, quant_algo=algo, expert_map=np.int32(maps[algo]), dtype="float32"
        )
        for algo, stacks in (("FP8", fp8), ("NVFP4", nvfp4))
    )


def test_experts_of_several_formats_are_added(rng: Any, tmp_path: Path) -> None:
    directory, fp8, nvfp4 = mixed(rng, tmp_path)
    layer = loaded(directory, dtype="float32")
    assert [(part.method.quant_algo, part.experts) for part in layer.parts] == [
        ("NVFP4", (0, 2, 3, 5)),
        ("FP8", (1, 4)),
    ]
    x, weights, ids, y = run(rng, layer, "float32", tokens=40)
    expected = expected_mixed(x, fp8, nvfp4, weights, ids)
    # A code of FP8 may fall on the other side of a tie, an eighth of one of W values away.
    assert np.linalg.norm(y - expected) < 5e-3 * np.linalg.norm(expected)
    start = rng.standard_normal(x.shape).astype(np.float32)
    added = layer(x, weights, ids, out=start.copy(), accumulate=True)
    np.testing.assert_allclose(added, y + start, rtol=1e-5, atol=1e-4 * np.abs(y).max())
    order = rng.permutation(E).astype(np.int32)
    np.testing.assert_array_equal(layer(x, weights, ids, expert_map=order), layer(x, weights, order[ids]))
    some = np.where(np.arange(E) < 3, np.arange(E), -1).astype(np.int32)
    np.testing.assert_array_equal(
        layer(x, weights, ids, expert_map=some), layer(x, weights, np.where(ids < 3, ids, -1))
    )
    for attribute in ("method", "params"):
        with pytest.raises(ValueError, match="has 2 formats"):
            getattr(layer, attribute)
    for wrong in (order.astype(np.int64), order[:3]):
        with pytest.raises(ValueError, match=r"expert_map: expected int32 \[6\]"):
            layer(x, weights, ids, expert_map=wrong)
    assert "NVFP4" in repr(layer)
    assert len(layer.explain(4).splitlines()) > len(layer.parts[0].method.explain(4).splitlines())


# Some of the experts


@pytest.mark.parametrize("algo", ["FP8", "NVFP4", "W4A8_NVFP4_FP8"])
def test_shares_of_experts_add_up(rng: Any, tmp_path: Path, algo: str) -> None:
    stacks = random_stacks(rng, algo, E, H, W)
    directory = write_checkpoint(tmp_path, single_experts(stacks, algo), algo, **CONFIG)
    whole = loaded(directory, dtype="float32")
    x, weights, ids, y = run(rng, whole, "float32")
    shares = [
        loaded(directory, dtype="float32", experts=numbers) for numbers in ([4, 0, 1], range(5, 6), [3, 2])
    ]
    assert [share.experts for share in shares] == [(4, 0, 1), (5,), (3, 2)]
    total = np.zeros_like(x)
    for share in shares:
        assert share.num_experts == len(share.experts)
        assert share.global_num_experts == E
        total = share(x, weights, ids, out=total, accumulate=True)
    np.testing.assert_allclose(total, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())
    if algo != "NVFP4":  # one scale for the activations of all experts, wherever they are
        assert all(
            np.unique(share.params["w13_input_scale"]) == stacks["w13_input_scale"].max() for share in shares
        )


def test_shares_of_experts_in_several_formats(rng: Any, tmp_path: Path) -> None:
    directory, _, _ = mixed(rng, tmp_path)
    whole = loaded(directory, dtype="float32")
    x, weights, ids, y = run(rng, whole, "float32")
    shares = [loaded(directory, dtype="float32", experts=numbers) for numbers in ([5, 4, 3], [0, 2], [1])]
    assert [len(share.parts) for share in shares] == [2, 1, 1]
    total = sum(share(x, weights, ids) for share in shares)
    np.testing.assert_allclose(total, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())
    places = np.full(E, -1, np.int32)
    places[[5, 4, 3]] = [0, 1, 2]
    np.testing.assert_array_equal(shares[0](x, weights, ids, expert_map=places), shares[0](x, weights, ids))


@pytest.mark.parametrize("experts", [[], [0, 0], [-1], [4]])
def test_wrong_numbers_of_experts(experts: list[int]) -> None:
    with pytest.raises(ValueError, match="experts: expected different numbers from 0 to 3"):
        loaded(DATA / "checkpoints" / "qwen3moe_fp8", experts=experts)


# Options: config.json's word, and the caller's


def test_the_caller_says_what_config_json_does_not(rng: Any, tmp_path: Path) -> None:
    stacks = random_stacks(rng, "FP8", E, H, W)
    directory = write_checkpoint(tmp_path, single_experts(stacks, "FP8"), "FP8", hidden_act="mish")
    for options in ({}, {"top_k": 3}, {"activation": "gelu"}):
        with pytest.raises(UnsupportedQuantization, match="asks for the activation 'mish', which MoEMethod"):
            loaded(directory, **options)
    layer = loaded(directory, top_k=3, activation="gelu")
    assert (layer.top_k, layer.method.activation) == (3, "gelu")
    x, weights, ids, y = run(rng, layer, "bfloat16")
    values = reference.as_float32(x)
    assert_experts_close(y, values, stacks, weights, ids, quant_algo="FP8", activation="gelu")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_act": "silu"}, "config.json does not say how many experts a token has; pass top_k"),
        (CONFIG | {"num_experts_per_tok": 33}, "asks for 33 experts for a token"),
        (CONFIG | {"hidden_act": "gelu", "swiglu_limit": 5}, "asks for swiglu_limit 5 of gelu"),
    ],
)
def test_what_config_json_says_may_not_run(
    rng: Any, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    tensors = single_experts(random_stacks(rng, "FP8", E, H, W), "FP8")
    with pytest.raises(ValueError, match=says):
        loaded(write_checkpoint(tmp_path, tensors, "FP8", **config))


def test_a_limit_after_the_activation_is_refused(rng: Any, tmp_path: Path) -> None:
    stacks = random_stacks(rng, "FP8", E, H, W)
    config = CONFIG | {"swiglu_limits": [7.0, 0.0]}
    directory = write_checkpoint(tmp_path, single_experts(stacks, "FP8"), "FP8", **config)
    with pytest.raises(UnsupportedQuantization, match="swiglu_limits 7, which clamps after the activation"):
        loaded(directory)


def test_experts_without_a_gate_need_an_activation(rng: Any, tmp_path: Path) -> None:
    stacks = random_stacks(rng, "NVFP4", E, H, W, gated=False)
    tensors = single_experts(stacks, "NVFP4", gated=False)
    directory = write_checkpoint(tmp_path, tensors, "NVFP4", num_experts_per_tok=2, swiglu_limit=3.0)
    with pytest.raises(
        ValueError, match=r"config.json names no activation of experts without a gate; pass one"
    ):
        loaded(directory)
    layer = loaded(directory, activation="relu2")
    x, weights, ids, y = run(rng, layer, "bfloat16")
    about = {"quant_algo": "NVFP4", "activation": "relu2", "gated": False}
    assert_experts_close(y, reference.as_float32(x), stacks, weights, ids, **about)


def test_options_of_experts_are_refused_for_linears() -> None:
    with Checkpoint(DATA / "checkpoints" / "qwen3moe_fp8") as checkpoint:
        for options in ({"top_k": 2}, {"activation": "silu"}, {"experts": [0]}):
            with pytest.raises(ValueError, match="q_proj is no container of experts"):
                checkpoint.load("model.layers.0.self_attn.q_proj", **options)
        with pytest.raises(UnsupportedQuantization, match=r"4 experts \(FP8\), which are fused with nothing"):
            checkpoint.load(["model.layers.0.mlp.experts", "model.layers.0.self_attn.q_proj"])


@pytest.mark.parametrize("case", ["exports/gpt_oss_mxfp8"])
def test_formats_without_a_method_say_what_reads_them(case: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=r"\(MXFP8 g32\) lie along its output.*dequantize"):
        loaded(DATA / case)


def test_a_lost_scale_is_refused(rng: Any, tmp_path: Path) -> None:
    stacks = random_stacks(rng, "NVFP4", E, H, W)
    stacks["w2_weight_scale_2"][3] = 0
    directory = write_checkpoint(tmp_path, single_experts(stacks, "NVFP4"), "NVFP4", **CONFIG)
    with pytest.raises(CheckpointError, match="lost_scale"):
        loaded(directory)


# The layer


def test_weights_are_in_memory_once(rng: Any, tmp_path: Path) -> None:
    """Prepared codes and block scales are the memory that the files were read to."""
    from moqext.layers.load_experts import plan_parts, prepare_part

    for algo, kept in (
        ("NVFP4", ("weight", "weight_scale")),
        ("FP8", ("weight",)),
        ("FP8_PB_WO", ("weight",)),
    ):
        stacks = random_stacks(rng, algo, E, H, W)
        directory = write_checkpoint(tmp_path / algo, single_experts(stacks, algo), algo)
        with Checkpoint(directory) as checkpoint:
            record = container(checkpoint)
            (planned,) = plan_parts(checkpoint, record, range(E), top_k=1)
            part, read = prepare_part(checkpoint, record, planned)
        for name in (f"{weight}_{role}" for weight in ("w13", "w2") for role in kept):
            assert part.params[name] is read[name]
            np.testing.assert_array_equal(part.params[name], stacks[name])


def test_it_can_be_copied_and_pickled(rng: Any, tmp_path: Path) -> None:
    for layer in (loaded(DATA / "exports" / "mixtral_nvfp4"), loaded(mixed(rng, tmp_path)[0])):
        x, weights, ids, y = run(rng, layer, "bfloat16")
        for twin in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            np.testing.assert_array_equal(twin(x, weights, ids), y)
            assert repr(twin) == repr(layer)


def test_torch_tensors(rng: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for directory in (DATA / "exports" / "gpt_oss_nvfp4", mixed(rng, tmp_path)[0]):
        layer = loaded(directory)
        x, weights, ids, y = run(rng, layer, "bfloat16")
        tokens = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        order = np.arange(layer.num_experts, dtype=np.int32)
        for expert_map in (None, torch.from_numpy(order)):
            given = (torch.from_numpy(weights), torch.from_numpy(ids))
            result = layer(tokens, *given, expert_map=expert_map)
            assert result.dtype == torch.bfloat16
            np.testing.assert_array_equal(result.view(torch.int16).numpy().view(np.uint16), y)


def test_what_it_says_of_itself() -> None:
    layer = loaded(DATA / "exports" / "mixtral_fp8")
    assert layer.backend.startswith("cpu:")
    assert layer.backend_for(7).startswith("cpu:")
    assert layer.compute_for(7) == "exact"
    assert "chosen" in layer.explain()
    assert layer.top_k == 2
    assert repr(layer).startswith("<ExpertLayer model.layers.0.block_sparse_moe.experts: MoEMethod('FP8', 4")
    assert moqext.ExpertLayer is ExpertLayer
    assert json.dumps(layer.names)


def test_load_experts_takes_containers_only() -> None:
    with Checkpoint(DATA / "checkpoints" / "qwen3moe_nvfp4") as checkpoint:
        layer = checkpoint.load_experts("model.layers.0.mlp.experts")
        assert isinstance(layer, ExpertLayer)
        assert layer.num_experts == checkpoint.load("model.layers.0.mlp.experts", top_k=2).num_experts
        with pytest.raises(CheckpointError, match=r"q_proj is no container of experts"):
            checkpoint.load_experts("model.layers.0.self_attn.q_proj")


# Experts that lost their gates


def without_gate(checkpoint: Checkpoint) -> list[str | None]:
    return [problem.layer for problem in checkpoint.problems if problem.code == "missing_gate"]


@pytest.mark.parametrize("form", ["one by one", "dotted"])
def test_experts_whose_gates_are_gone_do_not_run_without(rng: Any, tmp_path: Path, form: str) -> None:
    stacks = random_stacks(rng, "NVFP4", E, H, W)
    tensors = single_experts(stacks, "NVFP4") if form == "one by one" else dotted_experts(stacks, "NVFP4")
    tensors = {name: tensor for name, tensor in tensors.items() if ".gate_proj." not in name}
    directory = write_checkpoint(tmp_path, tensors, "NVFP4", **CONFIG)
    message = "no expert has a gate, and the activation of config.json, silu, is that of a gate"
    with Checkpoint(directory) as checkpoint:
        record = container(checkpoint)
        assert without_gate(checkpoint) == [record.name]
        for read in (checkpoint.load, lambda name: stack_experts(checkpoint, name)):
            with pytest.raises(CheckpointError, match=message):
                read(record.name)
        assert not checkpoint.load(record.name, activation="silu").method.gated


def test_a_layer_without_gates_beside_one_with_is_refused(rng: Any, tmp_path: Path) -> None:
    stacks = random_stacks(rng, "NVFP4", E, H, W)
    tensors = single_experts(stacks, "NVFP4")
    other = {
        name.replace("layers.", "layers.9"): tensor
        for name, tensor in tensors.items()
        if ".gate_proj." not in name
    }
    config = {"mlp_hidden_act": "relu2", "num_experts_per_tok": 2}
    with Checkpoint(write_checkpoint(tmp_path, tensors | other, "NVFP4", **config)) as checkpoint:
        whole, lost = (layer.name for layer in checkpoint.layers() if layer.kind == "moe")
        assert without_gate(checkpoint) == [lost]
        with pytest.raises(CheckpointError, match=f"no expert has a gate, those of {whole} have one"):
            checkpoint.load(lost, activation="relu2")


# Sizes that only a header claims


@pytest.mark.parametrize(
    "gate_up, down, message",
    [
        ((1 << 33, 0, 0), (1 << 33, 0, 0), "its experts are empty"),
        ((1 << 17, 2, 1), (1 << 17, 1, 1), "131072 experts, a layer has at most 65535"),
    ],
)
def test_experts_that_only_a_header_claims_are_not_counted(
    tmp_path: Path, gate_up: Any, down: Any, message: str
) -> None:
    one = "F32", np.ones((), np.float32)
    tensors = {f"{CONTAINER}.{name}_weight_scale": one for name in ("gate_up_proj", "down_proj")}
    for name, shape in (("gate_up_proj", gate_up), ("down_proj", down)):
        tensors[f"{CONTAINER}.{name}"] = "F8_E4M3", np.empty(shape, np.uint8)
    directory = write_checkpoint(tmp_path, tensors, "FP8", **CONFIG)
    with Checkpoint(directory) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.load(container(checkpoint))


# One FP8 scale an expert


@pytest.mark.parametrize("algo", ["FP8", "FP8_PB_WO", None])
def test_one_scale_an_expert_is_what_the_configuration_says(rng: Any, tmp_path: Path, algo: Any) -> None:
    stacks = random_stacks(rng, "FP8", 2, 64, 32, input_scales=algo != "FP8_PB_WO")
    stacks["w13_weight_scale"][:, 1] = stacks["w13_weight_scale"][:, 0]
    found = []
    for shape in ((2,), (2, 1), (2, 1, 1), (2, 1, 1, 1, 1)):
        tensors = stacked_experts(stacks, "FP8", transposed=False)
        for name, (dtype, value) in tensors.items():
            if name.endswith("_weight_scale"):
                scale = value[:, 0] if value.ndim == 2 else value
                tensors[name] = dtype, scale.reshape(shape)
        directory = write_checkpoint(
            tmp_path / str(len(shape)), tensors, {"quant_algo": algo or "FP8"}, **CONFIG
        )
        if algo is None:
            (directory / "config.json").write_text(json.dumps(CONFIG))
        with Checkpoint(directory) as checkpoint:
            assert container(checkpoint).quant_algo == (algo or "FP8")
            assert "algo_conflict" not in {problem.code for problem in checkpoint.problems}
            found.append(stack_experts(checkpoint, CONTAINER))
    for options, got in found[1:]:
        assert options == found[0][0]
        for name, stack in got.items():
            np.testing.assert_array_equal(stack, found[0][1][name])


def test_stacks_of_several_blocks_say_what_one_block_is(rng: Any, tmp_path: Path) -> None:
    """Without a configuration, of a layer whose down projection alone has one scale an expert."""
    stacks = random_stacks(rng, "FP8_PB_WO", 2, 64, 128)
    directory = write_checkpoint(
        tmp_path, stacked_experts(stacks, "FP8_PB_WO", transposed=False), "FP8", **CONFIG
    )
    (directory / "config.json").write_text(json.dumps(CONFIG))
    with Checkpoint(directory) as checkpoint:
        assert {part.quant_algo for part in container(checkpoint).projections} == {"FP8_PB_WO"}


def test_second_scales_of_halves_before_experts_are_refused(rng: Any, tmp_path: Path) -> None:
    """Scales have as many values as there should be, in another order."""
    stacks = random_stacks(rng, "NVFP4", 3, 64, 32)
    tensors = stacked_experts(stacks, "NVFP4", transposed=False)
    name = f"{CONTAINER}.gate_up_proj_weight_scale_2"
    tensors[name] = tensors[name][0], tensors[name][1].T
    directory = write_checkpoint(tmp_path, tensors, "NVFP4", **CONFIG)
    message = r"expected \[\] or \[3\] or \[3, 2\], found shape \[2, 3\]"
    with Checkpoint(directory) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.load(container(checkpoint))

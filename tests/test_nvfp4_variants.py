"""Smoothed activations of NVFP4_AWQ, and the FP8 activations of W4A8_NVFP4_FP8."""

import json
import shutil

import numpy as np
import pytest

from moqext import Checkpoint, CheckpointError, LinearMethod, UnsupportedQuantization, ops, reference
from moqext.__main__ import main

from .linear_cases import assert_close, assert_within_rounding, random_case, random_x, smoothed

O_PROJ = "model.layers.0.self_attn.o_proj"
KERNELS = ["portable", "avx2", "avx512", "avx512bf16", "amx"]


def check(case, x, dtype, compute):
    method = case.method(dtype=dtype, compute=compute)
    y = method(x, method.prepare(case.listed()))
    expected = case.expected(x, compute)
    assert_within_rounding(y, expected, case.magnitude(reference.as_float32(x), compute) + 1e-30, dtype)
    assert_close(y, expected, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compute", ["exact", "fp8", "fp4"])
def test_x_is_smoothed_and_rounded_first(rng, compute, dtype):
    case = smoothed(rng, random_case(rng, "NVFP4_AWQ", 272, [40, 24]))
    for tokens in (1, 7, 300):
        check(case, random_x(rng, (tokens, 272), dtype), dtype, compute)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_smoothing_is_one_product_and_one_rounding(rng, dtype):
    """To the bit: the layer on x and on what smoothing makes of x."""
    case = random_case(rng, "NVFP4_AWQ", 160, [24])
    with_scale = smoothed(rng, case)
    scale = reference.as_float32(with_scale.parts[0]["pre_quant_scale"])
    x = random_x(rng, (3, 5, 320), dtype)[:, :, ::2]  # neither rows nor columns next to each other
    product = (reference.as_float32(x) * scale).astype(np.float64)
    by_hand = reference.round_to(product, dtype)
    by_hand = reference.encode(by_hand, dtype) if dtype == "bfloat16" else by_hand
    plain, method = case.method(dtype=dtype), with_scale.method(dtype=dtype)
    expected = plain(by_hand, plain.prepare(case.listed()))
    for params in (with_scale.listed(), with_scale.fused()):
        np.testing.assert_array_equal(method(x, method.prepare(params)), expected)


def test_a_layer_without_the_factor_is_plain_nvfp4(rng):
    case = random_case(rng, "NVFP4", 96, [24])
    x = random_x(rng, (4, 96), "bfloat16")
    plain, method = case.method(), LinearMethod("NVFP4_AWQ", 96, [24])
    assert not method.checkpoint_params["pre_quant_scale"].required
    prepared = method.prepare(case.listed())
    assert "pre_quant_scale" not in prepared
    np.testing.assert_array_equal(method(x, prepared), plain(x, plain.prepare(case.listed())))


def test_reload_in_place_and_ops_linear(rng):
    case = smoothed(rng, random_case(rng, "NVFP4_AWQ", 96, [24]))
    method = case.method(dtype="float32")
    params = method.prepare(case.listed())
    assert params["pre_quant_scale"].dtype == np.float32
    other = smoothed(rng, random_case(rng, "NVFP4_AWQ", 96, [24]))
    assert method.prepare(other.listed(), params) is params
    x = random_x(rng, (4, 96), "float32")
    y = ops.linear(x, params, "NVFP4_AWQ", [24])
    assert_close(y, other.expected(x), "float32")


def test_tuning_has_memory_for_the_smoothed_x(rng):
    case = smoothed(rng, random_case(rng, "NVFP4_AWQ", 96, [24]))
    method = case.method()
    params = method.prepare(case.listed())
    assert {row.kernel for row in method.tune([3], params)} >= {"cpu:portable"}
    check(case, random_x(rng, (3, 96), "bfloat16"), "bfloat16", "exact")


def test_bad_factors_are_refused_by_name(rng):
    case = smoothed(rng, random_case(rng, "NVFP4_AWQ", 96, [24, 8]))
    method, params = case.method(), case.listed()

    def refuse(message, scale, error=ValueError):
        with pytest.raises(error, match=f"^pre_quant_scale: {message}"):
            method.prepare(params | {"pre_quant_scale": scale})

    good = reference.as_float32(case.parts[0]["pre_quant_scale"])
    refuse("expected the same for all partitions, got .* at index 7", [good, good + (np.arange(96) == 7)])
    refuse("expected finite values, got nan at index 5", np.where(np.arange(96) == 5, np.nan, good))
    refuse("expected finite values, got inf", [good, np.full(96, np.inf, np.float32)])
    refuse(r"expected 96 values, got shape \[95\]", good[:95])
    refuse("expected float32, bfloat16, float16 or float64, got int32", good.astype(np.int32), TypeError)
    refuse("expected a contiguous tensor", np.repeat(good, 2)[::2], BufferError)
    with pytest.raises(ValueError, match="'pre_quant_scale' does not belong to a linear of NVFP4"):
        LinearMethod("NVFP4", 96, [24, 8]).prepare(params)
    with pytest.raises(ValueError, match=r'params\["pre_quant_scale"\]: expected .* \[96\], got .* \[95\]'):
        method(np.zeros((1, 96), np.uint16), method.prepare(params) | {"pre_quant_scale": good[:95].copy()})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compute", ["exact", "fp8"])
@pytest.mark.parametrize("group_size", [None, 16])
def test_fp8_activations_under_a_static_scale(rng, compute, dtype, group_size):
    case = random_case(rng, "W4A8_NVFP4_FP8", 288, [40, 24], group_size)
    assert case.method().group_size == (group_size or 32)
    for tokens in (1, 3, 300):
        check(case, random_x(rng, (tokens, 288), dtype), dtype, compute)
    dynamic = random_case(rng, "W4A8_NVFP4_FP8", 288, [40, 24], group_size, input_scale=False)
    check(dynamic, random_x(rng, (5, 288), dtype), dtype, compute)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_takes_fp8_activations_and_nvfp4_weights(rng, monkeypatch, kernel):
    case = random_case(rng, "W4A8_NVFP4_FP8", 544, [70])
    if dict(case.method()._plan.explain())[f"cpu:{kernel}"]:
        pytest.skip(f"this CPU does not run {kernel}")
    monkeypatch.setenv("MOQEXT_KERNEL", f"cpu:{kernel}")
    for tokens in (1, 2, 3, 4, 5, 33, 260):
        check(case, random_x(rng, (tokens, 544), "bfloat16"), "bfloat16", "exact")


def test_there_are_no_nvfp4_activations_of_it():
    with pytest.raises(UnsupportedQuantization, match='compute "fp4" needs NVFP4 with groups of 16'):
        LinearMethod("W4A8_NVFP4_FP8", 64, [8], group_size=16, compute="fp4")


def as_awq(directory, target, scale):
    """A genuine NVFP4 checkpoint whose o_proj has a pre_quant_scale, as an AWQ export of it would."""
    shutil.copytree(directory, target)
    for name in ("config.json", "hf_quant_config.json"):
        text = (target / name).read_text()
        (target / name).write_text(text.replace('"NVFP4"', '"NVFP4_AWQ"'))
    path = target / "model.safetensors"
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header, data = json.loads(blob[8 : 8 + size]), blob[8 + size :]
    header[f"{O_PROJ}.pre_quant_scale"] = {
        "dtype": "BF16",
        "shape": list(scale.shape),
        "data_offsets": [len(data), len(data) + scale.nbytes],
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data + scale.tobytes())


def test_a_checkpoint_hands_the_factor_over(data, tmp_path, rng, capsys):
    scale = reference.encode(np.exp2(rng.uniform(-2, 2, 128)).astype(np.float32), "bfloat16")
    as_awq(data / "checkpoints" / "llama_nvfp4_kvfp8", tmp_path / "awq", scale)
    with (
        Checkpoint(tmp_path / "awq") as checkpoint,
        Checkpoint(data / "checkpoints" / "llama_nvfp4_kvfp8") as plain,
    ):
        assert checkpoint.layer(O_PROJ).quant_algo == "NVFP4_AWQ"
        layer, without = checkpoint.load(O_PROJ), plain.load(O_PROJ)
        x = random_x(rng, (4, 128), "bfloat16")
        product = (reference.as_float32(x) * reference.as_float32(scale)).astype(np.float64)
        by_hand = reference.encode(product, "bfloat16")
        np.testing.assert_array_equal(layer(x), without(by_hand))
        with pytest.raises(CheckpointError, match=r"pre_quant_scale: .*has none, but another layer"):
            checkpoint.load([O_PROJ, "model.layers.0.self_attn.q_proj"])
    assert main(["verify", str(tmp_path / "awq"), "--json"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"ok"}

"""`Checkpoint.plan_repair`: damage of every kind is mended, or refused with a reason."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import moqext
from moqext.__main__ import main
from moqext.reader.problems import CODES

from .damaged import Damaged

NVFP4, FP8 = "checkpoints/llama_nvfp4_kvfp8", "checkpoints/llama_fp8_kvfp8"
MLP, ATTENTION = "model.layers.0.mlp", "model.layers.0.self_attn"
UP, DOWN, Q, K, V = f"{MLP}.up_proj", f"{MLP}.down_proj", *(f"{ATTENTION}.{each}_proj" for each in "qkv")
ONE, NAN = 0x38, 0x7F
"""Bits of 1 and of NaN in E4M3."""


@pytest.fixture
def sound(data):
    return lambda name: Damaged(data / name)


def raw(directory):
    """Type, shape and bytes of every tensor, as stored."""
    with moqext.Checkpoint(directory) as checkpoint:
        files = checkpoint.files
        return {
            name: (info.dtype, info.shape, files.raw(name, 0, info.nbytes).tobytes())
            for name, info in files.tensors.items()
        }


def codes(directory):
    with moqext.Checkpoint(directory) as checkpoint:
        checkpoint.findings(block_scales=True)
        return {problem.code for problem in checkpoint.problems}


def quantized(model):
    """The modules with two levels of scales."""
    return [name.removesuffix(".weight_scale_2") for name in model.tensors if name.endswith("_scale_2")]


def decoded(scales):
    return moqext.ops.decode(scales, "e4m3")


def repair(model, tmp_path, *, ended, options=None, **arguments):
    """Saves and repairs a model, checks that findings of these codes have ended; the plan and the target."""
    source = model.save(tmp_path / "in")
    before = raw(source)
    out = tmp_path / "out"
    with moqext.Checkpoint(source, **(options or {})) as checkpoint:
        plan = checkpoint.plan_repair(**arguments)
        assert not out.exists()
        result = plan.write(out)
    assert {change.code for change in plan.changes} == ended
    assert not ended & codes(out)
    assert result.tensors == len(raw(out))
    assert raw(source) == before
    assert (out / "tokenizer.json").read_text() == '{"model": {}}'
    with moqext.Checkpoint(out) as checkpoint:
        again = checkpoint.plan_repair()
        assert again.changes == ()
        with pytest.raises(moqext.CheckpointError, match="nothing to repair"):
            again.write(tmp_path / "again")
    assert main(["verify", str(out)]) == 0
    return plan, out


def refused(model, tmp_path, code, reason, **arguments):
    """Checks that one finding is left, for a reason, and that nothing is written."""
    source = model.save(tmp_path / "in")
    with moqext.Checkpoint(source) as checkpoint:
        plan = checkpoint.plan_repair(**arguments)
        (told,) = {why for problem, why in plan.left if problem.code == code}
        assert reason in told
        if CODES[code].severity == "error":
            with pytest.raises(moqext.CheckpointError, match=f"cannot be repaired: .*{code}"):
                plan.write(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return plan


# The order of scales and codes


def test_swizzled_scales_that_a_shape_proves_are_written_row_by_row(sound, data, tmp_path):
    model = sound(NVFP4)
    for module in quantized(model):
        model.swizzle(module)
    assert model[f"{K}.weight_scale"].shape == (128, 8)
    _, out = repair(model, tmp_path, ended={"swizzled_scales"})
    assert raw(out) == raw(data / NVFP4)


def test_scales_and_nibbles_that_the_caller_tells(sound, data, tmp_path, monkeypatch):
    monkeypatch.setattr("moqext.tools.repair.draft.CHUNK", 1 << 10)  # several pieces of each tensor
    model = sound(NVFP4)
    assert len(quantized(model)) == 7
    for module in quantized(model):
        model.swizzle(module)
        model.exchange(module)
    options = {"scale_layout": "swizzled", "nibbles": "high"}
    _, out = repair(model, tmp_path, ended={"swizzled_scales", "exchanged_nibbles"}, options=options)
    assert raw(out) == raw(data / NVFP4)


def test_stacks_of_experts_are_written_in_plain_order(data, tmp_path, rng):
    """Rows of each expert are padded for themselves."""
    model = Damaged(data / "exports/qwen3moe_mixed")
    stack = "model.layers.0.mlp.experts.down_proj"
    model.tensors = {name: each for name, each in model.tensors.items() if ".mlp.experts." not in name}
    weight = rng.integers(0, 256, (3, 40, 24), dtype=np.uint8)
    scales = rng.integers(1, 0x7F, (3, 40, 3), dtype=np.uint8)
    model.put(stack, "U8", weight)
    padded = np.asarray(moqext.ops.swizzle_block_scales(scales))
    model.put(f"{stack}_weight_scale", "F8_E4M3", padded)
    model.put(f"{stack}_weight_scale_2", "F32", np.full(3, 0.01, np.float32))
    source = model.save(tmp_path / "in")
    with moqext.Checkpoint(source) as checkpoint:
        assert "swizzled_scales" in {problem.code for problem in checkpoint.problems}
        draft = checkpoint.plan_repair()._draft
        job = draft.outputs[f"{stack}_weight_scale"].job(draft.checkpoint)
        assert job.tensors[0].shape == scales.shape
        assert b"".join(np.asarray(rows).tobytes() for _, rows in job.produce()) == scales.tobytes()


def test_an_order_that_nothing_tells_is_refused(sound, rng, tmp_path):
    model = sound(NVFP4)
    rows, columns = np.exp2(rng.uniform(0, 6, (256, 1))), np.exp2(rng.uniform(0, 2, (1, 8)))
    model.put(f"{UP}.weight_scale", "F8_E4M3", moqext.ops.encode((rows * columns).astype(np.float32), "e4m3"))
    model.swizzle(UP)
    refused(model, tmp_path, "doubtful_scale_layout", "with that option")


def test_an_order_that_the_caller_calls_plain_stays(sound, rng, data, tmp_path):
    model = sound(NVFP4)
    rows, columns = np.exp2(rng.uniform(0, 6, (256, 1))), np.exp2(rng.uniform(0, 2, (1, 8)))
    model.put(f"{UP}.weight_scale", "F8_E4M3", moqext.ops.encode((rows * columns).astype(np.float32), "e4m3"))
    model.swizzle(UP)
    model.rename(f"{K}.k_scale", f"{K}.output_scale")
    source = model.save(tmp_path / "in")
    with moqext.Checkpoint(source, scale_layout="linear") as checkpoint:
        checkpoint.plan_repair().write(tmp_path / "out")
    assert raw(tmp_path / "out")[f"{UP}.weight_scale"] == raw(source)[f"{UP}.weight_scale"]


def test_what_markers_tell_stays_for_comfyui(sound, tmp_path):
    model = sound(NVFP4)
    model.swizzle(UP)
    model.exchange(UP)
    mark = np.frombuffer(b'{"format": "nvfp4"}', np.uint8)
    model.put(f"{UP}.comfy_quant", "U8", mark)
    plan = refused(model, tmp_path, "swizzled_scales", "a marker")
    assert {problem.code for problem, _ in plan.left} == {"swizzled_scales", "exchanged_nibbles"}
    assert plan.changes == ()


# Inner state of the quantizer


def leave_behind(model, module, *, halve):
    """An export of compressed weights: scales under a larger second level, the true ones beside them."""
    scales, second = model[f"{module}.weight_scale"], model[f"{module}.weight_scale_2"]
    model.put(f"{module}.weight_quantizer._double_scale", "F32", second)
    model.put(f"{module}.weight_scale_2", "F32", np.float32(4) * second)
    if halve:
        model.put(f"{module}.weight_quantizer._scale", "F8_E4M3", scales)
        model.put(f"{module}.weight_scale", "F8_E4M3", scales[:, ::2].copy())


def test_halved_scales_are_those_left_beside(sound, data, tmp_path):
    model = sound(NVFP4)
    for module in (UP, DOWN):
        leave_behind(model, module, halve=True)
    ended = {"partial_scales", "leftover_tensor", "conflicting_tensors"}
    _, out = repair(model, tmp_path, ended=ended)
    assert raw(out) == raw(data / NVFP4)


@pytest.mark.parametrize("lost", ["_scale", "_double_scale"])
def test_halved_scales_without_the_others_are_refused(sound, tmp_path, lost):
    model = sound(NVFP4)
    leave_behind(model, UP, halve=True)
    del model.tensors[f"{UP}.weight_quantizer.{lost}"]
    if lost == "_scale":
        model.put(f"{UP}.weight_scale", "F8_E4M3", model[f"{UP}.weight_scale"])
    refused(model, tmp_path, "partial_scales", f"weight_quantizer.{lost}")


def test_scales_left_beside_in_another_number_are_refused(sound, tmp_path):
    model = sound(NVFP4)
    leave_behind(model, UP, halve=True)
    whole = model[f"{UP}.weight_quantizer._scale"]
    model.put(f"{UP}.weight_quantizer._scale", "F8_E4M3", np.concatenate([whole, whole[:3]]))
    refused(model, tmp_path, "partial_scales", "has not the scales of a weight [256, 128]")


def test_block_scales_tell_which_second_level_is_theirs(sound, data, tmp_path):
    """One module has block scales of its own second level, another those of a common one."""
    model = sound(NVFP4)
    assert decoded(model[f"{UP}.weight_scale"]).max() == 448
    leave_behind(model, UP, halve=False)
    own = model[f"{DOWN}.weight_scale_2"]
    scales = decoded(model[f"{DOWN}.weight_scale"]) / np.float32(4)
    model.put(f"{DOWN}.weight_scale", "F8_E4M3", moqext.ops.encode(scales, "e4m3"))
    model.put(f"{DOWN}.weight_scale_2", "F32", np.float32(4) * own)
    model.put(f"{DOWN}.weight_quantizer._double_scale", "F32", own)
    expected = {name: model.tensors[name] for name in (f"{DOWN}.weight_scale", f"{DOWN}.weight_scale_2")}
    _, out = repair(model, tmp_path, ended={"conflicting_tensors", "leftover_tensor"})
    genuine = raw(data / NVFP4)
    got = raw(out)
    assert got.keys() == genuine.keys()
    for name, (dtype, shape, content) in got.items():
        assert (dtype, shape) == genuine[name][:2]
        wanted = expected[name][1].tobytes() if name in expected else genuine[name][2]
        assert content == wanted, name


@pytest.mark.parametrize("ratio", [0.995, 0.25])
def test_block_scales_that_fit_neither_or_both_are_refused(sound, tmp_path, ratio):
    model = sound(NVFP4)
    second = model[f"{UP}.weight_scale_2"]
    model.put(f"{UP}.weight_quantizer._double_scale", "F32", np.float32(ratio) * second)
    if ratio < 0.9:
        scales = decoded(model[f"{UP}.weight_scale"]) / np.float32(8)
        model.put(f"{UP}.weight_scale", "F8_E4M3", moqext.ops.encode(scales, "e4m3"))
    refused(model, tmp_path, "conflicting_tensors", "which of the two is meant")


def test_a_leftover_that_may_count_is_kept(sound, tmp_path):
    model = sound(NVFP4)
    model.put(f"{UP}.input_quantizer._amax", "F32", np.float32(3))
    model.put(f"{UP}.input_quantizer._pre_quant_scale", "BF16", np.full(128, 0x3F80, np.uint16))
    source = model.save(tmp_path / "in")
    with moqext.Checkpoint(source) as checkpoint:
        plan = checkpoint.plan_repair()
        plan.write(tmp_path / "out")
    assert [change.subject for change in plan.changes] == [f"{UP}.input_quantizer._amax"]
    assert [why for _, why in plan.left] == ["whether the result needs it is not known"]
    got, before = raw(tmp_path / "out"), raw(source)
    assert before.keys() - got.keys() == {f"{UP}.input_quantizer._amax"}


# Names


def test_names_of_other_producers(data, tmp_path):
    """Square blocks get the shape of ModelOpt's own."""
    model = Damaged(data / "checkpoints/llama_fp8_pb_wo")
    for spelled, module in (("weight_scale_inv", UP), ("scale_weight", DOWN), ("scale", Q)):
        name = f"{module}.weight_scale"
        dtype, scales = model.tensors.pop(name)
        two = scales.reshape(scales.shape[0], -1) if scales.ndim == 4 else scales
        model.put(f"{module}.{spelled}", dtype, two)
    _, out = repair(model, tmp_path, ended={"foreign_scale_name"})
    genuine, got = raw(data / "checkpoints/llama_fp8_pb_wo"), raw(out)
    assert got == genuine


def test_names_that_the_configuration_expects_stay(data, tmp_path):
    model = Damaged(data / "checkpoints/llama_fp8_pb_wo")
    model.rename(f"{UP}.weight_scale", f"{UP}.weight_scale_inv")
    document = model.configs["config.json"]["quantization_config"]
    document.update(quant_method="fp8", weight_block_size=[128, 128], moe_quant_algo="NVFP4")
    document.pop("config_groups", None)
    source = model.save(tmp_path / "in")
    with moqext.Checkpoint(source) as checkpoint:
        plan = checkpoint.plan_repair()
    assert "foreign_scale_name" not in {change.code for change in plan.changes}
    assert [why for problem, why in plan.left if problem.code == "foreign_scale_name"] == [
        "quant_method fp8 has that name"
    ]


def test_a_scale_that_is_there_twice_is_written_once(sound, data, tmp_path):
    model = sound(FP8)
    model.put(f"{K}.weight_scale_inv", *model.tensors[f"{K}.weight_scale"])
    model.put(f"{ATTENTION}.k_scale", *model.tensors[f"{K}.k_scale"])
    _, out = repair(model, tmp_path, ended={"repeated_scale"})
    assert raw(out) == raw(data / FP8)


def test_two_scales_that_differ_are_refused(sound, tmp_path):
    model = sound(FP8)
    model.put(f"{K}.weight_scale_inv", "F32", np.float32(7))
    refused(model, tmp_path, "conflicting_tensors", "")


@pytest.mark.parametrize("old", ["kv_scale", "kv_cache_scaling_factor", "output_scale", "qkv_proj"])
def test_cache_scales_under_old_names(sound, data, tmp_path, old):
    model = sound(NVFP4)
    if old == "output_scale":
        for name in (K, V):
            model.rename(f"{name}.{name[-6]}_scale", f"{name}.output_scale")
    elif old == "qkv_proj":
        for name in "kv":
            model.rename(f"{ATTENTION}.{name}_proj.{name}_scale", f"{ATTENTION}.qkv_proj.{name}_scale")
    else:
        model.rename(f"{K}.k_scale", f"{ATTENTION}.{old}")
        del model.tensors[f"{V}.v_scale"]
    _, out = repair(model, tmp_path, ended={"old_kv_scale_name"})
    genuine, got = raw(data / NVFP4), raw(out)
    if old.startswith("kv_"):
        genuine[f"{V}.v_scale"] = genuine[f"{K}.k_scale"]
    assert got == genuine


def test_a_cache_scale_for_both_beside_one_of_its_own(sound, data, tmp_path):
    """The scale of keys is there twice; that of values only in the one for both."""
    model = sound(NVFP4)
    model.put(f"{ATTENTION}.kv_scale", *model.tensors[f"{K}.k_scale"])
    del model.tensors[f"{V}.v_scale"]
    _, out = repair(model, tmp_path, ended={"old_kv_scale_name", "repeated_scale"})
    genuine, got = raw(data / NVFP4), raw(out)
    genuine[f"{V}.v_scale"] = genuine[f"{K}.k_scale"]
    assert got == genuine


def test_cache_scales_under_two_names_that_differ_are_refused(sound, tmp_path):
    model = sound(NVFP4)
    model.put(f"{ATTENTION}.kv_scale", "F32", np.float32(7))
    refused(model, tmp_path, "conflicting_tensors", "")


# Values of scales


def empty_blocks(model, module, scale, code, where):
    model[f"{module}.weight_scale"][where] = scale
    rows, columns = where
    model[f"{module}.weight"][rows, 8 * columns : 8 * columns + 8] = code


@pytest.mark.parametrize("code", [0x00, 0x88, 0x80])
def test_nan_scales_of_empty_blocks(sound, data, tmp_path, code):
    """No code is touched: zeros under any scale are zeros."""
    model = sound(NVFP4)
    for where in ((0, 0), (17, 5), (255, 7)):
        empty_blocks(model, UP, NAN if where[0] else 0xFF, code, where)
    plan, out = repair(model, tmp_path, ended={"scale_not_finite"})
    assert [change.message for change in plan.changes] == ["3 NaN scales of empty blocks are 1 now"]
    before, got = raw(tmp_path / "in"), raw(out)
    assert got[f"{UP}.weight"] == before[f"{UP}.weight"]
    assert {name for name in got if got[name] != before[name]} == {f"{UP}.weight_scale"}
    scales = np.frombuffer(got[f"{UP}.weight_scale"][2], np.uint8).reshape(256, 8)
    old = np.frombuffer(before[f"{UP}.weight_scale"][2], np.uint8).reshape(256, 8)
    assert [scales[where] for where in ((0, 0), (17, 5), (255, 7))] == [ONE] * 3
    assert (scales != old).sum() == 3
    with moqext.Checkpoint(out) as checkpoint:
        assert not checkpoint.dequantize(UP)[17, 80:96].any()


def test_blocks_of_nan_are_zeros_only_where_the_caller_says_so(sound, tmp_path):
    model = sound(NVFP4)
    empty_blocks(model, UP, NAN, 0x77, (3, 2))
    empty_blocks(model, UP, NAN, 0, (4, 2))
    refused(model, tmp_path, "scale_not_finite", "1 of them are over codes that a quantizer makes of NaN")
    shutil.rmtree(tmp_path / "in")
    plan, out = repair(model, tmp_path, ended={"scale_not_finite"}, nan_blocks="zero")
    told = "2 NaN scales of empty blocks are 1 now; the codes of 1 are 0 now"
    assert [change.message for change in plan.changes] == [told]
    before, got = raw(tmp_path / "in"), raw(out)
    weight, old = (
        np.frombuffer(each[f"{UP}.weight"][2], np.uint8).reshape(256, 64) for each in (got, before)
    )
    assert not weight[3, 16:24].any()
    assert (weight != old).sum() == 8


def test_nan_over_codes_that_are_numbers_is_refused(sound, tmp_path):
    model = sound(NVFP4)
    empty_blocks(model, UP, NAN, 0, (3, 2))
    empty_blocks(model, UP, NAN, 0x01, (4, 2))
    refused(
        model, tmp_path, "scale_not_finite", "1 of them are over codes that are numbers", nan_blocks="zero"
    )


@pytest.mark.parametrize("tensor", [f"{UP}.weight_scale_2", f"{UP}.input_scale", f"{K}.k_scale"])
def test_a_single_scale_that_is_nan_is_refused(sound, tmp_path, tensor):
    model = sound(NVFP4)
    model.put(tensor, "F32", np.float32("nan"))
    refused(model, tmp_path, "scale_not_finite", "nothing else in the files")


def test_nan_scales_in_swizzled_order_under_an_old_name(sound, data, tmp_path):
    """Edits of one tensor add up."""
    model = sound("checkpoints/llama_mxfp8")
    name = f"{K}.weight_scale"
    dtype, scales = model.tensors[name]
    assert scales.shape == (64, 4)
    scales = scales.copy()
    scales[5, 1] = 0xFF
    model[f"{K}.weight"][5, 32:64] = 0x80
    expected = scales.copy()
    expected[5, 1] = 0
    model.put(name, dtype, scales)
    model.swizzle(K)
    model.rename(name, f"{K}.weight_scale_inv")
    ended = {"scale_not_finite", "swizzled_scales", "foreign_scale_name"}
    _, out = repair(model, tmp_path, ended=ended)
    assert raw(out)[name] == (dtype, (64, 4), expected.tobytes())


@pytest.mark.parametrize("case", ["nvfp4_zero", "fp8_zero"])
def test_layers_of_zeros_are_written_as_zeros(data, tmp_path, case):
    """Genuine exports: NaN in codes and scales under a scale of zero."""
    before = moqext.Checkpoint(data / "exports" / case)
    model = Damaged(data / "exports" / case)
    _, out = repair(model, tmp_path, ended={"all_zero_layer"})
    with moqext.Checkpoint(out) as after:
        zeros = 0
        for layer in before.layers():
            expected = before.dequantize(layer)
            np.testing.assert_array_equal(after.dequantize(layer.name), expected)
            zeros += not expected.any()
        assert zeros
        for name, info in after.tensors.items():
            if "scale" in name:
                assert np.isfinite(np.asarray(after.tensor(name), np.float32)).all(), name
            if info.dtype == "F8_E4M3" and name.endswith(".weight"):
                assert not (after.tensor(name, raw=True) & 0x7F == NAN).any()


def test_a_layer_of_zeros_takes_the_scale_of_those_it_is_fused_with(sound, tmp_path):
    """Engines multiply fused projections with the largest of their scales."""
    model = sound(FP8)
    model.put(f"{Q}.weight_scale", "F32", np.float32(0))
    model.put(f"{Q}.weight", "F8_E4M3", np.full_like(model[f"{Q}.weight"], 0xFF))
    _, out = repair(model, tmp_path, ended={"all_zero_layer"})
    with moqext.Checkpoint(out) as checkpoint:
        scales = [float(checkpoint.tensor(f"{name}.weight_scale")) for name in (Q, K, V)]
    assert scales[0] == max(scales[1:])


# Lists of the configuration


def lists(directory):
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    own = json.loads((directory / "hf_quant_config.json").read_text())["quantization"]
    return config["ignore"], own["exclude_modules"]


def test_an_exclusion_that_covers_a_quantized_layer_makes_way(sound, tmp_path):
    model = sound(NVFP4)
    model.plain(f"{MLP}.gate_proj", (256, 128))
    model.exclude("*.mlp.*")
    plan, out = repair(model, tmp_path, ended={"excluded_but_quantized"})
    expected = ["lm_head", "model.embed_tokens", f"{MLP}.gate_proj"]
    assert lists(out) == (expected, expected)
    assert "'*.mlp.*' excluded it, and makes way for names" in plan.changes[0].message
    before = {name: json.loads((tmp_path / "in" / name).read_text()) for name in model.configs}
    before["config.json"]["quantization_config"]["ignore"] = expected
    before["hf_quant_config.json"]["quantization"]["exclude_modules"] = expected
    assert before == {name: json.loads((out / name).read_text()) for name in model.configs}


def test_a_plain_layer_that_no_list_names_is_excluded(sound, tmp_path):
    model = sound(NVFP4)
    model.plain(DOWN, (128, 256))
    _, out = repair(model, tmp_path, ended={"stored_unquantized"})
    assert lists(out)[0] == lists(out)[1] == ["lm_head", "model.embed_tokens", DOWN]


def test_plain_experts_are_excluded_by_their_container(data, tmp_path):
    model = Damaged(data / "checkpoints/qwen3moe_nvfp4")
    experts = sorted({name.rsplit(".", 1)[0] for name in model.tensors if "layers.0.mlp.experts." in name})
    with moqext.Checkpoint(data / "checkpoints/qwen3moe_nvfp4") as checkpoint:
        for name in experts:
            model.plain(name, checkpoint.layer(name).shape)
    _, out = repair(model, tmp_path, ended={"stored_unquantized"})
    added = [entry for entry in lists(out)[0] if "experts" in entry]
    assert added == ["model.layers.0.mlp.experts"]


def test_two_lists_that_disagree_become_one(sound, tmp_path):
    model = sound(NVFP4)
    model.configs["hf_quant_config.json"]["quantization"]["exclude_modules"] = ["lm_head"]
    _, out = repair(model, tmp_path, ended={"config_conflict"})
    assert lists(out)[0] == lists(out)[1] == ["lm_head", "model.embed_tokens"]


def test_other_disagreements_of_the_files_stay(sound, tmp_path):
    model = sound(NVFP4)
    model.exclude(UP)
    model.configs["hf_quant_config.json"]["quantization"]["kv_cache_quant_algo"] = "NVFP4"
    source = model.save(tmp_path / "in")
    with moqext.Checkpoint(source) as checkpoint:
        plan = checkpoint.plan_repair()
        plan.write(tmp_path / "out")
    assert {problem.code for problem, _ in plan.left} == {"config_conflict"}
    assert codes(tmp_path / "out") == {"config_conflict"}


def test_expressions_of_other_producers_become_names(sound, tmp_path):
    model = sound(NVFP4)
    model.plain(DOWN, (128, 256))
    model.exclude("re:.*down_proj")
    _, out = repair(model, tmp_path, ended={"regex_exclusion", "stored_unquantized"})
    assert lists(out)[0] == lists(out)[1] == ["lm_head", "model.embed_tokens", DOWN]


def test_lists_of_mixed_precision(data, tmp_path):
    """A layer that is not listed, one that is excluded, and one that is listed and plain."""
    model = Damaged(data / "exports/mixed_fp8_nvfp4")
    documents = [
        model.configs["config.json"]["quantization_config"],
        model.configs["hf_quant_config.json"]["quantization"],
    ]
    names = list(documents[1]["quantized_layers"])
    unlisted, excluded, plain = names[0], names[1], names[2]
    before = {name: documents[1]["quantized_layers"][name] for name in names}
    with moqext.Checkpoint(data / "exports/mixed_fp8_nvfp4") as checkpoint:
        model.plain(plain, checkpoint.layer(plain).shape)
    for document in documents:
        for name in (unlisted, excluded):
            document.get("quantized_layers", {}).pop(name, None)
    documents[0]["ignore"] = [excluded]
    documents[1]["exclude_modules"] = [excluded]
    source = model.save(tmp_path / "in")
    with moqext.Checkpoint(source) as checkpoint:
        plan = checkpoint.plan_repair()
        assert {"unlisted_but_quantized", "excluded_but_quantized"} <= {c.code for c in plan.changes}
        plan.write(tmp_path / "out")
    own = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    assert {name: layer["quant_algo"] for name, layer in own["quantized_layers"].items()} == {
        name: layer["quant_algo"] for name, layer in before.items() if name != plain
    }
    assert own["exclude_modules"] == []
    left = codes(tmp_path / "out")
    assert not left & {"unlisted_but_quantized", "excluded_but_quantized", "stored_unquantized"}


def configured(directory):
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    return config, json.loads((directory / "hf_quant_config.json").read_text())["quantization"]


@pytest.mark.parametrize("entries", [["*.up*", "*.gate*"], ["*.mlp.*"]], ids=["of its own", "of others too"])
def test_a_layer_of_another_format_makes_mixed_precision(sound, data, tmp_path, entries):
    """One algorithm held for all layers, and the list could not say what this one is."""
    model = sound(NVFP4)
    other = Damaged(data / FP8)
    for name in [name for name in model.tensors if name.startswith(f"{UP}.")]:
        del model.tensors[name]
    model.tensors |= {name: each for name, each in other.tensors.items() if name.startswith(f"{UP}.")}
    model.exclude(*entries)
    with moqext.Checkpoint(model.save(tmp_path / "in")) as checkpoint:
        plan = checkpoint.plan_repair()
        plan.write(tmp_path / "out")
    assert f"{MLP}.gate_proj" in [change.subject for change in plan.changes]
    for document in configured(tmp_path / "out"):
        assert document["quant_algo"] == "MIXED_PRECISION"
        assert document["quantized_layers"][UP] == {"quant_algo": "FP8"}
        assert document["quantized_layers"][DOWN] == {"quant_algo": "NVFP4", "group_size": 16}
    assert lists(tmp_path / "out")[0] == ["lm_head", "model.embed_tokens"]
    assert not {"excluded_but_quantized", "algo_conflict"} & codes(tmp_path / "out")
    assert main(["verify", str(tmp_path / "out")]) == 0


# Algorithms of the configuration


def reconfigure(model, file=None, **fields):
    """Sets fields in both documents, or in one; the inner one has the names of hf_quant_config.json."""
    documents = {
        "config.json": model.configs["config.json"]["quantization_config"],
        "hf_quant_config.json": model.configs["hf_quant_config.json"]["quantization"],
    }
    for name in documents if file is None else [file]:
        documents[name].update(fields)


@pytest.mark.parametrize(
    ("source", "file", "fields", "ended"),
    [
        (NVFP4, None, {"quant_algo": "FP8"}, {"algo_conflict"}),
        (FP8, None, {"quant_algo": "NVFP4", "group_size": 16}, {"algo_conflict"}),
        (NVFP4, "hf_quant_config.json", {"quant_algo": "FP8"}, {"config_conflict"}),
        (NVFP4, "hf_quant_config.json", {"group_size": 32}, {"config_conflict"}),
        (NVFP4, "hf_quant_config.json", {"kv_cache_quant_algo": None}, {"config_conflict"}),
        (NVFP4, "config.json", {"kv_cache_scheme": None}, {"config_conflict"}),
    ],
)
def test_tensors_decide_what_the_configuration_says(sound, data, tmp_path, source, file, fields, ended):
    model = sound(source)
    before = configured(data / source)
    reconfigure(model, file, runtime={"kept": True}, **fields)
    if "quant_algo" in fields:
        model.configs["config.json"]["quantization_config"].pop("config_groups", None)
    _, out = repair(model, tmp_path, ended=ended)
    assert raw(out) == raw(data / source)
    kept = {"runtime": {"kept": True}}
    for name, document, was in zip(model.configs, configured(out), before, strict=True):
        assert document == was | (kept if file in (None, name) else {})


def test_groups_of_another_size_are_configured_so(data, tmp_path):
    source = data / "exports/w4a16_nvfp4_group_32"
    model = Damaged(source)
    reconfigure(model, "hf_quant_config.json", group_size=16)
    weights = model.configs["config.json"]["quantization_config"]["config_groups"]["group_0"]["weights"]
    weights["group_size"] = 16
    _, out = repair(model, tmp_path, ended={"group_size_conflict"})
    assert configured(out) == configured(source)


@pytest.mark.parametrize("name", [NVFP4, FP8, "checkpoints/qwen3moe_nvfp4", "exports/mixed_fp8_nvfp4"])
def test_a_lost_configuration_is_written_from_the_tensors(data, tmp_path, name):
    model = Damaged(data / name)
    before = configured(data / name)
    del model.configs["config.json"]["quantization_config"], model.configs["hf_quant_config.json"]
    plan, out = repair(model, tmp_path, ended={"no_quant_config"})
    assert "written from the tensors: " in plan.changes[0].message
    with moqext.Checkpoint(data / name) as was, moqext.Checkpoint(out) as now:
        assert [(each.name, each.quant_algo) for each in was.layers()] == [
            (each.name, each.quant_algo) for each in now.layers()
        ]
    for document, old in zip(configured(out), before, strict=True):
        assert document["quant_algo"] == old["quant_algo"]


def test_what_comfyui_needs_no_configuration_for_gets_none(sound, tmp_path):
    model = sound(NVFP4)
    model.swizzle(UP)
    model.exchange(UP)
    model.put(f"{UP}.comfy_quant", "U8", np.frombuffer(b'{"format": "nvfp4"}', np.uint8))
    del model.configs["config.json"]["quantization_config"], model.configs["hf_quant_config.json"]
    refused(model, tmp_path, "no_quant_config", "ComfyUI says it beside the tensors")


def test_a_layer_list_of_earlier_exports_is_not_written_again(sound, tmp_path):
    model = sound(NVFP4)
    reconfigure(model, quant_algo="FP8")
    model.configs["quant_cfg.json"] = {"quantized_layers": {}}
    refused(model, tmp_path, "algo_conflict", "quant_cfg.json, of exports before 0.27")


def test_codes_of_no_layer_leave_the_algorithm_open(sound, tmp_path):
    model = sound(NVFP4)
    reconfigure(model, quant_algo="FP8")
    model.put("model.layers.0.codes", "F8_E4M3", np.zeros((4, 4), np.uint8))
    refused(model, tmp_path, "algo_conflict", "model.layers.0.codes")


def test_damaged_tensors_decide_nothing(sound, tmp_path):
    model = sound(NVFP4)
    reconfigure(model, quant_algo="FP8")
    del model.tensors[f"{UP}.weight_scale"]
    refused(model, tmp_path, "algo_conflict", f"missing_scale of {UP}")


# Files


def test_a_shard_that_no_index_names_is_taken_in(data, tmp_path):
    source = Path(shutil.copytree(data / "exports/nvfp4_sharded", tmp_path / "in"))
    index = json.loads((source / "model.safetensors.index.json").read_text())
    lost = "model-00002-of-00005.safetensors"
    names = [name for name, file in index["weight_map"].items() if file == lost]
    for name in names:
        del index["weight_map"][name]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with moqext.Checkpoint(source) as checkpoint:
        plan = checkpoint.plan_repair()
        result = plan.write(tmp_path / "out")
    told = [(change.code, change.subject) for change in plan.changes]
    assert ("unread_tensors", lost) in told
    assert len(result.files) == 5
    genuine = json.loads((data / "exports/nvfp4_sharded/model.safetensors.index.json").read_text())
    after = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert after["weight_map"] == genuine["weight_map"]
    assert raw(tmp_path / "out") == raw(data / "exports/nvfp4_sharded")
    assert codes(tmp_path / "out") == codes(data / "exports/nvfp4_sharded")


def test_an_index_that_is_wrong_about_places(sound, data, tmp_path):
    """A tensor that the index lacks, one in another file than it says, and one that is there twice."""
    model = sound(NVFP4)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    model.files = {name: one if ATTENTION in name else two for name in model.tensors}
    model.index = dict(model.files)
    del model.index["model.norm.weight"]
    model.index[f"{UP}.weight"] = one
    _, out = repair(model, tmp_path, ended={"unindexed_tensor", "missing_tensor", "duplicate_tensor"})
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == model.files
    assert raw(out) == raw(data / NVFP4)


def test_a_tensor_that_is_there_twice_is_written_once(data, tmp_path):
    """The one that the index names counts."""
    source = Path(shutil.copytree(data / "exports/nvfp4_sharded", tmp_path / "in"))
    with moqext.Checkpoint(source) as checkpoint:
        norm = checkpoint.tensors["model.norm.weight"]
    others = [path for path in sorted(source.glob("*.safetensors")) if path != norm.file]
    content = others[0].read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = max(each["data_offsets"][1] for name, each in header.items() if name != "__metadata__")
    header["model.norm.weight"] = {
        "dtype": norm.dtype,
        "shape": list(norm.shape),
        "data_offsets": [end, end + norm.nbytes],
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    others[0].write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :] + bytes(norm.nbytes))
    with moqext.Checkpoint(source) as checkpoint:
        plan = checkpoint.plan_repair()
        plan.write(tmp_path / "out")
    assert [(change.code, change.subject) for change in plan.changes] == [
        ("duplicate_tensor", "model.norm.weight")
    ]
    assert raw(tmp_path / "out") == raw(data / "exports/nvfp4_sharded")


def test_a_tensor_that_no_file_has_is_refused(sound, tmp_path):
    model = sound(NVFP4)
    model.files = dict.fromkeys(model.tensors, "a.safetensors")
    model.index = {**model.files, f"{UP}.bias": "a.safetensors"}
    refused(model, tmp_path, "missing_tensor", "none of the other files has it")


def test_a_tensor_that_two_other_files_have_is_refused(sound, tmp_path):
    """The index says a third: which of the two is meant, nothing tells."""
    model = sound(NVFP4)
    name = "model.norm.weight"
    model.files = dict.fromkeys(model.tensors, "a.safetensors")
    model.files["lm_head.weight"] = "c.safetensors"
    model.index = {**model.files, "other": "b.safetensors", name: "c.safetensors"}
    source = model.save(tmp_path / "in")
    one = sound(NVFP4)
    one.tensors = {name: ("BF16", np.zeros_like(model[name])), "other": ("F32", np.zeros(1, np.float32))}
    one.files = dict.fromkeys(one.tensors, "b.safetensors")
    shutil.copy(one.save(tmp_path / "one") / "b.safetensors", source)
    with moqext.Checkpoint(source) as checkpoint:
        (told,) = checkpoint.plan_repair().errors
    assert (told[0].code, told[0].tensor) == ("missing_tensor", name)
    assert told[1] == "none of the other files has it, or two of them have"


def test_a_file_beside_a_single_one_gives_an_index(sound, tmp_path):
    """Readers would take `model.safetensors` for all there is."""
    model = sound(NVFP4)
    model.put("mtp.eh_proj.weight", "BF16", np.full((4, 8), 0x3F80, np.uint16))
    model.files = {"mtp.eh_proj.weight": "mtp.safetensors"}
    source = model.save(tmp_path / "in")
    (source / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with moqext.Checkpoint(source) as checkpoint:
        plan = checkpoint.plan_repair()
        result = plan.write(tmp_path / "out")
    assert {change.code for change in plan.changes} == {
        "unread_tensors",
        "index_ignored",
        "stored_unquantized",
    }
    assert result.files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    with moqext.Checkpoint(tmp_path / "out") as checkpoint:
        assert len(checkpoint.tensors) == len(model.tensors)


def test_a_module_that_is_there_in_two_forms_is_not_chosen_from(sound, tmp_path):
    model = sound(NVFP4)
    model.files = dict.fromkeys(model.tensors, "model-00001-of-00001.safetensors")
    model.index = dict(model.files)
    model.put(f"{UP}.bias", "BF16", np.zeros(256, np.uint16))
    model.files[f"{UP}.bias"] = "other.safetensors"
    source = model.save(tmp_path / "in")
    with moqext.Checkpoint(source) as checkpoint:
        plan = checkpoint.plan_repair()
    ((problem, why),) = plan.left
    assert problem.code == "unread_tensors"
    assert why.startswith(f"{UP}.bias is of a module that the other files have")
    assert plan.changes == ()


def test_holes_are_not_copied(sound, data, tmp_path):
    source = sound(NVFP4).save(tmp_path / "in")
    path = source / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    del header["model.norm.weight"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(content[:8] + text + content[8 + length :])
    with moqext.Checkpoint(source) as checkpoint:
        plan = checkpoint.plan_repair()
        plan.write(tmp_path / "out")
    assert [(change.code, change.subject) for change in plan.changes] == [("hole", "model.safetensors")]
    assert codes(tmp_path / "out") == set()


# Whole or not at all


def test_a_checkpoint_in_order_has_nothing_to_repair(data):
    for case in (NVFP4, FP8, "exports/nvfp4_sharded", "exports/mixed_three", "exports/gpt_oss_nvfp4"):
        with moqext.Checkpoint(data / case) as checkpoint:
            plan = checkpoint.plan_repair()
        assert plan.changes == (), case
        assert plan.errors == ()


def test_an_error_that_stays_keeps_all_from_being_written(sound, tmp_path):
    model = sound(NVFP4)
    model.swizzle(K)
    del model.tensors[f"{UP}.weight_scale_2"]
    refused(model, tmp_path, "missing_scale", "")


def test_one_file_alone_is_refused(data):
    with (
        moqext.Checkpoint(data / NVFP4 / "model.safetensors") as checkpoint,
        pytest.raises(moqext.CheckpointError, match="cannot be repaired alone; give its directory"),
    ):
        checkpoint.plan_repair()


def test_an_option_that_is_none(data):
    with (
        moqext.Checkpoint(data / NVFP4) as checkpoint,
        pytest.raises(ValueError, match="nan_blocks: expected"),
    ):
        checkpoint.plan_repair(nan_blocks="one")


def test_a_repair_that_does_not_hold_is_not_published(sound, tmp_path, monkeypatch):
    """Files are read again before they take their place."""
    model = sound(NVFP4)
    empty_blocks(model, UP, NAN, 0, (3, 2))
    monkeypatch.setitem(__import__("moqext.tools.repair.scale_values", fromlist=["_"])._ONE, "F8_E4M3", NAN)
    source = model.save(tmp_path / "in")
    with (
        moqext.Checkpoint(source) as checkpoint,
        pytest.raises(moqext.CheckpointError, match=r"still wrong after the repair: .*scale_not_finite"),
    ):
        checkpoint.plan_repair().write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_note_that_has_not_ended_is_not_published_either(sound, tmp_path, monkeypatch):
    model = sound(NVFP4)
    for module in quantized(model):
        model.swizzle(module)
    monkeypatch.setattr("moqext.tools.repair.draft.Draft.relay", lambda self, tensor: None)
    with (
        moqext.Checkpoint(model.save(tmp_path / "in")) as checkpoint,
        pytest.raises(moqext.CheckpointError, match=r"still wrong after the repair: .*swizzled_scales"),
    ):
        checkpoint.plan_repair().write(tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""Repairs of damage drawn at random: several kinds at once, and files that make no sense."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

import moqext

from .damaged import Damaged

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

DATA = Path(__file__).parent / "data"
SOUND = DATA / "checkpoints/llama_nvfp4_kvfp8"
MLP, ATTENTION = "model.layers.0.mlp", "model.layers.0.self_attn"
NOT_RAISED = (moqext.CheckpointError, moqext.ConfigError, moqext.UnsupportedQuantization)


def leave_behind(model):
    name = f"{MLP}.down_proj"
    scales = model[f"{name}.weight_scale"]
    model.put(f"{name}.weight_quantizer._scale", "F8_E4M3", scales)
    model.put(f"{name}.weight_quantizer._double_scale", *model.tensors[f"{name}.weight_scale_2"])
    model.put(f"{name}.weight_scale", "F8_E4M3", scales[:, ::2].copy())


def old_cache_names(model):
    for each in "kv":
        model.rename(f"{ATTENTION}.{each}_proj.{each}_scale", f"{ATTENTION}.{each}_proj.output_scale")


def foreign_name(model):
    model.rename(f"{MLP}.gate_proj.weight_scale", f"{MLP}.gate_proj.weight_scale_inv")


def twice(model):
    model.put(f"{ATTENTION}.v_proj.weight_scale_inv", *model.tensors[f"{ATTENTION}.v_proj.weight_scale"])


def lost_file(model):
    model.files |= dict.fromkeys((name for name in model.tensors if "o_proj" in name), "more.safetensors")
    model.files |= {name: "a.safetensors" for name in model.tensors if name not in model.files}
    model.index = {name: file for name, file in model.files.items() if file == "a.safetensors"}


def amax(model):
    model.put(f"{MLP}.up_proj.input_quantizer._amax", "F32", np.float32(2))


MUTATIONS = [leave_behind, old_cache_names, twice, foreign_name, amax]


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.permutations(MUTATIONS), st.integers(0, len(MUTATIONS)), st.booleans())
def test_damage_of_several_kinds_is_mended_to_the_bits(order, count, loses_file):
    model = Damaged(SOUND)
    chosen = order[:count]
    for mutate in chosen:
        mutate(model)
    if loses_file:
        lost_file(model)
    root = Path(tempfile.mkdtemp())
    try:
        with moqext.Checkpoint(model.save(root / "in")) as checkpoint:
            plan = checkpoint.plan_repair()
            assert plan.left == ()
            if not plan.changes:
                assert not chosen
                assert not loses_file
                return
            plan.write(root / "out")
        with moqext.Checkpoint(root / "out") as got, moqext.Checkpoint(SOUND) as sound:
            assert got.problems == sound.problems == ()
            assert got.files.tensors.keys() == sound.files.tensors.keys()
            for name, info in sound.files.tensors.items():
                assert (got.files.tensors[name].dtype, got.files.tensors[name].shape) == (
                    info.dtype,
                    info.shape,
                )
                ours, theirs = (each.files.raw(name, 0, info.nbytes) for each in (got, sound))
                np.testing.assert_array_equal(ours, theirs)
    finally:
        shutil.rmtree(root)


DTYPES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F64": 8}
ROLES = [
    "weight",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "scale",
    "input_scale",
    "weight_quantizer._scale",
    "weight_quantizer._double_scale",
    "input_quantizer._amax",
    "input_quantizer._pre_quant_scale",
    "comfy_quant",
    "output_scale",
    "bias",
]
MODULES = [f"{MLP}.up_proj", f"{ATTENTION}.k_proj", f"{MLP}.experts.0.w1", f"{MLP}.experts.down_proj"]
SHAPES = [
    (),
    (1,),
    (256,),
    (256, 64),
    (256, 128),
    (256, 8),
    (256, 4),
    (2, 1),
    (64, 64),
    (64, 8),
    (128, 8),
    (0, 8),
]
TENSORS = st.dictionaries(
    st.tuples(st.sampled_from(MODULES), st.sampled_from(ROLES)),
    st.none()
    | st.tuples(
        st.sampled_from(list(DTYPES)), st.sampled_from(SHAPES), st.sampled_from([0, 0x38, 0x77, 0x7F, 0xFF])
    ),
    max_size=3,
)
LISTS = st.lists(st.sampled_from(["*", "re:.*", "lm_head", "*mlp*", MODULES[0], "*k_proj", ""]), max_size=3)
LAYER = st.fixed_dictionaries({"quant_algo": st.sampled_from(["NVFP4", "FP8", None, "W4A16_NVFP4"])})
FIELDS = {
    "ignore": LISTS,
    "exclude_modules": LISTS,
    "quantized_layers": st.dictionaries(st.sampled_from([*MODULES, MLP]), LAYER, max_size=3),
    "quant_algo": st.sampled_from(["NVFP4", "FP8", "MIXED_PRECISION", None]),
    "quant_method": st.sampled_from(["modelopt", "modelopt_fp4", None]),
}


@hypothesis.settings(max_examples=60)
@hypothesis.given(TENSORS, st.fixed_dictionaries({}, optional=FIELDS), st.booleans())
def test_nonsense_is_refused_or_written_sound(tensors, fields, zero):
    """Nothing but the exceptions of the package; what is written has nothing to repair and no error."""
    root = Path(tempfile.mkdtemp())
    try:
        model = Damaged(SOUND)
        for (module, role), stored in tensors.items():
            if stored is None:
                model.tensors.pop(f"{module}.{role}", None)
                continue
            dtype, shape, byte = stored
            width = DTYPES[dtype]
            array = np.full((*shape, width), byte, np.uint8).view(f"u{width}").reshape(shape)
            model.put(f"{module}.{role}", dtype, array)
        model.configs["config.json"]["quantization_config"] |= fields
        source = model.save(root / "in")
        try:
            checkpoint = moqext.Checkpoint(source)
            plan = checkpoint.plan_repair(nan_blocks="zero" if zero else "keep")
        except NOT_RAISED:
            return
        with checkpoint:
            if not plan.changes or plan.errors:
                return
            plan.write(root / "out")
        with moqext.Checkpoint(root / "out") as repaired:
            again = repaired.plan_repair()
            assert again.changes == ()
            assert again.errors == ()
    finally:
        shutil.rmtree(root)

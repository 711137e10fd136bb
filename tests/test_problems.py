"""Each problem code, brought about by one change to genuine tensors or to their configuration."""

import copy
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import pytest

import moqext
from moqext.__main__ import COMMANDS as MODULES
from moqext.reader.advice import ADVICE
from moqext.reader.files.tensor_files import TensorFiles
from moqext.reader.findings.find_layers import find_layers
from moqext.reader.problems import CODES, SEVERITIES, Problem, Repair, make_problem, worst_severity

from .work import each

ATTENTION = "model.layers.0.self_attn"
Q, K, V = (f"{ATTENTION}.{name}_proj" for name in "qkv")
MLP = "model.layers.0.mlp"
MLP_DOWN = f"{MLP}.down_proj"
EXPERTS = f"{MLP}.experts"

# Found when files are opened; tests/test_tensor_files.py brings each of them about.
OF_FILES = {
    "missing_shard",
    "unreadable_shard",
    "missing_tensor",
    "index_ignored",
    "no_weights",
    "unread_files",
    "unread_tensors",
    "hole",
    "duplicate_tensor",
    "unindexed_tensor",
    "unreadable_dtype",
}
# Found by how scales and codes lie; tests/test_layouts.py brings each of them about.
OF_LAYOUTS = {"swizzled_scales", "exchanged_nibbles", "doubtful_scale_layout", "foreign_layout"}
COMMANDS = {module.__name__.rpartition(".")[2] for module in MODULES}
OF_CONFIG = {"config_conflict", "config_note", "missing_layers", "missing_gate"}


class Info(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


class Model:
    """A genuine checkpoint in memory, to be changed: name -> (type, carriers), and its configuration."""

    def __init__(self, directory):
        files = TensorFiles(directory)
        carriers = {"BF16": np.uint16, "F8_E4M3": np.uint8}
        self.tensors = {}
        for name, info in files.tensors.items():
            array = files.tensor(name)
            self.tensors[name] = (info.dtype, array.view(carriers.get(info.dtype, array.dtype)).copy())
        self.config = json.loads((directory / "hf_quant_config.json").read_text())
        self.architectures = json.loads((directory / "config.json").read_text())["architectures"]

    @property
    def quantization(self):
        return self.config["quantization"]

    def put(self, name, dtype, array):
        self.tensors[name] = (dtype, np.asarray(array))

    def scalar(self, name, value):
        assert name in self.tensors
        self.put(name, "F32", np.float32(value))

    def drop(self, *names):
        for name in names:
            del self.tensors[name]

    def rename(self, old, new):
        self.tensors[new] = self.tensors.pop(old)

    def array(self, name):
        return self.tensors[name][1]

    def to_bf16(self, module, shape):
        """Stores a linear unquantized, its scales gone."""
        for role in ("weight_scale", "weight_scale_2", "input_scale"):
            self.tensors.pop(f"{module}.{role}", None)
        self.put(f"{module}.weight", "BF16", np.zeros(shape, np.uint16))

    def find(self, *, values=True):
        infos = {name: Info(dtype, array.shape) for name, (dtype, array) in self.tensors.items()}
        config = None if self.config is None else moqext.QuantConfig.from_dict(copy.deepcopy(self.config))
        read = self.array if values else None
        return find_layers(infos, config, read, architectures=self.architectures)

    def problems(self, **options):
        return list(self.find(**options).all_problems())


@pytest.fixture(scope="module")
def genuine():
    root = Path(__file__).parent / "data"
    cache = {}

    def load(name):
        if name not in cache:
            directory = root / "checkpoints" / name
            cache[name] = Model(directory if directory.is_dir() else root / "exports" / name)
        return copy.deepcopy(cache[name])

    return load


class Case(NamedTuple):
    code: str
    base: str
    change: Callable[[Model], object]
    layer: str | None
    tensor: str | None = None
    count: int = 1
    others: tuple[str, ...] = ()
    """Codes that this change brings about as well."""


def _double(model, name, axis):
    model.put(name, model.tensors[name][0], np.repeat(model.array(name), 2, axis))


def _nan_block(model, name):
    model.array(name).reshape(-1)[3] = 0x7F


def _halve_scales(name, keep=None):
    def change(model):
        dtype, scales = model.tensors[name]
        model.put(name, dtype, scales[:, ::2].copy())
        if keep is not None:
            model.put(keep, dtype, scales)

    return change


def _reciprocal(name):
    return lambda model: model.scalar(name, 1 / float(model.array(name)))


def _drop_linear(module):
    return lambda model: model.drop(*[name for name in model.tensors if name.startswith(f"{module}.")])


def _no_config(model):
    model.config = None


def _list_missing(model):
    model.quantization["quantized_layers"]["model.layers.7.mlp.up_proj"] = {"quant_algo": "FP8"}


def _reconfigure(**changes):
    return lambda model: model.quantization.update(changes)


def _unlist(model):
    del model.quantization["quantized_layers"][K]


def _unlist_all_but_mlp(model):
    model.quantization["exclude_modules"].append(K)


def _fuse_qkv(model):
    """One weight for q, k and v on disk, of which the configuration excludes a part."""
    weights = [model.array(f"{name}.weight") for name in (Q, K, V)]
    model.put(f"{ATTENTION}.qkv_proj.weight", "F8_E4M3", np.concatenate(weights))
    model.rename(f"{K}.k_scale", f"{ATTENTION}.k_scale")
    model.rename(f"{V}.v_scale", f"{ATTENTION}.v_scale")
    for role in ("weight_scale", "input_scale"):
        model.rename(f"{Q}.{role}", f"{ATTENTION}.qkv_proj.{role}")
    for name in (Q, K, V):
        model.drop(*[tensor for tensor in model.tensors if tensor.startswith(f"{name}.")])
    model.quantization["exclude_modules"].append(Q)


def _expert_bf16(model):
    model.to_bf16(f"{EXPERTS}.1.up_proj", (64, 128))


def _drop_expert(model):
    model.drop(*[name for name in model.tensors if name.startswith(f"{EXPERTS}.1.")])


def _drop_projection(model):
    model.drop(*[name for name in model.tensors if name.startswith(f"{EXPERTS}.3.down_proj.")])


def _scales_stay(model):
    model.put(f"{K}.weight", "BF16", np.zeros((64, 128), np.uint16))


def _add(name, dtype, array):
    return lambda model: model.put(name, dtype, array)


def _set(name, value):
    return lambda model: model.scalar(name, value)


def _drop(*names):
    return lambda model: model.drop(*names)


def _stacked_blocks(model):
    """Stacked experts of several blocks each way, scaled in the transposed order: 5-D scales."""
    shapes = {"gate_up_proj": (4, 256, 512), "down_proj": (4, 256, 256)}
    for name, (experts, rows, columns) in shapes.items():
        base = f"model.layers.0.feed_forward.experts.{name}"
        model.put(base, "F8_E4M3", np.zeros((experts, rows, columns), np.uint8))
        blocks = np.ones((experts, columns // 128, 1, rows // 128, 1), np.float32)
        model.put(f"{base}_weight_scale", "F32", blocks)
        model.drop(f"{base}_input_scale")
    model.quantization["quant_algo"] = "FP8_PB_WO"
    for name in [name for name in model.tensors if name.endswith("input_scale")]:
        model.drop(name)


def _expert_blocks(model):
    """Experts of 64 rows, half a block, in FP8_PB_WO."""
    for name in list(model.tensors):
        if name.startswith(EXPERTS) and name.endswith(".input_scale"):
            model.drop(name)
    model.quantization.update(
        quant_algo="MIXED_PRECISION", quantized_layers={EXPERTS: {"quant_algo": "FP8_PB_WO"}}
    )
    for name in [name for name in model.tensors if "self_attn" in name]:
        model.drop(name)


def _all_nan_under_zero(model):
    model.scalar(f"{K}.weight_scale_2", 0)
    model.array(f"{K}.weight_scale")[...] = 0x7F


def _zero_block(model):
    model.array(f"{K}.weight_scale")[5, 1] = 0x80


def _negative_block(model):
    model.array(f"{K}.weight_scale")[5, 1] |= 0x80


def _inf_row(model):
    model.array(f"{K}.weight_scale")[5] = np.inf


def _nan_e8m0(model):
    model.array(f"{K}.weight_scale")[0, 0] = 255


def _no_input_scales(model):
    for name in [name for name in model.tensors if name.startswith(EXPERTS) and name.endswith("input_scale")]:
        model.drop(name)


def _half_lora(model):
    model.quantization.update(quant_algo="NVFP4_SVD")
    for name in [
        name[: -len(".weight_scale_2")] for name in model.tensors if name.endswith("weight_scale_2")
    ]:
        rows, half = model.array(f"{name}.weight").shape
        for half_name, shape in (("a", (4, 2 * half)), ("b", (rows, 4))):
            if (name, half_name) != (K, "b"):
                leaked = f"{name}.weight_quantizer._svdquant_lora_{half_name}"
                model.put(leaked, "BF16", np.zeros(shape, np.uint16))


def _kv_ones(model):
    model.scalar(f"{K}.k_scale", 1)
    model.scalar(f"{V}.v_scale", 1)


def _kv_of_vision(model):
    model.put("visual.blocks.3.attn.k_proj.k_scale", "F32", np.float32(0.1))


def _kv_of_one_layer(model):
    for name in [
        name for name in model.tensors if ".layers.0." in name and name[-7:] in ("k_scale", "v_scale")
    ]:
        model.drop(name)


def _second_weight(model):
    model.put(f"{EXPERTS}.down_proj.weight", "F8_E4M3", model.array(f"{EXPERTS}.down_proj") ^ 1)


def _two_gates(model):
    """An expert whose gate is there as `gate_proj` and as `w1`."""
    for role in ("weight", "weight_scale", "input_scale"):
        model.put(f"{EXPERTS}.1.w1.{role}", *model.tensors[f"{EXPERTS}.1.gate_proj.{role}"])


def _repeat_kv(model):
    for name, role in ((K, "k_scale"), (V, "v_scale")):
        model.put(f"{ATTENTION}.{role}", *model.tensors[f"{name}.{role}"])


def _zero_row(model):
    model.array(f"{K}.weight_scale")[0] = 0


def _zero_blocks(model):
    model.array(f"{K}.weight_scale")[...] = 0


def _zero_stacked(model):
    model.put(f"{DOWN}_weight_scale", "F32", np.float32([0.1, 0]))


def _zeros(code):
    """A layer of zeros, as `code` of FP8 under a scale of zero."""

    def change(model):
        model.scalar(f"{K}.weight_scale", 0)
        model.array(f"{K}.weight")[...] = code

    return change


def _no_linear_input_scales(model):
    for name in [name for name in model.tensors if name.endswith("input_scale")]:
        model.drop(name)


def _one_without_input_scale(model):
    """Drops a scale of k, which alone among q, k and v is in FP8."""
    model.drop(f"{K}.input_scale")


def _retype(dtype):
    carriers = {"F32": np.float32, "I32": np.int32}
    return lambda m: m.put(f"{K}.weight", dtype, m.array(f"{K}.weight").astype(carriers.get(dtype, np.uint8)))


def _retype_alone(dtype):
    """The weight in another type, its scales gone."""

    def change(model):
        _retype(dtype)(model)
        model.drop(f"{K}.weight_scale", f"{K}.input_scale")

    return change


MIXED = ("mixed_fused_formats",)
PARTIAL = ("input_scale_partial",)
DOWN = "model.layers.0.feed_forward.experts.down_proj"

CASES = [
    Case("no_quant_config", "llama_fp8_kvfp8", _no_config, None, others=("kv_scales_unannounced",)),
    Case("listed_module_missing", "mixed_three", _list_missing, "model.layers.7.mlp.up_proj"),
    Case("algo_conflict", "llama_fp8_kvfp8", _reconfigure(quant_algo="NVFP4", group_size=16), Q, count=7),
    Case("algo_conflict", "llama_fp8_pc_pt", _reconfigure(quant_algo="FP8"), Q, count=7),
    Case(
        "group_size_conflict", "w4a16_nvfp4_group_32", _reconfigure(group_size=16), f"{MLP}.up_proj", count=3
    ),
    Case("excluded_but_quantized", "llama_nvfp4_kvfp8", _unlist_all_but_mlp, K),
    Case("ambiguous_rule", "llama_fp8_kvfp8", _fuse_qkv, f"{ATTENTION}.qkv_proj"),
    Case("unlisted_but_quantized", "mixed_three", _unlist, K),
    Case(
        "stored_unquantized",
        "llama_nvfp4_kvfp8",
        lambda m: m.to_bf16(f"{MLP}.down_proj", (128, 256)),
        f"{MLP}.down_proj",
        f"{MLP}.down_proj.weight",
    ),
    Case(
        "mixed_fused_formats",
        "llama_nvfp4_kvfp8",
        lambda m: m.to_bf16(K, (64, 128)),
        ATTENTION,
        others=("stored_unquantized",),
    ),
    Case("mixed_fused_formats", "mixed_in_qkv", lambda m: None, ATTENTION, count=2),
    Case("mixed_expert_formats", "qwen3moe_nvfp4", _expert_bf16, EXPERTS, others=("stored_unquantized",)),
    Case("partial_scales", "llama_nvfp4_kvfp8", _halve_scales(f"{MLP_DOWN}.weight_scale"), MLP_DOWN),
    Case(
        "partial_scales",
        "llama_w4a16_nvfp4",
        _halve_scales(f"{MLP_DOWN}.weight_scale", keep=f"{MLP_DOWN}.weight_quantizer._scale"),
        MLP_DOWN,
        f"{MLP_DOWN}.weight_scale",
        others=("leftover_tensor",),
    ),
    Case(
        "absurd_weight_scale",
        "llama_nvfp4_kvfp8",
        _reciprocal(f"{K}.weight_scale_2"),
        K,
        f"{K}.weight_scale_2",
        others=("unequal_weight_scale_2",),
    ),
    Case("absurd_weight_scale", "llama_fp8_kvfp8", _reciprocal(f"{K}.weight_scale"), K, f"{K}.weight_scale"),
    Case("regex_exclusion", "llama_fp8_kvfp8", _reconfigure(exclude_modules=["lm_head", "re:.*head"]), None),
    Case(
        "kv_scales_per_head",
        "fp8_bias_kvfp8",
        _add(f"{K}.k_scale", "F32", np.full(2, 0.25, np.float32)),
        ATTENTION,
        f"{K}.k_scale",
    ),
    Case(
        "scale_zero",
        "fp8_bias_kvfp8",
        _add(f"{K}.k_scale", "F32", np.float32([0, 1])),
        ATTENTION,
        f"{K}.k_scale",
        others=("kv_scales_per_head",),
    ),
    Case("missing_linear", "llama_nvfp4_kvfp8", _drop_linear(f"{MLP}.up_proj"), f"{MLP}.up_proj"),
    Case("missing_weight", "llama_nvfp4_kvfp8", _drop(f"{K}.weight"), K, f"{K}.weight_scale"),
    Case("missing_scale", "llama_nvfp4_kvfp8", _drop(f"{K}.weight_scale"), K),
    Case("missing_scale", "llama_nvfp4_kvfp8", _drop(f"{K}.weight_scale_2"), K),
    Case("missing_scale", "llama_fp8_pc_pt", _drop(f"{K}.weight_scale"), K),
    Case("missing_scale", "llama_int8_sq", _drop(f"{K}.weight_scale"), K),
    Case("missing_scale", "llama_mxfp8", _drop(f"{K}.weight_scale"), K),
    Case("missing_scale", "llama_nvfp4_kvfp8", _half_lora, K),
    Case("missing_expert", "qwen3moe_fp8", _drop_expert, EXPERTS),
    Case("missing_expert", "qwen3moe_nvfp4", _drop_projection, EXPERTS),
    Case("shape_mismatch", "llama_nvfp4_kvfp8", lambda m: _double(m, f"{K}.weight_scale", 0), K),
    Case(
        "shape_mismatch",
        "llama_nvfp4_kvfp8",
        _add(f"{K}.input_scale", "F32", np.full(2, 0.1, np.float32)),
        K,
        f"{K}.input_scale",
    ),
    Case("shape_mismatch", "llama_fp8_pc_pt", lambda m: _double(m, f"{K}.weight_scale", 0), K),
    Case("shape_mismatch", "llama_mxfp8", lambda m: _double(m, f"{K}.weight_scale", 1), K),
    Case("shape_mismatch", "llama_int4_awq", lambda m: _double(m, f"{K}.weight_scale", 0), K),
    Case("shape_mismatch", "llama_int8_sq", lambda m: _double(m, f"{K}.weight_scale", 0), K),
    Case(
        "shape_mismatch",
        "llama_int8_sq",
        lambda m: _double(m, f"{K}.pre_quant_scale", 0),
        K,
        f"{K}.pre_quant_scale",
    ),
    Case("shape_mismatch", "fp8_bias_kvfp8", lambda m: _double(m, f"{K}.bias", 0), K, f"{K}.bias"),
    Case(
        "shape_mismatch",
        "fp8_bias_kvfp8",
        _add(f"{K}.k_scale", "F32", np.ones((2, 2), np.float32)),
        ATTENTION,
        f"{K}.k_scale",
    ),
    Case(
        "shape_mismatch",
        "llama4_fp8",
        lambda m: _double(m, "model.layers.0.feed_forward.experts.down_proj", 1),
        "model.layers.0.feed_forward.experts",
    ),
    Case("dtype_mismatch", "llama_fp8_kvfp8", _add(f"{K}.weight_scale", "F8_E4M3", np.ones((), np.uint8)), K),
    Case(
        "dtype_mismatch",
        "llama_fp8_kvfp8",
        _add(f"{K}.input_scale", "I32", np.int32(1)),
        K,
        f"{K}.input_scale",
    ),
    Case(
        "dtype_mismatch",
        "llama_fp8_kvfp8",
        _add(f"{K}.k_scale", "I32", np.int32(1)),
        ATTENTION,
        f"{K}.k_scale",
    ),
    Case("dtype_mismatch", "llama_fp8_kvfp8", _retype("F32"), K, f"{K}.weight_scale", count=2, others=MIXED),
    Case("dtype_mismatch", "llama_fp8_kvfp8", _retype_alone("F32"), K, f"{K}.weight", others=MIXED),
    Case("unknown_format", "llama_fp8_pc_pt", _retype("F8_E5M2"), K),
    Case("unknown_format", "llama_fp8_kvfp8", _retype("F8_E4M3FNUZ"), K),
    Case("unknown_format", "llama_fp8_kvfp8", _retype_alone("F8_E4M3FNUZ"), K, others=PARTIAL),
    Case("unknown_format", "llama_fp8_kvfp8", _retype("F8_E8M0"), K),
    Case("unknown_format", "llama_fp8_kvfp8", _retype("BOOL"), K),
    Case("unknown_format", "llama_fp8_kvfp8", _retype("I32"), K),
    Case("unknown_format", "llama_fp8_kvfp8", _retype_alone("I32"), K, others=PARTIAL),
    Case(
        "unexpected_tensor",
        "llama_fp8_kvfp8",
        _add(f"{K}.pre_quant_scale", "BF16", np.full(128, 0x3F80, np.uint16)),
        K,
        f"{K}.pre_quant_scale",
    ),
    Case(
        "unexpected_tensor",
        "llama_fp8_kvfp8",
        _add(f"{K}.weight_scale_2", "F32", np.float32(1)),
        K,
        f"{K}.weight_scale_2",
    ),
    Case(
        "scales_on_unquantized",
        "llama_nvfp4_kvfp8",
        _scales_stay,
        K,
        f"{K}.weight_scale",
        others=("mixed_fused_formats", "stored_unquantized"),
    ),
    Case(
        "unowned_tensor",
        "llama_fp8_kvfp8",
        _add("model.layers.0.adapter.input_scale", "F32", np.float32(1)),
        None,
        "model.layers.0.adapter.input_scale",
    ),
    Case(
        "unowned_tensor",
        "llama_fp8_kvfp8",
        _add("model.layers.0.codes", "F8_E4M3", np.zeros(4, np.uint8)),
        None,
        "model.layers.0.codes",
    ),
    Case(
        "conflicting_tensors",
        "llama_fp8_kvfp8",
        _add(f"{K}.weight_scale_inv", "F32", np.float32(1)),
        K,
        f"{K}.weight_scale_inv",
    ),
    Case(
        "conflicting_tensors",
        "gpt_oss_fp8",
        _second_weight,
        f"{EXPERTS}.down_proj",
        f"{EXPERTS}.down_proj.weight",
    ),
    Case(
        "conflicting_tensors",
        "qwen3moe_fp8",
        _two_gates,
        EXPERTS,
        others=("missing_expert",),
    ),
    Case(
        "conflicting_tensors",
        "llama_fp8_kvfp8",
        _add(f"{ATTENTION}.k_scale", "F32", np.float32(1)),
        ATTENTION,
        f"{ATTENTION}.k_scale",
    ),
    Case(
        "conflicting_tensors",
        "llama_fp8_kvfp8",
        _add(f"{K}.v_scale", "F32", np.float32(1)),
        ATTENTION,
        f"{K}.v_scale",
    ),
    Case("repeated_scale", "llama_fp8_kvfp8", _repeat_kv, ATTENTION, f"{ATTENTION}.k_scale", count=2),
    Case(
        "repeated_scale",
        "llama_fp8_kvfp8",
        lambda m: m.put(f"{K}.weight_scale_inv", *m.tensors[f"{K}.weight_scale"]),
        K,
        f"{K}.weight_scale_inv",
    ),
    Case(
        "name_too_long",
        "llama_fp8_kvfp8",
        _add(f"{'long.' * 1000}weight", "BF16", np.zeros((2, 2), np.uint16)),
        None,
        f"{'long.' * 1000}weight",
    ),
    Case(
        "leftover_tensor",
        "llama_nvfp4_kvfp8",
        _add(f"{K}.weight_quantizer._scale", "F8_E4M3", np.zeros((64, 8), np.uint8)),
        None,
        f"{K}.weight_quantizer._scale",
    ),
    Case(
        "foreign_scale_name",
        "fp8_pb_wo_unaligned",
        lambda m: m.rename(f"{K}.weight_scale", f"{K}.weight_scale_inv"),
        K,
        f"{K}.weight_scale_inv",
    ),
    Case(
        "clipped_blocks",
        "llama4_fp8",
        _stacked_blocks,
        "model.layers.0.feed_forward.experts.gate_up_proj",
        count=2,
    ),
    Case("possibly_clipped_blocks", "qwen3moe_fp8", _expert_blocks, EXPERTS),
    Case(
        "scale_not_finite",
        "llama_nvfp4_kvfp8",
        lambda m: _nan_block(m, f"{K}.weight_scale"),
        K,
        f"{K}.weight_scale",
    ),
    Case("scale_not_finite", "llama_mxfp8", _nan_e8m0, K, f"{K}.weight_scale"),
    Case("scale_not_finite", "llama_fp8_pc_pt", _inf_row, K, f"{K}.weight_scale"),
    Case("scale_not_finite", "llama_fp8_kvfp8", _set(f"{K}.input_scale", np.nan), K, f"{K}.input_scale"),
    Case("scale_not_finite", "llama_fp8_kvfp8", _set(f"{V}.v_scale", np.inf), ATTENTION, f"{V}.v_scale"),
    Case(
        "scale_not_finite",
        "llama_int8_sq",
        _add(f"{K}.pre_quant_scale", "BF16", np.full(128, 0x7FC0, np.uint16)),
        K,
        f"{K}.pre_quant_scale",
    ),
    Case("scale_negative", "llama_nvfp4_kvfp8", _negative_block, K, f"{K}.weight_scale"),
    Case("scale_negative", "llama_fp8_kvfp8", _set(f"{K}.weight_scale", -1), K, f"{K}.weight_scale"),
    Case("scale_negative", "llama_fp8_kvfp8", _set(f"{K}.input_scale", -1), K, f"{K}.input_scale"),
    Case("scale_negative", "llama_fp8_kvfp8", _set(f"{K}.k_scale", -1), ATTENTION, f"{K}.k_scale"),
    Case("scale_zero", "llama_fp8_kvfp8", _set(f"{K}.input_scale", 0), K, f"{K}.input_scale"),
    Case("scale_zero", "llama_fp8_kvfp8", _set(f"{K}.k_scale", 0), ATTENTION, f"{K}.k_scale"),
    Case(
        "scale_tiny",
        "llama_fp8_kvfp8",
        _set(f"{MLP_DOWN}.input_scale", 2.0**-128),
        MLP_DOWN,
        f"{MLP_DOWN}.input_scale",
    ),
    Case("scale_tiny", "llama_fp8_kvfp8", _set(f"{K}.k_scale", 1e-40), ATTENTION, f"{K}.k_scale"),
    Case("lost_scale", "llama_fp8_kvfp8", _set(f"{K}.weight_scale", 0), K, f"{K}.weight_scale"),
    Case("lost_scale", "llama_fp8_pc_pt", _zero_row, K, f"{K}.weight_scale"),
    Case("lost_scale", "llama_int8_sq", _zero_row, K, f"{K}.weight_scale"),
    Case("lost_scale", "llama_int4_awq", _zero_row, K, f"{K}.weight_scale"),
    Case("lost_scale", "fp8_pb_wo_unaligned", _zero_row, K, f"{K}.weight_scale"),
    Case("lost_scale", "llama_nvfp4_kvfp8", _set(f"{K}.weight_scale_2", 0), K, f"{K}.weight_scale_2"),
    Case("lost_scale", "llama_nvfp4_kvfp8", _zero_blocks, K, f"{K}.weight_scale"),
    Case("lost_scale", "llama4_fp8", _zero_stacked, DOWN, f"{DOWN}_weight_scale"),
    Case("all_zero_layer", "llama_fp8_kvfp8", _zeros(0x7F), K, f"{K}.weight_scale"),
    Case("all_zero_layer", "llama_fp8_kvfp8", _zeros(0x80), K, f"{K}.weight_scale"),
    Case("all_zero_layer", "llama_nvfp4_kvfp8", _all_nan_under_zero, K, f"{K}.weight_scale_2"),
    Case("zero_blocks", "llama_nvfp4_kvfp8", _zero_block, K, f"{K}.weight_scale"),
    Case("missing_input_scale", "llama_fp8_kvfp8", _no_linear_input_scales, K, count=7),
    Case("input_scale_partial", "llama_fp8_kvfp8", _drop(f"{K}.input_scale"), K),
    Case("input_scale_partial", "mixed_fp8_nvfp4", _one_without_input_scale, K),
    Case("missing_input_scale", "qwen3moe_nvfp4", _no_input_scales, EXPERTS),
    Case("missing_expert_input_scale", "qwen3moe_nvfp4", _drop(f"{EXPERTS}.2.up_proj.input_scale"), EXPERTS),
    Case(
        "unused_input_scale",
        "llama_w4a16_nvfp4",
        _add(f"{K}.input_scale", "F32", np.float32(0.1)),
        K,
        f"{K}.input_scale",
    ),
    Case(
        "unused_input_scale",
        "llama_fp8_pc_pt",
        _add(f"{K}.input_scale", "F32", np.float32(0.1)),
        K,
        f"{K}.input_scale",
    ),
    Case(
        "uncalibrated_input_scale",
        "qwen3moe_fp8",
        _set(f"{EXPERTS}.1.down_proj.input_scale", np.float32(0.5) / np.float32(448)),
        f"{EXPERTS}.1.down_proj",
        f"{EXPERTS}.1.down_proj.input_scale",
    ),
    Case(
        "uncalibrated_input_scale",
        "qwen3moe_nvfp4",
        _set(f"{EXPERTS}.1.down_proj.input_scale", np.float32(0.5) / np.float32(2688)),
        f"{EXPERTS}.1.down_proj",
        f"{EXPERTS}.1.down_proj.input_scale",
    ),
    Case(
        "uncalibrated_input_scale",
        "qwen3moe_nvfp4",
        _set(f"{EXPERTS}.1.down_proj.input_scale", np.float32(6) / np.float32(2688)),
        f"{EXPERTS}.1.down_proj",
        f"{EXPERTS}.1.down_proj.input_scale",
    ),
    Case(
        "uncalibrated_input_scale",
        "llama_int8_sq",
        _set(f"{MLP}.down_proj.input_scale", 1),
        f"{MLP}.down_proj",
        f"{MLP}.down_proj.input_scale",
    ),
    Case(
        "large_input_scale",
        "llama_nvfp4_kvfp8",
        _set(f"{MLP}.down_proj.input_scale", 13.7),
        f"{MLP}.down_proj",
        f"{MLP}.down_proj.input_scale",
    ),
    Case(
        "absurd_input_scale",
        "llama_fp8_kvfp8",
        _set(f"{MLP_DOWN}.input_scale", 1e30),
        MLP_DOWN,
        f"{MLP_DOWN}.input_scale",
    ),
    Case(
        "absurd_input_scale",
        "qwen3moe_fp8",
        _set(f"{EXPERTS}.1.down_proj.input_scale", 1e30),
        f"{EXPERTS}.1.down_proj",
        f"{EXPERTS}.1.down_proj.input_scale",
    ),
    Case(
        "absurd_input_scale",
        "qwen3moe_fp8",
        _set(f"{EXPERTS}.1.down_proj.input_scale", 9000),
        EXPERTS,
        f"{EXPERTS}.1.down_proj.input_scale",
    ),
    Case("unequal_weight_scale_2", "llama_nvfp4_kvfp8", _set(f"{K}.weight_scale_2", 0.01), ATTENTION),
    Case(
        "unequal_weight_scale_2", "qwen3moe_nvfp4", _set(f"{EXPERTS}.1.up_proj.weight_scale_2", 0.01), EXPERTS
    ),
    Case("unequal_input_scale", "llama_fp8_kvfp8", _set(f"{K}.input_scale", 0.5), ATTENTION),
    Case("unequal_input_scale", "qwen3moe_fp8", _set(f"{EXPERTS}.1.up_proj.input_scale", 0.5), EXPERTS),
    Case("kv_scale_missing", "llama_fp8_kvfp8", _drop(f"{K}.k_scale"), ATTENTION, f"{V}.v_scale"),
    Case("kv_scale_missing", "llama_fp8_kvfp8", _drop(f"{V}.v_scale"), ATTENTION, f"{K}.k_scale"),
    Case("kv_scales_partial", "mixed_fp8_nvfp4", _kv_of_one_layer, ATTENTION),
    Case("kv_scales_absent", "llama_fp8_kvfp8", _drop(f"{K}.k_scale", f"{V}.v_scale"), None),
    Case("kv_scales_unannounced", "llama_fp8_kvfp8", _reconfigure(kv_cache_quant_algo=None), None),
    Case("kv_scales_one", "llama_fp8_kvfp8", _kv_ones, ATTENTION),
    Case(
        "old_kv_scale_name",
        "llama_fp8_kvfp8",
        lambda m: (m.rename(f"{K}.k_scale", f"{ATTENTION}.kv_scale"), _drop(f"{V}.v_scale")(m)),
        ATTENTION,
        f"{ATTENTION}.kv_scale",
    ),
    Case(
        "old_kv_scale_name",
        "llama_fp8_kvfp8",
        lambda m: [m.rename(f"{name}.{name[-6]}_scale", f"{name}.output_scale") for name in (K, V)],
        ATTENTION,
        f"{V}.output_scale",
        count=2,
    ),
    Case(
        "old_kv_scale_name",
        "llama_fp8_kvfp8",
        lambda m: m.rename(f"{V}.v_scale", f"{ATTENTION}.qkv_proj.v_scale"),
        ATTENTION,
        f"{ATTENTION}.qkv_proj.v_scale",
    ),
    Case(
        "conflicting_tensors",
        "llama_nvfp4_kvfp8",
        _add(f"{K}.weight_quantizer._double_scale", "F32", np.array(1e-5, np.float32)),
        K,
        f"{K}.weight_quantizer._double_scale",
        others=("leftover_tensor",),
    ),
    Case("kv_bias", "nvfp4_kvaffine", lambda m: None, ATTENTION, f"{K}.k_bias", count=2),
    Case("kv_scale_in_vision", "llama_fp8_kvfp8", _kv_of_vision, None, "visual.blocks.3.attn.k_proj.k_scale"),
]


@each("case", CASES)
def test_code(case, genuine):
    model = genuine(case.base)
    case.change(model)
    problems = model.problems()
    assert {problem.code for problem in problems} == {case.code, *case.others}
    found = [problem for problem in problems if problem.code == case.code]
    assert len(found) == case.count
    assert case.layer in [problem.layer for problem in found]
    if case.tensor is not None:
        assert case.tensor in [problem.tensor for problem in found]
    assert all(problem.severity == CODES[case.code].severity for problem in found)
    # Without values only names, types and shapes are judged, and what is found is found with them too.
    assert set(model.problems(values=False)) <= set(problems)


def test_config_note():
    """A configuration that quantizes no activations is read as weight-only, and says so."""
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    inline = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    (problem,) = find_layers({}, moqext.QuantConfig.from_dict(inline)).all_problems()
    assert (problem.code, problem.severity) == ("config_note", "note")
    assert "W4A16_NVFP4" in problem.message


def test_config_conflict(data, tmp_path):
    source = data / "checkpoints" / "llama_fp8_kvfp8"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "hf_quant_config.json").read_text())
    config["quantization"]["exclude_modules"] = ["lm_head"]
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(config))
    with moqext.Checkpoint(tmp_path) as checkpoint:
        (problem,) = checkpoint.problems
    assert (problem.code, problem.severity) == ("config_conflict", "warning")
    assert "exclude" in problem.message
    assert "hf_quant_config.json" in problem.message


@pytest.mark.parametrize(
    "count, missing",
    [(2, None), (1, None), (None, None), ("2", None), (True, None), (3, "2"), (5, "2-4"), (1e3, None)],
)
def test_missing_layers(data, tmp_path, count, missing):
    """The first half of a checkpoint whose files look whole."""
    source = data / "exports" / "mixed_fp8_nvfp4"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = count
    (tmp_path / "config.json").write_text(json.dumps(config))
    with moqext.Checkpoint(tmp_path) as checkpoint:
        problems = checkpoint.problems
    assert [problem.code for problem in problems] == ["missing_layers"] * (missing is not None)
    if missing is not None:
        assert f"model.layers.{missing} " in problems[0].message + " "


def test_every_code_is_brought_about():
    assert {case.code for case in CASES} | OF_FILES | OF_LAYOUTS | OF_CONFIG == set(CODES)


def test_problems_have_the_severity_of_the_table():
    for code, (severity, meaning, repair) in CODES.items():
        assert severity in SEVERITIES
        assert repair in get_args(Repair)
        assert meaning.endswith(".")
        assert make_problem(code, "m", layer="l", tensor="t") == Problem(code, severity, "l", "t", "m")


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_cache_scales_the_exporters_own_counts_in_any_order(genuine, turned):
    """Else the order of the header decides, for k and v apart."""
    model = genuine("llama_fp8_kvfp8")
    own = {role: float(model.array(f"{ATTENTION}.{role[0]}_proj.{role}")) for role in ("k_scale", "v_scale")}
    for name in (f"{ATTENTION}.k_scale", f"{K}.v_scale", f"{ATTENTION}.v_scale"):
        model.put(name, "F32", np.float32(7))
    if turned:
        model.tensors = dict(reversed(model.tensors.items()))
    (record,) = model.find().kv
    assert record.values == own
    assert [problem.code for problem in record.problems] == ["conflicting_tensors"] * 3


def test_worst_severity():
    note, warning = make_problem("hole", ""), make_problem("config_conflict", "")
    error = make_problem("missing_scale", "")
    assert worst_severity([]) is None
    assert worst_severity([note]) == "note"
    assert worst_severity([note, warning]) == "warning"
    assert worst_severity([warning, error, note]) == "error"


def test_messages_name_values(genuine):
    model = genuine("llama_nvfp4_kvfp8")
    model.scalar(f"{K}.weight_scale_2", 4 * float(model.array(f"{Q}.weight_scale_2")))
    (problem,) = model.problems()
    assert "k_proj" in problem.message
    assert "factor of 4" in problem.message


def test_documentation_has_the_table(request):
    """docs/problems.md lists every code with severity, meaning, advice and repair, in order."""
    text = (request.config.rootpath / "docs" / "problems.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        [f"`{code}`", severity, meaning, ADVICE[code], *([] if repair == "no" else [repair])]
        for code, (severity, meaning, repair) in CODES.items()
    ]


def test_every_code_has_advice():
    assert list(ADVICE) == list(CODES)
    for code, advice in ADVICE.items():
        assert advice.endswith("."), code
        assert CODES[code].severity == "note" or not advice.startswith("Nothing"), code
        if CODES[code].repair == "yes":
            assert "repair" in advice or code == "index_ignored", code
        for command in re.findall(r"`moqext (\w+)", advice):
            assert command in COMMANDS, code


def test_e4m3_table_is_the_format(rng):
    """Every code of the decoder for scales, against the definition in struct's half precision.

    An e4m3 number is a half with the exponent bias 15 - 7 = 8 too small: shift and multiply by 2^8.
    """
    from moqext.reader.formats.scale_values import decode_scales

    codes = np.arange(256, dtype=np.uint8)
    values = decode_scales("F8_E4M3", codes)
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert np.isnan(values[code])
            continue
        half = struct.unpack("<e", struct.pack("<H", (code & 0x80) << 8 | (code & 0x7F) << 7))[0]
        assert values[code] == half * 256


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_bf16_scales_of_any_rank(shape):
    """NumPy 1 promotes a 0-d shift to int64, which is no float32's width."""
    from moqext.reader.formats.scale_values import decode_scales
    from moqext.reference import as_float32

    codes = np.full(shape, 0x3FC0, np.uint16)
    for values in (decode_scales("BF16", codes), as_float32(codes)):
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, np.full(shape, 1.5, np.float32))

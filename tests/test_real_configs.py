"""Every genuine configuration: the records it must give, and agreement with the tensors stored beside it."""

import json
import re
import struct
from pathlib import Path

import pytest

from moqext import QuantConfig, detect
from moqext.algorithms import ALGORITHMS, LINEARS

from .work import each

DATA = Path(__file__).parent / "data"
CONFIGS = sorted((DATA / "configs").glob("*.json"))
MANIFESTS = sorted((DATA / "manifests").glob("*.json"))
DIRECTORIES = sorted(path.parent for path in DATA.glob("*/*/hf_quant_config.json"))

# model: (method, algorithm, KV algorithm, group size, exclusions, layers listed, producer version)
RECORDS = {
    "Qwen3-32B-FP8-Static-PerTensor": ("modelopt", "FP8", "FP8", None, 1, 0, "0.31.0"),
    "DeepSeek-V3.1-NVFP4": ("modelopt_fp4", "NVFP4", "FP8", 16, 246, 0, "0.22.1.dev750+g59a703703"),
    "DeepSeek-V4-Flash-NVFP4": (
        "modelopt_mixed",
        "MIXED_PRECISION",
        None,
        None,
        4,
        43,
        "dsv4-nvfp4-experts",
    ),
    "GLM-5-NVFP4": (
        "modelopt_fp4",
        "NVFP4",
        "FP8",
        16,
        471,
        0,
        "0.42.0rc1.dev18+g418ee37f8.d20260219",
    ),
    "GLM-5.2-NVFP4": ("modelopt_fp4", "NVFP4", "FP8", 16, 156, 0, "0.46.0.dev65+g977d34dc3"),
    "Gemma-4-26B-A4B-NVFP4": (
        "modelopt_fp4",
        "NVFP4",
        "FP8",
        16,
        93,
        0,
        "0.43.0rc2.dev91+gc79ebc014",
    ),
    "Kimi-K2.6-NVFP4": (
        "modelopt_fp4",
        "NVFP4",
        "FP8",
        16,
        124,
        0,
        "0.0.1.dev752+gbd4fc3a65.d20260504",
    ),
    "Llama-3.1-70B-Instruct-FP8": ("modelopt", "FP8", "FP8", None, 1, 0, "0.23.0"),
    "MiniMax-M2.5-NVFP4": ("modelopt_fp4", "NVFP4", "FP8", 16, 125, 0, "0.0.1.dev507+gbb6639d33"),
    "MiniMax-M3-NVFP4": (
        ("modelopt_mixed", "MIXED_PRECISION", None, None, 62, 76, "minimax-m3-mxfp8-nvfp4-mixed")
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": ("modelopt_fp4", "NVFP4", "FP8", 16, 60, 0, "0.29.0"),
    "Qwen3-235B-A22B-NVFP4": ("modelopt_fp4", "NVFP4", "FP8", 16, 95, 0, "0.33.0"),
    "Qwen3.5-122B-A10B-NVFP4": (
        ("modelopt_fp4", "NVFP4", "FP8", 16, 148, 0, "0.0.1.dev752+gbd4fc3a65.d20260504")
    ),
    "Qwen3.6-27B-NVFP4": ("modelopt_mixed", "MIXED_PRECISION", "FP8", None, 2, 401, "0.45.0"),
}

# model: module -> algorithm, under the names of the checkpoint and those an engine uses
MODULES = {
    "Qwen3-32B-FP8-Static-PerTensor": {"lm_head": None, "model.layers.0.self_attn.qkv_proj": "FP8"},
    "DeepSeek-V3.1-NVFP4": {
        "model.layers.3.self_attn.fused_qkv_a_proj_with_mqa": None,
        "model.layers.3.self_attn.kv_b_proj": None,
        "model.layers.3.self_attn.o_proj": "NVFP4",
        "model.layers.3.mlp.experts": "NVFP4",
        "model.layers.3.mlp.experts.255.up_proj": "NVFP4",
        "model.layers.61.mlp.experts.0.up_proj": None,
    },
    "DeepSeek-V4-Flash-NVFP4": {
        "layers.0.ffn.experts.17.w13": "NVFP4",
        "layers.42.ffn.experts": "NVFP4",
        "head": None,
    },
    "GLM-5-NVFP4": {
        "model.layers.0.self_attn.indexer.wq_b": None,
        "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa": None,
        "model.layers.5.mlp.experts": "NVFP4",
    },
    "GLM-5.2-NVFP4": {
        "model.layers.1.mlp.gate_up_proj": None,
        "model.layers.10.mlp.experts.0.gate_up_proj": "NVFP4",
        "model.layers.10.mlp.shared_experts.gate_up_proj": None,
        "model.layers.10.self_attn.qkv_proj": None,
        "model.layers.78.mlp.experts": None,
    },
    "Gemma-4-26B-A4B-NVFP4": {
        "language_model.model.layers.1.self_attn.qkv_proj": None,
        "model.language_model.layers.1.experts": "NVFP4",
        "model.vision_tower.encoder.layers.0.self_attn.q_proj": None,
    },
    "Kimi-K2.6-NVFP4": {
        "lm_head": None,
        "model.layers.1.self_attn.o_proj": None,
        "model.layers.1.mlp.experts": "NVFP4",
        "language_model.model.layers.10.mlp.experts.383.down_proj": "NVFP4",
        "vision_tower.encoder.blocks.0.wqkv": None,
        "mm_projector.proj.0": None,
    },
    "MiniMax-M2.5-NVFP4": {
        "model.layers.1.block_sparse_moe.gate": None,
        "model.layers.1.block_sparse_moe.experts.3.w13": "NVFP4",
        "model.layers.10.self_attn.qkv_proj": None,
    },
    "MiniMax-M3-NVFP4": {
        "language_model.model.layers.0.self_attn.qkv_proj": "MXFP8",
        "model.layers.0.mlp.gate_up_proj": "MXFP8",
        "model.layers.3.block_sparse_moe.experts": "NVFP4",
        "language_model.model.layers.10.block_sparse_moe.gate": None,
        "vision_tower.layers.0.mlp.fc1": None,
    },
    "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": {
        "backbone.layers.4.mixer.in_proj": None,
        "backbone.layers.5.mixer.qkv_proj": None,
        "backbone.layers.1.mixer.experts": "NVFP4",
    },
    "Qwen3-235B-A22B-NVFP4": {
        "model.layers.1.mlp.gate": None,
        "model.layers.1.mlp.gate_up_proj": "NVFP4",
        "model.layers.1.self_attn.qkv_proj": "NVFP4",
    },
    "Qwen3.5-122B-A10B-NVFP4": {
        "language_model.model.layers.0.linear_attn.in_proj_qkvz": None,
        "model.language_model.layers.0.mlp.experts": "NVFP4",
        "mtp.layers.0.mlp.experts": None,
        "model.visual.blocks.0.attn.qkv": None,
    },
    "Qwen3.6-27B-NVFP4": {
        "lm_head": "W4A16_NVFP4",
        "language_model.model.layers.0.linear_attn.in_proj_qkvz": "FP8",
        "model.language_model.layers.0.linear_attn.in_proj_b": None,
        "model.language_model.layers.0.linear_attn.in_proj_ba": None,
        "model.language_model.layers.0.mlp.gate_up_proj": "W4A16_NVFP4",
        "mtp.layers.0.mlp.gate_up_proj": None,
    },
}


def model_of(path):
    name = path.name.removesuffix(".json").removesuffix(".trimmed").removesuffix(".quantization_config")
    return name.partition("__")[2]


def test_the_tables_cover_every_model():
    assert CONFIGS
    assert {model_of(path) for path in CONFIGS} == set(RECORDS)
    assert set(MODULES) | {"Llama-3.1-70B-Instruct-FP8"} == set(RECORDS)


@each("path", CONFIGS)
def test_published_configurations(path):
    mapping = json.loads(path.read_text())
    config = QuantConfig.from_dict(mapping)
    family, *expected, excluded, listed, version = RECORDS[model_of(path)]
    native = mapping.get("quant_method") == "fp8"
    assert detect(mapping) == (None if native else family)
    assert [config.quant_algo, config.kv_cache_quant_algo, config.group_size] == expected
    assert (len(config.exclude_modules), len(config.quantized_layers)) == (excluded, listed)
    # The flat form of one of them leaves the producer out.
    assert config.producer.version == (version if "producer" in mapping else None)
    assert config.producer.name == ("modelopt" if "producer" in mapping else None)
    assert (config.conflicts, config.notes) == ((), ())
    assert config.native_algo == ("FP8_PB_WO" if native else None)
    assert QuantConfig.from_dict(config.to_dict()) == config
    for module, algo in MODULES.get(model_of(path), {}).items():
        assert config.layer_algo(module) == algo, module
    for entry in config.exclude_modules:
        module = entry.replace("*", "x").removesuffix(".x")
        assert config.is_excluded(module)
        assert config.layer_algo(module) == (config.native_algo if module != "head" else None)


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if "quantization_config" in path.name], ids=model_of
)
def test_both_files_of_a_published_model_agree(path, tmp_path):
    twin = path.with_name(path.name.replace(".quantization_config", ""))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": json.loads(path.read_text())}))
    (tmp_path / "hf_quant_config.json").write_text(twin.read_text())
    config = QuantConfig.from_pretrained(tmp_path)
    assert config.conflicts == ()
    assert config.exclude_modules == QuantConfig.from_dict(json.loads(twin.read_text())).exclude_modules


def test_the_page_of_published_checkpoints_is_what_their_configurations_say():
    """Algorithms, cache, and whether moqext runs all of them as linears and as experts."""
    page = (DATA.parent.parent / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+/[\w.-]+)` \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    said = {name.replace("/", "__"): cells for name, *cells in rows}
    assert len(said) == len(rows)
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in CONFIGS:
        config = QuantConfig.from_dict(json.loads(path.read_text()))
        algos = {config.layer_algo(module) for module in config.quantized_layers} or {config.quant_algo}
        model = re.sub(r"(\.trimmed|\.quantization_config)+$", "", path.name.removesuffix(".json"))
        of_model, of_cache = found.setdefault(model, (set(), set()))
        of_model |= {algo for algo in (*algos, config.native_algo) if algo}
        of_cache.add(config.kv_cache_quant_algo or "none")
    assert said.keys() == found.keys()
    for model, (algos, caches) in found.items():
        written, cache, run = said[model]
        assert set(written.split(", ")) == algos, model
        assert {cache} == caches, model
        as_experts = {name for name in LINEARS if not ALGORITHMS[name].low_rank}
        assert run == ("all" if algos <= as_experts else "not all"), model


# ------------------------------------------------------------------------------ against stored tensors


NVFP4_LIKE = {"NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A16_NVFP4", "W4A8_NVFP4_FP8"}
STORED = {  # dtypes of weight and scale: what they can be
    ("I8", "F32"): {"W8A8_SQ_PER_CHANNEL", "W8A16"},
    ("U8", "U8"): {"MXFP4", "W4A8_MXFP4_FP8"},
    ("U8", "F8_E4M3"): NVFP4_LIKE,
    ("U8", "F32"): {"W4A16_AWQ", "W4A8_AWQ"},
    ("F8_E4M3", "U8"): {"MXFP8"},
    ("F8_E4M3", "F32"): {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"},
}


def possible_algorithms(tensors, name, stem):
    """Tells what the tensors of one weight can be; `stem` is the name its scales begin with."""
    scale_dtype, scale = tensors[stem + "weight_scale"]
    found = set(STORED[tensors[name][0], scale_dtype])
    if found == STORED["F8_E4M3", "F32"]:
        found = {0: {"FP8", "FP8_PB_WO"}, 1: {"FP8_PER_CHANNEL_PER_TOKEN", "FP8"}}.get(
            len(scale), {"FP8_PB_WO"}
        )
    if found == STORED["U8", "F32"]:
        found = {"W4A8_AWQ"} if stem + "weight_scale_2" in tensors else {"W4A16_AWQ"}
    if stem + "input_scale" in tensors:
        found -= {"W4A16_NVFP4", "W8A16", "MXFP4", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"}
    return found


def check_tensors(config, tensors, unlisted=()):
    """Sets every stored weight against the configuration; `unlisted`: unquantized, though no rule says so."""
    quantized = odd = 0
    for name, (dtype, shape) in tensors.items():
        dotted = name.endswith(".weight")
        stem = name.removesuffix("weight") if dotted else name + "_"
        if len(shape) < 2 or not (dotted or name.endswith("_proj")):
            continue
        module = name.removesuffix(".weight")
        quant = config.layer_quant(module)
        if dtype in ("U8", "I8", "F8_E4M3"):
            quantized += 1
            assert quant.quant_algo in possible_algorithms(tensors, name, stem), (name, quant)
            if quant.quant_algo in NVFP4_LIKE and dotted and len(shape) == 2:
                scale = tensors[stem + "weight_scale"][1]
                assert quant.group_size * scale[1] == 2 * shape[1], (name, quant)
        elif module in unlisted:
            odd += 1
            assert quant.quant_algo is not None
        else:
            assert quant.quant_algo is None, (name, quant)
    assert odd == len(unlisted)
    return quantized


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests(path, tmp_path):
    manifest = json.loads(path.read_text())
    inline, file = manifest["config.json:quantization_config"], manifest["hf_quant_config"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": inline}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
    config = QuantConfig.from_pretrained(tmp_path)
    assert config.conflicts == ()
    assert config.notes == ()
    assert check_tensors(config, manifest["tensors"]) > 0
    # Either file alone gives the same answers, but for what the flat form cannot say.
    for document in (inline, file):
        alone = QuantConfig.from_dict(document)
        assert (alone.quant_algo, alone.kv_cache_quant_algo) == (
            config.quant_algo,
            config.kv_cache_quant_algo,
        )
        assert alone.group_size == config.group_size
        check_tensors(alone, manifest["tensors"])


def read_headers(directory):
    """Tensor name -> (dtype, shape) of all safetensors files in a directory."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        tensors |= {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
    return tensors


# The exporter lists Nemotron-H's embedding under a name that no tensor has (`backbone.embeddings`).
UNLISTED = {"nemotron_h_nvfp4": {"backbone.embedding"}}


@each("directory", DIRECTORIES)
def test_checkpoints(directory):
    config = QuantConfig.from_pretrained(directory)
    assert (config.conflicts, config.notes) == ((), ())
    assert check_tensors(config, read_headers(directory), UNLISTED.get(directory.name, set())) > 0

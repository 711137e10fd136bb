"""Configurations as SGLang reads them with the plug-in: detection, method of each layer, refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .sglang_stand_ins import stand_in

stand_in()

from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.layers.linear import LinearBase, ReplicatedLinear  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE  # noqa: E402
from sglang.srt.layers.quantization import (  # noqa: E402
    CPU_QUANTIZATION_METHODS,
    QUANTIZATION_METHODS,
    get_quantization_config,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.models.utils import WeightsMapper  # noqa: E402

import moqext  # noqa: E402
from moqext import CheckpointError, ConfigError, QuantConfig, UnsupportedQuantization  # noqa: E402
from moqext_sglang import config as plugin  # noqa: E402
from moqext_sglang import register  # noqa: E402
from moqext_sglang.cache import MoqextKVCacheMethod  # noqa: E402
from moqext_sglang.experts import MoqextFusedMoEMethod  # noqa: E402
from moqext_sglang.hand_back import reason_of_algorithm  # noqa: E402
from moqext_sglang.linear import MoqextLinearMethod  # noqa: E402
from moqext_sglang.registration import recognise  # noqa: E402

from . import sglang_cases as cases  # noqa: E402
from .sglang_cases import config_for, torch  # noqa: E402

pytestmark = pytest.mark.sglang
DATA = Path(__file__).resolve().parent.parent / "data"
CONFIGS = sorted((DATA / "configs").glob("*.json"))
CHECKPOINTS = sorted(path.parent for path in (DATA / "checkpoints").glob("*/hf_quant_config.json"))
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(autouse=True)
def _plugins():
    register()
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    with cases.engine():
        yield


def model_config(document=None, path="nowhere"):
    """SGLang's ModelConfig as far as detection goes: its own functions on a configuration of Transformers."""
    made = object.__new__(ModelConfig)
    made.hf_config = type("HfConfig", (), {} if document is None else {"quantization_config": document})()
    made.model_path, made.quantization, made.is_draft_model = str(path), None, False
    made.is_draft_quantization_explicit = False
    made._find_quant_modelslim_config = lambda: None
    return made


def method_of(made, kind, prefix):
    """The method of a layer of a class, as SGLang asks for it before the layer is made."""
    layer = object.__new__(kind)
    torch.nn.Module.__init__(layer)
    return made.get_quant_method(layer, prefix)


# -------------------------------------------------------------------------------------------- registration


def test_the_tables_have_moqext():
    assert {QUANTIZATION_METHODS[name] for name in plugin.CONFIGS} == set(plugin.CONFIGS.values())
    assert CPU_QUANTIZATION_METHODS["modelopt_fp4"] is plugin.MoqextFp4Config
    assert get_quantization_config("modelopt_mixed") is plugin.MoqextMixedPrecisionConfig
    assert QUANTIZATION_METHODS["mxfp8"].__module__.startswith("sglang.")
    before = dict(QUANTIZATION_METHODS)
    register()
    assert before == QUANTIZATION_METHODS
    assert plugin.MoqextFp4Config.get_name() == "modelopt_fp4"


PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from tests.frameworks import sglang_cases
from sglang.srt.plugins import load_plugins
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
load_plugins()
print(QUANTIZATION_METHODS["modelopt_fp4"].__module__)
"""


def entry_point(folder):
    """A folder with the entry points of pyproject.toml, as an installed distribution has them."""
    import tomllib

    root = DATA.parent.parent
    group = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"][
        "sglang.srt.plugins"
    ]
    info = folder / "moqext_entry-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moqext-entry\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in group.items()]
    (info / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines, ""]))
    return folder


@pytest.mark.parametrize(
    "switch, module",
    [
        (None, "moqext_sglang.config"),
        ("1", "moqext_sglang.config"),
        ("0", "sglang.srt.layers.quantization.modelopt_quant"),
    ],
)
def test_sglang_finds_the_entry_point(tmp_path, switch, module):
    """In a process of its own, as the engine starts; MOQEXT_SGLANG=0 leaves SGLang alone."""
    root = DATA.parent.parent
    paths = [str(entry_point(tmp_path)), str(root), str(Path(cases.__file__).parent), *sys.path]
    env = {**os.environ, "SGLANG_PLUGINS": "moqext", "PYTHONWARNINGS": "ignore"}
    env.pop("MOQEXT_SGLANG", None)
    if switch is not None:
        env["MOQEXT_SGLANG"] = switch
    program = PROGRAM.format(paths=paths)
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == module, done.stderr


def test_another_sglang_is_left_alone(monkeypatch):
    from moqext_sglang import registration

    monkeypatch.setattr(registration.tables, "QUANTIZATION_METHODS", {"fp8": object})
    with pytest.raises(RuntimeError, match="goes on with its own methods"):
        registration.register_methods()


# ----------------------------------------------------------------------------------------------- detection


@pytest.mark.parametrize(
    "algo, name",
    [
        ("FP8", "modelopt_fp8"),
        ("fp8_pb_wo", "modelopt_fp8"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "modelopt_fp8"),
        ("NVFP4", "modelopt_fp4"),
        ("W4A16_NVFP4", "modelopt_fp4"),
        ("W4A8_NVFP4_FP8", "modelopt_fp4"),
        ("NVFP4_AWQ", "modelopt_fp4"),
        ("NVFP4_SVD", "modelopt_fp4"),
        ("W4A16_AWQ", "modelopt_fp8"),
        ("W4A8_AWQ", "modelopt_fp8"),
        ("W8A8_SQ_PER_CHANNEL", "modelopt_fp8"),
        ("W8A16", "modelopt_fp8"),
    ],
)
@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_every_algorithm_is_recognised(tmp_path, algo, name, where):
    fields = {"quant_algo": algo, "exclude_modules": ["lm_head"], "group_size": 16 if "FP4" in algo else None}
    fields = {key: value for key, value in fields.items() if value is not None}
    if algo == "W4A8_NVFP4_FP8":
        fields["group_size"] = 32
    if where == "config.json":
        made = model_config({"quant_method": "modelopt", **fields})
    else:
        document = {"producer": {"name": "modelopt", "version": "0.46.0"}, "quantization": fields}
        (tmp_path / where).write_text(json.dumps(document))
        made = model_config(path=tmp_path)
    made._verify_quantization()
    assert made.quantization == name


def test_mixtures_of_fp8_alone_are_recognised():
    """SGLang takes one for a checkpoint of another maker, w4afp8."""
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
    fields = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    made = model_config({"quant_method": "modelopt", **fields})
    made._verify_quantization()
    assert made.quantization == "modelopt_mixed"
    w4afp8 = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": {"quant_algo": "W4A8_AWQ"}}}
    assert recognise({"quant_method": "w4afp8"}, None, {"quantization": w4afp8}) is None


def test_what_nobody_runs_is_refused(tmp_path):
    """SGLang loads such a checkpoint as if it were not quantized, without a word."""
    document = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP9", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="NVFP9"):
        model_config(path=tmp_path)._verify_quantization()
    for name in ("modelopt", "modelopt_fp4"):
        with pytest.raises(ConfigError, match="NVFP9"):
            QUANTIZATION_METHODS[name].from_config(document)


def test_configurations_of_others_are_not_touched():
    for document in (
        {"bits": 4},
        {"quantization": {"bits": 4}},
        {"quantization": {}},
        {"quantization": None},
    ):
        assert recognise(None, None, document) is None
    assert recognise({"quant_method": "modelopt_fp8"}, None, {}) is None


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_genuine_configurations(path):
    """Each layer has what QuantConfig says of it; formats that moqext does not run stay SGLang's."""
    document = json.loads(path.read_text())
    told = QuantConfig.from_dict(document)
    if moqext.detect(document) is None:
        pytest.skip("not claimed by moqext.detect")
    made = get_quantization_config(plugin.sglang_name(told)).from_config(
        {**document, "packed_modules_mapping": PACKED}
    )
    if not plugin.runs_any(plugin.read_checkpoint(document)):
        assert type(made).__module__.startswith("sglang.")
        return
    assert made.checkpoint == told
    assert made.kv_cache_quant_algo in (told.kv_cache_quant_algo, "auto")
    names = {name for name in (*told.exclude_modules, *told.quantized_layers) if "*" not in name}
    names |= {
        f"model.layers.3.{rest}" for rest in ("mlp.down_proj", "self_attn.o_proj", "self_attn.qkv_proj")
    }
    for name in sorted(name for name in names if not name.endswith("kv_b_proj")):
        algo = told.layer_algo(name)
        if algo is not None and reason_of_algorithm(algo, "exact") is not None:
            if name in told.quantized_layers:  # SGLang knows modules by the names that are listed
                assert type(method_of(made, LinearBase, name)).__module__.startswith("sglang."), name
            continue
        method = method_of(made, LinearBase, name)
        assert type(method) is (UnquantizedLinearMethod if algo is None else MoqextLinearMethod), name
        assert algo is None or method.quant_algo == algo
    experts = method_of(made, FusedMoE, "model.layers.5.mlp.experts")
    algo = told.layer_algo("model.layers.5.mlp.experts")
    assert (experts is None) is (algo is None)
    assert algo is None or (type(experts) is MoqextFusedMoEMethod and experts.quant_algo == algo)
    attention = method_of(made, RadixAttention, "model.layers.5.self_attn.attn")
    assert (type(attention) is MoqextKVCacheMethod) is (told.kv_cache_quant_algo is not None)


def test_names_of_the_model_are_mapped():
    fields = {"exclude_modules": ["model.language_model.layers.0.mlp*", "model.visual*"]}
    made = config_for("NVFP4", **fields)
    made.apply_weight_name_mapper(WeightsMapper(orig_to_new_prefix={"model.language_model.": "model."}))
    assert made.checkpoint.exclude_modules == ("model.layers.0.mlp*", "model.visual*")
    assert type(method_of(made, LinearBase, "model.layers.0.mlp.down_proj")) is UnquantizedLinearMethod
    assert type(method_of(made, LinearBase, "model.layers.1.mlp.down_proj")) is MoqextLinearMethod
    assert made.is_layer_excluded("model.visual.blocks.0")
    if hasattr(made, "is_linear_unquantized"):  # which 0.5.17 does not ask
        assert made.is_linear_unquantized("model.layers.0.mlp.up_proj")
    assert not made.is_layer_excluded("model.layers.1.mlp")


def test_an_excluded_layer_is_left_alone():
    made = config_for("NVFP4")
    layer = ReplicatedLinear(
        64, 32, bias=False, params_dtype=torch.bfloat16, quant_config=made, prefix="lm_head"
    )
    assert type(layer.quant_method) is UnquantizedLinearMethod
    assert layer.weight.dtype == torch.bfloat16


def test_parts_that_disagree_are_refused():
    made = config_for("FP8", PACKED, exclude_modules=["model.layers.0.self_attn.q_proj"])
    with pytest.raises(ConfigError, match="q_proj"):
        method_of(made, LinearBase, "model.layers.0.self_attn.qkv_proj")


def test_shared_experts_of_another_format_are_refused():
    made = config_for("NVFP4", exclude_modules=["model.layers.0.mlp.shared_experts*"])
    layer = object.__new__(FusedMoE)
    torch.nn.Module.__init__(layer)
    layer.num_fused_shared_experts = 1
    with pytest.raises(UnsupportedQuantization, match="--disable-shared-experts-fusion"):
        made.get_quant_method(layer, "model.layers.0.mlp.experts")


def test_compute_is_chosen_by_a_variable(monkeypatch):
    assert config_for("NVFP4").compute == "exact"
    monkeypatch.setenv("MOQEXT_SGLANG_COMPUTE", "auto")
    made = config_for("NVFP4")
    assert method_of(made, LinearBase, "x").compute == "auto"
    monkeypatch.setenv("MOQEXT_SGLANG_COMPUTE", "fp4")
    of = {
        algo: method_of(config_for(algo), LinearBase, "x").compute for algo in ("NVFP4", "W4A16_NVFP4", "FP8")
    }
    assert of == {"NVFP4": "fp4", "W4A16_NVFP4": "exact", "FP8": "exact"}
    monkeypatch.setenv("MOQEXT_SGLANG_COMPUTE", "fast")
    with pytest.raises(ValueError, match="MOQEXT_SGLANG_COMPUTE: expected one of exact, auto"):
        config_for("NVFP4")


# --------------------------------------------------------------------------------------------------- cache


def attention(algo="FP8"):
    made = config_for("FP8", kv_cache_quant_algo=algo)
    return RadixAttention(4, 32, 1.0, 2, 0, quant_config=made, prefix="model.layers.0.self_attn.attn")


@pytest.mark.parametrize(
    "loaded, expected",
    [
        ({"k_scale": 0.5, "v_scale": 0.25}, (0.5, 0.25)),
        ({"k_scale": 0.5}, (0.5, 0.5)),
        ({"v_scale": 0.25}, (0.25, 0.25)),
        ({}, (1.0, 1.0)),
    ],
)
def test_cache_scales(loaded, expected):
    layer = attention()
    for name, value in loaded.items():
        param = getattr(layer, name)
        param.weight_loader(param, torch.tensor([value]))
    layer.quant_method.process_weights_after_loading(layer)
    assert (layer.k_scale_float, layer.v_scale_float) == expected
    assert (layer.k_scale.item(), layer.v_scale.item()) == expected
    layer.k_scale.weight_loader(layer.k_scale, torch.tensor(2.0))
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.k_scale_float == 2.0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_cache_scales_that_mean_nothing_are_refused(value):
    layer = attention()
    layer.k_scale.weight_loader(layer.k_scale, torch.tensor(value))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.attn: k_scale"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_cache_with_biases_is_refused_by_name():
    with pytest.raises(UnsupportedQuantization, match=r"self_attn\.attn: .*NVFP4_AFFINE"):
        attention("NVFP4_AFFINE")

"""Checkpoint: its parts together, and the weights that come out of it."""

import copy
import json
import math
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moqext import Checkpoint, CheckpointError, ConfigError, reference
from moqext.reader.files import tensor_files
from moqext.reader.records import LayerRecord, Projection

DATA = Path(__file__).parent / "data"
CHECKPOINTS = sorted(path.parent for path in DATA.glob("*/*/config.json"))
MANIFESTS = sorted((DATA / "manifests").glob("*.json"))
ONE = {  # the bytes of 1.0; in U8 those of a pair of fp4 codes, or a scale below 1
    "BF16": b"\x80\x3f",
    "F32": b"\0\0\x80\x3f",
    "F8_E4M3": b"\x38",
    "U8": b"\x22",
    "I8": b"\1",
}
Tensors = dict[str, tuple[str, list[int], bytes]]


def weights(ckpt: Checkpoint) -> list[LayerRecord | Projection]:
    """Every record that has one weight."""
    found: list[LayerRecord | Projection] = []
    for layer in ckpt.layers():
        found += layer.members or layer.projections or (layer,)
    return found


def expected_weight(ckpt: Checkpoint, record: LayerRecord | Projection) -> np.ndarray:
    params = {role: ckpt.tensor(name) for role, name in record.tensors.items()}
    weight = reference.dequantize(params, record.quant_algo, group_size=record.group_size)
    return weight.swapaxes(-1, -2) if isinstance(record, Projection) and record.transposed else weight


def write_tensors(path: Path, tensors: Tensors) -> None:
    """A safetensors file of these."""
    header, end = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(content)]}
        end += len(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = b"".join(content for _, _, content in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def changed(source: Path, target: Path, change: Callable[[Tensors], None]) -> Checkpoint:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(source, target)
    with Checkpoint(source) as ckpt:
        tensors = {
            name: (info.dtype, list(info.shape), ckpt.tensor(name).tobytes())
            for name, info in ckpt.tensors.items()
        }
    change(tensors)
    write_tensors(target / "model.safetensors", tensors)
    return Checkpoint(target)


@pytest.fixture
def nvfp4(data: Path) -> Path:
    return data / "checkpoints" / "llama_nvfp4_kvfp8"


class TestDequantize:
    @pytest.mark.parametrize("directory", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
    def test_every_weight_is_what_the_reference_says(self, directory: Path) -> None:
        with Checkpoint(directory) as ckpt:
            records = weights(ckpt)
            assert records
            for record in records:
                expected = expected_weight(ckpt, record)
                weight = ckpt.dequantize(record.name)
                assert weight.dtype == np.float32
                assert weight.shape == expected.shape == record.shape
                np.testing.assert_array_equal(weight, expected, record.name, strict=True)

    def test_a_record_is_as_good_as_its_name(self, nvfp4: Path) -> None:
        ckpt = Checkpoint(nvfp4)
        record = ckpt.layers()[0]
        assert ckpt.layer(record.name) is record
        np.testing.assert_array_equal(ckpt.dequantize(record), ckpt.dequantize(record.name))

    @pytest.mark.parametrize("name", ["llama_fp8_kvfp8", "llama_nvfp4_kvfp8", "llama_mxfp8"])
    def test_carriers_give_the_same(self, data: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with_ml_dtypes = Checkpoint(data / "checkpoints" / name)
        expected = {record.name: with_ml_dtypes.dequantize(record) for record in weights(with_ml_dtypes)}
        tensor_files._extended_dtype.cache_clear()
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        try:
            ckpt = Checkpoint(data / "checkpoints" / name)
            assert {ckpt.tensor(name).dtype for name in ckpt.tensors} <= {
                np.dtype(kind) for kind in (np.uint8, np.uint16, np.float32)
            }
            for layer, weight in expected.items():
                np.testing.assert_array_equal(ckpt.dequantize(layer), weight, layer)
        finally:
            tensor_files._extended_dtype.cache_clear()

    @pytest.mark.parametrize(
        ("directory", "name", "part"),
        [
            (
                "checkpoints/qwen3moe_nvfp4",
                "model.layers.0.mlp.experts",
                "model.layers.0.mlp.experts.0.gate_proj",
            ),
            ("exports/llama4_nvfp4", "model.layers.0.feed_forward.experts", "gate_up_proj"),
        ],
    )
    def test_a_group_of_experts_has_no_single_weight(
        self, data: Path, directory: str, name: str, part: str
    ) -> None:
        ckpt = Checkpoint(data / directory)
        with pytest.raises(CheckpointError, match="ask for one") as caught:
            ckpt.dequantize(name)
        assert part in str(caught.value)

    @pytest.mark.parametrize("name", ["model.layers.9.mlp.up_proj", "model.norm", "lm_head", ""])
    def test_what_is_not_quantized_has_no_record(self, nvfp4: Path, name: str) -> None:
        ckpt = Checkpoint(nvfp4)
        with pytest.raises(
            CheckpointError,
            match=r"nothing quantized is named|is not quantized: its weight is stored as BF16",
        ) as caught:
            ckpt.dequantize(name)
        assert repr(name) in str(caught.value)
        assert caught.value.file == nvfp4

    def test_tensors_that_do_not_fit_each_other(self, nvfp4: Path, tmp_path: Path) -> None:
        def shorten(tensors: Tensors) -> None:
            name = "model.layers.0.mlp.up_proj.weight_scale"
            dtype, (rows, columns), content = tensors[name]
            tensors[name] = (dtype, [rows - 1, columns], content[columns:])

        ckpt = changed(nvfp4, tmp_path / "changed", shorten)
        with pytest.raises(CheckpointError, match="weight_scale") as caught:
            ckpt.dequantize("model.layers.0.mlp.up_proj")
        assert caught.value.tensor == "model.layers.0.mlp.up_proj.weight"
        assert "model.layers.0.mlp.up_proj:" in str(caught.value)

    @pytest.mark.parametrize("role", ["weight_scale", "weight_scale_2"])
    def test_a_missing_scale_is_never_one(self, nvfp4: Path, tmp_path: Path, role: str) -> None:
        def remove(tensors: Tensors) -> None:
            del tensors[f"model.layers.0.mlp.up_proj.{role}"]

        ckpt = changed(nvfp4, tmp_path / "changed", remove)
        with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj"):
            ckpt.dequantize("model.layers.0.mlp.up_proj")
        assert any(problem.severity == "error" for problem in ckpt.problems)

    def test_fp8_with_one_scale_of_two_axes_has_no_groups(self, data: Path, tmp_path: Path) -> None:
        """[1, 1] is also what FP8_PB_WO writes for one block: the record had its groups, and load failed."""
        name = "model.layers.0.self_attn.k_proj"

        def two_axes(tensors: Tensors) -> None:
            dtype, _, content = tensors[f"{name}.weight_scale"]
            tensors[f"{name}.weight_scale"] = (dtype, [1, 1], content)

        with changed(data / "checkpoints" / "llama_fp8_kvfp8", tmp_path / "copy", two_axes) as ckpt:
            record = ckpt.layer(name)
            assert (record.quant_algo, record.group_size, max(record.shape)) == ("FP8", None, 128)
            assert ckpt.load(name).out_features == record.shape[0]

    @pytest.mark.parametrize("role", ["weight", "weight_scale"])
    def test_signed_bytes_are_no_codes(self, nvfp4: Path, tmp_path: Path, role: str) -> None:
        def change_type(tensors: Tensors) -> None:
            name = f"model.layers.0.mlp.up_proj.{role}"
            tensors[name] = ("I8", *tensors[name][1:])

        ckpt = changed(nvfp4, tmp_path / "changed", change_type)
        for read in (ckpt.dequantize, ckpt.load):
            with pytest.raises(CheckpointError, match="I8") as caught:
                read("model.layers.0.mlp.up_proj")
            assert "model.layers.0.mlp.up_proj" in str(caught.value)

    def test_codes_that_no_export_holds_are_refused_by_name(self, data: Path, tmp_path: Path) -> None:
        def spoil(tensors: Tensors) -> None:
            dtype, shape, content = tensors["model.layers.0.mlp.up_proj.weight"]
            tensors["model.layers.0.mlp.up_proj.weight"] = (dtype, shape, b"\x7f" + content[1:])

        ckpt = changed(data / "checkpoints" / "llama_fp8_kvfp8", tmp_path / "changed", spoil)
        with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj: .*NaN"):
            ckpt.load("model.layers.0.mlp.up_proj")
        weight = ckpt.dequantize("model.layers.0.mlp.up_proj")
        assert np.flatnonzero(np.isnan(weight)).tolist() == [0]

    def test_an_empty_activation_scale_is_a_problem_of_its_layer(self, nvfp4: Path, tmp_path: Path) -> None:
        def empty(tensors: Tensors) -> None:
            tensors["model.layers.0.mlp.up_proj.input_scale"] = ("F32", [0], b"")

        ckpt = changed(nvfp4, tmp_path / "changed", empty)
        (problem,) = [problem for problem in ckpt.problems if problem.severity == "error"]
        assert (problem.code, problem.layer) == ("shape_mismatch", "model.layers.0.mlp.up_proj")
        with pytest.raises(CheckpointError, match="input_scale"):
            ckpt.load("model.layers.0.mlp.up_proj")

    @pytest.mark.parametrize(("rows", "columns"), [(0, 128), (4, 0), (0, 0)])
    def test_a_weight_without_elements(self, tmp_path: Path, rows: int, columns: int) -> None:
        tensors = {
            "a.weight": ("F8_E4M3", [rows, columns], b"\x38" * rows * columns),
            "a.weight_scale": ("F32", [], ONE["F32"]),
            "a.input_scale": ("F32", [], ONE["F32"]),
        }
        write_tensors(tmp_path / "model.safetensors", tensors)
        ckpt = Checkpoint(tmp_path)
        assert ckpt.dequantize("a").shape == (rows, columns)
        with pytest.raises(CheckpointError, match="a: its weight is empty"):
            ckpt.load("a")

    def test_a_shard_that_is_missing(self, data: Path, tmp_path: Path) -> None:
        source = data / "exports" / "nvfp4_sharded"
        shutil.copytree(source, tmp_path / "part")
        whole = Checkpoint(source)
        assert len(whole.files.files) > 2
        gone = whole.files.files[1]
        (tmp_path / "part" / gone.name).unlink()
        ckpt = Checkpoint(tmp_path / "part")
        (problem,) = [problem for problem in ckpt.problems if problem.code == "missing_shard"]
        assert gone.name in problem.message
        assert {name for name, info in whole.tensors.items() if info.file != gone} == set(ckpt.tensors)
        for record in weights(ckpt):
            np.testing.assert_array_equal(ckpt.dequantize(record.name), whole.dequantize(record.name))


class TestParts:
    def test_closed_by_the_context(self, nvfp4: Path) -> None:
        with Checkpoint(nvfp4) as ckpt:
            norm = ckpt.tensor("model.norm.weight")
        assert norm.shape == ckpt.tensors["model.norm.weight"].shape
        with pytest.raises(ValueError, match="closed"):
            ckpt.tensor("model.norm.weight")

    def test_the_example_of_the_page_runs(self, nvfp4: Path, request: pytest.FixtureRequest) -> None:
        page = (request.config.rootpath / "docs" / "checkpoint.md").read_text()
        example = page.split("```python\n")[1].split("```")[0]
        names: dict[str, object] = {}
        exec(example.replace("path/to/model", str(nvfp4)), names)
        assert isinstance(names["ckpt"], Checkpoint)

    def test_architectures(self, data: Path, tmp_path: Path) -> None:
        assert Checkpoint(data / "exports" / "gpt_oss_nvfp4").architectures == ("GptOssForCausalLM",)
        assert Checkpoint(tmp_path).architectures == ()
        (tmp_path / "config.json").write_text('{"architectures": null}')
        assert Checkpoint(tmp_path).architectures == ()
        (tmp_path / "config.json").write_text('{"architectures": ["A"], "time_step_limit": [0.0, Infinity]}')
        assert Checkpoint(tmp_path).architectures == ("A",)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ConfigError, match="not JSON"):
            Checkpoint(tmp_path)

    def test_without_a_configuration_the_tensors_tell(self, nvfp4: Path, tmp_path: Path) -> None:
        shutil.copy(nvfp4 / "model.safetensors", tmp_path)
        ckpt, whole = Checkpoint(tmp_path), Checkpoint(nvfp4)
        assert ckpt.config is None
        assert "no_quant_config" in [problem.code for problem in ckpt.problems]
        assert [layer.quant_algo for layer in ckpt.layers()] == [layer.quant_algo for layer in whole.layers()]
        np.testing.assert_array_equal(*(c.dequantize("model.layers.0.mlp.up_proj") for c in (ckpt, whole)))

    def test_a_configuration_that_cannot_be_understood(self, nvfp4: Path, tmp_path: Path) -> None:
        shutil.copy(nvfp4 / "model.safetensors", tmp_path)
        (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP5"}}')
        with pytest.raises(ConfigError, match="NVFP5"):
            Checkpoint(tmp_path)

    def test_json_files_alone(self, nvfp4: Path, tmp_path: Path) -> None:
        for path in nvfp4.glob("*.json"):
            shutil.copy(path, tmp_path)
        ckpt = Checkpoint(tmp_path)
        assert ckpt.config.quant_algo == "NVFP4"
        assert ckpt.layers() == ()
        assert not ckpt.files.has_weights
        assert "no_weights" in [problem.code for problem in ckpt.problems]

    def test_every_scale_is_read_once_and_told(self, data: Path) -> None:
        """Scales of gate and up were read again to compare them, a third of all."""
        with Checkpoint(data / "checkpoints" / "qwen3moe_nvfp4") as ckpt:
            told: list[tuple[int, int, str]] = []
            ckpt.findings(block_scales=True, progress=lambda *about: told.append(about))
            names = [name for _, _, name in told]
            singles = [name for name in names if not ckpt.tensors[name].shape]
            assert sorted(singles) == sorted(
                name for name, info in ckpt.tensors.items() if not info.shape and "scale" in name
            )
            assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
            assert told[-1][0] < told[-1][1] == len([name for name in ckpt.tensors if "scale" in name])

    @pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
    def test_every_manifest_as_a_directory(self, manifest: Path, tmp_path: Path) -> None:
        """Names, types and shapes of real exports, filled with ones: every layer found can be dequantized."""
        content = json.loads(manifest.read_text())
        config = {
            "architectures": content["config.json:architectures"],
            "quantization_config": content["config.json:quantization_config"],
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(content["hf_quant_config"]))
        ones = {
            name: (dtype, shape, ONE[dtype] * math.prod(shape))
            for name, (dtype, shape) in content["tensors"].items()
        }
        write_tensors(tmp_path / "model.safetensors", ones)
        with Checkpoint(tmp_path) as ckpt:
            assert ckpt.tensors.keys() == content["tensors"].keys()
            assert [problem for problem in ckpt.problems if problem.severity == "error"] == []
            scales = [name for name in ckpt.tensors if name.endswith("weight_scale")]
            records = weights(ckpt)
            assert sorted(record.tensors["weight_scale"] for record in records) == sorted(scales)
            for record in records:
                assert ckpt.dequantize(record).shape == record.shape


def test_a_checkpoint_is_neither_copied_nor_pickled(nvfp4):
    with Checkpoint(nvfp4) as ckpt:
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled; open the directory again"):
                way(ckpt)


@pytest.mark.parametrize("given", [None, 3, b"directory"])
def test_what_is_no_path_is_named(given):
    with pytest.raises(TypeError, match="directory: expected a path or a name on the Hub, got <class"):
        Checkpoint(given)

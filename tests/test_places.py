"""Meanings of a path: one file of several, a home directory, a pipeline's root, weights in another form."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moqext import Checkpoint, CheckpointError, QuantConfig
from moqext.__main__ import main

LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture
def nvfp4(data: Path) -> Path:
    return data / "checkpoints" / "llama_nvfp4_kvfp8"


@pytest.fixture
def two(nvfp4: Path, tmp_path: Path) -> Path:
    """Two files of one model, without an index or a configuration."""
    for name in ("a-fp4.safetensors", "b-fp4.safetensors"):
        shutil.copy(nvfp4 / "model.safetensors", tmp_path / name)
    return tmp_path


def test_two_files_of_one_model_name_what_to_give_and_that_opens(two: Path) -> None:
    """The error for the directory led to the file, and that of the file back to the directory."""
    with pytest.raises(CheckpointError, match="give one of the two files") as caught:
        Checkpoint(two)
    file = caught.value.reason.rpartition(" as ")[2]
    with Checkpoint(file) as ckpt:
        assert ckpt.file == Path(file)
        assert ckpt.directory == two
        assert list(ckpt.files.files) == [Path(file)]
        assert [problem.code for problem in ckpt.file_problems] == []
        assert ckpt.load(LAYER).in_features == 128


def test_a_file_by_its_name_in_the_directory(two: Path) -> None:
    with Checkpoint(two, file="b-fp4.safetensors") as ckpt:
        assert ckpt.file == two / "b-fp4.safetensors"
        assert ckpt.name == str(two / "b-fp4.safetensors")


def test_a_file_has_the_configuration_beside_it(nvfp4: Path) -> None:
    with Checkpoint(nvfp4 / "model.safetensors") as ckpt:
        assert ckpt.config is not None
        assert ckpt.config.quant_algo == "NVFP4"
        assert not ckpt.problems


def test_one_shard_misses_no_layer_of_the_others(data: Path) -> None:
    directory = data / "exports" / "nvfp4_sharded"
    shard = sorted(directory.glob("*.safetensors"))[1]
    with Checkpoint(shard) as ckpt:
        assert not ckpt.file_problems
        assert 0 < len(ckpt.tensors) < len(Checkpoint(directory).tensors)


def test_an_index_among_others_opens_its_shards(data: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(data / "exports" / "nvfp4_sharded", tmp_path / "model"))
    index = directory / "model.safetensors.index.json"
    os.rename(index, directory / "model.fp4.safetensors.index.json")
    (directory / "model.fp16.safetensors.index.json").write_text('{"weight_map": {}}')
    with Checkpoint(directory, file="model.fp4.safetensors.index.json") as ckpt:
        assert len(ckpt.tensors) == len(Checkpoint(data / "exports" / "nvfp4_sharded").tensors)


@pytest.mark.parametrize(
    "file, says",
    [
        ("absent.safetensors", "no such file; there are a-fp4.safetensors and b-fp4.safetensors"),
        ("../a-fp4.safetensors", "file: expected the name of a file in it"),
        ("/a-fp4.safetensors", "file: expected the name of a file in it"),
        ("", "file: expected the name of a file in it"),
        ("notes.txt", "file: expected a name that ends in .safetensors"),
    ],
)
def test_a_name_of_no_file_of_weights(two: Path, file: str, says: str) -> None:
    (two / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=says):
        Checkpoint(two, file=file)


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("given", [["a-fp4.safetensors"], [".", "--file", "a-fp4.safetensors"]])
def test_commands_take_one_file(two: Path, monkeypatch, capsys, command: str, given: list[str]) -> None:
    monkeypatch.chdir(two)
    assert main([command, *given]) == 0
    assert "mlp.up_proj" in capsys.readouterr().out


def test_convert_takes_one_file_and_nothing_from_beside_it(two: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(two)
    Path("note.txt").touch()
    assert main(["convert", "a-fp4.safetensors", "out"]) == 0
    assert [path.name for path in Path("out").iterdir()] == ["model.safetensors"]
    assert main(["convert", "a-fp4.safetensors", ".", "--overwrite"]) == 2
    assert "is the directory of the file that is converted" in capsys.readouterr().err
    assert Path("b-fp4.safetensors").exists()


@pytest.fixture
def pipeline(nvfp4: Path, tmp_path: Path) -> Path:
    """The root of a pipeline: a quantized transformer, a plain autoencoder, a scheduler without weights."""
    shutil.copytree(nvfp4, tmp_path / "transformer")
    (tmp_path / "vae").mkdir()
    save_file({"conv.weight": np.ones(4, np.float32)}, tmp_path / "vae" / "model.safetensors")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    return tmp_path


def test_the_root_of_a_pipeline_opens_the_component_that_is_quantized(pipeline: Path) -> None:
    with Checkpoint(pipeline) as ckpt, Checkpoint(pipeline, component="transformer") as same:
        assert ckpt.component == same.component == "transformer"
        assert ckpt.name == same.name == str(pipeline / "transformer")
        assert ckpt.directory == pipeline / "transformer"
        assert ckpt.load(LAYER).in_features == 128
    with Checkpoint(pipeline, component="vae") as ckpt:
        assert list(ckpt.tensors) == ["conv.weight"]


def test_a_component_without_a_configuration_is_told_by_its_scales(pipeline: Path) -> None:
    for name in ("config.json", "hf_quant_config.json"):
        (pipeline / "transformer" / name).unlink()
    assert Checkpoint(pipeline).component == "transformer"


def test_of_two_quantized_components_one_has_to_be_named(pipeline: Path, nvfp4: Path, capsys) -> None:
    """Wan has a transformer for each half of the steps."""
    shutil.copytree(nvfp4, pipeline / "transformer_2")
    assert main(["inspect", str(pipeline)]) == 2
    assert capsys.readouterr().err.endswith(
        "a Diffusers pipeline: give the component that is quantized, --component transformer or "
        "transformer_2 (component=)\n"
    )
    assert main(["inspect", str(pipeline), "--component", "transformer_2"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(pipeline / "transformer_2")


@pytest.mark.parametrize("name", ["unet", "..", ".", "", "transformer/vae", "/"])
def test_a_component_that_is_not_there(pipeline: Path, name: str) -> None:
    says = "no such directory; there are transformer and vae" if name == "unet" else "expected the name of"
    with pytest.raises(CheckpointError, match=f"component: {says}"):
        Checkpoint(pipeline, component=name)


def test_commands_take_the_root_of_a_pipeline(pipeline: Path, tmp_path_factory, capsys) -> None:
    plain = tmp_path_factory.mktemp("plain")
    config = pipeline / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_diffusers_version": "0.35.0"}))
    assert main(["verify", str(pipeline)]) == 0
    assert main(["convert", str(pipeline), str(plain / "transformer")]) == 0
    assert "it takes the place of transformer in the pipeline" in capsys.readouterr().out
    assert (plain / "transformer" / "diffusion_pytorch_model.safetensors").exists()
    (plain / "model_index.json").write_text("{}")
    shutil.copytree(pipeline / "vae", plain / "vae")
    assert main(["compare", str(pipeline), str(plain), "--max-error", "0.01"]) == 0
    out = tmp_path_factory.mktemp("quantized")
    assert main(["quantize", str(plain), str(out), "--to", "MXFP8", "--component", "transformer"]) == 0
    assert main(["verify", str(out)]) == 0


def test_of_the_variants_of_a_component_the_usual_name_is_read(pipeline: Path) -> None:
    directory = pipeline / "transformer"
    shutil.copy(directory / "model.safetensors", directory / "diffusion_pytorch_model.fp16.safetensors")
    os.rename(directory / "model.safetensors", directory / "diffusion_pytorch_model.safetensors")
    with Checkpoint(pipeline) as ckpt:
        assert [path.name for path in ckpt.files.files] == ["diffusion_pytorch_model.safetensors"]


def test_directories_below_are_named_where_none_is_quantized(pipeline: Path, capsys) -> None:
    shutil.rmtree(pipeline / "transformer")
    (pipeline / "model_index.json").unlink()
    assert main(["inspect", str(pipeline)]) == 2
    assert capsys.readouterr().err.endswith("with safetensors files, --component vae (component=)\n")


@pytest.mark.parametrize(
    "name, says",
    [
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf: GGUF, which llama.cpp and Ollama read"),
        ("pytorch_model.bin", "pytorch_model.bin: weights as torch.save writes them, which PyTorch reads"),
        ("consolidated.00.pth", "which PyTorch reads"),
        ("model.onnx", "which ONNX Runtime reads"),
        ("rank0.engine", "an engine of TensorRT"),
    ],
)
def test_weights_in_another_form_are_no_empty_checkpoint(tmp_path: Path, name: str, says: str) -> None:
    """A directory of GGUF files opened as one with no tensors."""
    (tmp_path / name).touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=says):
        Checkpoint(tmp_path)


def test_weights_in_another_form_beside_a_configuration(nvfp4: Path, tmp_path: Path, capsys) -> None:
    shutil.copy(nvfp4 / "hf_quant_config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    for command in ("inspect", "verify"):
        main([command, str(tmp_path)])
        assert "pytorch_model.bin: weights as torch.save writes them" in "".join(capsys.readouterr())


def test_a_tilde_is_the_home_directory(nvfp4: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(nvfp4.parent))
    with Checkpoint(f"~/{nvfp4.name}") as ckpt:
        assert ckpt.directory == nvfp4
    assert QuantConfig.from_pretrained(Path("~", nvfp4.name)).quant_algo == "NVFP4"
    monkeypatch.setenv("HOME", str(tmp_path))
    with Checkpoint(nvfp4) as ckpt:
        ckpt.convert("~/out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_directory_that_is_called_tilde_comes_first(nvfp4: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(nvfp4, "~")
    assert Checkpoint("~").tensors

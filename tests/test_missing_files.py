"""Half a download: what is asked for says which file it is in and how to get that, never another layer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moqext import Checkpoint, CheckpointError
from moqext.__main__ import main
from moqext.reader.files.hub import fetch_again

LAYER = "model.layers.3.mlp.down_proj"
THIRD = "model-00003-of-00005.safetensors"
AGAIN = f"`hf download ORG/NAME {THIRD} --local-dir "


@pytest.fixture
def half(data: Path, tmp_path: Path) -> Path:
    """Five files, the third of which is gone."""
    directory = Path(shutil.copytree(data / "exports" / "nvfp4_sharded", tmp_path / "half"))
    (directory / THIRD).unlink()
    return directory


@pytest.fixture
def lost(data: Path, tmp_path: Path) -> Callable[[str], Checkpoint]:
    """Opens a copy of which the index has one tensor of the layer in another file, which is gone."""

    def lose(role: str) -> Checkpoint:
        directory = Path(shutil.copytree(data / "exports" / "nvfp4_sharded", tmp_path / role))
        path, name = directory / "model.safetensors.index.json", f"{LAYER}.{role}"
        index = json.loads(path.read_text())
        shard = directory / index["weight_map"].get(name, THIRD)
        index["weight_map"][name] = "lost.safetensors"
        path.write_text(json.dumps(index))
        hidden = name.replace("layers.3", "layers.X").encode()
        shard.write_bytes(shard.read_bytes().replace(f'{name}"'.encode(), hidden + b'"'))
        return Checkpoint(directory)

    return lose


@pytest.mark.parametrize("ask", [Checkpoint.load, Checkpoint.dequantize, Checkpoint.layer])
def test_a_layer_in_a_missing_file_names_that_file(half: Path, ask: Callable[..., object]) -> None:
    """A layer was suggested whose name differs by its number alone."""
    with Checkpoint(half) as ckpt, pytest.raises(CheckpointError) as caught:
        ask(ckpt, LAYER)
    assert caught.value.file == half / THIRD
    assert "which is missing" in caught.value.reason
    assert AGAIN in caught.value.reason
    assert "did you mean" not in caught.value.reason


def test_a_tensor_in_a_missing_file_says_how_to_get_it(half: Path) -> None:
    with Checkpoint(half) as ckpt, pytest.raises(CheckpointError, match="ORG/NAME") as caught:
        ckpt.tensor(f"{LAYER}.weight")
    assert AGAIN in caught.value.reason


def test_a_layer_in_a_damaged_file_names_that_file(half: Path) -> None:
    (half / THIRD).write_bytes(b"<html>")
    with Checkpoint(half) as ckpt, pytest.raises(CheckpointError, match="an HTML page") as caught:
        ckpt.load(LAYER)
    assert "--force-download`" in caught.value.reason


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_commands_say_how_to_get_a_missing_file(half: Path, capsys, command: str) -> None:
    main([command, str(half)])
    assert f"{THIRD} is missing; {AGAIN}" in capsys.readouterr().out


def test_without_an_index_the_missing_file_is_told_of(half: Path) -> None:
    (half / "model.safetensors.index.json").unlink()
    with Checkpoint(half) as ckpt, pytest.raises(CheckpointError, match="1 of 5 files") as caught:
        ckpt.load(LAYER)
    assert "did you mean" not in caught.value.reason


@pytest.mark.parametrize("role", ["weight", "weight_scale", "weight_scale_2"])
def test_one_tensor_of_a_weight_in_a_missing_file(lost: Callable[[str], Checkpoint], role: str) -> None:
    for ask in (Checkpoint.load, Checkpoint.dequantize):
        with lost(role) as ckpt, pytest.raises(CheckpointError, match="missing; `hf download") as caught:
            ask(ckpt, LAYER)
        assert caught.value.tensor == f"{LAYER}.{role}"
        shutil.rmtree(ckpt.directory)


def test_a_bias_in_a_missing_file_is_no_absent_bias(lost: Callable[[str], Checkpoint]) -> None:
    """The layer ran without it."""
    with lost("bias") as ckpt:
        with pytest.raises(CheckpointError, match="missing; `hf download"):
            ckpt.load(LAYER)
        assert ckpt.dequantize(LAYER).any()


def test_experts_of_which_one_is_in_a_missing_file(data: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(data / "checkpoints" / "qwen3moe_nvfp4", tmp_path / "moe"))
    names = list(Checkpoint(directory).tensors)
    shard = directory / "part.safetensors"
    (directory / "model.safetensors").rename(shard)
    weights = dict.fromkeys(names, shard.name)
    gone = "model.layers.0.mlp.experts.4.up_proj.weight"  # one more than there are
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weights | {gone: "lost.safetensors"}})
    )
    with Checkpoint(directory) as ckpt, pytest.raises(CheckpointError, match="which is missing") as caught:
        ckpt.load("model.layers.0.mlp.experts")
    assert caught.value.tensor == gone


def test_the_cache_of_the_hub_tells_the_model() -> None:
    cached = Path("/home/me/hub/models--nvidia--Qwen3-8B-FP4/snapshots/f00d")
    assert fetch_again(cached, "a.safetensors") == "`hf download nvidia/Qwen3-8B-FP4 a.safetensors`"


@pytest.mark.parametrize(
    "name, meant",
    [
        ("model.layers.3.mlp.down_proj.wieght", "model.layers.3.mlp.down_proj.weight"),
        ("model.layers.3.mlp.dwn_proj.weight", "model.layers.3.mlp.down_proj.weight"),
        ("model.nrom.weight", "model.norm.weight"),
    ],
)
def test_a_misspelt_tensor_is_told_what_was_meant(data: Path, name: str, meant: str) -> None:
    with (
        Checkpoint(data / "exports" / "nvfp4_sharded") as ckpt,
        pytest.raises(CheckpointError, match=r"no such tensor; did you mean") as caught,
    ):
        ckpt.tensor(name)
    assert f"did you mean {meant}" in caught.value.reason

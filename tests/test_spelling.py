"""dtype and device as objects of frameworks, and what of moqext shows under tab."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import moqext
from moqext.ops.spelling import device_name, dtype_name


class JaxScalar(type):
    """jax.numpy.bfloat16 is a class, of no array's kind, with a dtype."""

    dtype = np.dtype("float16")


class half(metaclass=JaxScalar):
    pass


def test_dtypes_of_numpy_and_alike():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    given = [np.float32, np.dtype("float16"), half, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)]
    assert list(map(dtype_name, given)) == ["float32", "float16", "float16", "bfloat16", "bfloat16"]


def test_dtypes_and_devices_of_torch():
    torch = pytest.importorskip("torch")
    for name in ("bfloat16", "float16", "float32"):
        method = moqext.LinearMethod("FP8", 32, [8], dtype=getattr(torch, name), device=torch.device("cpu"))
        assert (method.dtype, method.device) == (name, "cpu")
    assert device_name(torch.device("cuda", 1)) == "cuda:1"
    with pytest.raises(ValueError, match=r'dtype: .* got "float64"'):
        moqext.LinearMethod("FP8", 32, [8], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"device: .* got 'meta'"):
        moqext.LinearMethod("FP8", 32, [8], device=torch.device("meta"))


def test_devices_of_jax():
    assert device_name(SimpleNamespace(platform="gpu", local_hardware_id=2)) == "cuda:2"
    assert device_name(SimpleNamespace(platform="cpu", id=0)) == "cpu"


@pytest.mark.parametrize("wrong", [3, int, b"cpu", None])
def test_what_is_neither_is_refused_by_name(wrong):
    with pytest.raises(TypeError, match="dtype"):
        moqext.LinearMethod("FP8", 32, [8], dtype=wrong)
    with pytest.raises(TypeError, match="device"):
        moqext.LinearMethod("FP8", 32, [8], device=wrong)


def test_layers_and_operations_take_them(rng, data):
    ckpt = moqext.Checkpoint(data / "checkpoints" / "llama_nvfp4_kvfp8")
    layer = ckpt.load("model.layers.0.mlp.up_proj", dtype=np.float32)
    x = rng.standard_normal((2, layer.in_features), dtype=np.float32)
    assert layer(x).dtype == np.float32
    codes = np.zeros((2, 16), np.uint8)
    assert moqext.ops.dequantize(codes, "FP8", weight_scale=1.0, dtype=np.float16).dtype == np.float16


def test_float32_arrays_under_bfloat16_are_told_both_ways(rng, data):
    layer = moqext.Checkpoint(data / "checkpoints" / "llama_nvfp4_kvfp8").load("model.layers.0.mlp.up_proj")
    with pytest.raises(TypeError, match=r'dtype="float32", or convert x, by x.to\(torch.bfloat16\)'):
        layer(np.zeros((1, layer.in_features), np.float32))


def test_only_what_is_public_shows():
    shown = set(dir(moqext))
    assert shown == {*moqext.__all__, "reference"}
    assert all(hasattr(moqext, name) for name in shown)


def test_a_layer_is_typed_as_x_and_options_as_literals(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np\n"
        "import moqext\n"
        "layer = moqext.Checkpoint('.').load('a', dtype=np.float32)\n"
        "reveal_type(layer(np.zeros(3)))\n"
        "moqext.LinearMethod('FP8', 32, [8], compute='exakt')\n"
        "moqext.LinearMethod('FP8', 32, [8], dtype='float64')\n"
    )
    home = Path(moqext.__file__).parent.parent
    command = [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", str(tmp_path), str(program)]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True)
    assert 'program.py:4: note: Revealed type is "numpy.ndarray' in done.stdout, done.stdout + done.stderr
    assert 'program.py:5: error: Argument "compute"' in done.stdout
    assert 'program.py:6: error: Argument "dtype"' in done.stdout
    assert "program.py:3" not in done.stdout


def test_the_first_programs_of_the_pages_are_right_to_a_type_checker(tmp_path):
    """Every call of a loaded layer was an error, since it might have been experts."""
    pytest.importorskip("mypy")
    home = Path(moqext.__file__).parent.parent
    page = (home / "docs" / "start.md").read_text()
    (first,) = [snippet for snippet in re.findall(r"```python\n(.*?)```", page, re.S) if "ckpt = " in snippet]
    program = tmp_path / "program.py"
    program.write_text(
        first
        + "layer = ckpt.load('model.layers.0.mlp.up_proj')\n"
        + "reveal_type(layer(x))\n"
        + "print(layer.in_features, ckpt.load(ckpt.layers()[0]).out_features)\n"
        + "some = ckpt.load('model.layers.0.mlp.experts', top_k=2)\n"
        + "reveal_type(some)\n"
        + "experts = ckpt.load_experts('model.layers.0.mlp.experts')\n"
        + "reveal_type(experts(x, x, x))\n"
        + "print(experts.hidden_size)\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file=", "--strict", "--cache-dir", str(tmp_path)]
    done = subprocess.run([*command, str(program)], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert [name.partition("[")[0] for name in revealed] == [
        "numpy.ndarray",
        "moqext.layers.load_experts.ExpertLayer",
        "numpy.ndarray",
    ]

"""SGLang's own engine, with its processes, serves genuine checkpoints through the plug-in."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("sglang") is None or find_spec("uvloop") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from ..work import HANGS
from .sglang_process.sglang_absent import is_absent
from .test_sglang_config import DATA, entry_point

pytestmark = pytest.mark.sglang
HERE = Path(__file__).resolve().parent / "sglang_process"


@pytest.fixture
def program(tmp_path):
    """`program(task, directory, device, dtype, **variables)`: what a task gives, or None, and all it said."""
    root = DATA.parent.parent
    paths = [HERE, entry_point(tmp_path / "installed"), *filter(None, sys.path), root, root / "python"]

    def run(task, directory, device="cpu", dtype="float32", **variables):
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_PLUGINS": "moqext", **variables}
        env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        done = subprocess.run(
            [sys.executable, HERE / "sglang_engine.py", task, directory, device, dtype],
            env=env,
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=False,
            start_new_session=True,  # an engine that fails ends its whole group
        )
        text = done.stdout + done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        return (json.loads(lines[0].removeprefix("RESULT ")) if lines else None), text

    return run


def without_cache(path, directory):
    """A copy of a checkpoint that says nothing of the cache: Transformers keeps the dtype of the model."""
    shutil.copytree(path, directory)
    for name in ("config.json", "hf_quant_config.json"):
        document = json.loads((directory / name).read_text())
        inner = document.get("quantization_config") or document.get("quantization") or {}
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            inner.pop(key, None)
        (directory / name).write_text(json.dumps(document))
    return directory


def with_wide_heads(directory):
    """The checkpoint with half as many heads, of 64 columns: SGLang's rotary embedding takes no 32."""
    from safetensors.torch import load_file, save_file

    config = directory / "config.json"
    sizes = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | sizes))
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        tensors[name] = tensors[name].repeat(2)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


NAMES = ["llama_fp8_kvfp8", "llama_nvfp4_kvfp8", "llama_int4_awq", "llama_int8_sq", "qwen3moe_nvfp4"]


def check_tokens(program, directory, *where, **variables):
    """The tokens are those of Transformers, all of them, also after `update_weights_from_disk`."""
    expected, text = program("reference", directory, *where)
    assert expected is not None, text[-3000:]
    found, text = program("tokens", directory, *where, **variables)
    assert found is not None, text[-3000:]
    assert "moqext runs this checkpoint (" in text, text[-3000:]
    before, loaded, after = found
    assert before == expected
    assert loaded
    assert after == expected


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(tmp_path, program, name):
    check_tokens(program, without_cache(DATA / "checkpoints" / name, tmp_path / name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_tokens_on_a_gpu(tmp_path, program, name):
    """In graphs, which hold the memory of weights that are loaded again."""
    directory = without_cache(DATA / "checkpoints" / name, tmp_path / name)
    if name.startswith("qwen3moe"):
        with_wide_heads(directory)
    dtype = "float32" if is_absent("sgl_kernel") else "bfloat16"  # which is what its RMS norm takes
    check_tokens(program, directory, "cuda", dtype, SGLANG_FORCE_FUSED_OP_BACKEND="torch")


def test_without_the_plug_in_sglang_refuses_it(tmp_path, program):
    """The plug-in made the tokens above: SGLang's own method is not for float32."""
    directory = without_cache(DATA / "checkpoints" / "llama_fp8_kvfp8", tmp_path / "fp8")
    found, text = program("tokens", directory, MOQEXT_SGLANG="0")
    assert found is None
    assert "torch.float32 is not supported for quantization method modelopt_fp8" in text, text[-3000:]

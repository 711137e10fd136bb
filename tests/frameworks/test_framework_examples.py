"""The examples of the framework packages run and print what their heads promise."""

import ast
import re
import runpy
from pathlib import Path

import pytest

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

"""`moqext generate`: text of a checkpoint, the same as Transformers makes of the loaded model."""

import json
import re
import shutil
from pathlib import Path

import pytest

import moqext
from moqext.__main__ import main

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="5.16")

TEMPLATE = "{% for message in messages %}w2 {{ message['content'] }} w3 {% endfor %}"
PROMPT = "w7 w8 w9"


@pytest.fixture
def with_words(data, tmp_path):
    """A genuine checkpoint with a tokenizer of one word for each of its tokens, "w0", "w1", ..."""
    tokenizers = pytest.importorskip("tokenizers")

    def make(name="llama_nvfp4_kvfp8", template=None):
        directory = Path(shutil.copytree(data / "checkpoints" / name, tmp_path / "model"))
        size = json.loads((directory / "config.json").read_text())["vocab_size"]
        words = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0")
        )
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="w0", chat_template=template
        )
        fast.save_pretrained(directory)
        return directory

    return make


def of_transformers(directory, ids, tokens, **options):
    """Token ids after those given, from the model as a program loads it."""
    import moqext_transformers

    model = moqext_transformers.from_pretrained(directory)
    given = torch.tensor([ids])
    out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, **options)
    return out[0, len(ids) :].tolist()


def words(ids):
    return [f"w{index}" for index in ids]


def test_it_is_what_transformers_generates(with_words, capsys):
    directory = with_words()
    expected = of_transformers(directory, [7, 8, 9], 12, do_sample=False)
    assert main(["generate", str(directory), "--prompt", PROMPT, "--max-new-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    eos = json.loads((directory / "config.json").read_text())["eos_token_id"]
    assert out.split() == [*PROMPT.split(), *words(token for token in expected if token != eos)]
    assert out.endswith("\n")
    told = err.splitlines()[-1]
    assert told.startswith(f"{len(expected)} tokens, ")
    assert re.search(
        r" tokens/s; the first after .+ \(prompt: 3 tokens\); NVFP4 in bfloat16 on cpu; loaded in ", told
    )


def test_json_has_text_and_speed(with_words, capsys):
    directory = with_words()
    command = ["generate", str(directory), "--prompt", PROMPT, "--max-new-tokens", "1", "--json"]
    assert main([*command, "--dtype", "float32"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["schema"], result["directory"]) == (1, str(directory))
    assert (result["tokens"], result["prompt_tokens"], result["tokens_per_second"]) == (1, 3, None)
    assert (result["dtype"], result["quant_algo"], result["device"]) == ("float32", "NVFP4", "cpu")
    assert result["seed"] is None
    assert result["first_seconds"] > 0
    assert result["text"].startswith(PROMPT)
    page = (
        (Path(__file__).parents[2] / "docs" / "cli.md")
        .read_text()
        .split("\n## generate")[1]
        .split("\n## ")[0]
    )
    assert [key for key in result if f"`{key}`" not in page] == []
    assert not err


def test_a_temperature_draws_and_the_seed_repeats_it(with_words, capsys):
    command = ["generate", str(with_words()), "--prompt", PROMPT, "--max-new-tokens", "20"]
    command += ["--temperature", "2", "--json"]

    def drawn(*options):
        assert main([*command, *options]) == 0
        result = json.loads(capsys.readouterr().out)
        return result["seed"], result["text"]

    first = drawn("--seed", "5")
    assert first == drawn("--seed", "5")
    assert first[0] == 5
    seed, text = drawn()
    assert drawn("--seed", str(seed)) == (seed, text)
    # Four seeds give one text of twenty words only where nothing is drawn.
    assert len({drawn("--seed", str(other))[1] for other in range(4)}) > 1


def test_chat_puts_the_prompt_into_the_template(with_words, capsys):
    directory = with_words(template=TEMPLATE)
    expected = of_transformers(directory, [2, 7, 8, 9, 3], 4, do_sample=False)
    command = ["generate", str(directory), "--prompt", PROMPT, "--max-new-tokens", "4"]
    assert main([*command, "--chat"]) == 0
    out, err = capsys.readouterr()
    eos = json.loads((directory / "config.json").read_text())["eos_token_id"]
    assert out.split() == words(token for token in expected if token != eos)
    assert "(prompt: 5 tokens)" in err


def test_a_model_that_is_not_quantized_runs_too(with_words, tmp_path, capsys):
    directory = with_words()
    moqext.Checkpoint(directory).convert(tmp_path / "plain")
    command = ["--prompt", PROMPT, "--max-new-tokens", "2"]
    assert main(["generate", str(tmp_path / "plain"), *command]) == 0
    assert "; not quantized in bfloat16 on cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, says",
    [
        (["--prompt", ""], "prompt: expected text that has a token, got ''"),
        (["--prompt", PROMPT, "--chat"], "chat: the tokenizer has no template for it"),
        (
            ["--prompt", PROMPT, "--compute", "fp8", "--device", "cuda:77"],
            "--device cuda:77: no such CUDA device",
        ),
    ],
)
def test_what_cannot_be_is_one_line(with_words, capsys, options, says):
    assert main(["generate", str(with_words()), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"moqext: error: {says}")
    assert err.count("\n") == 1


def test_a_checkpoint_without_a_tokenizer_says_so(data, capsys):
    assert main(["generate", str(data / "checkpoints" / "llama_nvfp4_kvfp8"), "--prompt", PROMPT]) == 2
    err = capsys.readouterr().err
    assert "no tokenizer that Transformers can load (tokenizer.json and tokenizer_config.json" in err
    assert err.count("\n") == 1


def test_it_streams(with_words):
    """A part is written when its tokens are there, not all at the end."""
    import moqext_transformers.generating

    parts = []
    found = moqext_transformers.generating.generate(
        str(with_words()), PROMPT, max_new_tokens=8, write=parts.append
    )
    assert len(parts) > 3
    assert "".join(parts) == found["text"]


def test_a_terminal_gets_no_control_characters(capsys):
    from moqext.cli.generate import _write

    _write("a\x1b[2Jb\nc\td\x07")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "\nc\td" in out

"""Opening what somebody else gave: no directory, no checkpoint file; the message says what to do."""

import pytest

from moqext import Checkpoint, CheckpointError, ConfigError, QuantConfig
from moqext.reader.files.untrusted import RepeatedKeys, directory_fault, parse_object

POINTER = b"""version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 4967215360
"""
PAGE = b'\n<!DOCTYPE html>\n<html lang="en"><head><title>Sign in</title></head></html>\n'


@pytest.mark.parametrize(
    "content, says",
    [
        (POINTER, "a Git LFS pointer, not the file itself; run `git lfs pull`"),
        (PAGE, "an HTML page, not the file itself, as a failed download leaves; download it again"),
        (b"<html>404</html>", "an HTML page"),
        (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "an XML page"),
        (b"PK\x03\x04\x14\0\x08\x08" + bytes(60), "a zip archive, as torch.save writes"),
        (b"", "an empty file, as an interrupted download leaves"),
        (bytes(4096), "the header is empty; an unfinished download has such zeros"),
    ],
    ids=["Git LFS pointer", "HTML", "HTML without a declaration", "XML", "torch.save", "empty", "zeros"],
)
def test_what_stands_in_place_of_the_weights(tmp_path, content, says):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert says in str(caught.value)
    assert caught.value.file == tmp_path / "model.safetensors"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "quant_cfg.json"])
@pytest.mark.parametrize(
    "content, says",
    [(POINTER, "a Git LFS pointer"), (PAGE, "an HTML page"), (b"", "not JSON: the file is empty")],
    ids=["Git LFS pointer", "HTML", "empty"],
)
def test_what_stands_in_place_of_a_configuration(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    for opened in (Checkpoint, QuantConfig.from_pretrained):
        with pytest.raises(ConfigError, match=says) as caught:
            opened(tmp_path)
        assert name in str(caught.value)


@pytest.mark.parametrize("content, says", [(POINTER, "git lfs pull"), (PAGE, "download it again")])
def test_what_stands_in_place_of_the_index(tmp_path, content, says):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint(tmp_path)


def test_a_long_header_that_begins_like_an_archive_is_a_header(tmp_path):
    """The length of a header of 67 MB begins with the letters of a zip archive."""
    length = int.from_bytes(b"PK\x03\x04\0\0\0\0", "little")
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(length.to_bytes(8, "little") + b"{}".ljust(length))
    assert not Checkpoint(tmp_path).tensors


@pytest.mark.parametrize(
    "name, says",
    [
        ("", "expected a directory, got an empty name"),
        (
            "nvidia/Llama-3.1-8B-Instruct-FP8",
            "`hf download nvidia/Llama-3.1-8B-Instruct-FP8 --local-dir DIR`",
        ),
        ("https://huggingface.co/nvidia/Qwen3-8B-FP4/", "`hf download nvidia/Qwen3-8B-FP4 --local-dir DIR`"),
        ("absent", "no such directory"),
        ("here/absent", "no such directory"),
        ("~/absent", "no such directory"),
        ("here/absent.safetensors", "no such file"),
        ("here/model.GGUF", "GGUF, which llama.cpp and Ollama read"),
        ("here/pytorch_model.bin", "weights as torch.save writes them, which PyTorch reads"),
        ("here/file", "not a directory but a file; give the directory that it lies in, here"),
        ("x" * 5000, "no such directory"),
        ("zero\0byte", "no such directory"),
    ],
)
def test_what_is_no_directory_says_what_to_give(tmp_path, monkeypatch, name, says):
    # huggingface_hub is not installed
    monkeypatch.setattr("moqext.reader.files.hub.find_spec", lambda name: None)
    (tmp_path / "here").mkdir()
    for file in ("file", "model.GGUF", "pytorch_model.bin"):
        (tmp_path / "here" / file).touch()
    monkeypatch.chdir(tmp_path)
    fault = directory_fault(name)
    assert fault is not None
    assert says in fault
    assert ("Hub" in fault) == ("hf download" in says)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(name)
    assert fault in str(caught.value)
    with pytest.raises(ConfigError) as unread:
        QuantConfig.from_pretrained(name)
    assert fault in str(unread.value)


def test_an_empty_name_is_not_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert directory_fault(".") is None
    with pytest.raises(CheckpointError, match="empty name"):
        Checkpoint("")


@pytest.mark.parametrize("wrong", [None, 3, b"here"])
def test_what_is_no_path_is_a_type_error(wrong):
    with pytest.raises(TypeError):
        Checkpoint(wrong)


@pytest.mark.parametrize(
    "text, repeated",
    [
        ('{"a": {"b": 1}, "c": [{"d": 2}]}', []),
        ('{"a": 1, "a": 2}', ["a"]),
        ('{"a": {"b": 1, "b": 2}}', ["b"]),
        ('{"a": {"b": {"c": 1, "c": 2}}}', ["c"]),
        ('{"a": [{"b": 1, "b": 2}]}', ["b"]),
        ('{"a:": {"b": "::", "b" : 2}}', ["b"]),
        ('{"a\\"": 1, "a\\u0022": 2}', ['a"']),
    ],
)
def test_a_key_that_is_there_twice_is_seen_wherever_it_is(tmp_path, text, repeated):
    """Whether Python is called for each object of the document, or only counts its colons."""

    def keys_twice(value):
        found = list(value.repeated) if isinstance(value, RepeatedKeys) else []
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return found + [key for each in inner for key in keys_twice(each)]

    assert keys_twice(parse_object(text.encode(), tmp_path / "file", "the header")) == repeated

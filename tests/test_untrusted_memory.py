"""Documents made to take memory: what is read stays in proportion to the file, or is refused at once.

Each case is read by a process of its own, which tells the most memory it had.
"""

import json
import os
import subprocess
import sys

import pytest

from moqext import CheckpointError, ConfigError, QuantConfig
from moqext.reader.files.tensor_header import read_header
from moqext.reader.files.untrusted import BYTES_PER_VALUE, FREE_VALUES, parse_object

READ = """
import re, sys
from pathlib import Path
import moqext
from moqext.reader.files.tensor_files import TensorFiles

def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

before = most()
try:
    {"config": moqext.QuantConfig.from_pretrained, "files": TensorFiles}[sys.argv[1]](sys.argv[2])
    told = "read"
except ValueError as error:
    told = str(error)
print(most() - before)
print(told)
"""


def read(kind, directory):
    """Megabytes beyond what the modules take, and what was told."""
    done = subprocess.run(
        [sys.executable, "-c", READ, kind, str(directory)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONMALLOC": "default"},
    )
    megabytes, told = done.stdout.split("\n", 1)
    return float(megabytes), told


def write(directory, name, text):
    if name.endswith(".safetensors"):
        text = len(text).to_bytes(8, "little") + text
    (directory / name).write_bytes(text)


MEGABYTES = 60
memory = pytest.mark.unsanitized  # what the sanitizers add is not the reader's
FILES = ["config.json", "hf_quant_config.json", "model.safetensors.index.json", "model.safetensors"]
BOMBS = {
    "lists": b"[],",
    "objects": b"{},",
    "members": b'{"a":1},',
    "numbers": b"1.5,",
    "texts": b'"ab",',
}


@memory
@pytest.mark.parametrize(
    "name, bomb", [("config.json", bomb) for bomb in BOMBS] + [(name, "lists") for name in FILES[1:]]
)
def test_sixty_megabytes_of_small_values_are_refused(tmp_path, name, bomb):
    """60 MB of `[],` took 1.5 GB."""
    piece = BOMBS[bomb]
    size = (MEGABYTES if bomb == "lists" else 20) * 10**6
    write(tmp_path, name, b'{"x":[' + piece * (size // len(piece)) + b"0]}")
    megabytes, told = read("config" if "config" in name else "files", tmp_path)
    assert "commas and opening brackets" in told
    assert name in told
    assert megabytes < 3 * size / 1e6 + 20


@memory
@pytest.mark.parametrize("name", FILES)
def test_what_is_allowed_takes_memory_in_proportion(tmp_path, name):
    """The most values that a file of 20 MB may have, as the values that take most."""
    size = 20 * 10**6
    values = (FREE_VALUES + size // BYTES_PER_VALUE) // 2 - 1000
    text = b'{"x":[' + b'{"a":1},' * values
    text += b" " * (size - len(text)) + b"0]}"
    write(tmp_path, name, text)
    megabytes, told = read("config" if "config" in name else "files", tmp_path)
    assert "commas" not in told
    assert megabytes < 600


@memory
def test_members_of_a_long_name_do_not_take_the_name_each(tmp_path):
    """Paths that were spelled for a message that never came: 100,000 times a name of 100,000 bytes."""
    inner = {f"m{i}": [] for i in range(100_000)}
    write(tmp_path, "config.json", json.dumps({"quantization_config": {"n" * 100_000: inner}}).encode())
    megabytes, told = read("config", tmp_path)
    assert "quant_method" in told or "quant_algo" in told
    assert megabytes < 400


def test_a_name_given_twice_is_still_located(tmp_path):
    text = '{"quantization_config": {"quant_algo": "FP8", "a b": [0, {"c": {"d": 1, "d": 2}}]}}'
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="given twice in one object") as caught:
        QuantConfig.from_pretrained(tmp_path)
    assert caught.value.path == "$.quantization_config['a b'][1].c.d"


def test_a_header_of_more_tensors_than_any_model_has_is_read(tmp_path):
    """300,000 tensors in one file; the largest known model has 276,000 in dozens of files."""
    header = {
        f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.up_proj.weight_scale_2": {
            "dtype": "F32",
            "shape": [],
            "data_offsets": [4 * i, 4 * i + 4],
        }
        for i in range(300_000)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + 4 * len(header))
    assert len(read_header(file).tensors) == len(header)


def test_the_limit_is_said(tmp_path):
    text = b'{"x":[' + b"0," * FREE_VALUES + b"0]}"
    parse_object(text, tmp_path, "the index")
    many = b'{"x":[' + b"0," * 2 * FREE_VALUES + b"0]}"
    limit = FREE_VALUES + len(many) // BYTES_PER_VALUE
    values = 2 * FREE_VALUES + 2
    message = (
        f"the index has {values} commas and opening brackets in {len(many)} bytes, at most {limit} are read"
    )
    with pytest.raises(CheckpointError, match=message):
        parse_object(many, tmp_path, "the index")

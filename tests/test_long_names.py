"""Names of thousands of bytes and of dots: in questions, in headers, in configurations and in messages."""

import json
import re
import tracemalloc

import pytest

from moqext import Checkpoint, CheckpointError, ConfigError, QuantConfig
from moqext._C import NAME_LIMIT
from moqext.reader.naming import is_embedding, is_number, number_order

from .work import assert_linear


def config(**fields):
    return QuantConfig.from_dict({"quantization": {"quant_algo": "FP8", **fields}})


def mixed(names, algo="FP8"):
    listed = {name: {"quant_algo": algo} for name in names}
    return config(quant_algo="MIXED_PRECISION", quantized_layers=listed)


def write(directory, modules, listed=()):
    """A checkpoint of FP8 layers of so many names, and of one tensor that is no layer's."""
    header, at = {}, 0
    for module in modules:
        header[f"{module}.weight"] = {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [at, at + 4]}
        header[f"{module}.weight_scale"] = {"dtype": "F32", "shape": [], "data_offsets": [at + 4, at + 8]}
        at += 8
    text = json.dumps(header).encode()
    data = (b"\x38" * 4 + b"\0\0\x80\x3f") * len(modules)
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    quantization = {"quant_algo": "FP8"}
    if listed:
        layers = {name: {"quant_algo": "FP8"} for name in listed}
        quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return directory


@pytest.mark.parametrize("letter", ["a", "é"])
def test_the_limit_of_a_question_is_said(letter):
    size = len(letter.encode())
    longest = letter * (NAME_LIMIT // size) + "a" * (NAME_LIMIT % size)
    for read in (config(exclude_modules=["a*"]), mixed(["x"])):
        read.layer_algo(longest)
        for ask in (
            read.layer_algo,
            read.is_excluded,
            lambda name, read=read: read.is_excluded(name, semantics="vllm"),
        ):
            with pytest.raises(ValueError, match=f"1 to {NAME_LIMIT} bytes, got one of {NAME_LIMIT + 1}"):
                ask(longest + "a")


@pytest.mark.parametrize("length", [4088, 4089, 4096, 100_000])
@pytest.mark.parametrize("listed", [False, True])
def test_a_tensor_of_a_long_name_is_a_problem_and_the_others_are_read(tmp_path, length, listed):
    """layers() raised, for the whole checkpoint."""
    names = ["x.fused_qkv_a_proj".rjust(length, "b"), "model.layers.0.mlp.up_proj"]
    with Checkpoint(write(tmp_path, names, names if listed else ())) as checkpoint:
        known = [layer.name for layer in checkpoint.layers()]
        told = {problem.tensor: problem for problem in checkpoint.problems if problem.code == "name_too_long"}
        for name in (f"{names[0]}.weight", f"{names[0]}.weight_scale"):
            assert (name in told) == (len(name) > NAME_LIMIT)
            assert checkpoint.tensor(name).size  # as any other
        assert all(problem.severity == "error" for problem in told.values())
        assert all(f"at most {NAME_LIMIT}" in problem.message for problem in told.values())
        assert names[1] in known
        assert (names[0] in known) == (length + len(".weight") <= NAME_LIMIT)
        assert checkpoint.dequantize(names[1]).tolist() == [[1, 1], [1, 1]]
        with pytest.raises(CheckpointError, match="nothing quantized is named"):
            checkpoint.layer("a" * 100_000)


DEEP = "a." * 1990
SHAPES = {
    "shared": lambda i, dots: f"{'a.' * dots}{i:06}",
    "distinct": lambda i, dots: f"{i:06}.{'a.' * dots}x",
    "fused": lambda i, dots: f"{i // 3:04}.{'a.' * dots}{'qkv'[i % 3]}_proj",
    "experts": lambda i, dots: f"{i:04}.{'a.' * (dots - 40)}experts.{i}.up_proj",
    "numbers": lambda i, dots: f"{i:04}.{'1.' * dots}q_proj",
    "embed": lambda i, dots: f"{i:04}.{'embed' * (dots * 2 // 5)}-",
    "words": lambda i, dots: f"{i:04}.{'_' * 2 * dots}experts",
}


@pytest.mark.unsanitized  # measures time and memory
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("listed", [False, True])
def test_names_of_thousands_of_dots_take_time_and_memory_in_proportion(tmp_path, shape, listed):
    """Every prefix was kept as a text of its own, and every container above was hashed from its start."""

    def find(dots, count=30):
        names = [SHAPES[shape](i, dots) for i in range(count)]
        directory = tmp_path / f"{count} of {dots}"
        directory.mkdir()
        write(directory, names, names if listed else ())

        def work():
            with Checkpoint(directory) as checkpoint:
                layers = checkpoint.findings().layers
            assert sum(len(layer.members) or 1 for layer in layers) == len(names)
            return sum(map(len, names))

        return work

    assert_linear(find, 120)
    tracemalloc.start()
    characters = find(1990, 150)()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12 * characters + (32 << 20)


def test_containers_above_a_deep_name_are_found_in_one_pass():
    """The nearest listed one decides, with and without prefix, however many parts are between."""
    for prefix in ("", "model.", "language_model.", "model.language_model.", "language_model.model."):
        for start in ("", "model.", "language_model.model."):
            read = mixed([f"{prefix}layers.7"])
            assert read.layer_algo(f"{start}layers.7.{DEEP}x") == "FP8"
            assert read.layer_algo(f"{start}layers.70.{DEEP}x") is None
    assert mixed(["model"]).layer_algo("model.language_model.x") == "FP8"
    assert mixed(["language_model"]).layer_algo("model.language_model.x") == "FP8"
    read = config(
        quant_algo="MIXED_PRECISION",
        quantized_layers={
            "a.b": {"quant_algo": "FP8"},
            "a.b.c": {"quant_algo": "NVFP4"},
            "model.a.b.c": {"quant_algo": "FP8"},
        },
    )
    assert read.layer_algo("a.b.c.d") == "NVFP4"
    assert read.layer_algo("language_model.a.b.c.d") == "FP8"  # "c" is ambiguous there, so the next above


def test_configurations_of_long_entries_are_linear():
    """Each container in an entry was filed under its whole name."""

    def read(dots):
        entries = [f"{'experts.' * dots}{i}" for i in range(100)]
        return lambda: (mixed(entries), config(exclude_modules=entries))[1]

    with pytest.raises(ConfigError, match="excludes part of"):
        read(2000)().is_excluded("experts")
    assert_linear(read, 120)


@pytest.mark.parametrize("offset", range(4))
def test_messages_are_never_cut_inside_a_character(offset):
    """Messages ended in half a character, shown as a backslash and digits."""
    name = "x" * offset + "é€😀" * 300
    found = []
    for make in (
        lambda: config(quant_algo=name),
        lambda: config(kv_cache_quant_algo=name),
        lambda: config(quantized_layers={name: 3}),
        lambda: config(**{"exclude_modules": [f"m.{name}.q_proj"]}).is_excluded(f"m.{name}.qkv_proj"),
        lambda: config().layer_algo("a.b", shards=5),
        lambda: config(exclude_modules=["a.q"]).layer_algo(
            "a.x", ["q", *(f"{name[:60]}{i}" for i in "1234")]
        ),
        lambda: QuantConfig.from_dict({"quant_method": name, "quant_algo": "FP8"}),
    ):
        with pytest.raises((ConfigError, TypeError)) as caught:
            make()
        found.append(str(caught.value))
        found.append(getattr(caught.value, "path", ""))
    for text in found:
        assert not re.search(r"\\x[0-9a-f]{2}|\ufffd", text), text
    assert sum("..." in text for text in found) >= 6
    conflicts = QuantConfig(
        [
            ("a", "$", {"quantization": {"quant_algo": "FP8", "exclude_modules": [name]}}),
            ("b", "$", {"quantization": {"quant_algo": "FP8", "exclude_modules": []}}),
        ]
    ).conflicts
    assert not any("\ufffd" in str(conflict) for conflict in conflicts)


def test_numbers_sort_by_value_and_before_words():
    """The order of the lists of parts, which took 2,000 tuples for a name of 2,000 dots."""

    def by_parts(name):
        return [(0, int(part), "") if is_number(part) else (1, 0, part) for part in name.split(".")]

    names = ["a.10.b", "a.9.b", "a.b", "a.9", "a", "10", "9", "a-b.1", "a.1234567", "a.x1", "a.1x"]
    names += ["a.1.2.3", "a.1.10.3", "1.2", "1.10", "a.09.c"]
    assert sorted(names, key=number_order) == sorted(names, key=by_parts)


def test_embeddings_are_told_by_their_last_word():
    assert all(map(is_embedding, ["model.embed_tokens", "wte", "x.wpe", "tok_embeddings", "embed"]))
    assert not any(map(is_embedding, ["embed.x", "embed-x", "wte2", "x.embed.", ""]))

"""Configurations spread over several files: precedence, recorded conflicts, broken and absent files."""

import json
import os
import re

import pytest

from moqext import Checkpoint, CheckpointError, ConfigError, QuantConfig
from moqext.reader.config.quant_config import Conflict

MODELOPT = {"name": "modelopt", "version": "0.46.0"}


def nested(**fields):
    return {"producer": MODELOPT, "quantization": fields}


def flat(**fields):
    return {"producer": MODELOPT, "quant_method": "modelopt", **fields}


def write(directory, name, content):
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_both_files_agree(tmp_path):
    write(tmp_path, "config.json", {"quantization_config": flat(quant_algo="FP8_PB_WO", ignore=["a", "b"])})
    write(tmp_path, "hf_quant_config.json", nested(quant_algo="FP8_BLOCK_SCALES", exclude_modules=["b", "a"]))
    config = QuantConfig.from_pretrained(str(tmp_path))
    assert (config.quant_algo, config.exclude_modules, config.conflicts) == ("FP8_PB_WO", ("a", "b"), ())


def test_gaps_are_filled_from_the_second_file(tmp_path):
    write(tmp_path, "config.json", {"quantization_config": flat(quant_algo="W4A16_AWQ", ignore=["lm_head"])})
    fields = {
        "quant_algo": "W4A16_AWQ",
        "group_size": 64,
        "pre_quant_scale": True,
        "exclude_modules": ["lm_head"],
    }
    write(tmp_path, "hf_quant_config.json", nested(**fields))
    config = QuantConfig.from_pretrained(tmp_path)
    assert (config.group_size, config.pre_quant_scale, config.conflicts) == (64, True, ())


def test_contradictions_are_recorded(tmp_path):
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}
    inline = flat(quant_algo="MIXED_PRECISION", quantized_layers=layers, ignore=["x"], group_size=16)
    inline["producer"] = {"name": "modelopt", "version": "0.37.0"}
    other = {"a": {"quant_algo": "FP8"}, "c": {"quant_algo": "NVFP4"}}
    write(tmp_path, "config.json", {"quantization_config": inline})
    fields = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "quantized_layers": other}
    write(tmp_path, "hf_quant_config.json", nested(**fields, exclude_modules=["x", "y"], group_size=32))
    config = QuantConfig.from_pretrained(tmp_path)
    files = ("config.json", "hf_quant_config.json")
    assert config.quant_algo == "MIXED_PRECISION"
    assert config.kv_cache_quant_algo == "FP8"
    assert list(config.quantized_layers) == ["a", "b"]
    assert set(config.conflicts) == {
        Conflict("quant_algo", "MIXED_PRECISION", "NVFP4", *files),
        Conflict("kv_cache_quant_algo", "FP8", "absent", *reversed(files)),
        Conflict("group_size", "16", "32", *files),
        Conflict("producer.version", "0.37.0", "0.46.0", *files),
        Conflict("exclude_modules", "1 entries", "2 entries, with 'y'", *files),
        Conflict(
            "quantized_layers",
            "2 layers, with 'b': NVFP4, group size 16",
            "2 layers, with 'c': NVFP4, group size 16",
            *files,
        ),
    }
    assert "quant_algo: MIXED_PRECISION of config.json is followed" in str(config.conflicts[0])


def test_quantization_config_of_the_text_model(tmp_path):
    inner = {"text_config": {"quantization_config": flat(quant_algo="NVFP4")}, "llm_config": None}
    write(tmp_path, "config.json", inner)
    assert QuantConfig.from_pretrained(tmp_path).quant_algo == "NVFP4"
    write(tmp_path, "config.json", {"quantization_config": flat(quant_algo="FP8"), **inner})
    config = QuantConfig.from_pretrained(tmp_path)
    assert config.quant_algo == "FP8"
    assert config.conflicts[0] == Conflict("quant_algo", "FP8", "NVFP4", "config.json", "config.json")


def test_a_leftover_of_another_quantizer_gives_way(tmp_path):
    native = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    write(tmp_path, "config.json", {"quantization_config": native})
    with pytest.raises(ConfigError, match=r"config\.json: \$\.quantization_config\.quant_method"):
        QuantConfig.from_pretrained(tmp_path)
    write(tmp_path, "hf_quant_config.json", nested(quant_algo="NVFP4"))
    config = QuantConfig.from_pretrained(tmp_path)
    assert (config.quant_algo, config.native_algo) == ("NVFP4", None)
    assert config.conflicts == (
        Conflict("quant_method", "modelopt", "fp8", "hf_quant_config.json", "config.json"),
    )


def test_errors_name_file_and_path(tmp_path):
    write(tmp_path, "config.json", {"quantization_config": flat(quant_algo="FP8")})
    write(tmp_path, "hf_quant_config.json", nested(quant_algo="FP8", exclude_modules=[1]))
    with pytest.raises(
        ConfigError, match=r"^hf_quant_config\.json: \$\.quantization\.exclude_modules\[0\]: "
    ) as caught:
        QuantConfig.from_pretrained(tmp_path)
    assert caught.value.path == "$.quantization.exclude_modules[0]"


@pytest.mark.parametrize(
    "text, path, message",
    [
        ("{", "$", "not JSON"),
        ("", "$", "not JSON: the file is empty"),
        ("[" * 200_000, "$", "nested too deeply"),
        (
            '{"quantization": {"quant_algo": "FP8", "quant_algo": "NVFP4"}}',
            "$.quantization.quant_algo",
            "given twice",
        ),
        (
            '{"quantization": {"group_size": NaN, "quant_algo": "NVFP4"}}',
            "$.quantization.group_size",
            "found nan",
        ),
        ('{"quantization": {"group_size": ' + "9" * 5000 + "}}", "$", "not JSON"),
        ('["FP8"]', "$", "expected an object, found an array"),
        ("\ufeff{}", "$", "not JSON"),
    ],
)
def test_broken_files_are_refused(tmp_path, text, path, message):
    write(tmp_path, "hf_quant_config.json", text)
    with pytest.raises(ConfigError, match=message) as caught:
        QuantConfig.from_pretrained(tmp_path)
    assert caught.value.path == path
    assert "hf_quant_config.json" in str(caught.value)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "hf_quant_config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="not UTF-8"):
        QuantConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_at_once(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"^{re.escape(name)}: \$: ") as caught:
        QuantConfig.from_pretrained(tmp_path)
    assert caught.value.path == "$"


def test_a_second_quantization_config_beside_another_repeated_name(tmp_path):
    twice = '"a": 1, "a": 2, "quantization_config": {"quant_algo": "FP8"}, "quantization_config": null'
    write(tmp_path, "config.json", f"{{{twice}}}")
    with pytest.raises(ConfigError, match="given twice") as caught:
        QuantConfig.from_pretrained(tmp_path)
    assert caught.value.path == "$.quantization_config"


def test_names_given_twice_count_only_where_they_are_read(tmp_path):
    fine = '{"rope": 1, "rope": 2, "quantization_config": {"quant_algo": "FP8"}}'
    write(tmp_path, "config.json", fine)
    assert QuantConfig.from_pretrained(tmp_path).quant_algo == "FP8"
    for text in (
        '{"text_config": {"quantization_config": {"quant_algo": "FP8"}}, "text_config": {}}',
        '{"quantization_config": {"quant_algo": "FP8"}, "quantization_config": {"quant_algo": "NVFP4"}}',
        '{"quantization_config": {"quant_algo": "FP8", "config_groups": {"a": {"b": 1, "b": 2}}}}',
    ):
        write(tmp_path, "config.json", text)
        with pytest.raises(ConfigError, match="given twice"):
            QuantConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"model_type": "llama", "model_type": "gpt_oss"}', r"\$\.model_type: given twice"),
        ('{"text_config": [{"a": 1, "a": 1}]}', r"\$\.text_config\[0\]\.a: given twice"),
        ('{"model_type": ["llama"]}', "model_type: expected a string, found an array"),
    ],
)
def test_a_checkpoint_refuses_what_would_be_read_in_two_ways(tmp_path, text, told):
    write(tmp_path, "config.json", text)
    with pytest.raises(CheckpointError, match=f"config.json: {told}"):
        Checkpoint(tmp_path).layers()


def test_a_name_given_twice_is_located(tmp_path):
    layers = '{"a.b": {"quant_algo": "FP8"}, "a.b": {"quant_algo": "NVFP4"}}'
    write(tmp_path, "quant_cfg.json", '{"quantized_layers": ' + layers + "}")
    with pytest.raises(ConfigError, match=r"quant_cfg\.json: .*given twice") as caught:
        QuantConfig.from_pretrained(tmp_path)
    assert caught.value.path == "$.quantized_layers['a.b']"


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        QuantConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").symlink_to("absent")
    with pytest.raises(ConfigError, match=r"config\.json: \$: cannot be read"):
        QuantConfig.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"absent: \$: no such directory"):
        QuantConfig.from_pretrained(tmp_path / "absent")


def test_a_directory_without_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no hf_quant_config\.json") as caught:
        QuantConfig.from_pretrained(tmp_path)
    assert caught.value.path == "$.quantization_config"
    write(tmp_path, "config.json", {"architectures": ["LlamaForCausalLM"], "quantization_config": None})
    with pytest.raises(ConfigError, match=r"there is no hf_quant_config\.json"):
        QuantConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "method, reader",
    [
        ("gptq", "vLLM, SGLang, and Transformers with gptqmodel read it"),
        ("awq", "vLLM, SGLang, and Transformers with gptqmodel read it"),
        ("bitsandbytes", "vLLM, and Transformers with bitsandbytes, read it"),
        ("torchao", "vLLM, and Transformers with torchao, read it"),
        ("gguf", "llama.cpp, vLLM and Transformers read it"),
        ("nobody-knows", "expected modelopt, modelopt_fp4, modelopt_mxfp8 or modelopt_mixed"),
    ],
)
def test_another_quantizer_is_named_with_what_reads_it_and_where_it_is(tmp_path, method, reader):
    config = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        Checkpoint(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: config.json: $.quantization_config.quant_method: ")
    assert str(caught.value).endswith(reader)
    assert caught.value.path == "$.quantization_config.quant_method"
    with pytest.raises(ConfigError) as caught:
        QuantConfig.from_dict(config)
    assert str(caught.value).endswith(reader)


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8", "mxfp4"])
def test_a_configuration_that_is_read_with_its_tensors_says_so(method):
    with pytest.raises(ConfigError, match=r"moqext\.Checkpoint reads it with its tensors$"):
        QuantConfig.from_dict({"quantization_config": {"quant_method": method}})

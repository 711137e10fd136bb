"""`Checkpoint.quantize`: the files of ModelOpt from the models they were made from, bit for bit."""

import json

import pytest

import moqext
from moqext.tools.quantize import weights

from .quantize_files import CACHE_ROLES, CASES, input_amax, unquantized

safetensors = pytest.importorskip("safetensors.numpy")


def without_sentinel(value):
    """A JSON document with the names of the tensors, which the producer did not find back for Nemotron-H."""
    text = json.dumps(value).replace(".\\u0000backbone.pt_name_sentinel", "")
    text = text.replace("backbone.embeddings", "backbone.embedding")
    return json.loads(text)


def quantize(case, tmp_path, **options):
    """What the options of a case make of its original."""
    source = unquantized(case, tmp_path / "in")
    with moqext.Checkpoint(source) as checkpoint:
        options = {
            "to": case.to,
            "rules": case.rules,
            "exclude": case.exclude,
            "scales": input_amax(case) if case.given else "none",
        } | options
        return checkpoint.quantize(tmp_path / "out", **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.export)
def test_genuine_exports_bit_for_bit(case, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_BYTES", 8 << 10)  # several pieces even of these small weights
    result = quantize(case, tmp_path)
    genuine, made = moqext.Checkpoint(case.directory), moqext.Checkpoint(tmp_path / "out")
    expected = {name for name in genuine.tensors if not name.endswith(CACHE_ROLES)}
    assert set(made.tensors) == expected
    assert result.tensors == len(expected)
    for name in expected:
        ours, theirs = made.tensors[name], genuine.tensors[name]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        assert made.tensor(name, raw=True).tobytes() == genuine.tensor(name, raw=True).tobytes(), name
    same_configurations(case.directory, tmp_path / "out")
    assert [problem for problem in made.problems if problem.severity == "error"] == []
    assert sum(result.quantized.values()) == sum(
        len(layer.members) or len(layer.projections) or 1 for layer in genuine.layers()
    )


def same_configurations(genuine, made):
    """Both documents say what those of the export do, but for the version and the cache."""
    for name in ("hf_quant_config.json", "config.json"):
        theirs, ours = (json.loads((folder / name).read_text()) for folder in (genuine, made))
        theirs = without_sentinel(theirs)
        inner = theirs.get("quantization") or theirs["quantization_config"]
        inner.pop("kv_cache_scheme", None)
        if "kv_cache_quant_algo" in inner:
            inner["kv_cache_quant_algo"] = None
        own = ours.get("quantization") or ours["quantization_config"]
        for document in (theirs, ours, inner, own):
            document.pop("producer", None)
        for listed in ("exclude_modules", "ignore"):
            if listed in inner:
                assert sorted(own.pop(listed)) == sorted(inner.pop(listed))
        if "config_groups" in inner:
            groups = [sorted(map(json.dumps, each.pop("config_groups").values())) for each in (own, inner)]
            assert groups[0] == groups[1]
        assert ours == theirs

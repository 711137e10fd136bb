"""The table of algorithms: Python, the documents and the operations follow it."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from moqext import LinearMethod, QuantConfig, UnsupportedQuantization, detect, reference
from moqext.algorithms import ALGORITHMS, LINEARS, SECOND_IN_WEIGHT
from moqext.reference.weights import DEQUANTIZERS

from ..work import each

ROOT = Path(__file__).resolve().parents[2]
SPELLINGS = {name for facts in ALGORITHMS.values() for name in (facts.name, *facts.aliases)}
WEIGHTS = [name for name, facts in ALGORITHMS.items() if facts.codes]
each_weight = pytest.mark.parametrize("name", WEIGHTS)

SOURCES = [
    path
    for path in sorted((ROOT / "moqext").rglob("*.py"))
    if path.relative_to(ROOT / "moqext").parts[0] != "reference"  # independent of the table
]


def document_rows():
    """algorithm -> cells of its row in the table of docs/formats.md; "as NVFP4" is followed."""
    text = (ROOT / "docs" / "formats.md").read_text()
    table = text[text.index("## 2. Tensors of a linear") :]
    rows = {}
    for line in re.findall(r"^\| (.*) \|$", table[: table.index("\n\n", table.index("|---"))], re.MULTILINE)[
        1:
    ]:
        cells = [cell.strip() for cell in line.split("|")]
        for name in cells[0].split(", "):
            rows[name] = (
                cells if not cells[1].startswith("as ") else [name, *rows[cells[1][3:]][1:4], cells[-1]]
            )
    return rows


@each("path", SOURCES)
def test_no_list_of_algorithms_stands_in_python(path):
    """Five lists did, each to be found and extended for a new format."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Dict):
            items = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            items = node.elts
        else:
            continue
        named = [item.value for item in items if isinstance(item, ast.Constant) and item.value in SPELLINGS]
        assert len(named) < 2, f"line {node.lineno}: {named}"


@each_weight
def test_the_document_has_the_tensors_of_the_table(name):
    facts, (_, weight, scale, second, *_, others) = ALGORITHMS[name], document_rows()[name]
    assert weight.split()[0] == facts.codes
    assert (
        scale.split()[0].rstrip(",")
        == {"float32": "f32", "float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0"}[facts.scale_dtype]
    )
    assert (second != "–") == (facts.second is not None)
    assert ("pre_quant_scale" in others) == facts.pre_quant_scale
    assert ("lora_a" in others) == facts.low_rank
    if facts.scales == "groups":
        assert f"K/{facts.group_size}" in scale


@each_weight
def test_every_spelling_is_read_and_the_family_is_the_tables(name):
    facts = ALGORITHMS[name]
    for spelling in (name, *facts.aliases):
        document = {"quant_method": "modelopt", "quant_algo": spelling.lower()}
        assert QuantConfig.from_dict(document).quant_algo == name
        assert QuantConfig.from_dict(document).group_size == facts.group_size
        assert detect(document) == facts.family


@each_weight
def test_linears_are_those_of_the_table(name):
    facts = ALGORITHMS[name]
    if name not in LINEARS:
        with pytest.raises(UnsupportedQuantization, match=", ".join(LINEARS)):
            LinearMethod(name, 128, [8])
        return
    params = LinearMethod(name, 128, [8]).checkpoint_params
    assert ("weight_scale_2" in params) == (name in SECOND_IN_WEIGHT or facts.second == "unused")
    assert ("input_scale" in params) == (facts.input_scale is not None)
    assert ("pre_quant_scale" in params) == facts.pre_quant_scale
    for size in (8, 16, 32, 64, 128):
        if size in facts.group_sizes or (facts.group_size and not facts.group_sizes):
            assert LinearMethod(name, 128, [8], group_size=size).group_size == size
        else:
            with pytest.raises(ValueError, match="group_size: expected"):
                LinearMethod(name, 128, [8], group_size=size)


@each_weight
def test_the_reference_has_every_weight_and_stores_it_as_the_table_says(name, rng):
    """The reference is written from the documents: that it agrees is a check of the table."""
    if name not in DEQUANTIZERS:
        pytest.skip("the reference does not read it")
    facts = ALGORITHMS[name]
    params = reference.quantize_weight(rng.standard_normal((256, 256)).astype(np.float32), name)
    rows, columns = params["weight"].shape
    stored = {"e4m3": (256, 256), "int8": (256, 256), "e2m1": (256, 128), "int4": (128, 256)}
    assert (rows, columns) == stored[facts.codes]
    size = params["weight_scale"].size
    group = facts.group_size or 1
    assert (
        size
        == {"tensor": 1, "rows": 256, "blocks": (256 // group) ** 2, "groups": 256 * 256 // group}[
            facts.scales
        ]
    )
    assert ("weight_scale_2" in params) == (facts.second is not None)

"""Claims of the README and the pages are true: formats are what the code can do, links lead somewhere.

That their snippets run: test_snippets.py.
"""

import re
import runpy
from pathlib import Path

import pytest

import moqext
from moqext.algorithms import ALGORITHMS, LINEARS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXPORTS = {  # one genuine checkpoint of each algorithm that there is one of
    "FP8": "checkpoints/llama_fp8_kvfp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "checkpoints/llama_fp8_pc_pt",
    "FP8_PB_WO": "checkpoints/llama_fp8_pb_wo",
    "NVFP4": "checkpoints/llama_nvfp4_kvfp8",
    "W4A16_NVFP4": "checkpoints/llama_w4a16_nvfp4",
    "W4A8_NVFP4_FP8": "checkpoints/llama_w4a8_nvfp4_fp8",
    "MXFP4": "exports/mxfp4",
    "W4A8_MXFP4_FP8": "checkpoints/llama_w4a8_mxfp4_fp8",
    "MXFP8": "checkpoints/llama_mxfp8",
    "W4A16_AWQ": "checkpoints/llama_int4_awq",
    "W4A8_AWQ": "checkpoints/llama_w4a8_awq",
    "W8A8_SQ_PER_CHANNEL": "checkpoints/llama_int8_sq",
}


def table():
    """Algorithm -> (read, CPU, CUDA) of the table in docs/formats.md."""
    page = (ROOT / "docs" / "formats.md").read_text()
    section = page.split("## What is read, and what runs")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    cells = {
        name: [cell.strip() for cell in row[1:]] for row in rows for name in re.findall(r"`(\w+)`", row[0])
    }
    return {name: row for name, row in cells.items() if name != "MIXED_PRECISION"}


def test_the_readme_names_every_algorithm():
    """First those that run as experts, too, then those that run as linears alone: all that there are."""
    text = r"\*\*Formats\.\*\*(.*?) run, as linears and as experts\.(.*?) runs? as linears\."
    found = re.search(text, README, re.DOTALL)
    assert found is not None
    both, alone = (set(re.findall(r"`(\w+)`", names)) for names in found.groups())
    assert both | alone == set(LINEARS) == ALGORITHMS.keys() - {"MIXED_PRECISION"}
    assert alone == {name for name, facts in ALGORITHMS.items() if facts.low_rank}


def test_the_readme_is_read_in_two_minutes():
    """A page of 400 to 500 words says what it is, how to install and use it, speed and chips."""
    text = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    assert 300 <= len(text.split()) <= 500
    heads = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert heads == ["Install", "Use", "Speed", "What runs where", "More"]
    links = {target for target, _ in LINK.findall(README)}
    assert {"docs/install.md", "docs/start.md", "docs/README.md", "examples/README.md"} <= links


def test_the_picture_of_the_readme_is_its_table():
    """Else: python -m benchmarks.speed_plot."""
    plot = runpy.run_path(str(ROOT / "benchmarks" / "speed_plot.py"))
    rows = plot["ratios"](README)
    assert len(rows) == 5
    assert plot["PICTURE"].read_text() == plot["draw"](rows)
    assert f"]({plot['PICTURE'].relative_to(ROOT)})" in README


def test_table_names_known_algorithms():
    """Every algorithm, besides names that one of them has in configurations."""
    assert table().keys() >= ALGORITHMS.keys() - {"MIXED_PRECISION"}
    assert ALGORITHMS.keys() >= EXPORTS.keys()


@pytest.mark.parametrize("algo", EXPORTS)
def test_table_is_true(algo, data):
    """Read: the weight dequantizes. CPU: the layer loads and runs, or is refused by name."""
    read, cpu, _ = table()[algo]
    checkpoint = moqext.Checkpoint(data / EXPORTS[algo])
    name = "model.layers.0.self_attn.o_proj"
    assert checkpoint.layer(name).quant_algo == algo
    assert read == "yes"
    assert checkpoint.dequantize(name).shape == checkpoint.layer(name).shape
    if cpu == "no":
        with pytest.raises(moqext.UnsupportedQuantization, match=algo):
            checkpoint.load(name)
    else:
        for compute in re.findall(r"`(\w+)`", cpu) or ["exact"]:
            assert checkpoint.load(name, compute=compute).out_features == checkpoint.layer(name).shape[0]


PAGES = [
    *("README.md", "CONTRIBUTING.md", "examples/README.md", "python/README.md"),
    *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")


def anchors(page):
    """Names that a link may have after "#": headings of a page, lower case, hyphens between words."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_exist(page):
    """Links lead to files and headings that exist, and so do paths in backticks below folders of the tree."""
    text = (ROOT / page).read_text()
    for target, anchor in LINK.findall(text):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"
    for path in re.findall(r"`((?:csrc|moqext|tests|docs|python|examples|benchmarks)/[\w./-]*)`", text):
        assert (ROOT / path).exists() or path.startswith("tests/data/exports/"), path


def test_every_page_is_in_an_index():
    """The README leads to docs, docs/lab and docs/results, and the README of each to every page beside it."""
    for folder in (ROOT / "docs", ROOT / "docs" / "lab", ROOT / "docs" / "results"):
        linked = {target for target, _ in LINK.findall((folder / "README.md").read_text())}
        assert {path.name for path in folder.glob("*.md")} - {"README.md"} <= linked
        assert f"{folder.relative_to(ROOT)}/README.md" in README

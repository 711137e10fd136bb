"""docs/support.toml has every algorithm, and tests or results that name it show what it says ran."""

import importlib
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from moqext.algorithms import ALGORITHMS, LINEARS

from .test_readme import EXPORTS, README

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def support(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.support")


def test_every_algorithm_has_a_state_on_each_chip(support):
    states = support.states()  # refuses two states of one cell
    document = support.document()
    for framework, algo, chip in states:
        assert framework in document["frameworks"]
        assert chip in document["chips"]
        assert algo in LINEARS
    assert set(LINEARS) == ALGORITHMS.keys() - {"MIXED_PRECISION"}
    chips = [chip for chip in document["chips"] if chip != "aarch64"]
    missing = {
        (framework, algo, chip)
        for framework in document["frameworks"]
        for algo in LINEARS
        for chip in chips
        if (framework, algo, chip) not in states
    }
    assert not missing
    assert all(("moqext", algo, "aarch64") in states for algo in LINEARS)


def spellings(algo):
    """Words that stand for an algorithm in tests: its name, and that of a genuine checkpoint of it."""
    stem = EXPORTS.get(algo, algo).rpartition("/")[2].removeprefix("llama_")
    return rf"(?<![A-Za-z0-9_])(?:{algo}|(?:llama_)?{stem})(?![A-Za-z0-9_])"


def formats_of(path):
    """The algorithms that a file of results has rows of, or that a test or a page names."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines()]
        found = {str(row.get("quant_algo", row.get("weights"))).partition(",")[0] for row in rows}
        return found & set(LINEARS)
    return {algo for algo in LINEARS if re.search(spellings(algo), text)}


def test_what_ran_is_shown(support):
    """A test or result names each format, and a result or the page of what ran where names each chip."""
    pages = {"x86": r"CPU", "h200": r"H200", "h100": r"H100"}
    for entry in support.entries():
        assert entry.state in support.STATES.keys() - {"no"}
        assert bool(entry.shown_by) == (entry.state == "ran"), entry
        if entry.state != "ran":
            continue
        paths = [ROOT / name for name in entry.shown_by]
        assert all(path.is_file() for path in paths), entry.shown_by
        told = set().union(*(formats_of(path) for path in paths if path.suffix != ".md"))
        assert set(entry.formats) <= told, (entry.frameworks, entry.chips, set(entry.formats) - told)
        assert any(path.suffix == ".py" for path in paths) or any(path.suffix == ".jsonl" for path in paths)
        for chip in entry.chips:
            results = [path for path in paths if f".{chip}." in path.name]
            text = "".join(path.read_text() for path in paths if path.suffix == ".md")
            assert results or re.search(pages[chip], text), (entry.frameworks, chip)
        for path in paths:
            assert path.suffix != ".jsonl" or any(f".{chip}." in path.name for chip in entry.chips), path.name


def test_chips_that_nobody_had_ran_nothing(support):
    ran = {chip for entry in support.entries() if entry.state == "ran" for chip in entry.chips}
    assert ran == {"x86", "h200", "h100"}
    assert re.search(r"Nothing has run on Ampere, Ada or\s+Blackwell", README)


def test_layers_of_engines_are_those_that_plug_ins_leave_to_them(support):
    pytest.importorskip("torch")
    stepping_aside = importlib.import_module("moqext_torch.stepping_aside")
    capabilities = {"x86": None, "h200": (9, 0), "h100": (9, 0), "ampere": (8, 0), "ada": (8, 9)}
    states = support.states()
    for algo in LINEARS:
        for chip, capability in (capabilities | {"blackwell": (10, 0)}).items():
            left = stepping_aside.reason_to_step_aside(algo, capability) is not None
            assert (states["vllm", algo, chip] == "engine") == left, (algo, chip)
            if chip in ("x86", "h200", "h100"):
                assert (states["sglang", algo, chip] == "engine") == left, (algo, chip)
            elif states["sglang", algo, chip] == "engine":  # SGLang would misread some of the others
                assert left, (algo, chip)


def test_the_matrix_has_a_row_a_format(support):
    lines = support.section().splitlines()
    tables = len(support.document()["frameworks"])
    for algo in LINEARS:
        rows = [line for line in lines if line.startswith(f"| `{algo}` |")]
        assert len(rows) == tables
        assert all(row.count("|") == 2 + len(support.document()["chips"]) for row in rows)


def test_badges_say_what_the_package_says(support):
    badges = importlib.import_module("benchmarks.badges")
    assert badges.badges() == {
        "license.svg": ("license", "Apache-2.0"),
        "python.svg": ("Python", "≥ 3.11"),
        "wheel.svg": ("wheel", "abi3, cp311"),
    }
    for path, text in badges.files().items():
        assert f"]({path.relative_to(ROOT)})" in README
        texts = [node.text for node in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
        assert texts == list(badges.badges()[path.name])
    assert not re.search(r"!\[[^\]]*\]\(https?:", README)

"""Every snippet of the README and of the pages runs, and prints what the page says.

A snippet is a fenced block: "python" is a program, "sh" commands, "console" commands with what they print
("..." stands for any lines). DIR, ORIGINAL and "path/to/model" are a genuine checkpoint and its original,
"MOE" is one with experts, OUT a new directory. What a snippet needs and is not here (a module, a device, a
package index) skips it, or marks it `gpu`. Indented blocks are synopses: their commands, files and options
have to exist.
"""

import ast
import builtins
import importlib.metadata
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from moqext import Checkpoint
from moqext.__main__ import main

from .work import HANGS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "python/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"
DIRECTORY = CHECKPOINTS / "llama_nvfp4_kvfp8"
EXPERTS = CHECKPOINTS / "qwen3moe_nvfp4"
ORIGINAL = CHECKPOINTS / "llama_bf16.safetensors"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Pages suppose that the reader has a model whose modules are named as the checkpoint's.
GIVEN = {
    "model": """
import moqext
import torch

model = torch.nn.Module()
with moqext.Checkpoint("DIR") as ckpt:
    plain = set(ckpt.tensors)
    linears = {record.name: record for record in ckpt.layers()}
    for record in (*linears.values(), *ckpt.kv_scales()):
        plain -= set(record.tensors.values())
    for path in (*linears, *plain):
        parent, (*folders, name) = model, path.split(".")
        for folder in folders:
            if not hasattr(parent, folder):
                parent.add_module(folder, torch.nn.Module())
            parent = getattr(parent, folder)
        if path in linears:
            rows, columns = linears[path].shape
            parent.add_module(name, torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16))
        else:
            parent.register_parameter(name, torch.nn.Parameter(torch.zeros(ckpt.tensors[path].shape)))
"""
}


class Snippet(NamedTuple):
    page: str
    number: int
    kind: str
    text: str
    before: tuple[str, ...]
    """The Python blocks of the page above this one."""


def snippets(page):
    text, programs = page.read_text(), []
    for number, (kind, body) in enumerate(FENCE.findall(text)):
        yield Snippet(str(page.relative_to(ROOT)), number, kind, body, tuple(programs))
        if kind == "python":
            programs.append(body)


ALL = [snippet for page in PAGES for snippet in snippets(page)]


def of(*kinds):
    """The snippets of these kinds as parameters; those that name a CUDA device are marked."""
    found = []
    for snippet in ALL:
        if snippet.kind in kinds:
            marks = [pytest.mark.gpu] if '"cuda' in snippet.text or "--device cuda" in snippet.text else []
            found.append(pytest.param(snippet, id=f"{snippet.page}:{snippet.number}", marks=marks))
    return found


def bound_names(node):
    """Names that a piece of a program binds, anywhere in it."""
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in inner.names)
        elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            yield inner.name
        elif isinstance(inner, ast.arg):
            yield inner.arg
        elif isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            yield inner.id


def missing_names(program):
    """Names that a program reads before anything in it binds them."""
    missing, bound = set(), set(dir(builtins))
    for statement in ast.parse(program).body:
        first = statement.value if isinstance(statement, ast.Assign) else statement
        names = {node.id for node in ast.walk(first) if isinstance(node, ast.Name)}
        missing |= names - bound - set(bound_names(first))
        bound |= set(bound_names(statement))
    return missing


def whole_program(snippet):
    """The snippet after what binds its names: the given ones, and the blocks above where it goes on."""
    program = snippet.text
    for name in sorted(missing_names(program) & GIVEN.keys()):
        program = GIVEN[name] + program
    for block in reversed(snippet.before):
        if missing_names(program):
            program = block + program
    return program


def modules(program):
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def skip_without(names):
    for name in sorted(set(names)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")


def fill(text, out):
    text = text.replace("path/to/model", str(DIRECTORY)).replace('"DIR"', repr(str(DIRECTORY)))
    text = text.replace('"MOE"', repr(str(EXPERTS)))
    for name, path in (("DIR", DIRECTORY), ("ORIGINAL", ORIGINAL), ("OUT", out)):
        text = re.sub(rf"\b{name}\b", str(path), text)
    return text


def run(arguments):
    """Python with the packages that this process sees, in the checkout; the network is not asked."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS
    )


def run_command(line, out):
    """Runs a command of a shell and gives what it prints; skips what a test cannot run."""
    words = shlex.split(fill(line, out), comments=True)
    if words[0] in ("make", "pip", "apt-get"):
        pytest.skip(f"{words[0]}: needs a package index")
    if words[:3:2] == ["python", "-m"]:
        words = ["python", "-m", *words[2:]]
    if words[0] == "moqext":
        words = ["python", "-m", *words]
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        pytest.skip(f"{words[2]}: measures for minutes")
    assert words[0] == "python", f"unknown command: {line}"
    if words[1].startswith("examples/"):
        skip_without(modules((ROOT / words[1]).read_text()))
    done = run(words[1:])
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(text):
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def agrees(expected, printed):
    """Whether lines are those expected, "..." standing for any number of lines."""
    parts = [re.escape(line.rstrip()) + "\n" for line in expected]
    pattern = "".join("(?:.*\n)*?" if part == re.escape("...") + "\n" else part for part in parts)
    return re.fullmatch(pattern, "".join(line.rstrip() + "\n" for line in printed)) is not None


def test_there_are_snippets_of_every_kind():
    assert {snippet.kind for snippet in ALL} <= {"python", "sh", "console"}, "another kind is not run"
    assert {"README.md", "docs/start.md", "docs/torch.md"} <= {snippet.page for snippet in ALL}
    assert len(of("python")) > 5
    assert len(of("sh")) > 2
    assert of("console")


def test_the_checks_see_what_is_wrong():
    assert missing_names("import a.b as c\nx = c(y)\nfor i in x:\n    print(i)\n") == {"y"}
    assert missing_names("x = x + 1\n") == {"x"}
    assert missing_names("x = [i for i in range(3)]\nx = x[1]\n") == set()
    assert agrees(["a", "...", "d"], ["a", "b", "c", "d"])
    assert agrees(["a", "...", "d"], ["a", "d"])
    assert not agrees(["a", "...", "d"], ["a", "b"])
    assert not agrees(["a"], ["a", "b"])


@pytest.mark.parametrize("snippet", of("python"))
def test_program_runs(snippet, tmp_path):
    program = fill(whole_program(snippet), tmp_path / "out")
    skip_without(modules(program))
    (tmp_path / "snippet.py").write_text(program)
    done = run([str(tmp_path / "snippet.py")])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number, modules_needed", [(0, ()), (1, ("torch",))])
def test_what_the_first_programs_print(number, modules_needed):
    """Programs of docs/start.md: arrays of NumPy, then tensors of torch."""
    skip_without(modules_needed)
    programs = [snippet for snippet in ALL if snippet.page == "docs/start.md" and snippet.kind == "python"]
    lines = run(["-c", whole_program(programs[number])]).stdout.splitlines()
    assert lines[0] == "NVFP4 cache: FP8"
    assert re.fullmatch(r"cpu:\w+ \(4, 256\)", lines[1])
    assert lines[2:] == ["torch.Size([4, 256])"][:number]


@pytest.mark.parametrize("snippet", of("sh"))
def test_commands_run(snippet, tmp_path):
    for number, line in enumerate(commands(snippet.text)):
        run_command(line, tmp_path / f"out{number}")


@pytest.mark.parametrize("snippet", of("console"))
def test_commands_print_what_the_page_shows(snippet, tmp_path):
    parts = re.split(r"^\$ (.*)\n", snippet.text, flags=re.MULTILINE)
    assert parts[0] == ""
    assert len(parts) > 2
    for line, shown in zip(parts[1::2], parts[2::2], strict=True):
        printed = run_command(line, tmp_path / "out")
        assert agrees(shown.splitlines(), printed.splitlines()), printed


# ---- synopses ----


def written_commands():
    """Every command that a page writes, in a fence or indented: (page, words)."""
    start = re.compile(r"^(?:    |\$ )?((?:[A-Z_]+=\S+ )*(?:make|python|moqext) .*)$", re.MULTILINE)
    for page in PAGES:
        for line in start.findall(page.read_text()):
            words = [word for word in line.split("  ")[0].split() if not re.match(r"[A-Z_]+=", word)]
            yield page.relative_to(ROOT), words


def help_of(capsys, *arguments):
    """Gives what --help prints, without a process of its own."""
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    return capsys.readouterr().out


def test_commands_that_are_written_exist(capsys):
    """Targets of make, modules, files and commands of moqext, on every page."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    known = set(re.findall(r"^    (\w+)  ", help_of(capsys), re.MULTILINE))
    seen = set()
    for page, words in written_commands():
        seen.add(words[0])
        if words[0] == "make":
            assert words[1] in targets, (page, words)
        elif words[0] == "moqext" or words[1:3] == ["-m", "moqext"]:
            command = words[1] if words[0] == "moqext" else words[3]
            assert command in known | {"COMMAND"}, (page, words)
        elif words[1] == "-m":
            assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), (page, words)
        elif words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), (page, words)
    assert seen == {"make", "python", "moqext"}


def test_synopses_have_the_options_of_the_commands(capsys):
    """The synopsis of docs/cli.md: the options that --help has, no fewer and no more."""
    page = (ROOT / "docs" / "cli.md").read_text()
    found = re.findall(r"^    python -m moqext (\w+)(.*\n(?: {8,}\[.*\n)*)", page, re.MULTILINE)
    assert {name for name, _ in found} >= {"inspect", "verify", "compare", "convert", "bench", "info"}
    for name, synopsis in found:
        offered = set(re.findall(r"--[a-z][a-z-]+", help_of(capsys, name)))
        assert set(re.findall(r"--[a-z][a-z-]+", synopsis)) == offered - {"--help"}, name


# ---- what is said of others ----


def test_what_the_page_says_of_transformers_is_true(tmp_path):
    """The FP8 checkpoint's codes become weights, with a word in a table; NVFP4 is refused."""
    skip_without(["torch", "transformers"])
    said = re.search(
        r"Transformers (\d+\.\d+) does not know", (ROOT / "docs" / "transformers.md").read_text()
    )[1]
    if not importlib.metadata.version("transformers").startswith(f"{said}."):
        pytest.skip(f"needs Transformers {said}, which the page speaks of")
    *_, alone = (
        snippet for snippet in ALL if snippet.page == "docs/transformers.md" and snippet.kind == "python"
    )
    wrong, right = re.search(r"# ([\d.]+), and ([\d.]+) is right", alone.text).groups()
    done = run(["-c", alone.text])
    assert done.stdout == f"{wrong}\n"
    assert "UNEXPECTED" in done.stderr
    with Checkpoint(CHECKPOINTS / "llama_fp8_kvfp8") as ckpt:
        weight = ckpt.dequantize("model.layers.0.self_attn.q_proj")
    assert f"{abs(weight).max():.3f}" == right
    refused = run(["-c", alone.text.replace("llama_fp8_kvfp8", "llama_nvfp4_kvfp8")])
    assert refused.returncode == 1
    assert "RuntimeError: You set `ignore_mismatched_sizes` to `False`" in refused.stderr

"""The wheel in dist/ for this machine's architecture, as `make wheel` leaves it, installed by itself."""

import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from .work import HANGS

ROOT = Path(__file__).resolve().parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "llama_nvfp4_kvfp8"
WHEELS = sorted(ROOT.glob(f"dist/moqext-{VERSION}-cp311-abi3-manylinux_*_{platform.machine()}.whl"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="dist/ has no wheel for this machine: make wheel"),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs a command of a new environment that has the wheel and NumPy, with no other program on PATH."""
    home = tmp_path_factory.mktemp("wheel") / "venv"
    bare = {"PATH": str(home / "bin"), "PYTHONSAFEPATH": "1", "HOME": str(home), "NO_COLOR": "1"}

    def run(*command):
        return subprocess.run(
            [str(part) for part in command],
            cwd=home.parent,
            env=bare,
            capture_output=True,
            text=True,
            timeout=HANGS,
        )

    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    site = next(home.glob("lib/python*/site-packages"))
    for path in Path(np.__file__).parent.parent.glob("numpy*"):  # no package index is asked
        (site / path.name).symlink_to(path)
    done = run(home / "bin" / "python", "-m", "pip", "install", "-q", "--no-index", WHEELS[-1])
    assert done.returncode == 0, done.stderr
    return run


def output(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_command_tells_its_version(installed):
    assert output(installed("moqext", "--version")).split() == ["moqext", VERSION]


def test_a_checkpoint_is_verified(installed):
    assert "result: all right" in output(installed("moqext", "verify", "--device", "cpu", CHECKPOINT))


def test_program_of_the_readme_runs(installed, tmp_path):
    programs = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    program = next(text for text in programs if "import numpy" in text)
    (tmp_path / "program.py").write_text(program.replace('"DIR"', repr(str(CHECKPOINT))))
    assert output(installed("python", tmp_path / "program.py")).splitlines() == ["()", "(4, 256)"]


def test_engines_find_their_plug_ins(installed):
    """By the metadata, as the engines do; and what it names is a module of the wheel."""
    program = """
import importlib.metadata, importlib.util
for group in ("sglang.srt.plugins", "vllm.general_plugins"):
    for entry in importlib.metadata.entry_points(group=group):
        print(group, entry.value, importlib.util.find_spec(entry.module) is not None)
"""
    assert output(installed("python", "-c", program)).splitlines() == [
        "sglang.srt.plugins moqext_sglang:register True",
        "vllm.general_plugins moqext_vllm:register True",
    ]


def test_extras_can_be_asked_of_the_wheel():
    with zipfile.ZipFile(WHEELS[-1]) as archive:
        names = archive.namelist()
        text = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    lines = text.splitlines()
    assert {f"Provides-Extra: {name}" for name in ("torch", "transformers", "vllm", "hub")} <= set(lines)
    needed = [line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert needed == ["Requires-Dist: numpy>=1.26"]


def test_the_library_is_stripped():
    with zipfile.ZipFile(WHEELS[-1]) as archive:
        library = archive.read("moqext/_C.abi3.so")
    assert b".debug_info" not in library
    assert b".symtab" not in library

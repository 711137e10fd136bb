"""Packages for frameworks that are not installed say what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

import moqext

ROOT = Path(__file__).resolve().parent.parent
HIDE = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *given: None if name == sys.argv[1] else found(name, *given)
sys.path[:0] = sys.argv[3:]
__import__(sys.argv[2])
"""


@pytest.mark.parametrize(
    "package, framework",
    [("moqext_torch", "torch"), ("moqext_transformers", "torch"), ("moqext_vllm", "vllm")],
)
def test_what_a_package_needs_is_in_its_error(package, framework):
    places = [str(Path(moqext.__file__).parents[1]), str(ROOT / "python")]
    command = [sys.executable, "-c", HIDE, framework, package, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {package} needs ")
    assert "which is not installed: pip install" in last

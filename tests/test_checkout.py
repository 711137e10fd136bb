"""`make demo` and `make test` leave a checkout from which Python runs as from the installed package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moqext import _C

ROOT = Path(__file__).resolve().parent.parent
START = (ROOT / "docs" / "start.md").read_text()
MADE = Path(sys.prefix) == ROOT / ".venv"  # these tests run in the environment that make has made
made = pytest.mark.skipif(not MADE, reason="runs in another environment than make's .venv")


def run(*arguments, stdin=None):
    """Runs Python in the checkout as a user would, who has the directory in sys.path."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, input=stdin, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@made
def test_the_command_runs_in_the_checkout():
    assert run("-m", "moqext", "info").startswith("moqext ")


@made
def test_the_prompt_imports_the_checkout():
    assert Path(run("-i", "-q", stdin="import moqext; print(moqext.__file__)\n").strip()) == (
        ROOT / "moqext" / "__init__.py"
    )


@made
def test_the_first_program_runs_in_the_checkout():
    code = re.search(r"```python\n(.*?)```", START, re.DOTALL)[1]
    assert run("-c", code).startswith("NVFP4 cache: FP8")


@made
def test_the_checkout_has_the_extension_that_is_tested():
    there = ROOT / "moqext" / Path(_C.__file__).name
    assert there.read_bytes() == Path(_C.__file__).read_bytes()


def test_both_commands_of_the_readme_build_in_the_checkout():
    makefile = (ROOT / "Makefile").read_text()
    for stamp in (".venv/.installed", ".venv/.installed-test"):
        rule = re.search(rf"^{re.escape(stamp)}: \.venv/\.needs.*\n\t(.*)", makefile, re.MULTILINE)
        assert "--inplace" in rule[1]

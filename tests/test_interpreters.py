"""Interpreters that moqext does not run in: refused with a reason, and without harm to the one it runs in."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Makes a sub-interpreter in whatever way this version has, and reports what importing moqext there says.
SUB_INTERPRETER = """
import os, sys
import moqext, numpy as np

try:
    import _interpreters as interpreters
    make = lambda isolated: interpreters.create("isolated" if isolated else "legacy")
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    make = lambda isolated: interpreters.create(isolated=isolated)
    run = interpreters.run_string

inside = '''
import sys
sys.path[:] = {path!r}
try:
    import moqext
    text = "imported"
except ImportError as error:
    text = "refused: " + str(error)
with open({file!r}, "w") as file:
    file.write(text)
'''
for isolated in (False, True):
    for _ in range(3):
        interpreter = make(isolated)
        run(interpreter, inside.format(path=sys.path, file=sys.argv[1]))
        interpreters.destroy(interpreter)
        with open(sys.argv[1]) as file:
            text = file.read()
        os.unlink(sys.argv[1])
        assert text.startswith("refused: "), text
        assert "sub-interpreters" in text or "subinterpreters" in text, text
assert moqext.ops.encode(np.ones(3, np.float32), "e4m3").view(np.uint8).tolist() == [0x38] * 3
print(text)
"""


def test_sub_interpreters_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUB_INTERPRETER, str(tmp_path / "answer")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named '_xxsubinterpreters'" in done.stderr:
        pytest.skip("this Python has no module of sub-interpreters")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: ")


FREE_THREADED = """
import sysconfig
real = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: 1 if name == "Py_GIL_DISABLED" else real(name)
"""


@pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="not a source tree")
def test_a_build_for_free_threaded_python_stops_with_the_reason() -> None:
    pytest.importorskip("setuptools")
    code = FREE_THREADED + "import runpy, sys; sys.argv = ['setup.py', '--name']; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("moqext: error: free-threaded Python is not supported")
    assert done.stdout == ""


def test_importing_in_free_threaded_python_gives_the_reason() -> None:
    # A Python without abi3 does not see the library; here nothing but the suffix is hidden.
    code = FREE_THREADED + (
        "import importlib.machinery as m\n"
        "m.EXTENSION_SUFFIXES[:] = ['.cpython-313t-x86_64-linux-gnu.so']\n"
        "import sys; sys.path_importer_cache.clear()\n"
        "import importlib._bootstrap_external as b; b.EXTENSION_SUFFIXES[:] = m.EXTENSION_SUFFIXES\n"
        "loaders = [(m.SourceFileLoader, m.SOURCE_SUFFIXES)]\n"
        "sys.path_hooks[:] = [m.FileFinder.path_hook(*loaders)]\n"
        "import moqext\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: free-threaded Python is not supported" in done.stderr
    assert "not built" not in done.stderr

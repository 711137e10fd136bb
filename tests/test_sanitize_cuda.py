"""The run of GPU tests under compute-sanitizer, with a program in its place that finds what it is told to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOOL = """#!{python}
import os, subprocess, sys
print("========= COMPUTE-SANITIZER", flush=True)
command = sys.argv[sys.argv.index("--error-exitcode") + 2:]
status = subprocess.call(command)
found = int(os.environ["FOUND"])
if found:
    print("========= Invalid __global__ read of size 4 bytes")
print(f"========= ERROR SUMMARY: {{found}} errors", flush=True)
sys.exit(9 if found else status)
"""


TESTS = 11


@pytest.fixture
def run(tmp_path):
    """Runs the program on tests that take no time themselves."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_few.py").write_text(
        "".join(f"def test_{number}(): pass\n" for number in range(TESTS))
    )
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable))
    tool.chmod(0o755)

    def run(*options: str, found: int = 0) -> tuple[int, str]:
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "FOUND": str(found),
        }
        command = [
            sys.executable,
            HERE / "sanitize_cuda.py",
            *options,
            "-m",
            "not gpu",
            "tests/test_few.py",
        ]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        return result.returncode, result.stdout + result.stderr

    return run


def test_every_test_is_run_once_and_accounted_for(run):
    status, said = run("--share", "9", "--jobs", "2")
    assert status == 0, said
    assert f"{TESTS} tests, 0 of them not run to their end; {{'PASSED': {TESTS}}}" in said
    assert "clean" in said
    assert "stopped" not in said


def test_what_a_tool_finds_is_shown_and_fails(run):
    status, said = run(found=7)
    assert status == 1
    assert "Invalid __global__ read" in said
    assert "7 findings" in said


def test_time_that_is_too_short_is_said(run):
    status, said = run("--seconds", "0.1")
    assert status == 1
    assert "not run to its end: tests/test_few.py" in said

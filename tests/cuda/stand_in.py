"""A stand-in for cuBLASLt: built from stand_in_cublaslt.c, and given to processes of their own."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("stand_in_cublaslt.c")


class StandIn:
    """The library, and what it was asked.

    Attributes:
        path: Of the library.
        log: Of the file that it writes to.
    """

    def __init__(self, directory: Path) -> None:
        if shutil.which("cc") is None:
            pytest.skip("needs a C compiler")
        self.path, self.log = directory / "libcublasLt.so.13", directory / "asked.txt"
        options = ["-std=c11", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
        subprocess.run(["cc", *options, "-o", self.path, SOURCE, "-lm", "-ldl"], check=True)

    def run(self, code: str, lacks: str = "", **variables: str) -> str:
        """Runs Python code in a process that has this library, and returns its output.

        Args:
            code: Its indentation does not count.
            lacks: Which products the library has no algorithm for, as stand_in_cublaslt.c reads it.
            variables: More of the environment.
        """
        self.log.write_text("")
        told = {
            "MOQEXT_CUBLASLT": str(self.path),
            "MOQEXT_STAND_IN_LACKS": lacks,
            "MOQEXT_STAND_IN_LOG": str(self.log),
        }
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-W", "ignore::UserWarning", "-c", textwrap.dedent(code)],
            env=os.environ | told | {"PYTHONPATH": paths} | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def asked(self) -> list[str]:
        """Lines of what the library was asked since `run` began."""
        return self.log.read_text().splitlines()

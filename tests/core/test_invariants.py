"""Invariants are checked in builds with sanitizers, and end the process where one is broken."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
PROGRAM = """
#include "core/invariant.h"

int main(int argc, char **argv) {
    (void)argv;
    MOQ_ASSERT(argc == 1);
    return 0;
}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.unsanitized  # the programs are not linked with a sanitizer's runtime, which is preloaded
@pytest.mark.parametrize("options", [[], ["-DMOQ_CHECKED"]], ids=["ordinary", "checked"])
def test_a_broken_invariant_ends_the_process_where_it_is_checked(options, tmp_path):
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(PROGRAM)
    sources = [source, CSRC / "core" / "invariant.c"]
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", *options]
    subprocess.run(["cc", *flags, *sources, "-o", program], check=True)
    assert subprocess.run([program]).returncode == 0
    broken = subprocess.run([program, "more"], stderr=subprocess.PIPE, text=True)
    if options:
        assert broken.returncode == -signal.SIGABRT
        assert broken.stderr == f"{source}:6: broken invariant: argc == 1\n"
    else:
        assert (broken.returncode, broken.stderr) == (0, "")

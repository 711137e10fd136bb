"""`info`: what was built, and CUDA or the reason why not."""

import json
import os
import re
import subprocess
import sys

import pytest

from moqext import _C, __version__
from moqext.__main__ import main


def test_json_names_the_build_and_the_machine(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["version"] == __version__
    assert facts["cpu_kernels"][0] == "cpu:portable"
    assert f"cpu:{facts['isa']}" in facts["cpu_kernels"]
    assert facts["threads"] >= 1
    assert bool(facts["openmp"]) != bool(facts["openmp_reason"])
    assert bool(facts["cuda_devices"]) != bool(facts["cuda_reason"])
    assert bool(facts["cuda_archs"]) == facts["cuda_built"] == bool(facts["cuda_runtime"])
    assert "cuda:simt" in facts["cuda_kernels"]
    for device in facts["cuda_devices"]:
        assert set(device["kernels"]) <= set(facts["cuda_kernels"])


def test_kernels_that_this_cpu_lacks_are_not_listed():
    """An AVX2 CPU was told of cpu:amx."""
    command = [sys.executable, "-m", "moqext", "info"]
    environment = os.environ | {"MOQEXT_ISA": "portable"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert re.search(r"^kernels +cpu:portable$", done.stdout, re.M)


def test_a_build_without_cuda_says_how_to_build_with_it(capsys):
    if _C.build_info()["cuda"]:
        pytest.skip("it is built with CUDA")
    assert main(["info"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cuda ")]
    assert "moqext was built without CUDA: " in line
    assert line.endswith(": MOQEXT_CUDA=1 MOQEXT_CUDA_ARCHS=native pip install .")


def test_text_has_a_line_for_each_fact(capsys):
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [line.split()[0] for line in lines]
    assert keys[:8] == ["moqext", "build", "flags", "python", "cpu", "openmp", "kernels", "cuda"]
    assert all(len(line.split()) > 1 for line in lines if not line.startswith(" "))


def test_without_a_command_the_commands_are_shown(capsys):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    for command in ("inspect", "verify", "compare", "convert", "bench", "info"):
        assert f"\n    {command} " in printed.err

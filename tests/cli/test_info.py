"""`info`: what was built, and CUDA or the reason why not."""

import json

from moqext import __version__
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

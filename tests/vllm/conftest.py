"""Runs the real engine in fresh processes; a checkout that is not installed lends them its entry point."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm_cases import DATA, GENERATED

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
AT_ONCE = 8
"""Processes that share the directories of a task on a GPU."""
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

if find_spec("moqext_torch") is None:
    sys.path.insert(0, str(ROOT / "python"))


NEAR = 2
"""Two logits of bfloat16 that are each a last place off."""


def make_distribution(directory, name, version):
    """The metadata of a distribution that is not installed, for `importlib.metadata`."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """The variables of a process in which vLLM finds the plug-in."""
    paths = [path for path in sys.path if path]
    if not any(entry.name == "moqext" for entry in entry_points(group="vllm.general_plugins")):
        info = make_distribution(tmp_path_factory.mktemp("installed"), "moqext-checkout", "0")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        value = project["entry-points"]["vllm.general_plugins"]["moqext"]
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nmoqext = {value}\n")
        paths.append(str(info.parent))
    return {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def said(monkeypatch, caplog):
    """`said()`: what the test logged of things that are not fused, whatever earlier ones did."""
    from moqext_torch import stepping_aside

    monkeypatch.setattr(stepping_aside, "_said", set())
    caplog.set_level(logging.INFO, "vllm.moqext")
    return lambda: [record.getMessage() for record in caplog.records if "not fused" in record.getMessage()]


@pytest.fixture(scope="session")
def start(environment, tmp_path_factory):
    """`start(task, *arguments, **variables)`: values that a task of engine.py prints, and its log.

    Values are JSON, one a line; the log is text and lies below `--basetemp`.
    """
    place = tmp_path_factory.mktemp("logs")

    def run(task, *arguments, **variables):
        log = Path(tempfile.mkstemp(".log", f"{task}-", place)[1])
        with log.open("w") as output:
            subprocess.run(
                [sys.executable, HERE / "engine.py", task, *map(str, arguments)],
                env=environment | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=900,
                check=False,
            )
        text = log.read_text()
        lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
        return [json.loads(line.removeprefix("RESULT ")) for line in lines], text

    return run


@pytest.fixture(scope="session")
def engine(start):
    """`engine(task, *arguments, **variables)`: what a task of engine.py prints, one JSON value a line."""

    def run(task, *arguments, **variables):
        found, text = start(task, *arguments, **variables)
        assert found, text[-6000:]
        return found

    return run


@pytest.fixture(scope="session")
def two_ranks(environment, tmp_path_factory):
    """`two_ranks(program, *arguments, **variables)`: what two processes that know each other print.

    MEETING is the beginning of paths of files by which they find each other.
    """

    def run(program, *arguments, **variables):
        place = tmp_path_factory.mktemp("meeting")
        every = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MEETING": f"{place}/moqext-{os.getpid()}-"}
        every |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        logs, ranks = [place / f"rank{rank}" for rank in range(2)], []
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as output:  # a pipe that is full would stop a rank, and with it the other one
                command = [sys.executable, str(HERE / program), *map(str, arguments)]
                ranks.append(
                    subprocess.Popen(
                        command,
                        env=environment | every | own | variables,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            for rank in ranks:
                rank.wait(900)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [log.read_text() for log in logs]

    return run


def results(texts, count):
    """The values that each of several processes printed, as many as expected."""
    found = []
    for text in texts:
        lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
        assert len(lines) == count, text[-6000:]
        found.append([json.loads(line.removeprefix("RESULT ")) for line in lines])
    return found


def on_cuda():
    """Whether engines of the tests are on a GPU."""
    import torch

    return torch.cuda.is_available()


def assert_same(tokens, expected):
    """Tokens are Transformers'; on a GPU, in bfloat16, they may part where two are near each other."""
    for found, own, bests in zip(tokens, *expected, strict=True):
        parted = next((step for step in range(len(own)) if found[step] != own[step]), None)
        if parted is not None:
            assert on_cuda(), (found, own)
            two, places = bests[parted]
            assert sorted(two) == sorted((found[parted], own[parted])), (parted, found, own)
            assert places <= NEAR, (parted, found, own)


class Answers(dict):
    """By name a future of what a process said, and which of its values is the one: a look-up gives that."""

    def __getitem__(self, name):
        process, index = super().__getitem__(name)
        values, text = process.result()
        assert index < len(values), text[-6000:]
        return values[index]


@pytest.fixture(scope="session")
def each(start):
    """`each(task, directories, **variables)`: by name what a task says of each directory.

    On a GPU several processes share them, and failures of a directory are those of it and the next ones.
    """
    count = AT_ONCE if on_cuda() else 1
    with ThreadPoolExecutor(count) as pool:

        def run(task, directories, **variables):
            answers, names = Answers(), list(directories)
            for first in range(min(count, len(names))):
                own = names[first::count]
                process = pool.submit(start, task, *(directories[name] for name in own), **variables)
                answers.update((name, (process, index)) for index, name in enumerate(own))
            return answers

        yield run


def genuine(names, folder="checkpoints"):
    """Directories of genuine checkpoints by name."""
    return {name: DATA / folder / name for name in names}


@pytest.fixture(scope="session")
def served(each):
    """The tokens of each genuine checkpoint in the engine, and which methods its layers have."""
    return each("tokens", genuine(GENERATED))

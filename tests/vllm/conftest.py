"""Runs the real engine in fresh processes; a checkout that is not installed lends them its entry point."""

import json
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm_cases import DATA, GENERATED

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

if find_spec("moqext_torch") is None:
    sys.path.insert(0, str(ROOT / "python"))


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


@pytest.fixture(scope="session")
def engine(environment):
    """`engine(task, *arguments, **variables)`: what a task of engine.py prints, one JSON value a line."""

    def run(task, *arguments, **variables):
        done = subprocess.run(
            [sys.executable, HERE / "engine.py", task, *map(str, arguments)],
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stdout[-2000:] + done.stderr[-4000:]
        return [json.loads(line.removeprefix("RESULT ")) for line in lines]

    return run


def on_cuda():
    """Whether engines of the tests are on a GPU."""
    import torch

    return torch.cuda.is_available()


class Answers(dict):
    """Futures by name, of which a look-up gives the result."""

    def __getitem__(self, name):
        return super().__getitem__(name).result()


@pytest.fixture(scope="session")
def each(engine):
    """`each(task, directories, **variables)`: by name what a task says of each directory.

    On a GPU every one has a process of its own, with which the memory of its engine is given back; a failure
    is then that name's alone.
    """
    with ThreadPoolExecutor(os.cpu_count() if on_cuda() else 1) as pool:

        def run(task, directories, **variables):
            if on_cuda():
                return Answers(
                    (name, pool.submit(lambda one: engine(task, one, **variables)[0], directory))
                    for name, directory in directories.items()
                )
            found = engine(task, *directories.values(), **variables)
            return dict(zip(directories, found, strict=True))

        yield run


def genuine(names, folder="checkpoints"):
    """Directories of genuine checkpoints by name."""
    return {name: DATA / folder / name for name in names}


@pytest.fixture(scope="session")
def served(each):
    """The tokens of each genuine checkpoint in the engine, and which methods its layers have."""
    return each("tokens", genuine(GENERATED))

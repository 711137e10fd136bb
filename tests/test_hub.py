"""Models of the Hub by name, against a server on this machine that speaks what is needed of its protocol."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import moqext
from moqext.__main__ import main
from moqext.reader.files import hub
from moqext.reader.files.tensor_header import read_header

from .work import HANGS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
needs_library = pytest.mark.skipif(not hub.is_installed(), reason="needs huggingface_hub")


class Hub(ThreadingHTTPServer):
    """Serves the directories in `models` (by name and revision), and keeps what was sent of which file."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.models, self.sent, self.ranges = {}, {}, True

    def directory(self, repo, revision):
        if revision == COMMIT:
            revision = next((known for name, known in self.models if name == repo), None)
        return self.models.get((repo, revision))


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/.*)?", path):
            self.about(match[1], match[2] or "revision", (match[3] or "main").replace("%2F", "/"))
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.file(match[1], match[2], match[3])
        else:
            self.answer(404, b"", {})

    def about(self, repo, what, revision):
        directory = self.server.directory(repo, revision)
        if directory is None:
            code = (
                "RevisionNotFound" if any(name == repo for name, _ in self.server.models) else "RepoNotFound"
            )
            return self.answer(404, b"{}", {"X-Error-Code": code, "X-Error-Message": f"{code} here"})
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        names = [(str(path.relative_to(directory)), path.stat().st_size) for path in files]
        if what == "tree":
            body = [{"type": "file", "path": n, "size": s, "oid": "0" * 40} for n, s in names]
        else:
            siblings = [{"rfilename": name, "size": size} for name, size in names]
            body = {
                "id": repo,
                "modelId": repo,
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
            }
        return self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def file(self, repo, revision, name):
        directory = self.server.directory(repo, revision)
        if directory is None or not (directory / name).is_file():
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        content = (directory / name).read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        status = 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.server.ranges:
            begin, end = int(wanted[1]), int(wanted[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{min(end, len(content) - 1)}/{len(content)}"
            content, status = content[begin : end + 1], 206
        if self.command == "GET":
            self.server.sent[name] = self.server.sent.get(name, 0) + len(content)
        return self.answer(status, content, headers)

    def answer(self, status, content, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def server():
    with Hub() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(server, tmp_path):
    """Runs the program, or code, with that hub in a process that reads its endpoint at import."""

    def call(*arguments):
        command = [sys.executable, "-m", "moqext", *map(str, arguments)]
        if len(arguments) == 1:
            command = [sys.executable, "-c", arguments[0]]
        (tmp_path / "work").mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(Path(moqext.__file__).parents[1]),
        }
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=HANGS,
            cwd=tmp_path / "work",
            env=environment,
            check=False,
        )

    return call


@needs_library
def test_inspect_fetches_headers_only(server, run, data, monkeypatch):
    source = data / "exports/nvfp4_sharded"
    server.models["org/model", "main"] = source
    result = run("inspect", "org/model", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["directory"] == "org/model"
    assert len(report["layers"]) == 77
    with moqext.Checkpoint(source) as local:
        assert [layer["name"] for layer in report["layers"]] == [layer.name for layer in local.layers()]
        assert report["totals"]["bytes"] == sum(info.nbytes for info in local.tensors.values())
    shown = run("inspect", "org/model").stdout
    assert "Only headers were fetched" in shown


@needs_library
def test_the_quantized_component_of_a_pipeline_is_fetched_alone(server, run, data, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(data / "checkpoints/llama_nvfp4_kvfp8", source / "transformer")
    shutil.copytree(data / "exports/nvfp4_sharded", source / "text_encoder")
    (source / "model_index.json").write_text("{}")
    (source / "text_encoder" / "config.json").write_text("{}")
    (source / "text_encoder" / "hf_quant_config.json").unlink(missing_ok=True)
    server.models["org/model", "main"] = source
    for given in ([], ["--component", "transformer"], ["--file", "transformer/model.safetensors"]):
        for deep in ([], ["--deep"]):
            server.sent.clear()
            result = run("inspect", "org/model", *given, *deep)
            assert result.returncode == 0, result.stderr
            assert "configured: NVFP4" in result.stdout
            if given or deep:
                assert not [name for name in server.sent if re.match("text_encoder/.*safetensors$", name)]


@needs_library
def test_of_a_long_shard_the_beginning_is_fetched(server, run, tmp_path):
    """2 MB of weights behind a header of 400 kB, which is longer than the first request."""
    safetensors = pytest.importorskip("safetensors.numpy")
    np = pytest.importorskip("numpy")
    source = tmp_path / "source"
    source.mkdir()
    tensors = {f"model.layers.{i}.{'x' * 60}.norm.weight": np.zeros(4, np.float16) for i in range(3000)}
    tensors["lm_head.weight"] = np.zeros((1000, 1000), np.float16)
    safetensors.save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(
        '{"quantization_config": {"quant_algo": "FP8", "quant_method": "modelopt"}}'
    )
    (source / "notes.md").write_text("not asked for")
    server.models["org/model", "main"] = source
    result = run("inspect", "org/model", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["totals"]["tensors"] == 3001
    header = read_header(source / "model.safetensors")
    first = min(info.begin for info in header.tensors.values())
    assert first > 1 << 18
    assert server.sent["model.safetensors"] == first
    assert "notes.md" not in server.sent


@needs_library
@pytest.mark.parametrize("command", [["verify"], ["inspect", "--deep"]])
def test_what_needs_the_weights_fetches_them(command, server, run, data):
    source = data / "exports/fp8_kvcast"
    server.models["org/model", "v1"] = source
    result = run(command[0], "org/model@v1", *command[1:])
    assert result.returncode == 0, result.stdout + result.stderr
    assert server.sent["model.safetensors"] == (source / "model.safetensors").stat().st_size


@needs_library
def test_convert_and_compare_by_name(server, run, data, tmp_path):
    server.models["org/model", "main"] = data / "exports/fp8_kvcast"
    assert run("convert", "org/model", tmp_path / "out").returncode == 0
    result = run("compare", "org/model", tmp_path / "out", "--json")
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["layers"]) == 7


@needs_library
def test_a_configuration_fetches_no_weights(server, run, data):
    server.models["org/model", "main"] = data / "exports/mixed_three"
    result = run("import moqext; print(moqext.QuantConfig.from_pretrained('org/model').quant_algo)")
    assert result.stdout == "MIXED_PRECISION\n", result.stderr
    assert set(server.sent) == {"config.json", "hf_quant_config.json"}


@needs_library
def test_tensors_that_were_not_fetched_are_refused_not_zero(server, run, data):
    server.models["org/model", "main"] = data / "exports/fp8_kvcast"
    code = (
        "import moqext; c = moqext.Checkpoint('org/model', headers_only=True); c.tensor('model.norm.weight')"
    )
    result = run(code)
    assert "CheckpointError" in result.stderr
    assert "only its header was fetched" in result.stderr


@needs_library
def test_a_server_without_ranges_works(server, run, data):
    server.models["org/model", "main"] = data / "exports/fp8_kvcast"
    server.ranges = False
    assert run("inspect", "org/model").returncode == 0


@needs_library
@pytest.mark.parametrize("name", ["org/absent", "org/model@absent"])
def test_what_is_not_there_is_one_line_and_status_2(name, server, run, data):
    server.models["org/model", "main"] = data / "exports/fp8_kvcast"
    for command in ("inspect", "verify"):
        result = run(command, name)
        assert result.returncode == 2
        told = f"{name}: no such directory here, and cannot be fetched from the Hugging Face Hub: "
        assert f"moqext: error: {told}" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    failed = run(f"import moqext; moqext.QuantConfig.from_pretrained({name!r})")
    assert "ConfigError" in failed.stderr


# Without the library


@pytest.mark.parametrize(
    "name, repo, revision",
    [
        ("org/name", "org/name", None),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8@main", "nvidia/Llama-3.1-8B-Instruct-FP8", "main"),
        ("https://huggingface.co/org/name/", "org/name", None),
        ("here/name", None, None),
        ("name", None, None),
        ("/org/name", None, None),
        ("../org", None, None),
        ("org/name/more", None, None),
        ("org/name@", None, None),
    ],
)
def test_names(name, repo, revision, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    found = hub.hub_name(name)
    assert found == (None if repo is None else (repo, revision))
    assert hub.hub_name(Path(name)) is None


def test_without_the_library_the_message_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "org/name@main"]) == 2
    assert "`pip install huggingface_hub`" in capsys.readouterr().err

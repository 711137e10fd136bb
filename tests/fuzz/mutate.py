"""Genuine files with changes, read by the Python package: each is understood, or refused as it may be.

    python tests/fuzz/mutate.py TARGET [--seconds S] [--runs N] [--seed N]

Targets: config (QuantConfig.from_dict and questions to it), checkpoint (a directory opened, its layers,
dequantized and loaded), producers (the same with files of others than ModelOpt, written again as its),
inspect and verify (the commands). A case is the genuine files with one to four
changes: in the JSON tree, in the text, or in the bytes of a file. It follows from the seed and its number
alone; a failure prints both and leaves the files where it says.
"""

import argparse
import contextlib
import copy
import io
import json
import random
import shutil
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moqext import Checkpoint, CheckpointError, ConfigError, QuantConfig, UnsupportedQuantization, detect
from moqext.cli import inspect, verify

DATA = Path(__file__).resolve().parent.parent / "data"
REFUSALS = (ConfigError, CheckpointError, UnsupportedQuantization)
SMALL = 100_000  # bytes of a checkpoint that is written anew for every case
FILES = ("config.json", "hf_quant_config.json", "model.safetensors")
MODULES = (
    "lm_head",
    "model.layers.0.self_attn.qkv_proj",
    "model.layers.1.mlp.gate_up_proj",
    "model.layers.0.mlp.experts",
    "model.language_model.layers.10.mlp.experts.3.down_proj",
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 16, 3, 2**31, 2**63, -(2**63), 2**64, 10**400, 1.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "*", "**", "\x00", "\ud800", "\U0001f600", "é" * 40, "*a*a*a*a*a*a*b"),
    *("FP8", "nvfp4", "MIXED_PRECISION", "modelopt", "NVFP4_AWQ", "mxfp8", "fp8", "a" * 5000),
    *("re:.*", "re:(a|a)*", "re:[", "compressed-tensors", "tensor", "channel", "block", "group", "e5m2", 4),
    *([], {}, [[]], {"": {}}, ["lm_head"] * 3, {"a": {"quant_algo": "FP8"}}),
)
DTYPES = ("F32", "BF16", "F16", "F8_E4M3", "F8_E8M0", "U8", "I8", "F4", "F64", "BOOL", "I64", "X")


# ---------------------------------------------------------------------------------------------- changes


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON tree."""
    found, pending = [], [tree]
    while pending:
        node = pending.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            pending.append(node[key])
    return found


def odd_value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD_VALUES))


def change_text(rng: random.Random, text: str) -> str:
    """One letter or component taken away, put in or doubled."""
    if not text or rng.random() < 0.2:
        return text + rng.choice(["*", ".", ".*", "x", "\x00", ".0", "_proj"])
    at = rng.randrange(len(text))
    new = rng.choice(["", text[at] * 2, rng.choice("*?[]!.-0aZé\x1f\ud800\u202e"), text[: rng.randint(0, 9)]])
    return text[:at] + new + text[at + 1 :]


def change_tree(rng: random.Random, tree: Any) -> None:
    """One change in place: a value, a key, an item more or less, or a level deeper."""
    found = places(tree)
    if not found:
        return
    node, key = rng.choice(found)
    kind = rng.randrange(8)
    if kind == 0:
        del node[key]
    elif kind == 1:
        node[key] = odd_value(rng)
    elif kind == 2 and isinstance(node[key], str):
        node[key] = change_text(rng, node[key])
    elif kind == 3 and isinstance(key, str):
        node[change_text(rng, key)] = node.pop(key) if rng.random() < 0.5 else node[key]
    elif kind == 4:
        other, name = rng.choice(found)
        node[key] = copy.deepcopy(other[name])
    elif kind == 5 and isinstance(node, list):
        node[key:key] = [odd_value(rng)] * rng.choice([1, 1, 2, 50])
    elif kind == 6 and isinstance(node[key], int):
        node[key] = rng.choice([node[key] + 1, node[key] - 1, -node[key], node[key] * 2, node[key] << 40])
    else:
        for _ in range(rng.choice([1, 2, 70])):
            node[key] = (
                [node[key]] if rng.random() < 0.5 else {rng.choice(["", "a", "quantization"]): node[key]}
            )


def change_bytes(rng: random.Random, content: bytes, within: int) -> bytes:
    """A few bytes near the beginning replaced, inserted or removed, or the end cut off."""
    at = rng.randrange(min(len(content), within) + 1)
    if rng.random() < 0.1:
        return content[:at]
    new = rng.choice([b"", rng.randbytes(rng.randint(1, 4)), rng.choice(b'{}[]",:-9e\\\x00\xff').to_bytes()])
    return content[:at] + new + content[at + rng.randint(0, 3) :]


def change_json(rng: random.Random, content: bytes) -> bytes:
    if rng.random() < 0.2:
        return change_bytes(rng, content, len(content))
    tree = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        change_tree(rng, tree)
    return json.dumps(tree).encode()


def change_tensors(rng: random.Random, content: bytes) -> bytes:
    """A safetensors file with another header, other data, or bytes of either damaged."""
    size = struct.unpack("<Q", content[:8])[0]
    kind = rng.random()
    if kind < 0.2:
        return change_bytes(rng, content, 8 + size)
    if kind < 0.4:
        at = rng.randrange(8 + size, len(content))
        new = rng.choice([b"\xff\xff", b"\x7f", b"\x00\x00\x00\x00", b"\x80", b"\x7f\x80", rng.randbytes(3)])
        return content[:at] + new + content[at + len(new) :]
    header = json.loads(content[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(names)
        entry = header.get(name)
        change = rng.randrange(6)
        if not isinstance(entry, dict) or change == 0:
            change_tree(rng, header)
        elif change == 1:
            del header[name]
        elif change == 2:
            header[change_text(rng, name)] = header.pop(name)
        elif change == 3:
            entry["dtype"] = rng.choice(DTYPES)
        elif change == 4 and isinstance(entry.get("shape"), list):
            rng.shuffle(entry["shape"])
            entry["shape"].insert(rng.randint(0, len(entry["shape"])), rng.choice([1, 1, 0, 2]))
        else:
            other = header.get(rng.choice(names))
            header[name] = copy.deepcopy(other)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


# ---------------------------------------------------------------------------------------------- targets


def genuine_documents() -> list[bytes]:
    paths = sorted([*DATA.glob("configs/*.json"), *DATA.glob("*/*/hf_quant_config.json")])
    documents = [path.read_bytes() for path in [*paths, *sorted(DATA.glob("*/*/config.json"))]]
    return [text for text in documents if len(text) < 20_000]


def parts(content: bytes) -> list[bytes]:
    """A safetensors file as several, each with the tensors of a few modules: a case is to be small."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in sorted(header)))
    files = []
    for first in range(0, len(modules), 8):
        chosen = modules[first : first + 8]
        part: dict[str, Any] = {}
        data = b""
        for name, entry in header.items():
            if name.rpartition(".")[0] in chosen:
                begin, end = (8 + size + at for at in entry["data_offsets"])
                part[name] = {**entry, "data_offsets": [len(data), len(data) + end - begin]}
                data += content[begin:end]
        text = json.dumps(part).encode()
        files.append(struct.pack("<Q", len(text)) + text + data)
    return files


def genuine_checkpoints() -> list[dict[str, bytes]]:
    found = []
    for path in sorted(DATA.glob("*/*/model.safetensors")):
        configs = {name: path.parent / name for name in FILES[:2]}
        if path.stat().st_size < SMALL and all(file.is_file() for file in configs.values()):
            texts = {name: file.read_bytes() for name, file in configs.items()}
            found += [{**texts, FILES[2]: part} for part in parts(path.read_bytes())]
    return found


def foreign_checkpoints() -> list[dict[str, bytes]]:
    """Files of other producers, which have no hf_quant_config.json."""
    found = []
    for path in sorted(DATA.glob("producers/*/model.safetensors")):
        if path.stat().st_size < SMALL:
            text = (path.parent / FILES[0]).read_bytes()
            found += [{FILES[0]: text, FILES[2]: part} for part in parts(path.read_bytes())]
    return found


def config_case(rng: random.Random, genuine: list[bytes], directory: Path) -> Any:
    document = json.loads(rng.choice(genuine))
    for _ in range(rng.randint(1, 4)):
        change_tree(rng, document)
    return document


def read_config(document: Any) -> None:
    detected = outcome(detect, document)
    assert detected is None or detected.startswith("modelopt")
    config = QuantConfig.from_dict(document)
    assert QuantConfig.from_dict(config.to_dict()) == config
    names = [*MODULES, *list(config.quantized_layers)[:2], *config.exclude_modules[:2]]
    packed = {"qkv_proj": ["q_proj", "v_proj"]}
    for name in names:
        if 0 < len(name.encode()) < 4096:
            outcome(config.is_excluded, name, packed)
            outcome(config.is_excluded, name, packed, semantics="vllm")
            outcome(config.layer_quant, name)


def outcome(call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Returns what the call returns, or None where it refuses as it may."""
    try:
        return call(*args, **keywords)
    except REFUSALS:
        return None


def checkpoint_case(rng: random.Random, genuine: list[dict[str, bytes]], directory: Path) -> Path:
    files = dict(rng.choice(genuine))
    for name in rng.sample(list(files), rng.randint(1, 2)):
        if rng.random() < 0.02:
            del files[name]
        else:
            files[name] = (change_json if name.endswith("json") else change_tensors)(rng, files[name])
    for name in FILES:  # a new file each time: an array may still show the old one
        (directory / name).unlink(missing_ok=True)
        if name in files:
            (directory / name).write_bytes(files[name])
    return directory


def read_checkpoint(directory: Path) -> None:
    with Checkpoint(directory) as checkpoint:
        for problem in checkpoint.problems:
            assert problem.severity in ("error", "warning", "note")
            assert problem.code
            assert problem.message
        for layer in checkpoint.layers():
            weight = outcome(checkpoint.dequantize, layer.name)
            assert weight is None or weight.dtype == "float32"
            options = {"top_k": 1, "activation": "silu"} if layer.kind == "moe" else {}
            outcome(checkpoint.load, layer.name, **options)


def read_and_write_again(directory: Path) -> None:
    """Whatever is written in another form is read again; as ModelOpt's, each layer is what it was."""
    read_checkpoint(directory)
    out = directory / "out"
    with Checkpoint(directory) as checkpoint:
        if outcome(checkpoint.convert, out, to="modelopt", overwrite=True) is not None:
            with Checkpoint(out) as written:
                formats = {layer.name: layer.format for layer in checkpoint.layers()}
                assert {layer.name: layer.format for layer in written.layers()} == formats
        if outcome(checkpoint.convert, out, to="compressed-tensors", overwrite=True) is not None:
            with Checkpoint(out) as written:
                assert len(written.layers()) == len(checkpoint.layers())


def inspect_arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    inspect.add_parser(parser.add_subparsers())
    return parser.parse_args(["inspect", "", *options])


REPORTS = (
    inspect_arguments("--json", "--deep", "--layers", "*"),
    inspect_arguments("--problems", "--strict", "--layers", "*l*"),
)


def run_inspect(directory: Path) -> None:
    for arguments in REPORTS:
        written = io.StringIO()
        arguments.directory = str(directory)
        with contextlib.redirect_stdout(written):
            assert inspect.run(arguments) in (0, int(arguments.strict))
        assert not arguments.json or json.loads(written.getvalue())["schema"] == inspect.SCHEMA


VERIFY = ("--json", "--tokens", "2")


def run_verify(directory: Path) -> None:
    parser = argparse.ArgumentParser()
    verify.add_parser(parser.add_subparsers())
    written = io.StringIO()
    for options in (VERIFY, VERIFY[1:]):
        with contextlib.redirect_stdout(written):
            status = verify.run(parser.parse_args(["verify", str(directory), *options, "--seed", "1"]))
        assert status in (0, 1)
        if options is VERIFY:
            report, written = json.loads(written.getvalue()), io.StringIO()
            states = {row["status"] for row in report["rows"]}
            states |= {problem["severity"] for problem in report["problems"]}
            assert status == int(bool(states & {"failed", "error"})) == int(not report["good"])
    assert written.getvalue().splitlines()[-1].startswith("result: ")


class Target(NamedTuple):
    """How a case is made and read, and how many fit into a quick test."""

    genuine: Callable[[], Any]
    case: Callable[[random.Random, Any, Path], Any]
    read: Callable[[Any], None]
    quick_runs: int


TARGETS = {
    "config": Target(genuine_documents, config_case, read_config, 600),
    "checkpoint": Target(genuine_checkpoints, checkpoint_case, read_checkpoint, 60),
    "producers": Target(foreign_checkpoints, checkpoint_case, read_and_write_again, 60),
    "inspect": Target(genuine_checkpoints, checkpoint_case, run_inspect, 40),
    "verify": Target(genuine_checkpoints, checkpoint_case, run_verify, 15),
}


def run(
    name: str, directory: Path, *, seed: int, seconds: float = 1e9, runs: int = 2**62, first: int = 0
) -> int:
    """Runs cases until one of the limits, and returns how many.

    Raises:
        AssertionError: a case was neither read nor refused; names the case.
    """
    target = TARGETS[name]
    genuine = target.genuine()
    end = time.monotonic() + seconds
    number = first
    while number < first + runs and time.monotonic() < end:
        try:
            case = target.case(random.Random(f"{seed}.{number}"), genuine, directory)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a file is no reason to warn its reader of arithmetic
                target.read(case)
        except REFUSALS:
            pass
        except Exception as error:
            raise AssertionError(f"{name}: --seed {seed} --first {number} --runs 1: {error!r}") from error
        number += 1
    return number - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--runs", type=int, default=2**62)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    args = parser.parse_args()
    memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="moqext-fuzz-", dir=memory if memory.is_dir() else None))
    print(f"{args.target}: seed {args.seed}, files in {directory}", flush=True)
    start = time.monotonic()
    done = run(args.target, directory, seed=args.seed, seconds=args.seconds, runs=args.runs, first=args.first)
    shutil.rmtree(directory)
    print(f"{args.target}: {done} cases in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())

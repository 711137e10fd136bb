"""Writes the first cases of every fuzz target, made from the genuine data in tests/data.

python tests/fuzz/seeds.py DIRECTORY        one directory per target in it
"""

import itertools
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"
RECORD = b"\x1e"
UNLIMITED = b"\xff"
CONFIG_LIMIT = 1 << 13
MODULES = """lm_head
model.layers.0.self_attn.qkv_proj
model.layers.1.mlp.gate_up_proj=gate_proj,up_proj
model.layers.1.mlp.experts
language_model.model.layers.10.mlp.experts.3.down_proj
model.layers.3.mlp.gate"""


def configurations() -> Iterator[dict[str, Any]]:
    """Every genuine configuration: of the files alone, and of the exports."""
    for path in sorted([*DATA.glob("configs/*.json"), *DATA.glob("*/*/hf_quant_config.json")]):
        yield json.loads(path.read_text())
    for path in sorted(DATA.glob("*/*/config.json")):
        yield json.loads(path.read_text())


def fields(document: dict[str, Any]) -> dict[str, Any]:
    """The mapping that holds the fields, wherever the document has it."""
    inner = document.get("quantization_config") or document
    return inner.get("quantization") or inner


def trimmed(document: Any, most: int = 12) -> Any:
    """The document with the first few items of every list and object: a case is to be small."""
    if isinstance(document, dict):
        known = {name: document[name] for name in ("quantization_config", "quantization") if name in document}
        rest = dict(itertools.islice(document.items(), most))
        return {name: trimmed(value, most) for name, value in {**rest, **known}.items()}
    return [trimmed(value, most) for value in document[:most]] if isinstance(document, list) else document


def excluded(document: dict[str, Any]) -> list[str]:
    found = fields(document)
    entries = found.get("exclude_modules") or found.get("ignore") or []
    return [entry for entry in entries if isinstance(entry, str)]


def tensor_bytes() -> Iterator[bytes]:
    """Pieces of genuine weights and scales."""
    for path in sorted(DATA.glob("checkpoints/*/model.safetensors")):
        content = path.read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]
        for at in range(start, len(content) - 512, max((len(content) - start) // 6, 1)):
            yield content[at : at + 128]


def names() -> Iterator[bytes]:
    for document in configurations():
        entries = excluded(document)[:8]
        for name in MODULES.split("\n")[::2] + entries[:1]:
            module, _, shards = name.partition("=")
            if module.endswith("qkv_proj"):
                shards = "q_proj,k_proj,v_proj"
            yield "\n".join([module, shards, *entries]).encode()
    yield b"a" * 200 + b"b\n\n*a*a*a*a*a*a*a*a*c\n[!a-c]?*\n[]]\n[z-a]\n"


def config() -> Iterator[bytes]:
    known = [trimmed(document) for document in configurations()]
    for first, second in zip(known, known[1:] + known[:1], strict=True):
        for documents in ((first,), (first, second)):
            parts = [json.dumps(document, ensure_ascii=False).encode() for document in documents]
            listed = list(fields(first).get("quantized_layers") or {})[:4] + excluded(first)[:4]
            asked = "\n".join([MODULES, *listed]).encode()
            case = UNLIMITED + RECORD.join([asked, *parts])
            if len(case) <= CONFIG_LIMIT:
                yield case


def formats() -> Iterator[bytes]:
    yield from tensor_bytes()
    edges = [0.0, -0.0, 2.0**-10, 1.75 * 2.0**-9, 464.0, 448.0, 480.0, 5.0, 2.5, 0.25, 57344.0, 65520.0]
    yield struct.pack("<12f", *edges)
    yield struct.pack(
        "<8I", 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1, 0x007FFFFF, 0x400000, 0x600000
    )


def with_heads(*ranges: range) -> Iterator[bytes]:
    """Leading bytes that draw the choices of a target in turn, before genuine bytes."""
    bodies = itertools.cycle(tensor_bytes())
    for head in itertools.product(*ranges):
        yield bytes(head) + next(bodies)


def quantize() -> Iterator[bytes]:
    for case in with_heads(range(4), range(3), range(1, 4)):  # scheme, dtype, ndim
        extents = [2] * (case[2] - 1)
        yield case[:3] + bytes([*extents, 48, 0, 1, 1, 0]) + case[3:]


def dequantize() -> Iterator[bytes]:
    # algorithm, 2 or 3 dimensions, kind of scale shape
    for case in with_heads(range(1, 16), range(2), range(0, 8)):
        yield bytes([case[0], 1, case[1], 2, 2, 3, 0, 255, 0, 1, 255, case[2]]) + case[3:]


def linear() -> Iterator[bytes]:
    for case in with_heads((*range(8), 10, 11), range(0, 6), range(0, 4)):  # algorithm, compute mode, dtype
        yield case[:3] + bytes([200, 64, 0, 0, 1 + case[0], 200, 33, 0, 200, 12, 0]) + case[3:]


def moe() -> Iterator[bytes]:
    for case in with_heads(
        range(7), range(3), range(3), range(5)
    ):  # algorithm, compute mode, dtype, activation
        yield case[:4] + bytes([1, 3, 2, 2, 1, 2, 1, 0, 1, 1, 1, 1, 1]) + case[4:]


def tensor_header() -> Iterator[bytes]:
    """The first tensors of genuine headers, and their metadata."""
    for path in sorted(DATA.glob("*/*/*.safetensors")):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        first = dict(itertools.islice(header.items(), 5))
        yield b"\x28" + json.dumps(first, separators=(",", ":")).encode()
        yield b"\x14" + json.dumps(dict(itertools.islice(header.items(), 2)), indent=1).encode() + b"  \n"


TARGETS = {
    "names": names,
    "tensor_header": tensor_header,
    "config": config,
    "formats": formats,
    "quantize": quantize,
    "dequantize": dequantize,
    "linear": linear,
    "moe": moe,
}


def write(directory: Path) -> dict[str, list[Path]]:
    """Writes all seeds and returns the files of each target."""
    written: dict[str, list[Path]] = {}
    for target, make in TARGETS.items():
        folder = directory / target
        folder.mkdir(parents=True, exist_ok=True)
        written[target] = []
        for number, case in enumerate(make()):
            path = folder / f"seed-{number:04}"
            path.write_bytes(case)
            written[target].append(path)
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for target, files in write(Path(sys.argv[1])).items():
        print(f"{target}: {len(files)} cases")

"""`moqext quantize` of a whole model on the processor and on a CUDA device, against reading and writing.

The model is layers of a Llama of 8 billion weights in bfloat16. Before each run its files leave the cache of
the system, so that they come from the disk below DIR (one in memory, as /dev/shm, shows what else limits).
"read" takes them by as many threads as the device has, and does nothing with them; "write" is as many bytes
as the codes of FP8. Seconds are those of reading, quantizing and writing, `wall_seconds` of the whole
command, with the start of Python and of CUDA; memory is the most of the process at a time. With `--cached`
each run is made once more with its files in the cache.

    python -m benchmarks.quantize_files DIR [--layers N] [--algos ALGO,...] [--devices cpu,cuda] [--cached]
                                            [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from moqext import _C
from moqext.tools.convert.writer import TensorSpec, TensorWriter
from moqext.tools.quantize.quantizers import WORKERS

SHAPES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
ALGOS = ("FP8_PER_CHANNEL_PER_TOKEN", "W4A16_NVFP4", "FP8", "MXFP8")
LAYERS_OF_A_FILE = 8
PIECE = 8 << 20


def make_model(directory: Path, layers: int) -> int:
    """Writes the model and returns its bytes."""
    directory.mkdir()
    rng = np.random.default_rng(1)
    noise = ((rng.standard_normal(1 << 25, np.float32) / 64).view(np.uint32) >> 16).astype(np.uint16)
    total = 0
    for first in range(0, layers, LAYERS_OF_A_FILE):
        numbers = range(first, min(first + LAYERS_OF_A_FILE, layers))
        specs = [
            TensorSpec(f"model.layers.{number}.{name}.weight", "BF16", shape)
            for number in numbers
            for name, shape in SHAPES.items()
        ]
        with TensorWriter(directory / f"model-{first:03}.safetensors", specs, {}) as writer:
            for spec in specs:
                left = spec.nbytes // 2
                while left:
                    left -= writer.append(spec.name, noise[: min(left, noise.size)]) // 2
        total += sum(spec.nbytes for spec in specs)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
    return total


def forget(directory: Path) -> None:
    """Writes files to the disk and takes them out of the cache of the system."""
    for path in directory.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_seconds(directory: Path) -> float:
    """Seconds of reading all files."""

    def read(path: Path) -> None:
        buffer = bytearray(PIECE)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    begin = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(read, sorted(directory.glob("*.safetensors"))))
    return time.perf_counter() - begin


def write_seconds(path: Path, nbytes: int) -> float:
    """Seconds of writing so many bytes."""
    block = os.urandom(PIECE)
    begin = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(0, nbytes, PIECE):
            file.write(block)
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


def quantize(source: Path, out: Path, algo: str, device: str) -> dict[str, Any]:
    """Runs the command in a process of its own."""
    command = [sys.executable, "-m", "moqext", "quantize", str(source), str(out), "--to", algo]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--scales", "none", "--device", device, "--json"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    told = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(command)}: exit status {os.waitstatus_to_exitcode(status)}")
    report = json.loads(told)
    shutil.rmtree(out)
    return {
        "device": device,
        "quant_algo": algo,
        "seconds": report["seconds"],
        "wall_seconds": wall,
        "bytes_read": report["bytes_read"],
        "bytes_written": report["bytes_written"],
        "gb_per_second": report["bytes_read"] / report["seconds"] / 1e9,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "memory_bytes": usage.ru_maxrss * 1024,
    }


def main() -> None:
    """Measures, prints a line for each run and, if asked, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--algos", type=lambda text: text.split(","), default=list(ALGOS))
    parser.add_argument("--devices", type=lambda text: text.split(","), default=["cpu", "cuda"])
    parser.add_argument("--cached", action="store_true", help="each run also from the cache of the system")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    try:
        measure(options, rates, rows)
    finally:  # where a run fails or is stopped, those before it are kept
        if options.json:
            write(options, rates, rows)


def measure(options: argparse.Namespace, rates: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """Makes the model and fills in rates and rows."""
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        source, out = Path(folder, "model"), Path(folder, "out")
        total = make_model(source, options.layers)
        forget(source)
        rates["read"] = total / read_seconds(source)
        rates["cache"] = total / read_seconds(source)
        rates["write"] = total / 2 / write_seconds(Path(folder, "zeros"), total // 2)
        told = ", ".join(f"{what} {rate / 1e9:.2f}" for what, rate in rates.items())
        print(f"{total / 1e9:.2f} GB; {told} GB/s", flush=True)
        for algo in options.algos:
            for cache in ("cold", "warm") if options.cached else ("cold",):
                for device in options.devices:
                    if cache == "cold":
                        forget(source)
                    row = {"cache": cache, **quantize(source, out, algo, device)}
                    rows.append(row)
                    print(
                        f"{algo:26s} {device:5s} {cache:5s} {row['seconds']:6.2f} s, "
                        f"{row['gb_per_second']:5.2f} GB/s; {row['wall_seconds']:6.2f} s in all, "
                        f"processor {row['processor_seconds']:6.2f} s, {row['memory_bytes'] / 1e6:,.0f} MB",
                        flush=True,
                    )


def write(options: argparse.Namespace, rates: dict[str, float], rows: list[dict[str, Any]]) -> None:
    """Keeps the result, with the name of the device where there is one."""
    try:
        name = _C.cuda_devices()[0]["name"]
    except RuntimeError:
        name = None
    facts = {f"{what}_bytes_per_second": rate for what, rate in rates.items()}
    where = "memory" if str(options.directory).startswith("/dev/shm") else "disk"
    record.write("quantize_files", rows, options.json, device=name, files=where, **facts)


if __name__ == "__main__":
    main()

"""`python -m moqext info`: what was built, what this machine offers, and why something is missing."""

import argparse
import json
import platform
import sys
from typing import Any

import numpy as np

from moqext import _C, UnsupportedQuantization
from moqext.algorithms import LINEARS
from moqext.cli import text

LAYERS = [(algo, compute) for algo in LINEARS for compute in ("exact", "fp8", "fp4")]
"""Linears that kernels are asked about; those that there are not are refused, and left out."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser(
        "info",
        help="version, build, CPU and CUDA",
        description="Prints the version, how the extension was built, the vector extensions of the CPU, the "
        "OpenMP runtime, and the CUDA devices, or the reasons why there are none.",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def collect() -> dict[str, Any]:
    """The facts that `info` prints, as plain data."""
    build = _C.build_info()
    try:
        devices, reason = _C.cuda_devices(), None
    except RuntimeError as error:
        devices, reason = [], str(error)
    openmp, openmp_reason = _C.openmp()
    cublaslt, cublaslt_version, cublaslt_reason = _C.cublaslt()
    runtime, driver = map(version, _C.cuda_versions())
    return {
        "version": build["version"],
        "commit": build["commit"],
        "compiler": build["compiler"],
        "flags": build["flags"],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "isa": _C.cpu_isa(),
        "threads": _C.num_threads(),
        "openmp": openmp,
        "openmp_reason": openmp_reason,
        "cpu_kernels": usable_kernels("cpu"),
        "cuda_kernels": [name for name in _C.kernels() if name.startswith("cuda:")],
        "cuda_built": build["cuda"],
        "cublaslt": cublaslt,
        "cublaslt_version": ".".join(map(str, cublaslt_version or ())) or None,
        "cublaslt_reason": cublaslt_reason,
        "cuda_archs": [arch for arch in build["cuda_archs"].split(";") if arch],
        "cuda_runtime": runtime,
        "cuda_driver": driver,
        "cuda_devices": [
            device | {"kernels": usable_kernels(f"cuda:{device['index']}")} for device in devices
        ],
        "cuda_reason": reason,
    }


def usable_kernels(device: str) -> list[str]:
    """Kernels that can run some linear on a device, in the order of the table."""
    usable: set[str] = set()
    for algo, compute in LAYERS:
        try:
            plan = _C.linear_plan(algo, 4096, [4096], None, "bfloat16", device, compute)
        except UnsupportedQuantization:
            continue
        usable.update(name for name, reason in plan.explain() if reason is None)
    return [name for name in _C.kernels() if name in usable]


def version(number: int) -> str | None:
    """CUDA's 13010 as "13.1"; None for 0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def run(args: argparse.Namespace) -> int:
    """Executes the subcommand and returns the exit status."""
    facts = collect()
    if args.json:
        json.dump(facts, sys.stdout)
        print()
        return 0
    archs = " ".join(facts["cuda_archs"])
    lines = [
        ("moqext", f"{facts['version']} (commit {facts['commit']})"),
        (
            "build",
            f"{facts['compiler']}, {'CUDA for ' + archs if facts['cuda_built'] else 'CPU only'}",
        ),
        ("flags", facts["flags"]),
        ("python", f"{facts['python']}, NumPy {facts['numpy']}"),
        ("cpu", f"{facts['machine']}, level {facts['isa']}, {text.plural(facts['threads'], 'thread')}"),
        ("openmp", facts["openmp"] or facts["openmp_reason"]),
        ("kernels", " ".join(facts["cpu_kernels"])),
        ("cuda", facts["cuda_reason"] or text.plural(len(facts["cuda_devices"]), "device")),
    ]
    if facts["cuda_runtime"]:
        driver = f"up to {facts['cuda_driver']}" if facts["cuda_driver"] else "none"
        lines.append(("versions", f"CUDA runtime {facts['cuda_runtime']}, driver {driver}"))
    for device in facts["cuda_devices"]:
        major, minor = device["capability"]
        memory = device["memory"] / 2**30
        name = f"{device['name']}, capability {major}.{minor}, {device['sm_count']} SMs, {memory:.0f} GiB"
        lines.append((f"cuda:{device['index']}", name))
        lines.append(("", " ".join(device["kernels"]) or "no kernel for this chip in this build"))
    if facts["cuda_built"]:
        library = f"{facts['cublaslt_version']}, {facts['cublaslt']}"
        lines.append(("cublaslt", facts["cublaslt_reason"] or library))
    for key, value in lines:
        print(f"{key:8} {value}")
    return 0

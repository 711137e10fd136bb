"""The machine and the software that a measurement belongs to."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from moqext import _C

_LIBRARIES = ("numpy", "torch", "ml_dtypes")
_CACHES = Path("/sys/devices/system/cpu")

_ATTRIBUTES = {
    "sms": 16,
    "sm_khz": 13,
    "memory_khz": 36,
    "bus_bits": 37,
    "l2_bytes": 38,
    "major": 75,
    "minor": 76,
}
"""CUdevice_attribute, by the name that benchmarks/times has for it."""


def environment() -> dict[str, Any]:
    """Plain data for JSON: date, processor, system, versions, how the extension was built."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "cpu": cpu_model(),
        "cpus": len(processors()),
        "isa": _C.cpu_isa(),
        "last_level_cache": last_level_cache(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{library: version for library in _LIBRARIES if (version := _installed(library))},
        "moqext": _C.build_info(),
    }


def cuda_attributes(index: int = 0) -> dict[str, Any]:
    """Name of a CUDA device, version of its driver, and the attributes that choices of kernels follow from.

    Raises:
        OSError: There is no driver.
        RuntimeError: It refuses.
    """
    import ctypes  # which not every Python has

    driver = ctypes.CDLL("libcuda.so.1")
    handle, version, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(96)
    for call, *arguments in (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(handle), index),
        ("cuDeviceGetName", name, len(name), handle),
        ("cuDriverGetVersion", ctypes.byref(version)),
    ):
        if status := getattr(driver, str(call))(*arguments):
            raise RuntimeError(f"{call}: CUDA error {status}")
    found: dict[str, Any] = {"name": name.value.decode(), "driver": version.value}
    for key, number in _ATTRIBUTES.items():
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        found[key] = value.value
    return found


def cpu_model() -> str:
    """The processor as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def processors() -> set[int]:
    """Numbers of the processors that this process may use."""
    return os.sched_getaffinity(0)


def last_level_cache() -> int | None:
    """Bytes of the last caches of all processors that may be used, None where the system does not tell."""
    caches: dict[str, tuple[int, int]] = {}  # processors that share it -> (level, bytes)
    for processor in processors():
        found = [_cache(index) for index in (_CACHES / f"cpu{processor}" / "cache").glob("index*")]
        if not found:
            return None
        level, size, shared = max(found)
        caches[shared] = (level, size)
    last = max(level for level, _ in caches.values())
    return sum(size for level, size in caches.values() if level == last)


def _cache(index: Path) -> tuple[int, int, str]:
    names = ("level", "size", "shared_cpu_list")
    level, size, shared = ((index / name).read_text().strip() for name in names)
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    bytes_ = int(size[:-1]) * unit[size[-1]] if size[-1] in unit else int(size)
    return int(level), bytes_, shared


def _installed(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None

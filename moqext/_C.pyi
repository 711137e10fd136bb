"""Types of the native part; use the names of package moqext instead."""

from typing import Any

class ConfigError(ValueError):
    path: str

class UnsupportedQuantization(ValueError): ...

def build_info() -> dict[str, Any]: ...
def cuda_devices() -> list[dict[str, Any]]: ...

"""`--device` and `--compute` of commands that run layers."""

import argparse
import re

from moqext import _C

_NO_DEVICE = "--device {}: no such CUDA device: {}"


def add_device(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the option.

    Args:
        parser: of a command.
        default: where its layers run without it, "cpu" or "auto".
    """
    cpu, auto = (f'"{name}"' + (" (default)" if name == default else "") for name in ("cpu", "auto"))
    parser.add_argument(
        "--device",
        type=_device,
        default=default,
        help=f'{cpu}, "cuda[:N]", or {auto}: the first CUDA device, the CPU where there is none',
    )


def add_compute(parser: argparse.ArgumentParser) -> None:
    """Adds the option."""
    parser.add_argument(
        "--compute",
        default="exact",
        choices=("exact", "fp8", "fp4", "auto"),
        help="how NVFP4 and MX weights are multiplied",
    )


def _device(text: str) -> str:
    """The argument, where it is one that a device may have."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise argparse.ArgumentTypeError(f'expected "cpu", "cuda:N" or "auto", got {text!r}')
    return text


def choose_device(wanted: str) -> tuple[str, str]:
    """The device, and in parentheses which one it is or why "auto" came to the CPU.

    Raises:
        RuntimeError: there is no such device.
    """
    if wanted == "cpu":
        return wanted, ""
    index = int(wanted.partition(":")[2] or 0)
    try:
        devices = _C.cuda_devices()
    except RuntimeError as error:
        if wanted == "auto":
            return "cpu", f" ({error})"
        raise RuntimeError(_NO_DEVICE.format(wanted, error)) from None
    if index >= len(devices):
        if wanted == "auto":
            return "cpu", " (no CUDA device)"
        there = ", ".join(f"cuda:{device['index']}" for device in devices) or "none"
        raise RuntimeError(_NO_DEVICE.format(wanted, f"there {'are' if len(devices) > 1 else 'is'} {there}"))
    return f"cuda:{index}", f" ({devices[index]['name']})"

"""Copies of tensors to a device and back."""

from typing import Any

from moqext import _C
from moqext.ops.spelling import Device, device_name


def to_device(x: Any, device: Device = "cuda:0") -> Any:
    """A tensor of the host copied to a CUDA device, without any framework.

    Args:
        x: contiguous tensor in host memory, of any dtype.
        device: "cuda" or "cuda:N".

    Returns:
        An object with `shape`, `dtype`, `device` and `__dlpack__`: memory of moqext's own, which every
        operation takes, whose results are of the same kind, and which `torch.from_dlpack` and its like
        share without a copy.

    Raises:
        ValueError: no such device.
        BufferError: x is not in host memory, or has gaps.
        MemoryError: not enough is free on the device.
        RuntimeError: there is no CUDA device, or this build has no CUDA.
    """
    return _C.to_device(x, device_name(device))


def to_host(x: Any, out: Any = None) -> Any:
    """A CUDA tensor of any framework copied to a NumPy array, once the work queued before is done.

    Args:
        x: contiguous tensor on a CUDA device.
        out: array of its shape and dtype, or raw integers of its width, in host memory; by default a new one.

    Returns:
        `out`, or a NumPy array; dtypes that NumPy has not are those of ml_dtypes if it is installed, else raw
        integers.

    Raises:
        BufferError: x is not on a CUDA device, or has gaps.
        ValueError: another shape, or gaps, of `out`.
        TypeError: another dtype of it.
    """
    return _C.to_host(x, out=out)

"""Tensors of moqext and of checkpoints as tensors of torch, sharing their memory."""

from typing import Any

import numpy as np
import torch

from moqext import Checkpoint, Layer

STORED = {  # dtypes of safetensors files
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMED = {  # dtypes of moqext.ParamSpec; torch has packed fp4 and e8m0, but modules and files know the bytes
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e8m0fnu": torch.uint8,
    "float4_e2m1fn_x2": torch.uint8,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_CARRIERS = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that say nothing of what their bytes are."""


def as_torch(tensor: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of moqext as one of torch, without a copy.

    Args:
        tensor: an array of NumPy, those of ml_dtypes among them, or anything with `__dlpack__`, as the memory
            of moqext's own that a layer on a CUDA device has.
        dtype: what the bytes are, where the array's own type cannot say so (uint8 for FP8, uint16 for
            bfloat16); of the same width. None keeps the type.

    Raises:
        TypeError: torch has no such dtype, the tensor is of another one, or it has another width.
    """
    if not isinstance(tensor, np.ndarray):
        shared = torch.from_dlpack(tensor)
    elif tensor.dtype.isbuiltin != 1:  # a type of ml_dtypes
        own = getattr(torch, tensor.dtype.name, None)
        if own is None:
            raise TypeError(f"torch has no dtype {tensor.dtype.name}")
        shared = torch.from_numpy(tensor.view(_INTEGERS[tensor.itemsize])).view(own)
    else:
        shared = torch.from_numpy(tensor)
    if dtype is None or shared.dtype == dtype:
        return shared
    if shared.element_size() != dtype.itemsize:
        raise TypeError(
            f"dtype: expected one of {shared.element_size()} bytes for {shared.dtype}, got {dtype}"
        )
    packed = dtype == torch.uint8 and shared.dtype == torch.float4_e2m1fn_x2
    if shared.dtype not in _CARRIERS and not packed:
        raise TypeError(f"tensor: expected {dtype} or its bytes as unsigned integers, got {shared.dtype}")
    return shared.view(dtype)


def stored_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor of a checkpoint, in the dtype that its file gives it."""
    return as_torch(checkpoint.tensor(name), STORED.get(checkpoint.tensors[name].dtype))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of powers of two (e8m0), as parameters have them; other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == getattr(torch, "float8_e8m0fnu", None) else tensor


def stored_exponents(scales: torch.Tensor, output_scale: torch.Tensor) -> torch.Tensor:
    """The block scales of MXFP4 as a checkpoint has them, e8m0 bytes, from the prepared ones.

    Groups of zeros whose exponent lies too far from those of their row have 0.

    Args:
        scales: e4m3 powers of two [..., rows, groups], or their bytes.
        output_scale: of rows, powers of two.
    """
    values = scales.view(torch.float8_e4m3fn).float()
    exponents = values.frexp().exponent + output_scale.frexp().exponent[..., None] + (127 - 2)
    return torch.where(values == 0, torch.zeros_like(exponents), exponents).to(torch.uint8)


def prepared_tensors(layer: Layer) -> dict[str, torch.Tensor]:
    """The prepared parameters of a layer from `Checkpoint.load` as tensors of torch that share its memory."""
    specs = layer.method.prepared_params
    return {role: as_torch(tensor, NAMED[specs[role].dtype]) for role, tensor in layer.params.items()}

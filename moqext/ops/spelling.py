"""Names of data types and devices, from the objects that frameworks have for them; no framework is imported.

An object is recognised by what it offers, never by its class: a dtype of NumPy or ml_dtypes, and a device of
JAX, say what they are by attributes, those of torch as text.
"""

from typing import Any, Literal, Protocol, TypeVar

import numpy as np

Compute = Literal["exact", "auto", "fp8", "fp4"]
"""The numbers that a linear multiplies; see `LinearMethod`."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swigluoai"]
"""The function between the two projections of an expert; see `MoEMethod`."""

SWIGLU = ("alpha", "beta", "limit")
"""Numbers that silu with a gate has, as arguments of `MoEMethod` name them."""

Scoring = Literal["softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"]
"""The function of a router from logits to scores; see `moqext.route`."""

DtypeName = Literal["bfloat16", "float16", "float32"]
"""The data types of x and y."""


Tensor = TypeVar("Tensor")
"""A tensor of any framework: results are of the kind of x."""


class DtypeObject(Protocol):
    """A dtype of torch, NumPy, ml_dtypes or JAX: `torch.bfloat16`, `numpy.dtype("float32")`."""

    @property
    def itemsize(self) -> Any:
        """Bytes of a value; a str has no such attribute."""


class DeviceObject(Protocol):
    """A device of torch (`torch.device("cuda", 0)`) and what looks like one."""

    @property
    def type(self) -> str:
        """The kind, as "cpu" or "cuda"."""


Dtype = DtypeName | DtypeObject | type[Any]
Device = str | DeviceObject


def dtype_name(dtype: Any) -> Any:
    """The name of a dtype object: "bfloat16" for `torch.bfloat16`. What is none is returned as it came."""
    if isinstance(dtype, str) or dtype is None:
        return dtype
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        return np.dtype(dtype).name
    dtype = getattr(dtype, "dtype", dtype)  # that of jax.numpy.bfloat16 is a numpy.dtype
    if isinstance(dtype, np.dtype):
        return dtype.name
    return str(dtype).rpartition(".")[2] if hasattr(dtype, "itemsize") else dtype


def device_name(device: Any) -> Any:
    """The name of a device object: "cuda:0" for `torch.device("cuda", 0)`. What is none comes back as it is.

    A device of JAX is counted as the process sees it, as CUDA counts.
    """
    if isinstance(device, str) or device is None:
        return device
    if isinstance(platform := getattr(device, "platform", None), str):  # of JAX
        index = getattr(device, "local_hardware_id", None) or 0
        return f"cuda:{index}" if platform in ("gpu", "cuda") else platform
    return str(device) if isinstance(getattr(device, "type", None), str) else device

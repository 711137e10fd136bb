"""Hostile DLPack producers made with ctypes: every field can lie, every deleter call is counted."""

import ctypes
import weakref
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    pythonapi,
)
from typing import Any

READ_ONLY, IS_COPIED, PADDED = 1, 2, 4
CPU, CUDA = 1, 2
FLOAT32 = (2, 32, 1)


class DLVersion(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32)]


class DLDevice(Structure):
    _fields_ = [("type", c_int32), ("index", c_int32)]


class DLDataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


DELETER = CFUNCTYPE(None, c_void_p)


class Legacy(Structure):
    _fields_ = [("tensor", DLTensor), ("context", c_void_p), ("deleter", DELETER)]


class Versioned(Structure):
    _fields_ = [
        ("version", DLVersion),
        ("context", c_void_p),
        ("deleter", DELETER),
        ("flags", c_uint64),
        ("tensor", DLTensor),
    ]


class Managed(Union):
    _fields_ = [("legacy", Legacy), ("versioned", Versioned)]


_DESTRUCTOR = CFUNCTYPE(None, c_void_p)
_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, _DESTRUCTOR)(
    ("PyCapsule_New", pythonapi)
)
_capsule_new_plain = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(
    ("PyCapsule_New", pythonapi)
)
_capsule_valid = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", pythonapi))

# Deleters and destructors are called whenever a consumer or the collector gets to it, so they are functions
# of this module, which outlive every Lender, and find theirs by the address of its struct.
_lenders: "weakref.WeakValueDictionary[int, Lender]" = weakref.WeakValueDictionary()


def _count_deletion(managed: int) -> None:
    lender = _lenders.get(managed)
    if lender is not None:
        lender.deleted += 1


def _destroy_capsule(capsule: int) -> None:
    for name in (b"dltensor", b"dltensor_versioned"):
        if _capsule_valid(capsule, name):
            _count_deletion(_capsule_pointer(capsule, name))


_DELETE = DELETER(_count_deletion)
_DESTROY = _DESTRUCTOR(_destroy_capsule)


class Lender:
    """A float32 buffer and one DLManagedTensor(Versioned) over it; `deleted` counts deleter calls.

    Keywords replace fields of the DLTensor (data, device, ndim, dtype, shape, strides, byte_offset) or of
    the managed tensor (version, flags); shape and strides may be None for NULL.
    """

    alive: list["Lender"] = []  # noqa: RUF012  (structs must outlive whatever a consumer does with them)

    def __init__(self, shape: Any = (2, 3), legacy: bool = False, **lies: Any) -> None:
        Lender.alive.append(self)
        self.legacy = legacy
        self.deleted = 0
        self.buffer = (ctypes.c_float * 1024)()
        self.address = (ctypes.addressof(self.buffer) + 255) // 256 * 256
        self.managed = Managed()
        _lenders[ctypes.addressof(self.managed)] = self
        part = self.managed.legacy if legacy else self.managed.versioned
        part.deleter = _DELETE
        if not legacy:
            part.version = DLVersion(*lies.pop("version", (1, 3)))
            part.flags = lies.pop("flags", 0)
        self.fill(part.tensor, shape, **lies)

    def fill(self, tensor: DLTensor, shape: Any, **lies: Any) -> None:
        compact = []
        step = 1
        for extent in reversed(shape or ()):
            compact.insert(0, step)
            step *= extent
        strides = lies.pop("strides", compact)
        self.shape = None if shape is None else (c_int64 * max(1, len(shape)))(*shape)
        self.strides = None if strides is None else (c_int64 * max(1, len(strides)))(*strides)
        tensor.data = lies.pop("data", self.address)
        tensor.device = DLDevice(*lies.pop("device", (CPU, 0)))
        tensor.ndim = lies.pop("ndim", len(shape or ()))
        tensor.dtype = DLDataType(*lies.pop("dtype", FLOAT32))
        if self.shape is not None:
            tensor.shape = ctypes.cast(self.shape, POINTER(c_int64))
        if self.strides is not None:
            tensor.strides = ctypes.cast(self.strides, POINTER(c_int64))
        tensor.byte_offset = lies.pop("byte_offset", 0)
        assert not lies, f"unknown fields {lies}"

    def capsule(self, name: bytes | None = None) -> Any:
        """A capsule over the tensor; it calls the deleter unless a consumer renamed it."""
        self.name = name if name is not None else b"dltensor" if self.legacy else b"dltensor_versioned"
        return _capsule_new(ctypes.addressof(self.managed), self.name, _DESTROY)


class Producer:
    """An object with `__dlpack__` over a Lender; records the keywords it is called with."""

    def __init__(self, lender: Lender, device: Any = (CPU, 0), name: bytes | None = None) -> None:
        self.lender = lender
        self.device = device
        self.name = name
        self.calls: list[dict[str, Any]] = []

    def __dlpack__(self, **keywords: Any) -> Any:
        self.calls.append(keywords)
        return self.lender.capsule(self.name)

    def __dlpack_device__(self) -> Any:
        return self.device


class MutableProducer(Producer):
    """A Producer whose type does arithmetic in place, so that its memory may be an output."""

    def __iadd__(self, other: Any) -> Any:
        raise NotImplementedError


# --- the C exchange API

ALLOCATOR_ERROR = CFUNCTYPE(None, c_void_p, c_char_p, c_char_p)
ALLOCATE = ctypes.PYFUNCTYPE(c_int, POINTER(DLTensor), POINTER(c_void_p), c_void_p, ALLOCATOR_ERROR)
FROM_OBJECT = ctypes.PYFUNCTYPE(c_int, c_void_p, POINTER(c_void_p))
TO_OBJECT = ctypes.PYFUNCTYPE(c_int, c_void_p, POINTER(c_void_p))
BORROW = ctypes.PYFUNCTYPE(c_int, c_void_p, POINTER(DLTensor))
STREAM = ctypes.PYFUNCTYPE(c_int, c_int, c_int32, POINTER(c_void_p))
# A function of the interpreter that returns -1 with an exception set when __bool__ raises: what a
# ctypes callback cannot do.
RAISE = ctypes.cast(pythonapi.PyObject_IsTrue, c_void_p).value


class ExchangeAPI(Structure):
    pass


ExchangeAPI._fields_ = [
    ("version", DLVersion),
    ("prev", POINTER(ExchangeAPI)),
    ("allocate", c_void_p),
    ("from_object", c_void_p),
    ("to_object", c_void_p),
    ("borrow", c_void_p),
    ("stream", c_void_p),
]


def address_of(function: Any) -> int:
    return ctypes.cast(function, c_void_p).value or 0


def exchange_capsule(api: ExchangeAPI, name: bytes = b"dlpack_exchange_api") -> Any:
    Lender.alive.append((api, name))  # type: ignore[arg-type]
    return _capsule_new_plain(ctypes.addressof(api), name, None)


class Exchange:
    """Callbacks of a working exchange API over Lenders; tests replace what they want to break."""

    def __init__(self, lender: Lender, *, borrow: bool = True) -> None:
        Lender.alive.append(self)  # type: ignore[arg-type]
        self.lender = lender
        self.calls: list[str] = []
        self.allocated: list[Lender] = []
        self.lies: dict[str, Any] = {}
        self.kept: list[Any] = []
        self.error: tuple[bytes, bytes] | None = None
        self.callbacks = [
            ALLOCATE(self.allocate),
            FROM_OBJECT(self.from_object),
            TO_OBJECT(self.to_object),
            BORROW(self.borrow),
        ]
        addresses = [address_of(callback) for callback in self.callbacks]
        self.api = ExchangeAPI(DLVersion(1, 3), None, *addresses, None)
        if not borrow:
            self.api.borrow = None

    def allocate(self, prototype: Any, out: Any, context: int, set_error: Any) -> int:
        self.calls.append("allocate")
        if self.error:
            set_error(context, *self.error)
            return -1
        wanted = prototype.contents
        dtype = (wanted.dtype.code, wanted.dtype.bits, wanted.dtype.lanes)
        fields = {"shape": tuple(wanted.shape[: wanted.ndim]), "dtype": dtype, **self.lies}
        self.allocated.append(Lender(**fields))
        out[0] = ctypes.addressof(self.allocated[-1].managed)
        return 0

    def from_object(self, _object: int, out: Any) -> int:
        self.calls.append("from_object")
        out[0] = ctypes.addressof(self.lender.managed)
        return 0

    def to_object(self, managed: int, out: Any) -> int:
        self.calls.append("to_object")
        tensor = next(lender for lender in self.allocated if ctypes.addressof(lender.managed) == managed)
        result = make_type(self)()
        result.lender = tensor
        pythonapi.Py_IncRef(ctypes.py_object(result))
        out[0] = id(result)
        return 0

    def borrow(self, _object: int, out: Any) -> int:
        self.calls.append("borrow")
        ctypes.memmove(out, ctypes.byref(self.lender.managed.versioned.tensor), ctypes.sizeof(DLTensor))
        return 0


def make_type(exchange: Exchange, **attributes: Any) -> type:
    """A fresh type that offers the exchange API."""
    body = {"__dlpack_c_exchange_api__": exchange_capsule(exchange.api), **attributes}
    return type("ExchangeTensor", (), body)

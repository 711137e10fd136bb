"""Hostile DLPack producers: whatever they claim ends in a view or a clear error, one deleter call each."""

import gc
import sys
from typing import Any

import numpy as np
import pytest
from fake_dlpack import (
    CPU,
    CUDA,
    DELETER,
    IS_COPIED,
    PADDED,
    RAISE,
    READ_ONLY,
    Exchange,
    Lender,
    MutableProducer,
    Producer,
    exchange_capsule,
    make_type,
)

from moqext import _C

from ..work import each

describe = _C.describe_tensor
BIG = 2**62


def refused(error: type[Exception], text: str, lender: Lender, producer: Any = None) -> None:
    """describe() raises `error` saying `text`, and the deleter runs exactly once."""
    before = sys.getrefcount(producer) if producer else 0
    with pytest.raises(error, match=text):
        describe(producer or Producer(lender))
    assert lender.deleted == 1
    if producer:
        assert sys.getrefcount(producer) == before


# --- capsules that are fine


@pytest.mark.parametrize("legacy", [False, True])
def test_a_capsule_is_read_and_freed_once(legacy: bool) -> None:
    lender = Lender((2, 3), legacy)
    seen = describe(Producer(lender))
    assert seen == {
        "dtype": "float32",
        "stored": "float32",
        "shape": (2, 3),
        "strides": (3, 1),
        "device": "cpu",
        "readonly": False,
        "pointer": lender.address,
    }
    assert lender.deleted == 1


@pytest.mark.parametrize("legacy", [False, True])
def test_byte_offset_is_added(legacy: bool) -> None:
    lender = Lender((2, 3), legacy, byte_offset=64)
    assert describe(Producer(lender))["pointer"] == lender.address + 64


@pytest.mark.parametrize("legacy", [False, True])
def test_null_strides_are_row_major(legacy: bool) -> None:
    assert describe(Producer(Lender((2, 3, 4), legacy, strides=None)))["strides"] == (12, 4, 1)


@pytest.mark.parametrize("strides", [(-3, 1), (0, 0), (1, 2), (0, -1)])
def test_strides_of_any_sign(strides: tuple[int, ...]) -> None:
    lender = Lender((2, 3), strides=strides)
    assert describe(Producer(lender))["strides"] == strides


def test_scalars_may_have_neither_shape_nor_strides() -> None:
    seen = describe(Producer(Lender(None, strides=None, ndim=0)))
    assert (seen["shape"], seen["strides"]) == ((), ())


def test_read_only_is_kept() -> None:
    assert describe(Producer(Lender(flags=READ_ONLY)))["readonly"] is True


def test_a_newer_minor_version_is_fine() -> None:
    assert describe(Producer(Lender(version=(1, 99))))["dtype"] == "float32"


@pytest.mark.parametrize("data", [0, 3])
def test_empty_tensors_need_no_memory(data: int) -> None:
    lender = Lender((4, 0), data=data)
    assert describe(Producer(lender))["shape"] == (4, 0)
    assert lender.deleted == 1


def test_a_null_deleter_is_fine() -> None:
    lender = Lender()
    lender.managed.versioned.deleter = DELETER()
    assert describe(Producer(lender))["dtype"] == "float32"


@each(
    "dtype, name",
    [
        ((6, 8, 1), "bool"),
        ((1, 8, 1), "uint8"),
        ((0, 8, 1), "int8"),
        ((1, 16, 1), "uint16"),
        ((0, 16, 1), "int16"),
        ((0, 32, 1), "int32"),
        ((0, 64, 1), "int64"),
        ((2, 16, 1), "float16"),
        ((4, 16, 1), "bfloat16"),
        ((2, 32, 1), "float32"),
        ((2, 64, 1), "float64"),
        ((10, 8, 1), "float8_e4m3fn"),
        ((12, 8, 1), "float8_e5m2"),
        ((14, 8, 1), "float8_e8m0fnu"),
        ((17, 4, 2), "float4_e2m1fn_x2"),
    ],
)
def test_every_dtype_by_its_code(dtype: tuple[int, int, int], name: str) -> None:
    assert describe(Producer(Lender(dtype=dtype)))["dtype"] == name


@pytest.mark.parametrize(
    "device, name", [((1, 7), "cpu"), ((3, 0), "cpu"), ((13, 2), "cpu"), ((2, 5), "cuda:5")]
)
def test_devices(device: tuple[int, int], name: str) -> None:
    assert describe(Producer(Lender(device=device), device))["device"] == name


# --- lies of every field


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "lies, error, text",
    [
        ({"dtype": (2, 32, 2)}, TypeError, r"float \(code 2, 32 bits, 2 lanes\)"),
        ({"dtype": (2, 32, 0)}, TypeError, "0 lanes"),
        ({"dtype": (1, 32, 1)}, TypeError, r"uint \(code 1, 32 bits"),
        ({"dtype": (2, 7, 1)}, TypeError, "7 bits"),
        ({"dtype": (5, 64, 1)}, TypeError, "complex"),
        ({"dtype": (3, 64, 1)}, TypeError, "opaque handle"),
        ({"dtype": (11, 8, 1)}, TypeError, "float8_e4m3fnuz"),
        ({"dtype": (18, 8, 1)}, TypeError, r"unknown \(code 18"),
        ({"dtype": (255, 255, 65535)}, TypeError, r"unknown \(code 255, 255 bits, 65535 lanes\)"),
        ({"dtype": (17, 4, 1)}, TypeError, "one value per element"),
        ({"dtype": (17, 8, 1)}, TypeError, r"float4_e2m1fn \(code 17, 8 bits"),
        ({"device": (10, 0)}, BufferError, r"ROCm \(type 10, index 0\)"),
        ({"device": (8, 0)}, BufferError, "Metal"),
        ({"device": (5, 0)}, BufferError, r"unknown \(type 5"),
        ({"device": (0, 0)}, BufferError, r"unknown \(type 0"),
        ({"device": (-1, 0)}, BufferError, r"unknown \(type -1"),
        ({"device": (2**31 - 1, 0)}, BufferError, "unknown"),
        ({"device": (2, -1)}, BufferError, r"CUDA \(type 2, index -1\)"),
        ({"ndim": 9}, BufferError, "9 dimensions, expected 0 to 8"),
        ({"ndim": 2**31 - 1}, BufferError, "2147483647 dimensions"),
        ({"ndim": -1}, BufferError, "-1 dimensions"),
        ({"shape": None, "ndim": 2, "strides": None}, BufferError, "2 dimensions, but no shape"),
        ({"shape": (2, -3)}, BufferError, r"extent 1 of the shape is negative \(-3\)"),
        ({"shape": (0, -(2**63))}, BufferError, "extent 1 of the shape is negative"),
        ({"shape": (BIG, 4)}, BufferError, "product of the shape overflows"),
        ({"shape": (BIG, BIG, BIG, BIG)}, BufferError, "product of the shape overflows"),
        ({"shape": (2**32, 2**31)}, BufferError, "product of the shape overflows"),
        ({"shape": (2, 3), "strides": (BIG, 1)}, BufferError, "leave the address space"),
        ({"shape": (2, 3), "strides": (-(2**63), 1)}, BufferError, "leave the address space"),
        ({"shape": (3, 3), "strides": (-(2**61), 1)}, BufferError, "leave the address space"),
        (
            {"shape": (2, 2, 2, 2), "strides": (2**60, 2**60, 2**60, 1)},
            BufferError,
            "leave the address space",
        ),
        ({"shape": (2, 3), "strides": (-(2**59), 1)}, BufferError, "leave the address space"),
        ({"data": 0}, BufferError, "no memory behind 6 elements"),
        ({"data": 0, "byte_offset": 4096}, BufferError, "no memory behind 6 elements"),
        ({"data": 2**64 - 4}, BufferError, "leave the address space"),
        ({"byte_offset": 2**64 - 1}, BufferError, "byte_offset .* leaves the address space"),
        ({"byte_offset": 2}, BufferError, "is not a multiple of the 4 bytes of float32"),
    ],
    ids=repr,
)
def test_lies_are_refused_by_name(
    legacy: bool, lies: dict[str, Any], error: type[Exception], text: str
) -> None:
    lender = Lender(**{"shape": (2, 3), "legacy": legacy, **lies})
    device = lies.get("device", (CPU, 0))
    producer = Producer(lender, (CPU, 0) if device[0] not in (CPU, CUDA) or device[1] < 0 else device)
    refused(error, f"^x: .*{text}", lender, producer)


@pytest.mark.parametrize("version", [(0, 8), (2, 0), (2**32 - 1, 0)])
def test_another_major_version_is_not_looked_into(version: tuple[int, int]) -> None:
    lender = Lender(version=version, dtype=(99, 99, 99), shape=None, ndim=5)
    refused(BufferError, rf"^x: DLPack version {version[0]}\.{version[1]}", lender)


@pytest.mark.parametrize("lanes", [1, 2])
def test_padded_fp4_is_not_packed(lanes: int) -> None:
    refused(TypeError, "^x: float4_e2m1fn", Lender(dtype=(17, 4, lanes), flags=PADDED))


@pytest.mark.parametrize("seed", range(4))
def test_random_structs_never_crash(seed: int, rng: np.random.Generator) -> None:
    for _ in range(500):
        ndim = int(rng.integers(-1, 10))
        lender = Lender(
            shape=tuple(
                int(n) for n in rng.choice([-1, 0, 1, 2, 3, 2**31, BIG, 2**63 - 1], size=max(ndim, 1))
            ),
            legacy=bool(rng.integers(2)),
            strides=tuple(int(n) for n in rng.choice([-BIG, -3, -1, 0, 1, 7, 2**40, BIG], size=max(ndim, 1))),
            ndim=ndim,
            dtype=tuple(int(n) for n in rng.integers(0, [20, 70, 4])) if rng.integers(2) else (2, 32, 1),
            device=(int(rng.choice([-1, 0, 1, 1, 1, 2, 3, 13, 99])), int(rng.integers(-1, 3))),
            byte_offset=int(rng.choice([0, 0, 4, 1, 2**40, 2**63])),
        )
        try:
            seen = describe(Producer(lender, (int(rng.choice([1, 1, 1, 2])), 0)))
        except (BufferError, TypeError):
            pass
        else:
            assert all(extent >= 0 for extent in seen["shape"])
            assert (
                0 in seen["shape"]
                or seen["pointer"] % 2 == 0
                or "8" in seen["dtype"]
                or seen["dtype"] == "bool"
            )
        assert lender.deleted == 1
    Lender.alive.clear()


# --- capsules


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "name, text",
    [
        (b"used_dltensor", "already consumed"),
        (b"used_dltensor_versioned", "already consumed"),
        (b"dltensor_version", 'named "dltensor_version", expected'),
        (b"", 'named "", expected'),
    ],
)
def test_capsule_names(legacy: bool, name: bytes, text: str) -> None:
    lender = Lender(legacy=legacy)
    with pytest.raises(BufferError, match=rf"^x: __dlpack__\(\) returned a capsule .*{text}"):
        describe(Producer(lender, name=name))
    assert lender.deleted == 0  # whoever renamed it owns the tensor


def test_a_capsule_consumed_between_calls() -> None:
    lender = Lender(legacy=True)
    capsule = lender.capsule()

    class Same(Producer):
        def __dlpack__(self, **keywords: Any) -> Any:
            return capsule

    producer = Same(lender)
    assert describe(producer)["shape"] == describe(producer)["shape"] == (2, 3)
    taken = np.from_dlpack(producer)
    with pytest.raises(BufferError, match="already consumed"):
        describe(producer)
    assert lender.deleted == 0
    del taken
    gc.collect()
    assert lender.deleted == 1


@pytest.mark.parametrize("result", [None, 3, "dltensor", object()])
def test_dlpack_that_returns_no_capsule(result: Any) -> None:
    class Odd:
        def __dlpack__(self, **keywords: Any) -> Any:
            return result

    with pytest.raises(TypeError, match=r"^x: __dlpack__\(\) returned <class .*expected a capsule"):
        describe(Odd())


# --- the ladder


def test_cpu_producers_are_asked_without_a_stream() -> None:
    producer = Producer(Lender())
    describe(producer)
    assert producer.calls == [{"max_version": (1, 3)}]


def test_cuda_producers_are_told_not_to_synchronise() -> None:
    producer = MutableProducer(Lender(device=(CUDA, 1)), (CUDA, 1))
    assert describe(producer)["device"] == "cuda:1"
    assert producer.calls == [{"stream": -1, "max_version": (1, 3)}]


def test_cuda_arrays_that_are_values_are_waited_for() -> None:
    producer = Producer(Lender(device=(CUDA, 1)), (CUDA, 1))
    assert describe(producer)["device"] == "cuda:1"
    assert producer.calls == [{"max_version": (1, 3)}]


@pytest.mark.parametrize("known, asked", [({"max_version"}, 3), ({"stream"}, 2), (set(), 3)])
def test_older_producers_are_asked_with_fewer_keywords(known: set[str], asked: int) -> None:
    class Old(MutableProducer):
        def __dlpack__(self, **keywords: Any) -> Any:
            self.calls.append(keywords)
            if set(keywords) - known:
                raise TypeError("unexpected keyword")
            return self.lender.capsule()

    producer = Old(Lender(device=(CUDA, 0)), (CUDA, 0))
    assert describe(producer)["device"] == "cuda:0"
    ladder: list[dict[str, Any]] = [{"stream": -1, "max_version": (1, 3)}, {"stream": -1}, {}]
    assert producer.calls == ladder[:asked]
    producer = Old(Lender(), (CPU, 0))
    describe(producer)
    assert producer.calls == [{"max_version": (1, 3)}, {}][: 1 if "max_version" in known else 2]


@pytest.mark.parametrize("error", [ValueError, BufferError, RuntimeError, KeyboardInterrupt, MemoryError])
def test_exceptions_of_dlpack_pass_through_with_the_argument_named(error: type[BaseException]) -> None:
    class Broken(Producer):
        def __dlpack__(self, **keywords: Any) -> Any:
            self.calls.append(keywords)
            raise error("no")

    producer = Broken(Lender())
    with pytest.raises(error, match=r"^no\n") as caught:
        describe(producer)
    assert caught.value.__notes__ == ["while taking the argument x"]
    assert len(producer.calls) == 1


def test_a_type_error_on_every_rung_is_the_answer() -> None:
    class Broken(Producer):
        def __dlpack__(self, **keywords: Any) -> Any:
            self.calls.append(keywords)
            raise TypeError(f"with {sorted(keywords)}")

    producer = Broken(Lender())
    with pytest.raises(TypeError, match=r"^with \[\]\n"):
        describe(producer)
    assert len(producer.calls) == 2


@each("device", [None, 1, (1,), (1, 0, 0), [1, 0], ("cpu", 0), (1, 2**40), (2**40, 0), (-1, 0)])
def test_odd_device_answers(device: Any) -> None:
    producer = Producer(Lender(), device)
    with pytest.raises(BufferError, match=r"^x: __dlpack_device__\(\) returned .*expected"):
        describe(producer)
    assert producer.calls == []


def test_unsupported_devices_are_never_asked_for_memory() -> None:
    producer = Producer(Lender(), (10, 0))
    with pytest.raises(BufferError, match=r"^x: DLPack device ROCm"):
        describe(producer)
    assert producer.calls == []


@pytest.mark.parametrize(
    "said, given", [((CPU, 0), (CUDA, 0)), ((CUDA, 0), (CPU, 0)), ((CUDA, 0), (CUDA, 1))]
)
def test_devices_that_disagree(said: tuple[int, int], given: tuple[int, int]) -> None:
    lender = Lender(device=given)
    refused(BufferError, "^x: .*disagree about the device", lender, Producer(lender, said))


def test_exceptions_of_the_device_method() -> None:
    class Broken(Producer):
        def __dlpack_device__(self) -> Any:
            raise KeyError("device")

    with pytest.raises(KeyError) as caught:
        describe(Broken(Lender()))
    assert caught.value.__notes__ == ["while taking the argument x"]


def test_a_producer_without_device_method_is_on_the_cpu() -> None:
    lender = Lender()
    kind = type("Bare", (), {"__dlpack__": lambda self, **keywords: lender.capsule()})
    assert describe(kind())["device"] == "cpu"
    assert lender.deleted == 1


def test_dlpack_on_the_instance_alone_does_not_count() -> None:
    class Empty:
        pass

    thing = Empty()
    thing.__dlpack__ = lambda **keywords: Lender().capsule()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"^x: expected a tensor"):
        describe(thing)


# --- outputs


X = np.zeros((2, 3), np.float32)


def test_a_versioned_capsule_can_be_an_output() -> None:
    lender = Lender()
    assert describe(X, out=Producer(lender))["pointer"] == lender.address
    assert lender.deleted == 1


def test_a_legacy_capsule_only_from_a_type_that_works_in_place() -> None:
    lender = Lender(legacy=True)
    assert describe(X, out=MutableProducer(lender))["pointer"] == lender.address
    with pytest.raises(BufferError, match=r"^out: not usable as an output, .*immutable"):
        describe(X, out=Producer(lender))
    assert lender.deleted == 2


def test_array_libraries_without_in_place_arithmetic_are_immutable() -> None:
    class Value(Producer):
        def __array_namespace__(self, api_version: Any = None) -> Any:
            return np

    with pytest.raises(BufferError, match="immutable"):
        describe(X, out=Value(Lender()))


@pytest.mark.parametrize(
    "lies, text",
    [
        ({"flags": READ_ONLY}, "not usable as an output, read-only memory"),
        ({"flags": IS_COPIED}, "not usable as an output, its producer exports a copy"),
        ({"strides": (0, 1)}, "not usable as an output, its elements share memory"),
        ({"strides": (2, 1)}, "not usable as an output, its elements share memory"),
        ({"strides": (1, 0)}, "not usable as an output, its elements share memory"),
    ],
)
def test_outputs_that_are_refused(lies: dict[str, Any], text: str) -> None:
    lender = Lender(**lies)
    assert describe(MutableProducer(lender))["shape"] == (2, 3)  # an input may be any of these
    with pytest.raises(BufferError, match=f"^out: {text}"):
        describe(X, out=MutableProducer(lender))
    assert lender.deleted == 2


def test_overlap_of_foreign_memory() -> None:
    lender = Lender()
    with pytest.raises(BufferError, match=r"^out: shares memory with x"):
        describe(Producer(lender), out=MutableProducer(lender))
    assert lender.deleted == 2
    other = Lender(device=(CUDA, 0), data=lender.address)  # equal number, other memory
    assert describe(Producer(lender), out=MutableProducer(other, (CUDA, 0)))["device"] == "cuda:0"


def test_results_for_a_producer_that_cannot_import() -> None:
    with pytest.raises(
        TypeError, match=r"^out: cannot make a tensor of x's kind .*pass out= instead"
    ) as caught:
        _C.empty_like(Producer(Lender()), (2,), "float32")
    assert "Producer" in str(caught.value)


class Library:
    """An array library that can only import: what it imported is kept in `taken`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.taken: list[np.ndarray] = []
        self.error = error

    def from_dlpack(self, source: Any) -> Any:
        if self.error:
            raise self.error
        self.taken.append(np.from_dlpack(source))
        return ("imported", self.taken[-1])


@pytest.mark.parametrize("error", [None, RuntimeError("no room")])
def test_results_are_adopted_by_the_library_of_x(error: Exception | None) -> None:
    library = Library(error)

    class Array(Producer):
        def __array_namespace__(self, api_version: Any = None) -> Any:
            return library

    if error:
        with pytest.raises(RuntimeError, match="no room"):
            _C.empty_like(Array(Lender()), (2, 5), "float32")
        return
    name, array = _C.empty_like(Array(Lender()), (2, 5), "float32")
    gc.collect()
    assert name == "imported"
    assert array.shape == (2, 5)
    assert array.ctypes.data % 256 == 0
    assert not array.any()


def test_without_a_namespace_the_package_of_the_type_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    kind = type("Tensor", (Producer,), {"__module__": "oldlib.core.tensor"})
    with pytest.raises(TypeError, match=r"^out: cannot make a tensor of x's kind"):
        _C.empty_like(kind(Lender()), (2, 5), "float32")
    monkeypatch.setitem(sys.modules, "oldlib", library)
    name, array = _C.empty_like(kind(Lender()), (2, 5), "float32")
    assert name == "imported"
    assert array.shape == (2, 5)


@pytest.mark.parametrize("error", [ValueError, AttributeError])
def test_exceptions_of_the_namespace(error: type[Exception]) -> None:
    class Array(Producer):
        def __array_namespace__(self, api_version: Any = None) -> Any:
            raise error("namespace")

    expected = TypeError if error is AttributeError else error
    with pytest.raises(expected):
        _C.empty_like(Array(Lender()), (2, 5), "float32")


@pytest.mark.parametrize(
    "keywords, name",
    [
        ({}, '"dltensor"'),
        ({"stream": None, "max_version": None, "dl_device": None, "copy": None}, '"dltensor"'),
        ({"max_version": (0, 8)}, '"dltensor"'),
        ({"max_version": (1, 0), "copy": False}, '"dltensor_versioned"'),
        ({"max_version": (2, 1), "dl_device": (1, 0)}, '"dltensor_versioned"'),
    ],
)
def test_the_lent_result_speaks_dlpack(keywords: dict[str, Any], name: str) -> None:
    seen = []

    class Array(Producer):
        def __array_namespace__(self, api_version: Any = None) -> Any:
            return self

        def from_dlpack(self, source: Any) -> Any:
            seen.append(source.__dlpack_device__())
            seen.append(source.__dlpack__(**keywords))
            for wrong in (
                {"copy": True},
                {"dl_device": (2, 0)},
                {"dl_device": 3},
                {"max_version": "1"},
                {"odd": 1},
            ):
                with pytest.raises((BufferError, TypeError)):
                    source.__dlpack__(**wrong)
            return describe(source)

    made = _C.empty_like(Array(Lender()), (2, 5), "e4m3")
    assert (made["dtype"], made["shape"]) == ("float8_e4m3fn", (2, 5))
    assert seen[0] == (1, 0)
    assert name in repr(seen[1])


# --- the exchange API


def test_the_borrowed_view_is_preferred_for_inputs() -> None:
    exchange = Exchange(Lender((2, 3)))
    assert describe(make_type(exchange)())["shape"] == (2, 3)
    assert exchange.calls == ["borrow"]
    assert exchange.lender.deleted == 0


def test_the_owning_view_serves_without_the_borrowed_one() -> None:
    exchange = Exchange(Lender((2, 3), flags=READ_ONLY), borrow=False)
    assert describe(make_type(exchange)())["readonly"] is True
    assert exchange.calls == ["from_object"]
    assert exchange.lender.deleted == 1


@pytest.mark.parametrize(
    "lies, text",
    [
        ({}, None),
        ({"flags": READ_ONLY}, "read-only memory"),
        ({"flags": IS_COPIED}, "exports a copy"),
        ({"version": (2, 0)}, "DLPack version 2.0"),
        ({"data": 0}, "no memory"),
    ],
)
def test_outputs_come_in_the_owning_form_and_are_freed_once(lies: dict[str, Any], text: str | None) -> None:
    exchange = Exchange(Lender((2, 3), **lies))
    tensor = make_type(exchange, __iadd__=lambda self, other: self)()
    if text is None:
        describe(X, out=tensor)
    else:
        with pytest.raises(BufferError, match=f"^out: .*{text}"):
            describe(X, out=tensor)
    assert exchange.calls == ["from_object"]
    assert exchange.lender.deleted == 1


@pytest.mark.parametrize("borrow", [True, False])
def test_lies_through_the_exchange_api(borrow: bool) -> None:
    for lies, error in [
        ({"dtype": (2, 32, 4)}, TypeError),
        ({"device": (10, 0)}, BufferError),
        ({"ndim": 77}, BufferError),
        ({"byte_offset": 3}, BufferError),
        ({"shape": (BIG, BIG)}, BufferError),
    ]:
        exchange = Exchange(Lender(**lies), borrow=borrow)
        with pytest.raises(error, match=r"^x: "):
            describe(make_type(exchange)())
        assert exchange.lender.deleted == (0 if borrow else 1)


class Truthless:
    def __bool__(self) -> bool:
        raise KeyError("truth")


@pytest.mark.parametrize("borrow", [True, False])
def test_exceptions_of_the_exchange_functions_pass_through(borrow: bool) -> None:
    exchange = Exchange(Lender(), borrow=borrow)
    if borrow:
        exchange.api.borrow = RAISE
    else:
        exchange.api.from_object = RAISE
    kind = make_type(exchange, __bool__=Truthless.__bool__)
    with pytest.raises(KeyError, match="truth") as caught:
        describe(kind())
    assert caught.value.__notes__ == ["while taking the argument x"]


@pytest.mark.parametrize("borrow", [True, False])
@pytest.mark.parametrize("status", [-1, 1, 0])
def test_exchange_functions_that_fail_without_saying_why(borrow: bool, status: int) -> None:
    class Failing(Exchange):
        def borrow(self, _object: int, out: Any) -> int:
            return status

        def from_object(self, _object: int, out: Any) -> int:
            return status

    tensor = make_type(Failing(Lender(), borrow=borrow))()
    error = TypeError if borrow and status == 0 else BufferError  # nothing filled in: no dtype
    with pytest.raises(error, match=r"^x: .*(without saying why|0 bits)"):
        describe(tensor)


def test_the_table_is_looked_up_once_per_type() -> None:
    looked = []

    class Meta(type):
        @property
        def __dlpack_c_exchange_api__(cls) -> Any:  # type: ignore[no-untyped-def]
            looked.append(cls)
            return exchange_capsule(exchange.api)

    exchange = Exchange(Lender())
    kind = Meta("Counted", (), {})
    for _ in range(5):
        describe(kind())
    assert looked == [kind]


def test_an_exception_while_a_type_is_looked_at() -> None:
    class Meta(type):
        @property
        def __dlpack_c_exchange_api__(cls) -> Any:  # type: ignore[no-untyped-def]
            raise ZeroDivisionError("look")

    with pytest.raises(ZeroDivisionError, match="look"):
        describe(Meta("Broken", (), {})())


def test_older_tables_are_walked_to() -> None:
    old = Exchange(Lender((7,)))
    new = Exchange(Lender((5,)))
    new.api.version.major = 2
    new.api.prev.contents = old.api
    assert describe(make_type(new)())["shape"] == (7,)
    assert new.calls == []


def test_a_chain_without_end_is_no_table() -> None:
    exchange = Exchange(Lender())
    exchange.api.version.major = 9
    exchange.api.prev.contents = exchange.api
    with pytest.raises(TypeError, match=r"^x: expected a tensor"):
        describe(make_type(exchange)())


@pytest.mark.parametrize("what", ["name", "major", "null", "text"])
def test_an_unusable_table_leaves_dlpack(what: str) -> None:
    exchange = Exchange(Lender())
    capsule: Any = exchange_capsule(
        exchange.api, b"dlpack_exchange" if what == "name" else b"dlpack_exchange_api"
    )
    if what == "major":
        exchange.api.version.major = 2
    elif what == "null":
        exchange.api.from_object = None
    elif what == "text":
        capsule = "dlpack_exchange_api"
    lender = Lender((4,))
    body = {"__dlpack_c_exchange_api__": capsule, "__dlpack__": lambda self, **keywords: lender.capsule()}
    assert describe(type("Both", (), body)())["shape"] == (4,)
    with pytest.raises(TypeError, match=r"^x: expected a tensor"):
        describe(type("Neither", (), {"__dlpack_c_exchange_api__": capsule})())
    assert exchange.calls == []


# --- allocation through the exchange API


def test_results_come_from_the_frameworks_allocator() -> None:
    exchange = Exchange(Lender())
    made = _C.empty_like(make_type(exchange)(), (3, 4), "bf16")
    assert type(made).__name__ == "ExchangeTensor"
    (allocated,) = exchange.allocated
    assert made.lender is allocated
    assert exchange.calls == ["borrow", "allocate", "to_object"]
    assert allocated.deleted == 0  # the tensor owns it now


@pytest.mark.parametrize(
    "kind, error",
    [
        (b"MemoryError", MemoryError),
        (b"ValueError", ValueError),
        (b"TypeError", TypeError),
        (b"NonsenseError", RuntimeError),
        (None, RuntimeError),
    ],
)
def test_allocators_that_fail(kind: bytes | None, error: type[Exception]) -> None:
    exchange = Exchange(Lender())
    exchange.error = (kind, b"no " + b"room " * 1000)  # type: ignore[assignment]
    with pytest.raises(error, match=r"^out: the allocator of x's framework failed: no room"):
        _C.empty_like(make_type(exchange)(), (3, 4), "bf16")


@each(
    "lies",
    [
        {"shape": (3, 5)},
        {"shape": (3,)},
        {"dtype": (2, 32, 1)},
        {"dtype": (2, 33, 1)},
        {"device": (CUDA, 0)},
        {"device": (10, 0)},
        {"data": 0},
        {"strides": (1, 3)},
        {"flags": READ_ONLY},
        {"version": (2, 0)},
    ],
)
def test_allocators_that_make_something_else(lies: dict[str, Any]) -> None:
    exchange = Exchange(Lender())
    exchange.lies = lies
    with pytest.raises((BufferError, TypeError), match=r"^out: "):
        _C.empty_like(make_type(exchange)(), (3, 4), "bf16")
    assert exchange.calls == ["borrow", "allocate"]
    assert [lender.deleted for lender in exchange.allocated] == [1]


def test_a_framework_that_does_not_take_its_own_tensor() -> None:
    class Refusing(Exchange):
        def to_object(self, managed: int, out: Any) -> int:
            return -1

    exchange = Refusing(Lender())
    with pytest.raises(BufferError, match=r"^out: x's framework did not take its own tensor"):
        _C.empty_like(make_type(exchange)(), (3, 4), "bf16")


@pytest.mark.parametrize("missing", ["allocate", "to_object"])
def test_a_framework_without_allocator(missing: str) -> None:
    exchange = Exchange(Lender())
    setattr(exchange.api, missing, None)
    with pytest.raises(TypeError, match=r"^out: .*pass out= instead"):
        _C.empty_like(make_type(exchange)(), (3, 4), "bf16")


# --- many types


def test_types_without_end_are_forgotten() -> None:
    import weakref

    lender = Lender()
    alive = []
    for i in range(500):
        kind = type(f"Kind{i}", (Producer,), {})
        alive.append(weakref.ref(kind))
        assert describe(kind(lender))["shape"] == (2, 3)
    assert lender.deleted == 500
    del kind
    gc.collect()
    assert sum(reference() is not None for reference in alive) <= 64

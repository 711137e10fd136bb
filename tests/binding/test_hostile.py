"""Hostile arguments to every operation: a clear error, nothing written, nothing leaked.

Operations and their tensors are a table (operations.py), kinds of wrong tensors another (CHECKS).
Every kind goes through each function that takes a tensor (TAKERS).
Kinds that an operation judges itself go through all its slots.
"""

import gc
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_dlpack import BORROW, CUDA, FROM_OBJECT, IS_COPIED, RAISE, READ_ONLY, Lender, address_of
from operations import LAYERS, OPERATIONS, Foreign, Operation, Slot, exchange_object, layer, lend

from moqext import _C, LinearMethod, ops

from ..work import each

BIG = 2**62
CLEAR = (TypeError, ValueError, BufferError)
each_operation = pytest.mark.parametrize("name", OPERATIONS)


@pytest.fixture(autouse=True)
def _forget_lenders() -> Iterator[None]:
    yield
    Lender.alive.clear()


def others(operation: Operation, slot: Slot) -> dict[Slot, Foreign]:
    """Honest foreign tensors in all places but one, so that what an error leaves behind is seen."""
    return {place: Foreign(lend(operation.get(place))) for place in operation.slots() if place != slot}


def names_an_argument(operation: Operation, error: BaseException) -> bool:
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    names = {key for place in operation.slots() for key in place}
    names |= {"in_features", "partitions", "on cuda:0"}  # what a wrong shape or device of x is held against
    return re.search("|".join(rf"\b{name}\b" for name in names), text) is not None


def refused(
    operation: Operation, slot: Slot, tensor: Any, what: Any, kinds: type | tuple[type, ...] = CLEAR
) -> BaseException:
    """The call with `tensor` in its slot raises a clear error, and leaves outputs and other tensors alone."""
    honest = others(operation, slot)
    before = operation.results()
    with pytest.raises(kinds) as caught:
        operation.run(honest | {slot: tensor})
    assert names_an_argument(operation, caught.value), f"{what}: {caught.value}"
    assert operation.results() == before, what
    unbalanced = [place for place, producer in honest.items() if not producer.balanced()]
    assert not unbalanced, what
    error = caught.value.with_traceback(None)  # which would keep the tensors
    del caught
    return error


# --- foreign tensors that are right


def given_as(form: str, array: np.ndarray) -> tuple[Any, Any]:
    """An array as a foreign tensor, and what counts its capsules."""
    lender = lend(array, form == "legacy")
    if form in ("versioned", "legacy"):
        foreign = Foreign(lender)
        return foreign, foreign
    return exchange_object(lender, borrow=form == "borrowed")


@each_operation
def test_foreign_tensors_give_what_numpy_gives(name: str, rng: np.random.Generator) -> None:
    operation = OPERATIONS[name](rng)
    before = operation.results()
    operation.run()
    expected = operation.results()
    assert all(
        bytes_before != bytes_after for bytes_before, bytes_after in zip(before, expected, strict=True)
    )
    for form in ("versioned", "legacy", "borrowed", "owned"):
        for slot in operation.slots():
            if operation.is_output(slot):
                operation.get(slot).fill(0)
        given = {slot: given_as(form, operation.get(slot)) for slot in operation.slots()}
        result = operation.run({slot: tensor for slot, (tensor, _) in given.items()})
        del result
        assert operation.results() == expected, form
        assert all(counter.balanced() for _, counter in given.values()), form


@each_operation
def test_numpy_subclasses_are_arrays(name: str, rng: np.random.Generator) -> None:
    class Sub(np.ndarray):
        pass

    operation = OPERATIONS[name](rng)
    operation.run()
    expected = operation.results()
    for slot in operation.slots():
        operation.run({slot: operation.get(slot).view(Sub)})
        assert operation.results() == expected, slot


# --- fields that lie


def lies_about(array: np.ndarray, output: bool) -> Iterator[dict[str, Any]]:
    """Fields of the DLTensor or of its owner that no such array has."""
    ndim = max(1, array.ndim)
    yield {"dtype": (2, 32, 2)}
    yield {"dtype": (1, 8, 0)}
    yield {"dtype": (5, 64, 1)}
    yield {"dtype": (99, 8, 1)}
    yield {"dtype": (255, 255, 65535)}
    yield {"dtype": (6, 8, 1)}  # bool: read by no operation
    yield {"device": (10, 0)}
    yield {"device": (99, -1)}
    yield {"device": (CUDA, -1)}
    yield {"device": (CUDA, 0)}  # a host pointer that is said to be a device's
    yield {"ndim": -1}
    yield {"ndim": 9}
    yield {"ndim": 2**31 - 1}
    yield {"shape": None, "strides": None, "ndim": ndim}
    yield {"shape": (-1,) * ndim}
    yield {"shape": (BIG, 4)}
    yield {"shape": (2**32, 2**31), "strides": (0, 0)}
    yield {"shape": (3, 1, 5, 7, 11), "strides": None}  # more than there is
    yield {"data": 0}
    yield {"byte_offset": 2**64 - 1}
    if array.itemsize > 1:
        yield {"byte_offset": 1}
    if max(array.shape, default=0) > 1:
        yield {"strides": (BIG,) * array.ndim}
        yield {"strides": (-(2**63),) * array.ndim}
    if output:
        yield {"flags": READ_ONLY}
        yield {"flags": IS_COPIED}
        if max(array.shape, default=0) > 1:
            yield {"strides": (0,) * array.ndim}
    yield {"version": (2, 0)}
    yield {"version": (0, 8)}


OF_VERSIONED = {"flags", "version"}


def check_lie(operation: Operation, slot: Slot, lies: dict[str, Any], legacy: bool = False) -> None:
    device = (CUDA, 0) if lies.get("device") == (CUDA, 0) else (1, 0)
    producer = Foreign(lend(operation.get(slot), legacy, **lies), device)
    refused(operation, slot, producer, lies)
    assert producer.balanced(), lies


def check_lies(operation: Operation, slot: Slot, legacy: bool) -> None:
    array = operation.get(slot)
    for lies in lies_about(array, operation.is_output(slot)):
        if legacy and set(lies) & OF_VERSIONED:
            continue
        check_lie(operation, slot, lies, legacy)


def check_lies_through_the_exchange_api(operation: Operation, slot: Slot, borrow: bool) -> None:
    array = operation.get(slot)
    for lies in lies_about(array, operation.is_output(slot)):
        if borrow and not operation.is_output(slot) and set(lies) & OF_VERSIONED:
            continue
        tensor, counter = exchange_object(lend(array, **lies), borrow=borrow)
        refused(operation, slot, tensor, lies)
        assert counter.balanced(), lies


READ_FIRST = ("w13_input_scale", "w2_input_scale")
"""Arguments that are copied before an output is opened."""


@each_operation
def test_outputs_that_are_read(name: str, rng: np.random.Generator) -> None:
    operation = OPERATIONS[name](rng)
    for slot in filter(operation.is_output, operation.slots()):
        check_output_over_inputs(operation, slot)


def check_output_over_inputs(operation: Operation, slot: Slot) -> None:
    out = operation.get(slot)
    for place in operation.slots():
        array = operation.get(place)
        if operation.is_output(place) or array.nbytes < out.itemsize or place[-1] in READ_FIRST:
            continue
        # The last element of an input lies in the first of the output. What follows it belongs to nobody, and
        # an operation that wrote would be caught by the sanitizer.
        start = array.__array_interface__["data"][0]
        address = (start + array.nbytes - 1) // out.itemsize * out.itemsize
        error = refused(operation, slot, Foreign(lend(out, data=address)), place, BufferError)
        assert re.search("shares memory|memory overlaps", str(error))


# --- producers that fail


class Text(str):
    pass


def failing(array: np.ndarray) -> Iterator[tuple[str, Any, type[BaseException] | tuple[type, ...]]]:
    """Producers that fail in the middle: what, the producer, the exception that comes out."""
    for error in (ValueError, BufferError, RuntimeError, MemoryError, KeyboardInterrupt, ZeroDivisionError):

        class Broken(Foreign):
            def __dlpack__(self, error: type[BaseException] = error, **keywords: Any) -> Any:
                raise error("no")

        yield f"raises {error.__name__}", Broken(lend(array)), error
    for answer in (None, 3, "dltensor", b"dltensor"):

        class Odd(Foreign):
            def __dlpack__(self, answer: Any = answer, **keywords: Any) -> Any:
                return answer

        yield f"returns {answer!r}", Odd(lend(array)), TypeError
    for capsule in (
        b"used_dltensor",
        b"used_dltensor_versioned",
        b"",
        b"dltensor\xff",
        b"dlpack_exchange_api",
    ):
        yield f"capsule {capsule!r}", Foreign(lend(array), name=capsule), BufferError
    for device in (None, (1,), ("cpu", 0), (1, 2**40), (10, 0)):
        yield f"device {device!r}", Foreign(lend(array), device), BufferError

    class NoDevice(Foreign):
        def __dlpack_device__(self) -> Any:
            raise KeyError("device")

    yield "device raises", NoDevice(lend(array)), KeyError


def check_producers_that_fail(operation: Operation, slot: Slot) -> None:
    for what, producer, kinds in failing(operation.get(slot)):
        references = sys.getrefcount(producer)
        refused(operation, slot, producer, what, kinds)
        assert sys.getrefcount(producer) == references, what


def check_a_capsule_consumed_before(operation: Operation, slot: Slot) -> None:
    versioned = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # what the first consumer knows
    lender = lend(operation.get(slot), legacy=not versioned)
    capsule = lender.capsule()

    class Same(Foreign):
        def __dlpack__(self, **keywords: Any) -> Any:
            return capsule

    producer = Same(lender)
    taken = np.from_dlpack(producer)
    error = refused(operation, slot, producer, "consumed", BufferError)
    assert "already consumed" in str(error)
    assert lender.deleted == 0  # the first consumer's
    del taken
    assert lender.deleted == 1


def truthless(self: Any) -> bool:
    raise KeyError("truth")


def check_exchange_functions_that_fail(operation: Operation, slot: Slot, borrow: bool) -> None:
    tensor, counter = exchange_object(lend(operation.get(slot)), borrow=borrow, __bool__=truthless)
    used = "borrow" if borrow and not operation.is_output(slot) else "from_object"
    setattr(counter.api, used, RAISE)
    refused(operation, slot, tensor, "raises", KeyError)
    for status in (-1, 0):  # failed without a reason; said to have worked, with nothing filled in
        tensor, counter = exchange_object(lend(operation.get(slot)), borrow=borrow)
        prototype = BORROW if used == "borrow" else FROM_OBJECT
        empty = prototype(lambda _object, _out, status=status: status)
        setattr(counter.api, used, address_of(empty))
        refused(operation, slot, tensor, status)
        assert counter.lender.deleted == 0


# --- NumPy arrays and things that are no tensors


def odd_arrays(array: np.ndarray) -> Iterator[np.ndarray]:
    """Arrays of the same shape that hold something else."""
    for dtype in (">f4", ">u2", object, "V4", "S3", "U3", "M8[s]", np.complex64, np.uint32, [("a", "f4")]):
        yield np.zeros(array.shape, dtype)
    if array.itemsize > 1:
        raw = np.zeros(array.nbytes + 1, np.uint8)
        yield raw[1:].view(array.dtype).reshape(array.shape)
    yield np.zeros((1,) * 9, array.dtype)


def check_odd_numpy_arrays(operation: Operation, slot: Slot) -> None:
    for array in odd_arrays(operation.get(slot)):
        references = sys.getrefcount(array)
        refused(operation, slot, array, array.dtype)
        assert sys.getrefcount(array) == references


def check_empty_arrays(operation: Operation, slot: Slot) -> None:
    """Never what the others fit: with `out` given, an empty argument has to be noticed."""
    array = operation.get(slot)
    shapes = {(0,), (0, 0), (0, *array.shape), (*array.shape[:-1], 0), (0, *array.shape[1:])}
    for shape in shapes - {array.shape}:
        refused(operation, slot, np.empty(shape, array.dtype), shape)


def check_things_that_are_no_tensors(operation: Operation, slot: Slot) -> None:
    for thing in ("x", b"x", [1.0], {}, object(), object, memoryview(b"abcd"), Text("x"), 1j):
        if isinstance(thing, list) and slot[-1].startswith(("weight_scale", "input_scale")):
            continue  # numbers may stand for scales
        refused(
            operation, slot, thing, thing, (TypeError, ValueError) if isinstance(thing, list) else TypeError
        )


# --- every kind through each function that takes a tensor, some kinds through every slot


def check_elsewhere(operation: Operation, slot: Slot) -> None:
    """Memory of a device that the other tensors are not on, and none."""
    for lies in ({"device": (CUDA, 0)}, {"data": 0}):
        check_lie(operation, slot, lies)


Check = Callable[[Operation, Slot], None]
OF_THE_OPERATION: dict[str, Check] = {
    "odd arrays": check_odd_numpy_arrays,
    "empty arrays": check_empty_arrays,
    "elsewhere": check_elsewhere,
}
"""Kinds that an operation judges by what each of its arguments has to be."""
CHECKS: dict[str, Check] = OF_THE_OPERATION | {
    "lies": partial(check_lies, legacy=False),
    "lies in a legacy struct": partial(check_lies, legacy=True),
    "lies, borrowed": partial(check_lies_through_the_exchange_api, borrow=True),
    "lies, owned": partial(check_lies_through_the_exchange_api, borrow=False),
    "producers that fail": check_producers_that_fail,
    "capsules consumed before": check_a_capsule_consumed_before,
    "exchange fails, borrowed": partial(check_exchange_functions_that_fail, borrow=True),
    "exchange fails, owned": partial(check_exchange_functions_that_fail, borrow=False),
    "no tensors": check_things_that_are_no_tensors,
}
TAKERS: dict[str, tuple[str, Slot]] = {
    "input": ("encode", ("x",)),
    "output": ("encode", ("out",)),
    "optional input": ("rms_norm", ("residual",)),
    "second output": ("quantize nvfp4", ("scale_out",)),
    "scale": ("quantize fp8_tensor, scale given", ("scale",)),
    "checkpoint parameter": ("prepare NVFP4", ("params", "weight")),
    "checkpoint scale": ("prepare NVFP4", ("params", "weight_scale_2")),
    "output of a mapping": ("prepare FP8", ("out", "weight")),
    "prepared parameter": ("linear NVFP4", ("params", "weight")),
    "bias": ("linear FP8", ("bias",)),
    "slots of experts": ("experts FP8", ("topk_ids",)),
    "output of a pair": ("route", ("out", "1")),
}
"""One place for each way from an argument to a tensor in csrc/binding."""


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("kind", CHECKS)
def test_every_kind_through_every_taker(kind: str, taker: str, rng: np.random.Generator) -> None:
    name, slot = TAKERS[taker]
    CHECKS[kind](OPERATIONS[name](rng), slot)


@pytest.mark.parametrize("kind", OF_THE_OPERATION)
@each_operation
def test_kinds_that_operations_judge_in_every_slot(name: str, kind: str, rng: np.random.Generator) -> None:
    operation = OPERATIONS[name](rng)
    for slot in operation.slots():
        CHECKS[kind](operation, slot)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in CHECKS if kind not in OF_THE_OPERATION])
def test_every_kind_in_every_slot(kind: str, rng: np.random.Generator) -> None:
    for make in OPERATIONS.values():
        operation = make(rng)
        for slot in operation.slots():
            CHECKS[kind](operation, slot)


# --- arguments that are missing, too many, or of another kind


FUNCTIONS = {name: getattr(ops, name) for name in ops.__all__ if inspect.isfunction(getattr(ops, name))} | {
    "_C." + name: getattr(_C, name) for name in ops.__all__ if hasattr(_C, name)
}
TENSOR = np.zeros((16, 16), np.float32)
ANGLES = np.zeros((1, 4, 8), np.float32)
RIGHT: dict[str, dict[str, Any]] = {
    "encode": {"x": TENSOR, "format": "e4m3"},
    "decode": {"codes": TENSOR.view(np.uint8), "format": "e4m3"},
    "quantize": {"x": TENSOR, "scheme": "fp8_token"},
    "silu_and_mul_quantize": {"x": TENSOR, "scheme": "fp8_token"},
    "rms_norm_quantize": {"x": TENSOR, "weight": TENSOR[0], "eps": 1e-6, "scheme": "fp8_token"},
    "silu_and_mul": {"x": TENSOR},
    "rms_norm": {"x": TENSOR, "weight": TENSOR[0], "eps": 1e-6},
    "rotary_embedding": {"x": TENSOR.reshape(4, 4, 2, 8), "cos": ANGLES, "sin": ANGLES},
    "dequantize": {"weight": TENSOR.view(np.uint8), "quant_algo": "FP8", "weight_scale": np.float32([1])},
    "quantize_weight": {"weight": TENSOR, "quant_algo": "NVFP4"},
    "requantize_to_max": {
        "weight": TENSOR.view(np.uint8),
        "weight_scale": np.float32([1]),
        "partitions": [16],
    },
    "swap_gate_up": {"stack": TENSOR},
    "expert_input_scale": {"input_scale": np.ones((3, 2), np.float32)},
    "shared_input_scale": {"input_scale": np.ones((3, 2), np.float32)},
    "expert_alphas": {"input_scale": np.ones(3, np.float32), "weight_scale_2": np.ones(3, np.float32)},
    "swizzle_block_scales": {"scale": TENSOR.view(np.uint8)},
    "unswizzle_block_scales": {"swizzled": np.zeros((128, 4), np.uint8), "shape": (3, 3)},
    "pack_fp4": {"codes": TENSOR.view(np.uint8)},
    "unpack_fp4": {"packed": TENSOR.view(np.uint8)},
    "pack_nvfp4": {"weight": TENSOR.view(np.uint8)[:, :8], "weight_scale": TENSOR.view(np.uint8)[:, :1]},
    "unpack_nvfp4": {"packed": np.zeros((4, 1, 576), np.uint8), "shape": (3, 32)},
    "route": {"router_logits": TENSOR, "top_k": 2, "scoring": "softmax"},
}


@each("name", [name for name in FUNCTIONS if name.removeprefix("_C.") in RIGHT])
def test_missing_and_surplus_arguments(name: str) -> None:
    function, right = FUNCTIONS[name], RIGHT[name.removeprefix("_C.")]
    function(**right)
    required = ["weight", "quant_algo"] if name.endswith("dequantize") else list(right)
    for key in required:
        rest = {other: value for other, value in right.items() if other != key}
        with pytest.raises(TypeError, match=rf"missing.*'{key}'"):
            function(**rest)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'outt'"):
        function(**right, outt=None)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        function(**right, **{"\ud800": None})
    with pytest.raises(TypeError, match=r"multiple values for argument"):
        function(next(iter(right.values())), **right)
    with pytest.raises(TypeError, match=r"positional argument"):
        function(*([TENSOR] * 12))
    # A name that was made at run time is the same name.
    assert function(**{"".join(key): value for key, value in right.items()}) is not None


def test_the_table_of_functions_is_complete() -> None:
    others = {"linear", "prepare_experts", "to_device", "to_host"}
    on_devices_alone = {"router_logits", "qk_norm_rope"}
    assert set(ops.__all__) - others - on_devices_alone == set(RIGHT)


@each("name", RIGHT)
def test_options_of_another_kind(name: str) -> None:
    function = FUNCTIONS[name]
    optional = {
        "group_size": ("16", 1.5, True, 0, -1, 2**70),
        "dtype": (3, "int9"),
        "format": (3, "e9m9"),
        "amax": ("1", -1.0, float("nan"), 1e300, TENSOR),
        "search": (3, b"mse", "msee", ""),
    }
    wrong = {
        "format": (None, 3, b"e4m3", "e9m9", "e4m3\0", "\ud800", TENSOR),
        "scheme": (None, 3, b"nvfp4", "fp9", "", "\ud800"),
        "scoring": (None, 3, b"softmax", "softmin", "", "\ud800", TENSOR),
        "top_k": (None, "2", 1.5, True, 0, -1, 17, 2**70, TENSOR),
        "quant_algo": (None, 3, b"FP8", "FP9", "", "\ud800", "FP8\0"),
        "partitions": (None, 3, "16", [15], [16, 1], [-1, 17], [2**70], [1.5], [None], [16] * 10**5, []),
        "shape": (None, 3, "33", (3,), (3, 3, 3, 3), (-1, 3), (2**70, 3), (1.5, 3), (2**62, 4), [None, 3]),
    }
    for key in RIGHT[name]:
        for value in wrong.get(key, ()):
            with pytest.raises((TypeError, ValueError), match=key):
                function(**RIGHT[name] | {key: value})
    for key in set(inspect.signature(function).parameters) & set(optional) - set(RIGHT[name]):
        for value in optional[key]:
            with pytest.raises((TypeError, ValueError), match=key):
                function(**RIGHT[name] | {key: value})


# --- parameters of another layer


@pytest.mark.parametrize("algo", LAYERS)
def test_parameters_of_another_layer(algo: str, rng: np.random.Generator) -> None:
    operation = OPERATIONS[f"linear {algo}"](rng)
    strangers = [
        LinearMethod(algo, 2 * LAYERS[algo][0], LAYERS[algo][1]),
        LinearMethod(algo, LAYERS[algo][0], [3, 2, 1]),
        *(LinearMethod(other, *LAYERS[other]) for other in LAYERS if other != algo),
    ]
    for stranger in strangers:
        params = {
            key: np.ones(spec.shape, np.float32 if spec.dtype == "float32" else np.uint8)
            for key, spec in stranger.prepared_params.items()
        }
        before = operation.results()
        with pytest.raises((ValueError, TypeError), match=r"params\[|weight|scale"):
            operation.call(operation.arguments | {"params": params})
        assert operation.results() == before
        prepare = OPERATIONS[f"prepare {algo}"](rng)
        before = prepare.results()
        with pytest.raises((ValueError, TypeError), match=r"params|weight|scale|out"):
            prepare.call(prepare.arguments | {"out": params})
        assert prepare.results() == before
        sources = {
            key: np.ones(spec.shape, np.float32 if spec.dtype == "float32" else np.uint8)
            for key, spec in stranger.checkpoint_params.items()
        }
        with pytest.raises((ValueError, TypeError), match=r"params|weight|scale"):
            prepare.call(prepare.arguments | {"params": sources})
        assert prepare.results() == before


@pytest.mark.parametrize("algo", LAYERS)
def test_prepare_into_tensors_that_are_too_small(algo: str, rng: np.random.Generator) -> None:
    """prepare once wrote beyond tensors that are too small."""
    operation = OPERATIONS[f"prepare {algo}"](rng)
    for name, array in operation.arguments["out"].items():
        memory = array.copy()
        small = memory[: len(memory) // 2] if memory.ndim == 2 else memory[:-1]
        arguments = operation.arguments | {"out": operation.arguments["out"] | {name: small}}
        with pytest.raises(ValueError, match=rf'^out\["{name}"\]: expected .* of shape'):
            operation.call(arguments)
        assert np.array_equal(memory, array)


@pytest.mark.parametrize("value", [np.float32([1, 2, 3]), np.float32([0, 1]), np.float32([np.nan, 1])])
def test_an_input_scale_that_is_not_used_has_to_be_right(value: np.ndarray, rng: np.random.Generator) -> None:
    method, params = layer(rng, "NVFP4")
    with pytest.raises(ValueError, match=r"^input_scale: "):
        method.prepare(params | {"input_scale": value})


@pytest.mark.parametrize("thing", [None, 3, "weight", [("weight", TENSOR)], TENSOR, object()])
def test_params_that_are_no_mapping(thing: Any, rng: np.random.Generator) -> None:
    method, params = layer(rng, "NVFP4")
    with pytest.raises(TypeError, match=r"^params: expected a mapping"):
        method.prepare(thing)
    with pytest.raises(TypeError, match=r"^params: expected a mapping"):
        method(np.zeros((1, 32), np.float32), thing)
    if thing is not None:
        with pytest.raises(TypeError, match=r"^out: expected a mapping"):
            method.prepare(params, thing)


class Fresh(Mapping[str, np.ndarray]):
    """Keeps none of the values it gives."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key].copy()


@pytest.mark.parametrize("algo", LAYERS)
def test_mappings_that_make_their_values(algo: str, rng: np.random.Generator) -> None:
    method, params = layer(rng, algo)
    prepared = method.prepare(params)
    again = method.prepare(Fresh(params))
    assert all(np.array_equal(prepared[key], again[key]) for key in prepared)
    x = rng.standard_normal((2, method.in_features)).astype(np.float32)
    np.testing.assert_array_equal(method(x, Fresh(prepared)), method(x, prepared))


@pytest.mark.parametrize("algo", LAYERS)
def test_a_producer_that_empties_the_mapping_it_is_in(algo: str, rng: np.random.Generator) -> None:
    method, params = layer(rng, algo)
    prepared = dict(method.prepare(params))
    x = rng.standard_normal((2, method.in_features)).astype(np.float32)
    expected = method(x, prepared)

    class Emptying(Foreign):
        def __dlpack__(self, **keywords: Any) -> Any:
            prepared.clear()
            gc.collect()
            return super().__dlpack__(**keywords)

    weight = prepared["weight"]
    last = list(method.prepared_params)[-1]
    prepared[last] = Emptying(lend(prepared[last].copy()))
    np.testing.assert_array_equal(method(x, prepared), expected)
    assert prepared == {}
    prepared["weight"] = Emptying(lend(weight))
    with pytest.raises(ValueError, match="missing"):
        method(x, prepared)


# --- other threads


def beside(work: Callable[[], None], rounds: Callable[[], None]) -> None:
    """Runs `work` again and again in another thread while `rounds` runs in this one."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def repeat() -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=repeat)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        rounds()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures, failures


def test_tensors_replaced_by_another_thread(rng: np.random.Generator) -> None:
    """The last reference goes while a call runs: the call keeps its own."""
    method, params = layer(rng, "NVFP4")
    prepared = dict(method.prepare(params))
    x = rng.standard_normal((64, method.in_features)).astype(np.float32)
    expected = method(x, prepared)

    def replace() -> None:
        for key in prepared:
            prepared[key] = prepared[key].copy()

    def call() -> None:
        for _ in range(500):
            assert np.array_equal(method(x, prepared), expected)

    beside(replace, call)


def test_tensors_resized_by_another_thread_between_calls() -> None:
    """Each call sees one whole tensor, the old or the new: its shape and memory belong together."""
    array = np.zeros(64, np.float32)
    lock = threading.Lock()
    sizes = iter(range(10**9))

    def resize() -> None:
        with lock:
            array.resize(1 + next(sizes) * 977 % 5000, refcheck=False)

    def call() -> None:
        for _ in range(500):
            with lock:
                assert ops.encode(array, "e4m3").shape == array.shape

    beside(resize, call)


def test_an_array_in_use_refuses_to_be_resized() -> None:
    class Resizing(Foreign):
        def __dlpack__(self, **keywords: Any) -> Any:
            with pytest.raises(ValueError, match="resize"):
                x.resize((100, 100))
            return super().__dlpack__(**keywords)

    x, out = np.ones((3, 8), np.float32), np.zeros((3, 8), np.uint8)
    ops.encode(x, "e4m3", Resizing(lend(out)))
    assert (out == 0x38).all()


def test_torch_tensors_resized_by_another_thread_between_calls() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(64)
    lock = threading.Lock()
    sizes = iter(range(10**9))

    def resize() -> None:
        with lock:
            tensor.resize_(1 + next(sizes) * 977 % 5000)

    def call() -> None:
        for _ in range(100):
            with lock:
                assert ops.encode(tensor, "e4m3").shape == tensor.shape

    beside(resize, call)

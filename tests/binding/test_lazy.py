"""Tensors whose memory does not hold their values: lazily negated, masked, standing for others.

DLPack has no word for any of them, so what is in memory would be read, or written, with another meaning.
"""

from typing import Any

import numpy as np
import pytest
from operations import OPERATIONS, Operation, Slot

from moqext import _C, KVCacheMethod, LinearMethod, ops, reference

each_operation = pytest.mark.parametrize("name", OPERATIONS)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def imaginary_part(torch: Any, array: np.ndarray) -> Any:
    """A tensor of these values as torch makes one that is negated: its memory holds their negatives."""
    values = torch.from_numpy(array)
    part = torch.complex(torch.zeros_like(values), values.neg()).conj().imag
    assert part.is_neg()
    assert torch.equal(part, values)
    return part


def assert_refused(operation: Operation, slot: Slot, tensor: Any, error: type, message: str) -> None:
    before = operation.results()
    with pytest.raises(error, match=message) as caught:
        operation.run({slot: tensor(operation.get(slot))})
    assert slot[-1] in str(caught.value)
    assert operation.results() == before


# --- negated


@each_operation
def test_negated_torch_tensors_are_refused_in_every_place(
    torch: Any, name: str, rng: np.random.Generator
) -> None:
    """Negated tensors were read with the wrong sign. Prepared parameters have a layout of nothing negated."""
    operation = OPERATIONS[name](rng)
    for slot in operation.slots():
        if slot[0] != "params" or name.startswith("prepare"):
            tensor = lambda array: torch._neg_view(torch.from_numpy(array))  # noqa: E731
            assert_refused(operation, slot, tensor, BufferError, r"negatives of what is in its memory")


def test_what_torch_makes_negated_is_refused(torch: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 32)).astype(np.float32)
    with pytest.raises(BufferError, match=r"^x: .* pass x.resolve_neg\(\)"):
        ops.encode(imaginary_part(torch, x), "e4m3")
    resolved = ops.encode(imaginary_part(torch, x).resolve_neg(), "e4m3")
    np.testing.assert_array_equal(resolved.view(torch.uint8).numpy(), ops.encode(x, "e4m3").view(np.uint8))


def layer(torch: Any, rng: np.random.Generator) -> tuple[LinearMethod, dict[str, Any]]:
    method = LinearMethod("NVFP4_AWQ", 32, [16], dtype="float32", compute="fp4")
    params = {
        "weight": rng.integers(0, 256, (16, 16), dtype=np.uint8),
        "weight_scale": rng.integers(8, 0x7F, (16, 2), dtype=np.uint8),
        "weight_scale_2": np.float32(0.5),
        "input_scale": np.float32(0.25),
        "pre_quant_scale": np.exp2(rng.uniform(-1, 1, 32)).astype(np.float32),
    }
    return method, params


def test_every_place_of_a_layer_refuses_what_torch_makes_negated(
    torch: Any, rng: np.random.Generator
) -> None:
    method, source = layer(torch, rng)
    params = method.prepare(source)
    x, bias = np.ones((2, 32), np.float32), np.ones(16, np.float32)
    for name in ("output_scale", "input_scale", "pre_quant_scale"):
        with pytest.raises(BufferError, match=rf"^{name}: .*negatives"):
            method(x, params | {name: imaginary_part(torch, params[name])})
    for name in ("weight_scale_2", "input_scale", "pre_quant_scale"):
        with pytest.raises(BufferError, match=rf"^{name}: .*negatives"):
            method.prepare(source | {name: imaginary_part(torch, np.asarray(source[name]))})
    with pytest.raises(BufferError, match=r"^x: .*negatives"):
        method(imaginary_part(torch, x), params)
    with pytest.raises(BufferError, match=r"^bias: .*negatives"):
        method(x, params, imaginary_part(torch, bias))
    out = torch._neg_view(torch.full((2, 16), 7.0))
    with pytest.raises(BufferError, match=r"^out: .*negatives"):
        method(x, params, out=out)
    assert (out == -7).all()
    given = dict(params) | {"output_scale": torch._neg_view(torch.zeros(16))}
    with pytest.raises(BufferError, match=r'^out\["output_scale"\]: .*negatives'):
        method.prepare(source, out=given)


def test_a_negated_tensor_without_the_exchange_api_is_refused(torch: Any) -> None:
    class Older:
        """A producer that negates lazily and has `__dlpack__` alone, as torch before 2.10."""

        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def is_neg(self) -> bool:
            return self.tensor.is_neg()

        def __dlpack__(self, **options: Any) -> Any:
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    plain = torch.ones(2, 4)
    assert _C.describe_tensor(Older(plain))["shape"] == (2, 4)
    with pytest.raises(BufferError, match="negatives"):
        _C.describe_tensor(Older(torch._neg_view(plain)))


def test_an_is_neg_that_fails_or_is_no_method() -> None:
    class Producer:
        def __init__(self) -> None:
            self.array = np.ones(3, np.float32)

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    class Raising(Producer):
        def is_neg(self) -> bool:
            raise RuntimeError("is_neg failed")

    class Attribute(Producer):
        is_neg = True

    with pytest.raises(RuntimeError, match="is_neg failed") as caught:
        _C.describe_tensor(Raising())
    assert caught.value.__notes__ == ["while taking the argument x"]
    assert _C.describe_tensor(Attribute())["shape"] == (3,)


def test_conjugated_torch_tensors_are_refused(torch: Any) -> None:
    conjugated = torch.complex(torch.ones(4), torch.ones(4)).conj()
    assert conjugated.is_conj()
    with pytest.raises(TypeError, match="x: DLPack dtype complex"):
        _C.describe_tensor(conjugated)
    real = conjugated.real  # a plain view of what is there
    assert _C.describe_tensor(real)["pointer"] == real.data_ptr()


def test_scales_of_a_cache_that_are_negated_are_read_as_their_values(torch: Any) -> None:
    scales = KVCacheMethod("FP8").prepare(
        {"k_scale": imaginary_part(torch, np.float32([1.5])), "v_scale": 2.0}
    )
    assert (scales.k_scale, scales.v_scale) == (1.5, 2.0)


# --- masked


@each_operation
def test_masked_arrays_are_refused_in_every_place(name: str, rng: np.random.Generator) -> None:
    """Their masks were ignored."""
    operation = OPERATIONS[name](rng)
    for slot in operation.slots():
        for mask in (True, False, np.ma.nomask):
            tensor = lambda array, mask=mask: np.ma.array(array, mask=mask, copy=False)  # noqa: E731
            assert_refused(operation, slot, tensor, TypeError, "expected an array without a mask")


def test_masked_numbers_are_refused() -> None:
    x = np.ones((2, 32), np.float32)
    with pytest.raises(TypeError, match=r"^scale: expected an array without a mask"):
        ops.quantize(x, "fp8_tensor", scale=np.ma.masked)
    with pytest.raises(TypeError, match=r"^k_scale: expected an array without a mask"):
        KVCacheMethod("FP8").prepare({"k_scale": np.ma.array([1.5], mask=True), "v_scale": 2.0})


@pytest.mark.parametrize(
    "call",
    [
        lambda x: reference.encode(x, "e4m3"),
        lambda x: reference.decode(x.astype(np.uint8), "e4m3"),
        lambda x: reference.as_float32(x),
        lambda x: reference.quantize_fp8_token(x),
        lambda x: reference.quantize_nvfp4(x),
        lambda x: reference.linear(
            x, {"weight": np.zeros((4, 32), np.uint8), "weight_scale": np.float32(1)}, "FP8"
        ),
    ],
)
def test_the_reference_refuses_masked_arrays(call: Any) -> None:
    call(np.ones((2, 32), np.float32))
    with pytest.raises(TypeError, match="expected an array without a mask"):
        call(np.ma.array(np.ones((2, 32), np.float32), mask=True))


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_other_kinds_of_arrays_are_what_is_in_their_memory(tmp_path: Any) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 3))
    mapped[:] = x
    for array in (np.matrix(x), mapped, x.view(np.recarray)):
        np.testing.assert_array_equal(reference.as_float32(array), x)
        np.testing.assert_array_equal(ops.encode(array, "e4m3"), ops.encode(x, "e4m3"))
    for array in (np.zeros(3, [("a", "f4")]), x.astype(">f4"), x.astype(object), x.astype("U4")):
        with pytest.raises(TypeError, match=r"^x: .*not supported"):
            ops.encode(array, "e4m3")


# --- standing for others


def stand_ins(torch: Any) -> dict[str, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.masked import masked_tensor

    x = torch.ones(2, 32)
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    return {
        "sparse": x.to_sparse(),
        "compressed": x.to_sparse_csr(),
        "quantized": quantized,
        "meta": x.to("meta"),
        "fake": FakeTensorMode().from_tensor(x),
        "zeros": torch._efficientzerotensor((2, 32)),
        "nested": torch.nested.nested_tensor([torch.ones(32), torch.ones(32)]),
        "masked": masked_tensor(x, x > 0),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_tensors_that_stand_for_others_are_refused(torch: Any) -> None:
    for kind, tensor in stand_ins(torch).items():
        with pytest.raises((TypeError, BufferError, RuntimeError, NotImplementedError)) as caught:
            ops.encode(tensor, "e4m3")
        text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "x:" in text or "argument x" in text, f"{kind}: {text}"


def test_torch_functions_that_trace_are_refused(torch: Any) -> None:
    x = torch.ones(2, 32)
    with pytest.raises((BufferError, RuntimeError)):
        torch.vmap(lambda row: ops.encode(row, "e4m3"))(x)
    with pytest.raises((BufferError, RuntimeError)):
        torch.func.functionalize(lambda row: ops.encode(row + 1, "e4m3"))(x)


def test_a_subclass_that_exports_in_its_own_way_is_asked(torch: Any) -> None:
    """The exchange table of its base, which knows nothing of that way, was used."""

    class Refusing(torch.Tensor):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("not to be exported")

    class Plain(torch.Tensor):
        pass

    x = torch.ones(2, 32)
    assert _C.describe_tensor(x.as_subclass(Plain))["pointer"] == x.data_ptr()
    with pytest.raises(BufferError, match="not to be exported"):
        _C.describe_tensor(x.as_subclass(Refusing))

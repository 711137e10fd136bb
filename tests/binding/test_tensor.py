"""Tensors in and out by framework: what moqext sees of NumPy, torch and JAX arrays, and what it makes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moqext import _C

from ..work import each

ml_dtypes = pytest.importorskip("ml_dtypes")

NUMPY_DTYPES = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "int8": np.int8,
    "uint16": np.uint16,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}


def check_against_array(seen: dict[str, Any], array: np.ndarray, dtype: str) -> None:
    assert seen["dtype"] == seen["stored"] == dtype
    assert seen["shape"] == array.shape
    assert seen["device"] == "cpu"
    assert seen["pointer"] == array.__array_interface__["data"][0]
    assert seen["readonly"] == (not array.flags.writeable)
    for extent, ours, theirs in zip(array.shape, seen["strides"], array.strides, strict=True):
        if extent > 1:
            assert ours * array.itemsize == theirs


# --- NumPy


@each("dtype", NUMPY_DTYPES)
def test_numpy_views_are_read_as_they_are(dtype: str, rng: np.random.Generator) -> None:
    shape = tuple(int(n) for n in rng.integers(1, 6, size=int(rng.integers(0, 6))))
    base = np.zeros(shape, NUMPY_DTYPES[dtype])
    views = [base, base[..., ::-1] if base.ndim else base, base.T, np.broadcast_to(base, (3, *shape))]
    readonly = base.copy()
    readonly.flags.writeable = False
    for view in [*views, readonly]:
        check_against_array(_C.describe_tensor(view), view, dtype)


@pytest.mark.parametrize("name", ["longlong", "int_", "intc", "short", "byte", "double", "single", "half"])
def test_numpy_c_names_of_integers_and_floats(name: str) -> None:
    array = np.zeros(3, getattr(np, name))
    assert _C.describe_tensor(array)["dtype"] == array.dtype.name


def test_numpy_subclasses_are_arrays() -> None:
    class Sub(np.ndarray):
        pass

    array = np.zeros((2, 3), np.float32).view(Sub)
    check_against_array(_C.describe_tensor(array), array, "float32")
    assert type(_C.empty_like(array, (2,), "float32")) is np.ndarray


@each(
    "array",
    [
        np.zeros(2, ">f4"),
        np.zeros(2, object),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, "V4"),
        np.zeros(2, "S3"),
        np.zeros(2, "U3"),
        np.zeros(2, "M8[s]"),
        np.zeros(2, np.complex64),
        np.zeros(2, np.uint32),
        np.zeros(2, np.uint64),
        np.zeros(2, np.longdouble),
    ],
)
def test_numpy_dtypes_that_are_refused(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r"^x: dtype\(.*is not supported"):
        _C.describe_tensor(array)


def test_byte_swapped_says_so() -> None:
    with pytest.raises(TypeError, match="bytes are swapped"):
        _C.describe_tensor(np.zeros(2, ">f4"))


@pytest.mark.parametrize("name", ["int4", "uint4", "float4_e2m1fn", "float6_e2m3fn", "int2"])
def test_narrow_ml_dtypes_are_one_value_per_byte(name: str) -> None:
    if not hasattr(ml_dtypes, name):
        pytest.skip(f"this ml_dtypes has no {name}")
    with pytest.raises(TypeError, match=rf"^x: .*{name}.* one value in each byte"):
        _C.describe_tensor(np.zeros(2, getattr(ml_dtypes, name)))


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e3m4"])
def test_other_fp8_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^x: .*{name}.*is not supported$"):
        _C.describe_tensor(np.zeros(2, getattr(ml_dtypes, name)))


def test_misaligned_numpy() -> None:
    raw = np.zeros(64, np.uint8)
    with pytest.raises(BufferError, match=r"^x: not aligned, float32"):
        _C.describe_tensor(raw[1:41].view(np.float32))
    field = np.zeros(3, [("a", "f4"), ("b", "u1")])["a"]  # steps of 5 bytes
    with pytest.raises(BufferError, match=r"^x: not aligned"):
        _C.describe_tensor(field)
    assert _C.describe_tensor(raw[1:1].view(np.float32))["shape"] == (0,)


def test_too_many_dimensions() -> None:
    assert _C.describe_tensor(np.zeros((1,) * 8))["shape"] == (1,) * 8
    with pytest.raises(BufferError, match=r"^x: 9 dimensions"):
        _C.describe_tensor(np.zeros((1,) * 9))


@pytest.mark.parametrize("thing", [3, 3.0, None, [1.0], "x", b"x", np.float32(1), memoryview(b"x"), object])
def test_what_is_no_tensor(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"^x: expected a tensor"):
        _C.describe_tensor(thing)


def in_a_fresh_process(code: str) -> None:
    prelude = "import sys, numpy as np; from moqext import _C, ops\nx = np.ones((2, 32), np.float32)\n"
    subprocess.run([sys.executable, "-c", prelude + code], check=True)


def test_what_does_not_need_ml_dtypes_does_not_import_it() -> None:
    in_a_fresh_process(
        "codes = np.zeros((2, 16), np.uint8)\n"
        "scale, one = np.full((2, 2), 56, np.uint8), np.float32([1])\n"
        "out = ops.dequantize(codes, 'NVFP4', weight_scale=scale, weight_scale_2=one)\n"
        "assert out.dtype == np.float32\n"
        "assert _C.describe_tensor(codes)['dtype'] == 'uint8'\n"
        "assert 'ml_dtypes' not in sys.modules\n"
    )


def test_the_type_of_a_result_does_not_depend_on_what_was_imported() -> None:
    """The dtype is that of ml_dtypes if installed, whoever has asked for it so far."""
    in_a_fresh_process(
        "codes = np.zeros((2, 32), np.uint8)\n"
        "before = [_C.empty_like(x, (2, 3), 'bf16').dtype, ops.quantize(x, 'fp8_tensor')[0].dtype,\n"
        "          ops.dequantize(codes, 'FP8', weight_scale=np.float32([1]), dtype='bfloat16').dtype]\n"
        "import ml_dtypes\n"
        "assert before == [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16], before\n"
        "assert ops.quantize(x, 'fp8_tensor')[0].dtype == before[1]\n"
    )


def test_without_ml_dtypes_results_are_carriers() -> None:
    in_a_fresh_process(
        "sys.modules['ml_dtypes'] = None  # what Python does with a package that is not there\n"
        "for _ in range(2):\n"
        "    assert _C.empty_like(x, (2, 3), 'bf16').dtype == np.uint16\n"
        "    assert ops.quantize(x, 'fp8_tensor')[0].dtype == np.uint8\n"
    )


def test_a_broken_ml_dtypes_is_no_absent_one(tmp_path: Path) -> None:
    (tmp_path / "ml_dtypes.py").write_text("raise OSError('half of it is missing')")
    in_a_fresh_process(
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n"
        "    _C.empty_like(x, (2, 3), 'bf16')\n"
        "except OSError as error:\n"
        "    assert 'half of it' in str(error)\n"
        "else:\n"
        "    raise AssertionError('it was taken for absent')\n"
    )


def test_references_are_given_back() -> None:
    array = np.zeros(4, np.float32)
    before = sys.getrefcount(array)
    for _ in range(100):
        _C.describe_tensor(array)
        _C.check_tensors(array, array)
        with pytest.raises(TypeError):
            _C.check_tensors(array, 3)
        with pytest.raises(TypeError):
            _C.describe_tensor(array, format="e4m3")
        with pytest.raises(BufferError):
            _C.describe_tensor(array, out=array)
    assert sys.getrefcount(array) == before


# --- formats and carriers


@each("stored", NUMPY_DTYPES)
@each("wanted", ["e4m3", "e5m2", "e8m0", "e2m1", "bf16", "fp16", "uint8", "float32"])
def test_format_accepts_the_dtype_and_its_carriers_alone(stored: str, wanted: str) -> None:
    array = np.zeros(4, NUMPY_DTYPES[stored])
    canonical = {
        "e4m3": "float8_e4m3fn",
        "e5m2": "float8_e5m2",
        "e8m0": "float8_e8m0fnu",
        "e2m1": "float4_e2m1fn_x2",
        "bf16": "bfloat16",
        "fp16": "float16",
    }.get(wanted, wanted)
    carriers = {1: ("uint8", "int8"), 2: ("uint16", "int16")}
    width = 4 if wanted == "float32" else 2 if wanted in ("bf16", "fp16") else 1
    if stored == canonical or stored in carriers.get(width, ()):
        seen = _C.describe_tensor(array, format=wanted)
        assert (seen["dtype"], seen["stored"]) == (canonical, stored)
    else:
        with pytest.raises(TypeError, match=rf"^x: expected {canonical} or a raw carrier.*got {stored}$"):
            _C.describe_tensor(array, format=wanted)


def test_unknown_format() -> None:
    with pytest.raises(ValueError, match=r"^format: unknown dtype 'e9m9'"):
        _C.describe_tensor(np.zeros(2), format="e9m9")
    with pytest.raises(TypeError, match=r"^format: expected a str"):
        _C.describe_tensor(np.zeros(2), format=3)


# --- outputs


def test_numpy_output_checks() -> None:
    x = np.zeros((4, 4), np.float32)
    out = np.empty((4, 4), np.float32)
    assert _C.describe_tensor(x, out=out)["pointer"] == out.ctypes.data
    assert _C.describe_tensor(x, out=out[::-1, ::2])["strides"] == (-4, 2)
    readonly = out.view()
    readonly.flags.writeable = False
    for bad, reason in [
        (readonly, "read-only memory"),
        (np.broadcast_to(out[:1], (4, 4)), "read-only memory"),
        (np.lib.stride_tricks.as_strided(out, (4, 4), (0, 4)), "elements share memory"),
        (np.lib.stride_tricks.as_strided(out, (4, 4), (4, 4)), "elements share memory"),
        (np.lib.stride_tricks.as_strided(out, (4, 4), (-4, 4)), "elements share memory"),
    ]:
        with pytest.raises(BufferError, match=rf"^out: not usable as an output, .*{reason}"):
            _C.describe_tensor(x, out=bad)


@pytest.mark.parametrize("part", [np.s_[:], np.s_[3:7], np.s_[::-1], np.s_[9:10]])
def test_overlap_is_refused_naming_both(part: Any) -> None:
    x = np.zeros((10, 4), np.float32)
    with pytest.raises(BufferError, match=r"^out: shares memory with x"):
        _C.describe_tensor(x, out=x[part])


def test_neighbours_and_empty_tensors_do_not_overlap() -> None:
    base = np.zeros((10, 4), np.float32)
    assert _C.describe_tensor(base[:5], out=base[5:])["shape"] == (5, 4)
    assert _C.describe_tensor(base, out=base[5:5])["shape"] == (0, 4)


# --- allocation


@each("dtype", NUMPY_DTYPES)
def test_numpy_results_are_typed(dtype: str) -> None:
    made = _C.empty_like(np.zeros(3, np.float32), (2, 0, 5), dtype)
    assert type(made) is np.ndarray
    assert made.shape == (2, 0, 5)
    assert made.dtype == NUMPY_DTYPES[dtype]
    made = _C.empty_like(np.zeros(3, np.float32), (3, 5), dtype)
    assert not made.view(np.uint8).any()
    assert made.flags.c_contiguous


def test_packed_fp4_comes_back_as_bytes() -> None:
    assert _C.empty_like(np.zeros(3, np.float32), (4,), "e2m1").dtype == np.uint8


@pytest.mark.parametrize(
    "carrier, format, dtype, expected",
    [
        (np.int16, "bf16", "bf16", np.int16),  # the caller works in carriers of this width
        (np.uint16, "bf16", "fp16", np.uint16),
        (np.int8, "e4m3", "e4m3", np.int8),
        (np.uint8, "e2m1", "e4m3", np.uint8),
        (np.uint8, "e4m3", "bf16", ml_dtypes.bfloat16),  # another width: the dtype itself
        (np.uint8, "e4m3", "float32", np.float32),
        (np.int16, "bf16", "uint16", np.uint16),  # a raw result is what it says
        (np.uint16, None, "bf16", ml_dtypes.bfloat16),  # really uint16, nothing carried
    ],
)
def test_carriers_in_carriers_out(carrier: Any, format: str | None, dtype: str, expected: Any) -> None:
    assert _C.empty_like(np.zeros(3, carrier), (4,), dtype, format=format).dtype == expected


@pytest.mark.parametrize("shape", [(2**62, 4), (2**31, 2**31, 2**3)])
def test_results_too_large_to_count(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^out: the product of the result's shape overflows"):
        _C.empty_like(np.zeros(3), shape, "float32")


# --- torch


TORCH_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_tensors_in_every_dtype(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    tensor = torch.empty((3, 4), dtype=getattr(torch, dtype))
    for view in (tensor, tensor[1:], tensor[:, 1:3], tensor.T, tensor[:0], tensor.expand(5, 3, 4)):
        seen = _C.describe_tensor(view)
        assert seen["dtype"] == dtype
        assert seen["shape"] == tuple(view.shape)
        assert seen["strides"] == view.stride()
        assert seen["device"] == "cpu"
        if view.numel():
            assert seen["pointer"] == view.data_ptr()
    made = _C.empty_like(tensor, (2, 5), dtype)
    assert isinstance(made, torch.Tensor)
    assert made.dtype == tensor.dtype
    assert made.shape == (2, 5)
    assert not made.view(torch.uint8).any()


@pytest.mark.parametrize("dtype", ["uint32", "uint64", "complex64", "float8_e4m3fnuz"])
def test_torch_dtypes_that_are_refused(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^x: DLPack dtype .* is not supported"):
        _C.describe_tensor(torch.empty(3, dtype=getattr(torch, dtype)))


def test_torch_parameters_pass_and_autograd_is_left_to_the_caller() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    assert weight.requires_grad
    assert _C.describe_tensor(weight)["pointer"] == weight.data_ptr()
    made = _C.empty_like(weight, (2,), "float32")
    assert type(made) is torch.Tensor
    assert not made.requires_grad


def test_torch_tensors_without_memory() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^x: expected a dense tensor in memory, got one that is meta$"):
        _C.describe_tensor(torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match=r"got one that is torch\.sparse_coo$"):
        _C.describe_tensor(torch.eye(3).to_sparse())


def test_torch_outputs() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 4)
    out = torch.empty(4, 4)
    assert _C.describe_tensor(x, out=out)["pointer"] == out.data_ptr()
    assert _C.describe_tensor(x.numpy(), out=out)["pointer"] == out.data_ptr()
    with pytest.raises(BufferError, match=r"^out: shares memory with x"):
        _C.describe_tensor(x.numpy(), out=x)
    with pytest.raises(BufferError, match="elements share memory"):
        _C.describe_tensor(x, out=out[:1].expand(4, 4))


def test_torch_memory_is_released() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(4)
    before = sys.getrefcount(x), torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    for _ in range(100):
        _C.describe_tensor(torch.zeros(3), out=x)
        _C.empty_like(x, (2,), "bf16")
    assert (sys.getrefcount(x), torch._C._storage_Use_Count(x.untyped_storage()._cdata)) == before


# --- JAX


@pytest.fixture(scope="module")
def jnp() -> Iterator[Any]:
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        yield jax.numpy


JAX_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int32", "uint8", "bool"]


@pytest.mark.parametrize("dtype", JAX_DTYPES)
def test_jax_arrays_in_and_results_out(jnp: Any, dtype: str) -> None:
    array = jnp.zeros((2, 3), dtype)
    seen = _C.describe_tensor(array)
    assert seen["dtype"] == dtype
    assert seen["shape"] == (2, 3)
    assert seen["strides"] == (3, 1)
    assert seen["pointer"] == array.unsafe_buffer_pointer()
    made = _C.empty_like(array, (4, 5), dtype)
    assert type(made) is type(array)
    assert made.dtype == dtype
    assert made.shape == (4, 5)
    assert not np.asarray(made).astype(np.float32).any()


def test_jax_arrays_are_never_written(jnp: Any) -> None:
    with pytest.raises(BufferError, match=r"^out: not usable as an output, .*immutable"):
        _C.describe_tensor(np.zeros(3), out=jnp.zeros(3))


def test_jax_fp4_is_not_packed(jnp: Any) -> None:
    with pytest.raises(TypeError, match=r"^x: float4_e2m1fn with one value per element"):
        _C.describe_tensor(jnp.zeros((2, 4), jnp.float4_e2m1fn))


def test_jax_result_outlives_everything_else(jnp: Any) -> None:
    import gc

    made = [_C.empty_like(jnp.zeros(2), (1000,), "float32") for _ in range(50)]
    gc.collect()
    assert all(float(array.sum()) == 0 for array in made)

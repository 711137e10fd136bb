"""Every taker of codes refuses a dtype of one byte that is not the one meant, and says which it expected."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moqext import KVCacheMethod, LinearMethod, MoEMethod, ops

from .work import each

ml_dtypes = pytest.importorskip("ml_dtypes")

NAMES = {
    "bool": np.dtype(np.bool_),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
}
E4M3, E2M1, E8M0 = ("float8_e4m3fn", "uint8"), ("uint8",), ("float8_e8m0fnu", "uint8")
ONE = np.ones(1, np.float32)


def bytes_as(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, np.uint8).view(NAMES[dtype])


def load(algo: str, name: str, shape: tuple[int, ...]) -> Callable[[str], None]:
    method = MoEMethod(algo, 2, 32, 32, top_k=1)
    return lambda dtype: method.load(method.new_params(), name, 0, bytes_as(dtype, shape))


def prepare(algo: str, role: str) -> Callable[[str], Any]:
    method = LinearMethod(algo, 32, [8])
    tensors = {
        name: np.ones(spec.shape, np.float32 if spec.dtype == "float32" else np.uint8)
        for name, spec in method.checkpoint_params.items()
    }
    return lambda dtype: method.prepare(tensors | {role: bytes_as(dtype, tensors[role].shape)})


def run_codes(dtype: str) -> None:
    method = LinearMethod("FP8", 32, [8], dtype="float32", quantized_input=True)
    tensors = {"weight": np.ones((8, 32), np.uint8), "weight_scale": 1.0, "input_scale": 1.0}
    method(bytes_as(dtype, (2, 32)), method.prepare(tensors))


def dequantize(algo: str, role: str) -> Callable[[str], Any]:
    shapes = {"weight": (4, 16), "weight_scale": {"FP8": (1,), "FP8_PB_WO": (1, 1)}.get(algo, (4, 2))}
    floats = {"weight_scale": np.ones(shapes["weight_scale"], np.float32)} if "FP8" in algo else {}
    tensors = {name: np.ones(shape, np.uint8) for name, shape in shapes.items()} | floats
    if algo == "NVFP4":
        tensors["weight_scale_2"] = ONE

    def call(dtype: str) -> None:
        given = tensors | {role: bytes_as(dtype, tensors[role].shape)}
        ops.dequantize(given.pop("weight"), algo, **given)

    return call


TAKERS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "load e4m3 codes": (load("FP8", "gate_proj.weight", (32, 32)), E4M3),
    "load e2m1 codes": (load("NVFP4", "down_proj.weight", (32, 16)), E2M1),
    "load group scales": (load("NVFP4", "up_proj.weight_scale", (32, 2)), E4M3),
    "load block scales": (load("FP8_PB_WO", "gate_proj.weight_scale", (1, 1)), E8M0),
    "load a scale of a half": (load("FP8", "gate_proj.weight_scale", ()), ()),
    "load a scale": (load("NVFP4", "down_proj.weight_scale_2", ()), ()),
    "load factors": (load("NVFP4_AWQ", "gate_proj.pre_quant_scale", (32,)), ()),
    "load a bias": (load("FP8", "down_proj.bias", (32,)), ()),
    "prepare e4m3 codes": (prepare("FP8", "weight"), E4M3),
    "prepare e2m1 codes": (prepare("NVFP4", "weight"), E2M1),
    "prepare group scales": (prepare("NVFP4", "weight_scale"), E4M3),
    "prepare block scales": (prepare("FP8_PB_WO", "weight_scale"), E8M0),
    "prepare a scale": (prepare("FP8", "weight_scale"), ()),
    "prepare a scale of rows": (prepare("FP8_PER_CHANNEL_PER_TOKEN", "weight_scale"), ()),
    "prepare an input scale": (prepare("FP8", "input_scale"), ()),
    "codes of x": (run_codes, E4M3),
    "dequantize e4m3 codes": (dequantize("FP8", "weight"), E4M3),
    "dequantize group scales": (dequantize("NVFP4", "weight_scale"), E4M3),
    "dequantize block scales": (dequantize("FP8_PB_WO", "weight_scale"), E8M0),
    "requantize": (
        lambda d: ops.requantize_to_max(bytes_as(d, (4, 8)), np.ones(2, np.float32), [2, 2]),
        E4M3,
    ),
    "pack codes": (lambda d: ops.pack_fp4(bytes_as(d, (4, 8))), ("uint8", "int8")),
    "unpack codes": (lambda d: ops.unpack_fp4(bytes_as(d, (4, 8))), ("uint8", "int8")),
    "pack NVFP4 codes": (lambda d: ops.pack_nvfp4(bytes_as(d, (64, 32)), bytes_as("uint8", (64, 4))), E2M1),
    "pack NVFP4 scales": (lambda d: ops.pack_nvfp4(bytes_as("uint8", (64, 32)), bytes_as(d, (64, 4))), E4M3),
    "unpack NVFP4": (lambda d: ops.unpack_nvfp4(bytes_as(d, (4, 1, 576)), (64, 64)), E2M1),
    "cache scale": (lambda d: KVCacheMethod("FP8").prepare({"k_scale": bytes_as(d, (1,))}), ()),
}


@each("taker", TAKERS)
def test_a_dtype_of_one_byte_is_not_taken_for_another(taker: str) -> None:
    take, meant = TAKERS[taker]
    for dtype in NAMES:
        if dtype in meant:
            take(dtype)
        else:
            with pytest.raises(TypeError, match=rf"{dtype}\b"):
                take(dtype)


def test_load_names_the_tensor_what_was_expected_and_what_came() -> None:
    method = MoEMethod("FP8", 2, 32, 32, top_k=1)
    message = r"^up_proj.weight of expert 1: expected float8_e4m3fn or raw uint8, got float8_e5m2$"
    params = method.new_params()
    with pytest.raises(TypeError, match=message):
        method.load(params, "up_proj.weight", 1, bytes_as("float8_e5m2", (32, 32)))
    assert not params.filled["w13_weight"].any()


def test_powers_of_two_are_loaded_as_they_are_prepared() -> None:
    method = MoEMethod("FP8_PB_WO", 1, 32, 32, top_k=1, gated=False, activation="relu2")
    for dtype in E8M0:
        params = method.new_params()
        method.load(params, "up_proj.weight_scale", 0, np.full((1, 1), 130, np.uint8).view(NAMES[dtype]))
        assert params["w13_weight_scale"].item() == 8


def test_packed_codes_typed_int8_are_dequantized_as_bytes(rng: Any) -> None:
    codes, scale = rng.integers(0, 256, (4, 16), np.uint8), np.full((4, 1), 127, np.uint8)
    np.testing.assert_array_equal(
        ops.dequantize(codes.view(np.int8), "MXFP4", weight_scale=scale),
        ops.dequantize(codes, "MXFP4", weight_scale=scale),
    )

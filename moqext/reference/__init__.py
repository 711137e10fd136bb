"""The meaning of the numbers of a ModelOpt checkpoint, in NumPy alone.

Written from the formats' definitions and independent of the native code, which the tests compare with it
bit for bit. Slow and plain on purpose. Codes are uint8 or uint16 carriers (arrays declared in a matching
dtype are taken as well), bfloat16 values are float32.
"""

from moqext.reference.activations import (
    NVFP4Activation,
    quantize_fp8_group,
    quantize_fp8_static,
    quantize_fp8_tensor,
    quantize_fp8_token,
    quantize_int8_static,
    quantize_int8_token,
    quantize_mxfp8,
    quantize_nvfp4,
)
from moqext.reference.experts import expert_activation, expert_input_scale, experts_reference
from moqext.reference.fused import rms_norm, rotary_embedding, silu_and_mul
from moqext.reference.linear import linear
from moqext.reference.numbers import as_float32, decode, encode, round_to
from moqext.reference.packed import pack_nvfp4, unpack_nvfp4
from moqext.reference.producer import quantize_weight
from moqext.reference.routing import route
from moqext.reference.weights import dequantize, fold_mxfp4, fold_mxfp8, fold_nvfp4

__all__ = [
    "NVFP4Activation",
    "as_float32",
    "decode",
    "dequantize",
    "encode",
    "expert_activation",
    "expert_input_scale",
    "experts_reference",
    "fold_mxfp4",
    "fold_mxfp8",
    "fold_nvfp4",
    "linear",
    "pack_nvfp4",
    "quantize_fp8_group",
    "quantize_fp8_static",
    "quantize_fp8_tensor",
    "quantize_fp8_token",
    "quantize_int8_static",
    "quantize_int8_token",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "quantize_weight",
    "rms_norm",
    "rotary_embedding",
    "round_to",
    "route",
    "silu_and_mul",
    "unpack_nvfp4",
]

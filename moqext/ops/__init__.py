"""The operations under the layers, on tensors of any framework: NumPy arrays and whatever speaks DLPack.

A result is made by the framework of the first tensor, or written to `out` where that is given; raw uint8 and
uint16 arrays stand for formats that the framework has no dtype for.
"""

from moqext.ops.activations import (
    qk_norm_rope,
    rms_norm,
    rotary_embedding,
    router_logits,
    silu_and_mul,
)
from moqext.ops.activations import (
    turn_heads as turn_heads,
)
from moqext.ops.codes import (
    decode,
    dequantize,
    encode,
    quantize,
    requantize_to_max,
    rms_norm_quantize,
    silu_and_mul_quantize,
)
from moqext.ops.devices import to_device, to_host
from moqext.ops.packing import (
    pack_fp4,
    pack_nvfp4,
    swizzle_block_scales,
    unpack_fp4,
    unpack_nvfp4,
    unswizzle_block_scales,
)
from moqext.ops.quantize_weights import quantize_weight
from moqext.ops.routing import route
from moqext.ops.vllm_layout import expert_alphas, expert_input_scale, shared_input_scale, swap_gate_up
from moqext.ops.weights import linear, prepare_experts

__all__ = [
    "decode",
    "dequantize",
    "encode",
    "expert_alphas",
    "expert_input_scale",
    "linear",
    "pack_fp4",
    "pack_nvfp4",
    "prepare_experts",
    "qk_norm_rope",
    "quantize",
    "quantize_weight",
    "requantize_to_max",
    "rms_norm",
    "rms_norm_quantize",
    "rotary_embedding",
    "route",
    "router_logits",
    "shared_input_scale",
    "silu_and_mul",
    "silu_and_mul_quantize",
    "swap_gate_up",
    "swizzle_block_scales",
    "to_device",
    "to_host",
    "unpack_fp4",
    "unpack_nvfp4",
    "unswizzle_block_scales",
]

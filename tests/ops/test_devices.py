"""Tensors that only a foreign producer can hand over: on a device, or empty with absurd extents.

Device tensors are refused by name, and never read: their addresses mean nothing to the host.
"""

import numpy as np
import pytest
from fake_dlpack import CPU, CUDA, FLOAT32, Lender, MutableProducer, Producer

from moqext import ops

from ..work import each

UINT8 = (1, 8, 1)


def remote(shape, dtype):
    """A tensor that says it is on a GPU, at an address no process has."""
    device = (CUDA, 0)
    return MutableProducer(Lender(shape, dtype=dtype, device=device, data=0x1000), device)


ONE = np.ones((), np.float32)
CALLS = {
    "scale": lambda: ops.quantize(np.ones((2, 16), np.float32), "fp8_tensor", scale=remote((1,), FLOAT32)),
    "out": lambda: ops.quantize(np.ones((2, 16), np.float32), "fp8_token", out=remote((2, 16), UINT8)),
    "weight": lambda: ops.dequantize(remote((2, 16), UINT8), "FP8", weight_scale=ONE),
    "weight_scale": lambda: ops.dequantize(
        np.zeros((2, 16), np.uint8), "FP8", weight_scale=remote((2,), FLOAT32)
    ),
    "weight_scale_2": lambda: ops.dequantize(
        np.zeros((2, 8), np.uint8),
        "NVFP4",
        weight_scale=np.zeros((2, 1), np.uint8),
        weight_scale_2=remote((1,), FLOAT32),
    ),
    "weight_scale ": lambda: ops.requantize_to_max(
        np.zeros((2, 16), np.uint8), remote((2,), FLOAT32), [1, 1]
    ),
    "input_scale": lambda: ops.expert_input_scale(remote((2, 2), FLOAT32)),
    "input_scale ": lambda: ops.shared_input_scale(remote((2, 2), FLOAT32)),
    "input_scale  ": lambda: ops.expert_alphas(remote((2,), FLOAT32), np.ones(2, np.float32)),
    "weight_scale_2 ": lambda: ops.expert_alphas(np.ones(2, np.float32), remote((2,), FLOAT32)),
    "correction_bias": lambda: ops.route(
        np.zeros((2, 8), np.float32), 2, scoring="sigmoid", correction_bias=remote((8,), FLOAT32)
    ),
}


@each("name", CALLS)
def test_device_memory_is_refused_by_name(name):
    with pytest.raises(
        BufferError, match=rf"^{name.strip()}: expected a tensor in host memory, got one on cuda:0"
    ):
        CALLS[name]()


def nowhere(shape, dtype):
    """A tensor that says it is on a GPU that no machine has."""
    device = (CUDA, 63)
    return MutableProducer(Lender(shape, dtype=dtype, device=device, data=0x1000), device)


NOWHERE = {
    "x": lambda: ops.quantize(nowhere((2, 16), FLOAT32), "fp8_token"),
    "scale": lambda: ops.swizzle_block_scales(nowhere((2, 16), UINT8)),
    "codes": lambda: ops.pack_fp4(nowhere((2, 16), UINT8)),
    "packed": lambda: ops.unpack_fp4(nowhere((2, 16), UINT8)),
    "swizzled": lambda: ops.unswizzle_block_scales(nowhere((128, 4), UINT8), (1, 1)),
    "stack": lambda: ops.swap_gate_up(nowhere((2, 16), UINT8)),
    "router_logits": lambda: ops.route(nowhere((2, 8), FLOAT32), 2, scoring="softmax"),
    "weight": lambda: ops.requantize_to_max(nowhere((2, 16), UINT8), np.ones(1, np.float32), [2]),
}


@pytest.mark.parametrize("name", NOWHERE)
def test_a_device_that_cannot_be_used_is_refused_with_the_reason(name):
    with pytest.raises(BufferError, match=rf"^{name}: cuda:63 cannot be used: "):
        NOWHERE[name]()


def test_out_is_where_the_input_is():
    with pytest.raises(BufferError, match=r"^out: expected a tensor in host memory, got one on cuda:0"):
        ops.pack_fp4(np.zeros((2, 16), np.uint8), out=remote((2, 8), UINT8))


def test_a_host_tensor_of_the_same_producer_is_taken():
    x = Producer(Lender((2, 16), dtype=FLOAT32), (CPU, 0))
    out, scale_out = np.full((2, 16), 0xA5, np.uint8), np.zeros((2, 1), np.float32)
    ops.quantize(x, "fp8_token", out=out, scale_out=scale_out)
    assert not out.any()
    assert (scale_out > 0).all()


@pytest.mark.parametrize("extent", [2**62, 2**63 - 1])
def test_extents_of_an_empty_tensor_that_cannot_be_doubled_are_refused(extent):
    def empty(*shape):
        return Producer(Lender(shape, dtype=UINT8, strides=[0] * len(shape)), (CPU, 0))

    second = np.ones((), np.float32)
    scale = np.zeros((0, 1), np.uint8)
    calls = {
        "packed": lambda: ops.unpack_fp4(empty(0, extent)),
        "scale": lambda: ops.swizzle_block_scales(empty(0, extent)),
        "weight": lambda: ops.dequantize(
            empty(0, extent), "NVFP4", weight_scale=scale, weight_scale_2=second
        ),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name}: shape .* is too large"):
            call()

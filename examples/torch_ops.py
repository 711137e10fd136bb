"""Operations on tensors of PyTorch, without a checkpoint and without modules: quantize, prepare, multiply.

usage: python examples/torch_ops.py [DEVICE]
"""

import sys

import torch

import moqext
from moqext import ops


def main(device: str) -> None:
    """Quantizes a weight to FP8, a scale for each row, and multiplies with it."""
    weight = torch.randn(256, 512, dtype=torch.bfloat16, device=device) / 512**0.5
    codes, scales = ops.quantize(weight, "fp8_token")  # a row of the weight is what a token of x is
    print("codes:", codes.dtype, tuple(codes.shape), "scales:", scales.dtype, tuple(scales.shape))

    method = moqext.LinearMethod("FP8_PER_CHANNEL_PER_TOKEN", 512, [256], dtype=weight.dtype, device=device)
    params = method.prepare({"weight": codes, "weight_scale": scales.flatten()})
    x = torch.randn(16, 512, dtype=torch.bfloat16, device=device)
    y = method(x, params)  # of torch, on x's device, in the order of its current stream
    plain = torch.nn.functional.linear(x.float(), weight.float())
    error = (y.float() - plain).norm() / plain.norm()
    print(f"{method.backend_for(16)}: {error:.1%} from the weight in bfloat16")

    gate_up = torch.randn(16, 1024, dtype=torch.bfloat16, device=device)
    out, scale = ops.silu_and_mul_quantize(gate_up, "fp8_token")  # what comes before a down projection
    print("silu(gate) * up:", out.dtype, tuple(out.shape), "scales:", tuple(scale.shape))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda:0" if torch.cuda.is_available() else "cpu")

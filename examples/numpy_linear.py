"""The fused query, key and value projection of a checkpoint on a NumPy array, and no framework.

usage: python examples/numpy_linear.py CHECKPOINT
"""

import sys

import numpy as np

import moqext

ATTENTION = "model.layers.0.self_attn"


def main(directory: str) -> None:
    """Multiplies, and compares with what the codes and scales mean."""
    names = [f"{ATTENTION}.{name}_proj" for name in "qkv"]
    with moqext.Checkpoint(directory) as ckpt:
        layer = ckpt.load(names, dtype="float32")
        weight = np.concatenate([ckpt.dequantize(name) for name in names])
    x = np.random.default_rng().standard_normal((2, 3, layer.in_features), dtype=np.float32)
    y = layer(x)
    print(f"{layer.backend}: {x.shape} -> {y.shape}")
    plain = x @ weight.T
    # Formats whose activations are quantized, as FP8's, are off by that; NVFP4's weights multiply exactly.
    print(f"against the dequantized weight: {np.linalg.norm(y - plain) / np.linalg.norm(plain):.1e}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])

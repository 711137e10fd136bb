"""A layer of a checkpoint on an array of JAX.

usage: python examples/jax_linear.py CHECKPOINT
"""

import sys

import jax
import jax.numpy as jnp

import moqext


def main(directory: str) -> None:
    """Multiplies on the CPU; the result is an array of JAX, which jax.jit takes from there."""
    with moqext.Checkpoint(directory) as ckpt:
        layer = ckpt.load("model.layers.0.mlp.up_proj")
    cpu = jax.devices("cpu")[0]
    x = jax.device_put(jax.random.normal(jax.random.key(0), (4, layer.in_features), jnp.bfloat16), cpu)
    y = layer(x)
    print(f"{layer.backend}: {type(x).__name__} {x.shape} -> {type(y).__name__} {y.shape}, {y.dtype}")
    print("its silu:", jax.jit(jax.nn.silu)(y).shape)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])

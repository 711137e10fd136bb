"""A layer of a checkpoint on an array of CuPy, on a GPU, on a stream of one's own.

usage: python examples/cupy_linear.py CHECKPOINT
"""

import sys

import cupy

import moqext


def main(directory: str) -> None:
    """Multiplies in float16, which CuPy has, into an array that it is given."""
    with moqext.Checkpoint(directory) as ckpt:
        layer = ckpt.load("model.layers.0.mlp.up_proj", dtype="float16", device="cuda:0")
    x = cupy.random.standard_normal((4, layer.in_features), dtype=cupy.float32).astype(cupy.float16)
    y = layer(x)
    print(f"{layer.backend}: {type(x).__name__} {x.shape} -> {type(y).__name__} {y.shape}, {y.dtype}")
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = cupy.full_like(y, cupy.nan)
        layer(x, out=out, stream=stream)  # CuPy does not tell which stream is current
        stream.synchronize()
    print("equal on a stream of its own:", bool((out == y).all()))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])

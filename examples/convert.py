"""A checkpoint written again in bfloat16, as Transformers and others load it, and read back.

usage: python examples/convert.py CHECKPOINT OUT
"""

import sys

import numpy as np

import moqext
from moqext import reference


def show(done: int, total: int, name: str) -> None:
    """Called for every tensor."""
    print(f"{done / total:4.0%} {name}")


def main(directory: str, out: str) -> None:
    """Converts, then compares every weight of the result with what codes and scales mean."""
    with moqext.Checkpoint(directory) as ckpt:
        result = ckpt.convert(out, to="bf16", progress=show)
        print(f"{result.dequantized} weights dequantized, {result.bytes_written} bytes in {result.directory}")
        for note in result.notes:
            print(note)
        with moqext.Checkpoint(out) as plain:
            for layer in ckpt.layers():
                for linear in layer.linears():
                    exact = ckpt.dequantize(linear)
                    written = reference.as_float32(plain.tensor(linear.tensors["weight"]))
                    error = np.linalg.norm(written - exact) / np.linalg.norm(exact)
                    print(f"{linear.name:45} {linear.quant_algo:12} rounded by {error:.2%}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])

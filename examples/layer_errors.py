"""How far each way of multiplying NVFP4 weights is from the checkpoint's own arithmetic, layer by layer.

usage: python examples/layer_errors.py CHECKPOINT [TOKENS]
"""

import sys

import numpy as np

import moqext


def main(directory: str, tokens: int) -> None:
    """Prints one line per NVFP4 linear: the error of "fp8" and "fp4" against "exact".

    The activations are normal, as large as the calibration saw them.
    """
    rng = np.random.default_rng()
    with moqext.Checkpoint(directory) as ckpt:
        linears = [linear for layer in ckpt.layers() for linear in layer.linears()]
        for record in linears:
            if record.kind != "linear" or record.quant_algo != "NVFP4":
                continue
            x = rng.standard_normal((tokens, record.shape[1]), dtype=np.float32)
            if "input_scale" in record.tensors:  # calibrated: input_scale = amax / (6 * 448)
                x *= ckpt.tensor(record.tensors["input_scale"]) * 2688 / np.abs(x).max()
            exact = ckpt.load(record, dtype="float32")(x)
            errors = []
            for compute in ("fp8", "fp4"):
                y = ckpt.load(record, dtype="float32", compute=compute)(x)
                errors.append(np.linalg.norm(y - exact) / np.linalg.norm(exact))
            print(f"{record.name:45} fp8 {errors[0]:6.2%}  fp4 {errors[1]:6.2%}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 64)

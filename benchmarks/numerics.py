"""The cost in accuracy of each way to multiply.

`python -m benchmarks.numerics` prints the tables of docs/numerics.md. Everything is computed by
`moqext.reference` in float64, so the figures hold for any kernel and chip, but for the rounding of
the output.
"""

import numpy as np

from moqext import reference

ROWS, COLUMNS, TOKENS = 512, 4096, 128
WEIGHTS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy-tailed": lambda rng, shape: rng.standard_t(3, shape),
    "rows of unlike size": lambda rng, shape: (
        rng.standard_normal(shape) * np.exp2(rng.uniform(-4, 4, (shape[0], 1)))
    ),
}
ACTIVATIONS = ("normal", "with outliers")
CONFIGS = {
    "FP8": ("FP8", "exact"),
    "FP8 by channel and token": ("FP8_PER_CHANNEL_PER_TOKEN", "exact"),
    "NVFP4, exact": ("NVFP4", "exact"),
    "NVFP4, fp8": ("NVFP4", "fp8"),
    "NVFP4, fp4": ("NVFP4", "fp4"),
}
MX_CONFIGS = {
    f"{algo}, {compute}": (algo, compute)
    for algo in ("MXFP8", "MXFP4")
    for compute in ("exact", "fp8", "mxfp8")
}
"""The second table: activations as they are, in e4m3 by token, and with a power of two for 32."""


def activations(kind, rng, shape):
    """One column in a hundred is 30 times as large as the others where there are outliers."""
    x = rng.standard_normal(shape)
    if kind == "with outliers":
        x[:, rng.choice(shape[1], shape[1] // 100, replace=False)] *= 30
    return reference.as_float32(reference.encode(x.astype(np.float32), "bfloat16"))


def apart(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def errors(weights, kind, rng, rows=ROWS, columns=COLUMNS, tokens=TOKENS, configs=CONFIGS):
    """Relative errors of each way: to the layer that is not quantized, and to the exact product."""
    w = (WEIGHTS[weights](rng, (rows, columns)) * 0.02).astype(np.float32)
    x = activations(kind, rng, (tokens, columns))
    outputs = {}
    for name, (algo, compute) in configs.items():
        part = reference.quantize_weight(w, algo)
        if algo == "FP8":
            part["input_scale"] = np.float32(np.abs(x).max() / 448)
        if algo == "NVFP4":
            part["input_scale"] = np.float32(np.abs(x).max() / 2688)
        outputs[name] = reference.linear(x, part, algo, compute=compute, out_dtype="float64")
    whole = x.astype(np.float64) @ w.T.astype(np.float64)
    exact = {algo: outputs[name] for name, (algo, compute) in configs.items() if compute == "exact"}
    return {name: (apart(y, whole), apart(y, exact[configs[name][0]])) for name, y in outputs.items()}


def table(rng, configs, others=()):
    """Prints a line for each kind of layer; `others` are columns of the error to the exact product."""
    heads = [*configs, *(f"{name.split(', ')[1]} to exact" for name in others)]
    print("| weights | activations | " + " | ".join(heads) + " |")
    print("| --- | --- |" + " ---: |" * len(heads))
    for weights in WEIGHTS:
        for kind in ACTIVATIONS:
            found = errors(weights, kind, rng, configs=configs)
            cells = [found[name][0] for name in configs] + [found[name][1] for name in others]
            print(f"| {weights} | {kind} | " + " | ".join(f"{100 * cell:.1f} %" for cell in cells) + " |")


def main():
    rng = np.random.default_rng(1)
    table(rng, CONFIGS, ("NVFP4, fp8", "NVFP4, fp4"))
    print()
    table(rng, MX_CONFIGS)


if __name__ == "__main__":
    main()

"""The cost in accuracy of each way to multiply.

`python -m benchmarks.numerics` prints the table of docs/numerics.md. Everything is computed by
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


def activations(kind, rng, shape):
    """One column in a hundred is 30 times as large as the others where there are outliers."""
    x = rng.standard_normal(shape)
    if kind == "with outliers":
        x[:, rng.choice(shape[1], shape[1] // 100, replace=False)] *= 30
    return reference.as_float32(reference.encode(x.astype(np.float32), "bfloat16"))


def apart(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def errors(weights, kind, rng, rows=ROWS, columns=COLUMNS, tokens=TOKENS):
    """Relative errors of each way to multiply: to the layer that is not quantized, and to exact NVFP4."""
    w = (WEIGHTS[weights](rng, (rows, columns)) * 0.02).astype(np.float32)
    x = activations(kind, rng, (tokens, columns))
    outputs = {}
    for name, (algo, compute) in CONFIGS.items():
        part = reference.quantize_weight(w, algo)
        if algo == "FP8":
            part["input_scale"] = np.float32(np.abs(x).max() / 448)
        if algo == "NVFP4":
            part["input_scale"] = np.float32(np.abs(x).max() / 2688)
        outputs[name] = reference.linear(x, part, algo, compute=compute, out_dtype="float64")
    whole = x.astype(np.float64) @ w.T.astype(np.float64)
    exact = outputs["NVFP4, exact"]
    return {name: (apart(y, whole), apart(y, exact)) for name, y in outputs.items()}


def main():
    rng = np.random.default_rng(1)
    print("| weights | activations | " + " | ".join(CONFIGS) + " | fp8 to exact | fp4 to exact |")
    print("| --- | --- |" + " ---: |" * (len(CONFIGS) + 2))
    for weights in WEIGHTS:
        for kind in ACTIVATIONS:
            found = errors(weights, kind, rng)
            cells = [found[name][0] for name in CONFIGS] + [found["NVFP4, fp8"][1], found["NVFP4, fp4"][1]]
            print(f"| {weights} | {kind} | " + " | ".join(f"{100 * cell:.1f} %" for cell in cells) + " |")


if __name__ == "__main__":
    main()

"""Hashes of what every operation computes, to be compared before and after a change that keeps all bits.

    PYTHONPATH=.:python python tests/record_bits.py [--device cpu|cuda:0] [--output FILE]
    python tests/record_bits.py --compare BEFORE AFTER

A line is a call (layer, sizes, dtype, tokens, kernel, config) and the first half of its results' SHA-256.
Every config of every kernel that can run a call is forced in turn. Data depends on the call's name alone.
"""

import argparse
import hashlib
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from moqext import MoEMethod, ops, reference, route  # noqa: E402
from tests import linear_cases, moe_cases  # noqa: E402

LINEARS = ((256, (96,)), (512, (128, 64)), (1024, (384, 128)), (4096, (1040,)))
TOKENS = (1, 3, 16, 33, 128, 300, 1025)
EXPERTS = ((8, 256, 128, 2), (16, 512, 256, 4), (32, 1024, 384, 8))
EXPERT_TOKENS = (1, 7, 33, 200, 700)
DTYPES = ("bfloat16", "float16", "float32")
ROWS = ((1, 128), (5, 2048), (130, 4096))


def digest(results: Any) -> str:
    """A hash of the bytes of all results."""
    found = hashlib.sha256()
    for result in results if isinstance(results, tuple) else (results,):
        found.update(np.ascontiguousarray(result).view(np.uint8).tobytes())
    return found.hexdigest()[:32]


class Place:
    """A device: takes arrays of the host there, and results back."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.there: Callable[[Any], Any] = (lambda x: x) if device == "cpu" else ops.to_device
        self.back: Callable[[Any], Any] = np.asarray if device == "cpu" else ops.to_host

    def call(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> str:
        """A line of the record; a refusal is one, too."""
        try:
            results = function(*args, **options)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            return f"{name}: {type(error).__name__}"
        if not isinstance(results, tuple):
            results = (results,)
        here = (self.back(x) if hasattr(x, "__dlpack__") else np.asarray(x) for x in results)
        return f"{name}: {digest(tuple(here))}"


def source(name: str) -> np.random.Generator:
    """A generator that the name of a case seeds."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def configs(method: Any, tokens: int) -> Iterator[tuple[str, int]]:
    """Every kernel that can run so many tokens, forced in each of its configs."""
    plan = method._plan
    tell = getattr(plan, "config", None) or getattr(plan, "way", None) or plan.row
    for kernel, chosen, _ in plan.estimates(tokens):
        seen = set()
        for variant in (chosen, *range(1, 40)):
            plan.keep(tokens, kernel, variant)
            found = tell(tokens)[:4]
            if found not in seen:
                seen.add(found)
                yield kernel, variant


def linears(place: Place) -> Iterator[str]:
    """Linears of every algorithm, way to compute, dtype, size and number of tokens."""
    for (algo, compute), dtype, (columns, rows) in product(linear_cases.COMPUTES, DTYPES, LINEARS):
        name = f"linear {algo} {compute} {dtype} {columns}x{'+'.join(map(str, rows))}"
        rng = source(name)
        case = linear_cases.random_case(rng, algo, columns, rows)
        try:
            method = case.method(dtype=dtype, device=place.device, compute=compute)
            params = method.prepare({role: place.there(value) for role, value in case.fused().items()})
        except (ValueError, RuntimeError, NotImplementedError) as error:
            yield f"{name}: {type(error).__name__}"
            continue
        bias = place.there(rng.standard_normal(sum(rows)).astype(np.float32))
        for tokens in TOKENS:
            x = place.there(linear_cases.random_x(rng, (tokens, columns), dtype))
            for kernel, variant in configs(method, tokens):
                yield place.call(f"{name} {tokens} {kernel} {variant}", method, x, params)
            yield place.call(f"{name} {tokens} bias", method, x, params, bias=bias)


def experts(place: Place) -> Iterator[str]:
    """Layers of experts of every algorithm, way to compute, size and number of tokens."""
    cases = product(moe_cases.COMPUTES, ("bfloat16", "float32"), EXPERTS, (("silu", True), ("relu2", False)))
    for (algo, compute), dtype, (count, hidden, inner, top_k), (activation, gated) in cases:
        name = f"experts {algo} {compute} {dtype} {count}x{hidden}x{inner} {activation}"
        rng = source(name)
        stacks = moe_cases.random_stacks(rng, algo, count, hidden, inner, gated=gated)
        kinds = {"top_k": top_k, "activation": activation, "gated": gated, "dtype": dtype, "compute": compute}
        try:
            method = MoEMethod(algo, count, hidden, inner, device=place.device, **kinds)
            params = method.prepare({role: place.there(value) for role, value in stacks.items()})
        except (ValueError, RuntimeError, NotImplementedError) as error:
            yield f"{name}: {type(error).__name__}"
            continue
        for tokens in EXPERT_TOKENS:
            x = place.there(linear_cases.random_x(rng, (tokens, hidden), dtype))
            weights, ids = (
                place.there(value) for value in moe_cases.random_routing(rng, tokens, top_k, count)
            )
            for kernel, variant in configs(method, tokens):
                yield place.call(f"{name} {tokens} {kernel} {variant}", method, x, params, weights, ids)


def others(place: Place) -> Iterator[str]:
    """Quantization, norms, activations, routing and layouts."""
    for dtype, shape in product(DTYPES, ROWS):
        name = f"{dtype} {shape[0]}x{shape[1]}"
        rng = source(name)
        x = place.there(linear_cases.random_x(rng, shape, dtype))
        double = place.there(linear_cases.random_x(rng, (shape[0], 2 * shape[1]), dtype))
        weight = place.there(linear_cases.random_x(rng, shape[1:], dtype))
        named = {"format": "bfloat16"} if dtype == "bfloat16" else {}
        for scheme in ("fp8_tensor", "fp8_token", "fp8_group", "nvfp4", "nvfp4_swizzled"):
            yield place.call(f"quantize {scheme} {name}", ops.quantize, x, scheme, **named)
            yield place.call(
                f"silu_and_mul_quantize {scheme} {name}", ops.silu_and_mul_quantize, double, scheme, **named
            )
            yield place.call(
                f"rms_norm_quantize {scheme} {name}", ops.rms_norm_quantize, x, weight, 1e-5, scheme, **named
            )
        yield place.call(f"silu_and_mul {name}", ops.silu_and_mul, double, **named)
        yield place.call(f"rms_norm {name}", ops.rms_norm, x, weight, 1e-5, **named)
        logits = place.there(rng.standard_normal((shape[0], 128)).astype(np.float32))
        for scoring in ("softmax", "sigmoid"):
            yield place.call(f"route {scoring} {name}", route, logits, 8, scoring=scoring, renormalize=True)
        weights = rng.integers(0, 256, (64, shape[1] // 2), dtype=np.uint8)
        scales = linear_cases.block_scales(rng, 64, shape[1] // 16)
        yield place.call(f"pack_nvfp4 {name}", ops.pack_nvfp4, place.there(weights), place.there(scales))
        yield place.call(f"swizzle {name}", ops.swizzle_block_scales, place.there(scales))
        part = linear_cases.random_part(rng, "FP8_PB_WO", 192, shape[1])
        yield f"reference {name}: {digest(reference.dequantize(part, 'FP8_PB_WO'))}"


RENAMED = (("_few", "_decode"), ("_some", "_medium"), ("_many", "_prefill"))


def compare(before: Path, after: Path) -> int:
    """Prints which calls differ; kernels may have been renamed. Returns how many do."""
    lines = {}
    for path in (before, after):
        pairs = [line.rsplit(": ", 1) for line in path.read_text().splitlines()]
        lines[path] = {}
        for name, bits in pairs:
            for old, new in RENAMED:
                name = name.replace(old, new)
            lines[path][name] = bits
    old, new = lines[before], lines[after]
    common = old.keys() & new.keys()
    different = sorted(name for name in common if old[name] != new[name])
    print(
        f"{len(common)} calls in both, {len(different)} differ; only before: {len(old) - len(common)}, "
        f"only after: {len(new) - len(common)}"
    )
    for name in different[:20]:
        print("  ", name, old[name], new[name])
    return len(different)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--compare", nargs=2, type=Path)
    asked = parser.parse_args()
    if asked.compare:
        sys.exit(compare(*asked.compare) > 0)
    out = asked.output.open("w") if asked.output else sys.stdout
    count, end = 0, time.monotonic() + asked.seconds
    for lines in (others, experts, linears):
        for line in lines(Place(asked.device)):
            print(line, file=out, flush=True)
            count += 1
            if time.monotonic() > end:
                break
    print(f"{count} calls recorded", file=sys.stderr)


if __name__ == "__main__":
    main()

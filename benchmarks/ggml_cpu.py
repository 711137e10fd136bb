"""NVFP4 on the CPU: llama.cpp's product of matrices beside moqext's linear and torch's bfloat16.

ggml, the library that multiplies in llama.cpp, is loaded from a folder with its shared libraries;
docs/lab/measuring.md says how to build them. The weight is quantized by ggml's own function from normal
data. Before anything is measured, ggml's product is compared with one in float64. The three libraries take
turns as in `moqext bench`: one process, as many threads, copies of the weight.

    python -m benchmarks.ggml_cpu --lib FOLDER [--threads T] [--seconds S] [--output FILE]

What the figures do not say is in docs/results/cpu-linears.md: ggml rounds activations to 8 bits, moqext
does not.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

import moqext
from benchmarks import record
from benchmarks.linear_cpu import TOKENS, default_output
from moqext import reference
from moqext.cli.bench import SHAPES, Table
from moqext.tools import bench

NAME = "NVFP4 of llama.cpp"
TYPE_F32, TYPE_NVFP4 = 0, 40
BLOCK, SCALES = 64, 4
"""Values of a block, and the e4m3 scales it begins with; codes follow, 8 bytes for each scale."""
GRAPH_BYTES = 1 << 20
"""Room for the descriptions of one product."""
ERROR = 0.02
"""Root mean square error against float64, relative: rounding x to 8 bits in blocks of 32 makes 0.006."""
FEATURES = ("avx2", "avx512", "avx512_vbmi", "avx512_vnni", "avx512_bf16")


class _Params(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _Plan(ctypes.Structure):
    """struct ggml_cplan"""

    _fields_ = (
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("n_threads", c_int),
        ("threadpool", c_void_p),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("use_ref", c_bool),
    )


class Ggml:
    """The functions of ggml that a product needs, with their types."""

    def __init__(self, folder: Path) -> None:
        base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        for library, name, result, *arguments in (
            (base, "ggml_init", c_void_p, _Params),
            (base, "ggml_free", None, c_void_p),
            (base, "ggml_version", c_char_p),
            (base, "ggml_type_name", c_char_p, c_int),
            (base, "ggml_row_size", c_size_t, c_int, c_int64),
            (base, "ggml_new_tensor_2d", c_void_p, c_void_p, c_int, c_int64, c_int64),
            (base, "ggml_get_data", c_void_p, c_void_p),
            (base, "ggml_mul_mat", c_void_p, c_void_p, c_void_p, c_void_p),
            (base, "ggml_new_graph", c_void_p, c_void_p),
            (base, "ggml_build_forward_expand", None, c_void_p, c_void_p),
            (base, "ggml_quantize_chunk", c_size_t, c_int, *2 * [c_void_p], *3 * [c_int64], c_void_p),
            (cpu, "ggml_cpu_init", None),
            (cpu, "ggml_graph_plan", _Plan, c_void_p, c_int, c_void_p),
            (cpu, "ggml_graph_compute", c_int, c_void_p, POINTER(_Plan)),
            *((cpu, f"ggml_cpu_has_{feature}", c_int) for feature in FEATURES),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.cpu_init()
        if self.type_name(TYPE_NVFP4) != b"nvfp4":
            raise SystemExit(f"{folder}: this ggml has no NVFP4")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # what __init__ has set is found before this

    def about(self) -> dict[str, Any]:
        """The library's version and the instruction sets it was built for."""
        features = [feature for feature in FEATURES if getattr(self, f"cpu_has_{feature}")()]
        return {"version": self.version().decode(), "features": features}


class Arena:
    """Memory of ggml for tensors and graphs, given back with the object."""

    def __init__(self, ggml: Ggml, size: int) -> None:
        self._ggml = ggml
        self.context = ggml.init(_Params(size, None, False))
        if not self.context:
            raise MemoryError(f"ggml: no {size} bytes")

    def __del__(self) -> None:
        if self.context:
            self._ggml.free(self.context)

    def tensor(self, type_: int, rows: int, columns: int) -> tuple[int, np.ndarray]:
        """A tensor and its bytes."""
        tensor = self._ggml.new_tensor_2d(self.context, type_, columns, rows)
        return tensor, self.data(tensor, rows * self._ggml.row_size(type_, columns))

    def data(self, tensor: int, size: int) -> np.ndarray:
        """The first `size` bytes of a tensor."""
        address = ctypes.cast(self._ggml.get_data(tensor), POINTER(ctypes.c_uint8))
        return np.ctypeslib.as_array(address, (size,))


class Products:
    """y = x W^T for one x and every weight of a layer."""

    def __init__(self, ggml: Ggml, weights: Sequence[int], rows: int, x: np.ndarray, threads: int) -> None:
        self._ggml, self._rows, self._tokens = ggml, rows, len(x)
        self._arena = Arena(ggml, len(weights) * (4 * rows * len(x) + GRAPH_BYTES) + x.nbytes + GRAPH_BYTES)
        tensor, data = self._arena.tensor(TYPE_F32, *x.shape)
        data[:] = x.view(np.uint8).reshape(-1)
        self._graphs = {}
        self._work = np.zeros(0, np.uint8)
        for weight in weights:
            y = ggml.mul_mat(self._arena.context, weight, tensor)
            graph = ggml.new_graph(self._arena.context)
            ggml.build_forward_expand(graph, y)
            plan = ggml.graph_plan(graph, threads, None)
            if plan.work_size > self._work.size:  # the first says what all need
                self._work = np.zeros(plan.work_size, np.uint8)
            plan.work_data = self._work.ctypes.data
            self._graphs[weight] = (graph, plan, y)

    def run(self, weight: int) -> np.ndarray:
        """(tokens, rows), float32."""
        graph, plan, y = self._graphs[weight]
        if self._ggml.graph_compute(graph, ctypes.byref(plan)) != 0:
            raise RuntimeError("ggml: the product failed")
        values = self._arena.data(y, 4 * self._rows * self._tokens)
        return values.view(np.float32).reshape(self._tokens, self._rows)


def contestant(
    ggml: Ggml, shape: tuple[int, int], rng: np.random.Generator, threads: int, rotate: int
) -> bench.Contestant:
    """A layer of ggml, its weights quantized from normal data."""
    rows, columns = shape
    size = rows * ggml.row_size(TYPE_NVFP4, columns)
    count = bench.copies(size, rotate)
    arena = Arena(ggml, count * (size + GRAPH_BYTES))
    values = rng.standard_normal(shape, np.float32)
    weights, first = [], None
    for _ in range(count):
        weight, data = arena.tensor(TYPE_NVFP4, rows, columns)
        if first is None:
            ggml.quantize_chunk(TYPE_NVFP4, values.ctypes.data, data.ctypes.data, 0, rows, columns, None)
            first = data
        else:
            data[:] = first
        weights.append(weight)
    check(ggml, weights[0], first, values, rng, threads)
    return bench.Contestant(
        NAME,
        lambda tokens: f"ggml:{ggml.about()['features'][-1]}",
        weights,
        size,
        lambda x: (Products(ggml, weights, rows, x, threads), arena),
        lambda prepared, weight: prepared[0].run(weight),
        value_bytes=4,
    )


def check(
    ggml: Ggml, weight: int, data: np.ndarray, values: np.ndarray, rng: np.random.Generator, threads: int
) -> None:
    """Checks that the weight is near the values it was made from, and ggml's product near the weight's."""
    rows, columns = values.shape
    numbers = decode(data, rows, columns)
    x = rng.standard_normal((3, columns), np.float32)
    products = Products(ggml, [weight], rows, x, threads)  # its memory is that of y
    y = products.run(weight)
    for what, found, expected, most in (
        ("weight", numbers, values.astype(np.float64), 0.15),
        ("product", y, x.astype(np.float64) @ numbers.T, ERROR),
    ):
        error = float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))
        print(f"{rows} x {columns}, {what}: relative error {error:.4f}")
        if not error < most:
            raise SystemExit(f"expected an error of at most {most} in the {what} of ggml, got {error}")


def decode(data: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The numbers of a weight: in a scale's 8 bytes the first 8 of 16 values are the low nibbles."""
    blocks = data.reshape(rows, columns // BLOCK, SCALES + BLOCK // 2)
    scales = reference.decode(blocks[..., :SCALES], "e4m3").astype(np.float64)
    codes = blocks[..., SCALES:].reshape(*scales.shape, BLOCK // SCALES // 2)
    pairs = np.concatenate([codes & 15, codes >> 4], axis=-1)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed = np.concatenate([table, -table])[pairs]
    return (signed * scales[..., None]).reshape(rows, columns)


def main() -> None:
    """Checks, measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lib", type=Path, default=os.environ.get("GGML_LIB"), metavar="FOLDER", help="or GGML_LIB"
    )
    parser.add_argument("--output", type=Path, default=default_output("ggml_cpu"), metavar="FILE")
    parser.add_argument("--threads", type=int, default=moqext.num_threads(), help="default: all")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each shape and number of tokens")
    parser.add_argument("--rotate", type=int, default=bench.rotation(), help="bytes that take turns")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data")
    options = parser.parse_args()
    if options.lib is None:
        parser.error("--lib: expected the folder of libggml-cpu.so")
    ggml = Ggml(options.lib)
    result = bench.measure(
        SHAPES,
        TOKENS,
        ["NVFP4"],
        threads=options.threads,
        seconds=options.seconds,
        rotate=options.rotate,
        seed=options.seed,
        peers=lambda shape, rng: [contestant(ggml, shape, rng, options.threads, options.rotate)],
        report=Table(quiet=False).add,
    )
    rows = [row.as_dict() for row in result.rows]
    record.write("ggml_cpu", rows, options.output, **result.facts, ggml=ggml.about())
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()

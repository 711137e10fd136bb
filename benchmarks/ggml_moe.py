"""A layer of experts in llama.cpp, for `benchmarks.moe_cpu`.

gate and up by `ggml_mul_mat_id`, silu(gate) * up, down by `ggml_mul_mat_id`, as llama.cpp's graphs of such
models have them; the weighted sum over the experts of a token is left out, which favours llama.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.ggml_cpu import GRAPH_BYTES, NAME, TYPE_F32, TYPE_NVFP4, Arena, Ggml
from benchmarks.moe_cpu import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, Batch, Layer
from moqext.tools import bench

TYPE_I32 = 26


class _Stack(NamedTuple):
    """Weights of all experts: ggml's tensor [columns, rows, EXPERTS]."""

    tensor: int
    rows: int


def _extend(ggml: Ggml, folder: Path) -> None:
    """The functions that experts need besides those of a product."""
    base = ctypes.CDLL(str(folder / "libggml-base.so"))
    for name, *arguments in (
        ("ggml_new_tensor_3d", c_void_p, c_int, c_int64, c_int64, c_int64),
        ("ggml_mul_mat_id", c_void_p, c_void_p, c_void_p, c_void_p),
        ("ggml_swiglu_split", c_void_p, c_void_p, c_void_p),
    ):
        function = getattr(base, name)
        function.restype, function.argtypes = c_void_p, arguments
        setattr(ggml, name.removeprefix("ggml_"), function)


def _stack(ggml: Ggml, arena: Arena, rows: int, columns: int, rng: np.random.Generator) -> _Stack:
    """Experts quantized by ggml from normal data, one matrix for all of them."""
    tensor = ggml.new_tensor_3d(arena.context, TYPE_NVFP4, columns, rows, EXPERTS)
    size = rows * ggml.row_size(TYPE_NVFP4, columns)
    data = arena.data(tensor, EXPERTS * size).reshape(EXPERTS, size)
    values = rng.standard_normal((rows, columns), np.float32)
    ggml.quantize_chunk(TYPE_NVFP4, values.ctypes.data, data.ctypes.data, 0, rows, columns, None)
    data[1:] = data[0]
    return _Stack(tensor, rows)


class _Graphs:
    """The layer for some batches, each a graph of its own."""

    def __init__(self, ggml: Ggml, stacks: Sequence[_Stack], batches: Sequence[Batch], threads: int) -> None:
        floats = sum(4 * len(batch.x) * (HIDDEN + TOP_K * (HIDDEN + 4 * INTERMEDIATE)) for batch in batches)
        self._ggml = ggml
        self._arena = Arena(ggml, floats + len(batches) * (GRAPH_BYTES + (1 << 16)))
        self._work = np.zeros(0, np.uint8)
        self.each = [self._graph(stacks, batch, threads) for batch in batches]

    def _graph(self, stacks: Sequence[_Stack], batch: Batch, threads: int) -> tuple[Any, Any, _Graphs]:
        ggml, context, tokens = self._ggml, self._arena.context, len(batch.x)
        gate, up, down = (stack.tensor for stack in stacks)
        x = ggml.new_tensor_3d(context, TYPE_F32, HIDDEN, 1, tokens)
        self._arena.data(x, batch.x.nbytes)[:] = batch.x.view(np.uint8).reshape(-1)
        ids, memory = self._arena.tensor(TYPE_I32, tokens, TOP_K)
        memory[:] = batch.ids.astype(np.int32).view(np.uint8).reshape(-1)
        first = ggml.mul_mat_id(context, gate, x, ids)
        second = ggml.mul_mat_id(context, up, x, ids)
        y = ggml.mul_mat_id(context, down, ggml.swiglu_split(context, first, second), ids)
        graph = ggml.new_graph(context)
        ggml.build_forward_expand(graph, y)
        plan = ggml.graph_plan(graph, threads, None)
        if plan.work_size > self._work.size:
            self._work = np.zeros(plan.work_size, np.uint8)
        plan.work_data = self._work.ctypes.data
        return graph, plan, self


def ggml_layer(folder: Path, rng: np.random.Generator, threads: int) -> Layer:
    """llama.cpp's layer; a call computes one of the graphs of its batches."""
    ggml = Ggml(folder)
    _extend(ggml, folder)
    one = INTERMEDIATE * ggml.row_size(TYPE_NVFP4, HIDDEN)
    other = HIDDEN * ggml.row_size(TYPE_NVFP4, INTERMEDIATE)
    arena = Arena(ggml, EXPERTS * (2 * one + other) + GRAPH_BYTES)
    stacks = [
        _stack(ggml, arena, INTERMEDIATE, HIDDEN, rng),
        _stack(ggml, arena, INTERMEDIATE, HIDDEN, rng),
        _stack(ggml, arena, HIDDEN, INTERMEDIATE, rng),
    ]

    def call(_: Any, made: Any) -> None:
        graph, plan, _graphs = made
        if ggml.graph_compute(graph, ctypes.byref(plan)) != 0:
            raise RuntimeError("ggml: the layer failed")

    contestant = bench.Contestant(
        NAME, lambda tokens: "ggml", [], 2 * one + other, lambda x: arena, call, value_bytes=4
    )
    return Layer(contestant, lambda batches: _Graphs(ggml, stacks, batches, threads).each)

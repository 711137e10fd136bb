"""Codes and scales of weights, some rows or experts at a time: on the processor, or on a CUDA device."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from queue import LifoQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moqext import _C, ops
from moqext.algorithms import ALGORITHMS, names_where
from moqext.ops.quantize_weights import ScaleSearch, weight_amax
from moqext.reader.matrices import to_float32
from moqext.tools.quantize.weights import PIECE_BYTES, Weight

PACKED_ALONG_INPUT = names_where(lambda algorithm: algorithm.second == "parts")
"""Algorithms whose groups in a stack [experts, in, out] run along the input; those of others along the last
axis."""

BATCH_BYTES = 32 << 20
"""Bytes of a weight that go to a device at once."""

WORKERS = 4
"""Threads that have a batch each: one reads while others copy, quantize and write."""


class Quantizer(Protocol):
    """Quantizes weights."""

    @property
    def workers(self) -> int:
        """Threads that may use it at a time."""

    def amax(self, weight: Weight) -> float:
        """The largest magnitude of a weight.

        Raises:
            CheckpointError: it is infinite or NaN.
        """

    def batches(
        self, weight: Weight, algo: str, amax: float | None, search: ScaleSearch | None
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields what `ops.quantize_weight` makes of some rows or experts, valid until it yields again.

        Raises:
            CheckpointError: a value is infinite or NaN.
        """


class HostQuantizer:
    """Quantizes on the processor, whose kernels have all its cores."""

    workers = 1

    def amax(self, weight: Weight) -> float:
        """See `Quantizer`."""
        return max(amax for _, amax in weight.measured())

    def batches(
        self, weight: Weight, algo: str, amax: float | None, search: ScaleSearch | None
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """See `Quantizer`."""
        for piece in weight.pieces():
            yield ops.quantize_weight(_as_matrix(piece, algo, weight), algo, amax=amax, search=search)


class DeviceQuantizer:
    """Quantizes on a CUDA device, with the same bits."""

    workers = WORKERS

    def __init__(self, device: str, most: int) -> None:
        """Holds no memory yet.

        Args:
            device: "cuda:N".
            most: bytes of the largest tensor. All that is in memory is not three times as much, unless one
                expert is a large part of its stack.
        """
        self._device = device
        self._most = max(PIECE_BYTES, min(BATCH_BYTES, most // WORKERS))
        self._lanes: LifoQueue[_Lane] = LifoQueue()
        for _ in range(WORKERS):
            self._lanes.put(_Lane(device))

    def amax(self, weight: Weight) -> float:
        """See `Quantizer`."""
        with self._lane() as lane:
            return max(amax for _, amax in self._measured(lane, weight, weight.unchecked()))

    def batches(
        self, weight: Weight, algo: str, amax: float | None, search: ScaleSearch | None
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """See `Quantizer`."""
        matrices = (_as_matrix(piece, algo, weight) for piece in weight.unchecked())
        with self._lane() as lane:
            for there, _ in self._measured(lane, weight, matrices):
                made = ops.quantize_weight(there, algo, amax=amax, search=search)
                yield {role: lane.fetch(role, tensor) for role, tensor in made.items()}

    @contextmanager
    def _lane(self) -> Iterator["_Lane"]:
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    def _measured(
        self, lane: "_Lane", weight: Weight, pieces: Iterable[NDArray[Any]]
    ) -> Iterator[tuple[Any, float]]:
        """Rows on the device, of several pieces unless these are experts, and their largest magnitude."""
        memory, filled, dtype, columns = np.empty(0, np.uint8), 0, np.dtype(np.uint8), 1

        def send() -> tuple[Any, float]:
            there = ops.to_device(memory[:filled].view(dtype).reshape(-1, columns), self._device)
            return there, weight.refuse_infinite(weight_amax(there))

        for piece in pieces:
            content = piece.reshape(-1).view(np.uint8)
            if filled and (weight.is_stack or filled + content.size > memory.size):
                yield send()
                filled = 0
            if not filled:
                more = 0 if weight.is_stack else min(self._most, weight.nbytes)
                memory = lane.memory("piece", max(content.size, more))
            memory[filled : filled + content.size] = content
            filled, dtype, columns = filled + content.size, piece.dtype, piece.shape[-1]
        if filled:
            yield send()


class _Lane:
    """Page-locked memory of one thread: a batch on its way to the device, and what comes back."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._memory: dict[str, NDArray[np.uint8]] = {}

    def memory(self, what: str, nbytes: int) -> NDArray[np.uint8]:
        """The first bytes of the memory for something, which is made when it is first so large."""
        have = self._memory.get(what)
        if have is None or have.size < nbytes:
            self._memory.pop(what, None)
            have = np.frombuffer(memoryview(_C.PinnedMemory(nbytes, self._device)), np.uint8)
            self._memory[what] = have
        return have[:nbytes]

    def fetch(self, role: str, tensor: Any) -> NDArray[Any]:
        """A result of `ops.quantize_weight`, a single scale in memory of its own."""
        if role == "weight_scale_2":
            return np.asarray(tensor)
        if not tensor.shape:
            return np.asarray(ops.to_host(tensor))
        carrier = np.dtype(np.float32 if tensor.dtype == "float32" else np.uint8)
        memory = self.memory(role, prod(tensor.shape) * carrier.itemsize)
        return np.asarray(ops.to_host(tensor, memory.view(carrier).reshape(tensor.shape)))


def _as_matrix(piece: NDArray[Any], algo: str, weight: Weight) -> NDArray[Any]:
    """Rows that have the groups of the algorithm: a piece of a matrix, or of an expert [1, in, out]."""
    if not weight.is_stack:
        return piece
    if algo in PACKED_ALONG_INPUT:
        return np.ascontiguousarray(piece[0].T)
    if ALGORITHMS[algo].scales == "rows":
        return piece.reshape(1, -1)  # one scale for each expert
    matrix = piece.reshape(-1, piece.shape[-1])
    if ALGORITHMS[algo].scales == "tensor" and weight.dtype != "F32":  # ModelOpt divides stacks in float32
        return to_float32(matrix, weight.dtype)
    return matrix

"""Programmatic edges of a captured CUDA graph: counted, and made ordinary ones by a policy.

Where a kernel is launched programmatically, capture gives it an edge by which it may begin before its
predecessor has ended. As an ordinary edge it begins when the predecessor has ended, as without the launch
attribute. So one process measures every policy, on the same kernels and data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

PROGRAMMATIC = 1
"""CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC."""

Pair = tuple[int, int]
"""An edge: the node that comes first, and the one that follows."""

Policy = Callable[[Sequence[Pair]], Sequence[Pair]]
"""Returns the programmatic edges that become ordinary; all are given in the order in which they run."""


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class Edges(NamedTuple):
    """How many edges a graph has left.

    Attributes:
        all: Of any kind.
        captured: Programmatic ones as captured.
        kept: Those that are programmatic still.
    """

    all: int
    captured: int
    kept: int


def nothing(edges: Sequence[Pair]) -> Sequence[Pair]:
    """Every edge stays as captured."""
    del edges
    return ()


def everything(edges: Sequence[Pair]) -> Sequence[Pair]:
    """No programmatic launch at all."""
    return edges


def behind_strangers(edges: Sequence[Pair]) -> Sequence[Pair]:
    """The edges out of kernels that were not launched programmatically themselves.

    Such a kernel says nothing of when its successor may begin.
    """
    knowing = {after for _, after in edges}
    return [edge for edge in edges if edge[0] not in knowing]


def only(place: int, each: int) -> Policy:
    """A policy by which one of each `each` edges stays, the one at `place`.

    The last layer of the graph has all of its edges.
    """

    def policy(edges: Sequence[Pair]) -> Sequence[Pair]:
        missing = -len(edges) % each  # of the first layer, whose first kernel follows nobody
        return [edge for number, edge in enumerate(edges, missing) if number % each != place]

    return policy


def in_order(edges: Sequence[Pair]) -> list[Pair]:
    """The edges of a graph whose nodes are one line, from its beginning.

    Raises:
        ValueError: They are not.
    """
    following = dict(edges)
    begin = set(following) - set(following.values())
    if len(following) != len(edges) or len(set(following.values())) != len(edges) or len(begin) > 1:
        raise ValueError(f"expected nodes one behind the other, got {len(edges)} edges with branches")
    order = []
    node = next(iter(begin), 0)
    while node in following:
        order.append((node, following[node]))
        node = following[node]
    return order


def edges_of(graph: int) -> dict[Pair, EdgeData]:
    """The edges of a captured graph, branched or not, in the order in which they were made.

    Args:
        graph: CUgraph.

    Raises:
        OSError: There is no driver.
        RuntimeError: The driver refuses.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    _check("cuGraphGetEdges", driver.cuGraphGetEdges_v2(handle, None, None, None, ctypes.byref(count)))
    nodes = ctypes.c_void_p * count.value
    before, after, data = nodes(), nodes(), (EdgeData * count.value)()
    status = driver.cuGraphGetEdges_v2(handle, before, after, data, ctypes.byref(count))
    _check("cuGraphGetEdges", status)
    return {(before[number] or 0, after[number] or 0): data[number] for number in range(count.value)}


def apply(graph: int, policy: Policy) -> Edges:
    """Changes a captured graph that is not instantiated yet.

    Args:
        graph: CUgraph.
        policy: Which programmatic edges become ordinary.

    Raises:
        OSError: There is no driver.
        ValueError: The graph's nodes are not one behind the other.
        RuntimeError: The driver refuses.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    every = edges_of(graph)
    found = {pair: every[pair] for pair in in_order(list(every)) if every[pair].type == PROGRAMMATIC}
    ordinary = policy(list(found))
    for pair in ordinary:
        one, other = (ctypes.c_void_p * 1)(pair[0]), (ctypes.c_void_p * 1)(pair[1])
        for verb, edge in (("Remove", found[pair]), ("Add", EdgeData())):
            call = getattr(driver, f"cuGraph{verb}Dependencies_v2")
            status = call(ctypes.c_void_p(graph), one, other, ctypes.byref(edge), ctypes.c_size_t(1))
            _check(f"cuGraph{verb}Dependencies", status)
    return Edges(len(every), len(found), len(found) - len(ordinary))


def _check(what: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{what}: CUDA error {status}")

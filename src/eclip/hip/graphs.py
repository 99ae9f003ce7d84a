"""Captured HIP graphs: read into rows of nodes, and built again as linear graphs.

A segment is a new graph of the piece's nodes, one after another. A segment is not a cut clone, as
on CUDA: in ROCm 5.2 nodes of a clone belong to no graph, and removing a node crashes. Segments are
linear, because HIP launches further branches on streams of its own, without the lane's mask; any
extra edge counts as a branch. Nodes that HIP cannot read back (above all copies) cannot be built
again: a graph with such a node runs as captured, whole and on one lane, and must be linear.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from eclip.core.trace import Kernel
from eclip.errors import DeviceError
from eclip.gpu.pieces import (
    KERNEL,
    CapturedGraph,
    Node,
    Piece,
    in_launch_order,
    kernels_beside,
)
from eclip.hip.api import (
    NODE_EMPTY,
    NODE_KERNEL,
    NODE_MEMSET,
    Hip,
    KernelNodeParams,
    MemsetParams,
)

# Kinds of nodes that HIP can read back, so that they can be built again.
_KINDS = {NODE_KERNEL: KERNEL, NODE_MEMSET: "MEMSET", NODE_EMPTY: "EMPTY"}
_UNREADABLE = "UNREADABLE"


class HipGraph(CapturedGraph):
    """A captured graph. The owner of the capture keeps its kernels' arguments alive."""

    def __init__(self, hip: Hip, raw: int) -> None:
        handles, edges = _nodes(hip, raw), _edges(hip, raw)
        ordered = in_launch_order(handles, edges)
        kinds = [_KINDS.get(hip.node_kind(node), _UNREADABLE) for node in ordered]
        unreadable = _UNREADABLE in kinds
        if unreadable and set(edges) != set(pairwise(ordered)):
            raise DeviceError(
                "the captured graph has copies and branches: HIP can neither read copies back nor "
                "keep branches on a lane; capture the model on one stream"
            )
        super().__init__(
            raw,
            [Node(*given) for given in zip(ordered, kinds, kernels_beside(kinds), strict=True)],
            "a part that HIP cannot read back" if unreadable else "",
        )

    def kernels(self, hip: Hip) -> tuple[Kernel, ...]:
        return tuple(_read_kernel(hip, node) for node in self.nodes if node.kind == KERNEL)


def instantiate(hip: Hip, raw: int) -> int:
    return hip.made("hipGraphInstantiateWithFlags", raw, 0)


def instantiate_piece(hip: Hip, graph: CapturedGraph, piece: Piece) -> int:
    """Its nodes once more, one after another."""
    built = hip.made("hipGraphCreate", 0)
    try:
        before = (ctypes.c_void_p * 1)()
        for place in piece.nodes:
            node = graph.nodes[place]
            if node.kind == "EMPTY":
                continue
            before[0] = _add_again(hip, built, node, before if before[0] else None)
        return instantiate(hip, built)
    finally:
        hip.call("hipGraphDestroy", built)


def _add_again(
    hip: Hip, built: int, node: Node, before: ctypes.Array[ctypes.c_void_p] | None
) -> int:
    """The same kernel or memset once more, behind the one before it."""
    is_kernel = node.kind == KERNEL
    params: ctypes.Structure = KernelNodeParams() if is_kernel else MemsetParams()
    kind = "Kernel" if is_kernel else "Memset"
    hip.call(f"hipGraph{kind}NodeGetParams", node.handle, ctypes.byref(params))
    waits = 0 if before is None else 1
    return hip.made(f"hipGraphAdd{kind}Node", built, before, waits, ctypes.byref(params))


def _nodes(hip: Hip, raw: int) -> list[int]:
    count = ctypes.c_size_t()
    hip.call("hipGraphGetNodes", raw, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    hip.call("hipGraphGetNodes", raw, nodes, ctypes.byref(count))
    return _handles(nodes)


def _edges(hip: Hip, raw: int) -> list[tuple[int, int]]:
    count = ctypes.c_size_t()
    hip.call("hipGraphGetEdges", raw, None, None, ctypes.byref(count))
    if count.value == 0:
        return []
    sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    hip.call("hipGraphGetEdges", raw, sources, targets, ctypes.byref(count))
    return list(zip(_handles(sources), _handles(targets), strict=True))


def _handles(array: Iterable[Any]) -> list[int]:
    return [int(handle or 0) for handle in array]


def _read_kernel(hip: Hip, node: Node) -> Kernel:
    params = KernelNodeParams()
    hip.call("hipGraphKernelNodeGetParams", node.handle, ctypes.byref(params))
    return Kernel(
        name=hip.kernel_name(params.func),
        grid=(params.grid.x, params.grid.y, params.grid.z),
        block=(params.block.x, params.block.y, params.block.z),
        shared_bytes=params.shared_bytes,
    )

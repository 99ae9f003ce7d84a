"""Captured graphs: read into traces, re-homed to lanes, instantiated.

Re-homing works on a clone, so that one capture serves any number of plans. An executable cannot
change its nodes' contexts: there is one for every plan variant, kept until the session closes.
A kernel node can move if it holds a kernel, which belongs to no context, and not a function, which
belongs to one: ``kernel_of`` may give the former for the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eclip.core.trace import Kernel
from eclip.cuda.driver import call, cu
from eclip.errors import DeviceError
from eclip.gpu.pieces import (
    KERNEL,
    CapturedGraph,
    Node,
    Piece,
    in_launch_order,
    kernels_beside,
)

# What can be moved between contexts, and loops, which cannot: a graph with one runs whole on the
# lane it was captured on. A graph with any other kind of node is refused.
_KINDS = (KERNEL, "MEMSET", "MEMCPY", "EMPTY", "CONDITIONAL")


class CudaGraph(CapturedGraph):
    def __init__(self, raw: int, kernel_of: Callable[[Any], Any] = lambda function: None) -> None:
        graph = cu.CUgraph(raw)
        handles = _in_launch_order(graph)
        kinds = [_kind(handle) for handle in handles]
        nodes = []
        for handle, kind, kernel in zip(handles, kinds, kernels_beside(kinds), strict=True):
            instead = _instead(handle, kernel_of) if kind == KERNEL else None
            copied = _copied(handle) if kind == "MEMCPY" else (0, False)
            nodes.append(Node(handle, kind, kernel, instead, *copied))
        super().__init__(graph, nodes, "a loop" if "CONDITIONAL" in kinds else "")

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(_read_kernel(node) for node in self.nodes if node.kind == KERNEL)


def _instead(handle: Any, kernel_of: Callable[[Any], Any]) -> Any:
    params = call(cu.cuGraphKernelNodeGetParams, handle)
    return None if int(params.kern) else kernel_of(params.func)


def _in_launch_order(graph: Any) -> list[Any]:
    _, count = call(cu.cuGraphGetNodes, graph)
    nodes, count = call(cu.cuGraphGetNodes, graph, count)
    edges = call(cu.cuGraphGetEdges, graph)
    sources, targets, _, total = call(cu.cuGraphGetEdges, graph, edges[-1])
    handle_of = {int(node): node for node in nodes[:count]}
    pairs = zip(map(int, sources[:total]), map(int, targets[:total]), strict=True)
    return [handle_of[node] for node in in_launch_order(list(handle_of), list(pairs))]


def _kind(handle: Any) -> str:
    kind: str = call(cu.cuGraphNodeGetType, handle).name.removeprefix("CU_GRAPH_NODE_TYPE_")
    if kind not in _KINDS:
        raise DeviceError(f"a captured graph with a {kind} node cannot be placed on lanes")
    return kind


def _copied(handle: Any) -> tuple[int, bool]:
    """The bytes of a copy in one piece between host and device, and whether it is to the device; no
    bytes: it is another kind."""
    params = call(cu.cuGraphMemcpyNodeGetParams, handle)
    from_host = _on_host(params.srcMemoryType, params.srcDevice)
    to_host = _on_host(params.dstMemoryType, params.dstDevice)
    if from_host == to_host or (params.Height, params.Depth) != (1, 1):
        return 0, False
    return int(params.WidthInBytes), from_host


def _on_host(kind: Any, pointer: Any) -> bool:
    if kind == cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED:
        asked = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        kind = cu.CUmemorytype(int(call(cu.cuPointerGetAttribute, asked, pointer)))
    return bool(kind == cu.CUmemorytype.CU_MEMORYTYPE_HOST)


def _read_kernel(node: Node) -> Kernel:
    params = call(cu.cuGraphKernelNodeGetParams, node.handle)
    if int(params.kern):
        name = call(cu.cuKernelGetName, params.kern)
    else:
        name = call(cu.cuFuncGetName, params.func)
    # Held by a name: its parts point into it and dangle once it is gone.
    value = call(
        cu.cuGraphKernelNodeGetAttribute,
        node.handle,
        cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
    )
    cluster = value.clusterDim
    return Kernel(
        name=name.decode(),
        grid=(params.gridDimX, params.gridDimY, params.gridDimZ),
        block=(params.blockDimX, params.blockDimY, params.blockDimZ),
        shared_bytes=params.sharedMemBytes,
        cluster=max(1, cluster.x) * max(1, cluster.y) * max(1, cluster.z),
    )


class Executable:
    """An instantiated graph; owns it."""

    def __init__(self, graph: Any) -> None:
        self.handle = call(cu.cuGraphInstantiate, graph, 0)

    def upload(self, stream: Any) -> None:
        call(cu.cuGraphUpload, self.handle, stream)

    def close(self) -> None:
        call(cu.cuGraphExecDestroy, self.handle)


def place_whole(
    captured: CapturedGraph, contexts: Sequence[Any], priorities: Sequence[int] | None = None
) -> Executable:
    """A graph with its kernels in these contexts, one context per kernel."""
    return place_segment(captured, contexts, range(len(contexts)), priorities)


def place_segment(
    captured: CapturedGraph,
    contexts: Sequence[Any],
    kernels: range,
    priorities: Sequence[int] | None = None,
) -> Executable:
    """A graph of these consecutive kernels, with their memory nodes."""
    (executable,) = place_segments(captured, contexts, [kernels], priorities)
    return executable


def place_segments(
    captured: CapturedGraph,
    contexts: Sequence[Any],
    segments: Sequence[range],
    priorities: Sequence[int] | None = None,
) -> list[Executable]:
    """A graph for each range of consecutive kernels, with their memory nodes."""
    return place_pieces(captured, contexts, [captured.piece(own) for own in segments], priorities)


def place_pieces(
    captured: CapturedGraph,
    contexts: Sequence[Any],
    pieces: Sequence[Piece],
    priorities: Sequence[int] | None = None,
) -> list[Executable]:
    """A graph for each piece.

    The kernels of a piece are consecutive, and pieces are given in launch order. ``priorities`` are
    CUDA's, one per kernel; a kernel with 0 keeps its captured priority, which is the least.
    """
    if len(contexts) != captured.kernel_count:
        raise DeviceError(
            f"{len(contexts)} contexts given for a graph of {captured.kernel_count} kernels"
        )
    if captured.atomic:
        raise DeviceError("a graph with a loop cannot be placed on lanes: capture it there")

    def home(node: Node, twin: Any, part: range | None) -> None:
        _home(node, twin, contexts[node.kernel], part)
        if priorities is not None and node.kind == KERNEL and priorities[node.kernel]:
            _prefer(twin, priorities[node.kernel])

    made: list[Executable] = []
    try:
        every = {place: (node, node.handle) for place, node in enumerate(captured.nodes)}
        _cut(captured.graph, every, pieces, home, made)
    except BaseException:
        for executable in made:
            executable.close()
        raise
    return made


def _cut(
    graph: Any,
    nodes: Mapping[int, tuple[Node, Any]],  # with their handles in this graph
    pieces: Sequence[Piece],
    home: Callable[[Node, Any, range | None], None],
    made: list[Executable],
) -> None:
    """Halves first, and these again: a clone of everything for each piece would be their number
    times the graph."""
    clone = call(cu.cuGraphClone, graph)
    try:
        wanted = {place for piece in pieces for place in piece.nodes}
        kept = {}
        for place, (node, handle) in nodes.items():
            twin = call(cu.cuGraphNodeFindInClone, handle, clone)
            if place in wanted:
                kept[place] = (node, twin)
            else:
                call(cu.cuGraphDestroyNode, twin)
        if len(pieces) > 1:
            half = len(pieces) // 2
            _cut(clone, kept, pieces[:half], home, made)
            _cut(clone, kept, pieces[half:], home, made)
            return
        for node, twin in kept.values():
            home(node, twin, pieces[0].part)
        made.append(Executable(clone))
    finally:
        call(cu.cuGraphDestroy, clone)


def _home(node: Node, twin: Any, context: Any, part: range | None = None) -> None:
    """Move a node to a context; of a copy, only these bytes."""
    if node.kind == KERNEL:
        params = call(cu.cuGraphKernelNodeGetParams, node.handle)
        if not int(params.kern):
            if node.instead is None:
                raise DeviceError(
                    f"kernel {call(cu.cuFuncGetName, params.func).decode()} was loaded into one "
                    f"context by its launcher and its binary is not found, so it cannot be placed "
                    f"on a lane; leave that part of the model out of torch.compile"
                )
            params.kern = node.instead
        params.func = cu.CUfunction(0)
        params.ctx = context
        call(cu.cuGraphKernelNodeSetParams, twin, params)
    elif node.kind == "MEMSET":
        wanted = cu.CUgraphNodeParams()
        wanted.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
        given = call(cu.cuGraphMemsetNodeGetParams, node.handle)
        for field in ("dst", "pitch", "value", "elementSize", "width", "height"):
            setattr(wanted.memset, field, getattr(given, field))
        wanted.memset.ctx = context
        call(cu.cuGraphNodeSetParams, twin, wanted)
    elif node.kind == "MEMCPY":
        wanted = cu.CUgraphNodeParams()
        wanted.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
        params = call(cu.cuGraphMemcpyNodeGetParams, node.handle)
        if part is not None:
            params.srcXInBytes += part.start
            params.dstXInBytes += part.start
            params.WidthInBytes = len(part)
        wanted.memcpy.copyParams = params
        wanted.memcpy.copyCtx = context
        call(cu.cuGraphNodeSetParams, twin, wanted)


def _prefer(twin: Any, priority: int) -> None:
    """A node has a priority of its own: the stream that its graph is launched on gives it none."""
    value = cu.CUkernelNodeAttrValue()
    value.priority = priority
    wanted = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    call(cu.cuGraphKernelNodeSetAttribute, twin, wanted, value)


def blocks_per_unit(node: Node) -> int:
    """How many blocks of a kernel one SM holds at once."""
    params = call(cu.cuGraphKernelNodeGetParams, node.handle)
    threads = params.blockDimX * params.blockDimY * params.blockDimZ
    function = _function(params)
    return int(
        call(
            cu.cuOccupancyMaxActiveBlocksPerMultiprocessor,
            function,
            threads,
            params.sharedMemBytes,
        )
    )


def _function(params: Any) -> Any:
    return call(cu.cuKernelGetFunction, params.kern) if int(params.kern) else params.func


def fits(node: Node, lane_stream: Any) -> bool:
    """Whether a kernel's clusters can be resident on a lane; without clusters it always fits."""
    params = call(cu.cuGraphKernelNodeGetParams, node.handle)
    dimension = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = call(cu.cuGraphKernelNodeGetAttribute, node.handle, dimension)
    if value.clusterDim.x * value.clusterDim.y * value.clusterDim.z <= 1:
        return True
    attribute = cu.CUlaunchAttribute()
    attribute.id = dimension
    attribute.value = value
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (
        params.gridDimX,
        params.gridDimY,
        params.gridDimZ,
    )
    config.blockDimX, config.blockDimY, config.blockDimZ = (
        params.blockDimX,
        params.blockDimY,
        params.blockDimZ,
    )
    config.sharedMemBytes = params.sharedMemBytes
    config.hStream = lane_stream
    config.attrs = [attribute]
    config.numAttrs = 1
    status, clusters = cu.cuOccupancyMaxActiveClusters(_function(params), config)
    if status == cu.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE:
        return False
    return status == cu.CUresult.CUDA_SUCCESS and int(clusters) > 0

"""Loops in graphs: a while node put into the graph that a stream is being captured into.

The condition, the node and every kernel of the body belong to the context of the stream's lane;
with a lane of a green context nothing else can be instantiated. Such a graph cannot be cloned, so
it runs whole on the lane it was captured on, and is captured again for another one.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eclip.cuda.driver import call, cu
from eclip.errors import DeviceError

_ASSIGN_DEFAULT = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT: every launch starts from the default value
_kept: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("kept", default=None)


@contextlib.contextmanager
def keeping() -> Iterator[list[Any]]:
    """Collect the objects that must live as long as the graph captured in the block."""
    kept: list[Any] = []
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def keep_alive(thing: Any) -> None:
    """Keep ``thing`` alive as long as the graph being captured."""
    kept = _kept.get()
    if kept is None:
        raise DeviceError(
            "a loop needs memory that lives as long as its graph; capture with "
            "eclip.capture.torch.capture or inside eclip.cuda.conditional.keeping()"
        )
    kept.append(thing)


def green_context_of(stream: Any) -> Any | None:
    green = call(cu.cuStreamGetGreenCtx, stream)
    return green if int(green) else None


def context_of(stream: Any) -> Any:
    """The context that nodes captured on this stream live in."""
    green = green_context_of(stream)
    return call(cu.cuCtxGetCurrent) if green is None else call(cu.cuCtxFromGreenCtx, green)


def units_of(stream: Any) -> int:
    """How many SMs the stream's kernels can run on."""
    kind = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    return int(call(cu.cuCtxGetDevResource, context_of(stream), kind).sm.smCount)


@contextlib.contextmanager
def neighbour(stream: Any) -> Iterator[Any]:
    """Another stream on the same lane, while the block lasts."""
    non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
    green = green_context_of(stream)
    if green is None:
        made = call(cu.cuStreamCreate, non_blocking)
    else:
        made = call(cu.cuGreenCtxStreamCreate, green, non_blocking, 0)
    try:
        yield made
    finally:
        call(cu.cuStreamDestroy, made)


def is_capturing(stream: Any) -> bool:
    status = call(cu.cuStreamIsCapturing, stream)
    return bool(status == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE)


def new_condition(stream: Any) -> int:
    """A condition, false at the start of every launch, for kernels to set and a loop to read."""
    graph = _captured(stream)[0]
    context = context_of(stream)
    handle = call(cu.cuGraphConditionalHandleCreate, graph, context, 0, _ASSIGN_DEFAULT)
    return int(handle)


@contextlib.contextmanager
def loop(stream: Any, condition: int) -> Iterator[Any]:
    """A loop in a captured graph. Work captured on the given stream repeats while ``condition``
    holds.

    The condition is read after earlier work on ``stream``, and after every turn.
    """
    graph, dependencies, edges = _captured(stream)
    wanted = cu.CUgraphNodeParams()
    wanted.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    wanted.conditional.handle = cu.CUgraphConditionalHandle(condition)
    wanted.conditional.type = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    wanted.conditional.size = 1
    wanted.conditional.ctx = context_of(stream)
    node = call(cu.cuGraphAddNode, graph, dependencies, edges, len(dependencies), wanted)
    body = cu.CUgraph(int(wanted.conditional.phGraph_out[0]))
    _depend_on(stream, [node])
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with neighbour(stream) as inner:
        call(cu.cuStreamBeginCaptureToGraph, inner, body, None, None, 0, mode)
        try:
            yield inner
        finally:
            # Even after an error: a stream that is left capturing poisons the thread.
            status, _ = cu.cuStreamEndCapture(inner)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the body of a loop could not be captured: {status.name}")


def side_by_side(stream: Any, *parts: Callable[[], None]) -> None:
    """In a capture: put parts onto the stream that may run beside each other. Later work waits for
    all parts."""
    _, before, _ = _captured(stream)
    ends: list[Any] = []
    for part in parts:
        _depend_on(stream, before)
        part()
        ends += _captured(stream)[1]
    _depend_on(stream, ends)


def _depend_on(stream: Any, nodes: Sequence[Any]) -> None:
    """Make the next work captured on the stream wait for exactly these nodes."""
    replace = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    given = list(nodes) or None
    call(cu.cuStreamUpdateCaptureDependencies, stream, given, None, len(nodes), int(replace))


def _captured(stream: Any) -> tuple[Any, list[Any], list[Any] | None]:
    """The graph that the stream is captured into, and the dependencies of its next node."""
    status, _, graph, dependencies, edges, count = call(cu.cuStreamGetCaptureInfo, stream)
    if status != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise DeviceError("a loop can be put only into a stream that is being captured")
    found = list(dependencies[:count]) if count else []
    return graph, found, list(edges[:count]) if edges and count else None

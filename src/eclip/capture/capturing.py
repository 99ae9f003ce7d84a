"""Torch's captures and the memory pools that belong to them, given back in any state.

Torch's allocator keeps a list of the captures under way. In torch 2.11 a capture that fails stays
on it for good (pytorch#180395, mended in 2.12), with two consequences. The destructor of
``torch.cuda.MemPool`` insists that the list is empty and ends the process if it is not. And the
entry points at the graph that failed: a later graph at the same address takes its memory from the
failed one's pool, where another graph may work at the same time. So a failed capture is taken off
the list here, and the memory of a loop's body is no ``MemPool``: what gives it back frees nothing
itself, asserts nothing about captures and cannot meet a CUDA error.

Torch also keeps a workspace of cuBLAS for every stream that it has seen, for good: 33 MiB on an
H200 for every lane and every loop. In a capture it lies in the capture's pool, which could then
never be given back. So torch is told to forget its workspaces before a capture and after it, as
torch's own CUDA graph trees do: a capture takes one from its pool, and nobody else uses that one.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from eclip.core.device import Closing
from eclip.cuda.conditional import keeping
from eclip.errors import DeviceError
from eclip.gpu.closing import never_free


@contextlib.contextmanager
def capturing(graph: Any, stream: Any) -> Iterator[list[Any]]:
    """What the block launches on the stream becomes the graph; gives what must live as long as it.

    If the block fails, the allocator and the generator are as they were before.
    """
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    state = generator.clone_state()  # a capture that fails leaves the generator in capture mode
    pool = torch.cuda.graph_pool_handle()
    with _no_collection(), _own_workspaces():
        try:
            with (
                keeping() as kept,
                torch.cuda.graph(
                    graph,
                    pool=pool,
                    stream=stream,
                    # Loops of other threads may wait meanwhile: a session beside this one serves.
                    capture_error_mode="thread_local",
                ),
            ):
                yield kept
        except BaseException:
            generator.graphsafe_set_state(state)
            _take_off_the_list(graph, device, pool)
            raise


def _take_off_the_list(graph: Any, device: int, pool: Any) -> None:
    with contextlib.suppress(RuntimeError):
        graph.reset()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except (RuntimeError, AttributeError):  # not on it (or an older torch, with other names)
        return
    torch._C._cuda_releasePool(device, pool)
    never_free(graph)  # the allocator of pinned memory has such a list too, out of our reach


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What a collection finds may be what CUDA forbids during a capture: graphs, memory, lanes."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def forget_workspaces() -> None:
    """Those of cuBLAS, of all streams."""
    torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """What the block takes as workspaces of cuBLAS lies in memory of the block's own."""
    forget_workspaces()
    try:
        yield
    finally:
        forget_workspaces()


class OwnedGraph(Closing):
    """A captured torch graph and what lives as long as it."""

    def __init__(self, graph: Any, keep: Any) -> None:
        self._graph = graph
        self._keep = keep

    def close(self) -> None:
        """Destroy the graph now. Where CUDA refuses, the destructor must not try again: it would
        end the process."""
        graph, keep, self._graph, self._keep = self._graph, self._keep, None, None
        if graph is None:
            return
        try:
            graph.reset()
        except RuntimeError as error:
            never_free((graph, keep))
            raise DeviceError(f"a captured graph cannot be destroyed: {error}") from None


class BodyMemory:
    """Memory for what is captured on a stream that torch does not know to be captured, such as the
    body of a loop. It is given back when nobody has this any more."""

    def __init__(self, device: int) -> None:
        self._place = (device, torch.cuda.graph_pool_handle())

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """While the block lasts, this thread's allocations are made here; once."""
        try:
            begin = torch._C._cuda_beginAllocateCurrentThreadToPool
            end = torch._C._cuda_endAllocateToPool
            release = torch._C._cuda_releasePool
        except AttributeError:
            raise DeviceError(
                f"torch {torch.__version__} cannot keep memory for a loop; use 2.8 or newer"
            ) from None
        begin(*self._place)
        # Not at exit: the memory goes with the process.
        weakref.finalize(self, release, *self._place).atexit = False
        try:
            yield
        finally:
            end(*self._place)

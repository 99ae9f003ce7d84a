"""Torch's captures and their memory pools, freed in any state.

Torch's allocator keeps a list of the captures under way. In torch 2.11 a failed capture stays on
the list (pytorch#180395, mended in 2.12), with two consequences. The destructor of
``torch.cuda.MemPool`` ends the process if the list is not empty. And the list's entry points at the
failed graph: a later graph at the same address takes its memory from the failed graph's pool, where
another graph may work at the same time. So failed captures are taken off the list here, and the
memory of a loop's body is no ``MemPool``: releasing that memory frees nothing itself, asserts
nothing about captures and cannot meet a CUDA error.

Torch also keeps a workspace of cuBLAS for every stream, for good: 33 MiB on an H200 for every lane
and every loop. A workspace made during a capture lies in the capture's pool, which could then never
be freed. So torch is told to forget its workspaces before and after a capture, as torch's own CUDA
graph trees do: a capture takes a workspace from its pool, and no other stream uses that workspace.
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
    """Capture the block's launches on the stream into the graph; gives a list of objects that must
    live as long as the graph.

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
    """No garbage collection: freeing graphs, memory or lanes is forbidden during a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def forget_workspaces() -> None:
    """Free cuBLAS's workspaces of all streams."""
    torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Give the block its own cuBLAS workspaces."""
    forget_workspaces()
    try:
        yield
    finally:
        forget_workspaces()


class OwnedGraph(Closing):
    """A captured torch graph and the objects that live as long as the graph."""

    def __init__(self, graph: Any, keep: Any) -> None:
        self._graph = graph
        self._keep = keep

    def close(self) -> None:
        """Destroy the graph now. If CUDA refuses, the destructor must not try again, since that
        would end the process."""
        graph, keep, self._graph, self._keep = self._graph, self._keep, None, None
        if graph is None:
            return
        try:
            graph.reset()
        except RuntimeError as error:
            never_free((graph, keep))
            raise DeviceError(f"a captured graph cannot be destroyed: {error}") from None


class BodyMemory:
    """Memory for captures on streams that torch does not know as capturing, such as a loop's body.
    The memory is freed with the last reference to this object."""

    def __init__(self, device: int) -> None:
        self._place = (device, torch.cuda.graph_pool_handle())

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Direct this thread's allocations here during the block. May be called once."""
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

"""A compaction and its consumer as one stage, under any mechanism, built for one lane.

``y[i] = f(x[i])`` wherever ``x[i]`` is not zero: the producer lists the positions, the consumer
works on the list. The consumer is an expression, so that producer and consumer can also share a
kernel. Everything is static; how many positions there are is known to the device alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from eclip.cuda.conditional import loop, new_condition, side_by_side
from eclip.cuda.driver import call, cu
from eclip.cuda.graphs import Executable
from eclip.errors import ArenaError, UsageError
from eclip.varout.cuda.build import (
    COUNT,
    EVERYTHING,
    REST,
    STATE_WORDS,
    WINDOW,
    WINDOW_KEEP,
    blocks_for,
    items_for,
    kernels_for,
    pointer,
    small,
    word,
)
from eclip.varout.mechanisms import Mechanism

_MOST_BLOCKS = 2048  # of a producer that goes on: most tiles have nothing for its window
DOUBLED = (Mechanism.DOUBLE_SYMMETRIC, Mechanism.DOUBLE_CONDITIONAL)


class Compaction:
    """Owns its buffers. ``capacity`` is in positions; ``EXACT`` takes it as the known length."""

    def __init__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        mechanism: Mechanism,
        capacity: int,
        arena_words: int | None = None,
        apply: str = "2.0f * v + 1.0f",
    ) -> None:
        for tensor in (x, y):
            if tensor.dtype != torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise UsageError("a compaction stage reads and writes flat float32 tensors")
        if x.shape != y.shape:
            raise UsageError(f"x has {len(x)} elements and y has {len(y)}")
        if capacity < (2 if mechanism in DOUBLED else 1):
            raise UsageError(f"{mechanism.value} cannot work with a capacity of {capacity}")
        self.x, self.y = x, y
        self.mechanism = mechanism
        self.inputs = len(x)
        self.capacity = self.inputs if mechanism is Mechanism.MAXIMUM else capacity
        if mechanism in DOUBLED:
            self.capacity -= self.capacity % 2
        if mechanism is Mechanism.MERGE:
            self.capacity = 0
        if arena_words is None:
            arena_words = max(0, self.inputs - capacity)
        self.arena_words = arena_words if mechanism is Mechanism.SPILL else 0
        fresh = {"dtype": torch.int64, "device": x.device}
        self.buffer = torch.zeros(max(1, self.capacity), **fresh)
        self.arena = torch.zeros(max(1, self.arena_words), **fresh)
        major, minor = torch.cuda.get_device_capability(x.device)
        items = items_for(self.inputs, 4)
        self._kernels = kernels_for(f"{major}.{minor}", 4, True, apply=apply, items=items)
        self.tiles = torch.zeros(self._kernels.tiles_of(self.inputs), **fresh)
        self.state = torch.zeros(STATE_WORDS, **fresh)
        torch.cuda.synchronize(x.device)  # the buffers are clear before any other stream uses them

    @property
    def memory_bytes(self) -> int:
        """Between producer and consumer, for this stage alone."""
        return 8 * (self.capacity + self.arena_words)

    def count(self) -> int:
        """How many positions the last request had; waits for it. Raises if they found no room."""
        found = int(self.state[COUNT].item())
        if self.mechanism is Mechanism.SPILL and found > self.capacity + self.arena_words:
            raise ArenaError("the compaction", found - self.capacity, self.arena_words)
        return found

    def enqueue(self, stream: Any) -> None:
        """Put a request onto a stream; loops can only be captured."""
        if self.mechanism is Mechanism.MERGE:
            self._launch(
                "merged", stream, blocks_for(self.inputs),
                pointer(self.x.data_ptr()), word(self.inputs), pointer(self.x.data_ptr()),
                pointer(self.y.data_ptr()), pointer(self.state.data_ptr()),
            )  # fmt: skip
        elif self.mechanism is Mechanism.RESIDENT:
            self._kernels.launch_resident(
                "resident",
                stream,
                len(self.tiles),
                self.capacity,
                [
                    pointer(self.x.data_ptr()), pointer(0), word(self.inputs),
                    pointer(self.x.data_ptr()), pointer(self.y.data_ptr()),
                    pointer(self.buffer.data_ptr()), word(self.capacity),
                    pointer(self.tiles.data_ptr()), pointer(self.state.data_ptr()),
                ],
            )  # fmt: skip
        elif self.mechanism is Mechanism.SWAP:
            condition = new_condition(stream)
            self._select(stream, self.capacity)
            self._consume(stream, WINDOW, self.capacity, condition)
            with loop(stream, condition) as body:
                self._resume(body, self.capacity)
                self._consume(body, WINDOW, self.capacity, condition)
        elif self.mechanism in DOUBLED:
            self._enqueue_doubled(stream)
        else:
            self._select(stream, self.capacity)
            self._consume(stream, EVERYTHING, self.capacity + self.arena_words)

    def _enqueue_doubled(self, stream: Any) -> None:
        half = self.capacity // 2
        symmetric = self.mechanism is Mechanism.DOUBLE_SYMMETRIC
        condition = new_condition(stream)
        self._select(stream, half if symmetric else self.capacity, condition)
        with loop(stream, condition) as body:
            side_by_side(
                body,
                lambda: self._resume(body, half),
                lambda: self._consume(body, WINDOW_KEEP, half),
            )
            self._launch(
                "advance", body, 1, word(self.capacity), word(half),
                pointer(self.state.data_ptr()), word(condition), threads=1,
            )  # fmt: skip
        self._consume(stream, REST, self.capacity)

    def _select(self, stream: Any, first: int, condition: int | None = None) -> None:
        self._launch(
            "select", stream, len(self.tiles),
            pointer(self.x.data_ptr()), pointer(0), word(self.inputs),
            pointer(self.buffer.data_ptr()), word(first),
            pointer(self.arena.data_ptr()), word(self.arena_words),
            pointer(self.tiles.data_ptr()), pointer(self.state.data_ptr()),
            word(condition or 0), small(condition is not None),
        )  # fmt: skip

    def _resume(self, stream: Any, window: int) -> None:
        self._launch(
            "resume", stream, min(len(self.tiles), _MOST_BLOCKS),
            pointer(self.x.data_ptr()), pointer(0), word(self.inputs),
            pointer(self.buffer.data_ptr()), word(self.capacity), word(window),
            pointer(self.tiles.data_ptr()), pointer(self.state.data_ptr()),
        )  # fmt: skip

    def _consume(self, stream: Any, what: int, window: int, condition: int = 0) -> None:
        self._launch(
            "consume", stream, blocks_for(window),
            pointer(self.x.data_ptr()), pointer(self.y.data_ptr()),
            pointer(self.buffer.data_ptr()), word(self.capacity),
            pointer(self.arena.data_ptr()), word(self.arena_words), small(what), word(window),
            pointer(self.state.data_ptr()), word(condition),
        )  # fmt: skip

    def _launch(
        self, name: str, stream: Any, grid: int, *arguments: tuple[Any, Any], threads: int = 256
    ) -> None:
        self._kernels.launch(name, stream, grid, arguments, threads)


@contextlib.contextmanager
def built(stage: Compaction, stream: Any) -> Iterator[Executable]:
    """The stage as a graph on the lane of a stream, instantiated, while the block lasts."""
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    call(cu.cuStreamBeginCapture, stream, mode)
    try:
        stage.enqueue(stream)
    except BaseException:
        cu.cuStreamEndCapture(stream)
        raise
    graph = call(cu.cuStreamEndCapture, stream)
    try:
        executable = Executable(graph)
    finally:
        call(cu.cuGraphDestroy, graph)
    try:
        executable.upload(stream)
        yield executable
    finally:
        try:
            call(cu.cuStreamSynchronize, stream)
        finally:
            executable.close()

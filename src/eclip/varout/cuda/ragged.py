"""Outputs whose length only the device knows, and consumers that see them window by window.

In a capture, windows beyond the first are a loop in the graph; outside of one they are a Python
loop that waits for the device, like PyTorch's own operators. What a body sees in a slot that holds
nothing is 0: a legal position, and the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from eclip.devices.cuda.conditional import is_capturing, keep_alive, loop, new_condition
from eclip.errors import ArenaError, UsageError
from eclip.varout.cuda.build import (
    ADVANCE,
    CONSUMED,
    COUNT,
    REWIND,
    STAY,
    Kernels,
    blocks_for,
    pointer,
    small,
    word,
)

Body = Callable[[torch.Tensor, torch.Tensor], Any]
Resume = Callable[[Any], None]  # puts the production of the next window onto a stream


class Ragged:
    """``capacity`` outputs find room in ``values``; a body of ``each`` sees ``window`` of them at a
    time. ``count`` is the whole length, a tensor on the device."""

    def __init__(
        self,
        name: str,
        buffer: torch.Tensor,
        state: torch.Tensor,
        largest: int | None,
        resume: Resume,
        kernels: Kernels,
        below: int | None = None,
        arena: torch.Tensor | None = None,
        unravel: torch.Size | None = None,
        window: int | None = None,
    ) -> None:
        self.capacity = int(buffer.shape[-1])
        self.window = window or self.capacity
        self.largest = largest  # the longest output there can be; None: unbounded
        self.count = state[COUNT]
        self._name = name
        self._buffer = buffer
        self._state = state
        self._resume = resume
        self._kernels = kernels
        self._below = below  # outputs are positions from 0 to before this; None: they are none
        self._arena = arena
        self._unravel = unravel
        self._slots = self._first = buffer[..., : self.window]  # of the current window
        self._seen = False  # by a consumer, which leaves the last window behind

    @property
    def values(self) -> torch.Tensor:
        """The buffer, with 0 in all slots from ``count`` on."""
        self._launch(
            "clear", torch.cuda.current_stream().cuda_stream, self.capacity,
            pointer(self._buffer.data_ptr()), word(self.capacity), pointer(self._state.data_ptr()),
        )  # fmt: skip
        return self._buffer

    def valid(self) -> torch.Tensor:
        """Which slots of the current window hold outputs."""
        return self._next(torch.cuda.current_stream().cuda_stream, STAY)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """In a body: the rows of ``x`` at the window's positions, like ``x[positions]``, and 0
        where a slot holds none."""
        self._check("take", x)
        x = x.contiguous()
        rows = torch.empty((self.window, *x.shape[1:]), dtype=x.dtype, device=x.device)
        self._move("take", x, rows, rows)
        return rows

    def put(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """In a body: write a row for each slot to its position in ``out``, like ``out[positions] =
        rows``. Rows of slots that hold nothing go nowhere."""
        self._check("put", out)
        wanted = (self.window, *out.shape[1:])
        if rows.shape != wanted or rows.dtype != out.dtype:
            raise UsageError(
                f"put writes {list(wanted)} of {out.dtype} here, not {list(rows.shape)} of "
                f"{rows.dtype}"
            )
        if not out.is_contiguous():
            raise UsageError("put writes to a contiguous tensor; this one has gaps between rows")
        self._move("put", rows.contiguous(), out, rows)

    def each(self, body: Body) -> None:
        """Run ``body(values, valid)`` on every window of the output; at least once."""
        stream = torch.cuda.current_stream().cuda_stream
        loops = self.largest is None or self.largest > self.window
        condition = new_condition(stream) if loops and is_capturing(stream) else None
        move, self._seen = REWIND if self._seen else STAY, True
        self._turn(body, stream, move, condition)
        if not loops:
            return
        if condition is None:
            while int(self._state[CONSUMED].item()) + self.window < int(self.count.item()):
                self._turn(body, stream, ADVANCE)
            self._slots = self._first
            return
        pool = torch.cuda.MemPool()  # the body's own memory: nothing outside the loop may reuse it
        keep_alive(pool)
        with loop(stream, condition) as inner:
            turned = torch.cuda.ExternalStream(int(inner), device=self._buffer.device)
            with torch.cuda.stream(turned), torch.cuda.use_mem_pool(pool):
                self._turn(body, inner, ADVANCE, condition)
                self._slots = self._first

    def result(self) -> torch.Tensor:
        """The whole output as a plain tensor; waits for the request and must not be captured."""
        found = int(self.count.item())
        beyond = found - self.capacity
        held = 0 if self._arena is None else len(self._arena)
        if beyond > held:
            raise ArenaError(self._name, beyond, held)
        if not self._is_list and int(self._state[CONSUMED].item()):
            raise UsageError(
                f"the windows of {self._name} were consumed by each(), and its buffer holds the "
                f"last; a plain result needs a larger capacity, or no each()"
            )
        values = self._buffer[: min(found, self.capacity)]
        if beyond > 0 and self._arena is not None:
            values = torch.cat([values, self._arena[:beyond]])
        if self._unravel is None:
            return values.clone()
        if not self._unravel:
            return values.new_empty((found, 0))
        return torch.stack(torch.unravel_index(values, self._unravel), dim=-1)

    @property
    def _is_list(self) -> bool:
        """The buffer has all outputs, so that windows are parts of it and nothing is produced
        again."""
        return self.window < self.capacity

    def _turn(self, body: Body, stream: Any, move: int, condition: int | None = None) -> None:
        copies = self._is_list and move == ADVANCE
        self._slots = torch.empty_like(self._first) if copies else self._first
        valid = self._next(stream, move, condition, copies)
        if move != STAY and not self._is_list:
            self._resume(stream)
        body(*self._handed(valid))

    def _handed(self, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._slots, valid

    def _next(
        self, stream: Any, move: int, condition: int | None = None, copies: bool = False
    ) -> torch.Tensor:
        valid = torch.empty(
            8 * -(-self.window // 8), dtype=torch.bool, device=self._buffer.device
        )  # written eight at a time
        slots = self._slots.data_ptr() if self._slots.dim() == 1 else 0
        self._launch(
            "next", stream, self.window, small(move), word(self.window), pointer(slots),
            pointer(self._buffer.data_ptr() if copies else 0), pointer(valid.data_ptr()),
            pointer(self._state.data_ptr()), word(condition or 0), small(condition is not None),
        )  # fmt: skip
        return valid[: self.window]

    def _check(self, what: str, tensor: torch.Tensor) -> None:
        if self._below is None:
            raise UsageError(f"the outputs of {self._name} are no positions to {what} rows at")
        if not tensor.is_cuda or tensor.dim() == 0 or len(tensor) < self._below:
            raise UsageError(
                f"{what} needs a CUDA tensor of at least {self._below} rows, the positions that "
                f"{self._name} can have; this one has shape {list(tensor.shape)}"
            )

    def _move(self, kernel: str, source: torch.Tensor, target: torch.Tensor, rows: Any) -> None:
        row = math.prod(rows.shape[1:]) * rows.element_size()
        places = source.data_ptr(), target.data_ptr(), row
        width = next(width for width in (8, 4, 2, 1) if not any(at % width for at in places))
        self._launch(
            kernel, torch.cuda.current_stream().cuda_stream, self.window * row // width,
            pointer(source.data_ptr()), pointer(target.data_ptr()),
            pointer(self._slots.data_ptr()), word(self.window), word(row // width), small(width),
            pointer(self._state.data_ptr()),
        )  # fmt: skip

    def _launch(self, name: str, stream: Any, items: int, *arguments: tuple[Any, Any]) -> None:
        self._kernels.launch(name, stream, blocks_for(items), arguments)


class Routed(Ragged):
    """Pairs of token and choice for every expert, ``values[expert, slot]``, numbered
    ``token * choices + choice``; empty slots are 0 in windows and not valid."""

    weights: torch.Tensor  # softmax over each token's choices
    counts: torch.Tensor  # of all pairs of each expert

    @property
    def values(self) -> torch.Tensor:
        """Of the current window; -1 in empty slots."""
        return self._buffer

    def valid(self) -> torch.Tensor:
        return self._buffer >= 0

    def _handed(self, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._buffer.clamp(min=0), self.valid()

    def result(self) -> torch.Tensor:
        raise UsageError("routed tokens are consumed by each(); they have no plain result")

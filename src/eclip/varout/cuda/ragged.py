"""Outputs with a length that only the device knows, and consumers that see them by windows.

In a capture, windows beyond the first are a loop in the graph; outside of a capture they are a
Python loop that waits for the device, like PyTorch's own operators. A body sees 0 in empty slots,
which is a legal position, and the same in every run. Slots that a body does not read are not
written.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from eclip.capture.capturing import BodyMemory
from eclip.cuda.conditional import is_capturing, keep_alive, loop, new_condition
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

Resume = Callable[[Any], None]  # puts the production of the next window onto a stream


class OutputWindow:
    """The part of an output that a body sees in one turn. Its tensors are made on the stream that
    is current when they are first asked for; ``take`` and ``put`` need neither."""

    def __init__(self, output: Ragged, moved: bool) -> None:
        self.slots = output.window
        self._output = output
        self._listed = moved and output._is_list  # it begins where only the device knows
        self._open = True

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """The outputs, one a slot, and 0 in slots that hold none."""
        self._check_open()
        buffer = self._output._buffer
        first = buffer[: self.slots]
        values = torch.empty_like(first) if self._listed else first
        self._launch(
            "values", self.slots, word(self.slots), pointer(values.data_ptr()),
            pointer(buffer.data_ptr() if self._listed else 0), self._state,
        )  # fmt: skip
        return values

    @functools.cached_property
    def valid(self) -> torch.Tensor:
        """Which slots hold outputs."""
        self._check_open()
        words = -(-self.slots // 8)  # written eight at a time
        valid = torch.empty(8 * words, dtype=torch.bool, device=self._output._buffer.device)
        self._launch("valid", words, word(self.slots), pointer(valid.data_ptr()), self._state)
        return valid[: self.slots]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of ``x`` at the window's positions, like ``x[values]``, and 0 where a slot holds
        none."""
        self._check("take", x)
        x = x.contiguous()
        rows = torch.empty((self.slots, *x.shape[1:]), dtype=x.dtype, device=x.device)
        self._move("take", x, rows, rows)
        return rows

    def put(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write a row for each slot to its position in ``out``, like ``out[values] = rows``. Rows
        of slots that hold nothing go nowhere."""
        self._check("put", out)
        wanted = (self.slots, *out.shape[1:])
        if rows.shape != wanted or rows.dtype != out.dtype:
            raise UsageError(
                f"put writes {list(wanted)} of {out.dtype} here, not {list(rows.shape)} of "
                f"{rows.dtype}"
            )
        if not out.is_contiguous():
            raise UsageError("put writes to a contiguous tensor; this one has gaps between rows")
        self._move("put", rows.contiguous(), out, rows)

    def close(self) -> None:
        """After its turn the device has moved on, and nothing can be asked of it any more."""
        self._open = False

    @property
    def _state(self) -> tuple[int, Any]:
        return pointer(self._output._state.data_ptr())

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError("a window can be used only in the body that each() hands it to")

    def _check(self, what: str, tensor: torch.Tensor) -> None:
        self._check_open()
        name, below = self._output._name, self._output._below
        if below is None:
            raise UsageError(f"the outputs of {name} are no positions to {what} rows at")
        if not tensor.is_cuda or tensor.dim() == 0 or len(tensor) < below:
            raise UsageError(
                f"{what} needs a CUDA tensor of at least {below} rows, the positions that {name} "
                f"can have; this one has shape {list(tensor.shape)}"
            )

    def _move(self, kernel: str, source: torch.Tensor, target: torch.Tensor, rows: Any) -> None:
        row = math.prod(rows.shape[1:]) * rows.element_size()
        places = source.data_ptr(), target.data_ptr(), row
        width = next(width for width in (8, 4, 2, 1) if not any(at % width for at in places))
        self._launch(
            kernel, self.slots * row // width,
            pointer(source.data_ptr()), pointer(target.data_ptr()),
            pointer(self._output._buffer.data_ptr()), small(self._listed), word(self.slots),
            word(row // width), small(width), self._state,
        )  # fmt: skip

    def _launch(self, name: str, items: int, *arguments: tuple[Any, Any]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._output._kernels.launch(name, stream, blocks_for(items), arguments)


class Ragged:
    """``capacity`` outputs find room in ``values``; a body of ``each`` sees ``window`` of them at a
    time. ``count`` is the whole length, a tensor on the device."""

    _window: type[OutputWindow] = OutputWindow

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
        self._seen = False  # by a consumer

    @property
    def values(self) -> torch.Tensor:
        """The buffer, with 0 in all slots from ``count`` on. After ``each`` over several windows of
        a capacity, the buffer holds the last window, and behind it rests of earlier windows."""
        self._kernels.launch(
            "clear", torch.cuda.current_stream().cuda_stream, blocks_for(self.capacity),
            [pointer(self._buffer.data_ptr()), word(self.capacity),
             pointer(self._state.data_ptr())],
        )  # fmt: skip
        return self._buffer

    def each(self, body: Callable[[OutputWindow], Any]) -> None:
        """Run ``body(window)`` on every window of the output; at least once."""
        stream = torch.cuda.current_stream().cuda_stream
        loops = self.largest is None or self.largest > self.window
        condition = new_condition(stream) if loops and is_capturing(stream) else None
        # A consumer of several windows leaves the last behind; of one, the same that it found.
        move, self._seen = REWIND if self._seen and loops else STAY, True
        self._turn(body, stream, move, condition)
        if not loops:
            return
        if condition is None:
            while int(self._state[CONSUMED].item()) + self.window < int(self.count.item()):
                self._turn(body, stream, ADVANCE)
            return
        memory = BodyMemory(self._buffer.device.index)  # nothing outside the loop may reuse it
        keep_alive(memory)
        with loop(stream, condition) as inner:
            turned = torch.cuda.ExternalStream(int(inner), device=self._buffer.device)
            with torch.cuda.stream(turned), memory.used():
                self._turn(body, inner, ADVANCE, condition)

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

    def _turn(
        self,
        body: Callable[[OutputWindow], Any],
        stream: Any,
        move: int,
        condition: int | None = None,
    ) -> None:
        if move != STAY or condition is not None:
            self._kernels.launch(
                "next", stream, 1,
                [small(move), word(self.window), pointer(self._state.data_ptr()),
                 word(condition or 0), small(condition is not None)],
                threads=1,
            )  # fmt: skip
        if move != STAY and not self._is_list:
            self._resume(stream)
        with contextlib.closing(self._window(self, move == ADVANCE)) as window:
            body(window)


class RoutedWindow(OutputWindow):
    @functools.cached_property
    def values(self) -> torch.Tensor:
        """Pairs of token and choice, ``values[expert, slot]``; 0 in slots that hold none."""
        self._check_open()
        return self._output._buffer.clamp(min=0)

    @functools.cached_property
    def valid(self) -> torch.Tensor:
        """Which slots of each expert hold pairs."""
        self._check_open()
        return self._output._buffer >= 0


class Routed(Ragged):
    """Pairs of token and choice for every expert, ``values[expert, slot]``, numbered
    ``token * choices + choice``; empty slots are 0 in windows and not valid."""

    weights: torch.Tensor  # softmax over each token's choices
    counts: torch.Tensor  # of all pairs of each expert
    _window = RoutedWindow

    @property
    def values(self) -> torch.Tensor:
        """Of the current window; -1 in empty slots."""
        return self._buffer

    def result(self) -> torch.Tensor:
        raise UsageError("routed tokens are consumed by each(); they have no plain result")

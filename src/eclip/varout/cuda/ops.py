"""The operations on PyTorch tensors, on whatever stream is current, captured or not.

A workspace is cleared by the request itself (one memset), so an operation may be captured in any
number of graphs. In a capture, windows beyond the first are a loop in the graph; outside of one
they are a Python loop that waits for the device, like PyTorch's own operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from eclip.devices.cuda.conditional import is_capturing, keep_alive, loop, new_condition
from eclip.errors import ArenaError, UsageError
from eclip.varout.cuda.build import (
    CONSUMED,
    COUNT,
    PRODUCED,
    STATE_WORDS,
    Kernels,
    blocks_for,
    kernels_for,
    pointer,
    real,
    small,
    tiles_of,
    word,
)

Body = Callable[[torch.Tensor, torch.Tensor], Any]
Resume = Callable[[Any], None]  # puts the production of the next window onto a stream
_MOST_BOXES = 1 << 16  # their pairwise overlaps take n²/8 bytes


class Ragged:
    """An output whose length only the device knows.

    ``values`` is the buffer of one window; which of it counts is ``valid()``. ``count`` is the
    whole length, a tensor on the device.
    """

    def __init__(
        self,
        name: str,
        values: torch.Tensor,
        state: torch.Tensor,
        largest: int | None,
        resume: Resume,
        kernels: Kernels,
        arena: torch.Tensor | None = None,
        unravel: torch.Size | None = None,
    ) -> None:
        self.values = values
        self.capacity = int(values.shape[-1])
        self.largest = largest  # the longest output there can be; None: unbounded
        self.count = state[COUNT]
        self._name = name
        self._state = state
        self._resume = resume
        self._kernels = kernels
        self._arena = arena
        self._unravel = unravel
        self._slots = torch.arange(self.capacity, device=values.device)

    def valid(self) -> torch.Tensor:
        """Which slots of the current window hold outputs."""
        return self._slots < self._state[COUNT] - self._state[CONSUMED]

    def each(self, body: Body) -> None:
        """Run ``body(values, valid)`` on every window of the output; at least once."""
        body(self._window(), self.valid())
        if self.largest is not None and self.largest <= self.capacity:
            return
        stream = torch.cuda.current_stream().cuda_stream
        if not is_capturing(stream):
            while int(self._state[CONSUMED].item()) + self.capacity < int(self.count.item()):
                self._state[CONSUMED] += self.capacity
                self._state[PRODUCED] = self._state[CONSUMED]
                self._resume(stream)
                body(self._window(), self.valid())
            return
        condition = new_condition(stream)
        self._next(stream, condition, moves=False)
        pool = torch.cuda.MemPool()  # the body's own memory: nothing outside the loop may reuse it
        keep_alive(pool)
        with loop(stream, condition) as inner:
            turned = torch.cuda.ExternalStream(int(inner), device=self.values.device)
            with torch.cuda.stream(turned), torch.cuda.use_mem_pool(pool):
                self._next(inner, condition, moves=True)
                self._resume(inner)
                body(self._window(), self.valid())

    def result(self) -> torch.Tensor:
        """The whole output as a plain tensor; waits for the request and must not be captured."""
        found = int(self.count.item())
        beyond = found - self.capacity
        held = 0 if self._arena is None else len(self._arena)
        if beyond > held:
            raise ArenaError(self._name, beyond, held)
        if int(self._state[CONSUMED].item()):
            raise UsageError(
                f"the windows of {self._name} were consumed by each(), and its buffer holds the "
                f"last; a plain result needs a larger capacity, or no each()"
            )
        values = self.values[: min(found, self.capacity)]
        if beyond > 0 and self._arena is not None:
            values = torch.cat([values, self._arena[:beyond]])
        if self._unravel is None:
            return values.clone()
        if not self._unravel:
            return values.new_empty((found, 0))
        return torch.stack(torch.unravel_index(values, self._unravel), dim=-1)

    def _window(self) -> torch.Tensor:
        return self.values

    def _next(self, stream: Any, condition: int, moves: bool) -> None:
        self._kernels.launch(
            "next", stream, 1,
            [word(self.capacity), small(moves), pointer(self._state.data_ptr()), word(condition)],
            threads=1,
        )  # fmt: skip


class Routed(Ragged):
    """Pairs of token and choice for every expert, ``values[expert, slot]``, numbered
    ``token * choices + choice``; empty slots are 0 in windows and not valid."""

    weights: torch.Tensor  # softmax over each token's choices
    counts: torch.Tensor  # of all pairs of each expert

    def valid(self) -> torch.Tensor:
        return self.values >= 0

    def _window(self) -> torch.Tensor:
        return self.values.clamp(min=0)

    def result(self) -> torch.Tensor:
        raise UsageError("routed tokens are consumed by each(); they have no plain result")


def nonzero(x: torch.Tensor, capacity: int | None, arena_words: int) -> Ragged:
    flags = _flags(x)
    return _select("nonzero", flags, None, capacity, arena_words, flags.shape)


def masked_select(
    x: torch.Tensor, mask: torch.Tensor, capacity: int | None, arena_words: int
) -> Ragged:
    if mask.dtype != torch.bool:
        raise UsageError(f"a mask is of booleans, not of {mask.dtype}")
    x, mask = torch.broadcast_tensors(x, mask)
    return _select("masked_select", mask.contiguous(), x.contiguous(), capacity, arena_words, None)


def _select(
    name: str,
    flags: torch.Tensor,
    picked: torch.Tensor | None,
    capacity: int | None,
    arena_words: int,
    unravel: torch.Size | None,
) -> Ragged:
    inputs = flags.numel()
    capacity = _capacity(name, capacity, inputs)
    kernels = kernels_for(
        _compute(flags),
        flags.element_size(),
        flags.is_floating_point(),
        0 if picked is None else picked.element_size(),
    )
    kind = torch.int64 if picked is None else picked.dtype
    values = torch.zeros(capacity, dtype=kind, device=flags.device)
    arena = torch.empty(max(1, arena_words), dtype=kind, device=flags.device)
    tiles = tiles_of(inputs)
    work = torch.zeros(STATE_WORDS + tiles, dtype=torch.int64, device=flags.device)
    state = work[:STATE_WORDS]
    sums = pointer(work.data_ptr() + 8 * STATE_WORDS)
    source = (
        pointer(flags.data_ptr()), pointer(0 if picked is None else picked.data_ptr()),
        word(inputs), pointer(values.data_ptr()), word(capacity),
    )  # fmt: skip
    kernels.launch(
        "select", torch.cuda.current_stream().cuda_stream, tiles,
        [*source, pointer(arena.data_ptr()), word(arena_words), sums, pointer(state.data_ptr()),
         word(0), small(0)],
    )  # fmt: skip

    def resume(stream: Any, keep: Any = (flags, picked, work)) -> None:
        kernels.launch(
            "resume", stream, tiles,
            [*source, word(capacity), sums, pointer(state.data_ptr())],
        )  # fmt: skip

    kept = arena if arena_words else None
    return Ragged(name, values, state, inputs, resume, kernels, kept, unravel)


def expand(lengths: torch.Tensor, capacity: int, arena_words: int) -> Ragged:
    if lengths.dim() != 1 or lengths.is_floating_point() or not len(lengths):
        raise UsageError("expand takes a flat tensor of whole numbers, at least one")
    if capacity < 1:
        raise UsageError(f"expand needs a capacity of at least 1, not {capacity}")
    kernels = kernels_for(_compute(lengths), 4, True)
    ends = lengths.to(torch.int64).clamp(min=0).cumsum(0)
    fresh = {"dtype": torch.int64, "device": lengths.device}
    values = torch.zeros(capacity, **fresh)
    arena = torch.empty(max(1, arena_words), **fresh)
    state = torch.zeros(STATE_WORDS, **fresh)

    def fill(stream: Any, opens: bool = False) -> None:
        kernels.launch(
            "expand", stream, blocks_for(capacity + (arena_words if opens else 0)),
            [pointer(ends.data_ptr()), word(len(ends)), pointer(values.data_ptr()),
             word(capacity), pointer(arena.data_ptr()), word(arena_words),
             pointer(state.data_ptr()), small(opens)],
        )  # fmt: skip

    fill(torch.cuda.current_stream().cuda_stream, opens=True)
    kept = arena if arena_words else None
    return Ragged("expand", values, state, None, fill, kernels, kept)


def nms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    iou_threshold: float,
    capacity: int | None,
    score_threshold: float,
    arena_words: int,
) -> Ragged:
    count = len(boxes)
    if boxes.shape != (count, 4) or scores.shape != (count,):
        raise UsageError(
            f"nms takes boxes [n, 4] and scores [n], not {list(boxes.shape)} and "
            f"{list(scores.shape)}"
        )
    if not 1 <= count <= _MOST_BOXES:
        raise UsageError(f"nms takes 1 to {_MOST_BOXES} boxes, not {count}; select some first")
    capacity = _capacity("nms", capacity, count)
    kernels = kernels_for(_compute(boxes), 4, True)
    ordered, order = torch.sort(scores.float(), descending=True, stable=True)
    sorted_boxes = boxes.float()[order].contiguous()
    words = -(-count // 64)
    fresh = {"dtype": torch.int64, "device": boxes.device}
    masks = torch.empty(count * words, **fresh)
    values = torch.zeros(capacity, **fresh)
    arena = torch.empty(max(1, arena_words), **fresh)
    state = torch.zeros(STATE_WORDS, **fresh)
    stream = torch.cuda.current_stream().cuda_stream
    kernels.launch(
        "overlaps", stream, (words, words),
        [pointer(sorted_boxes.data_ptr()), word(count), real(iou_threshold),
         pointer(masks.data_ptr())],
        threads=64,
    )  # fmt: skip
    lowest = max(score_threshold, -math.inf)

    def walk(stream: Any, opens: bool = False, keep: Any = (sorted_boxes, ordered)) -> None:
        kernels.launch(
            "suppress", stream, 1,
            [pointer(masks.data_ptr()), pointer(order.data_ptr()), pointer(ordered.data_ptr()),
             word(count), real(lowest), pointer(values.data_ptr()), word(capacity),
             pointer(arena.data_ptr()), word(arena_words), pointer(state.data_ptr()),
             small(opens)],
            shared_bytes=8 * words,
        )  # fmt: skip

    walk(stream, opens=True)
    return Ragged("nms", values, state, count, walk, kernels, arena if arena_words else None)


def route(logits: torch.Tensor, choices: int, capacity: int) -> Routed:
    if logits.dim() != 2:
        raise UsageError(f"route takes logits [tokens, experts], not {list(logits.shape)}")
    tokens, experts = logits.shape
    if not 1 <= choices <= experts:
        raise UsageError(f"a token can choose 1 to {experts} experts, not {choices}")
    capacity = _capacity("route", capacity, tokens)
    kernels = kernels_for(_compute(logits), 4, True)
    best, chosen = torch.topk(logits, choices, dim=1)
    chosen = chosen.contiguous()
    fresh = {"dtype": torch.int64, "device": logits.device}
    values = torch.empty(experts, capacity, **fresh)
    counts = torch.empty(experts, **fresh)
    state = torch.zeros(STATE_WORDS, **fresh)

    def deal(stream: Any, opens: bool = False) -> None:
        kernels.launch(
            "route", stream, experts,
            [pointer(chosen.data_ptr()), word(chosen.numel()), pointer(values.data_ptr()),
             word(capacity), pointer(counts.data_ptr()), pointer(state.data_ptr()), small(opens)],
        )  # fmt: skip

    deal(torch.cuda.current_stream().cuda_stream, opens=True)
    # A token chooses an expert at most once, so no expert gets more than all tokens.
    routed = Routed("route", values, state, tokens, deal, kernels)
    routed.weights = torch.softmax(best.float(), dim=1).to(logits.dtype)
    routed.counts = counts
    return routed


def _flags(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        raise UsageError("complex elements cannot be selected; use x.abs()")
    if x.numel() >= 1 << 32:
        raise UsageError(f"{x.numel()} elements are too many for one selection; split them")
    return x.contiguous()


def _capacity(name: str, capacity: int | None, largest: int) -> int:
    if capacity is None:
        return max(1, largest)
    if capacity < 1:
        raise UsageError(f"{name} needs a capacity of at least 1, not {capacity}")
    return min(capacity, max(1, largest))


def _compute(tensor: torch.Tensor) -> str:
    if not tensor.is_cuda:
        raise UsageError(
            "this operation works on CUDA tensors; eclip.varout.reference_ops on NumPy"
        )
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return f"{major}.{minor}"

"""The operations on PyTorch tensors, on the current stream, captured or not.

A workspace is cleared by the request itself (one memset), so an operation may be captured in any
number of graphs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from eclip.errors import UsageError
from eclip.varout.cuda.build import (
    STATE_WORDS,
    blocks_for,
    items_for,
    kernels_for,
    pointer,
    real,
    small,
    word,
)
from eclip.varout.cuda.ragged import Ragged, Routed

_MOST_BOXES = 1 << 16  # their pairwise overlaps take n²/8 bytes
# Without a capacity a body sees the longest output in parts: with the whole output, most of its
# work would be on empty slots. A turn of its loop takes about 15 us besides the work. In this time
# a light body (its kernels move 20 bytes a slot, at 4 TB/s) processes this number of slots.
_TURN_SLOTS = 3_000_000


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
    window = None if capacity is not None else _window(inputs)
    capacity = _capacity(name, capacity, inputs)
    kernels = kernels_for(
        _compute(flags),
        flags.element_size(),
        flags.is_floating_point(),
        0 if picked is None else picked.element_size(),
        items=items_for(inputs, flags.element_size()),
    )
    kind = torch.int64 if picked is None else picked.dtype
    values = torch.empty(capacity, dtype=kind, device=flags.device)
    arena = torch.empty(max(1, arena_words), dtype=kind, device=flags.device)
    tiles = kernels.tiles_of(inputs)
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
    below = inputs if picked is None else None
    return Ragged(name, values, state, inputs, resume, kernels, below, kept, unravel, window)


def expand(lengths: torch.Tensor, capacity: int, arena_words: int) -> Ragged:
    if lengths.dim() != 1 or lengths.is_floating_point() or not len(lengths):
        raise UsageError("expand takes a flat tensor of whole numbers, at least one")
    if capacity < 1:
        raise UsageError(f"expand needs a capacity of at least 1, not {capacity}")
    kernels = kernels_for(_compute(lengths), 4, True)
    ends = lengths.to(torch.int64).clamp(min=0).cumsum(0)
    fresh = {"dtype": torch.int64, "device": lengths.device}
    values = torch.empty(capacity, **fresh)
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
    return Ragged("expand", values, state, None, fill, kernels, len(ends), kept)


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
    values = torch.empty(capacity, **fresh)
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
    kept = arena if arena_words else None
    return Ragged("nms", values, state, count, walk, kernels, count, kept)


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


def _window(largest: int) -> int:
    """The slots of a window. With windows of w slots, an output of s slots takes s/w turns, and
    w/2 slots of its last window are empty: the best w² is 2s times the slots that a turn is worth.
    For s a quarter of the inputs is taken. 1.5 million inputs are one window, 16.8 million are 3.3
    windows, 67 million are 6.7.
    """
    return max(1, min(largest, math.isqrt(largest * _TURN_SLOTS // 2)))


def _capacity(name: str, capacity: int | None, largest: int) -> int:
    if capacity is None:
        return max(1, largest)
    if capacity < 1:
        raise UsageError(f"{name} needs a capacity of at least 1, not {capacity}")
    return min(capacity, max(1, largest))


def _compute(tensor: torch.Tensor) -> str:
    if not tensor.is_cuda:
        raise UsageError("this operation works on CUDA tensors; varout_reference_ops on NumPy")
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return f"{major}.{minor}"

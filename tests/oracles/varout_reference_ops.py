"""The variable-output operations as producers: compaction, expansion, suppression, routing.

Each function runs one of them under a mechanism and puts its consumer's items back together; the
result must be what the plain operation gives, whatever the capacity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eclip.errors import UsageError
from eclip.varout.mechanisms import Mechanism
from varout_reference import Array, Ints, Producer, Run, run


class Select(Producer):
    """Positions, or values, where a mask holds: at most one item per input."""

    def __init__(self, mask: npt.NDArray[np.bool_], values: Array | None = None) -> None:
        self._mask = mask.reshape(-1)
        self._shape = mask.shape
        self._values = None if values is None else values.reshape(-1)
        super().__init__(
            inputs=self._mask.size,
            largest=1,
            dtype=np.int64 if values is None else values.dtype,
            item_shape=(mask.ndim,) if values is None else (),
        )

    def counts(self, first: int, last: int) -> Ints:
        return self._mask[first:last].astype(np.int64)

    def items(self, inputs: Ints, offsets: Ints) -> tuple[Ints, Array]:
        if self._values is not None:
            return np.zeros_like(inputs), self._values[inputs]
        if not self._shape:
            return np.zeros_like(inputs), np.empty((len(inputs), 0), dtype=np.int64)
        return np.zeros_like(inputs), np.stack(np.unravel_index(inputs, self._shape), axis=-1)


class Expand(Producer):
    """Every input as often as its length says, which nothing bounds."""

    def __init__(self, values: Array, lengths: Ints, largest: int | None = None) -> None:
        if len(values) != len(lengths) or (lengths < 0).any():
            raise UsageError("every value needs a length of at least 0")
        self._values = values
        self._lengths = lengths
        super().__init__(len(values), largest, dtype=values.dtype, item_shape=values.shape[1:])

    def counts(self, first: int, last: int) -> Ints:
        return self._lengths[first:last].copy()

    def items(self, inputs: Ints, offsets: Ints) -> tuple[Ints, Array]:
        return np.zeros_like(inputs), self._values[inputs]


class Suppress(Producer):
    """Boxes by falling score that overlap none kept before them.

    Its state is which boxes are out. Going on at a cursor marks some of them again, which changes
    nothing: a kept box only ever marks boxes after itself.
    """

    def __init__(self, boxes: Array, scores: Array, iou_threshold: float) -> None:
        self._order = np.argsort(-scores, kind="stable")
        self._boxes = boxes[self._order].astype(np.float64)
        self._threshold = iou_threshold
        self._out = np.zeros(len(boxes), dtype=np.bool_)
        super().__init__(inputs=len(boxes), largest=1)

    def counts(self, first: int, last: int) -> Ints:
        for box in range(first, last):
            if not self._out[box]:
                later = slice(box + 1, None)
                self._out[later] |= iou(self._boxes[box], self._boxes[later]) > self._threshold
        return (~self._out[first:last]).astype(np.int64)

    def items(self, inputs: Ints, offsets: Ints) -> tuple[Ints, Array]:
        return np.zeros_like(inputs), self._order[inputs]


class Route(Producer):
    """Tokens to the experts they chose; an item is the number of a (token, choice) pair."""

    def __init__(self, chosen: Ints, experts: int) -> None:
        self._chosen = chosen
        super().__init__(inputs=len(chosen), largest=chosen.shape[1], streams=experts)

    def counts(self, first: int, last: int) -> Ints:
        return np.full(last - first, self._chosen.shape[1], dtype=np.int64)

    def items(self, inputs: Ints, offsets: Ints) -> tuple[Ints, Array]:
        return self._chosen[inputs, offsets], inputs * self._chosen.shape[1] + offsets


def iou(box: Array, others: Array) -> npt.NDArray[np.float64]:
    """Intersection over union of one box (x0, y0, x1, y1) with others."""
    low = np.maximum(box[:2], others[:, :2])
    high = np.minimum(box[2:], others[:, 2:])
    both = np.prod(np.maximum(0.0, high - low), axis=1)
    areas = np.prod(others[:, 2:] - others[:, :2], axis=1)
    union = np.prod(box[2:] - box[:2]) + areas - both
    share: npt.NDArray[np.float64] = np.zeros(len(others))
    np.divide(both, union, out=share, where=union > 0)
    return share


def choose_experts(logits: Array, choices: int) -> Ints:
    """The experts with the largest logits, the largest first, of equals the first."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :choices].astype(np.int64)


def collect(
    mechanism: Mechanism, producer: Producer, capacity: int, **options: Any
) -> tuple[list[Array], Run]:
    """All items of every stream, in order, as the consumer got them."""
    got: list[list[Array]] = [[] for _ in range(producer.streams)]
    done = run(
        mechanism, producer, lambda stream, values: got[stream].append(values), capacity, **options
    )
    empty = np.empty((0, *producer.item_shape), dtype=producer.dtype)
    return [np.concatenate([empty, *parts]) for parts in got], done


def nonzero(x: Array, capacity: int, mechanism: Mechanism, **options: Any) -> Array:
    """Like ``numpy.argwhere``."""
    return collect(mechanism, Select(x != 0), capacity, **options)[0][0]


def masked_select(
    x: Array, mask: npt.NDArray[np.bool_], capacity: int, mechanism: Mechanism, **options: Any
) -> Array:
    """Like ``x[mask]``."""
    return collect(mechanism, Select(mask, x), capacity, **options)[0][0]


def expand(x: Array, lengths: Ints, capacity: int, mechanism: Mechanism, **options: Any) -> Array:
    """Like ``numpy.repeat(x, lengths, axis=0)``."""
    return collect(mechanism, Expand(x, lengths), capacity, **options)[0][0]


def nms(
    boxes: Array,
    scores: Array,
    iou_threshold: float,
    capacity: int,
    mechanism: Mechanism,
    **options: Any,
) -> Ints:
    """The boxes that stay, by falling score."""
    return collect(mechanism, Suppress(boxes, scores, iou_threshold), capacity, **options)[0][0]


def route(
    logits: Array, choices: int, capacity: int, mechanism: Mechanism, **options: Any
) -> list[Ints]:
    """For every expert its (token, choice) pairs, in the order of the tokens."""
    producer = Route(choose_experts(logits, choices), logits.shape[1])
    return collect(mechanism, producer, capacity, **options)[0]

"""What requests take on a GPU: lists of steps, in stretches, variants and moves.

A step launches a graph, records an event, lets a stream wait for one, or holds the host until one
has happened. A stretch is a list of steps; a request is a list of stretches, one for a worker
without joints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eclip.core.rules import Rules
from eclip.errors import DeviceError

LAUNCH, RECORD, WAIT, HOLD = 0, 1, 2, 3
# A dozen graphs that wait for events keep other workers' launches from starting until they have
# moved on (docs/results/lanes.md, lock-step); up to six were seen to do no harm.
AHEAD = 2
ANYBODY = (1 << 62) - 1  # as a variant's bit set: it fits any set of active workers

# The words of a program: addresses of its columns, how long these are, and its worker's constants.
KIND, FIRST, SECOND, BEGINS, ENTRY, STREAM, INNER, VARIANT_ACTIVE = range(8)
WHO, LEVEL, CHOICES, EVENTS, DONE_NS, COPIES = range(8, 14)
STEPS, PARTS, VARIANTS, RULES, IN_FLIGHT, STRETCHES, SLOTS, ROW, BOUND_NS = range(14, 23)
PROGRAM_WORDS = 24

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """What one stretch of a request takes, in order."""

    kind: Ints
    first: Words  # executable, event, stream, event
    second: Words  # stream, stream, event, nothing
    entry: int  # the stream that it begins on
    stream: int  # the stream that completes last
    barriers: int  # between lanes, inside


@dataclass(frozen=True)
class Stretches:
    """What requests of a worker take: one entry for every stretch, in each variant or moved."""

    variants: Sequence[tuple[int, Sequence[Steps]]]  # with the bit set of the active workers
    moves: Sequence[Sequence[Steps]] = ()
    events: Sequence[Any] = ()  # one for each stretch in flight, where there are several
    done_ns: Sequence[int] = (0,)  # per stretch: how far a request alone is at its end


def whole_request(launch: tuple[int, Any, Any]) -> Stretches:
    """A request that is one launch, for any set of active workers."""
    return Stretches([(ANYBODY, [steps_of([launch])])])


def chained(parts: Sequence[tuple[Any, Any, tuple[Any, Any] | None]]) -> Steps:
    """Graphs one after another: executable, stream, and the event and stream it waits on, if any.

    No more than ``AHEAD`` graphs are queued behind one that runs: the host holds until then.
    """
    steps: list[tuple[int, Any, Any]] = []
    events: list[Any] = []
    for executable, stream, barrier in parts:
        if barrier is not None:
            event, before = barrier
            if len(events) >= AHEAD:
                steps.append((HOLD, events[-AHEAD], 0))
            events.append(event)
            steps.append((RECORD, event, before))
            steps.append((WAIT, stream, event))
        steps.append((LAUNCH, executable, stream))
    return steps_of(steps)


def steps_of(steps: Sequence[tuple[int, Any, Any]], barriers: int | None = None) -> Steps:
    """``barriers``: how many are inside; by default as many as streams wait."""
    streams = [int(stream) for kind, _, stream in steps if kind == LAUNCH]
    waits = sum(kind == WAIT for kind, _, _ in steps)
    return Steps(
        kind=np.array([kind for kind, _, _ in steps], dtype=np.int64),
        first=np.array([int(first) for _, first, _ in steps], dtype=np.uint64),
        second=np.array([int(second) for _, _, second in steps], dtype=np.uint64),
        entry=streams[0],
        stream=streams[-1],
        barriers=waits if barriers is None else barriers,
    )


_STEP_COLUMNS = "kind", "first", "second"
_PART_COLUMNS = "entry", "stream", "barriers"


class Program:
    """A worker's stretches and rules as words, and the arrays that these point to."""

    def __init__(self, stretches: Stretches, row: int, rules: Rules, copies: Words) -> None:
        ordered = sorted(stretches.variants, key=lambda pair: pair[0].bit_count())
        taken = (*(steps for _, steps in ordered), *stretches.moves)
        if any(len(steps) != len(stretches.done_ns) for steps in taken):
            raise DeviceError("a worker's variants or moves have other stretches than its plan")
        every = [steps for stretch in taken for steps in stretch]
        active = [bits for bits, _ in ordered]
        self._columns = columns = [
            *(np.concatenate([getattr(one, name) for one in every]) for name in _STEP_COLUMNS),
            np.cumsum([0, *(len(steps.kind) for steps in every)]),
            *(np.array([getattr(one, name) for one in every]) for name in _PART_COLUMNS),
            *(np.array(active), rules.who, rules.level, rules.choice),
            *(np.array([int(event) for event in stretches.events], dtype=np.uint64),),
            *(np.array(stretches.done_ns), np.ascontiguousarray(copies)),
        ]
        if any(column.itemsize != 8 or not column.flags.c_contiguous for column in columns):
            raise DeviceError("a worker's program has a column of other than 64-bit words")
        lengths = (len(columns[0]), len(every), len(ordered), len(rules.who))
        more = (len(stretches.events), len(stretches.done_ns), len(copies))
        self.words: Ints = np.zeros(PROGRAM_WORDS, dtype=np.int64)
        found = [column.ctypes.data for column in columns]
        found += [*lengths, *more, row, rules.bound_ns]
        self.words[: len(found)] = found

"""One worker's loop: what ``drive`` reads of the worker, and the thread that it runs in.

Threads share the board and nothing else, so they do not disturb each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import numpy as np

from eclip.core.requests import COLUMNS, END, FOREVER_NS, OWN, REQUEST_WORDS, Ring, filled_ring
from eclip.core.rules import (
    ALWAYS,
    BUSY_SINCE,
    DEADLINE,
    HEARTBEAT,
    IDLE,
    LATEST,
    LEFT,
    NO_RULES,
    SERVICE,
    TIER,
    WORDS,
    Rules,
)
from eclip.errors import DeviceError
from eclip.gpu.entry_points import EntryPoints
from eclip.gpu.loop import addresses_of, drive
from eclip.gpu.steps import LAUNCH, Ints, Stretches, Words, whole_request

_CHUNK = 1 << 15  # requests of its own between two returns to Python
NO_COPIES = np.zeros((0, 2), dtype=np.uint64)


@dataclass(frozen=True)
class Place:
    """A worker's row on the board, and those of all workers of its session, by their index."""

    board: Ints
    row: int
    peers: Ints

    @property
    def beats(self) -> bool:
        """Others must see that this process runs."""
        return bool(self.board[self.row, HEARTBEAT] != ALWAYS)

    def raise_busy(
        self, arrival_ns: int, bound_ns: int, request_ns: int, before_ns: int = 0
    ) -> None:
        """A request was accepted: others give way from now on, not when the loop has woken up.

        ``before_ns``: what those take that wait before it."""
        row = self.board[self.row]
        due_ns = arrival_ns + bound_ns
        if row[BUSY_SINCE] != IDLE:
            row[LATEST] = min(int(row[LATEST]), max(arrival_ns, due_ns - before_ns))
            return
        if row[TIER] == SERVICE:
            row[DEADLINE] = row[LATEST] = due_ns
            row[LEFT] = request_ns
        row[BUSY_SINCE] = arrival_ns


class LoopGpu(Protocol):
    """What the loop asks of a GPU."""

    entry_points: EntryPoints

    def make_current(self) -> None:
        """For the calling thread."""
        ...

    def describe(self, status: int) -> str:
        """A bad status, for a person."""
        ...


def _compile(program: tuple[Any, ...]) -> None:
    """Now: the first call would otherwise do it, or read it from the cache, in the middle of a
    run."""
    ring, own = Ring(1), np.zeros((1, REQUEST_WORDS), dtype=np.int64)
    over = np.ones(1, dtype=np.int64)
    cast(Any, drive)(*program, NO_COPIES, ring.rows, ring.marks, own, 0, over)


def alone_place() -> Place:
    """For a worker without neighbours."""
    board = np.zeros((1, WORDS), dtype=np.int64)
    board[0, HEARTBEAT] = ALWAYS
    board[0, BUSY_SINCE] = IDLE
    return Place(board, 0, np.zeros(1, dtype=np.int64))


def _program(stretches: Stretches, place: Place, rules: Rules) -> tuple[Any, ...]:
    """What ``drive`` reads of a worker, in its order."""
    ordered = sorted(stretches.variants, key=lambda pair: pair[0].bit_count())
    taken = (*(steps for _, steps in ordered), *stretches.moves)
    if any(len(steps) != len(stretches.done_ns) for steps in taken):
        raise DeviceError("a worker's variants or moves have other stretches than its plan")
    every = [steps for stretch in taken for steps in stretch]
    return (
        np.concatenate([steps.kind for steps in every]),
        np.concatenate([steps.first for steps in every]),
        np.concatenate([steps.second for steps in every]),
        np.cumsum([0, *(len(steps.kind) for steps in every)]),
        np.array([steps.entry for steps in every], dtype=np.uint64),
        np.array([steps.stream for steps in every], dtype=np.uint64),
        np.array([steps.barriers for steps in every], dtype=np.int64),
        np.array([active for active, _ in ordered], dtype=np.int64),
        place.board,
        place.row,
        place.peers,
        place.beats,
        rules.who,
        rules.level,
        rules.choice,
        np.array([int(event) for event in stretches.events], dtype=np.uint64),
        np.array(stretches.done_ns, dtype=np.int64),
        rules.bound_ns,
        float(rules.floor),
    )


class WorkerLoop:
    """One worker's stretches, its place on the board, and its rules."""

    def __init__(
        self,
        gpu: LoopGpu,
        stretches: Stretches,
        place: Place | None = None,  # None: no neighbour reads it
        rules: Rules = NO_RULES,
    ) -> None:
        self.stretches = max(stretches.variants, key=lambda pair: pair[0].bit_count())[1]
        self._gpu = gpu
        self._place = place or alone_place()
        self._bound_ns, self._request_ns = rules.bound_ns, stretches.done_ns[-1]
        self._program = (addresses_of(gpu.entry_points), *_program(stretches, self._place, rules))
        _compile(self._program)

    def drive(
        self,
        arrivals: Ints | None = None,  # absolute times; None: closed loop
        stop_at_ns: int = FOREVER_NS,
        stop: Ints | None = None,
        most_requests: int = FOREVER_NS,
    ) -> Ints:
        """Serve requests in the calling thread; a row for each, with absolute times."""
        none: Ints = np.empty(0, dtype=np.int64)
        ring = filled_ring(none if arrivals is None else arrivals[:most_requests])
        ring.marks[OWN] = arrivals is None
        stop = np.zeros(1, dtype=np.int64) if stop is None else stop
        own = list(self._serve(ring, NO_COPIES, stop, stop_at_ns, most_requests))
        return np.concatenate([ring.rows[: ring.answered], *own])[:, :COLUMNS]

    def serve(self, ring: Ring, copies: Words, stop: Ints) -> None:
        """Serve what is submitted, in the calling thread, until told to stop."""
        for _ in self._serve(ring, copies, stop, FOREVER_NS, FOREVER_NS):
            pass

    def _serve(
        self, ring: Ring, copies: Words, stop: Ints, stop_at_ns: int, most_own: int
    ) -> Iterator[Ints]:
        """Gives the requests of its own, some at a time."""
        self._gpu.make_current()
        left = most_own
        try:
            while left > 0:
                own = np.zeros((min(left, _CHUNK), REQUEST_WORDS), dtype=np.int64)
                done, status = cast(Any, drive)(
                    *self._program, copies, ring.rows, ring.marks, own, stop_at_ns, stop
                )
                if status:
                    raise DeviceError(f"a launch failed: {self._gpu.describe(status)}")
                yield own[:done]
                left -= done
                if done < len(own):
                    break
        finally:
            self._place.board[self._place.row, BUSY_SINCE] = IDLE

    def accepted(self, arrival_ns: int, behind: int) -> None:
        """A request of its ring behind so many others, which the loop does not know yet."""
        before_ns = behind * self._request_ns
        self._place.raise_busy(arrival_ns, self._bound_ns, self._request_ns, before_ns)


class Runner(threading.Thread):
    """A worker's loop in a thread of its own; ``rows`` raises what went wrong in it.

    A loop that fails stops the others too, through the flag they share.
    """

    def __init__(self, serve: Callable[[], Ints], stop: Ints) -> None:
        super().__init__(daemon=True)
        self._serve = serve
        self._stop_all = stop
        self._rows: Ints | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._rows = self._serve()
        except BaseException as error:
            self._error = error
            self._stop_all[0] = 1

    def rows(self) -> Ints:
        """Waits for the loop to end."""
        self.join()
        if self._rows is None:
            raise self._error or DeviceError("a worker's thread never ran")
        return self._rows


class Repeater:
    """One executable launched back to back from a thread of its own, while the block lasts."""

    def __init__(self, gpu: LoopGpu, executable: Any, stream: Any) -> None:
        worker = WorkerLoop(gpu, whole_request((LAUNCH, executable, stream)))
        self._stop = np.zeros(1, dtype=np.int64)
        self._runner = Runner(lambda: worker.drive(stop=self._stop), self._stop)

    def __enter__(self) -> Self:
        self._runner.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop[0] = 1
        self._runner.join()

    def ends_ns(self) -> Ints:
        return self._runner.rows()[:, END]

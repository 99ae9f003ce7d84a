"""A worker's program, as ``drive`` reads it, and the thread that a loop runs in.

Threads share the board and nothing else, so they do not disturb each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import numpy as np

from eclip.core.requests import (
    COLUMNS,
    END,
    FOREVER_NS,
    NO_DESCRIPTOR,
    NOBODY_OWN,
    OWN,
    REQUEST_WORDS,
    SEALED,
    Doors,
    each_alone,
    filled_ring,
)
from eclip.core.rules import (
    ALWAYS,
    BUSY_SINCE,
    HEARTBEAT,
    IDLE,
    NO_RULES,
    WORDS,
    Rules,
)
from eclip.errors import DeviceError
from eclip.gpu.calls import addresses_of
from eclip.gpu.entry_points import EntryPoints
from eclip.gpu.loop import drive
from eclip.gpu.steps import LAUNCH, Ints, Program, Stretches, Words, whole_request

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


class LoopGpu(Protocol):
    """What the loop asks of a GPU."""

    entry_points: EntryPoints

    def make_current(self) -> None:
        """For the calling thread."""
        ...

    def describe(self, status: int) -> str:
        """A bad status, for a person."""
        ...


def alone_place() -> Place:
    """For a worker without neighbours."""
    board = np.zeros((1, WORDS), dtype=np.int64)
    board[0, HEARTBEAT] = ALWAYS
    board[0, BUSY_SINCE] = IDLE
    return Place(board, 0, np.zeros(1, dtype=np.int64))


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
        self.place = place or alone_place()
        self._given = stretches
        self._rules = rules
        # Compiled now: the first call would otherwise do it in the middle of a run.
        self.drive(stop=np.ones(1, dtype=np.int64), most_requests=1)

    @property
    def service(self) -> tuple[int, int, int]:
        """Its row, its bound and what a request of it takes alone."""
        return self.place.row, self._rules.bound_ns, self._given.done_ns[-1]

    def program(self, copies: Words) -> Program:
        return Program(self._given, self.place.row, self._rules, copies)

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
        doors = Doors(each_alone(1))
        doors.open([ring], NO_DESCRIPTOR)
        doors.loops[0, [OWN, SEALED]] = 0 if arrivals is None else NOBODY_OWN, 1
        stop = np.zeros(1, dtype=np.int64) if stop is None else stop
        served = GroupLoop([self], [NO_COPIES], doors, 0)
        own = list(served.run(stop, stop_at_ns, most_requests))
        return np.concatenate([ring.rows[: ring.answered], *own])[:, :COLUMNS]


class GroupLoop:
    """One loop for workers of which one runs at a time. ``counts`` have a
    row for each worker, ``places`` what ``drive`` knows of all groups of the session."""

    def __init__(
        self,
        loops: Sequence[WorkerLoop],
        copies: Sequence[Words],
        doors: Doors,
        me: int,
        counts: Ints | None = None,
        places: Ints | None = None,
    ) -> None:
        self._gpu = loops[0]._gpu
        self._place = loops[0].place
        self._rows = [loop.place.row for loop in loops]
        self._programs = [one.program(given) for one, given in zip(loops, copies, strict=True)]
        self._given = (
            addresses_of(self._gpu.entry_points),
            self._place.board,
            self._place.peers,
            self._place.beats,
            np.stack([program.words for program in self._programs]),
            np.array([float(loop._rules.floor) for loop in loops]),
            np.zeros((len(loops), 2), dtype=np.int64) if counts is None else counts,
            doors.table,
            me,
            np.zeros((1, 1, 3), dtype=np.int64) if places is None else places,
            doors.looking,
            doors.accounts.words,
            doors.loops[me],
        )

    def run(self, stop: Ints, stop_at_ns: int, most_own: int) -> Iterator[Ints]:
        """Serve in the calling thread; gives the requests of its own, some at a time."""
        self._gpu.make_current()
        left = most_own
        try:
            while left > 0:
                own = np.zeros((min(left, _CHUNK), REQUEST_WORDS), dtype=np.int64)
                done, status = cast(Any, drive)(*self._given, own, stop_at_ns, stop)
                if status:
                    raise DeviceError(f"a launch failed: {self._gpu.describe(status)}")
                yield own[:done]
                left -= done
                if done < len(own):
                    break
        finally:
            self._place.board[self._rows, BUSY_SINCE] = IDLE


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

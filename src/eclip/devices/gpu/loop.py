"""The driving loop: requests of one worker, launched from compiled code that holds no GIL.

A request is a list of stretches, one for a worker without joints. A stretch is a list of steps
(launch a graph, record an event, let a stream wait for one, hold the host until one has happened).
Each worker has a thread of its own that repeats: wait for the next request, pick the variant by who
is active, take the stretches, wait for completion. Before each stretch it waits until fewer than
``depth`` are in flight, and then decides by its rules: go on, move, or launch nothing for now.
Threads share the board and nothing else, so they do not disturb each other.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numba
import numpy as np
import numpy.typing as npt

from eclip.devices.deciding import counts_as_busy, decide, owed_after, publish
from eclip.errors import DeviceError
from eclip.runtime.reactions import (
    ALWAYS,
    BANKED_NS,
    BUSY_SINCE,
    CROSSED,
    GO_ON,
    HEARTBEAT,
    IDLE,
    LAUNCHED,
    LEFT,
    LONGEST_PAUSE,
    MOVED,
    NO_RULES,
    SERVED,
    SERVICE,
    TAIL,
    TIER,
    WORDS,
    YIELD,
    YIELDED,
    Rules,
)

LAUNCH, RECORD, WAIT, HOLD = 0, 1, 2, 3
# A dozen graphs that wait for events keep other workers' launches from starting until they have
# moved on (docs/results.md, lock-step); up to six were seen to harm nobody.
AHEAD = 2
_CLOCK_MONOTONIC = 1
_CHUNK = 1 << 15  # requests between two returns to Python
ANYBODY = (1 << 62) - 1  # as a variant's bit set: it fits whoever is active
FOREVER_NS = int(np.iinfo(np.int64).max)
# A worker that yields spins for a moment, then looks about every 20 us. That takes a tenth of a
# core; a futex would take none, but does not see slack run out, floors and owners that have died.
_SPIN_NS = 50_000
_LOOK_US = 20
_TIMER_SLACK = (29, 1000)  # prctl: sleep no more than 1 us longer than asked, instead of 50

# Columns of a served request.
ARRIVAL, START, END, BARRIERS, YIELDS, MOVES, PAUSE_NS = range(7)
COLUMNS = 7

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EntryPoints:
    """The functions of a GPU's driver that the loop calls, by their names in its library. All their
    arguments are 64-bit words; they return 0 or a bad status."""

    library: str
    graph_launch: str  # executable, stream
    event_record: str  # event, stream
    stream_wait: str  # stream, event, flags
    event_hold: str  # event: the host waits for it
    synchronise: str  # stream: the host waits for it


def _entry(library: str, name: str, arguments: int) -> Any:
    """A C function, as compiled code calls it."""
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        raise DeviceError(
            f"{library} has no {name}: the GPU's driver is missing or too old"
        ) from None
    function.argtypes = [ctypes.c_uint64] * arguments
    function.restype = ctypes.c_int
    return function


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
class Ways:
    """What requests of a worker take: one entry for every stretch, in each variant or moved."""

    variants: Sequence[tuple[int, Sequence[Steps]]]  # with the bit set of the active workers
    moves: Sequence[Sequence[Steps]] = ()


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


@dataclass(frozen=True)
class Behaviour:
    """What a worker does at its joints."""

    rules: Rules = NO_RULES
    events: tuple[int, ...] = ()  # one for each stretch in flight, where there are several
    done_ns: tuple[int, ...] = (0,)  # per stretch: how far a request alone is at its end
    bound_ns: int = 0  # of a service
    floor: float = 0.0


NO_BEHAVIOUR = Behaviour()


class LoopGpu(Protocol):
    """What the loop asks of a GPU."""

    entry_points: EntryPoints

    def make_current(self) -> None:
        """For the calling thread."""
        ...

    def describe(self, status: int) -> str:
        """A bad status, for a person."""
        ...


@functools.cache
def make_driver(table: EntryPoints) -> Callable[..., tuple[int, int, int]]:
    """The loop, bound to a GPU's driver and compiled; called like ``drive`` below."""
    graph_launch = _entry(table.library, table.graph_launch, 2)
    event_record = _entry(table.library, table.event_record, 2)
    stream_wait = _entry(table.library, table.stream_wait, 3)
    event_hold = _entry(table.library, table.event_hold, 1)
    synchronise = _entry(table.library, table.synchronise, 1)
    clock = _entry("libc.so.6", "clock_gettime", 2)
    usleep = _entry("libc.so.6", "usleep", 1)
    prctl = _entry("libc.so.6", "prctl", 2)

    @numba.njit(nogil=True)
    def now_ns(scratch: Ints) -> int:
        clock(_CLOCK_MONOTONIC, scratch.ctypes.data)
        return int(scratch[0] * 1_000_000_000 + scratch[1])

    @numba.njit(nogil=True)
    def reckon(owed: float, floor: float, elapsed_ns: int, done_ns: int) -> float:
        """Between two joints passes less than this, unless the process was stopped: then nobody
        owes it anything."""
        return float(owed_after(owed, floor, min(elapsed_ns, BANKED_NS), done_ns))

    @numba.njit(nogil=True)
    def tell(board: Ints, row: int, request: Ints, stretches: int) -> None:
        """Show people what was served; nobody decides by it."""
        board[row, SERVED] += 1
        board[row, LAUNCHED] += stretches
        board[row, YIELDED] += request[YIELDS]
        board[row, MOVED] += request[MOVES]
        board[row, CROSSED] += request[BARRIERS]
        board[row, LONGEST_PAUSE] = max(board[row, LONGEST_PAUSE], request[PAUSE_NS])
        # Rises 99 times as far as it falls, so it settles where one request in 100 is slower.
        latency, tail = request[END] - request[ARRIVAL], board[row, TAIL]
        step = max(tail, latency // 2) // 2000
        board[row, TAIL] = max(tail + (99 * step if latency > tail else -step), 0)

    @numba.njit(nogil=True)
    def take(kind: Ints, first: Words, second: Words, begin: int, end: int) -> int:
        """Take these steps; the first bad status, or 0."""
        for step in range(begin, end):
            if kind[step] == LAUNCH:
                status = graph_launch(first[step], second[step])
            elif kind[step] == RECORD:
                status = event_record(first[step], second[step])
            elif kind[step] == WAIT:
                status = stream_wait(first[step], second[step], np.uint64(0))
            else:
                status = event_hold(first[step])
            if status:
                return int(status)
        return 0

    @numba.njit(nogil=True)
    def drive(
        kind: Ints,
        first: Words,
        second: Words,
        begins: Ints,  # way × stretch: where its steps begin; one more entry at the end
        entry: Words,  # way × stretch: the stream that it begins on
        stream: Words,  # way × stretch: the stream that completes last
        inner: Ints,  # way × stretch: barriers inside
        variant_active: Ints,  # per variant a bit set of workers; the smallest sets first
        board: Ints,  # shared by all threads
        row: int,
        peers: Ints,
        beats: bool,
        who: Ints,  # rules, as the following
        level: Ints,
        choices: Ints,
        events: Words,  # one for each stretch that may be in flight
        done_ns: Ints,
        bound_ns: int,
        floor: float,
        closed: bool,
        arrivals: Ints,  # absolute times
        taken: int,  # how many of them were served before
        stop_at: int,
        stop: Ints,  # set from outside to end the loop
        rows: Ints,  # out: the columns of every request
    ) -> tuple[int, int, int]:
        """Requests done, arrivals taken, and the first bad status, 0 if there was none."""
        prctl(np.uint64(_TIMER_SLACK[0]), np.uint64(_TIMER_SLACK[1]))
        scratch = np.zeros(2, dtype=np.int64)
        stretches = done_ns.shape[0]
        depth = max(events.shape[0], 1)
        request_ns = done_ns[stretches - 1]
        service = board[row, TIER] == SERVICE and bound_ns > 0
        owed = 0.0  # against the floor, and when it was last reckoned
        reckoned = now_ns(scratch)
        done = 0
        while done < rows.shape[0]:
            now = now_ns(scratch)
            if beats:
                board[row, HEARTBEAT] = now
            if now >= stop_at or stop[0]:
                break
            arrival = now
            if not closed:
                if taken >= arrivals.shape[0]:
                    break
                arrival = arrivals[taken]
                if arrival > now:
                    board[row, BUSY_SINCE] = IDLE
                    reckoned = now  # a floor promises nothing for time without requests
                    # Sleep while it is far, spin when it is near.
                    if arrival - now > 200_000:
                        usleep(np.uint64(min(arrival - now - 150_000, 10_000_000) // 1000))
                    continue
                taken += 1
            if service:
                queued = arrivals[taken:]  # none in a closed loop
                publish(board, row, arrival, queued, bound_ns, request_ns, now)
            left = board[row, LEFT]
            board[row, BUSY_SINCE] = now
            active = 0
            for peer in range(peers.shape[0]):
                if peers[peer] == row or counts_as_busy(board, peers[peer], now):
                    active |= 1 << peer
            variant = 0
            while active & ~variant_active[variant]:
                variant += 1
            rows[done, ARRIVAL] = arrival
            rows[done, START] = now_ns(scratch)
            rows[done, BARRIERS:] = 0
            last = np.uint64(0)
            for stretch in range(stretches):
                if stretch >= depth:
                    status = event_hold(events[stretch % depth])
                    if status:
                        return done, taken, status
                    now = now_ns(scratch)
                    before = done_ns[stretch - depth - 1] if stretch > depth else 0
                    done_since = done_ns[stretch - depth] - before
                    owed = reckon(owed, floor, now - reckoned, done_since)
                    reckoned = now
                    if service:
                        board[row, LEFT] = left - done_ns[stretch - depth]
                choice = GO_ON
                held_at = 0
                while choices.shape[0] > 0:
                    now = now_ns(scratch)
                    if beats:
                        board[row, HEARTBEAT] = now
                    overtaken = rows[done, YIELDS]
                    choice = decide(board, row, peers, who, level, choices, overtaken, now)
                    if choice != YIELD:
                        break
                    owed = reckon(owed, floor, now - reckoned, 0)
                    reckoned = now
                    if owed > 0.0 or stop[0] or now >= stop_at:
                        choice = GO_ON
                        break
                    if held_at == 0:
                        held_at = now
                    if now - held_at > _SPIN_NS:
                        usleep(np.uint64(_LOOK_US))
                if held_at:
                    rows[done, YIELDS] += 1
                    rows[done, PAUSE_NS] = max(rows[done, PAUSE_NS], now - held_at)
                way = variant
                if choice > 0:
                    way = variant_active.shape[0] + choice - 1
                    rows[done, MOVES] += 1
                at = way * stretches + stretch
                if stretch > 0 and entry[at] != last:
                    event = events[(stretch - 1) % depth]
                    status = stream_wait(entry[at], event, np.uint64(0))
                    if status:
                        return done, taken, status
                    rows[done, BARRIERS] += 1
                status = take(kind, first, second, begins[at], begins[at + 1])
                if status:
                    return done, taken, status
                rows[done, BARRIERS] += inner[at]
                last = stream[at]
                if stretches > 1:
                    status = event_record(events[stretch % depth], last)
                    if status:
                        return done, taken, status
            status = synchronise(last)
            if status:
                return done, taken, status
            now = now_ns(scratch)
            in_flight = min(depth, stretches)
            before = done_ns[stretches - in_flight - 1] if stretches > in_flight else 0
            owed = reckon(owed, floor, now - reckoned, request_ns - before)
            reckoned = now
            rows[done, END] = now
            tell(board, row, rows[done], stretches)
            done += 1
        return done, taken, 0

    _compile(drive)
    return drive


def _compile(drive: Any) -> None:
    """Now: the first call would otherwise do it in the middle of a run."""
    ways = whole_request((LAUNCH, 0, 0))
    now = np.ones(1, dtype=np.int64)
    rows = np.zeros((1, COLUMNS), dtype=np.int64)
    drive(*_program(ways, alone_place(), NO_BEHAVIOUR), True, now[:0], 0, 0, now, rows)


def alone_place() -> Place:
    """For a worker that nobody else looks at."""
    board = np.zeros((1, WORDS), dtype=np.int64)
    board[0, HEARTBEAT] = ALWAYS
    board[0, BUSY_SINCE] = IDLE
    return Place(board, 0, np.zeros(1, dtype=np.int64))


def _program(ways: Ways, place: Place, behaviour: Behaviour) -> tuple[Any, ...]:
    """What ``drive`` reads of a worker, in its order."""
    ordered = sorted(ways.variants, key=lambda pair: pair[0].bit_count())
    taken = (*(stretches for _, stretches in ordered), *ways.moves)
    if any(len(stretches) != len(behaviour.done_ns) for stretches in taken):
        raise DeviceError("a worker's ways have other numbers of stretches than its plan")
    every = [steps for stretches in taken for steps in stretches]
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
        *behaviour.rules,
        np.array(behaviour.events, dtype=np.uint64),
        np.array(behaviour.done_ns, dtype=np.int64),
        behaviour.bound_ns,
        float(behaviour.floor),
    )


class WorkerLoop:
    """One worker's ways, its place on the board, and what it does at joints."""

    def __init__(
        self,
        gpu: LoopGpu,
        ways: Ways,
        place: Place | None = None,  # None: nobody else looks at it
        behaviour: Behaviour = NO_BEHAVIOUR,
    ) -> None:
        self.stretches = max(ways.variants, key=lambda pair: pair[0].bit_count())[1]
        self._gpu = gpu
        self._place = place or alone_place()
        self._drive = make_driver(gpu.entry_points)
        self._program = _program(ways, self._place, behaviour)

    def drive(
        self,
        arrivals: Ints | None = None,  # absolute times; None: closed loop
        stop_at_ns: int = FOREVER_NS,
        stop: Ints | None = None,
        most_requests: int = FOREVER_NS,
    ) -> Ints:
        """Serve requests in the calling thread; a row for each, with absolute times."""
        self._gpu.make_current()
        closed = arrivals is None
        times = np.empty(0, dtype=np.int64) if arrivals is None else arrivals
        stop = np.zeros(1, dtype=np.int64) if stop is None else stop
        chunks: list[Ints] = []
        taken = 0
        left = most_requests
        try:
            while left > 0:
                rows = np.zeros((min(left, _CHUNK), COLUMNS), dtype=np.int64)
                done, taken, status = self._drive(
                    *self._program, closed, times, taken, stop_at_ns, stop, rows
                )
                if status:
                    raise DeviceError(f"a launch failed: {self._gpu.describe(status)}")
                chunks.append(rows[:done])
                left -= done
                if done < len(rows):
                    break
        finally:
            self._place.board[self._place.row, BUSY_SINCE] = IDLE
        return np.concatenate(chunks)


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


def whole_request(launch: tuple[int, Any, Any]) -> Ways:
    """A request that is one launch, whoever else is active."""
    return Ways([(ANYBODY, [steps_of([launch])])])


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

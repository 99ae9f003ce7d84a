"""The driving loop: requests of one worker, launched from compiled code that holds no GIL.

Requests come from a ring (devices/requests.py), which a run fills beforehand and a session that
serves while the loop runs. A request is a list of stretches, one for a worker without joints. A
stretch is a list of steps (launch a graph, record an event, let a stream wait for one, hold the
host until one has happened).
Each worker has a thread of its own that repeats: wait for the next request, pick the variant by who
is active, take the stretches, wait for completion. Before each stretch it waits until fewer than
``depth`` are in flight, and then decides by its rules: go on, move, or launch nothing for now. A
request that is given up or past its deadline launches nothing more, and ends when what it has
launched is done. Threads share the board and nothing else, so they do not disturb each other.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from eclip.devices import deciding
from eclip.devices.deciding import counts_as_busy, decide, owed_after, publish
from eclip.devices.requests import (
    ANSWERED,
    ARRIVAL,
    BARRIERS,
    BELL,
    COLUMNS,
    END,
    EXPIRES,
    FOREVER_NS,
    GIVEN_UP,
    HAS_EXPIRED,
    MOVES,
    NO_SLOT,
    OUTCOME,
    OWN,
    PAUSE_NS,
    REQUEST_WORDS,
    SEALED,
    SLOT,
    START,
    SUBMITTED,
    WAKEUP,
    WAS_CANCELLED,
    WITH_RESULT,
    YIELDS,
    Ring,
    filled_ring,
)
from eclip.devices.requests import SERVED as SERVED_MARK
from eclip.devices.requests import YIELDED as YIELDED_MARK
from eclip.errors import DeviceError
from eclip.jit import call_c, compiled, compiled_with, inlined
from eclip.runtime import reactions
from eclip.runtime.reactions import (
    ALWAYS,
    BANKED_NS,
    BUSY_SINCE,
    CROSSED,
    DEADLINE,
    GO_ON,
    HEARTBEAT,
    IDLE,
    LAUNCHED,
    LEFT,
    LONGEST_PAUSE,
    MOST_QUEUED,
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
_CHUNK = 1 << 15  # requests of its own between two returns to Python
ANYBODY = (1 << 62) - 1  # as a variant's bit set: it fits whoever is active
# A worker that yields spins for a moment, then looks about every 20 us. That takes a tenth of a
# core; a futex would take none, but does not see slack run out, floors and owners that have died.
_SPIN_NS = 50_000
_LOOK_US = np.uint64(20)
_TIMER_SLACK = (
    np.uint64(29),
    np.uint64(1000),
)  # prctl: sleep no more than 1 us longer than asked, instead of 50

# Without anything to do a loop sleeps until its bell rings, at most so long; one without a bell
# looks sooner whether it is to stop. It wakes up a little before a request is due, and spins.
_MOST_REST_MS, _MOST_REST_WITHOUT_BELL_MS = 100, 10
_WAKE_UP_NS, _SPIN_BEFORE_NS = 200_000, 150_000
_READABLE = 1 << 32  # POLLIN, in the word that is a ``struct pollfd``

NO_COPIES = np.zeros((0, 2), dtype=np.uint64)

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


def _address(library: str, name: str) -> int:
    """Of a C function, as compiled code calls it."""
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        raise DeviceError(
            f"{library} has no {name}: the GPU's driver is missing or too old"
        ) from None
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


# Places in what ``addresses_of`` gives.
_GRAPH_LAUNCH, _EVENT_RECORD, _STREAM_WAIT, _EVENT_HOLD, _SYNCHRONISE = range(5)
_CLOCK, _SLEEP, _CONTROL, _POLL, _READ, _WRITE = range(5, 11)
_NOTHING = np.uint64(0)  # where a function takes fewer words


@functools.cache
def addresses_of(table: EntryPoints) -> Words:
    """The functions that ``drive`` calls."""
    named = (
        *(table.graph_launch, table.event_record, table.stream_wait),
        *(table.event_hold, table.synchronise),
    )
    system = ("clock_gettime", "usleep", "prctl", "poll", "read", "write")
    return np.array(
        [
            *(_address(table.library, name) for name in named),
            *(_address("libc.so.6", name) for name in system),
        ],
        dtype=np.uint64,
    )


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

    def raise_busy(self, arrival_ns: int, bound_ns: int, request_ns: int) -> None:
        """A request was accepted: others give way from now on, not when the loop has woken up."""
        row = self.board[self.row]
        if row[BUSY_SINCE] == IDLE:
            row[DEADLINE] = arrival_ns + bound_ns
            row[LEFT] = request_ns
            row[BUSY_SINCE] = arrival_ns


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


@inlined
def _now_ns(calls: Words, scratch: Ints) -> int:
    call_c(calls[_CLOCK], np.uint64(_CLOCK_MONOTONIC), np.uint64(scratch.ctypes.data), _NOTHING)
    return int(scratch[0] * 1_000_000_000 + scratch[1])


@inlined
def _reckon(owed: float, floor: float, elapsed_ns: int, done_ns: int) -> float:
    """Between two joints passes less than this, unless the process was stopped: then nobody
    owes it anything."""
    return float(owed_after(owed, floor, min(elapsed_ns, BANKED_NS), done_ns))


@inlined
def _tell(board: Ints, row: int, request: Ints, stretches: int) -> None:
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


@inlined
def _outcome(request: Ints, now: int) -> int:
    """How it is to end if it ends now: with its result, unless somebody wants it to stop."""
    if request[GIVEN_UP]:
        return WAS_CANCELLED
    return HAS_EXPIRED if now >= request[EXPIRES] else WITH_RESULT


@inlined
def _look_behind(ring: Ints, marks: Ints, arrivals: Ints) -> int:
    """Arrivals of the requests behind the one whose turn it is, as many as are looked at."""
    first = marks[ANSWERED] + 1
    count = min(marks[SUBMITTED] - first, arrivals.shape[0])
    for behind in range(count):
        arrivals[behind] = ring[(first + behind) % ring.shape[0], ARRIVAL]
    return int(count)


@inlined
def _rest(calls: Words, bell: int, due_ns: int, scratch: Ints) -> None:
    """Until something is due or the bell rings; near the time, spin."""
    if due_ns > 2_000_000:
        most_ms = _MOST_REST_WITHOUT_BELL_MS if bell < 0 else _MOST_REST_MS
        wait_ms = min(due_ns // 1_000_000 - 1, most_ms)
        scratch[0] = (bell & 0xFFFFFFFF) | _READABLE
        asked = np.uint64(scratch.ctypes.data)
        call_c(calls[_POLL], asked, np.uint64(1), np.uint64(wait_ms))
        if bell >= 0:
            call_c(calls[_READ], np.uint64(bell), asked, np.uint64(8))
    elif due_ns > _WAKE_UP_NS:
        away_us = (due_ns - _SPIN_BEFORE_NS) // 1000
        call_c(calls[_SLEEP], np.uint64(away_us), _NOTHING, _NOTHING)


@inlined
def _answer(calls: Words, marks: Ints, scratch: Ints) -> None:
    """The first open request has ended, as its row says. The calls keep what was written before
    them before what is written after."""
    _now_ns(calls, scratch)
    marks[ANSWERED] += 1
    if marks[WAKEUP] >= 0:
        scratch[0] = 1
        told = np.uint64(scratch.ctypes.data)
        call_c(calls[_WRITE], np.uint64(marks[WAKEUP]), told, np.uint64(8))


@compiled
def _take(calls: Words, kind: Ints, first: Words, second: Words, begin: int, end: int) -> int:
    """Take these steps; the first bad status, or 0."""
    for step in range(begin, end):
        if kind[step] == LAUNCH:
            status = call_c(calls[_GRAPH_LAUNCH], first[step], second[step], _NOTHING)
        elif kind[step] == RECORD:
            status = call_c(calls[_EVENT_RECORD], first[step], second[step], _NOTHING)
        elif kind[step] == WAIT:
            status = call_c(calls[_STREAM_WAIT], first[step], second[step], _NOTHING)
        else:
            status = call_c(calls[_EVENT_HOLD], first[step], _NOTHING, _NOTHING)
        if status:
            return int(status)
    return 0


@compiled_with(deciding.__file__, reactions.__file__)
def drive(
    calls: Words,  # addresses_of the GPU's driver
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
    copies: Words,  # slot × 2: the executables that copy its inputs and its outputs, 0: nothing
    ring: Ints,  # a row a request
    marks: Ints,
    own: Ints,  # out: requests that nobody submitted
    stop_at: int,
    stop: Ints,  # set from outside to end the loop
) -> tuple[int, int]:
    """How many requests of its own it has run, and the first bad status, 0 if there was none."""
    call_c(calls[_CONTROL], _TIMER_SLACK[0], _TIMER_SLACK[1], _NOTHING)
    scratch = np.zeros(2, dtype=np.int64)
    waiting = np.zeros(MOST_QUEUED, dtype=np.int64)
    stretches = done_ns.shape[0]
    depth = max(events.shape[0], 1)
    request_ns = done_ns[stretches - 1]
    service = board[row, TIER] == SERVICE and bound_ns > 0
    owed = 0.0  # against the floor, and when it was last reckoned
    reckoned = _now_ns(calls, scratch)
    done = 0
    while done < own.shape[0]:
        now = _now_ns(calls, scratch)
        if beats:
            board[row, HEARTBEAT] = now
        if now >= stop_at or stop[0]:
            break
        answered = marks[ANSWERED]
        submitted = marks[SUBMITTED] > answered
        request = ring[answered % ring.shape[0]]
        due_ns = FOREVER_NS  # from now
        if submitted:
            due_ns = request[ARRIVAL] - now
        elif marks[OWN]:
            request = own[done]
            request[ARRIVAL] = now
            request[EXPIRES] = FOREVER_NS
            request[SLOT] = NO_SLOT
            due_ns = 0
        elif marks[SEALED]:
            break
        if due_ns > 0:
            board[row, BUSY_SINCE] = IDLE
            reckoned = now  # a floor promises nothing for time without requests
            _rest(calls, marks[BELL], due_ns, scratch)
            continue
        request[START] = now
        request[BARRIERS:COLUMNS] = 0
        launched = 0
        outcome = _outcome(request, now)
        if outcome == WITH_RESULT:
            if service:
                count = _look_behind(ring, marks, waiting) if submitted else 0
                queued = waiting[:count]
                publish(board, row, request[ARRIVAL], queued, bound_ns, request_ns, now)
            left = board[row, LEFT]
            board[row, BUSY_SINCE] = now
            active = 0
            for peer in range(peers.shape[0]):
                if peers[peer] == row or counts_as_busy(board, peers[peer], now):
                    active |= 1 << peer
            variant = 0
            while active & ~variant_active[variant]:
                variant += 1
            request[START] = now = _now_ns(calls, scratch)
        last = np.uint64(0)
        slot = request[SLOT]
        while outcome == WITH_RESULT and launched < stretches:
            if launched >= depth:
                status = call_c(calls[_EVENT_HOLD], events[launched % depth], _NOTHING, _NOTHING)
                if status:
                    return done, status
                now = _now_ns(calls, scratch)
                before = done_ns[launched - depth - 1] if launched > depth else 0
                done_since = done_ns[launched - depth] - before
                owed = _reckon(owed, floor, now - reckoned, done_since)
                reckoned = now
                if service:
                    board[row, LEFT] = left - done_ns[launched - depth]
            choice = GO_ON
            held_at = 0
            while choices.shape[0] > 0:
                now = _now_ns(calls, scratch)
                if beats:
                    board[row, HEARTBEAT] = now
                overtaken = request[YIELDS]
                choice = decide(board, row, peers, who, level, choices, overtaken, now)
                if choice != YIELD or _outcome(request, now) != WITH_RESULT:
                    break
                owed = _reckon(owed, floor, now - reckoned, 0)
                reckoned = now
                if owed > 0.0 or stop[0] or now >= stop_at:
                    choice = GO_ON
                    break
                if held_at == 0:
                    held_at = now
                if now - held_at > _SPIN_NS:
                    call_c(calls[_SLEEP], _LOOK_US, _NOTHING, _NOTHING)
            if held_at:
                request[YIELDS] += 1
                request[PAUSE_NS] = max(request[PAUSE_NS], now - held_at)
            outcome = _outcome(request, now)
            if outcome != WITH_RESULT:
                break
            way = variant
            if choice > 0:
                way = variant_active.shape[0] + choice - 1
                request[MOVES] += 1
            at = way * stretches + launched
            if launched > 0 and entry[at] != last:
                event = events[(launched - 1) % depth]
                status = call_c(calls[_STREAM_WAIT], entry[at], event, _NOTHING)
                if status:
                    return done, status
                request[BARRIERS] += 1
            if launched == 0 and slot != NO_SLOT and copies[slot, 0]:
                status = call_c(calls[_GRAPH_LAUNCH], copies[slot, 0], entry[at], _NOTHING)
                if status:
                    return done, status
            status = _take(calls, kind, first, second, begins[at], begins[at + 1])
            if status:
                return done, status
            request[BARRIERS] += inner[at]
            last = stream[at]
            launched += 1
            if stretches > 1:
                event = events[(launched - 1) % depth]
                status = call_c(calls[_EVENT_RECORD], event, last, _NOTHING)
                if status:
                    return done, status
        if launched == stretches and slot != NO_SLOT and copies[slot, 1]:
            status = call_c(calls[_GRAPH_LAUNCH], copies[slot, 1], last, _NOTHING)
            if status:
                return done, status
        if launched > 0:
            status = call_c(calls[_SYNCHRONISE], last, _NOTHING, _NOTHING)
            if status:
                return done, status
            now = _now_ns(calls, scratch)
            in_flight = min(depth, launched)
            before = done_ns[launched - in_flight - 1] if launched > in_flight else 0
            owed = _reckon(owed, floor, now - reckoned, done_ns[launched - 1] - before)
            reckoned = now
        else:
            request[START] = now
        request[END] = now
        request[OUTCOME] = outcome
        if outcome == WITH_RESULT:
            _tell(board, row, request, stretches)
            marks[SERVED_MARK] += 1
            marks[YIELDED_MARK] += request[YIELDS]
        if submitted:
            _answer(calls, marks, scratch)
        else:
            done += 1
    return done, 0


def _compile(program: tuple[Any, ...]) -> None:
    """Now: the first call would otherwise do it, or read it from the cache, in the middle of a
    run."""
    ring, own = Ring(1), np.zeros((1, REQUEST_WORDS), dtype=np.int64)
    over = np.ones(1, dtype=np.int64)
    cast(Any, drive)(*program, NO_COPIES, ring.rows, ring.marks, own, 0, over)


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
        self._bound_ns, self._request_ns = behaviour.bound_ns, behaviour.done_ns[-1]
        self._program = (addresses_of(gpu.entry_points), *_program(ways, self._place, behaviour))
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

    def accepted(self, arrival_ns: int) -> None:
        """A request of its ring, which is not known to the loop yet."""
        self._place.raise_busy(arrival_ns, self._bound_ns, self._request_ns)


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

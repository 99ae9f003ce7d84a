"""The driving loop: requests of one worker, launched from compiled code that holds no GIL.

Requests come from a ring (core/requests.py), which a run fills beforehand and a session that
serves while the loop runs. steps.py says what a request takes: stretches of steps.
Each worker has a thread of its own (worker_loop.py) that repeats: wait for the next request, pick
the variant by who is active, take the stretches, wait for completion. Before each stretch it waits
until fewer than ``depth`` are in flight, and then decides by its rules: go on, move, or launch
nothing for now. A request that is given up or past its deadline launches nothing more, and ends
when what it has launched is done.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

import eclip.core.decide
from eclip.core import credit, requests, rules
from eclip.core.credit import foresee
from eclip.core.decide import counts_as_busy, decide, due_after, publish
from eclip.core.requests import (
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
    SEALED,
    SLOT,
    START,
    SUBMITTED,
    VERDICT,
    WAKEUP,
    WAS_CANCELLED,
    WITH_RESULT,
    YIELDS,
)
from eclip.core.requests import SERVED as SERVED_MARK
from eclip.core.requests import YIELDED as YIELDED_MARK
from eclip.core.rules import (
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
    SERVED,
    SERVICE,
    TAIL,
    TIER,
    YIELD,
    YIELDED,
)
from eclip.errors import DeviceError
from eclip.gpu import accounts, steps
from eclip.gpu.accounts import settle
from eclip.gpu.entry_points import EntryPoints
from eclip.gpu.steps import LAUNCH, RECORD, WAIT, Ints, Words
from eclip.jit import call_c, compiled_with, inlined

_CLOCK_MONOTONIC = 1
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


@inlined
def _now_ns(calls: Words, scratch: Ints) -> int:
    call_c(calls[_CLOCK], np.uint64(_CLOCK_MONOTONIC), np.uint64(scratch.ctypes.data), _NOTHING)
    return int(scratch[0] * 1_000_000_000 + scratch[1])


@inlined
def _reckon(board: Ints, row: int, floor: float, elapsed_ns: int, done_ns: int, now: int) -> None:
    """Say when the floor is owed. Between two looks passes less than BANKED_NS, unless the process
    was stopped: then nobody owes it anything."""
    if floor > 0.0:
        due = board[row, DEADLINE] + max(elapsed_ns - BANKED_NS, 0)
        board[row, DEADLINE] = due_after(due, floor, done_ns, now)


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
def _waits(ring: Ints, marks: Ints, number: int, now: int) -> bool:
    """The request of this number has come."""
    return bool(marks[SUBMITTED] > number and ring[number % ring.shape[0], ARRIVAL] <= now)


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


@compiled_with(steps.__file__)
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


@compiled_with(
    *(eclip.core.decide.__file__, credit.__file__, rules.__file__, requests.__file__),
    *(steps.__file__, accounts.__file__),
)
def drive(
    calls: Words,  # addresses_of the GPU's driver
    kind: Ints,
    first: Words,
    second: Words,
    begins: Ints,  # variant or move × stretch: where its steps begin; one more entry at the end
    entry: Words,  # likewise: the stream that it begins on
    stream: Words,  # likewise: the stream that completes last
    inner: Ints,  # likewise: barriers inside
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
    reckoned = _now_ns(calls, scratch)
    could_begin = reckoned
    if floor > 0.0:
        board[row, DEADLINE] = reckoned
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
            if floor > 0.0:  # it promises nothing for time without requests
                board[row, DEADLINE] += now - reckoned
            reckoned = now
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
                foresee(board, row, now)
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
                _reckon(board, row, floor, now - reckoned, done_since, now)
                reckoned = now
                if service:
                    board[row, LEFT] = left - done_ns[launched - depth]
                    foresee(board, row, now)
            choice = GO_ON
            held_at = 0
            while choices.shape[0] > 0:
                now = _now_ns(calls, scratch)
                if beats:
                    board[row, HEARTBEAT] = now
                _reckon(board, row, floor, now - reckoned, 0, now)
                reckoned = now
                overtaken = request[YIELDS]
                choice = decide(board, row, peers, who, level, choices, overtaken, now)
                if choice != YIELD or _outcome(request, now) != WITH_RESULT:
                    break
                if stop[0] or now >= stop_at:
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
            taken = variant
            if choice > 0:
                taken = variant_active.shape[0] + choice - 1
                request[MOVES] += 1
            at = taken * stretches + launched
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
            _reckon(board, row, floor, now - reckoned, done_ns[launched - 1] - before, now)
            reckoned = now
        else:
            request[START] = now
        request[END] = now
        request[OUTCOME] = outcome
        if service:
            could_begin = max(could_begin, request[ARRIVAL])
            waits = _waits(ring, marks, answered + submitted, now)
            request[VERDICT] = settle(board, row, peers, request, bound_ns, could_begin, waits)
            could_begin = now
        if outcome == WITH_RESULT:
            _tell(board, row, request, stretches)
            marks[SERVED_MARK] += 1
            marks[YIELDED_MARK] += request[YIELDS]
        if submitted:
            _answer(calls, marks, scratch)
        else:
            done += 1
    return done, 0

"""The driving loop: requests of a group of workers, launched from compiled code without the GIL.

Requests come from rings (core/requests.py), which a run fills beforehand and submitters while the
loop runs. steps.py says what a request takes: stretches of steps. The workers of a group are
programs of one loop, each with its own row of the board; a worker is a group of its own unless a
server says otherwise.
Each loop has a thread of its own (worker_loop.py) that repeats: wait for the next request, pick
the variant by who is active, take the stretches, wait for completion. Before each stretch it waits
until fewer than ``depth`` are in flight, and then decides by its rules: go on, move, or launch
nothing for now. A request that is given up or past its deadline launches nothing more, and ends
when what it has launched is done.
"""

from __future__ import annotations

import numpy as np

import eclip.core.decide
from eclip.core import credit, requests, rules
from eclip.core.credit import foresee
from eclip.core.decide import counts_as_busy, decide, due_after, publish
from eclip.core.requests import (
    ACCOUNT,
    ARRIVAL,
    BARRIERS,
    BELL,
    COLUMNS,
    DOORS,
    END,
    EXPIRES,
    FOREVER_NS,
    GIVEN_UP,
    HAS_EXPIRED,
    HAS_FAILED,
    MOVES,
    NO_SLOT,
    OUTCOME,
    OWN,
    PAUSE_NS,
    PROGRAM,
    REQUEST_WORDS,
    SEALED,
    SLOT,
    START,
    VERDICT,
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
from eclip.gpu import accounts as gpu_accounts
from eclip.gpu import calls as gpu_calls
from eclip.gpu import doors as gpu_doors
from eclip.gpu import steps
from eclip.gpu.accounts import settle
from eclip.gpu.calls import (
    CLOCK,
    CONTROL,
    EVENT_HOLD,
    EVENT_RECORD,
    GRAPH_LAUNCH,
    NOTHING,
    POLL,
    READ,
    SLEEP,
    STREAM_WAIT,
    SYNCHRONISE,
    WRITE,
)
from eclip.gpu.doors import (
    count_busy,
    first_open,
    look_behind,
    raise_answered,
    raise_waiting,
    since_of,
    waits_behind,
)
from eclip.gpu.steps import (
    BEGINS,
    BOUND_NS,
    CHOICES,
    COPIES,
    DONE_NS,
    ENTRY,
    EVENTS,
    FIRST,
    IN_FLIGHT,
    INNER,
    KIND,
    LAUNCH,
    LEVEL,
    PARTS,
    RECORD,
    ROW,
    RULES,
    SECOND,
    SLOTS,
    STEPS,
    STREAM,
    STRETCHES,
    VARIANT_ACTIVE,
    VARIANTS,
    WAIT,
    WHO,
    Floats,
    Ints,
    Words,
)
from eclip.jit import (
    call_c,
    compiled_with,
    inlined,
    words_at,
)

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


@inlined
def _now_ns(calls: Words, scratch: Ints) -> int:
    call_c(calls[CLOCK], np.uint64(_CLOCK_MONOTONIC), np.uint64(scratch.ctypes.data), NOTHING)
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
def _rest(calls: Words, bell: int, due_ns: int, scratch: Ints) -> None:
    """Until something is due or the bell rings; near the time, spin."""
    if due_ns > 2_000_000:
        most_ms = _MOST_REST_WITHOUT_BELL_MS if bell < 0 else _MOST_REST_MS
        wait_ms = min(due_ns // 1_000_000 - 1, most_ms)
        scratch[0] = (bell & 0xFFFFFFFF) | _READABLE
        asked = np.uint64(scratch.ctypes.data)
        call_c(calls[POLL], asked, np.uint64(1), np.uint64(wait_ms))
        if bell >= 0:
            call_c(calls[READ], np.uint64(bell), asked, np.uint64(8))
    elif due_ns > _WAKE_UP_NS:
        away_us = (due_ns - _SPIN_BEFORE_NS) // 1000
        call_c(calls[SLEEP], np.uint64(away_us), NOTHING, NOTHING)


@inlined
def _answer(calls: Words, doors: Ints, me: int, door: int, scratch: Ints) -> None:
    """The first open request of its ring has ended, as its row says."""
    wakeup = raise_answered(doors, me, door)
    if wakeup >= 0:
        scratch[0] = 1
        told = np.uint64(scratch.ctypes.data)
        call_c(calls[WRITE], np.uint64(wakeup), told, np.uint64(8))


@compiled_with(steps.__file__, gpu_calls.__file__)
def _take(calls: Words, kind: Ints, firsts: Ints, seconds: Ints, begin: int, end: int) -> int:
    """Take these steps; the first bad status, or 0."""
    for step in range(begin, end):
        first, second = np.uint64(firsts[step]), np.uint64(seconds[step])
        if kind[step] == LAUNCH:
            status = call_c(calls[GRAPH_LAUNCH], first, second, NOTHING)
        elif kind[step] == RECORD:
            status = call_c(calls[EVENT_RECORD], first, second, NOTHING)
        elif kind[step] == WAIT:
            status = call_c(calls[STREAM_WAIT], first, second, NOTHING)
        else:
            status = call_c(calls[EVENT_HOLD], first, NOTHING, NOTHING)
        if status:
            return int(status)
    return 0


@compiled_with(
    *(eclip.core.decide.__file__, credit.__file__, rules.__file__, requests.__file__),
    *(steps.__file__, gpu_calls.__file__, gpu_doors.__file__, gpu_accounts.__file__),
)
def drive(
    calls: Words,  # addresses_of the GPU's driver
    board: Ints,  # shared by all threads
    peers: Ints,
    beats: bool,
    programs: Ints,  # by place in the group
    floors: Floats,  # likewise
    counts: Ints,  # likewise; out
    doors: Ints,  # of all loops of the session
    me: int,  # which of them this is
    places: Ints,  # by group and place: row, bound and time of a request alone
    looking: Ints,  # a word for each loop: it reads doors of others
    accounts: Ints,
    loop: Ints,  # its words
    own: Ints,  # out: requests that nobody submitted
    stop_at: int,
    stop: Ints,  # set from outside to end the loop
) -> tuple[int, int]:
    """How many requests of its own it has run, and the first bad status, 0 if there was none."""
    call_c(calls[CONTROL], _TIMER_SLACK[0], _TIMER_SLACK[1], NOTHING)
    scratch = np.zeros(2, dtype=np.int64)
    waiting = np.zeros(MOST_QUEUED, dtype=np.int64)
    mark = looking.ctypes.data + 8 * me
    reckoned = np.zeros(programs.shape[0], dtype=np.int64)
    reckoned[:] = _now_ns(calls, scratch)
    for program in range(programs.shape[0]):
        if floors[program] > 0.0:
            board[programs[program, ROW], DEADLINE] = reckoned[program]
    done, mine, could_begin = 0, 0, reckoned[0]
    while done < own.shape[0]:
        now = _now_ns(calls, scratch)
        for program in range(programs.shape[0] if beats else 0):
            board[programs[program, ROW], HEARTBEAT] = now
        if now >= stop_at or stop[0]:
            break
        due_ns = FOREVER_NS  # from now
        chosen, at = -1, 0  # the door of what came first, and where it is
        for door in range(loop[DOORS]):
            first = first_open(doors, me, door)
            if first != 0:
                away_ns = words_at(first, REQUEST_WORDS)[ARRIVAL] - now
                if chosen < 0 or away_ns < due_ns:
                    due_ns, chosen, at = away_ns, door, first
        submitted = chosen >= 0
        if not submitted and loop[OWN] >= 0:
            at = own.ctypes.data + 8 * done * REQUEST_WORDS
            due_ns = 0
        elif not submitted and loop[SEALED]:
            break
        if due_ns > 0:
            for program in range(programs.shape[0]):
                row = programs[program, ROW]
                board[row, BUSY_SINCE] = IDLE
                if floors[program] > 0.0:  # it promises nothing for time without requests
                    board[row, DEADLINE] += now - reckoned[program]
                reckoned[program] = now
            _rest(calls, loop[BELL], due_ns, scratch)
            continue
        request = words_at(at, REQUEST_WORDS)
        if not submitted:
            request[ARRIVAL] = now
            request[EXPIRES] = FOREVER_NS
            request[SLOT] = NO_SLOT
            request[PROGRAM] = loop[OWN]
        before, mine, slot = mine, request[PROGRAM], request[SLOT]
        request[START] = now
        request[BARRIERS:COLUMNS] = 0
        fits = 0 <= mine < programs.shape[0]
        if not fits or not NO_SLOT <= slot < programs[mine, SLOTS]:
            mine = before
            request[END], request[OUTCOME] = now, HAS_FAILED
            _answer(calls, doors, me, chosen, scratch)
            continue
        given = programs[mine]
        row, bound_ns, floor = given[ROW], given[BOUND_NS], floors[mine]
        kind = words_at(given[KIND], given[STEPS])
        firsts, seconds = (
            words_at(given[FIRST], given[STEPS]),
            words_at(given[SECOND], given[STEPS]),
        )
        begins = words_at(given[BEGINS], given[PARTS] + 1)
        entry, stream = words_at(given[ENTRY], given[PARTS]), words_at(given[STREAM], given[PARTS])
        inner = words_at(given[INNER], given[PARTS])
        variant_active = words_at(given[VARIANT_ACTIVE], given[VARIANTS])
        who, level = words_at(given[WHO], given[RULES]), words_at(given[LEVEL], given[RULES])
        choices = words_at(given[CHOICES], given[RULES])
        events = words_at(given[EVENTS], given[IN_FLIGHT])
        done_ns = words_at(given[DONE_NS], given[STRETCHES])
        copies = words_at(given[COPIES], 2 * given[SLOTS])
        stretches = done_ns.shape[0]
        depth = max(events.shape[0], 1)
        request_ns = done_ns[stretches - 1]
        service = board[row, TIER] == SERVICE and bound_ns > 0
        if mine != before:  # which had the group until now
            board[programs[before, ROW], BUSY_SINCE] = IDLE
            if floor > 0.0:
                board[row, DEADLINE] += now - reckoned[mine]
            reckoned[mine] = now
        launched = 0
        outcome = _outcome(request, now)
        if outcome == WITH_RESULT:
            count_busy(accounts, loop[ACCOUNT], 1, now)
            began = True
            if service:
                count = 0
                if submitted:
                    count = look_behind(doors, me, loop[DOORS], chosen, bound_ns, waiting)
                queued = waiting[:count]
                since = since_of(request, bound_ns)
                publish(board, row, since, queued, bound_ns, request_ns, now)
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
        else:
            began = False
        last = np.uint64(0)
        while outcome == WITH_RESULT and launched < stretches:
            if launched >= depth:
                status = call_c(
                    calls[EVENT_HOLD], np.uint64(events[launched % depth]), NOTHING, NOTHING
                )
                if status:
                    return done, status
                now = _now_ns(calls, scratch)
                gone_ns = done_ns[launched - depth - 1] if launched > depth else 0
                done_since = done_ns[launched - depth] - gone_ns
                _reckon(board, row, floor, now - reckoned[mine], done_since, now)
                reckoned[mine] = now
                if service:
                    board[row, LEFT] = left - done_ns[launched - depth]
                    foresee(board, row, now)
            choice = GO_ON
            held_at = 0
            while choices.shape[0] > 0:
                now = _now_ns(calls, scratch)
                if beats:
                    board[row, HEARTBEAT] = now
                _reckon(board, row, floor, now - reckoned[mine], 0, now)
                reckoned[mine] = now
                overtaken = request[YIELDS]
                raise_waiting(board, doors, loop[DOORS], me, places, mark)
                choice = decide(board, row, peers, who, level, choices, overtaken, now)
                if choice != YIELD or _outcome(request, now) != WITH_RESULT:
                    break
                if stop[0] or now >= stop_at:
                    choice = GO_ON
                    break
                if held_at == 0:
                    held_at = now
                if now - held_at > _SPIN_NS:
                    call_c(calls[SLEEP], _LOOK_US, NOTHING, NOTHING)
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
            part = taken * stretches + launched
            entered = np.uint64(entry[part])
            if launched > 0 and entered != last:
                event = np.uint64(events[(launched - 1) % depth])
                status = call_c(calls[STREAM_WAIT], entered, event, NOTHING)
                if status:
                    return done, status
                request[BARRIERS] += 1
            if launched == 0 and slot != NO_SLOT and copies[2 * slot]:
                copy = np.uint64(copies[2 * slot])
                status = call_c(calls[GRAPH_LAUNCH], copy, entered, NOTHING)
                if status:
                    return done, status
            status = _take(calls, kind, firsts, seconds, begins[part], begins[part + 1])
            if status:
                return done, status
            request[BARRIERS] += inner[part]
            last = np.uint64(stream[part])
            launched += 1
            if stretches > 1:
                event = np.uint64(events[(launched - 1) % depth])
                status = call_c(calls[EVENT_RECORD], event, last, NOTHING)
                if status:
                    return done, status
        if launched == stretches and slot != NO_SLOT and copies[2 * slot + 1]:
            copy = np.uint64(copies[2 * slot + 1])
            status = call_c(calls[GRAPH_LAUNCH], copy, last, NOTHING)
            if status:
                return done, status
        if launched > 0:
            status = call_c(calls[SYNCHRONISE], last, NOTHING, NOTHING)
            if status:
                return done, status
            now = _now_ns(calls, scratch)
            in_flight = min(depth, launched)
            gone_ns = done_ns[launched - in_flight - 1] if launched > in_flight else 0
            _reckon(board, row, floor, now - reckoned[mine], done_ns[launched - 1] - gone_ns, now)
            reckoned[mine] = now
        else:
            request[START] = now
        request[END] = now
        request[OUTCOME] = outcome
        if service:
            could_begin = max(could_begin, request[ARRIVAL])
            waits = waits_behind(doors, me, loop[DOORS], chosen, now)
            due = since_of(request, bound_ns) + bound_ns
            request[VERDICT] = settle(board, row, peers, request, due, could_begin, waits)
        could_begin = now
        if outcome == WITH_RESULT:
            _tell(board, row, request, stretches)
            counts[mine, SERVED_MARK] += 1
            counts[mine, YIELDED_MARK] += request[YIELDS]
        if began:
            count_busy(accounts, loop[ACCOUNT], -1, now)
        if submitted:
            _answer(calls, doors, me, chosen, scratch)
        else:
            done += 1
    return done, 0

"""Deciding at a joint, compiled: go on, yield, or move. core/rules.py has rules and words.

The simulator's core and the driving loop of a GPU call these functions, so both decide alike. Times
are nanoseconds of the caller's clock.
"""

from __future__ import annotations

from eclip.core.credit import is_strict
from eclip.core.rules import (
    BACKGROUND,
    BANKED_NS,
    BOUND,
    BUSY_SINCE,
    DEADLINE,
    FOREIGN_BIT,
    GO_ON,
    HEARTBEAT,
    HUNG_BOUNDS,
    IDLE,
    LATEST,
    LEFT,
    MOST_OVERTAKEN,
    MOST_QUEUED,
    NOBODY,
    NONE,
    OWED,
    SERVICE,
    SOME,
    STOPPED_NS,
    TIER,
    YIELD,
    Ints,
)
from eclip.jit import inlined


@inlined
def counts_as_busy(board: Ints, row: int, now: int) -> bool:
    since = board[row, BUSY_SINCE]
    if board[row, TIER] == NOBODY or since == IDLE:
        return False
    if now - board[row, HEARTBEAT] > STOPPED_NS:
        return False
    bound = board[row, BOUND]
    return bool(bound == 0 or now - since <= HUNG_BOUNDS * bound)


@inlined
def decide(
    board: Ints,
    mine: int,
    peers: Ints,
    who: Ints,
    level: Ints,
    choice: Ints,
    overtaken: int,
    now: int,
) -> int:
    """GO_ON, YIELD, or the number of a move, for the worker of row ``mine`` at a joint.

    Beside a strict service (core/credit.py) background's rules for it count as *yield*, so of
    several services it follows the strictest that is busy.

    ``peers`` are the rows of its session's workers, by their index; ``who``, ``level`` and
    ``choice`` are its rules; ``overtaken`` says how often this request of a service has yielded
    already.
    """
    service = board[mine, TIER] == SERVICE
    own_limit = board[mine, DEADLINE] - board[mine, LEFT]
    owed = board[mine, TIER] == BACKGROUND and own_limit < now
    if not service and _meets_strict(board, peers, who, level, now):
        return GO_ON if owed else YIELD
    for rule in range(choice.shape[0]):
        tier = BACKGROUND if level[rule] == OWED else SERVICE
        for row in range(board.shape[0]):
            if board[row, TIER] != tier or not counts_as_busy(board, row, now):
                continue
            if not (who[rule] >> _bit_of(row, peers)) & 1:
                continue
            limit = board[row, DEADLINE] - board[row, LEFT]  # when its slack is used up
            if tier == BACKGROUND:
                applies = limit < now and not owed
            elif service:
                first = limit < own_limit or (limit == own_limit and row < mine)
                applies = first and overtaken < MOST_OVERTAKEN
            else:
                slack = limit - now
                has = 2
                if slack < board[row, NONE]:
                    has = 0
                elif slack < board[row, SOME]:
                    has = 1
                applies = has <= level[rule]
            if applies and owed and choice[rule] == YIELD:
                return GO_ON
            if applies:
                return int(choice[rule])
    return GO_ON


@inlined
def _bit_of(row: int, peers: Ints) -> int:
    """The bit of a row's worker in a rule."""
    worker = FOREIGN_BIT
    for peer in range(peers.shape[0]):
        if peers[peer] == row:
            worker = peer
    return worker


@inlined
def _meets_strict(board: Ints, peers: Ints, who: Ints, level: Ints, now: int) -> bool:
    """A service that a rule names is busy and strict."""
    for row in range(board.shape[0]):
        if board[row, TIER] != SERVICE or board[row, BUSY_SINCE] == IDLE:
            continue
        if not is_strict(board, row, now) or not counts_as_busy(board, row, now):
            continue
        for rule in range(who.shape[0]):
            if level[rule] != OWED and (who[rule] >> _bit_of(row, peers)) & 1:
                return True
    return False


@inlined
def publish(
    board: Ints,
    row: int,
    arrival: int,
    queued: Ints,
    bound_ns: int,
    request_ns: int,
    now: int,
) -> None:
    """Write the deadline and the time left of a service's most urgent request into its row, and
    when one is too late: the running one when it is due, one behind it when those before it should
    have ended for it to begin in time.

    Called when a request begins. ``queued`` are the arrivals after this one, some still to come;
    each is served when all before it are. One that is to come counts from its arrival on.
    """
    latest = arrival + bound_ns
    tightest = latest - request_ns
    board[row, DEADLINE] = latest
    board[row, LEFT] = request_ns
    for behind in range(min(queued.shape[0], MOST_QUEUED)):
        came = queued[behind]
        if came > now and came >= latest:
            break
        deadline, before_ns = came + bound_ns, (behind + 1) * request_ns
        latest = min(latest, max(came, deadline - before_ns))
        if came <= now and deadline - before_ns - request_ns < tightest:
            tightest = deadline - before_ns - request_ns
            board[row, DEADLINE] = deadline
            board[row, LEFT] = before_ns + request_ns
    board[row, LATEST] = latest


@inlined
def due_after(due: int, floor: float, done_ns: float, now: int) -> int:
    """The new DEADLINE of background that has done work which takes ``done_ns`` alone: later by
    ``done_ns / floor``. Once it has passed, the floor is owed.

    Work done beyond the floor counts for a while only, so that a busy hour is no excuse for a
    starved second.
    """
    return int(due + round(min(done_ns / floor, float(now + BANKED_NS - due))))

"""Deciding at a joint, compiled: go on, yield, or move. core/rules.py has rules and words.

The simulator's core and the driving loop of a GPU call these functions, so both decide alike. Times
are nanoseconds of the caller's clock.
"""

from __future__ import annotations

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

    ``peers`` are the rows of its session's workers, by their index; ``who``, ``level`` and
    ``choice`` are its rules; ``overtaken`` says how often this request of a service has yielded
    already.
    """
    service = board[mine, TIER] == SERVICE
    own_limit = board[mine, DEADLINE] - board[mine, LEFT]
    owed = board[mine, TIER] == BACKGROUND and own_limit < now
    for rule in range(choice.shape[0]):
        tier = BACKGROUND if level[rule] == OWED else SERVICE
        for row in range(board.shape[0]):
            if board[row, TIER] != tier or not counts_as_busy(board, row, now):
                continue
            worker = FOREIGN_BIT
            for peer in range(peers.shape[0]):
                if peers[peer] == row:
                    worker = peer
            if not (who[rule] >> worker) & 1:
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
def publish(
    board: Ints,
    row: int,
    arrival: int,
    queued: Ints,
    bound_ns: int,
    request_ns: int,
    now: int,
) -> None:
    """Write the deadline and the time left of a service's most urgent request into its row.

    Called when a request begins. ``queued`` are the arrivals after this one, some still to come;
    each is served when all before it are.
    """
    tightest = arrival + bound_ns - request_ns
    board[row, DEADLINE] = arrival + bound_ns
    board[row, LEFT] = request_ns
    for behind in range(min(queued.shape[0], MOST_QUEUED)):
        if queued[behind] > now:
            break
        deadline, left = queued[behind] + bound_ns, (behind + 2) * request_ns
        if deadline - left < tightest:
            tightest = deadline - left
            board[row, DEADLINE] = deadline
            board[row, LEFT] = left


@inlined
def due_after(due: int, floor: float, done_ns: float, now: int) -> int:
    """The new DEADLINE of background that has done work which takes ``done_ns`` alone: later by
    ``done_ns / floor``. Once it has passed, the floor is owed.

    Work done beyond the floor counts for a while only, so that a busy hour is no excuse for a
    starved second.
    """
    return int(due + round(min(done_ns / floor, float(now + BANKED_NS - due))))

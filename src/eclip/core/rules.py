"""Rules: what a worker does at a joint, decided while it runs.

Workers say on a *board* how they are: one row of 64-bit words each, written by its owner and read
by all workers. A reader may see one word new and its neighbour old. ``core/decide.py`` reads the
board and a worker's rules, for the simulator and the driving loop of a GPU alike.

Rules that keep it from waiting for ever:

- A service gives way to services only.
- Of two services, the one whose slack runs out first goes on and the other yields. Waiting moves
  neither's deadline nor its time left. A request of a service yields at most twice.
- Background that is owed its floor does not yield. Background that is owed nothing yields to
  background that is owed. So of two of them at most one waits for the other.
- An owner that is stopped (no heartbeat) or busy ten times its bound counts as idle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eclip.core.plan import FOREIGN, Plan, Promise, Slack

Ints = npt.NDArray[np.int64]

# The words of a row: eight cache lines. A row of zeros has no owner. Others decide by the first two
# lines; what a person may want to see is behind them.
TIER, BUSY_SINCE, DEADLINE, LEFT, HEARTBEAT, BOUND, SOME, NONE = range(8)
# A service's account (core/credit.py). STRICT says why background launches nothing beside it,
# LATEST from when on one of its requests cannot be in time any more. ACCOUNT is the row that holds
# the account: replicas of one service share one, and LOCK keeps their threads apart.
STRICT, LATEST, ACCOUNT, CREDIT, GAIN, LOCK, STRICT_SINCE, DRAW = range(8, 16)
# What the account has counted, requests first. AUDITED and FREE are requests of busy periods that
# began so; STRICT_NS is one word for each reason to be strict.
COUNTED, LATE, LOST, LATE_STRICT, LATE_HOST, AUDITED, AUDITED_LATE, FREE = range(16, 24)
FREE_LATE, STRICT_NS = 24, 25
# How long the last change of a process's units took: until launches went there, and until its last
# kernel on the units before had ended.
MOVE_NS, LEAVE_NS = 28, 29
PID, SERVED, LAUNCHED, YIELDED, MOVED, CROSSED, LONGEST_PAUSE, TAIL = range(32, 40)
# Of a process: units that it wants and holds (0: all), slices as bit sets, changes of them done.
UNITS_WANTED, UNITS_HELD, SLICES_HELD, SLICES_WANTED, CHANGES = 40, 41, 42, 46, 50
SLICE_WORDS = 4
# Bytes it may allocate (0: no cap) and has; requests that it has marked as begun and as ended.
MEMORY_CAP, MEMORY_USED, BEGUN, ENDED = range(51, 55)
# What another process of the user asks of the owner: units, above a count of 32 bits.
ASKED = 55
NAME = 56  # and the words behind it
WORDS = 64
NAME_BYTES = 8 * (WORDS - NAME)
NOBODY, SERVICE, BACKGROUND, PLAIN = 0, 1, 2, 3  # tiers; plain: only with units of its own
IDLE = -(1 << 62)  # in BUSY_SINCE; times may be negative
ALWAYS = 1 << 62  # a heartbeat of an owner that cannot stop without its readers
NEVER = 1 << 62  # in DEADLINE: when background without a floor is owed it; in LATEST
MOST_ROWS = 256
FOREIGN_BIT = 62  # in a rule's bit set of workers: services of other sessions

GO_ON, YIELD = 0, -1  # choices; a positive one is a move
MOST_OVERTAKEN = 2  # times that one request of a service yields
MOST_QUEUED = 64  # requests behind one that begins, among which the most urgent is looked for
STOPPED_NS = 100_000_000  # since the last heartbeat
HUNG_BOUNDS = 10  # that a request may last before its service counts as idle
BANKED_NS = 100_000_000  # so long before it is due, work counts for a floor

OWED = -1  # in a rule's level: it is about background, and applies while a floor is owed
ONE_CREDIT = 1_000_000  # in CREDIT and GAIN: what a late request costs
_FIRST_DRAW = 2_654_435_761  # times a row's number from 1 on: rows draw differently
SPENT = 1  # in STRICT: an account begins without credit

LEVELS = {Slack.NONE: 0, Slack.SOME: 1, Slack.PLENTY: 2}


class Rules(NamedTuple):
    """A worker's joints and rules in columns, as compiled loops read them.

    The first rule that applies counts. Choice 0 is the worker's route, choice i is a move to
    ``moves[i - 1]``.
    """

    who: Ints = np.empty(0, dtype=np.int64)  # a bit set of its session's workers, and FOREIGN_BIT
    level: Ints = np.empty(0, dtype=np.int64)  # the most slack at which a rule applies, or OWED
    choice: Ints = np.empty(0, dtype=np.int64)
    begins: Ints = np.zeros(1, dtype=np.int64)  # the first kernel of every stretch
    done_ns: Ints = np.zeros(1, dtype=np.int64)  # how far a request alone is at the end of each
    moves: tuple[int, ...] = ()  # lanes
    depth: int = 1
    bound_ns: int = 0  # of a service
    request_ns: int = 0  # 0: no service
    floor: float = 0.0

    def stretches(self, kernels: int) -> list[range]:
        return [range(start, end) for start, end in pairwise([*self.begins.tolist(), kernels])]


NO_RULES = Rules()


def rules_of(plan: Plan, index: int) -> Rules:
    """Floors come first: a worker that only moves for services still yields where one is owed."""
    worker = plan.workers[index]
    rules = NO_RULES._replace(floor=worker.floor)
    if worker.promise is not None:
        bound_ns, request_ns = worker.promise.bound_ns, worker.promise.request_ns
        rules = rules._replace(bound_ns=bound_ns, request_ns=request_ns)
    joints = worker.joints
    if joints is None:
        alone_ns = sum(group.predicted_ns for group in plan.main.assignments[index].groups)
        return rules._replace(done_ns=np.array([alone_ns], dtype=np.int64))
    moves = tuple(dict.fromkeys(rule.lane for rule in joints.rules if rule.lane is not None))
    rows = [(_bits(joints.floors_first), OWED, YIELD)] if joints.floors_first else []
    for rule in joints.rules:
        choice = YIELD if rule.lane is None else 1 + moves.index(rule.lane)
        rows.append((_bits(rule.to), LEVELS[rule.slack], choice))
    who, level, choices = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
    return rules._replace(
        who=who,
        level=level,
        choice=choices,
        begins=np.array([0, *joints.at], dtype=np.int64),
        done_ns=np.cumsum(joints.stretch_ns, dtype=np.int64),
        moves=moves,
        depth=joints.depth,
    )


def _bits(workers: Sequence[int]) -> int:
    return sum(1 << (FOREIGN_BIT if worker == FOREIGN else worker) for worker in workers)


def board_of(plan: Plan) -> Ints:
    """A board in this process's memory, for a session that is alone: worker i has row i."""
    board = np.zeros((len(plan.workers), WORDS), dtype=np.int64)
    for number, worker in enumerate(plan.workers):
        enter(board, number, worker.promise, ALWAYS)
    return board


def enter(
    board: Ints, number: int, promise: Promise | None, heartbeat: int, name: str = ""
) -> None:
    """Write a worker that is idle into its row: with a promise a service, else background."""
    row = board[number]
    clear(row)
    row[NAME:] = np.frombuffer(name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"), dtype=np.int64)
    row[PID] = os.getpid()
    row[BUSY_SINCE] = IDLE
    row[HEARTBEAT] = heartbeat
    if promise is None:
        row[DEADLINE] = NEVER
    else:
        row[[BOUND, SOME, NONE]] = promise.bound_ns, promise.some_ns, promise.none_ns
        open_account(board, number, promise)
    # Last: others may read meanwhile.
    row[TIER] = BACKGROUND if promise is None else SERVICE


def open_account(board: Ints, number: int, promise: Promise) -> None:
    """A service's account without credit, as at the beginning of a run."""
    row = board[number]
    row[STRICT : STRICT_NS + 3] = 0
    row[LATEST] = NEVER
    if promise.gain:
        row[[ACCOUNT, STRICT, STRICT_SINCE]] = number, SPENT, IDLE
        row[DRAW] = _FIRST_DRAW * (number + 1) % (1 << 31)
        row[GAIN] = round(ONE_CREDIT * promise.gain)


def clear(row: Ints) -> None:
    """Clear a row: it has no owner then."""
    row[TIER] = NOBODY
    row[:] = 0

"""Workers with joints in the simulator's core, compiled: stretches, holds, the board and floors.

A worker with joints has at most ``depth`` stretches in flight. The next one is decided about when
it would be launched: as soon as the one ``depth`` before it is done. What was launched is not
reconsidered. A worker that yields is held until ``decide`` says otherwise. That is a function of
the board and of time, so held workers are looked at after every change of
the board, and at the next time at which time alone may change the answer.

A stretch starts when the one before is done, after the cost of a joint and of a barrier where the
lane changes; and not before its launch is through, which after a hold takes longer. So at depth 2
there is no bubble between stretches, and at depth 1 always one.

All events of one instant come first, then all decisions, in the order of workers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import eclip.core.decide
from eclip.core import credit, rules
from eclip.core.credit import NO_VERDICT, charge, end_period, foresee
from eclip.core.decide import counts_as_busy, decide, due_after, publish
from eclip.core.requests import HAS_EXPIRED, WITH_RESULT
from eclip.core.rules import (
    BOUND,
    BUSY_SINCE,
    DEADLINE,
    HUNG_BOUNDS,
    LEFT,
    NEVER,
    NONE,
    SERVICE,
    SOME,
    TIER,
    YIELD,
)
from eclip.jit import compiled_with, inlined
from eclip.sim.contention import Floats, Ints, Records

# A worker's phases; those that end at a time known beforehand come first. At a joint nothing of it
# is in flight; at the end of an instant it is held.
IDLE, DELAY, COPYING, QUEUED, RUNNING, AT_JOINT = range(6)
NO_LANE = -1

# A stretch on a route of a variant, or on a lane that its worker moves to.
STRETCH = np.dtype(
    [
        ("first", np.int64),  # of its steps, in Setup.kernels
        ("end", np.int64),
        ("launch_ns", np.float64),
        ("alone_ns", np.float64),  # that it takes on all units, undisturbed
        ("left_ns", np.int64),  # of the time promised for a request
    ]
)
# A worker's joints and rules: core.rules.Rules as a row.
JOINTS = np.dtype(
    [
        ("jointed", np.int64),  # 0: it never gives way
        ("depth", np.int64),
        ("stretches", np.int64),
        ("rules_first", np.int64),  # in Stretches.who, level and choice
        ("rules_end", np.int64),
        ("floor", np.float64),
        ("bound_ns", np.int64),  # of a service
        ("request_ns", np.int64),  # 0: no service
    ]
)
# How far a worker with joints is with its request.
PROGRESS = np.dtype(
    [
        ("route", np.int64),  # the first of its route's stretches, in Stretches.rows
        ("done", np.int64),  # stretches
        ("launched", np.int64),
        ("choice", np.int64, (2,)),  # of the stretches in flight, by turns
        ("ready", np.float64, (2,)),  # when their launches are through
        ("went", np.int64),  # the lane of its last kernel
        ("free_at", np.float64),  # when the last stretch let go of its lane
        ("held", np.int64),  # 1 while it yields
        ("held_since", np.float64),
        ("overtaken", np.int64),  # times that this request has yielded
        ("outcome", np.int64),  # that its request will have
        ("barriers", np.int64),  # counters, as the following
        ("yields", np.int64),
        ("moves", np.int64),
        ("longest_pause_ns", np.float64),
    ]
)


class Stretches(NamedTuple):
    """What does not change during a run."""

    joints: Records  # JOINTS, per worker
    rows: Records  # STRETCH, routes and moves one after another
    moves: Ints  # worker × move: the first of its stretches
    peers: Ints  # the board's row of every worker: its index
    who: Ints  # all workers' rules one after another
    level: Ints
    choice: Ints
    switch_ns: Floats  # lane left × lane entered
    joint_ns: float
    notice_ns: float
    hold_ns: float


class Joined(NamedTuple):
    """What does."""

    board: Ints
    progress: Records  # PROGRESS, per worker
    wake: Floats  # one entry: when time alone may let a held worker go
    unsettled: Ints  # one entry: 1 where something changed that a decision may depend on


@inlined
def accept_request(
    c: Stretches, j: Joined, workers: Records, index: int, arrivals: Ints, now: float, route: int
) -> None:
    """A request begins: it is on the board, and its head is a joint."""
    given = c.joints[index]
    worker = workers[index]
    at = round(now)
    j.board[index, BUSY_SINCE] = at
    j.unsettled[0] = 1
    if given["request_ns"] > 0:
        end = worker["next_arrival"] if worker["closed"] else worker["arrival_end"]
        queued = arrivals[worker["next_arrival"] : end]
        arrival = round(worker["arrival"])
        publish(j.board, index, arrival, queued, given["bound_ns"], given["request_ns"], at)
        foresee(j.board, index, at)
    if given["jointed"]:
        mine = j.progress[index]
        if given["floor"] > 0.0:
            # A floor promises nothing for the time without requests.
            due = j.board[index, DEADLINE]
            j.board[index, DEADLINE] = at if due == NEVER else due + at - round(mine["free_at"])
        mine["route"] = route
        mine["done"] = mine["launched"] = mine["overtaken"] = 0
        mine["went"] = NO_LANE
        mine["free_at"] = now
        worker["phase"] = AT_JOINT
        worker["due"] = np.inf


@inlined
def end_stretch(c: Stretches, j: Joined, workers: Records, index: int, now: float) -> None:
    """The last kernel of a stretch is done. The next one is started by ``settle``."""
    given, mine, worker = c.joints[index], j.progress[index], workers[index]
    if not given["jointed"]:
        return
    stretch = c.rows[mine["route"] + mine["done"]]
    if given["floor"] > 0.0:
        due = j.board[index, DEADLINE]
        j.board[index, DEADLINE] = due_after(due, given["floor"], stretch["alone_ns"], round(now))
    j.board[index, LEFT] -= stretch["left_ns"]
    if given["request_ns"] > 0:
        foresee(j.board, index, round(now))
    j.unsettled[0] = 1
    mine["done"] += 1
    mine["free_at"] = worker["due"]
    if mine["done"] < given["stretches"]:
        worker["phase"] = AT_JOINT
        worker["due"] = np.inf


@inlined
def keeps_link(
    c: Stretches, j: Joined, workers: Records, kernels: Records, index: int, link: int
) -> bool:
    """A copy is done, and the next one in its direction is queued right behind it."""
    worker = workers[index]
    following = worker["kernel"]
    if worker["phase"] == AT_JOINT:
        mine = j.progress[index]
        if mine["launched"] == mine["done"]:
            return False
        following = c.rows[mine["route"] + mine["done"]]["first"]
    elif following == worker["route_end"]:
        return False
    return bool(kernels[following]["queue"] == link)


@inlined
def settle_account(c: Stretches, j: Joined, worker: np.void, index: int, now: float) -> int:
    """A request of a service has ended; its verdict. If none waits, its busy period is over."""
    given, mine = c.joints[index], j.progress[index]
    if given["request_ns"] == 0:
        return NO_VERDICT
    at = round(now)
    late = mine["outcome"] == HAS_EXPIRED or at > round(worker["arrival"]) + given["bound_ns"]
    verdict = NO_VERDICT
    if late or mine["outcome"] == WITH_RESULT:
        verdict = charge(j.board, index, late, False, at)
    mine["outcome"] = WITH_RESULT
    if worker["closed"] or worker["due"] > now:
        end_period(j.board, index, at)
    return verdict


@inlined
def rest(j: Joined, index: int) -> None:
    """No request is left."""
    j.board[index, BUSY_SINCE] = rules.IDLE
    j.unsettled[0] = 1


@compiled_with(eclip.core.decide.__file__, credit.__file__, rules.__file__)
def settle(c: Stretches, j: Joined, workers: Records, kernels: Records, now: float) -> None:
    """Launch what may be launched, start what may start, and say when to look again."""
    wake = np.inf
    for index in range(workers.shape[0]):
        given, mine, worker = c.joints[index], j.progress[index], workers[index]
        if not given["jointed"] or worker["phase"] == IDLE:
            continue
        while (
            mine["launched"] < given["stretches"]
            and mine["launched"] - mine["done"] < given["depth"]
        ):
            choice = _decide(c, j, index, now)
            if choice == YIELD:
                if not mine["held"]:
                    mine["held"] = 1
                    mine["held_since"] = now
                    mine["yields"] += now >= 0.0
                wake = min(wake, _next_look(c, j, index, now))
                break
            _launch(c, given, mine, choice, c.moves[index, max(choice - 1, 0)], now)
        if worker["phase"] == AT_JOINT and mine["launched"] > mine["done"]:
            _start(c, mine, worker, c.moves[index], kernels, now)
    j.wake[0] = wake
    j.unsettled[0] = 0


@inlined
def _decide(c: Stretches, j: Joined, index: int, now: float) -> int:
    given, mine = c.joints[index], j.progress[index]
    first, end = given["rules_first"], given["rules_end"]
    return decide(
        j.board,
        index,
        c.peers,
        c.who[first:end],
        c.level[first:end],
        c.choice[first:end],
        mine["overtaken"],
        round(now),
    )


@inlined
def _launch(
    c: Stretches, given: np.void, mine: np.void, choice: int, moved: int, now: float
) -> None:
    number = mine["launched"]
    route = moved if choice > 0 else mine["route"]
    ready = now + c.rows[route + number]["launch_ns"]
    if mine["held"]:
        ready += c.hold_ns
        mine["held"] = 0
        mine["overtaken"] += 1
        pause = now - max(mine["held_since"], 0.0)
        mine["longest_pause_ns"] = max(mine["longest_pause_ns"], pause)
    elif number >= given["depth"]:
        ready += c.notice_ns
    mine["choice"][number % 2] = choice
    mine["ready"][number % 2] = ready
    mine["moves"] += choice > 0 and now >= 0.0
    mine["launched"] = number + 1


@inlined
def _start(
    c: Stretches, mine: np.void, worker: np.void, moves: Ints, kernels: Records, now: float
) -> None:
    """The stretch whose turn it is begins, as soon as it may."""
    number = mine["done"]
    choice = mine["choice"][number % 2]
    route = moves[choice - 1] if choice > 0 else mine["route"]
    stretch = c.rows[route + number]
    due = mine["free_at"]
    if number > 0:
        due += c.joint_ns
    due = max(due, mine["ready"][number % 2])
    lane = kernels[stretch["first"]]["lane"]
    if mine["went"] != NO_LANE and mine["went"] != lane:
        due += c.switch_ns[mine["went"], lane]
        mine["barriers"] += now >= 0.0
    mine["went"] = kernels[stretch["end"] - 1]["lane"]
    worker["kernel"] = stretch["first"]
    worker["route_end"] = stretch["end"]
    worker["phase"] = DELAY
    worker["due"] = due


@inlined
def _next_look(c: Stretches, j: Joined, index: int, now: float) -> float:
    """When the decision to yield may change although nothing else does: a slack crosses a level,
    a service has been busy for too long, or the floor is owed."""
    given = c.joints[index]
    at = round(now)
    soonest = np.inf
    if given["floor"] > 0.0:
        soonest = float(j.board[index, DEADLINE] + 1)
    looked_at = 0
    for rule in range(given["rules_first"], given["rules_end"]):
        looked_at |= c.who[rule]
    for row in range(j.board.shape[0]):
        if not (looked_at >> row) & 1 or j.board[row, TIER] != SERVICE:
            continue
        if not counts_as_busy(j.board, row, at):
            continue
        limit = j.board[row, DEADLINE] - j.board[row, LEFT]
        for change in (
            limit - j.board[row, SOME] + 1,
            limit - j.board[row, NONE] + 1,
            j.board[row, BUSY_SINCE] + HUNG_BOUNDS * j.board[row, BOUND] + 1,
        ):
            if change > at:
                soonest = min(soonest, float(change))
    return soonest

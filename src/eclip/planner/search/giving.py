"""Search for the objective slo: who gives way to services, how, and where to.

A candidate says for every worker what it does at joints while a service is busy, how long its
stretches are and how many are in flight, and for all services how much slack counts as none and as
some. It is evaluated by simulation, with the same arrivals for all. The search begins with a grid
of what all background does alike, then changes the best candidates, one thing at a time. The same
seed and number of batches give the same result.

Where only lanes keep background away from a service, the service is slower on a GPU than the
simulator says. So the search takes its p99 to be ``LANES_MARGIN`` times the simulated one there.
Plans say so.
"""

from __future__ import annotations

import enum
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from eclip.core.plan import Lane, Plan, Promise, Slack, Tradeoff, unpartitioned
from eclip.core.topology import Mask
from eclip.planner.joints import GRAIN_NS, Manner, cut_by_time, longest_piece_ns
from eclip.planner.problem import Problem
from eclip.planner.search.objective import Objective, Score
from eclip.planner.tiers import far_mask, giving_way, promising
from eclip.progress import Progress

_BATCH = 12
_PARENTS = 8
_GRAINS_NS = (GRAIN_NS // 2, GRAIN_NS, 2 * GRAIN_NS)
_DEPTHS = (1, 2)
# Limits of slack, in times of a service's request.
_NONE = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
_SOME = (0.5, 1.0, 2.0, 4.0)
# What finalists may use of the bounds, in this order.
_SHARES_OF_BOUND = (1.0, 0.9, 0.8, 1.15, 0.7)
# On p99 where only lanes keep background away. On an H200, with two services beside one model each,
# at three loads, on three masks: the measured p99 was at most so many times the simulated one in 14
# of 18 rows, 1.14 times in the middle (docs/results/services.md).
LANES_MARGIN = 1.6
_ALIKE = 0.005  # of background and of tails: less apart are two candidates not

Evaluate = Callable[[Sequence[Plan]], list[Score]]


class Way(enum.Enum):
    """What a worker does at joints while a service is busy."""

    STAY = "stays on its lane"
    YIELD = "yields"
    PATIENT = "yields when slack is used up, else goes on"
    MOVE = "moves"
    MOVE_YIELD = "yields when slack is used up, else moves"
    STEPWISE = "yields when slack is used up, moves when there is some, else goes on"
    GO_ON = "goes on, and may be stopped at its joints if nobody wants its result any more"

    @property
    def moves(self) -> bool:
        return self in (Way.MOVE, Way.MOVE_YIELD, Way.STEPWISE)

    @property
    def asks_for_slack(self) -> bool:
        return self in (Way.PATIENT, Way.MOVE_YIELD, Way.STEPWISE)


_GIVING = tuple(way for way in Way if way not in (Way.STAY, Way.GO_ON))


@dataclass(frozen=True)
class Habit:
    """What one worker does. ``units``: of the lane that it moves to or stays on; 0: all."""

    way: Way = Way.STAY
    units: int = 0
    grain_ns: int = GRAIN_NS
    depth: int = 2
    kernels_for: int = 0

    @property
    def plainly(self) -> Habit:
        """The same without what its way does not ask for."""
        if self.way is Way.STAY:
            return Habit(units=self.units, kernels_for=self.kernels_for)
        return self if self.way.moves else replace(self, units=0)


@dataclass(frozen=True)
class Habits:
    """A candidate: a habit for every worker, and limits of slack in times of a request."""

    each: tuple[Habit, ...]
    none: float = 1.0
    some: float = 1.0

    @property
    def plainly(self) -> Habits:
        each = tuple(habit.plainly for habit in self.each)
        if not any(habit.way.asks_for_slack for habit in each):
            return Habits(each)
        stepwise = any(habit.way is Way.STEPWISE for habit in each)
        return Habits(each, self.none, self.some if stepwise else 1.0)


@dataclass(frozen=True)
class TriedHabits:
    """A candidate that was evaluated."""

    habits: Habits
    plan: Plan
    score: Score
    value: float
    background: float
    tail: float  # worst of all services, over its bound


@dataclass(frozen=True)
class FoundHabits:
    """The best first; ``plain`` is the score of plain streams by the same evaluation."""

    candidates: tuple[TriedHabits, ...]
    plain: Score
    batches: int
    evaluated: int
    tradeoffs: tuple[Tradeoff, ...]
    frontier: tuple[tuple[float, float], ...] = ()  # of throughput and efficiency: not looked for

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(background, worst p99 over its bound) of every candidate whose services answered."""
        return tuple(
            (one.background, one.tail) for one in self.candidates if math.isfinite(one.tail)
        )

    def finalists(self, count: int) -> list[TriedHabits]:
        """The best ones that are not all alike, with less and less use of the bounds: on a device
        tails are not those of the simulator. One may be beyond them."""
        chosen: list[TriedHabits] = []
        for share in itertools.islice(itertools.cycle(_SHARES_OF_BOUND), 3 * len(_SHARES_OF_BOUND)):
            if len(chosen) == count:
                break
            fitting = [one for one in self.candidates if one.tail <= share]
            if share > 1:
                fitting.sort(key=lambda one: -one.background)
            apart = (one for one in fitting if all(_apart(one.score, two.score) for two in chosen))
            chosen += itertools.islice(apart, 1)
        return chosen or list(self.candidates[:1])

    def best_of(self, *ways: Way, depth: int | None = None) -> TriedHabits | None:
        """The best in which everybody who is no service has one of these ways."""
        for one in self.candidates:
            mine = [
                habit
                for habit, worker in zip(one.habits.each, one.plan.workers, strict=True)
                if worker.promise is None
            ]
            if all(habit.way in ways and depth in (None, habit.depth) for habit in mine):
                return one
        return None


def search_habits(
    problem: Problem,
    promises: Mapping[int, Promise],
    evaluate: Evaluate,
    objective: Objective,
    *,
    seconds: float,
    batches: int | None = None,
    seed: int = 0,
    services: Habit | None = None,
    progress: Progress | None = None,
) -> FoundHabits:
    """Search for so many seconds, or exactly so many batches after the beginning of the grid.
    ``services``: what all of them do; None: the one with less slack goes first, or nobody waits."""
    progress = progress or Progress()
    objective.check(len(problem.profiles))
    evaluate = _carefully(evaluate)
    shared = promising(unpartitioned(problem.topology, problem.profiles, problem.mix), promises)
    (plain,) = evaluate([shared])
    deadline = time.monotonic() + seconds  # the first evaluation may compile for as long as that
    maker = Maker(problem, promises, services)
    hunt = _Hunt(maker, evaluate, objective, plain, np.random.default_rng(seed))
    first, *grid = _batched(maker.starts())
    hunt.try_all(first)
    done = 0
    while not progress.stopped:
        left = deadline - time.monotonic()
        progress.part(done / max(1, batches) if batches is not None else 1 - max(left, 0) / seconds)
        if done >= batches if batches is not None else left <= 0:
            break
        # By turns: what is left of the grid, and changes of the best.
        from_grid = bool(grid) and done % 2 == 0
        if not hunt.try_all(grid.pop(0) if from_grid else hunt.children(_BATCH)) and not grid:
            break  # nothing new is left near the best
        done += 1
    return hunt.found(done)


def shares_by_lanes(plan: Plan) -> bool:
    """Whether some background never gives way to services, and only lanes keep it away from them:
    plain streams do not even have these."""
    background = [worker for worker in plan.workers if worker.promise is None]
    stays = any(worker.joints is None for worker in background)
    masked = any(plan.confines(worker) for worker in plan.everyone)
    return len(background) < len(plan.workers) and stays and masked


def _carefully(evaluate: Evaluate) -> Evaluate:
    """The same with the margin on tails of services, where it is due."""

    def reckon(plan: Plan, score: Score) -> Score:
        if not shares_by_lanes(plan):
            return score
        tails = [
            tail if worker.promise is None else LANES_MARGIN * tail
            for worker, tail in zip(plan.workers, score.p99_ms, strict=True)
        ]
        return replace(score, p99_ms=tuple(tails))

    return lambda plans: [
        reckon(plan, score) for plan, score in zip(plans, evaluate(plans), strict=True)
    ]


class Maker:
    """Plans of candidates, and what may be varied."""

    def __init__(
        self, problem: Problem, promises: Mapping[int, Promise], services: Habit | None = None
    ) -> None:
        """``services``: what all of them do; None: as is best."""
        self.problem = problem
        self._promises = promises
        self._services = services
        everyone = range(len(problem.profiles))
        self.background = [worker for worker in everyone if worker not in promises]
        self.kernels = [problem.kernels_for(worker) for worker in everyone]
        sizes = problem.topology.lane_sizes
        self.sizes = [[size for size in sizes if self._fits(worker, size)] for worker in everyone]

    @property
    def _in_turn(self) -> bool:
        """Whether services may let each other go first."""
        return len(self._promises) > 1 and self._services is None

    def _fits(self, worker: int, units: int) -> bool:
        """Whether all kernels of a worker, whichever it chooses, can run on so many units."""
        for kernels_for in self.problem.kernels_for(worker):
            choice = [0] * len(self.problem.profiles)
            choice[worker] = kernels_for
            if np.isinf(self.problem.choosing(choice).times(worker, [units])).any():
                return False
        return units < self.problem.topology.units

    def all_alike(self, habit: Habit, none: float = 1.0, some: float = 1.0) -> Habits:
        """The habit for all background, as far as their lanes allow; services have all units."""
        habits = [self._services or Habit()] * len(self.problem.profiles)
        if self._in_turn and habit.way is not Way.STAY:
            habits = [Habit(Way.YIELD, 0, habit.grain_ns, habit.depth)] * len(habits)
        for worker in self.background:
            habits[worker] = replace(habit, units=self._near(worker, habit.units))
        return Habits(tuple(habits), none, some).plainly

    def _side_by_side(self, habits: Habits) -> Habits:
        """The same, with services that never wait for each other."""
        each = [
            Habit() if worker in self._promises else habit
            for worker, habit in enumerate(habits.each)
        ]
        return replace(habits, each=tuple(each))

    def apart(self, units: int) -> Habits:
        """Static masks: background on so many units from the far end, services on the others."""
        topology = self.problem.topology
        units = min(topology.lane_sizes[:-1], key=lambda size: abs(size - units), default=0)
        rest = topology.units - units
        return Habits(
            tuple(
                Habit(units=self._near(worker, units))
                if worker not in self._promises
                else Habit(units=rest if self._fits(worker, rest) else self._near(worker, rest))
                for worker in range(len(self.problem.profiles))
            )
        )

    def _near(self, worker: int, units: int) -> int:
        if not units or not self.sizes[worker]:
            return 0
        return min(self.sizes[worker], key=lambda size: abs(size - units))

    def starts(self) -> list[Habits]:
        """The grid, the most telling first: a few of every kind at the usual grain, then more."""
        topology = self.problem.topology
        quarter, half, most = (round(part * topology.units) for part in (0.25, 0.5, 0.75))
        grid = [self.all_alike(Habit(Way.YIELD, depth=depth)) for depth in (2, 1)]
        if self._in_turn and self.background:
            grid += [self._side_by_side(habits) for habits in grid]
        grid += [self.apart(half), self.apart(quarter), self.all_alike(Habit(Way.PATIENT))]
        grid += [
            self.all_alike(Habit(Way.MOVE_YIELD, part), none)
            for part in (half, most)
            for none in (1.0, 0.5, 2.0)
        ]
        grid.append(self.all_alike(Habit(Way.STEPWISE, most)))
        grid += [self.apart(size) for size in topology.lane_sizes[:-1]]
        grid += [self.all_alike(Habit(Way.YIELD, grain_ns=grain)) for grain in _GRAINS_NS]
        grid += [self.all_alike(Habit(Way.PATIENT), none) for none in _NONE]
        for part in (half, most, quarter):
            grid += [self.all_alike(Habit(units=part)), self.all_alike(Habit(Way.MOVE, part))]
            grid += [self.all_alike(Habit(Way.MOVE_YIELD, part), none) for none in _NONE]
        grid += [
            self.all_alike(Habit(Way.STEPWISE, part), none, some)
            for part in (half, most)
            for none in (0.5, 1.0, 2.0)
            for some in (1.0, 2.0)
        ]
        return list(dict.fromkeys(grid))

    def plan(self, habits: Habits) -> Plan:
        problem = self.problem.choosing([habit.kernels_for for habit in habits.each])
        lanes = [
            Lane(worker, self._home(worker, habit)) for worker, habit in enumerate(habits.each)
        ]
        base = problem.plan(
            policy="search",
            lanes=lanes,
            choices=problem.on_own_lanes(),
            whys=[self._why(habit, lane) for habit, lane in zip(habits.each, lanes, strict=True)],
            why="",
        )
        manners = {
            worker: Manner(self._ways(habit), habit.grain_ns, habit.depth)
            for worker, habit in enumerate(habits.each)
            if habit.way is not Way.STAY
        }
        return giving_way(base, problem.profiles, self._limits(problem, habits), manners)

    def _home(self, worker: int, habit: Habit) -> Mask:
        topology = self.problem.topology
        if habit.way is not Way.STAY or not habit.units:
            return topology.full
        if worker in self._promises:
            return topology.take(habit.units, range(len(topology.slice_units)))
        return far_mask(topology, habit.units)

    def _why(self, habit: Habit, lane: Lane) -> str:
        topology = self.problem.topology
        words = f"{topology.units_of(lane.mask)} {topology.unit_name}s"
        if habit.kernels_for:
            words += f", kernels chosen for {habit.kernels_for}"
        return words

    def _ways(self, habit: Habit) -> tuple[tuple[Slack, Mask | None], ...]:
        room = far_mask(self.problem.topology, habit.units) if habit.way.moves else None
        return {
            Way.STAY: (),
            Way.YIELD: ((Slack.PLENTY, None),),
            Way.PATIENT: ((Slack.NONE, None),),
            Way.MOVE: ((Slack.PLENTY, room),),
            Way.MOVE_YIELD: ((Slack.NONE, None), (Slack.PLENTY, room)),
            Way.STEPWISE: ((Slack.NONE, None), (Slack.SOME, room)),
            Way.GO_ON: (),
        }[habit.way]

    def _limits(self, problem: Problem, habits: Habits) -> dict[int, Promise]:
        """Promises with limits of slack: none is left when what is in flight, and so many requests,
        would use it up."""
        in_flight_ns = 0
        for worker in self.background:
            habit, profile = habits.each[worker], problem.profiles[worker]
            if habit.way is not Way.STAY:
                units = problem.topology.units
                at = cut_by_time(profile, units, habit.grain_ns)
                longest_ns = longest_piece_ns(profile, at)
                in_flight_ns = max(in_flight_ns, habit.depth * longest_ns)
        limits = {}
        for service, promise in self._promises.items():
            none_ns = in_flight_ns + round(habits.none * promise.request_ns)
            some_ns = none_ns + round(habits.some * promise.request_ns)
            limits[service] = msgspec.structs.replace(promise, none_ns=none_ns, some_ns=some_ns)
        return limits

    def changed(self, habits: Habits, random: np.random.Generator) -> Habits:
        """One thing different: a limit, or one worker's habit."""
        asks = any(habit.way.asks_for_slack for habit in habits.each)
        if asks and random.random() < 0.4:
            if random.random() < 0.7:
                factor = float(random.choice((0.7, 0.85, 1.2, 1.4)))
                return replace(habits, none=round(habits.none * factor, 3))
            return replace(habits, some=float(random.choice(_SOME)))
        service = self._in_turn and random.random() < 0.15
        among = list(self._promises) if service or not self.background else self.background
        worker = int(random.choice(among))
        each = list(habits.each)
        each[worker] = self._habit(worker, each[worker], random)
        return replace(habits, each=tuple(each))

    def _habit(self, worker: int, habit: Habit, random: np.random.Generator) -> Habit:
        kernels = self.kernels[worker]
        if worker in self._promises:
            return replace(habit, way=Way.YIELD if habit.way is Way.STAY else Way.STAY)
        changes: list[dict[str, Any]] = [
            {"grain_ns": int(random.choice(_GRAINS_NS))},
            {"depth": int(random.choice(_DEPTHS))},
        ]
        if self.sizes[worker]:
            changes += [{"units": int(random.choice(self.sizes[worker]))}] * 2
            changes += [{"way": _GIVING[int(random.integers(len(_GIVING)))]}]
        if len(kernels) > 1:
            changes.append({"kernels_for": int(random.choice(kernels))})
        change = changes[int(random.integers(len(changes)))]
        changed = replace(habit, **change)
        if changed.way.moves and not changed.units:
            changed = replace(changed, units=int(random.choice(self.sizes[worker])))
        return changed


class _Hunt:
    """Candidates that were evaluated, and where to look next."""

    def __init__(
        self,
        maker: Maker,
        evaluate: Evaluate,
        objective: Objective,
        plain: Score,
        random: np.random.Generator,
    ) -> None:
        self._maker = maker
        self._evaluate = evaluate
        self._objective = objective
        self._plain = plain
        self._random = random
        self.known: dict[Habits, TriedHabits] = {}

    def try_all(self, wanted: Sequence[Habits]) -> bool:
        """Evaluate those that are new; False: none is."""
        new = [one for one in dict.fromkeys(wanted) if one not in self.known]
        plans = [self._maker.plan(one) for one in new]
        for one, plan, score in zip(new, plans, self._evaluate(plans), strict=True):
            value = self._objective.value(score, self._plain)
            background, tail = self._objective.background(score), self._objective.worst_tail(score)
            self.known[one] = TriedHabits(one, plan, score, value, background, tail)
        return bool(new)

    def ranked(self) -> list[TriedHabits]:
        return sorted(self.known.values(), key=lambda one: -one.value)

    def children(self, count: int) -> list[Habits]:
        best = self.ranked()[:_PARENTS]
        made: dict[Habits, None] = {}
        for _ in range(50 * count):
            if len(made) == count:
                break
            rank = min(int(self._random.exponential(_PARENTS / 4)), len(best) - 1)
            child = best[rank].habits
            for _ in range(1 + int(self._random.random() < 0.3)):
                child = self._maker.changed(child, self._random).plainly
            if child not in self.known:
                made[child] = None
        return list(made)

    def found(self, batches: int) -> FoundHabits:
        ranked = self.ranked()
        tradeoffs = _tradeoffs(ranked, self._plain, self._objective)
        return FoundHabits(tuple(ranked), self._plain, batches, len(ranked), tradeoffs)


def _tradeoffs(
    ranked: Sequence[TriedHabits], plain: Score, objective: Objective
) -> tuple[Tradeoff, ...]:
    """What nothing beats in background and in tails, and plain streams."""
    points = sorted(ranked, key=lambda one: (-one.background, one.tail))
    frontier = [tradeoff_of("plain streams", plain, objective)]
    lowest = float("inf")
    for one in points:
        if one.tail < lowest:
            lowest = one.tail
            frontier.append(tradeoff_of(in_words(one.habits, one.plan), one.score, objective))
    return tuple(frontier)


def tradeoff_of(label: str, score: Score, objective: Objective) -> Tradeoff:
    tail = objective.worst_tail(score)
    return Tradeoff(
        label=label,
        background=round(objective.background(score), 4),
        worst_tail=None if np.isinf(tail) else round(tail, 4),
    )


def in_words(habits: Habits, plan: Plan) -> str:
    """``yields when slack is below 1.2 requests, else moves to 64 SMs, 150 µs, depth 2``; of static
    masks, every worker's size"""
    unit = plan.topology.unit_name
    if all(habit.way is Way.STAY for habit in habits.each):
        sizes = [str(habit.units or plan.topology.units) for habit in habits.each]
        return f"{'+'.join(sizes)} {unit}s"
    parts = []
    for habit, worker in zip(habits.each, plan.workers, strict=True):
        if worker.promise is not None:
            continue
        words = habit.way.value.replace("moves", f"moves to {habit.units} {unit}s")
        words = words.replace("slack is used up", f"slack is below {habits.none:g} requests")
        if habit.way is Way.STAY:
            words = f"stays on {habit.units or plan.topology.units} {unit}s"
        else:
            words += f", {habit.grain_ns / 1e3:g} µs, depth {habit.depth}"
        parts.append(words)
    return "; ".join(dict.fromkeys(parts)) or "services among themselves"


def _apart(one: Score, other: Score) -> bool:
    pairs = [
        *zip(one.ratios, other.ratios, strict=True),
        *zip(one.p99_ms, other.p99_ms, strict=True),
    ]
    return any(abs(mine - theirs) > _ALIKE * max(abs(theirs), 1e-9) for mine, theirs in pairs)


def _batched(habits: Sequence[Habits]) -> list[Sequence[Habits]]:
    return [habits[start : start + _BATCH] for start in range(0, len(habits), _BATCH)]

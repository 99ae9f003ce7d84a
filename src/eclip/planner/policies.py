"""Policies: the ways a plan is made, one function each, and the dict that names them.

A policy sees a problem and options and returns a plan; it knows no device. ``eclip`` has a room of
its own in paper.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from eclip.core.memory import check_memory, memory_of_plan
from eclip.core.plan import Lane, Plan, Processes, Promise, Slack, Turns, unpartitioned
from eclip.core.topology import Mask
from eclip.errors import PlanningError, UsageError, check_number, check_whole, unknown_name
from eclip.planner.joints import JointRules, far_mask
from eclip.planner.paper import DEFAULT_SWITCH_MAX, plan_as_the_paper
from eclip.planner.pool import build_pool
from eclip.planner.problem import Problem
from eclip.planner.search.candidates import DEFAULT_SECONDS, MOST_SECONDS, search
from eclip.planner.search.decision import decide_by_simulation, decide_in_doubt, shortlist
from eclip.planner.search.giving import search_rules
from eclip.planner.search.objective import THROUGHPUT, Evaluator, Objective
from eclip.planner.search.variants import with_variants
from eclip.planner.tiers import (
    FOR_SERVICES,
    LAUNCHES,
    check_services,
    excess_in_words,
    giving_way,
    half_of,
    make_promises,
    needs_alone,
    promising,
    rules_for,
)
from eclip.progress import Progress

PRIORITY_LEVELS = 6  # of an H200's streams; a device with fewer refuses what it does not have
DEFAULT_SHARE = 60  # percent for each worker: the best of most mixes on an H200


@dataclass(frozen=True)
class PolicyOptions:
    """What policies may be told; each takes what it knows."""

    switch_max: int = DEFAULT_SWITCH_MAX  # eclip: lane switches per request and worker
    tolerance: float = 0.05  # model, kernel: how much slower than on all units is still right-sized
    shares: tuple[int, ...] = ()  # mps: percent of the units, one per worker or one for all
    promises: Mapping[int, Promise] = field(default_factory=dict)  # of every service, by index
    # The rest is for search; without ``batches`` it takes the seconds.
    evaluator: Evaluator | None = None
    objective: Objective = THROUGHPUT
    seconds: float = DEFAULT_SECONDS
    batches: int | None = None
    seed: int = 0
    switch_ns: float = 0.0  # what a lane switch costs a request
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        check_whole("switch_max", self.switch_max)
        check_whole("seed", self.seed)
        if self.batches is not None:
            check_whole("batches", self.batches)
        check_number("tolerance", self.tolerance)
        check_number("seconds", self.seconds)
        if not 0 <= self.tolerance < 100:
            raise UsageError(f"the tolerance must be 0 or more (0.05 is 5%), not {self.tolerance}")
        if not 0 < self.seconds <= MOST_SECONDS:
            raise UsageError(f"a search takes more than 0 and at most {MOST_SECONDS:.0f} s")


Policy = Callable[[Problem, PolicyOptions], Plan]


def make_plan(policy: str, problem: Problem, options: PolicyOptions | None = None) -> Plan:
    if policy not in POLICIES:
        raise unknown_name("policy", policy, POLICIES)
    options = options or PolicyOptions()
    known = policy in FOR_SERVICES or not needs_alone(problem.mix)
    if problem.mix.services and not options.promises and known:
        promises = make_promises(problem.mix, problem.profiles)
        options = dataclasses.replace(options, promises=promises)
    plan = POLICIES[policy](problem, options)
    promised = options.promises or any(problem.mix.floors)
    if promised and not plan.gives_way:  # otherwise it has them, with limits of slack
        plan = promising(plan, options.promises)
    check_memory(memory_of_plan(plan), f"the {policy} plan of {plan.mix.name}")
    return plan


def _shared(problem: Problem, options: PolicyOptions) -> Plan:
    return unpartitioned(problem.topology, problem.profiles, problem.mix)


def _timeslice(problem: Problem, options: PolicyOptions) -> Plan:
    return msgspec.structs.replace(
        unpartitioned(problem.topology, problem.profiles, problem.mix),
        policy="timeslice",
        why="time-slicing: workers take turns of the whole device, as separate processes do",
        sharing=Turns(),
    )


def _priority(problem: Problem, options: PolicyOptions) -> Plan:
    """Plain streams with priorities: services go first, the tightest bound before the others;
    without services, the shorter a worker's request, the sooner its kernels go.

    Equals have one priority; with more of them than levels, neighbours share one.
    """
    plain = unpartitioned(problem.topology, problem.profiles, problem.mix)
    if options.promises:
        everyone = [options.promises.get(index) for index in plain.everyone]
        urgency = [-math.inf if one is None else -one.bound_ns for one in everyone]
        rule = "the tighter a service's bound, the higher, background last"
    else:
        urgency = [-profile.request_ns[-1] for profile in problem.profiles]
        rule = "the shorter a request, the higher"
    ranks = sorted(set(urgency))
    levels = min(PRIORITY_LEVELS, len(ranks))
    priorities = [ranks.index(one) * levels // len(ranks) for one in urgency]
    return msgspec.structs.replace(
        plain,
        policy="priority",
        workers=tuple(
            msgspec.structs.replace(
                worker, why=f"{worker.why}, with priority {priority} (0 is the lowest)"
            )
            for worker, priority in zip(plain.workers, priorities, strict=True)
        ),
        lanes=tuple(
            msgspec.structs.replace(lane, priority=priority)
            for lane, priority in zip(plain.lanes, priorities, strict=True)
        ),
        why=f"plain streams with priorities: {rule}",
    )


def _priority_segments(problem: Problem, options: PolicyOptions) -> Plan:
    """Priorities, and few kernels of background in flight; nobody gives way."""
    check_services(problem.mix, "the policy priority-segments")
    first = _priority(problem, options)
    why = f"{first.why}; background in stretches, few in flight, but it gives way to nobody"
    return _with_rules(first, problem, options, JointRules(yields=None), "priority-segments", why)


def _yield(problem: Problem, options: PolicyOptions) -> Plan:
    """Plain streams; background launches nothing while a service is busy or a floor is owed."""
    if not any(problem.mix.floors):
        check_services(problem.mix, "the policy yield")
    plain = _shared(problem, options)
    why = "plain streams; background yields while a service is busy"
    if not problem.mix.services:
        why = "plain streams; whoever is owed nothing yields while a floor is owed"
    return _with_rules(plain, problem, options, JointRules(), "yield", why)


def _move(problem: Problem, options: PolicyOptions) -> Plan:
    """Plain streams; background moves to half of the device while a service is busy."""
    check_services(problem.mix, "the policy move")
    plain = _shared(problem, options)
    units = half_of(problem.topology)
    rules = JointRules(None, Slack.PLENTY, far_mask(problem.topology, units))
    unit = problem.topology.unit_name
    why = f"plain streams; background moves to {units} {unit}s while a service is busy"
    return _with_rules(plain, problem, options, rules, "move", why)


def _counting_launches(name: str) -> Policy:
    kernels, depth = LAUNCHES[name]

    def policy(problem: Problem, options: PolicyOptions) -> Plan:
        """As yield, but background counts launches, not time, between two looks."""
        check_services(problem.mix, f"the policy {name}")
        plain = _shared(problem, options)
        rules = JointRules(kernels=kernels, depth=depth)
        why = (
            f"plain streams; background yields while a service is busy, with at most "
            f"{kernels * depth} launches in flight and a look after every {kernels}"
        )
        return _with_rules(plain, problem, options, rules, name, why)

    return policy


def _with_rules(
    plan: Plan, problem: Problem, options: PolicyOptions, rules: JointRules, policy: str, why: str
) -> Plan:
    by_worker = rules_for(problem.mix, rules)
    made = giving_way(plan, problem.profiles, options.promises, by_worker)
    words = excess_in_words(made)
    why = f"{why}; {words}" if words else why
    return msgspec.structs.replace(made, policy=policy, why=why)


def _mps(problem: Problem, options: PolicyOptions) -> Plan:
    shares = options.shares or (DEFAULT_SHARE,)
    if len(shares) == 1:
        shares *= len(problem.profiles)
    return with_shares(_shared(problem, options), shares, "mps")


def _mps_model(problem: Problem, options: PolicyOptions) -> Plan:
    """The sizes that ``model`` picks, as shares."""
    sized = _model(problem, options)
    units = problem.topology.units
    shares = [
        -(-100 * max(sized.units(group.lane) for group in part.groups) // units)
        for part in sized.main.assignments
    ]
    return with_shares(_shared(problem, options), shares, "mps-model")


def with_shares(
    shared: Plan, shares: Sequence[int], policy: str = "mps", below_normal: Sequence[int] = ()
) -> Plan:
    """A process for every worker under MPS, from the plan of plain streams for the same mix.

    ``below_normal``: workers whose clients have less priority than the others."""
    try:
        sharing = Processes(tuple(shares), tuple(below_normal))
        return msgspec.structs.replace(
            shared,
            policy=policy,
            sharing=sharing,
            workers=tuple(
                msgspec.structs.replace(
                    worker, why=f"at most {share}% of the {shared.topology.unit_name}s, any of them"
                )
                for worker, share in zip(shared.workers, shares, strict=False)
            ),
            why=f"one process per worker under NVIDIA's MPS, shares {sharing.label}",
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _model(problem: Problem, options: PolicyOptions) -> Plan:
    """One right-sized mask per model.

    Slices are dealt out one by one, each to the worker that is slowed down most, until every worker
    is within the tolerance of its time on all units or no slice is left. So masks are disjoint,
    and the worst slowdown is the least that disjoint masks of whole slices allow.
    """
    topology = problem.topology
    workers = len(problem.profiles)
    slices = len(topology.slice_units)
    smallest = min(topology.slice_units)
    slowdown = []  # per worker, by number of slices - 1
    for worker, profile in enumerate(problem.profiles):
        times = problem.times(worker, [smallest * count for count in range(1, slices + 1)])
        slowdown.append(times.sum(axis=0) / profile.request_ns[-1])
    counts = [1] * workers
    while sum(counts) < slices:
        slowest = max(range(workers), key=lambda worker: slowdown[worker][counts[worker] - 1])
        if slowdown[slowest][counts[slowest] - 1] <= 1 + options.tolerance:
            break
        counts[slowest] += 1
    misfits = [
        worker for worker in range(workers) if np.isinf(slowdown[worker][counts[worker] - 1])
    ]
    if misfits:
        raise PlanningError(
            f"{problem.mix.workers[misfits[0]].name} has a kernel that fits no mask of "
            f"{counts[misfits[0]]} slices; use fewer workers or another policy"
        )
    lanes = []
    whys = []
    # The last slice may be an odd one that holds no clusters: it goes to the worker that has most
    # others.
    order = sorted(range(workers), key=counts.__getitem__)
    for worker, count in enumerate(counts):
        start = sum(counts[other] for other in order[: order.index(worker)])
        # Modulo: with more workers than slices, some share one.
        lane = Lane(worker, Mask((start + step) % slices for step in range(count)))
        units = topology.units_of(lane.mask)
        longer = problem.times(worker, [units]).sum() / problem.profiles[worker].request_ns[-1]
        lanes.append(lane)
        whys.append(
            f"{units} {topology.unit_name}s make a request {longer:.2f}× as long as all "
            f"{topology.units}"
        )
    return problem.plan(
        policy="model",
        lanes=lanes,
        choices=problem.on_own_lanes(),
        whys=whys,
        why="one right-sized mask per model: each slice went to whoever was slowed down most",
    )


def _kernel(problem: Problem, options: PolicyOptions) -> Plan:
    """Each kernel on the smallest lane within the tolerance of its time on all units; no budget."""
    pool = build_pool(problem.topology, len(problem.profiles))
    choices = []
    for worker in range(len(problem.profiles)):
        times = problem.times(worker, pool.sizes)
        enough = times <= times[:, -1:] * (1 + options.tolerance)
        choices.append(np.array(pool.lane_of[worker])[enough.argmax(axis=1)])
    return problem.plan(
        policy="kernel",
        lanes=pool.lanes,
        choices=choices,
        whys=[
            f"each kernel takes the smallest of {len(pool.sizes)} sizes that costs it at most "
            f"{options.tolerance:.0%}"
        ]
        * len(choices),
        why="kernel-wise right sizes with no limit on lane switches",
    )


def _search(problem: Problem, options: PolicyOptions) -> Plan:
    if options.evaluator is None:
        raise UsageError("the policy search needs something that evaluates plans")
    objective = options.objective.for_mix(problem.mix, options.promises)
    if objective.kind == "slo":
        return _search_rules(problem, options, options.evaluator, objective)
    found = search(
        problem,
        options.evaluator,
        objective,
        seconds=options.seconds,
        batches=options.batches,
        seed=options.seed,
        switch_ns=options.switch_ns,
        progress=options.progress,
    )
    entries = shortlist(found, problem, 1, objective)
    plan = decide_by_simulation(entries, found, objective, options.seed)
    return with_variants(plan, problem, options.evaluator, objective)


def _search_rules(
    problem: Problem, options: PolicyOptions, evaluate: Evaluator, objective: Objective
) -> Plan:
    found = search_rules(
        problem,
        options.promises,
        evaluate,
        objective,
        seconds=options.seconds,
        batches=options.batches,
        seed=options.seed,
        progress=options.progress,
    )
    return decide_in_doubt(found, problem, options.promises, evaluate, objective, options.seed)


def _eclip(problem: Problem, options: PolicyOptions) -> Plan:
    return plan_as_the_paper(problem, options.switch_max)


POLICIES: dict[str, Policy] = {
    "shared": _shared,
    "priority": _priority,
    "priority-segments": _priority_segments,
    "timeslice": _timeslice,
    "mps": _mps,
    "mps-model": _mps_model,
    "model": _model,
    "kernel": _kernel,
    **{name: _counting_launches(name) for name in LAUNCHES},
    "yield": _yield,
    "move": _move,
    "eclip": _eclip,
    "search": _search,
}

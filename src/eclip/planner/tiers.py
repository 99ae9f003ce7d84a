"""Tiers: services keep a bound, all other workers give way to them.

Simple policies for such mixes: plain streams, with workers that look up at joints. What a search
makes of joints is in search/proposals.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import msgspec

from eclip.core.mix import Mix
from eclip.core.plan import FOREIGN, Joints, Plan, Promise, Rule, Slack
from eclip.core.profile import Profile, Times
from eclip.core.topology import Topology
from eclip.errors import UsageError
from eclip.planner.alone import p99_alone_ns
from eclip.planner.joints import JointRules, give_way, promise_of

# Kernels of a stretch, and stretches in flight: 16-8 is 16 launches in flight, a look every 8.
LAUNCHES = {"launches-16-8": (8, 2), "launches-4-2": (2, 2), "launches-1-1": (1, 1)}
FOR_SERVICES = ("priority-segments", *LAUNCHES, "yield", "move")  # policies


def make_promises(
    mix: Mix,
    profiles: Sequence[Profile],
    alone_ns: Callable[[], Sequence[Times]] | None = None,
) -> dict[int, Promise]:
    """Every service's promise in times. A bound that cannot be kept is refused.

    ``alone_ns``: of every worker, times of its requests alone without their waiting, measured or
    modelled. Only bounds that are so many times the p99 alone need it.
    """
    check_rates(mix, profiles)
    promises = {}
    times: Sequence[Times] = ()
    if needs_alone(mix) and alone_ns is not None:
        times = alone_ns()
    for index in mix.services:
        worker, request_ns = mix.workers[index], profiles[index].request_ns[-1]
        assert worker.bound is not None
        tail_ns = 0.0
        if worker.bound.times_alone is not None:
            if not len(times):
                raise UsageError(
                    f"{worker.name}'s bound needs its p99 alone, which is not known here"
                )
            tail_ns = p99_alone_ns(worker.rate_rps or 0.0, times[index])
        promise = promise_of(worker, profiles[index], tail_ns)
        if promise.bound_ns < request_ns:
            raise UsageError(
                f"{worker.name} cannot keep a bound of {promise.bound_ns / 1e6:g} ms: one request "
                f"takes {request_ns / 1e6:.2f} ms with the device to itself"
            )
        promises[index] = promise
    return promises


def needs_alone(mix: Mix) -> bool:
    """Whether a bound is so many times the p99 alone."""
    bounds = [mix.workers[service].bound for service in mix.services]
    return any(bound is not None and bound.times_alone is not None for bound in bounds)


def check_rates(mix: Mix, profiles: Sequence[Profile]) -> None:
    """Refuse a service that could not keep up if it had the device to itself."""
    for index in mix.services:
        worker, request_ns = mix.workers[index], profiles[index].request_ns[-1]
        if (worker.rate_rps or 0.0) * request_ns >= 1e9:
            raise UsageError(
                f"{worker.name} cannot serve {worker.rate_rps:g} requests/s: one takes "
                f"{request_ns / 1e6:.2f} ms with the device to itself, so it serves at most "
                f"{1e9 / request_ns:.0f}/s"
            )


def check_services(mix: Mix, what: str) -> None:
    """Refuse ``what`` where no worker has a bound."""
    if not mix.services:
        raise UsageError(
            f"{what} needs a service, which is a worker with a bound, as in "
            f"bert:1@300rps/5ms,vgg19:32@background"
        )


def promising(plan: Plan, promises: Mapping[int, Promise]) -> Plan:
    """The plan with these promises; nobody gives way."""
    return give_way(plan, (), promises, {})


def rules_for(mix: Mix, background: JointRules) -> dict[int, JointRules]:
    """These rules for all workers without a bound. Of several services, the one that must act first
    goes first: the others yield to it at joints of the same kind."""
    services = mix.services
    yields = Slack.PLENTY if background.by_slack else None
    polite = dataclasses.replace(background, yields=yields, moves=None)
    rules = {index: background for index in range(len(mix.workers)) if index not in services}
    return rules | (dict.fromkeys(services, polite) if len(services) > 1 else {})


def giving_way(
    plan: Plan,
    profiles: Sequence[Profile],
    promises: Mapping[int, Promise],
    rules: Mapping[int, JointRules],
) -> Plan:
    """The plan with joints, and with words for what workers do there and what that costs."""
    made = give_way(plan, profiles, promises, rules)
    workers = list(made.workers)
    for index, given in rules.items():
        if not given.joints:
            continue
        words = joints_in_words(made, index)
        longest_ns = _joints(made, index).longest_ns
        if given.kernels is None and longest_ns > given.grain_ns:
            words += (
                f"; one kernel of {longest_ns / 1e6:.2f} ms exceeds the grain of "
                f"{given.grain_ns / 1e3:g} µs"
            )
        worker = workers[index]
        workers[index] = msgspec.structs.replace(worker, why=f"{worker.why}; {words}")
    return msgspec.structs.replace(made, workers=tuple(workers))


def half_of(topology: Topology) -> int:
    """The lane size nearest to half of the device."""
    return min(topology.lane_sizes, key=lambda size: abs(2 * size - topology.units))


def expected_excess_ns(plan: Plan) -> int | None:
    """What a service's request may wait for background: the stretches in flight when it arrives.
    None: a worker without a bound does not yield to a busy service."""
    drain_ns = _drain_ns(plan)
    always = all(
        worker.joints is None or worker.joints.rules[0].slack is Slack.PLENTY
        for worker in plan.workers
        if worker.promise is None
    )
    return drain_ns if always else None


def excess_in_words(plan: Plan) -> str:
    """One sentence about what services wait for; empty where no worker lets them pass."""
    drain_ns = _drain_ns(plan)
    if drain_ns is None or not plan.mix.services:
        return ""
    most = (
        f"at most about {drain_ns / 1e6:.2f} ms for background (depth times longest stretch, "
        f"summed over background)"
    )
    if any(worker.floor for worker in plan.workers):
        most += "; while a floor is owed, background does not give way"
    if expected_excess_ns(plan) is None:
        return (
            f"a service's request shares the device until its slack is used up, then waits {most}"
        )
    return f"a service's request waits {most}"


def _drain_ns(plan: Plan) -> int | None:
    """How long what is in flight takes when background yields; None: some of it never does.
    Workers share the device, so one after another is the longest that all of theirs takes."""
    drain_ns = 0
    for worker in plan.workers:
        if worker.promise is not None:
            continue
        joints = worker.joints
        if joints is None or all(rule.lane is not None for rule in joints.rules):
            return None
        drain_ns += joints.depth * joints.longest_ns
    return drain_ns


def joints_in_words(plan: Plan, index: int) -> str:
    """``yields to bert while it is busy; 20 stretches of at most 0.15 ms, 2 in flight``"""
    joints = _joints(plan, index)
    count = len(joints.at) + 1
    return (
        f"{rules_in_words(plan, index)}; {count} stretch{'es' if count > 1 else ''} of at most "
        f"{joints.longest_ns / 1e6:.2f} ms, {joints.depth} in flight"
    )


def rules_in_words(plan: Plan, index: int) -> str:
    """What is done most of the time first: the plan has the most urgent first."""
    joints = _joints(plan, index)
    words = [_rule_in_words(plan, rule) for rule in joints.rules[::-1]]
    if joints.floors_first:
        names = " or ".join(plan.workers[other].name for other in joints.floors_first)
        words.append(f"yields while {names} is owed its floor")
    if plan.workers[index].promise is not None and words:
        words = ["lets the service with less slack go first"]
    return ", ".join(dict.fromkeys(words)) or "gives way to nobody"


def _rule_in_words(plan: Plan, rule: Rule) -> str:
    names = [plan.workers[other].name for other in rule.to if other != FOREIGN]
    whom = " or ".join(names) or "a service of another process"
    if rule.lane is None:
        does = "yields"
    else:
        lane = plan.lanes[rule.lane].mask
        does = f"moves to {plan.units(rule.lane)} {plan.topology.unit_name}s (slices {lane})"
    has = {
        Slack.PLENTY: "is busy",
        Slack.SOME: "has some slack or none",
        Slack.NONE: "has no slack left",
    }
    return f"{does} while {whom} {has[rule.slack]}"


def _joints(plan: Plan, index: int) -> Joints:
    joints = plan.workers[index].joints
    assert joints is not None
    return joints

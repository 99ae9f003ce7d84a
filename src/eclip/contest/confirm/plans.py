"""Plans of a case: made by a policy, or searched for and confirmed on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eclip.contest.confirm.explore import Verification
from eclip.core.measures import (
    bounds_missed,
    falls_behind,
    floor_over_served,
    overload_sentence,
)
from eclip.core.mix import Mix
from eclip.core.plan import Plan, Promise
from eclip.core.profile import Times
from eclip.errors import StoppedError, UsageError
from eclip.planner import policies
from eclip.planner.case import Case, find_earlier
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.policies import PolicyOptions
from eclip.planner.search.objective import THROUGHPUT, Objective
from eclip.planner.tiers import make_promises
from eclip.progress import Progress
from eclip.rig.rig import Rig


def policy_options(
    objective: str | Objective | None = None,
    *,
    mix: Mix | None = None,
    seconds: float | None = None,
    batches: int | None = None,
    seed: int | None = None,
    base: PolicyOptions | None = None,
    progress: Progress | None = None,
) -> PolicyOptions:
    """A policy's options: the given ones, and the base's for the rest.

    ``mix``: if it has services, the default objective is slo.
    """
    options = base or PolicyOptions()
    if objective is None and options.objective is not THROUGHPUT:
        objective = options.objective
    return dataclasses.replace(
        options,
        objective=objective_of(objective, mix),
        seconds=options.seconds if seconds is None else seconds,
        batches=options.batches if batches is None else batches,
        seed=options.seed if seed is None else seed,
        progress=progress or options.progress,
    )


def objective_of(objective: str | Objective | None, mix: Mix | None = None) -> Objective:
    if isinstance(objective, Objective):
        return objective
    if objective is not None:
        return Objective(objective)
    return Objective("slo") if mix is not None and mix.services else THROUGHPUT


def make_verification(
    rig: Rig, verify: int, refine: float, earlier: str | Path | None
) -> Verification:
    """The Verification of a search, from the user's options."""
    if earlier is not None and not refine:
        raise UsageError("an earlier search is continued on the device: give refine, too")
    modelled = rig.device.modelled
    tried = () if earlier is None else find_earlier(earlier, rig.case, modelled=modelled)
    return Verification(verify, refine, tried)


def make_plan(
    case: Case, policy: str, options: PolicyOptions, evaluator: SimEvaluator | None = None
) -> Plan:
    """A policy's plan; a search is evaluated by simulation, with this ``evaluator`` of the case."""
    problem = case.problem(choosing=policy == "search")  # first: it refuses what does not fit
    if policy == "search":
        options.objective.for_mix(case.mix, options.promises)  # refuses a mix that it is not for
    evaluator = (evaluator or SimEvaluator.of(case)) if policy == "search" else None
    if case.mix.services and not options.promises:
        options = dataclasses.replace(options, promises=simulated_promises(case, evaluator))
    if evaluator is None:
        return policies.make_plan(policy, problem, options)
    options = dataclasses.replace(search_options(case, options), evaluator=evaluator)
    plan = policies.make_plan(policy, problem, options)
    return with_missed(plan, case.mix, evaluator.alone_rps, evaluator.seconds)


def simulated_promises(case: Case, evaluator: SimEvaluator | None = None) -> dict[int, Promise]:
    """Of every service, with its times alone by simulation where they are needed."""

    def alone_ns() -> Sequence[Times]:
        return (evaluator or SimEvaluator.of(case)).alone_ns

    promises = make_promises(case.mix, case.profiles, alone_ns)
    if evaluator is not None:
        _check_arrivals(case.mix, evaluator)
    return promises


def _check_arrivals(mix: Mix, evaluator: SimEvaluator) -> None:
    """Refuse a service of whose p99 a simulation can say nothing."""
    for service in mix.services:
        if not evaluator.arrivals(service):
            worker = mix.workers[service]
            raise UsageError(
                f"{worker.name} gets {worker.rate_rps:g} requests/s: none arrives in the "
                f"{evaluator.seconds:.0f} s that are simulated; plan for a higher rate"
            )


def search_options(case: Case, options: PolicyOptions) -> PolicyOptions:
    """The options with the cost of a lane switch on the case's device."""
    return dataclasses.replace(options, switch_ns=case.calibration.costs.barrier_ns)


def with_missed(plan: Plan, mix: Mix, alone_rps: Sequence[float], seconds: float) -> Plan:
    """The plan with a sentence in its evidence for every overloaded worker and every missed bound.

    ``seconds``: the length of its trial, in which a rare worker may have had no request.
    """
    evidence = plan.evidence
    if evidence is None:
        return plan
    chosen = next(trial for trial in evidence.trials if trial.chosen)
    words = [
        overload_sentence(worker.name, worker.rate_rps, ratio * alone)
        for worker, ratio, alone in zip(mix.workers, chosen.ratios, alone_rps, strict=True)
        if worker.rate_rps is not None and falls_behind(worker.rate_rps, ratio * alone, seconds)
    ]
    if evidence.objective != "slo":  # whose evidence has them already
        words += bounds_missed(plan.workers, chosen.p99_ms)
    evidence = msgspec.structs.replace(evidence, missed=(*words, *evidence.missed))
    return msgspec.structs.replace(plan, evidence=evidence)


def make_kept_plan(case: Case, policy: str, options: PolicyOptions) -> Plan:
    """A policy's plan. A plan that cannot keep its bounds and floors is refused."""
    plan = make_plan(case, policy, options)
    _check_floors(case, plan)
    return check_kept(plan, options.progress)


def _check_floors(case: Case, plan: Plan) -> None:
    """Refuse floors that a plan with yielding background cannot keep, by simulation. A searched
    plan is checked by its evidence instead."""
    yields = any(worker.joints and worker.joints.rules for worker in plan.workers)
    if plan.evidence is not None or not any(case.mix.floors) or not yields:
        return
    evaluator = SimEvaluator.of(case)
    (score,) = evaluator([plan])
    seconds = evaluator.seconds
    missed = [
        f"{worker.name}: {ratio:.1%} of its rate alone, at least {worker.floor:.1%} wanted"
        for worker, ratio, alone in zip(
            plan.workers, score.ratios, evaluator.alone_rps, strict=True
        )
        if floor_over_served(worker.floor, round(ratio * alone * seconds), alone, seconds, None) > 1
    ]
    if missed:
        raise UsageError(
            f"the policy {plan.policy} cannot keep every floor of {plan.mix.name}; the most it "
            f"can, simulated: {'; '.join(missed)}; ask for lower rates or lower floors"
        )


def check_kept(plan: Plan, progress: Progress | None = None) -> Plan:
    """The plan. A searched plan that misses a promise is refused with the missed promises of the
    best plan; if the search was stopped, the error is StoppedError, since a better plan may exist.
    """
    evidence = plan.evidence
    if evidence is None or evidence.objective != "slo" or not evidence.missed:
        return plan
    best = next(trial for trial in evidence.trials if trial.chosen)
    given = f"the best of {evidence.evaluated} ({best.label}): {'; '.join(evidence.missed)}"
    if progress is not None and progress.stopped:
        raise StoppedError(
            f"stopped before a plan was found that keeps every promise of {plan.mix.name}; {given}"
        )
    raise UsageError(
        f"no plan keeps every promise of {plan.mix.name}; {given}; ask for longer bounds, lower "
        f"rates or lower floors"
    )

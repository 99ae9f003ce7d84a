"""Decision: from what a search found to the one plan that is deployed.

The shortlist always holds plain streams and the best static masks beside the finalists. Where a
model has kernels for fewer units, it also holds plain streams with these, the least change that
often helps. What gives the best value in the trials is taken: a plan that came out worse than plain
streams or static masks is never deployed. Trials may be simulated, or measured on the device that
will run the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from eclip.core.display import told_apart
from eclip.core.plan import Evidence, Plan, Promise, ServiceTrial, Trial, unpartitioned
from eclip.planner.joints import JointRules
from eclip.planner.problem import Problem
from eclip.planner.search.candidates import Found
from eclip.planner.search.giving import LANES_MARGIN, FoundProposals, shares_by_lanes
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.placement import groups_of
from eclip.planner.search.proposals import STAYS, in_words
from eclip.planner.tiers import excess_in_words, promising

PLAIN = "plain streams"
STATIC = "best static masks"
OTHER_KERNELS = "plain streams, kernels for fewer units"
MARGIN_IN_WORDS = (
    f"where only lanes keep background away from services, p99 is taken to be {LANES_MARGIN:g} "
    f"times the simulated one"
)


@dataclass(frozen=True)
class Finalist:
    label: str
    plan: Plan
    found: Score  # what the search knew of it


def shortlist(
    found: Found, problem: Problem, finalists: int, objective: Objective
) -> list[Finalist]:
    """Plain streams, the best static masks, the finalists, and kernels for fewer units."""
    plain = unpartitioned(problem.topology, problem.profiles, problem.mix)
    entries = [Finalist(PLAIN, plain, found.plain)]
    ran = [candidate for candidate in found.static if candidate.score.stp > 0]
    static = max(
        ran, key=lambda candidate: objective.value(candidate.score, found.plain), default=None
    )
    chosen = [(STATIC, static)] if static is not None else []
    # A search may arrive at what is there already, by homes that say something else.
    taken = {_what_runs(plain), *(_what_runs(one.plan) for _, one in chosen)}
    best = [one for one in found.finalists(finalists + 2) if _what_runs(one.plan) not in taken]
    best = best[:finalists]
    chosen += [(f"search {rank}", one) for rank, one in enumerate(best, 1)]
    plainly = next((one for one in found.unmasked if one.score.stp > 0), None)
    if plainly is not None and plainly not in best:
        chosen.append((OTHER_KERNELS, plainly))
    return [*entries, *(Finalist(label, one.plan, one.score) for label, one in chosen)]


def shortlist_rules(
    found: FoundProposals, problem: Problem, promises: Mapping[int, Promise], finalists: int
) -> list[Finalist]:
    """Plain streams, the best static masks, yielding with depth 2 and 1, and the finalists."""
    plain = promising(unpartitioned(problem.topology, problem.profiles, problem.mix), promises)
    entries = [Finalist(PLAIN, plain, found.plain)]
    baselines = {
        STATIC: found.best_with(STAYS),
        "yield, depth 2": found.best_with(JointRules(depth=2)),
        "yield, depth 1": found.best_with(JointRules(depth=1)),
    }
    chosen = {label: one for label, one in baselines.items() if one is not None}
    others = [one for one in found.finalists(finalists + 3) if one not in chosen.values()]
    entries += [Finalist(label, one.plan, one.score) for label, one in chosen.items()]
    return [
        *entries,
        *(
            Finalist(in_words(one.proposal, one.plan), one.plan, one.score)
            for one in others[:finalists]
        ),
    ]


def _what_runs(plan: Plan) -> tuple[object, ...]:
    return plan.models, plan.lanes, groups_of(plan)


def decide(
    entries: Sequence[Finalist],
    scores: Sequence[Score],  # of the trials, one per entry
    found: Found | FoundProposals,
    objective: Objective,
    *,
    seed: int,
    device: str,
    modelled: bool,
    tried: Found | None = None,
    services: Sequence[tuple[ServiceTrial, ...]] = (),
) -> Plan:
    """The plan that did best, with the evidence in it; ``tried``: the search on the device.
    ``services``: of every entry, what its services gave against running alone."""
    plain = scores[0]
    values = [objective.value(score, plain) for score in scores]
    best = values.index(max(values))
    names = [worker.name for worker in entries[0].plan.workers]
    refused = [
        tuple(miss.sentence(names) for miss in objective.shortfalls(score, plain))
        for score in scores
    ]
    how = f"{entries[best].label}, best of {len(entries)} finalists "
    how += "simulated once more" if modelled else f"measured on {device}"
    evidence = Evidence(
        objective=objective.kind,
        seed=seed,
        batches=found.batches,
        evaluated=found.evaluated,
        tried=0 if tried is None else tried.evaluated,
        frontier=(tried or found).frontier,
        device=device,
        modelled=modelled,
        trials=tuple(
            Trial(
                label=entry.label,
                ratios=score.ratios,
                power_w=score.power_w,
                p99_ms=tuple(None if math.isinf(tail) else tail for tail in score.p99_ms),
                chosen=index == best,
                refused=refused[index],
                services=services[index] if services else (),
            )
            for index, (entry, score) in enumerate(zip(entries, scores, strict=True))
        ),
        bounds_ms=objective.bounds_ms,
        # Plain streams are what they are; a floor above them is no promise of ours.
        missed=refused[best] if best or objective.bounds_ms else (),
        tradeoffs=found.tradeoffs,
        simulated=tuple((round(x, 4), round(y, 4)) for x, y in found.points),
    )
    how += f", of {found.evaluated} plans that the search simulated"
    chosen = entries[best].plan
    if objective.kind == "slo":
        why = _why_of_services(objective, scores[best], chosen, how)
        if modelled and not services and shares_by_lanes(chosen):
            why += f"; {MARGIN_IN_WORDS}"
    else:
        why = _why(scores[best], plain, how)
    return msgspec.structs.replace(chosen, policy="search", why=why, evidence=evidence)


def decide_by_simulation(
    entries: Sequence[Finalist], found: Found | FoundProposals, objective: Objective, seed: int
) -> Plan:
    """The finalist that the search thinks best."""
    scores = [entry.found for entry in entries]
    device = "the simulator"
    return decide(entries, scores, found, objective, seed=seed, device=device, modelled=True)


def _why_of_services(objective: Objective, score: Score, plan: Plan, how: str) -> str:
    tails = ", ".join(
        f"{worker.name} p99 {_of_at_most(p99, bound)} ms"
        for worker, p99, bound in zip(plan.workers, score.p99_ms, objective.bounds_ms, strict=True)
        if bound is not None
    )
    expected = excess_in_words(plan)
    return "; ".join(
        [
            f"{objective.background(score):.1%} of background's rate alone, {tails}: {how}",
            *([expected] if expected else []),
        ]
    )


def _of_at_most(p99_ms: float, bound_ms: float) -> str:
    if math.isinf(p99_ms):
        return f"none (no request) of at most {bound_ms:.2f}"
    return " ms of at most ".join(told_apart(p99_ms, bound_ms))


def _why(score: Score, plain: Score, how: str) -> str:
    why = (
        f"STP {score.stp:.3f} ({score.stp / plain.stp - 1:+.1%} against plain streams), fairness "
        f"{score.fairness:.2f} (plain streams {plain.fairness:.2f})"
    )
    if min(score.power_w, plain.power_w) > 0:  # a short run may not have measured any
        gain = score.efficiency / plain.efficiency - 1
        why += f", {score.efficiency:.2f} STP·s/kJ ({gain:+.1%})"
    return f"{why}: {how}"

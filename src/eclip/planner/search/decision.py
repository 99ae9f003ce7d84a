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
import numpy as np

from eclip.core.display import told_apart
from eclip.core.plan import Evidence, Plan, Promise, ServiceTrial, Trial, unpartitioned
from eclip.planner.joints import JointRules
from eclip.planner.problem import Problem
from eclip.planner.search.candidates import Found
from eclip.planner.search.giving import (
    FoundProposals,
    TriedProposal,
    is_guarded,
    is_strict,
)
from eclip.planner.search.objective import Evaluator, Objective, Score
from eclip.planner.search.placement import groups_of
from eclip.planner.search.proposals import STAYS, in_words
from eclip.planner.tiers import excess_in_words, promising

PLAIN = "plain streams"
STATIC = "best static masks"
OTHER_KERNELS = "plain streams, kernels for fewer units"
UNGUARDED = "only lanes keep background away: nothing holds it back while a service is late"
_GAIN = 0.01  # of strict background, that sharing has to give more
_LOSS = 0.01  # ... that it may give less elsewhere
_NEAR = 0.9  # of a bound: where strict tails are longer, the shortest of them is safer
_IN_DOUBT = 5  # finalists that are tried with other arrivals and elsewhere


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
        "yield, shortest tail": found.shortest_strict(),
    }
    chosen: dict[str, TriedProposal] = {}
    for label, one in baselines.items():
        if one is not None and one not in chosen.values():
            chosen[label] = one
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
    elsewhere: Sequence[Sequence[Score]] = (),
) -> Plan:
    """The plan that did best, with the evidence in it; ``tried``: the search on the device.
    ``services``: of every entry, what its services gave against running alone. ``elsewhere``:
    scores of all entries on devices that differ."""
    plain = scores[0]
    values = [objective.value(score, plain) for score in scores]
    best = values.index(max(values))
    if objective.kind == "slo":
        best = _best_guarded(entries, [scores, *elsewhere], objective)
    names = [worker.name for worker in entries[0].plan.workers]
    refused = [
        tuple(miss.sentence(names) for miss in objective.shortfalls(score, plain))
        for score in scores
    ]
    how = f"{entries[best].label}, best of {len(entries)} finalists "
    how += "simulated once more" if modelled else f"measured on {device}"
    if elsewhere:
        how += f", and on {len(elsewhere)} devices that differ"
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
        if objective.bounds_ms and not is_guarded(chosen):
            why += f"; {UNGUARDED}"
    else:
        why = _why(scores[best], plain, how)
    return msgspec.structs.replace(chosen, policy="search", why=why, evidence=evidence)


def _best_guarded(
    entries: Sequence[Finalist], settings: Sequence[Sequence[Score]], objective: Objective
) -> int:
    """Of plans that account for lateness the best; the best strict one if sharing gains nothing.

    ``settings``: scores of all entries, first on the device, then elsewhere. Where none of these
    plans keeps all bounds, as beside kernels that are longer than a bound, or on a device without
    joints, lanes alone may protect services.
    """
    values = np.array(
        [[objective.value(score, scores[0]) for score in scores] for scores in settings]
    )
    plain = settings[0][0]
    everyone = range(len(entries))
    guarded = [index for index in everyone if is_guarded(entries[index].plan)]
    strict = [index for index in guarded if is_strict(entries[index].plan)]
    kept = [index for index in guarded if not objective.shortfalls(settings[0][index], plain)]
    if not strict or not kept:
        return max(everyone, key=values.mean(axis=0).__getitem__)
    base = _best_strict(strict, settings[0], objective)
    given = np.array([objective.background(scores[base]) for scores in settings])
    needed = values[:, base] - _LOSS * given
    needed[0] = values[0, base] + _GAIN * given[0]
    gaining = [index for index in guarded if (values[:, index] >= needed).all()]
    return max(gaining, key=values.mean(axis=0).__getitem__, default=base)


def _best_strict(strict: Sequence[int], scores: Sequence[Score], objective: Objective) -> int:
    """Of strict entries the one with the best value; if its tail comes near a bound, of those with
    hardly less background the one with the shortest tail."""
    values = {index: objective.value(scores[index], scores[0]) for index in strict}
    tails = {index: objective.worst_tail(scores[index]) for index in strict}
    best = max(strict, key=values.__getitem__)
    if tails[best] <= _NEAR:
        return best
    least = values[best] - _LOSS * objective.background(scores[best])
    return min((index for index in strict if values[index] >= least), key=tails.__getitem__)


def decide_in_doubt(
    found: FoundProposals,
    problem: Problem,
    promises: Mapping[int, Promise],
    evaluate: Evaluator,
    objective: Objective,
    seed: int,
) -> Plan:
    """The finalist that does best with other arrivals and gains on devices that differ, too."""
    entries = shortlist_rules(found, problem, promises, _IN_DOUBT)
    plans = [entry.plan for entry in entries]
    here, *elsewhere = (other(plans) for other in evaluate.doubts())
    return decide(
        entries,
        here,
        found,
        objective,
        seed=seed,
        device="the simulator",
        modelled=True,
        elsewhere=elsewhere,
    )


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

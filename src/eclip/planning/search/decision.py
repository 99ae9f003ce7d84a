"""Decision: from what a search found to the one plan that is deployed.

The shortlist always holds plain streams and the best static masks beside the finalists. Where a
model has kernels for fewer units, it also holds plain streams with these, the least change that
often helps. What gives the best value in the trials is taken: a plan that came out worse than plain
streams or static masks is never deployed. Trials may be simulated, or measured on the device that
will run the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from eclip.artefacts.plan import Evidence, Plan, Trial, unpartitioned
from eclip.planning.problem import Problem
from eclip.planning.search.candidates import Found
from eclip.planning.search.objective import Objective, Score
from eclip.planning.search.placement import groups_of

PLAIN = "plain streams"
STATIC = "best static masks"
OTHER_KERNELS = "plain streams, kernels for fewer units"


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


def _what_runs(plan: Plan) -> tuple[object, ...]:
    return plan.models, plan.lanes, groups_of(plan)


def decide(
    entries: Sequence[Finalist],
    scores: Sequence[Score],  # of the trials, one per entry
    found: Found,
    objective: Objective,
    *,
    seed: int,
    device: str,
    modelled: bool,
    tried: Found | None = None,
) -> Plan:
    """The plan that did best, with the evidence in it; ``tried``: the search on the device."""
    plain = scores[0]
    values = [objective.value(score, plain) for score in scores]
    best = values.index(max(values))
    names = [worker.name for worker in entries[0].plan.workers]
    refused = [
        tuple(miss.sentence(names) for miss in objective.shortfalls(score, plain))
        for score in scores
    ]
    how = f"{entries[best].label}, best of {len(entries)} that were "
    how += "simulated" if modelled else f"measured on {device}"
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
            )
            for index, (entry, score) in enumerate(zip(entries, scores, strict=True))
        ),
        bounds_ms=objective.p99_ms,
        # Plain streams are what they are; a floor above them is no promise of ours.
        missed=refused[best] if best or objective.p99_ms else (),
    )
    return msgspec.structs.replace(
        entries[best].plan,
        policy="search",
        why=_why(objective, scores[best], plain, f"{how}, of {found.evaluated} that were planned"),
        evidence=evidence,
    )


def _why(objective: Objective, score: Score, plain: Score, how: str) -> str:
    if objective.kind == "latency":
        tails = ", ".join(
            _tail(p99, plain_p99) for p99, plain_p99 in zip(score.p99_ms, plain.p99_ms, strict=True)
        )
        return f"99th percentiles {tails} against plain streams: {how}"
    why = (
        f"STP {score.stp:.3f} ({score.stp / plain.stp - 1:+.1%} against plain streams), fairness "
        f"{score.fairness:.2f} ({plain.fairness:.2f})"
    )
    if min(score.power_w, plain.power_w) > 0:  # a short run may not have measured any
        gain = score.efficiency / plain.efficiency - 1
        why += f", {score.efficiency:.2f} STP·s/kJ ({gain:+.1%})"
    return f"{why}: {how}"


def _tail(p99_ms: float, plain_ms: float) -> str:
    if math.isinf(p99_ms):
        return "none (no request)"
    change = "none there" if math.isinf(plain_ms) else f"{p99_ms / plain_ms - 1:+.1%}"
    return f"{p99_ms:.2f} ms ({change})"

"""Plans that are searched for by simulation: the most background within bounds of services.

They are made before a GPU is asked, where profiles are known, and kept in FOLDER/plans. A plan
that was made for other kernels is made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from lab.support.contenders import BOUNDED

from eclip.contest.confirm.bounds import simulate_services
from eclip.core.mix import Bound, Mix
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.files import store
from eclip.planner.case import Case
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.policies import PolicyOptions
from eclip.planner.search.giving import FoundProposals, TriedProposal
from eclip.planner.search.objective import Objective
from eclip.planner.search.proposals import in_words
from eclip.progress import Progress

STEP = 0.5  # several services have different bounds: the second one's is so much looser, and so on


def factors(factor: float, services: int) -> tuple[float, ...]:
    """Bounds of several services, as multiples of their p99 alone."""
    return tuple(factor * (1 + STEP * service) for service in range(services))


def with_factors(mix: Mix, factor: float) -> Mix:
    """The mix with bounds of so many times the p99 alone."""
    wanted = dict(zip(mix.services, factors(factor, len(mix.services)), strict=True))
    workers = [
        msgspec.structs.replace(worker, bound=Bound(times_alone=wanted[index]))
        if index in wanted
        else worker
        for index, worker in enumerate(mix.workers)
    ]
    return msgspec.structs.replace(mix, workers=tuple(workers))


def plan_file(folder: Path, task: str, load: float, way: str) -> Path:
    stem = f"{task}-{load:g}-{way}".replace("+", "-").replace(" ", "-").replace(":", "-")
    return folder / "plans" / f"{stem}.json.gz"


def kept_plan(path: Path, profiles: Sequence[Profile]) -> Plan | None:
    """The plan that was made for these kernels, if there is one."""
    if not path.is_file():
        return None
    plan = store.load(path, Plan)
    same = all(
        plan.fingerprint.traces.get(str(profile.model)) == profile.trace.digest
        for profile in profiles
    )
    return plan if same else None


def search_plans(case: Case, ways: Sequence[str], seconds: float) -> dict[str, Plan]:
    """A plan for each of these ways, from one search for every bound. ``case`` has the rates."""
    found: dict[float, FoundProposals] = {}
    plans = {}
    for way in ways:
        factor, share = BOUNDED[way]
        if factor not in found:
            found[factor] = _search(case, factor, seconds)
        plans[way] = _named(pick(found[factor].candidates, share))
    return plans


def _search(case: Case, factor: float, seconds: float) -> FoundProposals:
    asked = Case(
        with_factors(case.mix, factor),
        case.topology,
        case.calibration,
        case.profiles,
        usual_kernels=True,  # what else there is would have to be captured first
    )
    options = PolicyOptions(objective=Objective("slo"), seconds=seconds)
    return simulate_services(asked, options, SimEvaluator.of(asked), Progress()).found


def pick(candidates: Sequence[TriedProposal], share: float) -> TriedProposal:
    """The most background of those that use at most this part of the bounds, else the least late.
    ``candidates``: the best first."""
    fitting = [one for one in candidates if one.tail <= share]
    return fitting[0] if fitting else min(candidates, key=lambda one: one.tail)


def _named(tried: TriedProposal) -> Plan:
    return msgspec.structs.replace(tried.plan, why=in_words(tried.proposal, tried.plan))

"""A part of a visit: eclip's own contest of a pair under several ways of sharing, and its rows.

Captures are shared by all parts, and the plans are kept, so that the same arrivals can be simulated
afterwards (``replayed``). A background's part is of its rate alone under plain streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from lab.support.contenders import PLANS
from lab.support.kept import Row
from lab.support.pairs import PAIRS
from lab.support.stages import LEAST_TRIAL_S, MASKS, PROCESS_SETS, SEARCH_S, WARMUP_S, Part
from lab.support.workshop import Bench, KeptRig, Shelf

from eclip.contest.confirm.plans import make_verification, policy_options
from eclip.contest.contest import CompareOptions, Contest, ContestOptions
from eclip.contest.outcome import Outcome, outcome_of
from eclip.core.device import Window
from eclip.core.plan import Lanes, Plan
from eclip.core.shapes import shape_of
from eclip.errors import EclipError
from eclip.files import store
from eclip.planner.case import Case
from eclip.planner.search.objective import Objective
from eclip.progress import Progress
from eclip.rig.arrivals import Arrivals
from eclip.rig.rig import Rig
from eclip.sim.device import SimDevice


def run_part(bench: Bench, part: Part) -> None:
    profiles = tuple(bench.profile(model, index) for index, model in enumerate(part.models))
    case = Case(
        part.mix(bench.shelf),
        bench.shelf.topology,
        bench.shelf.calibration,
        profiles,
        usual_kernels=part.pair in PAIRS,  # what else there is would have to be captured first
    )
    rig = KeptRig(case, bench.device, bench.made)
    plans = {name: PLANS[name](case) for name in part.contenders if name in PLANS}
    policies = tuple(name for name in part.contenders if name not in PLANS)
    if part.contenders and not policies:
        policies = ("shared",)
    outcome = hold(rig, part, bench.shelf, policies or None, plans)
    store.append(outcome.comparison, bench.folder / "results.jsonl")
    for way, plan in outcome.plans.items():
        file = plan_file(bench.folder, part, way)
        file.parent.mkdir(exist_ok=True)
        store.save(plan, file)
    if outcome.observations is not None:
        store.save(outcome.observations, bench.folder / f"{part.slug}.observations.json.gz")
    for row in rows_of(part, outcome):
        bench.keep(row)
    if outcome.failure is not None:
        raise outcome.failure


def hold(
    rig: Rig,
    part: Part,
    shelf: Shelf,
    policies: tuple[str, ...] | None,
    plans: Mapping[str, Plan],
) -> Outcome:
    """What was measured before a failure is an outcome, too."""
    mix, window = rig.case.mix, Window(part.seconds(shelf), WARMUP_S, trace_ms=0.0)
    shape = shape_of(part.shape) if mix.services else None
    arrivals = Arrivals(mix, window, repeats=part.rounds, shape=shape)
    aims = tuple(Objective(kind) for kind in part.objectives)
    options = ContestOptions(
        policies=policies,
        plans=plans,
        objectives=aims,
        repeats=part.rounds,
        policy=policy_options(aims[0], seconds=SEARCH_S),
        settings=CompareOptions(
            warmup=WARMUP_S,
            trials=MASKS,
            trial_seconds=LEAST_TRIAL_S,
            processes=2 * PROCESS_SETS,
        ),
        verification=make_verification(rig, part.verify, part.refine_s, None)
        if part.verify
        else None,
    )
    contest = Contest(rig, arrivals, options, Progress())
    failure = None
    try:
        contest.hold()
    except EclipError as error:
        if not contest.measured:
            raise
        failure = error
    return outcome_of(contest, None, f"lab/gpu/visit.py: {part.name}", failure)


def rows_of(part: Part, outcome: Outcome) -> list[Row]:
    """A line for every way, as msgspec has it: services against the same requests alone."""
    comparison = outcome.comparison
    alone_rps = comparison.alone_rps[-1]
    rows = []
    for entry in comparison.entries:
        busy = sum(one.busy for one in entry.services)
        background = entry.together.rate_rps[-1] / alone_rps
        plan = outcome.plans[entry.policy]
        rows.append(
            {
                "part": part.name,
                "stage": part.stage,
                "pair": part.pair,
                "models": [str(model) for model in comparison.models],
                "device": comparison.device,
                "load": part.load,
                "shape": part.shape,
                "floor": part.floor,
                "bound": part.bound,
                "way": entry.policy,
                "setting": entry.setting,
                "why": plan.why,
                "stp": entry.together.stp,
                "watts": entry.together.power_w,
                "services": [_without_curves(msgspec.to_builtins(one)) for one in entry.services],
                "busy_share": busy,
                "background_rps": entry.together.rate_rps[-1],
                "background": background,
                "background_over_rest": background / max(1 - busy, 1e-9),
                "yields": sum(entry.together.yields),
                "moves": sum(entry.together.moves),
            }
        )
    left_out = [
        {"part": part.name, "stage": part.stage, "error": why} for why in comparison.left_out
    ]
    return [*rows, *left_out]


def _without_curves(service: dict[str, Any]) -> dict[str, Any]:
    for found in service.values():
        if isinstance(found, dict):
            found.pop("curve", None)
    return service


def plan_file(folder: Path, part: Part, way: str) -> Path:
    return folder / "plans" / f"{part.slug}--{way.replace(' ', '-')}.json.gz"


def replayed(part: Part, shelf: Shelf, ways: list[str]) -> dict[str, Row]:
    """By way: what the simulator says of plans that ran, given the arrivals that were measured.
    It knows neither processes nor priorities."""
    plans = {}
    for way in ways:
        if (file := plan_file(shelf.folder, part, way)).is_file():
            plan = store.load(file, Plan)
            if isinstance(plan.sharing, Lanes) and not any(lane.priority for lane in plan.lanes):
                plans[way] = plan
    profiles = tuple(one for name in part.models if (one := shelf.find(name)) is not None)
    if not plans or len(profiles) < len(part.models):
        return {}
    case = Case(part.mix(shelf), shelf.topology, shelf.calibration, profiles, usual_kernels=True)
    with Rig(case, SimDevice(shelf.topology, shelf.calibration)) as rig:
        outcome = hold(rig, part, shelf, ("shared",), {"shared": rig.plain, **plans})
    return {row["way"]: row for row in rows_of(part, outcome) if "way" in row}

"""Comparing: makes a contest from the user's options, and returns its outcome."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from eclip.contest.confirm.explore import check_refinement
from eclip.contest.confirm.plans import make_verification, objective_of
from eclip.contest.contest import CompareOptions, Contest, ContestOptions, known_policies
from eclip.contest.outcome import Outcome, outcome_of
from eclip.core.device import Window
from eclip.core.mix import Mix
from eclip.core.plan import Plan
from eclip.devices import open_device
from eclip.errors import EclipError, StoppedError, UsageError
from eclip.files import store
from eclip.planner.case import Case
from eclip.planner.policies import PolicyOptions
from eclip.planner.search.objective import Objective
from eclip.progress import Progress
from eclip.rig.arrivals import Arrivals, parts_of_load
from eclip.rig.rig import Rig

_NAME = re.compile(r"[A-Za-z][\w.-]{0,40}", re.ASCII)


def compare_policies(
    case: Case,
    policies: Sequence[str] | str | None,
    *,
    device: str,
    objective: str | Sequence[str] | None,
    seconds: float,
    repeats: int,
    load: float | str | Path | None,
    plans: Mapping[str, Plan | str | Path],
    options: CompareOptions | None,
    progress: Progress,
) -> Outcome:
    """Hold the contest. After a stop request or a failure, the results so far are returned.

    Invalid options are refused before a device is opened.
    """
    options = options or CompareOptions()
    aims = _objectives(objective, options.fairness, mix=case.mix)
    named = _plans(plans, case)
    part, shape, file = parts_of_load(load)
    window = Window(seconds, options.warmup, min(options.trace_ms, 1000 * seconds))
    arrivals = Arrivals(
        case.mix,
        window,
        repeats=repeats,
        seed=options.seed,
        part=part,
        requests=options.requests,
        shape=shape,
        file=file,
    )
    contest_options = ContestOptions(
        policies=_names(policies),
        plans=named,
        objectives=aims,
        repeats=repeats,
        policy=PolicyOptions(
            switch_max=options.switch_max,
            tolerance=options.tolerance,
            objective=aims[0],
            seconds=options.search_seconds,
            batches=options.batches,
            seed=options.seed,
            progress=Progress(progress),  # it has no phase of its own
        ),
        settings=options,
    )
    if not options.verify and (options.refine or options.earlier is not None):
        raise UsageError("refine needs verify, which decides at the end")
    if part is None:  # a search for a part load does not go on on the device
        for aim in aims:
            check_refinement(options.refine, aim, rates=case.mix.has_rates)
    extra = [profile for plan in named.values() for profile in case.profiles_of(plan.mix)]
    opened = open_device(device, case.topology, case.calibration, Progress(progress))
    with Rig(case, opened, extra) as rig:
        if options.verify:
            verification = make_verification(rig, options.verify, options.refine, options.earlier)
            contest_options = dataclasses.replace(contest_options, verification=verification)
        contest = Contest(rig, arrivals, contest_options, progress)
        failure = None
        try:
            contest.hold()
        except EclipError as error:
            if not contest.measured:
                raise
            failure = None if isinstance(error, StoppedError) else error
        return outcome_of(contest, part, options.command, failure)


def _objectives(
    objective: str | Sequence[str] | None, fairness: float | None, *, mix: Mix
) -> tuple[Objective, ...]:
    if objective is None:
        kinds = [objective_of(None, mix).kind]
    else:
        parts = objective.split(",") if isinstance(objective, str) else objective
        kinds = [kind.strip() for kind in parts]
    several = len(kinds) > 1  # then the floor is for those that have one
    return tuple(
        Objective(kind, fairness=None if several and kind == "slo" else fairness) for kind in kinds
    )


def _names(policies: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """The policies to run; None: all that can run here."""
    if policies is None or policies == "all":
        return None
    parts = policies.split(",") if isinstance(policies, str) else policies
    names = tuple(name.strip() for name in parts)
    if len(set(names)) != len(names):
        raise UsageError(f"a policy is named twice in {', '.join(names)}; name each once")
    return names


def _plans(plans: Mapping[str, Plan | str | Path], case: Case) -> dict[str, Plan]:
    loaded: dict[str, Plan] = {}
    for name, given in plans.items():
        if not _NAME.fullmatch(name) or name in {*known_policies()} - {"search"}:
            raise UsageError(
                f"{name!r} cannot name a plan; choose a name of letters and digits that is no "
                f"policy's"
            )
        plan = given if isinstance(given, Plan) else store.load(given, Plan)
        planned, asked = (
            [(worker.name, worker.model.usual) for worker in mix.workers]
            for mix in (plan.mix, case.mix)
        )
        if planned != asked:
            raise UsageError(f"the plan {name} is for {plan.mix.name}, not {case.mix.name}")
        loaded[name] = plan
    return loaded

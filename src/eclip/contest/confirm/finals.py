"""Finals: the best plans of a search, plain streams and the best static masks run in turns, longer
than trials, and what measures best is the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from eclip.contest.confirm.explore import Explorer, Verification, check_measured
from eclip.contest.confirm.plans import search_options, simulated_promises, with_missed
from eclip.core.device import Window
from eclip.core.load import load_of_mix
from eclip.core.measures import measure, measure_together
from eclip.core.mix import Mix
from eclip.core.plan import Plan
from eclip.core.runlog import RunLog
from eclip.errors import EclipError, StoppedError
from eclip.planner.policies import PolicyOptions
from eclip.planner.search.candidates import Found
from eclip.planner.search.decision import decide, decide_by_simulation, shortlist
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.variants import with_variants
from eclip.planner.tiers import promising
from eclip.progress import Progress
from eclip.rig.rig import Rig
from eclip.rig.rounds import rotation
from eclip.rig.trials import Trials

_ROUNDS = 2  # of the runs in turns
_FINAL = Window(seconds=1.0, warmup_seconds=0.1, trace_ms=0.0)
# Of such a run, at least: a GPU may go above its power limit for a quarter of a second, and its
# energy counter ticks ten times in one.
_SECONDS = {"throughput": 0.5, "energy": 1.0}


def confirm(
    explorer: Explorer,
    found: Found,
    objective: Objective,
    rig: Rig,
    trials: Trials,
    window: Window,
    progress: Progress,
) -> Plan:
    """The plan that measures best, with its evidence and variants.

    Finalists are the best plans of the exploration, or of the simulation if there was none. After a
    stop request before every finalist has run, simulation decides.
    """
    if progress.stopped:  # after a stop request a device measures nothing
        return decide_by_search(explorer, found, objective)
    problem, evaluate = explorer.problem, explorer.evaluate
    tried = explorer.tried(objective, rig, trials)
    finalists = shortlist(tried or found, problem, explorer.how.finalists, objective)
    if problem.mix.has_rates:
        # Where requests arrive by themselves, what happens beside idle workers counts.
        finalists = [
            dataclasses.replace(
                finalist, plan=with_variants(finalist.plan, problem, evaluate, objective)
            )
            for finalist in finalists
        ]
    seconds = max(window.seconds, _SECONDS[objective.kind])
    window = dataclasses.replace(window, seconds=seconds)
    logs = run_in_turns(
        [finalist.plan for finalist in finalists],
        problem.mix,
        rig,
        window,
        explorer.options.seed,
        progress,
    )
    if logs is None:
        return decide_by_search(explorer, found, objective)
    ran = list(logs)
    scores = [mean_score(logs[index]) for index in ran]
    check_measured(scores[0], [objective], window.seconds)
    plan = decide(
        [finalists[index] for index in ran],
        scores,
        found,
        objective,
        seed=explorer.options.seed,
        device=logs[0][0].device,
        modelled=logs[0][0].modelled,
        tried=tried,
    )
    plan = with_variants(plan, problem, evaluate, objective)
    plan = promising(plan, explorer.options.promises)
    return with_missed(plan, problem.mix, rig.alone_rps, window.seconds)


def search_and_confirm(
    rig: Rig, options: PolicyOptions, how: Verification, progress: Progress
) -> Plan:
    """Search by simulation, continue on the device if asked to, and confirm the plan there."""
    case = rig.case
    problem, evaluator = case.problem(choosing=True), rig.evaluator
    objective = options.objective.for_mix(case.mix, {})
    if case.mix.services:  # every plan holds their promises
        options = dataclasses.replace(options, promises=simulated_promises(case, evaluator))
    explorer = Explorer(problem, evaluator, search_options(case, options), how)
    progress.phase("searching")
    found = explorer.simulate(objective, progress)
    trials = Trials(rig, progress=progress)
    if not progress.stopped:
        progress.phase("searching on the device")
        explorer.explore(found, objective, rig, trials, progress)
        progress.phase("trying the finalists")
    return confirm(explorer, found, objective, rig, trials, _FINAL, progress)


def decide_by_search(explorer: Explorer, found: Found, objective: Objective) -> Plan:
    """The best plan by simulation alone."""
    finalists = shortlist(found, explorer.problem, 1, objective)
    plan = decide_by_simulation(finalists, found, objective, explorer.options.seed)
    plan = with_variants(plan, explorer.problem, explorer.evaluate, objective)
    plan = promising(plan, explorer.options.promises)
    evaluate = explorer.evaluate
    return with_missed(plan, explorer.problem.mix, evaluate.alone_rps, evaluate.seconds)


def run_in_turns(
    plans: Sequence[Plan],
    mix: Mix,
    rig: Rig,
    window: Window,
    seed: int,
    progress: Progress,
) -> dict[int, list[RunLog]] | None:
    """Run every plan under the mix's load, in several rounds, each in another order.

    The logs are keyed by the plan's place in ``plans``. A plan that the device refuses, such as for
    a kernel whose clusters do not fit its slices, is left out; the first, plain streams, must run.
    None: a stop was asked for before every plan had run once.
    """
    load = load_of_mix(mix, window.seconds, window.warmup_seconds, seed)
    logs: dict[int, list[RunLog]] = {}
    with contextlib.ExitStack() as stack:
        sessions = []
        for index, plan in enumerate(plans):
            try:
                session = rig.open(plan)
            except EclipError:
                if index == 0:
                    raise
                continue
            sessions.append((index, stack.enter_context(session)))
            logs[index] = []
        for done, (_, turn) in enumerate(rotation(len(sessions), _ROUNDS), 1):
            if progress.stopped:
                break
            index, session = sessions[turn]
            with contextlib.suppress(StoppedError):
                log = rig.run(session, plans[index], load, window)
                if not progress.stopped:  # otherwise it may have been cut short
                    logs[index].append(log)
            progress.part(done / (_ROUNDS * len(sessions)))
    return logs if all(logs.values()) else None


def mean_score(logs: Sequence[RunLog]) -> Score:
    runs = [measure(log) for log in logs]
    workers = range(len(runs[0].workers))

    def mean(values: Iterable[float | None]) -> float:
        return statistics.fmean(math.inf if value is None else value for value in values)

    return Score(
        ratios=tuple(mean(run.workers[w].ratio for run in runs) for w in workers),
        power_w=measure_together(logs).power_w,
        p99_ms=tuple(mean(run.workers[w].p99_ms for run in runs) for w in workers),
    )

"""Confirming bounds: runs the finalists of a search for services under the mix's load on a device.

In every round a finalist's session serves all workers, and then each service alone, with the same
arrivals. A service that a plan confines to a part of the units runs alone under plain streams
instead: alone on its small lane it would be slow, too, and hide the cost of the plan. The best
finalist is chosen after 1,000 requests of the rarest service, and runs on to 4,000. If its bounds
do not hold there, the next best follows. No finalist takes longer than a minute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from eclip.contest.confirm.explore import priority_levels
from eclip.contest.confirm.plans import simulated_promises, with_missed
from eclip.core.device import Window
from eclip.core.load import Load, load_of_mix
from eclip.core.measures import measure_together
from eclip.core.mix import Mix
from eclip.core.plan import Plan, Promise, ServiceTrial
from eclip.core.profile import Times
from eclip.core.runlog import RunLog
from eclip.errors import EclipError, StoppedError, UsageError
from eclip.files.excess import Excess, measure_excess
from eclip.planner.case import Case
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.policies import PolicyOptions
from eclip.planner.search.decision import (
    Finalist,
    decide,
    decide_by_simulation,
    shortlist_rules,
)
from eclip.planner.search.giving import FoundProposals, search_rules
from eclip.planner.search.objective import Objective, Score
from eclip.planner.tiers import make_promises
from eclip.progress import Progress
from eclip.rig.rig import Beside, Rig, run_beside_alone
from eclip.rig.trials import tails

TO_DECIDE = 1_000  # requests of the service with the fewest
TO_CLAIM = 4_000
MOST_SECONDS = 60.0  # of one finalist
_ROUNDS = 2
_ROOM = 1.1  # more requests than wanted, since some may be unfinished at the end
_WARMUP_S = 0.1
NO_TIMES: Times = np.empty(0)


@dataclass(frozen=True)
class Searched:
    """The result of a search by simulation for services, with its promises."""

    found: FoundProposals
    objective: Objective
    promises: Mapping[int, Promise]


def simulate_services(
    case: Case, options: PolicyOptions, evaluator: SimEvaluator, progress: Progress
) -> Searched:
    """Search by simulation; relative bounds are multiples of the simulated p99 alone."""
    promises = simulated_promises(case, evaluator)
    objective = options.objective.for_mix(case.mix, promises)
    found = search_rules(
        case.problem(choosing=True),
        promises,
        evaluator,
        objective,
        seconds=options.seconds,
        batches=options.batches,
        seed=options.seed,
        progress=progress,
    )
    return Searched(found, objective, promises)


def search_services(rig: Rig, options: PolicyOptions, finalists: int, progress: Progress) -> Plan:
    """Search by simulation, then run the best plans on the device. The scores are in the plan's
    evidence."""
    case = rig.case
    progress.phase("searching")
    searched = simulate_services(case, options, rig.evaluator, progress)
    progress.phase("trying the finalists")
    return confirm_services(rig, searched, finalists, options.seed, progress)


def confirm_services(
    rig: Rig, searched: Searched, finalists: int, seed: int, progress: Progress
) -> Plan:
    """The finalist that does best on the device. After a stop request before all have run,
    simulation decides."""
    case, found = rig.case, searched.found
    problem = case.problem(choosing=True)
    entries = shortlist_rules(found, problem, searched.promises, finalists)
    if priority_levels(rig) > 1:
        entries += _with_services_first(entries)
    try:
        tried = _Tried(rig, searched, entries, seed, progress)
    except StoppedError:
        return decide_by_simulation(entries, found, searched.objective, seed)
    tried.claim()
    plan = decide(
        tried.entries,
        tried.scores,
        found,
        tried.objective,
        seed=seed,
        device=rig.device.title,
        modelled=rig.device.modelled,
        services=tried.services,
    )
    return with_missed(plan, case.mix, rig.alone_rps, tried.seconds)


class _Tried:
    """The finalists that ran on the device, and their scores."""

    def __init__(
        self,
        rig: Rig,
        searched: Searched,
        entries: Sequence[Finalist],
        seed: int,
        progress: Progress,
    ) -> None:
        self._rig = rig
        self._seed = seed
        self._progress = progress
        self._mix = rig.case.mix
        self.seconds = seconds_for(self._mix, TO_DECIDE)
        window, loads = self._loads(self.seconds, seed)
        promises = promises_on(rig, lambda: [alone_logs(rig, load, window) for load in loads])
        self.objective = searched.objective.for_mix(self._mix, promises)
        self.entries: list[Finalist] = []
        self._rounds: list[list[Beside]] = []
        for number, entry in enumerate(entries):
            renewed = dataclasses.replace(entry, plan=with_bounds(entry.plan, promises))
            try:
                rounds = self._run(renewed.plan, self.seconds, first_seed=seed)
            except StoppedError:
                raise
            except EclipError:  # the device cannot run this plan; plain streams must run
                if number == 0:
                    raise
                continue
            self.entries.append(renewed)
            self._rounds.append(rounds)
            progress.part((number + 1) / len(entries))

    def _loads(self, seconds: float, first_seed: int) -> tuple[Window, list[Load]]:
        """The window and loads of rounds that take ``seconds`` together."""
        window = Window(seconds / _ROUNDS, _WARMUP_S, trace_ms=0.0)
        seeds = range(first_seed, first_seed + _ROUNDS)
        return window, [load_of_mix(self._mix, window.seconds, _WARMUP_S, seed) for seed in seeds]

    def _run(self, plan: Plan, seconds: float, first_seed: int) -> list[Beside]:
        window, loads = self._loads(seconds, first_seed)
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(self._rig.open(plan))
            alone_in = None
            if any(plan.confines(service) for service in self._mix.services):
                alone_in = stack.enter_context(self._rig.open(self._rig.plain))
            rounds = run_beside_alone(
                self._rig, session, plan, loads, window, Progress(self._progress), alone_in
            )
        if len(rounds) < _ROUNDS:
            raise StoppedError("stopped before every finalist had run")
        return rounds

    def claim(self) -> None:
        """Run the best finalist on to ``TO_CLAIM`` requests. If another finalist is best then, run
        that one on, and so forth."""
        more = seconds_for(self._mix, TO_CLAIM) - self.seconds
        claimed: set[int] = set()
        while more > 0 and not self._progress.stopped:
            scores = self.scores
            values = [self.objective.value(score, scores[0]) for score in scores]
            best = values.index(max(values))
            if best in claimed:
                return
            claimed.add(best)
            with contextlib.suppress(StoppedError):
                self._rounds[best] += self._run(
                    self.entries[best].plan, more, first_seed=self._seed + _ROUNDS
                )

    @property
    def scores(self) -> list[Score]:
        return [self._score(rounds) for rounds in self._rounds]

    def _score(self, rounds: Sequence[Beside]) -> Score:
        """Ratios use the rates alone on all units; a session's own may be those of its lanes."""
        alone_rps = self._rig.alone_rps
        together = measure_together(
            [msgspec.structs.replace(one.shared, alone_rps=alone_rps) for one in rounds]
        )
        return Score(
            ratios=tuple(worker.ratio for worker in together.workers),
            power_w=together.power_w,
            p99_ms=tails(together),
        )

    @property
    def services(self) -> list[tuple[ServiceTrial, ...]]:
        return [
            tuple(_service_trial(one) for one in self._excesses(rounds).values())
            for rounds in self._rounds
        ]

    def _excesses(self, rounds: Sequence[Beside]) -> dict[int, Excess]:
        """The excesses of services with requests that ended both beside others and alone."""
        found = {}
        for service in self._mix.services:
            with contextlib.suppress(UsageError):
                pairs = [(one.shared, one.alone[service]) for one in rounds]
                found[service] = measure_excess(pairs, service)
        return found


def promises_on(
    rig: Rig, alone: Callable[[], Iterable[Mapping[int, RunLog]]]
) -> dict[int, Promise]:
    """Of every service. ``alone``: its runs alone on the device, taken only where they count. A
    modelled device has the bounds of a plan for it."""
    mix = rig.case.mix
    if rig.device.modelled:
        return simulated_promises(rig.case)

    def alone_ns() -> list[Times]:
        rounds = list(alone())
        return [
            np.concatenate([_times_alone(logs[service], service) for logs in rounds])
            if service in mix.services
            else NO_TIMES
            for service in range(len(mix.workers))
        ]

    return make_promises(mix, rig.case.profiles, alone_ns)


def _times_alone(log: RunLog, service: int) -> Times:
    """Of its requests, from where each began to where it ended."""
    own = np.array(log.requests.worker, dtype=np.int64) == service
    if not own.any():
        name = log.plan.workers[service].name
        raise UsageError(f"{name} completed no request alone; run longer")
    times: Times = np.subtract(log.requests.end_ns, log.requests.start_ns)[own].astype(np.float64)
    return times


def alone_logs(rig: Rig, load: Load, window: Window) -> dict[int, RunLog]:
    """Every service with its own arrivals of the load, under plain streams, all others idle."""
    plain = rig.plain
    window = dataclasses.replace(window, trace_ms=0.0)
    with rig.open(plain) as session:
        return {
            service: rig.run(session, plain, load.only(service), window)
            for service in rig.case.mix.services
        }


def seconds_for(mix: Mix, requests: int) -> float:
    """Seconds until the rarest service has had ``requests``, limited so that a finalist, with a run
    for each service alone, takes at most ``MOST_SECONDS``."""
    slowest = min(mix.workers[service].rate_rps or math.inf for service in mix.services)
    return min(_ROOM * requests / slowest, MOST_SECONDS / (1 + len(mix.services)))


def with_bounds(plan: Plan, promises: Mapping[int, Promise]) -> Plan:
    """The plan with these bounds; limits of slack stay. A plan made without bounds gets them for
    reporting only."""
    workers = list(plan.workers)
    for index, promise in promises.items():
        made = workers[index].promise or promise
        kept = msgspec.structs.replace(made, bound_ns=promise.bound_ns)
        workers[index] = msgspec.structs.replace(workers[index], promise=kept)
    return msgspec.structs.replace(plan, workers=tuple(workers))


def _service_trial(excess: Excess) -> ServiceTrial:
    return ServiceTrial(
        name=excess.name,
        requests=excess.requests,
        p50_ms=excess.shared_ms.p50,
        p99_ms=excess.shared_ms.p99,
        longest_ms=excess.shared_ms.longest,
        excess_p50_ms=excess.excess_us.p50 / 1e3,
        excess_p99_ms=excess.excess_us.p99 / 1e3,
        excess_longest_ms=excess.excess_us.longest / 1e3,
        p99_ratio=excess.p99_ratio.value,
        p99_ratio_low=excess.p99_ratio.low,
        p99_ratio_high=excess.p99_ratio.high,
        busy=excess.busy,
    )


def _with_services_first(entries: Sequence[Finalist]) -> list[Finalist]:
    """Copies of the best yielding finalists with priority for services. The simulator does not
    model priorities."""
    giving = [entry for entry in entries if entry.plan.gives_way][-2:]
    return [
        dataclasses.replace(
            entry,
            label=f"{entry.label}, services first",
            plan=msgspec.structs.replace(
                entry.plan,
                lanes=tuple(
                    msgspec.structs.replace(
                        lane, priority=int(entry.plan.workers[lane.owner].promise is not None)
                    )
                    for lane in entry.plan.lanes
                ),
            ),
        )
        for entry in giving
    ]

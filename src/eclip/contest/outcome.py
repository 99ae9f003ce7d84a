"""The outcome of a contest: its comparison, the plans and last logs, and what a search tried."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass
from pathlib import Path

import msgspec

from eclip.contest.contest import Contest, Entrant
from eclip.core.made import Made, made_now
from eclip.core.measures import Measures, bound_of, measure, measure_together
from eclip.core.mix import Background, Mix
from eclip.core.plan import Plan, fingerprint_of
from eclip.core.runlog import RunLog
from eclip.errors import EclipError, StoppedError, UsageError
from eclip.files import store
from eclip.files.comparison import (
    Comparison,
    Entry,
    best_policy,
    latency_curves,
    plan_digest,
    shortly,
    summary_of,
)
from eclip.files.excess import Excess, measure_excess
from eclip.files.observations import Observations
from eclip.planner.case import Case


@dataclass(frozen=True, repr=False)
class Outcome:
    """The results of a comparison. A notebook shows them as a table."""

    comparison: Comparison
    plans: dict[str, Plan]  # by policy
    logs: dict[str, RunLog]  # by policy: of its last run
    measures: dict[str, Measures]  # by policy: of all its runs together
    case: Case
    observations: Observations | None = None  # runs of a search on the device
    runs_left: int = 0  # that a stop request or a failure kept from running
    failure: EclipError | None = None  # what ended the comparison early

    @property
    def best(self) -> str:
        """The best policy by the comparison's aim."""
        return best_policy(self.comparison)

    @property
    def missed(self) -> tuple[str, ...]:
        """Overload, bounds and floors not kept, in words; empty if all is well."""
        return self.comparison.missed

    def save(self, folder: str | Path) -> None:
        """Write the comparison, every plan and its last run log into a folder, made if it is
        missing."""
        place = store.make_folder(Path(folder))
        store.save(self.comparison, place / "comparison.json")
        for policy, plan in self.plans.items():
            store.save(plan, place / f"{policy}.plan.json")
            store.save(self.logs[policy], place / f"{policy}.run.json")
        if self.observations is not None:
            store.save(self.observations, place / "observations.json.gz")

    def __repr__(self) -> str:
        stps = shortly([f"{name} {measures.stp:.3f}" for name, measures in self.measures.items()])
        return f"Outcome({self.comparison.mix} on {self.comparison.device}: STP {stps})"

    def _repr_html_(self) -> str:
        return self.comparison._repr_html_()


def outcome_of(
    contest: Contest, load_part: float | None, command: str, failure: EclipError | None = None
) -> Outcome:
    if not contest.measured:
        raise StoppedError("stopped before anything was measured; nothing is kept")
    made = made_now(command)
    return Outcome(
        comparison=comparison_of(contest, load_part, made),
        plans={entrant.policy: entrant.plan for entrant in contest.measured},
        logs={
            entrant.policy: msgspec.structs.replace(entrant.logs[-1], made=made)
            for entrant in contest.measured
        },
        measures={entrant.policy: measure_together(entrant.logs) for entrant in contest.measured},
        case=contest.rig.case,
        observations=observations_of(contest) if contest.observed else None,
        runs_left=sum(
            contest.options.repeats - len(entrant.logs)
            for entrant in contest.entrants
            if entrant.policy not in contest.left_out
        ),
        failure=failure,
    )


def comparison_of(contest: Contest, load_part: float | None, made: Made) -> Comparison:
    first = contest.measured[0].logs[0]
    case, options = contest.rig.case, contest.options
    measures = {entrant.policy: measure_together(entrant.logs) for entrant in contest.measured}
    logs = [log for entrant in contest.measured for log in entrant.logs]
    return Comparison(
        mix=case.mix.name,
        workers=tuple(worker.name for worker in case.mix.workers),
        models=case.mix.models,
        topology=first.plan.topology.name,
        device=first.device,
        driver=contest.rig.device.driver,
        modelled=first.modelled,
        date=made.date,
        command=made.command,
        eclip=made.eclip,
        load=first.load,
        load_part=load_part,
        seed=first.seed,
        repeats=options.repeats,
        objective=",".join(aim.kind for aim in options.objectives),
        alone_rps=first.alone_rps,
        entries=tuple(
            Entry(
                policy=entrant.policy,
                setting=entrant.setting,
                plan=plan_digest(entrant.plan),
                switches=tuple(part.switches for part in entrant.plan.main.assignments),
                runs=tuple(summary_of(measure(log)) for log in entrant.logs),
                together=summary_of(measures[entrant.policy]),
                trials=entrant.trials,
                services=_services(contest, entrant),
                latencies_ms=latency_curves(entrant.logs),
            )
            for entrant in contest.measured
        ),
        left_out=tuple(f"{policy}: {why}" for policy, why in contest.left_out.items()),
        bounds_ms=_bounds_ms(contest),
        weights=_weights(case.mix),
        floors=_floors(case.mix),
        missed=tuple(
            f"{policy}: {words}"
            for policy, measured in measures.items()
            for words in measured.missed
        ),
        warnings=tuple(dict.fromkeys(warning for log in logs for warning in log.warnings)),
    )


def _services(contest: Contest, entrant: Entrant) -> tuple[Excess, ...]:
    """Every service of these runs against the same requests alone."""
    found = []
    for service in contest.rig.case.mix.services:
        pairs = [
            (log, contest.alone[log.seed][service])
            for log in entrant.logs
            if log.seed in contest.alone
        ]
        with contextlib.suppress(UsageError):  # none of its requests ended
            if pairs:
                found.append(measure_excess(pairs, service))
    return tuple(found)


def _bounds_ms(contest: Contest) -> tuple[float | None, ...]:
    bounds = tuple(bound_of(worker) for worker in contest.measured[0].plan.workers)
    return bounds if contest.rig.case.mix.services else ()


def _weights(mix: Mix) -> tuple[float, ...]:
    if not mix.services:
        return ()
    return tuple(
        0.0 if worker.bound is not None else (worker.background or Background()).weight
        for worker in mix.workers
    )


def _floors(mix: Mix) -> tuple[float, ...]:
    return mix.floors if mix.services and any(mix.floors) else ()


def observations_of(contest: Contest) -> Observations:
    """The runs of a search on the device, in the form that ``eclip calibrate`` reads."""
    case = contest.rig.case
    return Observations(
        fingerprint=fingerprint_of(case.topology, (*case.profiles, *case.others)),
        source=f"eclip compare {case.mix.name}: runs of a search on the device",
        date=datetime.datetime.now(datetime.UTC).date(),
        runs=tuple(contest.observed),
        modelled=contest.measured[0].logs[0].modelled,
    )

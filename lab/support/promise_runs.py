"""Runs of lab/promises.py: a random case, planned once, on several simulated devices."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from lab.support.kept import Row
from lab.support.random_cases import (
    DrawnDevice,
    RandomCase,
    begun_after,
    draw_case,
    draw_device,
)

from eclip.contest.confirm.plans import make_plan, policy_options, simulated_promises
from eclip.core.credit import IN_TIME, PAID
from eclip.core.load import Load, load_of_mix
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.shapes import Shape
from eclip.errors import UsageError
from eclip.planner.alone import alone_rates
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.search.giving import FoundProposals, search_rules
from eclip.sim.device import SimDevice, glimpse
from eclip.sim.tables import KernelTables

KEPT, WELL_KEPT = 0.01, 0.005  # late share: of a p99, and by which cases are chosen
WARMUP = 0.25  # of the window, as the simulator's short runs have it
_OTHER_SEED = 10_000  # of arrivals, by which cases are chosen
_CHOICE_PART = 0.5  # of the requests, for that
_MOST_IN_HINDSIGHT = 60


@dataclass(frozen=True)
class Trial:
    requests: int  # of a service, on the mean over all services of the case
    batches: int
    devices: int
    shape: Shape | None = None


@dataclass(frozen=True)
class Stand:
    """A device with a case's profiles on it."""

    device: DrawnDevice
    tables: Mapping[tuple[Any, ...], KernelTables]
    alone_rps: tuple[float, ...]

    @classmethod
    def of(cls, device: DrawnDevice, chosen: RandomCase, plans: Sequence[Plan]) -> Stand:
        case = chosen.case
        own: dict[Any, Profile] = {
            profile.model: device.profile(profile) for profile in (*case.others, *case.profiles)
        }
        tables = {
            plan.models: KernelTables([own[model] for model in plan.models], device.calibration)
            for plan in plans
        }
        profiles = [own[profile.model] for profile in case.profiles]
        simulated = SimDevice(case.topology, device.calibration)
        return cls(device, tables, alone_rates(simulated, profiles, profiles))

    def run(self, plan: Plan, seconds: float, seed: int, shape: Shape | None) -> Row:
        """Late shares and p99s of services, and the background that was done."""
        load = load_of_mix(plan.mix, seconds, WARMUP * seconds, seed, shape)
        begun = [self._begun(load, worker, seconds, seed) for worker in plan.everyone]
        load = replace(load, begins=tuple(begun))
        seen = glimpse(plan, self.tables[plan.models], load, 1e9 * seconds)
        owner = seen.requests[:, 0]
        late, tails, paid = [], [], []
        for service in plan.mix.services:
            promise = plan.workers[service].promise
            arrivals = load.arrivals[service]
            assert promise is not None and arrivals is not None
            mine = seen.requests[owner == service]
            took = mine[:, 3] - mine[:, 1]
            last = mine[-1, 1] if len(mine) else -np.inf
            waiting = 1e9 * seconds - arrivals[arrivals > last]
            over = np.count_nonzero(took > promise.bound_ns)
            over += np.count_nonzero(waiting > promise.bound_ns)
            late.append(float(over / max(1, len(mine))))
            if promise.gain:
                paid.append(most_paid(mine[:, 4], promise.gain))
            tails.append(float(np.percentile(took, 99)) / promise.bound_ns if len(mine) else 99.0)
        ratios = [
            rate / alone
            for worker, (rate, alone) in enumerate(zip(seen.rates_rps, self.alone_rps, strict=True))
            if worker not in plan.mix.services
        ]
        return {
            "late": [round(one, 6) for one in late],
            "p99_over_bound": [round(one, 4) for one in tails],
            "background": round(float(np.mean(ratios)), 5),
            "paid": [round(one, 3) for one in paid],
        }

    def _begun(self, load: Load, worker: int, seconds: float, seed: int) -> Any:
        arrivals = load.arrivals[worker]
        if arrivals is None:
            return None
        stalls = self.device.stalls(seconds, WARMUP * seconds, worker, seed)
        return begun_after(arrivals, stalls)


def most_paid(verdicts: npt.NDArray[np.int64], gain: float) -> float:
    """The most late requests, of any that follow each other, beyond those that were late without
    credit and what the others earned: an account promises MOST_CREDIT at most."""
    fates = (verdicts - 1) >> 2
    grown = np.append(0.0, np.cumsum((fates == PAID) - gain * (fates == IN_TIME)))
    return float((grown - np.minimum.accumulate(grown)).max())


def rows_of_case(seed: int, trial: Trial, *, hindsight: bool = False) -> list[Row]:
    """A row for every device; a single row if no plan can keep the bounds on the calibration."""
    began = time.monotonic()
    chosen = draw_case(seed)
    case = chosen.case
    about: Row = {
        "case": seed,
        "kinds": list(chosen.kinds),
        "models": [str(worker.model) for worker in case.mix.workers],
        "load": round(chosen.load, 3),
        "bounds": [case.mix.workers[one].bound.times_alone for one in case.mix.services],  # type: ignore[union-attr]
    }
    try:
        evaluator = SimEvaluator.of(case)
        options = policy_options(mix=case.mix, batches=trial.batches, seed=0)
        options = replace(options, promises=simulated_promises(case, evaluator))
        plans = {way: make_plan(case, way, options, evaluator) for way in ("yield", "search")}
    except UsageError as error:
        return [about | {"refused": str(error)}]
    planned_s = time.monotonic() - began
    fixed = _tried(chosen, trial, evaluator, options.promises) if hindsight else []
    rates = [case.mix.workers[one].rate_rps or 0.0 for one in case.mix.services]
    seconds = trial.requests * len(rates) / sum(rates)
    about |= {
        "bounds_ms": [promise.bound_ns / 1e6 for promise in options.promises.values()],
        "seconds": round(seconds, 2),
        "planned_s": round(planned_s, 1),
        "why": plans["search"].why,
    }
    rows = []
    for number in range(trial.devices):
        device_seed = 3 * seed + number if number else 0
        device = draw_device(case.calibration, device_seed)
        stand = Stand.of(device, chosen, [*plans.values(), *fixed])
        other = stand.run(plans["yield"], _CHOICE_PART * seconds, _OTHER_SEED + seed, trial.shape)
        ways = {way: stand.run(plan, seconds, seed, trial.shape) for way, plan in plans.items()}
        row = about | {
            "device": number,
            "stalls_per_s": round(device.stalls_per_s, 3),
            "yield_keeps": max(other["late"]) <= WELL_KEPT,
            "ways": ways,
        }
        if hindsight:
            row["hindsight"] = _best_fixed(stand, fixed, seconds, seed, trial.shape)
        rows.append(row)
    for row in rows:
        row["took_s"] = round(time.monotonic() - began, 1)
    return rows


def _tried(chosen: RandomCase, trial: Trial, evaluator: SimEvaluator, promises: Any) -> list[Plan]:
    """Plans that a search tried and that came near their bounds, most background first."""
    case = chosen.case
    objective = policy_options(mix=case.mix).objective.for_mix(case.mix, promises)
    found: FoundProposals = search_rules(
        case.problem(choosing=True),
        promises,
        evaluator,
        objective,
        seconds=1.0,
        batches=trial.batches,
        seed=0,
    )
    near = [one for one in found.candidates if one.tail <= 1.3]
    near.sort(key=lambda one: -one.background)
    return [one.plan for one in near[:_MOST_IN_HINDSIGHT]]


def _best_fixed(
    stand: Stand, plans: Sequence[Plan], seconds: float, seed: int, shape: Shape | None
) -> Row | None:
    for plan in plans:
        row = stand.run(plan, seconds, seed, shape)
        if max(row["late"]) <= KEPT:
            return row
    return None

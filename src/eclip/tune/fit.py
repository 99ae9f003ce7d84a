"""Fitting the simulator's constants to runs that were measured.

``Replay`` simulates observed runs; ``fit`` finds the constants with the least error, and reports
the error on held-out runs and on held-out mixes.

The four constants of ``Interference`` are fitted to the workers' rates, by a pattern search;
``idle_w`` to the power, and ``launch_ns`` to the rates alone, both exactly. Barrier and switch
costs are not fitted, and only plans without switches are used. The H200's runs with switches were
measured while workers still fell into lock-step (docs/results/lanes.md), an effect that is not in
the model and would distort the constants. Runs with kernels for fewer units are used like all
others: these kernels have their own profiles.

Everything is deterministic. The search walks a lattice in log space from a constant start, so fits
to different runs share the simulations of common points, and no fit starts from constants that an
earlier fit learnt from held-out runs. The start, and the form of the model, were chosen with the
H200's runs in view, so errors on its held-out runs are a little too small. The search is local, and
constants can replace each other (presence and pressure, cohabit and crowding): other starts end at
other constants, with much the same error.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import asdict, replace

from eclip.core.calibration import Calibration, Interference
from eclip.core.load import closed_loop
from eclip.core.mix import parse_mix
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan, unpartitioned
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.errors import StoppedError, UsageError
from eclip.files.observations import Groups, Observations, ObservedHome, ObservedRun
from eclip.planner.problem import Problem
from eclip.planner.search.placement import Home, Placer
from eclip.progress import Progress
from eclip.sim.device import glimpse
from eclip.sim.tables import KernelTables

Floats = npt.NDArray[np.float64]
Point = tuple[int, ...]  # on the lattice, one exponent per constant of Interference

_START = Interference(cohabit=0.005, crowding=0.5, presence=0.02, pressure=0.12)
_STEPS = (4, 2, 1)  # of the search, in lattice spacings
_SPACING = 2**0.5
_REACH = 12  # spacings from the start: a factor of 64 up and down
_REQUESTS = 12  # of the worker with the longest, were it alone
_LEAST_NS = 10e6
_HELD_OUT = 4  # a quarter of the mixes, and of the other mixes' runs
_FEWEST = 8  # runs: two for every constant that is searched


@dataclass(frozen=True)
class Prediction:
    rates_rps: tuple[float, ...]
    power_w: float


@dataclass(frozen=True)
class Errors:
    """How far simulated runs are from measured ones; not a number if there are none."""

    runs: int
    rate: float  # mean of |simulated ÷ measured - 1| over every worker of every run
    power: float  # the same for the power of every run
    stp_bias: float  # mean of simulated ÷ measured - 1
    stp_correlation: float


@dataclass(frozen=True)
class Fit:
    calibration: Calibration  # fitted to all usable runs
    fitted: Errors  # its error on them
    seen: Errors  # of a fit to a part of the runs: on this part, ...
    held_runs: Errors  # ... on other runs of the same mixes
    held_mixes: Errors  # ... and on mixes of which it saw nothing
    left_out: dict[str, Errors]  # per mix: of a fit to all other mixes
    switching: Errors  # of the calibration on runs with switches, which no fit uses
    pairs: int = 0  # whose joints its costs of joints come from; 0: they are not fitted


class Replay:
    """Observed runs, ready to be simulated with any constants."""

    def __init__(
        self, observations: Observations, topology: Topology, profiles: Mapping[ModelKey, Profile]
    ) -> None:
        """``profiles`` by ``model:batch``, of the traces that were observed: of every worker's own
        kernels, and of others where it had them."""
        observations.fingerprint.check(topology.fingerprint, "the observations", topology.title)
        for profile in profiles.values():
            observations.fingerprint.check(
                profile.fingerprint, "the observations", f"the profile of {profile.model}"
            )
        self.runs = observations.runs
        self.profiles = profiles
        placers: dict[tuple[str, float], Placer] = {}
        self.plans: list[Plan] = []
        self._tables: dict[
            tuple[ModelKey, ...], KernelTables
        ] = {}  # by workers' models, as last used
        others = tuple(profile for profile in profiles.values() if profile.model.kernels_for)
        for run in self.runs:
            key = run.mix, run.switch_ns
            if key not in placers:
                workers = tuple(profiles[model] for model in run.models)
                problem = Problem(parse_mix(run.mix), topology, workers, others)
                placers[key] = Placer(problem, run.switch_ns)
            self.plans.append(plan_of(run.kind, run.homes, placers[key], run.routes))

    def usable(self) -> list[int]:
        """The runs without switches: see above; and without priorities, which are not modelled."""
        return [
            index
            for index, plan in enumerate(self.plans)
            if not _switches(plan) and not any(lane.priority for lane in plan.lanes)
        ]

    def simulate(self, indices: Sequence[int], calibration: Calibration) -> list[Prediction]:
        for models in {self.plans[i].models for i in indices}:
            tables = self._tables.get(models)
            self._tables[models] = (
                KernelTables([self.profiles[model] for model in models], calibration)
                if tables is None
                else tables.under(calibration)
            )
        # Compiled code holds no GIL, so threads do.
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            plans = [self.plans[index] for index in indices]
            return list(threads.map(lambda plan: _simulate(plan, self._tables[plan.models]), plans))

    def errors(self, indices: Sequence[int], calibration: Calibration) -> Errors:
        return errors([self.runs[i] for i in indices], self.simulate(indices, calibration))


def plan_of(
    kind: str, homes: Sequence[ObservedHome], placer: Placer, routes: Sequence[Groups] = ()
) -> Plan:
    """The plan of an observed run, or for one."""
    problem = placer.problem
    if not homes:
        return unpartitioned(problem.topology, problem.profiles, problem.mix)
    return placer.plan([Home(**asdict(home)) for home in homes], kind, "observed", routes)


def errors(runs: Sequence[ObservedRun], predictions: Sequence[Prediction]) -> Errors:
    if not runs:
        return Errors(0, np.nan, np.nan, np.nan, np.nan)
    stp = np.array(
        [
            [
                np.divide(rates, run.alone_rps).sum()
                for rates in (predicted.rates_rps, run.rates_rps)
            ]
            for run, predicted in zip(runs, predictions, strict=True)
        ]
    )
    pairs = zip(runs, predictions, strict=True)
    power = np.array([predicted.power_w / run.power_w for run, predicted in pairs])
    spread = stp.std(axis=0).min()
    return Errors(
        runs=len(runs),
        rate=float(np.mean(np.concatenate(list(map(_rate_errors, runs, predictions))))),
        power=float(np.abs(power - 1).mean()),
        stp_bias=float((stp[:, 0] / stp[:, 1] - 1).mean()),
        stp_correlation=float(np.corrcoef(stp.T)[0, 1]) if spread > 0 else np.nan,
    )


def fit(
    replay: Replay,
    calibration: Calibration,
    source: str,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """The calibration with its constants fitted to all usable runs, and how good that is."""
    progress = progress or Progress()
    usable = replay.usable()
    mixes = {index: replay.runs[index].mix for index in usable}
    if len(usable) < _FEWEST or len(set(mixes.values())) < 2:
        raise UsageError(
            f"{len(usable)} runs without switches of {len(set(mixes.values()))} mixes are too few "
            f"to fit; measure at least {_FEWEST} runs of 2 mixes"
        )
    search = _Search(replay, calibration)
    seen, held_runs, held_mixes = split(mixes, seed)
    subsets = [usable, seen]
    subsets += [[i for i in usable if mixes[i] != left] for left in dict.fromkeys(mixes.values())]
    fitted = []
    for number, subset in enumerate(subsets):
        if progress.stopped:
            raise StoppedError("stopped before the fit was done")
        fitted.append(search.best(subset))
        progress.part((number + 1) / len(subsets))
    whole, part, *others = fitted
    rest = [index for index in range(len(replay.runs)) if index not in mixes]
    return Fit(
        calibration=replace(whole, source=source),
        fitted=replay.errors(usable, whole),
        seen=replay.errors(seen, part),
        held_runs=replay.errors(held_runs, part),
        held_mixes=replay.errors(held_mixes, part),
        left_out={
            left: replay.errors([i for i in usable if mixes[i] == left], other)
            for left, other in zip(dict.fromkeys(mixes.values()), others, strict=True)
        },
        switching=replay.errors(rest, whole),
    )


def split(mixes: Mapping[int, str], seed: int) -> tuple[list[int], list[int], list[int]]:
    """Runs to fit to, other runs of the same mixes, and all runs of the mixes kept back."""
    random = np.random.default_rng(seed)
    names = list(dict.fromkeys(mixes.values()))
    kept_back = set(random.permutation(names)[: max(1, len(names) // _HELD_OUT)].tolist())
    seen: list[int] = []
    held_runs: list[int] = []
    for name in names:
        if name not in kept_back:
            runs = random.permutation([i for i, mix in mixes.items() if mix == name]).tolist()
            held = len(runs) // _HELD_OUT
            held_runs += runs[:held]
            seen += runs[held:]
    return sorted(seen), sorted(held_runs), [i for i, mix in mixes.items() if mix in kept_back]


class _Search:
    """Pattern search, with every simulation kept by its point and run."""

    def __init__(self, replay: Replay, calibration: Calibration) -> None:
        self._replay = replay
        self._base = replace(
            calibration, costs=replace(calibration.costs, launch_ns=_launch_ns(replay))
        )
        self._rate_errors: dict[tuple[Point, int], Floats] = {}

    def best(self, indices: Sequence[int]) -> Calibration:
        point: Point = (0,) * len(_START.__struct_fields__)
        lowest = self._error(point, indices)
        for step in _STEPS:
            moved = True
            while moved:
                moved = False
                for axis, way in itertools.product(range(len(point)), (step, -step)):
                    while (there := _moved(point, axis, way)) is not None:
                        error = self._error(there, indices)
                        if error >= lowest:
                            break
                        point, lowest, moved = there, error, True
        return self._with_idle_w(self._at(point), indices)

    def _error(self, point: Point, indices: Sequence[int]) -> float:
        missing = [index for index in indices if (point, index) not in self._rate_errors]
        predictions = self._replay.simulate(missing, self._at(point))
        for index, predicted in zip(missing, predictions, strict=True):
            self._rate_errors[point, index] = _rate_errors(self._replay.runs[index], predicted)
        return float(np.mean(np.concatenate([self._rate_errors[point, i] for i in indices])))

    def _at(self, point: Point) -> Calibration:
        values = {
            name: float(f"{getattr(_START, name) * _SPACING**exponent:.3g}")
            for name, exponent in zip(_START.__struct_fields__, point, strict=True)
        }
        values["cohabit"] = min(values["cohabit"], 1.0)
        return replace(self._base, interference=Interference(**values))

    def _with_idle_w(self, calibration: Calibration, indices: Sequence[int]) -> Calibration:
        """``idle_w`` changes no rate, and the power of a run is linear in it: power = a + b·idle_w.

        So the sum of relative errors is lowest where one error is 0. (b is below 0 if more than one
        worker runs on average: each worker's power above idle was measured alone.)
        """

        def power_at(idle_w: float) -> Floats:
            power = replace(calibration.power, idle_w=idle_w)
            predictions = self._replay.simulate(indices, replace(calibration, power=power))
            return np.array([predicted.power_w for predicted in predictions])

        measured = np.array([self._replay.runs[index].power_w for index in indices])
        a = power_at(0.0)
        b = power_at(1.0) - a
        # At most the least power of a request alone: above that the power is not linear.
        most = min(map(_least_w, self._replay.profiles.values()))
        candidates = np.clip((measured - a)[b != 0] / b[b != 0], 0.0, most)
        if len(candidates) == 0:
            return calibration
        wrong = np.abs((a + np.outer(candidates, b)) / measured - 1).mean(axis=1)
        idle_w = round(float(candidates[wrong.argmin()]), 1)
        return replace(calibration, power=replace(calibration.power, idle_w=idle_w))


def _least_w(profile: Profile) -> float:
    """The lowest mean power of a request alone; no bound where energy was not measured."""
    pairs = zip(profile.energy_uj, profile.request_ns, strict=False)
    return min((1e3 * energy / request for energy, request in pairs), default=np.inf)


def _moved(point: Point, axis: int, way: int) -> Point | None:
    """The point ``way`` further along the axis; None if out of reach."""
    there = point[axis] + way
    return (*point[:axis], there, *point[axis + 1 :]) if abs(there) <= _REACH else None


def _launch_ns(replay: Replay) -> int:
    """The time of a request alone besides its kernels: the median over all models."""
    extra = {}
    for run in replay.runs:
        for model, rate in zip(run.models, run.alone_rps, strict=True):
            extra[model] = 1e9 / rate - replay.profiles[model].request_ns[-1]
    return max(0, round(float(np.median(list(extra.values())))))


def _rate_errors(run: ObservedRun, predicted: Prediction) -> Floats:
    relative: Floats = np.array(predicted.rates_rps) / np.array(run.rates_rps) - 1
    return np.abs(relative)


def _simulate(plan: Plan, tables: KernelTables) -> Prediction:
    longest_ns = max(profile.request_ns[-1] for profile in tables.profiles)
    window_ns = max(_REQUESTS * float(longest_ns), _LEAST_NS)
    seen = glimpse(plan, tables, closed_loop(len(plan.workers)), window_ns)
    return Prediction(seen.rates_rps, seen.power_w)


def _switches(plan: Plan) -> int:
    return sum(part.switches for part in plan.main.assignments)

"""A simulated day of a fleet: rates rise and fall, bursts come, GPUs fail, placements follow.

Between placements rates are a fluid: every step of five minutes each GPU has the rates of its
instances, and keeps its bounds if it was placed for as much, or if the coarse simulation says so.
Some GPUs are simulated kernel by kernel, and some windows request by request with the router's own
choice (``routing.py``). Large fleets are cut into cells of their own services and GPUs, as they are
operated, too; so the time grows with the number of cells.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from eclip.errors import StoppedError
from eclip.fleet.place.coarse import Floats
from eclip.fleet.place.filling import Filler
from eclip.fleet.place.moves import LOAD_BYTES_PER_S, START_S
from eclip.fleet.place.placement import choose_gpus
from eclip.fleet.place.problem import Packing, PackingProblem
from eclip.fleet.place.scores import Scorer, rounded_up, simulate_set
from eclip.fleet.place.spec import Fleet, GpuId, gpu_ids
from eclip.fleet.place.windows import window
from eclip.progress import Progress

STEP_S = 300.0
STEPS = 288  # a day
_CELL_SERVICES = 1000
_FALLEN = 1.45  # a service is placed anew when its rate has fallen by this factor
MODELLED = (
    "modelled: rates are a fluid in steps of 5 minutes; the coarse simulation chooses sets; a "
    "GPU keeps its bounds where it was placed for the rates it has, or by the coarse simulation; "
    "sampled GPUs are simulated by kernels at the rates expected of them, sampled windows request "
    "by request with the router's choice; a failed GPU is noticed after 10 s, and its instances "
    "load elsewhere; GPUs without instances are off; networks and hosts cost nothing"
)


class DayOptions(msgspec.Struct, frozen=True, kw_only=True):
    swing: float = 0.5  # rates go from (1 - swing) to (1 + swing) of their mean over the day
    bursts_a_day: float = 0.5  # of a service; each lasts 10 minutes
    burst: float = 1.6  # times the rate
    failures_a_gpu: float = 0.02  # in a day
    every_steps: int = 12  # between placements
    notice_s: float = 10.0
    requests: int = 1_000_000  # in all windows, at least
    sampled_gpus: int = 24  # simulated kernel by kernel, over the day
    seed: int = 0


class DayStep(msgspec.Struct, frozen=True, kw_only=True):
    hour: float
    rate_rps: float
    gpus: int
    kept: float  # the part of the requests that GPUs with their bounds kept get
    power_w: float
    moved: int  # instances
    failed: int  # GPUs


class Day(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    steps: tuple[DayStep, ...]
    kept: float
    gpus_mean: float
    gpus_most: int
    moved: int
    failed: int
    energy_kwh: float
    requests: int  # sampled one by one
    within: float  # the part of them that was answered within its bound
    sampled_gpus: int  # simulated kernel by kernel
    sampled_kept: int
    cpu_s: float
    modelled: str = MODELLED


def simulate_day(
    fleet: Fleet,
    scorer: Scorer,
    options: DayOptions | None = None,
    *,
    static: bool = False,
    progress: Progress | None = None,
) -> Day:
    """A day with placements that follow the rates, or with one for the highest rates of the day.
    One that is stopped raises: a part of a day says nothing of it."""
    options, progress = options or DayOptions(), progress or Progress()
    begun = time.process_time()
    cells = list(cells_of(fleet))
    label = "static" if static else "following"
    runs = []
    for number, cell in enumerate(cells):
        progress.phase(f"{label}, cell {number + 1} of {len(cells)}")
        runs.append(_Cell(cell, scorer, options, number, len(cells), static).run(progress))
        if progress.stopped:
            raise StoppedError("stopped before the day was over")
    return _joined(label, runs, time.process_time() - begun)


def cells_of(fleet: Fleet) -> Iterator[Fleet]:
    """Cells of at most a thousand services, with machines dealt out in turn."""
    count = min(-(-len(fleet.services) // _CELL_SERVICES), max(1, len(fleet.gpus) // 2))
    for cell in range(count):
        yield msgspec.structs.replace(
            fleet, services=fleet.services[cell::count], gpus=fleet.gpus[cell::count]
        )


@dataclass
class _Totals:
    requests: int = 0
    within: int = 0
    sampled: int = 0
    kept: int = 0


class _Cell:
    def __init__(
        self,
        fleet: Fleet,
        scorer: Scorer,
        options: DayOptions,
        number: int,
        cells: int,
        static: bool,
    ) -> None:
        self.options = options
        self.static = static
        self.cells = cells
        self.random = np.random.default_rng([options.seed, number])
        self.factors, self.expected = day_of_rates(len(fleet.services), options, self.random)
        self.fleet = fleet
        self.scorer = scorer
        self.base = np.array([service.rate_rps for service in fleet.services])
        self.totals = _Totals()

    def run(self, progress: Progress) -> tuple[list[DayStep], _Totals]:
        options = self.options
        free = {
            kind: sum(gpu.kind == kind for gpu in gpu_ids(self.fleet)) for kind in self.fleet.kinds
        }
        planned = self.expected.max(axis=0)
        problem = self._problem(planned)
        filler = Filler(problem, free, [options.seed, 1])
        packing = filler.open_bins(problem.cut(problem.instances()))
        choose_gpus(packing.bins, problem)
        steps = []
        windows = STEPS // options.every_steps
        for step in range(STEPS):
            if progress.stopped:
                break
            moved = 0
            if step % options.every_steps == 0:
                if not self.static:
                    ahead = self.expected[step : step + options.every_steps + 1].max(axis=0)
                    # What falls a little keeps its place: moving costs more than it gives.
                    drifted = (ahead > planned) | (ahead < planned / _FALLEN)
                    planned = np.where(drifted, ahead, planned)
                    before = _homes(packing)
                    problem = self._problem(planned)
                    filler = Filler(problem, filler.free, [options.seed, 2 + step])
                    packing = follow(filler, packing)
                    choose_gpus(packing.bins, problem)
                    moved += len(_homes(packing) - before)
                self._sample(problem, packing, options.requests / windows / self.cells)
            rates = self.base * self.factors[step]
            failed = int(self.random.poisson(options.failures_a_gpu / STEPS * len(packing.bins)))
            failed = min(failed, len(packing.bins))
            lost_rps = 0.0
            for _ in range(failed):
                lost_s, replaced = self._fail(filler, packing)
                moved += replaced
                lost_rps += lost_s / STEP_S
            kept = self._kept_rps(problem, packing, rates, planned) - lost_rps
            steps.append(
                DayStep(
                    hour=step * STEP_S / 3600,
                    rate_rps=float(rates.sum()),
                    gpus=len(packing.bins),
                    kept=max(kept, 0.0) / float(rates.sum()),
                    power_w=self._power_w(problem, packing, rates),
                    moved=moved,
                    failed=failed,
                )
            )
            progress.part((step + 1) / STEPS)
        return steps, self.totals

    def _problem(self, planned: Floats) -> PackingProblem:
        services = tuple(
            msgspec.structs.replace(service, rate_rps=float(base * factor))
            for service, base, factor in zip(self.fleet.services, self.base, planned, strict=True)
        )
        fleet = msgspec.structs.replace(self.fleet, services=services)
        return PackingProblem(fleet, self.scorer, "fewest", parts=1, estimated=True)

    def _fail(self, filler: Filler, packing: Packing) -> tuple[float, int]:
        """A GPU goes: requests lost until its instances stand elsewhere, and how many move."""
        gone = packing.bins.pop(int(self.random.integers(len(packing.bins))))
        problem = filler.problem
        items = filler.offer(list(gone.held.items()), packing.bins)
        more = filler.open_bins(items)
        packing.bins += more.bins
        packing.left = more.left
        choose_gpus(packing.bins, problem)
        lost = 0.0
        for service, parts in gone.held.items():
            profile = self.scorer.kinds[gone.kind].profiles[problem.fleet.services[service].model]
            weights = profile.footprint.weights_bytes if profile.footprint else 0
            away_s = self.options.notice_s
            if parts == problem.parts[service]:  # no other GPU serves it meanwhile
                away_s += START_S + weights / LOAD_BYTES_PER_S
            lost += self.base[service] * parts / problem.parts[service] * away_s
        return lost, len(gone.held)

    def _kept_rps(
        self, problem: PackingProblem, packing: Packing, rates: Floats, planned: Floats
    ) -> float:
        """Requests/s of GPUs that keep their bounds."""
        kept = 0.0
        over = rates > self.base * planned * (1 + self.fleet.reserve)
        for one in packing.bins:
            now = sum(
                rates[service] * parts / problem.parts[service]
                for service, parts in one.held.items()
            )
            if any(over[service] for service in one.held):
                members = tuple(
                    sorted(
                        msgspec.structs.replace(
                            problem.member(service, parts),
                            rate_rps=rounded_up(
                                float(rates[service] * parts / problem.parts[service])
                            ),
                        )
                        for service, parts in one.held.items()
                    )
                )
                if self.scorer.estimate(one.kind, members) > 1:
                    continue
            kept += float(now)
        return kept

    def _power_w(self, problem: PackingProblem, packing: Packing, rates: Floats) -> float:
        watts = 0.0
        for one in packing.bins:
            watts += self.scorer.kinds[one.kind].calibration.power.idle_w
            for service, parts in one.held.items():
                model = problem.fleet.services[service].model
                rate = float(rates[service]) * parts / problem.parts[service]
                watts += rate * self.scorer.joules(one.kind, model)
        return watts

    def _sample(self, problem: PackingProblem, packing: Packing, requests: float) -> None:
        """A GPU kernel by kernel, and a window request by request."""
        totals, random = self.totals, self.random
        gpus = self.options.sampled_gpus * self.options.every_steps / STEPS / self.cells
        if random.random() < gpus % 1 + (gpus >= 1):
            one = packing.bins[int(random.integers(len(packing.bins)))]
            policy = problem.scorer.policy_of(one.kind, problem.members(one.held))
            kind, members = problem.scorer.kinds[one.kind], problem.offered(one.held)
            totals.sampled += 1
            totals.kept += simulate_set(kind, members, policy, problem.scorer.most_kernels).kept
        offered, within = window(problem, packing, requests, random)
        totals.requests += offered
        totals.within += within


def follow(filler: Filler, packing: Packing) -> Packing:
    """The packing for the problem's rates: overfull bins give instances away, and GPUs that are no
    longer needed are freed."""
    packing = packing.copy()
    packing.left = _missing(filler.problem, packing)
    for one in packing.bins:
        filler.give_away(one, packing.left)
    packing.bins = [one for one in packing.bins if one.held or filler.close(one)]
    items = filler.offer(filler.problem.cut(packing.left), packing.bins)
    more = filler.open_bins(items)
    packing = Packing(packing.bins + more.bins, more.left)
    return filler.shrink(packing)


def _missing(problem: PackingProblem, packing: Packing) -> dict[int, int]:
    """Make every bin hold parts as the problem counts them now; returns what then stands
    nowhere."""
    left = problem.instances()
    for one in packing.bins:
        for service in list(one.held):
            wanted = problem.parts[service] // problem.least[service]
            held = min(wanted, left.get(service, 0))
            if held:
                one.held[service] = held
                left[service] -= held
            else:
                del one.held[service]
    return {service: parts for service, parts in left.items() if parts}


def _homes(packing: Packing) -> set[tuple[GpuId | None, int]]:
    return {(one.gpu, service) for one in packing.bins for service in one.held}


def day_of_rates(
    services: int, options: DayOptions, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Factors of every service's rate, step by step: as they come, and as expected (no bursts)."""
    hours = np.arange(STEPS)[:, None] * STEP_S / 3600
    peak = 14 + random.choice([-6.0, 0.0, 0.0, 0.0, 5.0], services) + random.normal(0, 1, services)
    expected = 1 + options.swing * np.cos(2 * np.pi * (hours - peak[None, :]) / 24)
    factors = expected * random.normal(1.0, 0.02, expected.shape).clip(0.9, 1.1)
    for service in np.flatnonzero(random.random(services) < options.bursts_a_day):
        begin = int(random.integers(STEPS - 2))
        factors[begin : begin + 2, service] *= options.burst
    return factors, expected


def _joined(label: str, runs: Sequence[tuple[list[DayStep], _Totals]], cpu_s: float) -> Day:
    columns = list(zip(*(steps for steps, _ in runs), strict=False))
    steps = tuple(
        DayStep(
            hour=parts[0].hour,
            rate_rps=float(sum(part.rate_rps for part in parts)),
            gpus=sum(part.gpus for part in parts),
            kept=float(
                sum(part.kept * part.rate_rps for part in parts)
                / sum(part.rate_rps for part in parts)
            ),
            power_w=float(sum(part.power_w for part in parts)),
            moved=sum(part.moved for part in parts),
            failed=sum(part.failed for part in parts),
        )
        for parts in columns
    )
    totals = [totals for _, totals in runs]
    requests = sum(one.requests for one in totals)
    rate = sum(step.rate_rps for step in steps)
    return Day(
        label=label,
        steps=steps,
        kept=sum(step.kept * step.rate_rps for step in steps) / rate,
        gpus_mean=float(np.mean([step.gpus for step in steps])),
        gpus_most=max(step.gpus for step in steps),
        moved=sum(step.moved for step in steps),
        failed=sum(step.failed for step in steps),
        energy_kwh=sum(step.power_w for step in steps) * STEP_S / 3.6e6,
        requests=requests,
        within=float(sum(one.within for one in totals) / max(requests, 1)),
        sampled_gpus=sum(one.sampled for one in totals),
        sampled_kept=sum(one.kept for one in totals),
        cpu_s=cpu_s,
    )

"""One pair: the service alone, the background alone, and both together in several ways.

Every way has a session of its own (entrants.py). All are open at once and measured in turns with
the same arrivals.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from lab.support import bounded, sharing
from lab.support.contenders import AGAIN, BOUNDED, CLAIMED, OURS_APART, Scene
from lab.support.cores import busy_cores
from lab.support.effort import CAPACITY_S, Task, background_window
from lab.support.entrants import Entrant, Opening
from lab.support.pairs import PAIRS
from lab.support.results_of_services import array_name
from lab.support.workshop import Bench, KeptStand

from eclip.core.device import Window
from eclip.core.load import Load, closed_loop, load_of_mix
from eclip.core.measures import busy_share
from eclip.core.mix import Mix, parse_mix
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.core.shapes import shape_of
from eclip.errors import UsageError
from eclip.planner.case import Case
from eclip.rig.rounds import rotation

BOUND = 10.0  # times a request alone: wide, where nothing depends on slack
REFERENCES = ("yield d2", "yield d1", "streams")
ALONE_APART = ("time-sliced", "MPS 100", *OURS_APART)  # also measure their services alone


def mix_of_pair(models: Sequence[ModelKey], profiles: Sequence[Profile], floor: float) -> Mix:
    services = [
        f"{model}@1rps/{(index + 1) * BOUND * profile.request_ns[-1] / 1e6:.6f}ms"
        for index, (model, profile) in enumerate(zip(models[:-1], profiles[:-1], strict=True))
    ]
    return parse_mix(",".join([*services, f"{models[-1]}@background/floor={floor:g}"]))


def at_rates(mix: Mix, rates: Sequence[float]) -> Mix:
    workers = [
        msgspec.structs.replace(worker, rate_rps=rate)
        for worker, rate in zip(mix.workers, rates, strict=False)
    ]
    return msgspec.structs.replace(mix, workers=(*workers, mix.workers[-1]))


def run_task(bench: Bench, task: Task) -> None:
    """Measure the pair; every result is kept as soon as its load is done."""
    begin = time.monotonic()
    models = PAIRS[task.pair].models
    with contextlib.ExitStack() as stack:
        profiles = tuple(bench.profile(model, index) for index, model in enumerate(models))
        mix = mix_of_pair([one.model for one in profiles], profiles, task.floor)
        case = Case(mix, bench.shelf.topology, bench.shelf.calibration, profiles)
        stand = KeptStand(case, bench.device, bench.made)
        scene = Scene(mix, bench.shelf.topology, profiles, bench.grain_ns)
        opening = Opening(bench, task, scene, stand, stack)
        entrants = opening.all()
        bench.say(f"{task.name}: {len(entrants)} open after {time.monotonic() - begin:.1f} s")
        if not entrants:
            return
        stack.enter_context(busy_cores(task.busy_cores))
        reference = reference_of(entrants)
        capacity = [_capacity(reference, index, profiles) for index in range(len(models) - 1)]
        known: dict[tuple[Any, ...], float] = {}  # background alone, by loop
        for load in task.loads:
            rates = [load * rps / len(capacity) for rps in capacity]
            now = [one for one in entrants if one.name in task.ways_at(load) or one is reference]
            measured = Measured(bench, task, load, now, scene, capacity, known)
            with contextlib.ExitStack() as of_load:
                measured.begin(at_rates(mix, rates))
                if task.bounded_at(load):
                    p99_alone_ms = measured.p99_alone_ms
                    opened = opening.bounded(load, measured.mix, p99_alone_ms, of_load)
                    measured.entrants += opened
                measured.run()
                measured.keep()
            bench.say(f"{task.name} at {load:g} done")


def reference_of(entrants: Sequence[Entrant]) -> Entrant:
    """Whose session services are measured alone in: one with joints, if there is one."""
    for name in REFERENCES:
        for one in entrants:
            if one.name == name:
                return one
    return entrants[0]


def _capacity(reference: Entrant, worker: int, profiles: Sequence[Profile]) -> float:
    """Requests per second of a service back to back, all others present but idle."""
    request_s = profiles[worker].request_ns[-1] / 1e9
    window = Window(max(CAPACITY_S, 30 * request_s), max(0.1, 3 * request_s), trace_ms=0.0)
    log = reference.session.run(closed_loop(len(profiles), only=worker), window)
    return sharing.rate_of([log], worker)


@dataclass(frozen=True)
class Job:
    """A run of every round, or of the first ones."""

    kind: str  # shared, alone, again, background
    entrant: Entrant
    worker: int  # who is alone
    rounds: int
    brief: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return f"{self.kind} {self.worker}", self.entrant.name


@dataclass
class Measured:
    """One pair at one load: runs in turns, then a line for every way."""

    bench: Bench
    task: Task
    load: float
    entrants: list[Entrant]
    scene: Scene
    capacity: Sequence[float]
    known: dict[tuple[Any, ...], float]  # background alone at loads before this, by loop
    loads: list[Load] = field(default_factory=list)  # of every round
    logs: dict[tuple[str, str], list[RunLog]] = field(default_factory=dict)
    mix: Mix = field(init=False)
    window: Window = field(init=False)
    brief: Window = field(init=False)

    @property
    def services(self) -> range:
        return range(len(self.capacity))

    @functools.cached_property
    def reference(self) -> Entrant:
        return reference_of(self.entrants)

    def begin(self, mix: Mix) -> None:
        """Draw the arrivals, and run services alone once: bounds are of their p99 there."""
        self.mix = mix
        effort = self.task.effort
        slowest = min(mix.workers[service].rate_rps or 1.0 for service in self.services)
        self.window = effort.window(slowest)
        brief = effort.brief_window(slowest)
        self.brief = min(self.window, brief, key=lambda window: window.seconds)
        self.loads = [
            load_of_mix(
                mix,
                self.window.seconds,
                self.window.warmup_seconds,
                number,
                shape_of(self.task.shape),
            )
            for number in range(effort.rounds)
        ]
        for service in self.services:
            self._run(Job("alone", self.reference, service, effort.rounds), 0)

    @property
    def p99_alone_ms(self) -> list[float]:
        """Of every worker by what has run; background has none."""
        tails = [
            float(np.percentile(self._latencies(f"alone {service}", service).ns, 99)) / 1e6
            for service in self.services
        ]
        return [*tails, 0.0]

    def _latencies(self, key: str, service: int, session: str = "") -> sharing.Latencies:
        logs = self.logs[key, session or self.reference.name]
        return sharing.Latencies.of(logs, self.loads, service)

    def run(self) -> None:
        jobs = self._jobs()
        for number in range(self.task.effort.rounds):
            mine = [job for job in jobs if number < job.rounds]
            for round_of, index in rotation(len(mine), number + 1):
                job = mine[index]
                if round_of == number and len(self.logs.get(job.key, [])) <= number:
                    self._run(job, number)

    def _run(self, job: Job, number: int) -> None:
        if job.kind == "background":
            load = closed_loop(len(self.mix.workers), only=job.worker)
            window = background_window(self.scene.profiles[-1].request_ns[-1] / 1e9)
        else:
            whole = self.loads[number]
            load = whole if job.kind == "shared" else whole.only(job.worker)
            window = self.brief if job.brief else self.window
        self.logs.setdefault(job.key, []).append(job.entrant.session.run(load, window))

    def _jobs(self) -> list[Job]:
        """What is claimed runs in every round; what is only told from it, briefly in the first."""
        last, rounds = self.scene.background, self.task.effort.rounds
        jobs = [Job("alone", self.reference, service, rounds) for service in self.services]
        if self.task.again:  # how much two runs alone differ
            jobs += [Job("again", self.entrants[0], one, rounds) for one in self.services]
        for one in self.entrants:
            claimed = one.name in CLAIMED
            jobs.append(Job("shared", one, last, rounds if claimed else 1, not claimed))
            if one.name in ALONE_APART and one is not self.reference:
                jobs += [
                    Job("alone", one, service, rounds if claimed else 1, not claimed)
                    for service in self.services
                ]
        return [*jobs, *self._background_jobs()]

    def _background_jobs(self) -> Iterator[Job]:
        """Alone in every loop; in those of baselines once, for all loads."""
        last, rounds = self.scene.background, self.task.effort.rounds
        loops: dict[tuple[Any, ...], list[Entrant]] = {}
        for one in self.entrants:
            if not one.apart or one.name in OURS_APART:
                loops.setdefault(one.loop, []).append(one)
        for loop, entrants in loops.items():
            entrants.sort(key=lambda one: one.name.startswith("masks"))  # not on a part, if it can
            claimed = loop == () or any(one.name in CLAIMED for one in entrants)
            if claimed or loop not in self.known:
                yield Job("background", entrants[0], last, rounds if claimed else 1)

    def keep(self) -> None:
        alone = {service: self._latencies(f"alone {service}", service) for service in self.services}
        busy = [
            busy_share(self.logs[f"alone {service}", self.reference.name], service)
            for service in self.services
        ]
        arrays: dict[str, Any] = {}
        for service, base in alone.items():
            arrays |= {f"alone {service}": base.ns, f"ended {service}": base.ended}
        self._keep_alone(arrays)
        if self.task.again:
            self._keep_way(AGAIN, "again", self.entrants[0], alone, busy, arrays)
        for one in self.entrants:
            try:
                self._keep_way(one.name, "shared", one, alone, busy, arrays)
            except UsageError as error:
                self.bench.keep(self._row(one.name) | {"error": str(error)})
        self._save(arrays)

    def _row(self, way: str) -> dict[str, Any]:
        task = self.task
        return {
            "stage": task.stage,
            "pair": task.pair,
            "models": [str(one.model) for one in self.scene.profiles],
            "device": self.bench.device.title,
            "load": self.load,
            "rates": [self.mix.workers[service].rate_rps for service in self.services],
            "way": way,
            "rounds": len(self.loads),
            "seconds": self.window.seconds,
            "warmup": self.window.warmup_seconds,
            "shape": task.shape,
            "floor": task.floor,
            "grain_us": self.bench.grain_ns / 1e3,
            "busy_cores": task.busy_cores,
            "latencies": self.file.name,
        }

    def _keep_alone(self, arrays: dict[str, Any]) -> None:
        """Services alone, in the reference and in processes: where their time goes."""
        for one in self.entrants:
            if one is not self.reference and one.name not in ALONE_APART:
                continue
            row = self._row(f"alone in {one.name}") | {"alone": []}
            for service in self.services:
                logs = self.logs[f"alone {service}", one.name]
                found = self._latencies(f"alone {service}", service, one.name)
                arrays[f"alone in {one.name} {service}"] = found.ns
                row["alone"].append(
                    {
                        "requests": len(found.ns),
                        "latency": sharing.percentiles_ms(found.ns),
                        "busy_share": busy_share(logs, service),
                        **sharing.where_time_went(logs, service),
                    }
                )
            self.bench.keep(row)

    def _keep_way(
        self,
        way: str,
        kind: str,
        entrant: Entrant,
        alone: dict[int, sharing.Latencies],
        busy: Sequence[float],
        arrays: dict[str, Any],
    ) -> None:
        row = self._row(way) | {"busy_share": sum(busy), "services": []}
        asked = BOUNDED.get(way)
        limits = bounded.factors(asked[0], len(self.services)) if asked else ()
        for service in self.services:
            worker = self.scene.background if kind == "shared" else service
            ours = self._latencies(f"{kind} {worker}", service, entrant.name)
            if not len(ours.ns):
                raise UsageError(f"{way}: no request arrived in its run; run longer")
            arrays[f"{way} {service}"] = ours.ns
            found = sharing.service_figures(ours, alone[service])
            found |= {"capacity_rps": self.capacity[service], "busy_share": busy[service]}
            if limits:
                found["bound"] = limits[service]
            if entrant.name in OURS_APART:
                base = self._latencies(f"alone {service}", service, entrant.name)
                found["against_alone_apart"] = sharing.service_figures(ours, base)
            if len(self.services) == 1 and _only_yields(entrant.plan) and not entrant.apart:
                found["waits_us"] = _waits_ns(entrant.plan) / 1e3
                found["checks"] = sharing.checks(
                    found, _waits_ns(entrant.plan), 1e9 / self.capacity[service]
                )
            row["services"].append(found)
        if kind == "shared":
            row |= self._background(entrant, sum(busy)) | {"opened_s": entrant.opened_s}
        self.bench.keep(row)

    def _background_rps(self, loop: tuple[Any, ...]) -> float | None:
        """Background alone in a loop like this."""
        last = self.scene.background
        for one in self.entrants:
            if one.loop == loop and (logs := self.logs.get((f"background {last}", one.name))):
                self.known[loop] = sharing.rate_of(logs, last)
        return self.known.get(loop)

    def _background(self, entrant: Entrant, busy: float) -> dict[str, Any]:
        last = self.scene.background
        logs = self.logs[f"shared {last}", entrant.name]
        rate, whole = sharing.rate_of(logs, last), self._background_rps(())
        alone = self._background_rps(entrant.loop) or whole
        assert alone is not None
        counters = [log.counters[last] for log in logs]
        joints = entrant.plan.workers[last].joints
        share = rate / alone
        return {
            "background_rps": rate,
            "background_alone_rps": alone,
            "background": share,
            "background_over_rest": share / max(1 - busy, 1e-9),
            "background_gain_u": (share - (1 - busy)) / max(busy, 1e-9),
            # What joints cost while no service is busy: against the whole graph.
            "idle_cost": 1 - alone / whole if whole and joints and not entrant.apart else None,
            "stretches": len(joints.stretch_ns) if joints else 1,
            "depth": joints.depth if joints else None,
            "longest_stretch_us": joints.longest_ns / 1e3 if joints else None,
            "why": entrant.plan.why,
            "runs": len(logs),
            "run_seconds": logs[0].duration_ns / 1e9,
            "bounds_ns": [
                one.promise.bound_ns for one in entrant.plan.workers if one.promise is not None
            ],
            "yields": sum(one.yields for one in counters),
            "moves": sum(one.moves for one in counters),
            "longest_pause_ms": max(one.longest_pause_ns for one in counters) / 1e6,
            "prepared": msgspec.to_builtins(logs[0].prepared),
            "lagged": any(log.lagged for log in logs),
            "warnings": sorted({text for log in logs for text in log.warnings}),
        }

    def _save(self, arrays: dict[str, Any]) -> None:
        """Latencies in ns by arrival, so that other questions need no other run."""
        for service in self.services:
            every = [load.arrivals[service] for load in self.loads]
            due = [one[one >= 0] for one in every if one is not None]
            arrays[f"arrivals {service}"] = np.concatenate(due)
        np.savez_compressed(self.file, **{array_name(key): one for key, one in arrays.items()})

    @functools.cached_property
    def file(self) -> Path:
        """Of latencies; its own, whatever was measured into this folder before."""
        folder = self.bench.folder / "latencies"
        folder.mkdir(exist_ok=True)
        shape = self.task.shape.partition(":")[0]
        stem = f"{self.task.pair}-{self.load:g}-{shape}".replace("+", "-")
        names = (f"{stem}-{number}.npz" for number in itertools.count(1))
        return next(folder / name for name in names if not (folder / name).exists())


def _only_yields(plan: Plan) -> bool:
    """Where background moves or goes on, a service waits for more than what was in flight."""
    joints = plan.workers[-1].joints
    rules = joints.rules if joints else ()
    return bool(rules) and all(rule.lane is None and rule.slack.name == "PLENTY" for rule in rules)


def _waits_ns(plan: Plan) -> float:
    """What all workers that give way may have in flight when a request arrives."""
    joints = [worker.joints for worker in plan.workers if worker.joints is not None]
    return max(one.depth * one.longest_ns for one in joints)

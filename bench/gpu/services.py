"""Claims of docs/results.md: services beside background work that gives way at joints.

    PYTHONPATH=.:src:.gpu-deps python3 bench/gpu/services.py FOLDER [--quick] [--minutes 9]

For every pair and load: the service alone, the background alone, and both together in several ways
(bench/support/contenders.py), each in a session of its own, all open at once and measured in turns
with the same arrivals. Loads are parts of what the service can serve alone. Every result is a line
of FOLDER/services.jsonl as soon as it is known, and its latencies are in FOLDER/latencies; a table
comes last. Models without a profile are profiled first, into FOLDER/profiles.

``--device sim`` is a rehearsal: zoo models stand for the workloads that only a GPU has.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of what is experimental
sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import numpy as np
from bench.support import sharing
from bench.support.contenders import CORE, WAYS, Scene
from bench.support.results_of_services import array_name, finish, show, summarise

from eclip.artefacts import store
from eclip.artefacts.calibration import Calibration
from eclip.artefacts.measures import busy_share
from eclip.artefacts.mix import Mix, parse_mix
from eclip.artefacts.model_key import ModelKey, parse_model
from eclip.artefacts.plan import Lanes, Plan
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import RunLog
from eclip.artefacts.topology import Topology
from eclip.devices import open_device
from eclip.devices.base import Device, Session, SourceKind, Window
from eclip.devices.load import Load, closed_loop, load_of_mix
from eclip.devices.shapes import shape_of
from eclip.errors import EclipError, MismatchError, UsageError
from eclip.frontends.library import file_of, find_profile
from eclip.frontends.sources import make_source
from eclip.lab.case import Case, find_calibration, find_topology
from eclip.lab.rounds import rotation
from eclip.lab.stand import Stand

OWN = "bench.gpu.workloads"
BOUND = 10.0  # times a request alone: wide, since nothing here depends on slack
CAPACITY_SECONDS = 0.3
ALONE_REQUESTS = 12  # of background, at least
REFERENCES = ("yield d2", "yield d1", "streams")
# On the simulator, what is nearest in the zoo.
STAND_INS = {
    f"{OWN}:train_resnet50:32": "resnet152:32",
    f"{OWN}:train_bert:8": "bert:32",
    f"{OWN}:train_gpt:4": "gpt2:32",
    f"{OWN}:products:12": "vgg19:32",
    f"{OWN}:products:8": "vgg19:32",
    f"{OWN}:copies:64": "alexnet:32",
    f"{OWN}:llama_decode:8": "densenet201:8",
    f"{OWN}:llama_prefill:1": "vit_b_16:32",
}


@dataclass(frozen=True)
class Pair:
    services: tuple[str, ...]
    background: str
    loads: tuple[float, ...] | None = None  # None: those asked for

    @property
    def models(self) -> tuple[str, ...]:
        return (*self.services, self.background)


# The most telling first: time may end before the list does.
PAIRS: dict[str, Pair] = {
    "bert+vgg": Pair(("bert:1",), "vgg19:32"),
    "resnet+train-gpt": Pair(("resnet50:1",), f"{OWN}:train_gpt:4"),
    "bert+train-resnet": Pair(("bert:1",), f"{OWN}:train_resnet50:32"),
    "mobilenet+train-bert": Pair(("mobilenet_v3:1",), f"{OWN}:train_bert:8"),
    "decode+prefill": Pair((f"{OWN}:llama_decode:8",), f"{OWN}:llama_prefill:1", loads=(0.6, 0.9)),
    "vit+products12": Pair(("vit_b_16:1",), f"{OWN}:products:12"),
    "resnet+copies": Pair(("resnet50:1",), f"{OWN}:copies:64"),
    "resnet+bert": Pair(("resnet50:1",), "bert:32"),
    "alexnet+resnet152": Pair(("alexnet:1",), "resnet152:32"),
    "bert8+densenet": Pair(("bert:8",), "densenet201:32"),
    "albert8+resnext": Pair(("albert:8",), "resnext101:32"),
    "densenet+bert": Pair(("densenet201:1",), "bert:32"),
    "densenet8+products8": Pair(("densenet201:8",), f"{OWN}:products:8"),
    "shufflenet+vit": Pair(("shufflenet:1",), "vit_b_16:32"),
    "squeezenet+convnext": Pair(("squeezenet:1",), "convnext:32"),
    "three+vgg": Pair(("alexnet:1", "bert:1", "densenet201:1"), "vgg19:32"),
}


@dataclass(frozen=True)
class Entrant:
    """A way of sharing with its session open."""

    name: str
    plan: Plan
    session: Session
    opened_s: float


class KeptStand(Stand):
    """Shares its captures with the stands of other pairs, and leaves the device open."""

    def __init__(self, case: Case, device: Device, made: dict[Any, Any]) -> None:
        super().__init__(case, device)
        self._made = made


@dataclass
class Bench:
    """Device, folder and options; profiles and captures, made once for all pairs."""

    options: argparse.Namespace
    device: Device
    topology: Topology
    calibration: Calibration
    made: dict[Any, Any] = field(default_factory=dict)
    profiles: dict[ModelKey, Profile] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        folder: Path = self.options.folder
        return folder

    @property
    def time_is_up(self) -> bool:
        minutes: float = self.options.minutes
        return time.monotonic() - self.began > 60 * minutes

    def model(self, name: str) -> ModelKey:
        return parse_model(STAND_INS.get(name, name) if self.device.modelled else name)

    def profile(self, name: str, worker: int) -> Profile:
        model = self.model(name)
        if model not in self.profiles:
            found = self._find(model)
            if found is None or not self._captured(found, worker):
                found = self._measure(model, worker)
            self.profiles[model] = found
        return self.profiles[model]

    def _captured(self, profile: Profile, worker: int) -> bool:
        """Whether the model launches here what its profile says; if so, its source is kept."""
        kind = self.device.source_kind(Lanes())
        try:
            source = make_source(kind, profile, self.device)
        except MismatchError as error:
            self.say(str(error))
            return False
        self.made[kind, worker, profile.model] = source
        return True

    def _find(self, model: ModelKey) -> Profile | None:
        folders = [self.folder / "profiles", *self.options.profiles]
        try:
            found = find_profile(model, self.topology, self.calibration, folders)
        except UsageError:  # nobody has measured it
            return None
        return found if self.device.modelled or not found.modelled else None

    def _measure(self, model: ModelKey, worker: int) -> Profile:
        """At half of the device and all of it; the capture is the worker's source, too."""
        import torch

        from eclip.devices.cuda.device import CudaDevice
        from eclip.frontends.models import build
        from eclip.frontends.profiler import measure_profile
        from eclip.frontends.torch import capture

        assert isinstance(self.device, CudaDevice)
        torch.cuda.set_device(self.device.index)
        begin = time.monotonic()
        captured = capture(*build(model), model)
        sizes = self.device.topology.lane_sizes
        half = min(sizes, key=lambda units: abs(2 * units - sizes[-1]))
        profile = measure_profile(
            self.device, captured, sizes=(half, sizes[-1]), energy_seconds=0.0, stress=False
        )
        self.made[SourceKind.CAPTURE, worker, model] = captured.capture
        store.save(profile, file_of(self.folder / "profiles", model))
        with tarfile.open(self.folder / "profiles.tar", "w") as packed:
            packed.add(self.folder / "profiles", "profiles")  # under a name without colons
        what = f"{profile.request_ns[-1] / 1e6:.3f} ms, {len(profile.trace.kernels)} kernels"
        self.say(f"profiled {model}: {what}, {time.monotonic() - begin:.1f} s")
        return profile

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with (self.folder / "services.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


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


def run_pair(bench: Bench, name: str) -> None:
    pair = PAIRS[name]
    begin = time.monotonic()
    profiles = tuple(bench.profile(model, index) for index, model in enumerate(pair.models))
    mix = mix_of_pair([one.model for one in profiles], profiles, bench.options.floor)
    case = Case(mix, bench.topology, bench.calibration, profiles)
    stand = KeptStand(case, bench.device, bench.made)
    scene = Scene(mix, bench.topology, profiles, round(1e3 * bench.options.grain_us))
    with contextlib.ExitStack() as stack:
        entrants = list(_opened(bench, name, scene, stand, stack))
        bench.say(f"{name}: {len(entrants)} sessions open after {time.monotonic() - begin:.1f} s")
        if not entrants:
            return
        reference = reference_of(entrants)
        capacity = [_capacity(reference, worker, profiles) for worker in range(len(pair.services))]
        for load in pair.loads or bench.options.loads:
            if bench.time_is_up:
                return
            rates = [load * rps / len(capacity) for rps in capacity]
            measured = Measured(bench, name, load, entrants, scene, capacity)
            measured.run(at_rates(mix, rates))
            measured.keep()
            bench.say(f"{name} at {load:g} done")


def _opened(
    bench: Bench, name: str, scene: Scene, stand: Stand, stack: contextlib.ExitStack
) -> Iterator[Entrant]:
    for way in bench.options.ways:
        begin = time.monotonic()
        try:
            plan = WAYS[way](scene)
            session = stack.enter_context(stand.open(plan))
        except EclipError as error:  # a kernel that fits no half, for example
            bench.keep({"pair": name, "way": way, "error": str(error)})
            bench.say(f"{name}, {way}: {error}")
            continue
        yield Entrant(way, plan, session, time.monotonic() - begin)


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
    window = Window(max(CAPACITY_SECONDS, 30 * request_s), max(0.1, 3 * request_s), trace_ms=0.0)
    log = reference.session.run(closed_loop(len(profiles), only=worker), window)
    return sharing.rate_of([log], worker)


@dataclass
class Measured:
    """One pair at one load: runs in turns, then a line for every way."""

    bench: Bench
    pair: str
    load: float
    entrants: Sequence[Entrant]
    scene: Scene
    capacity: Sequence[float]
    loads: list[Load] = field(default_factory=list)  # of every round
    logs: dict[tuple[str, str], list[RunLog]] = field(default_factory=dict)

    @property
    def services(self) -> range:
        return range(len(self.capacity))

    @property
    def reference(self) -> Entrant:
        return reference_of(self.entrants)

    def run(self, mix: Mix) -> None:
        options = self.bench.options
        window = Window(options.seconds, options.warmup, trace_ms=0.0)
        jobs = self._jobs()
        self.loads = [
            load_of_mix(mix, window.seconds, window.warmup_seconds, number, options.shape)
            for number in range(options.rounds)
        ]
        for number, index in rotation(len(jobs), options.rounds):
            kind, entrant, worker = jobs[index]
            if kind == "background":
                load, taken = closed_loop(len(mix.workers), only=worker), self._short()
            else:
                whole = self.loads[number]
                load, taken = (whole if kind == "shared" else whole.only(worker)), window
            key = (f"{kind} {worker}", entrant.name)
            self.logs.setdefault(key, []).append(entrant.session.run(load, taken))

    def _jobs(self) -> list[tuple[str, Entrant, int]]:
        """What is run in every round: kind, session, and who is alone."""
        last = self.scene.background
        jobs = [("alone", self.reference, service) for service in self.services]
        if self.bench.options.again:  # how much two runs alone differ
            jobs += [("again", self.entrants[0], service) for service in self.services]
        jobs += [("shared", one, last) for one in self.entrants]
        own = [one for one in self.entrants if one.plan.gives_way]
        plain = [one for one in self.entrants if not one.plan.gives_way][:1]
        return jobs + [("background", one, last) for one in (*own, *plain)]

    def _short(self) -> Window:
        """A GPU may go above its power limit for a quarter of a second, which is not measured."""
        request_s = self.scene.profiles[-1].request_ns[-1] / 1e9
        return Window(max(0.4, ALONE_REQUESTS * request_s), 0.25, trace_ms=0.0)

    def keep(self) -> None:
        alone = {
            service: sharing.Latencies.of(
                self.logs[f"alone {service}", self.reference.name], self.loads, service
            )
            for service in self.services
        }
        busy = [
            busy_share(self.logs[f"alone {service}", self.reference.name], service)
            for service in self.services
        ]
        arrays: dict[str, Any] = {}
        for service, base in alone.items():
            arrays |= {f"alone {service}": base.ns, f"ended {service}": base.ended}
        if self.bench.options.again:
            first = self.entrants[0].name
            self._keep_way("alone again", "again", first, alone, busy, arrays)
        for one in self.entrants:
            self._keep_way(one.name, "shared", one.name, alone, busy, arrays)
        self._save(arrays)

    def _keep_way(
        self,
        way: str,
        kind: str,
        session: str,
        alone: dict[int, sharing.Latencies],
        busy: Sequence[float],
        arrays: dict[str, Any],
    ) -> None:
        row: dict[str, Any] = {
            "pair": self.pair,
            "models": [str(one.model) for one in self.scene.profiles],
            "device": self.bench.device.title,
            "load": self.load,
            "way": way,
            "rounds": len(self.loads),
            "seconds": self.bench.options.seconds,
            "shape": self.bench.options.shape.label,
            "floor": self.bench.options.floor,
            "busy_cores": self.bench.options.busy_cores,
            "busy_share": sum(busy),
            "latencies": self.file.name,
        }
        entrant = next(one for one in self.entrants if one.name == session)
        row["services"] = []
        for service in self.services:
            worker = self.scene.background if kind == "shared" else service
            logs = self.logs[f"{kind} {worker}", session]
            ours = sharing.Latencies.of(logs, self.loads, service)
            arrays[f"{way} {service}"] = ours.ns
            found = sharing.service_figures(ours, alone[service])
            found |= {"capacity_rps": self.capacity[service], "busy_share": busy[service]}
            if len(self.services) == 1 and _only_yields(entrant.plan):
                found["checks"] = sharing.checks(
                    found, _waits_ns(entrant.plan), 1e9 / self.capacity[service]
                )
            row["services"].append(found)
        if kind == "shared":
            row |= self._background(entrant, sum(busy)) | {"opened_s": entrant.opened_s}
        self.bench.keep(row)

    def _background(self, entrant: Entrant, busy: float) -> dict[str, Any]:
        last = self.scene.background
        logs = self.logs[f"shared {last}", entrant.name]
        plain = [one.name for one in self.entrants if not one.plan.gives_way][:1]
        loops = [entrant.name] if entrant.plan.gives_way else plain
        rate = sharing.rate_of(logs, last)
        alone = [sharing.rate_of(self.logs[f"background {last}", one], last) for one in loops]
        whole = [sharing.rate_of(self.logs[f"background {last}", one], last) for one in plain]
        counters = [log.counters[last] for log in logs]
        joints = entrant.plan.workers[last].joints
        return {
            "background_rps": rate,
            "background_alone_rps": alone[0],
            "background": rate / alone[0],
            "background_over_rest": rate / alone[0] / max(1 - busy, 1e-9),
            # What joints cost while no service is busy: against the whole graph.
            "idle_cost": 1 - alone[0] / whole[0] if whole and entrant.plan.gives_way else None,
            "stretches": len(joints.stretch_ns) if joints else 1,
            "depth": joints.depth if joints else None,
            "longest_stretch_us": joints.longest_ns / 1e3 if joints else None,
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
        shape = self.bench.options.shape.label.split()[0].lower()
        stem = f"{self.pair}-{self.load:g}-{shape}".replace("+", "-")
        names = (f"{stem}-{number}.npz" for number in itertools.count(1))
        return next(folder / name for name in names if not (folder / name).exists())


def _only_yields(plan: Plan) -> bool:
    """Where background moves or goes on, a service waits for more than what was in flight."""
    joints = plan.workers[-1].joints
    reactions = joints.reactions if joints else ()
    return bool(reactions) and all(reaction.lane is None for reaction in reactions)


def _waits_ns(plan: Plan) -> float:
    """What all workers that give way may have in flight when a request arrives."""
    joints = [worker.joints for worker in plan.workers if worker.joints is not None]
    return max(one.depth * one.longest_ns for one in joints)


@contextlib.contextmanager
def busy_cores(wanted: bool) -> Iterator[None]:
    """Every CPU core spins while the block lasts."""
    if not wanted:
        yield
        return
    spinning = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(spinning) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in _words(text)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", "--only", type=_words, default=list(PAIRS))
    parser.add_argument("--skip", type=_words, default=[])
    parser.add_argument("--loads", type=_numbers, default=[0.35])
    parser.add_argument("--ways", default="all", help=f"all, core, or some of {', '.join(WAYS)}")
    parser.add_argument("--seconds", type=float, default=1.5, help="of one run")
    parser.add_argument("--warmup", type=float, default=0.15, help="before it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60.0, help="start nothing new after that")
    parser.add_argument("--grain-us", type=float, default=150.0)
    parser.add_argument("--floor", type=float, default=0.0, help="of the background")
    parser.add_argument("--shape", default="poisson", help="of arrivals: bursts, azure-code, …")
    parser.add_argument("--again", action="store_true", help="alone twice, to see the noise")
    parser.add_argument("--busy-cores", action="store_true", help="beside spinning CPU cores")
    parser.add_argument("--quick", action="store_true", help="core ways, one round of a second")
    parser.add_argument("--profile-only", action="store_true")
    parser.add_argument(
        "--later", action="store_true", help="no intervals yet: --finish gives them"
    )
    parser.add_argument("--finish", action="store_true", help="only that, of what FOLDER has")
    parser.add_argument("--profiles", type=Path, action="append", default=[])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    unknown = [name for name in (*options.pairs, *options.skip) if name not in PAIRS]
    options.pairs = [name for name in options.pairs if name not in options.skip]
    if options.quick:
        options.ways, options.rounds, options.seconds = "core", 1, 1.0
    sets = {"all": list(WAYS), "core": list(CORE)}
    options.ways = sets.get(options.ways) or _words(options.ways)
    unknown += [way for way in options.ways if way not in WAYS]
    unknown += [] if shape_of(options.shape) else [options.shape]
    if unknown:
        parser.error(f"no such pair, way or shape: {', '.join(unknown)}")
    options.shape = shape_of(options.shape)
    return options


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """The results, and how many pairs failed."""
    topology = find_topology("h200")
    calibration = find_calibration(None, topology)
    device = open_device(options.device, topology, calibration)
    bench = Bench(options, device, topology, calibration)
    failed = 0
    with device, busy_cores(options.busy_cores):
        for name in options.pairs:
            if bench.time_is_up:
                bench.say(f"{name} and what follows left out: no time")
                break
            try:
                if options.profile_only:
                    for worker, model in enumerate(PAIRS[name].models):
                        bench.profile(model, worker)
                else:
                    run_pair(bench, name)
            except Exception as error:
                failed += 1
                traceback.print_exc()
                bench.keep({"pair": name, "error": f"{type(error).__name__}: {error}"})
        bench.made.clear()
    return bench.rows, failed


def main() -> int:
    options = parse()
    (options.folder / "profiles").mkdir(parents=True, exist_ok=True)
    rows, failed = ([], 0) if options.finish else measure(options)
    if options.finish or (rows and not options.later):
        rows = finish(options.folder)
    show(rows)
    summarise(rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""What commands have in common: names to artefacts, plans to run logs.

This is the only code that joins planning, devices and front ends. Heavy rooms (numba, HiGHS) are
imported where they are used, so that ``eclip inspect`` answers at once.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eclip.artefacts import store
from eclip.artefacts.calibration import Calibration
from eclip.artefacts.measures import measure, measure_together
from eclip.artefacts.memory import check_memory, memory_of_plan
from eclip.artefacts.mix import Mix, parse_mix
from eclip.artefacts.observations import Observations, ObservedRun
from eclip.artefacts.plan import Plan, fingerprint_of
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import RunLog
from eclip.artefacts.topology import Topology
from eclip.errors import DeviceError, UsageError, unknown_name
from eclip.frontends.library import find_others, find_profile

if TYPE_CHECKING:
    from eclip.cli.verification import Verification, Verifier
    from eclip.devices.base import Device, Session, Window
    from eclip.devices.cuda.processes import ProcessSets, Sharing
    from eclip.lab.evaluate import Evaluator
    from eclip.planning.policies import PolicyOptions
    from eclip.planning.problem import Problem
    from eclip.planning.search.objective import Score
    from eclip.runtime.table import WorkersBy

Progress = Callable[[float], None]


@dataclass(frozen=True)
class RunOptions:
    device: str
    window: Window
    seed: int
    arrivals: Path | None
    gpu: int = 0


def run_options(
    device: str,
    gpu: int,
    seconds: float,
    warmup: float,
    trace_ms: float,
    seed: int,
    arrivals: Path | None,
) -> RunOptions:
    """From the command line's options; a trace longer than the run is cut to it."""
    from eclip.devices.base import Window

    window = Window(seconds=seconds, warmup_seconds=warmup, trace_ms=min(trace_ms, 1000 * seconds))
    return RunOptions(device=device, window=window, seed=seed, arrivals=arrivals, gpu=gpu)


def without_trace(options: RunOptions) -> RunOptions:
    return dataclasses.replace(options, window=dataclasses.replace(options.window, trace_ms=0.0))


def find_topology(name: str) -> Topology:
    """A built-in topology by name, or one from a file."""
    if name in store.builtin_names(Topology) or not _is_file_name(name):
        return store.load_builtin(Topology, name)
    return store.load(Path(name), Topology)


def find_calibration(path: Path | None, topology: Topology) -> Calibration:
    if path is not None:
        return store.load(path, Calibration)
    if topology.name not in store.builtin_names(Calibration):
        raise UsageError(
            f"there is no built-in calibration for {topology.name}; give one with --calibration"
        )
    return store.load_builtin(Calibration, topology.name)


def find_profiles(
    mix: Mix,
    topology: Topology,
    calibration: Calibration,
    folders: Sequence[Path],
    tail: bool = False,
) -> tuple[Profile, ...]:
    """A profile for every worker; workers of one model share it. ``tail``: variable-output kernels
    at the times of long outputs instead of their expected times."""
    found: dict[str, Profile] = {}
    for worker in mix.workers:
        if worker.key not in found:
            profile = find_profile(worker.model, worker.batch, topology, calibration, folders)
            found[worker.key] = profile.at_tail() if tail else profile
    return tuple(found[worker.key] for worker in mix.workers)


def find_other_kernels(
    mix: Mix, topology: Topology, folders: Sequence[Path], tail: bool = False
) -> tuple[Profile, ...]:
    """What a search may choose instead: profiles of the same models with other kernels."""
    models = dict.fromkeys((worker.model, worker.batch) for worker in mix.workers)
    found = [one for model in models for one in find_others(*model, topology, folders)]
    return tuple(one.at_tail() if tail else one for one in found)


def find_earlier(
    path: Path, mix: Mix, topology: Topology, profiles: Sequence[Profile], device: str
) -> tuple[ObservedRun, ...]:
    """Placements of the mix that an earlier search has tried, with kernels of these profiles."""
    kept = store.load(path, Observations)
    kept.fingerprint.check(fingerprint_of(topology, profiles), str(path), "the profiles")
    if kept.modelled and device != "sim":
        raise UsageError(f"{path} was simulated; a search on a GPU goes on from one on a GPU")
    ours = [run for run in kept.runs if run.homes and run.models == mix.models]
    if not ours:
        raise UsageError(
            f"{path} has no placements of {mix.name} to go on from, only of "
            f"{', '.join(kept.mixes) or 'nothing'}"
        )
    known = {profile.key for profile in profiles}
    found = tuple(run for run in ours if known.issuperset(run.ran.models))
    if not found:
        raise UsageError(
            f"{path} has placements of {mix.name} only with other kernels, which have no profile "
            f"here or may not be chosen (--own-kernels)"
        )
    return found


def find_observed(
    observations: Observations,
    topology: Topology,
    calibration: Calibration,
    folders: Sequence[Path],
) -> dict[str, Profile]:
    """All profiles that observed runs are replayed with, by ``model:batch``."""
    mixes = [parse_mix(mix) for mix in observations.mixes]
    mixes += dict.fromkeys(run.ran for run in observations.runs)
    return {
        profile.key: profile
        for mix in mixes
        for profile in find_profiles(mix, topology, calibration, folders)
    }


def make_plan(
    policy: str,
    mix: Mix,
    topology: Topology,
    profiles: tuple[Profile, ...],
    calibration: Calibration,
    options: PolicyOptions,
) -> Plan:
    from eclip.planning import policies
    from eclip.planning.problem import Problem

    problem = Problem(mix, topology, profiles, options.others)
    if policy == "search":
        options = dataclasses.replace(
            options,
            evaluator=make_evaluator(problem, calibration),
            switch_ns=calibration.costs.barrier_ns,
        )
    return policies.make_plan(policy, problem, options)


def make_verification(
    finalists: int,
    refine_seconds: float,
    earlier: Path | None,
    mix: Mix,
    topology: Topology,
    profiles: Sequence[Profile],  # those with other kernels, too
    device: str,
) -> Verification | None:
    """How a search is to be verified, as options ask for it; None: not at all."""
    from eclip.cli.verification import Verification

    if refine_seconds and not finalists:
        raise UsageError("--refine goes with --verify, which decides at the end")
    if earlier is not None and not refine_seconds:
        raise UsageError("--earlier goes with --refine, which goes on from there")
    if not finalists:
        return None
    tried = () if earlier is None else find_earlier(earlier, mix, topology, profiles, device)
    return Verification(finalists, refine_seconds, tried)


def search_and_verify(
    mix: Mix,
    topology: Topology,
    profiles: tuple[Profile, ...],
    calibration: Calibration,
    options: PolicyOptions,
    how: Verification,
    run: RunOptions,
    progress: Progress,
) -> Plan:
    """Search by simulation, try the best plans on the device, and take what did best there."""
    from eclip.cli.verification import Opened
    from eclip.lab.alone import alone_rates

    verifier = make_verifier(mix, topology, profiles, calibration, options, how)
    found = verifier.simulate(options.objective, lambda part: progress(part / 2))
    device = make_device(topology, calibration, run, lambda part: None)
    sources = Sources((*options.others, *profiles), run.device, run.gpu)
    opened = Opened(device, sources, alone_rates(device, profiles, sources.all(profiles)))
    trials = opened.trials(mix)
    verifier.explore(
        found, options.objective, opened, trials, lambda part: progress(0.5 + part / 4)
    )
    return verifier.confirm(
        found,
        options.objective,
        opened,
        trials,
        run.window,
        lambda part: progress(0.75 + part / 4),
    )


def make_verifier(
    mix: Mix,
    topology: Topology,
    profiles: tuple[Profile, ...],
    calibration: Calibration,
    options: PolicyOptions,
    how: Verification,
) -> Verifier:
    from eclip.cli.verification import Verifier
    from eclip.planning.problem import Problem

    problem = Problem(mix, topology, profiles, options.others)
    options = dataclasses.replace(options, switch_ns=calibration.costs.barrier_ns)
    return Verifier(problem, make_evaluator(problem, calibration), options, how)


def make_evaluator(problem: Problem, calibration: Calibration) -> Evaluator:
    from eclip.lab.evaluate import Evaluator

    return Evaluator(problem.topology, problem.profiles, calibration, problem.mix, problem.others)


def mean_score(logs: Sequence[RunLog]) -> Score:
    from eclip.planning.search.objective import Score

    found = [measure(log) for log in logs]
    workers = range(len(found[0].workers))

    def mean(values: Iterable[float | None]) -> float:
        return statistics.fmean(math.inf if value is None else value for value in values)

    return Score(
        ratios=tuple(mean(one.workers[w].ratio for one in found) for w in workers),
        power_w=measure_together(logs).power_w,
        p99_ms=tuple(mean(one.workers[w].p99_ms for one in found) for w in workers),
    )


def run_plans(
    plans: Sequence[Plan],
    profiles: tuple[Profile, ...],
    calibration: Calibration,
    options: RunOptions,
    progress: Progress,
    alone: tuple[Profile, ...] | None = None,  # what rates alone are of, if not these profiles
) -> list[RunLog]:
    """Run plans of one mix one after another, under identical arrivals."""
    from eclip.devices.load import load_of_csv, load_of_mix
    from eclip.lab.alone import alone_rates

    mix, window = plans[0].mix, options.window
    if options.arrivals is None:
        load = load_of_mix(mix, window.seconds, window.warmup_seconds, options.seed)
    else:
        names = [worker.name for worker in mix.workers]
        load = load_of_csv(options.arrivals, names, options.seed)
    logs: list[RunLog] = []

    def share_done(part: float) -> None:
        progress((len(logs) + part) / len(plans))

    device = make_device(plans[0].topology, calibration, options, share_done)
    for plan in plans:  # before anything is captured
        check_memory(memory_of_plan(plan, device.topology), "the plan")
    alone = alone or profiles
    sources = Sources((*alone, *profiles), options.device, options.gpu)
    rates = alone_rates(device, alone, sources.all(alone))
    for plan in plans:
        with _open_session(device, plan, sources) as session:
            logs.append(session.run(load, window, rates))
        share_done(0.0)
    return logs


def make_device(
    topology: Topology, calibration: Calibration, options: RunOptions, progress: Progress
) -> Device[Any]:
    if options.device == "sim":
        from eclip.devices.sim.device import SimDevice

        return SimDevice(topology, calibration, progress)
    if options.device == "cuda":
        from eclip.devices.cuda.device import CudaDevice

        return CudaDevice(options.gpu)
    raise unknown_name("device", options.device, ["sim", "cuda"])


class Sources:
    """What workers run from, made when first asked for: a capture on a GPU, in the simulator the
    profile itself. A plan says by its workers' models which ones it needs."""

    def __init__(self, profiles: Iterable[Profile], device: str, gpu: int = 0) -> None:
        self._profiles = {profile.key: profile for profile in profiles}
        self._device = device
        self._gpu = gpu
        self._made: dict[tuple[int, str], Any] = {}  # by worker and model

    def all(self, profiles: Sequence[Profile]) -> list[Any]:
        """One for every worker."""
        return [self._of(worker, profile) for worker, profile in enumerate(profiles)]

    def open(self, device: Device[Any], plan: Plan) -> Session:
        from eclip.runtime.program import lower

        missing = [model for model in plan.models if model not in self._profiles]
        if missing:
            raise UsageError(
                f"the plan needs the profile of {', '.join(missing)}; give its folder with "
                f"--profiles"
            )
        profiles = [self._profiles[model] for model in plan.models]
        program = lower(plan, [profile.trace for profile in profiles])
        return device.open(program, self.all(profiles))

    def _of(self, worker: int, profile: Profile) -> Any:
        if (worker, profile.key) not in self._made:
            self._made[worker, profile.key] = self._make(profile)
        return self._made[worker, profile.key]

    def _make(self, profile: Profile) -> Any:
        if self._device == "sim":
            return profile
        # Read when torch is imported, which warns that choosing kernels for fewer units is
        # experimental. Not for the whole command line: `exec` would pass it on.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        try:
            from eclip.frontends.models import capture_worker
        except ModuleNotFoundError as error:
            raise DeviceError(f"the package {error.name} is missing; see `eclip doctor`") from None
        return capture_worker(profile, self._gpu)


@contextmanager
def quick_opening(device: Device[Any]) -> Iterator[None]:
    """Plans with switches run as segments: to find the faster way takes longer than a trial."""
    from eclip.devices.cuda.device import CudaDevice, Execution

    if not isinstance(device, CudaDevice):
        yield
        return
    before, device.execution = device.execution, Execution.SEGMENTS
    try:
        yield
    finally:
        device.execution = before


def priority_levels(device: Device[Any]) -> int:
    """How many a search may use on it; the simulator does not know them."""
    from eclip.devices.cuda.device import CudaDevice

    return 3 if isinstance(device, CudaDevice) else 1


def driver_of(device: Device[Any]) -> str | None:
    """The version of a GPU's driver; a simulator has none."""
    from eclip.devices.cuda.device import CudaDevice

    return device.nvml.driver() if isinstance(device, CudaDevice) else None


def open_sets(device: Device[Any], sharings: Sequence[Sharing]) -> ProcessSets:
    """A process for every worker of every sharing; they are starting, not ready."""
    from eclip.devices.cuda.device import CudaDevice
    from eclip.devices.cuda.processes import ProcessSets, host_of

    if not isinstance(device, CudaDevice):
        raise DeviceError("only a GPU runs workers in processes of their own")
    try:
        from eclip.frontends.served import ENTRY
    except ModuleNotFoundError as error:
        raise DeviceError(f"the package {error.name} is missing; see `eclip doctor`") from None
    return ProcessSets(host_of(device), ENTRY, sharings, wait=False)


@contextmanager
def _open_session(device: Device[Any], plan: Plan, sources: Sources) -> Iterator[Session]:
    """A plan on the device; one whose workers take turns runs in processes on a GPU."""
    from eclip.devices.cuda.device import CudaDevice

    if plan.turns and isinstance(device, CudaDevice):
        from eclip.devices.cuda.processes import Sharing

        with open_sets(device, [Sharing(plan)]) as sets:
            sets.wait()
            yield sets.sessions[0]
    else:
        with sources.open(device, plan) as session:
            yield session


def workers_by(name: str) -> WorkersBy:
    """How a command's launches are told apart, by its name."""
    from eclip.runtime.table import WorkersBy

    ways = {way.value: way for way in WorkersBy}
    if name not in ways:
        raise unknown_name("way to tell workers apart", name, ways)
    return ways[name]


def _is_file_name(name: str) -> bool:
    return "/" in name or name.endswith((".json", ".json.gz"))

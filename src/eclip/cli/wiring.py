"""What commands have in common: names to artefacts, plans to run logs.

This is the only code that joins planning, devices and front ends. Heavy rooms (numba, HiGHS) are
imported where they are used, so that ``eclip inspect`` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eclip import store
from eclip.calibration import Calibration
from eclip.errors import DeviceError, UsageError, unknown_name
from eclip.frontends.library import find_profile
from eclip.mix import Mix
from eclip.plan import Plan
from eclip.profile import Profile
from eclip.runlog import RunLog
from eclip.topology import Topology

if TYPE_CHECKING:
    from eclip.devices.base import Device, Window
    from eclip.planning.policies import PolicyOptions
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
    mix: Mix, topology: Topology, calibration: Calibration, folders: Sequence[Path]
) -> tuple[Profile, ...]:
    """A profile for every worker; workers of one model share it."""
    found: dict[str, Profile] = {}
    for worker in mix.workers:
        if worker.key not in found:
            found[worker.key] = find_profile(
                worker.model, worker.batch, topology, calibration, folders
            )
    return tuple(found[worker.key] for worker in mix.workers)


def make_plan(
    policy: str,
    mix: Mix,
    topology: Topology,
    profiles: tuple[Profile, ...],
    options: PolicyOptions,
) -> Plan:
    from eclip.planning import policies
    from eclip.planning.problem import Problem

    return policies.make_plan(policy, Problem(mix, topology, profiles), options)


def run_plans(
    plans: Sequence[Plan],
    profiles: tuple[Profile, ...],
    calibration: Calibration,
    options: RunOptions,
    progress: Progress,
) -> list[RunLog]:
    """Run plans of one mix one after another, under identical arrivals."""
    from eclip.devices.alone import alone_rates
    from eclip.devices.load import load_of_csv, load_of_mix
    from eclip.runtime.program import lower

    mix, window = plans[0].mix, options.window
    if options.arrivals is None:
        load = load_of_mix(mix, window.seconds, window.warmup_seconds, options.seed)
    else:
        names = [worker.name for worker in mix.workers]
        load = load_of_csv(options.arrivals, names, options.seed)
    logs: list[RunLog] = []

    def share_done(part: float) -> None:
        progress((len(logs) + part) / len(plans))

    device, sources = _open_device(plans[0].topology, profiles, calibration, options, share_done)
    rates = alone_rates(device, profiles, sources)
    for plan in plans:
        with device.open(lower(plan, [profile.trace for profile in profiles]), sources) as session:
            logs.append(session.run(load, window, rates))
        share_done(0.0)
    return logs


def _open_device(
    topology: Topology,
    profiles: tuple[Profile, ...],
    calibration: Calibration,
    options: RunOptions,
    progress: Progress,
) -> tuple[Device[Any], Sequence[Any]]:
    """The device by its name, and what each worker runs from there."""
    if options.device == "sim":
        from eclip.devices.sim.device import SimDevice

        return SimDevice(topology, calibration, progress), profiles
    if options.device == "cuda":
        from eclip.devices.cuda.device import CudaDevice

        device = CudaDevice(options.gpu)
        try:
            from eclip.frontends.models import capture_workers
        except ModuleNotFoundError as error:
            raise DeviceError(f"the package {error.name} is missing; see `eclip doctor`") from None
        return device, capture_workers(profiles, options.gpu)
    raise unknown_name("device", options.device, ["sim", "cuda"])


def workers_by(name: str) -> WorkersBy:
    """How a command's launches are told apart, by its name."""
    from eclip.runtime.table import WorkersBy

    ways = {way.value: way for way in WorkersBy}
    if name not in ways:
        raise unknown_name("way to tell workers apart", name, ways)
    return ways[name]


def _is_file_name(name: str) -> bool:
    return "/" in name or name.endswith((".json", ".json.gz"))

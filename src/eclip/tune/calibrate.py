"""Calibration: measure random placements and joints on a device, and fit the simulator to them.

Measuring and fitting are apart: every run is in the file of observations as soon as it is measured,
so an interrupted measurement goes on where it stopped, and a stored one is fitted again without a
GPU.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from eclip.core.calibration import Calibration
from eclip.core.device import Device
from eclip.core.mix import Mix
from eclip.core.topology import Topology
from eclip.core.trace import with_traces
from eclip.errors import DeviceError, MismatchError, UsageError
from eclip.files import store
from eclip.files.observations import Observations
from eclip.planner.case import Case, find_observed, make_case
from eclip.planner.search.placement import Placer
from eclip.progress import Progress
from eclip.rig.rig import Rig
from eclip.tune import joint_costs
from eclip.tune.fit import Fit, Replay, fit
from eclip.tune.observe import WINDOW, observe, placements

# Two to six workers, long and short kernels, transformers and CNNs, all with measured profiles.
MIXES = (
    "paper/3",
    "paper/5",
    "resnet50:8,bert:8,densenet121:8,shufflenet:8",
    "paper/1",
    "paper/4",
    "paper/7",
    "gpt2:8,vit_b_16:8",
    "mobilenet_v3:8,efficientnet:8,squeezenet:8,alexnet:8,resnet50:8,bert:8",
)
_MOST_FAILURES = 3  # in a row: then it is not the placement
_PAIRS = 3  # of which joints are measured, a few seconds each
_NOT_FITTED = "Not fitted: "


def measure(
    device: Device,
    cases: Sequence[Case],
    path: Path,
    pairs: Sequence[Case] = (),
    *,
    runs: int,
    budget_s: float,
    seed: int,
    progress: Progress,
) -> Observations:
    """Measure the cost of joints for every pair, then ``runs`` of each mix within ``budget_s``.

    Every run is written to the file at once. Mixes share the time evenly; time that a mix leaves
    over goes to the next mixes.
    """
    kept = _begin(device, cases, path)
    begin = time.monotonic()
    for pair in pairs:
        known = any(one.mix == pair.mix.name for one in kept.joints)
        if known or progress.stopped or time.monotonic() - begin > budget_s:
            continue
        progress.phase(f"measuring joints of {pair.mix.name}")
        try:
            observed = joint_costs.observe_joints(Rig(pair, device))
        except DeviceError as error:
            progress.warn(f"left out the joints of {pair.mix.name}: {error}")
            continue
        kept = replace(kept, joints=(*kept.joints, observed))
        store.save(kept, path)
    progress.phase("measuring")
    for number, case in enumerate(cases):
        share = (budget_s - (time.monotonic() - begin)) / (len(cases) - number)
        until = time.monotonic() + share
        for more in _measure_case(device, case, kept, runs, until, seed, progress):
            kept = more
            store.save(kept, path)
            done = min(runs, _count(kept, case.mix))
            progress.part((number + done / runs) / len(cases))
        if progress.stopped:
            break
    for case in cases:
        if (count := _count(kept, case.mix)) < runs:
            progress.warn(f"{case.mix.name} has {count} of {runs} runs; call again to add the rest")
    return kept


def _measure_case(
    device: Device,
    case: Case,
    kept: Observations,
    runs: int,
    until: float,
    seed: int,
    progress: Progress,
) -> Iterator[Observations]:
    """The observations after every new run of the case."""
    known = {run.homes for run in kept.runs if run.mix == case.mix.name}
    if len(known) >= runs or time.monotonic() + WINDOW.seconds >= until:
        return
    rig, placer = Rig(case, device), Placer(case.problem())
    failures = 0
    for kind, homes in placements(len(case.profiles), placer.slices, seed):
        late = time.monotonic() + WINDOW.seconds > until
        if len(known) >= runs or late or progress.stopped:
            return
        if homes in known:
            continue
        try:
            run = observe(rig, placer, kind, homes)
        except DeviceError as error:  # such as clusters that fit no place on a lane
            failures += 1
            if failures > _MOST_FAILURES:
                raise
            progress.warn(f"left out a placement of {case.mix.name}: {error}")
            continue
        if run is None:
            progress.warn(f"left out a placement of {case.mix.name}: a worker got nowhere")
            continue
        failures = 0
        known.add(homes)
        kept = replace(kept, runs=(*kept.runs, run))
        yield kept


def _count(kept: Observations, mix: Mix) -> int:
    return sum(run.mix == mix.name for run in kept.runs)


def _begin(device: Device, cases: Sequence[Case], path: Path) -> Observations:
    """The observations in the file, which must be of this device and driver, or none yet."""
    topology, driver = device.topology, device.driver
    profiles = [profile for case in cases for profile in case.profiles]
    traced = with_traces(topology.fingerprint, [profile.trace for profile in profiles])
    here = replace(traced, driver=driver or "")
    if not path.exists():
        today = datetime.date.today()
        source = (
            f"Measured by `eclip calibrate` on {device.title}, from {today}: "
            f"seeded random placements, all workers back to back."
        )
        return Observations(
            fingerprint=here, source=source, date=today, runs=(), modelled=device.modelled
        )
    kept = store.load(path, Observations)
    if kept.modelled != device.modelled:
        which = "simulated" if kept.modelled else "measured"
        raise MismatchError(f"{path} has {which} runs; give another file of observations")
    differences = kept.fingerprint.check(here, str(path), "this device")
    if differences:
        raise MismatchError(f"{differences[0]}; give another file of observations")
    both = replace(kept.fingerprint, traces={**kept.fingerprint.traces, **here.traces})
    return replace(kept, fingerprint=both)


def cases_on(
    device: Device,
    mixes: Sequence[str | Mix],
    calibration: str | Path | Calibration | None,
    profiles: Sequence[Path],
) -> list[Case]:
    return [make_case(mix, device.topology, calibration, profiles) for mix in mixes]


def pairs_on(
    device: Device,
    cases: Sequence[Case],
    calibration: str | Path | Calibration | None,
    profiles: Sequence[Path],
) -> list[Case]:
    """Pairs of the cases' own models, whose joints are measured."""
    pairs = [joint_costs.pair_of(case) for case in cases[:_PAIRS]]
    return cases_on(device, pairs, calibration, profiles)


def fit_observations(
    observed: Observations,
    topology: Topology,
    base: Calibration,
    folders: Sequence[Path],
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """The simulator's constants, fitted to stored runs; constants not fitted are the base's."""
    progress = progress or Progress()
    if not observed.runs:
        raise UsageError("there are no runs to fit; measure longer (a larger budget)")
    replay = Replay(observed, topology, find_observed(observed, topology, base, folders))
    count = len(replay.usable())
    joints = f" Joints: measured on {len(observed.joints)} pairs." if observed.joints else ""
    source = (
        f"Interference, idle_w and launch_ns fitted by `eclip calibrate` to {count} runs of "
        f"{len(observed.mixes)} mixes.{joints} The runs: {observed.source} "
        f"{_NOT_FITTED}{base.source.rpartition(_NOT_FITTED)[2]}"
    )
    start = replace(base, fingerprint=replace(observed.fingerprint, traces={}))
    progress.phase(f"fitting {count} runs")
    fitted = fit(replay, start, source, seed=seed, progress=progress)
    costs = joint_costs.costs_with_joints(fitted.calibration.costs, observed.joints)
    return dataclasses.replace(
        fitted,
        calibration=replace(fitted.calibration, costs=costs),
        pairs=len(observed.joints),
    )

"""``eclip calibrate``: fit the simulator to a GPU, from runs measured there.

Measuring and fitting are apart: every run is in the file of observations as soon as it is measured,
so an interrupted measurement goes on where it stopped, and ``--from`` fits again without a GPU.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec.structs import asdict, replace

from eclip.artefacts import store
from eclip.artefacts.calibration import Calibration
from eclip.artefacts.mix import Mix, parse_mix
from eclip.artefacts.observations import Observations
from eclip.artefacts.profile import Profile
from eclip.artefacts.topology import Topology
from eclip.cli import screen, wiring
from eclip.cli.options import CalibrationOption, GpuOption, JsonOption, ProfilesOption
from eclip.errors import DeviceError, MismatchError, UsageError, unknown_name

if TYPE_CHECKING:
    from eclip.devices.base import Device
    from eclip.lab.fit import Errors, Fit

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
_NOT_FITTED = "Not fitted: "

FindSources = Callable[[tuple[Profile, ...]], Sequence[Any]]


def calibrate(
    device: Annotated[str, typer.Option("--device", help="Where to measure: cuda.")] = "cuda",
    gpu: GpuOption = 0,
    mixes: Annotated[
        list[str] | None, typer.Option("--mixes", help="A mix to measure; repeatable.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Runs of each mix.")] = 20,
    budget: Annotated[
        float, typer.Option("--budget", min=1.0, help="Seconds of measuring, at most.")
    ] = 300.0,
    observations: Annotated[
        Path, typer.Option("--observations", help="Where runs are kept; more are added to it.")
    ] = Path("observations.json.gz"),
    stored: Annotated[
        str | None,
        typer.Option("--from", help="Measure nothing: fit this file of runs, or a built-in one."),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The calibration to write.")] = Path(
        "calibration.json"
    ),
    topology: Annotated[
        str, typer.Option("--topology", help="--from: the device that was measured, or a file.")
    ] = "h200",
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of placements, and of what is held out.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure random placements on a GPU and fit the simulator's constants to them."""
    folders = profiles or []
    if stored is not None:
        where = wiring.find_topology(topology)
        base = wiring.find_calibration(calibration, where)
        found = _find_observations(stored)
    else:
        if device != "cuda":
            raise unknown_name("device", device, ["cuda"])
        wanted = [parse_mix(mix) for mix in mixes or MIXES]
        with _open_gpu(gpu) as opened:
            where = opened.topology
            base = wiring.find_calibration(calibration, where)
            found = measure(
                opened,
                lambda needed: wiring.Sources(needed, "cuda", gpu).all(needed),
                {mix.name: wiring.find_profiles(mix, where, base, folders) for mix in wanted},
                wanted,
                observations,
                runs=runs,
                budget=budget,
                seed=seed,
                driver=opened.nvml.driver(),
            )
    fitted = _fit(found, where, base, folders, seed)
    store.save(fitted.calibration, out)
    if as_json:
        screen.print_json(describe(fitted))
    else:
        print_fit(fitted)
        screen.out.print(f"Written to {out}. Next: eclip compare MIX --calibration {out}")


def _find_observations(name: str) -> Observations:
    if name in store.builtin_names(Observations):
        return store.load_builtin(Observations, name)
    return store.load(Path(name), Observations)


def _open_gpu(gpu: int) -> Any:
    from eclip.devices.cuda.device import CudaDevice

    try:
        return CudaDevice(gpu)
    except DeviceError as error:
        raise DeviceError(f"{error}; runs measured elsewhere can be fitted with --from") from None


def measure(
    device: Device[Any],
    sources: FindSources,
    profiles: dict[str, tuple[Profile, ...]],  # by mix
    mixes: Sequence[Mix],
    path: Path,
    *,
    runs: int,
    budget: float,
    seed: int,
    driver: str,
) -> Observations:
    """Measure until every mix has so many runs or the time is over; all are in the file at once.

    The time is dealt out evenly: what a mix leaves goes to those after it.
    """
    from eclip.lab.alone import alone_rates
    from eclip.lab.observe import WINDOW, observe, placements
    from eclip.planning.problem import Problem
    from eclip.planning.search.placement import Placer

    kept = _begin(device.topology, profiles, path, driver)
    begin = time.monotonic()
    failures = 0
    with screen.progress_bar("measuring") as progress:
        for number, mix in enumerate(mixes):
            share = (budget - (time.monotonic() - begin)) / (len(mixes) - number)
            until = time.monotonic() + share
            known = {run.homes for run in kept.runs if run.mix == mix.name}
            if len(known) >= runs or share <= WINDOW.seconds:
                continue
            workers = profiles[mix.name]
            captured = sources(workers)
            alone = alone_rates(device, workers, captured)
            placer = Placer(Problem(mix, device.topology, workers))
            for kind, homes in placements(len(workers), placer.slices, seed):
                if len(known) >= runs or time.monotonic() + WINDOW.seconds > until:
                    break
                if homes in known:
                    continue
                try:
                    run = observe(device, placer, captured, alone, kind, homes)
                except DeviceError as error:  # such as clusters that fit no place on a lane
                    failures += 1
                    if failures > _MOST_FAILURES:
                        raise
                    screen.warn(f"left out a placement of {mix.name}: {error}")
                    continue
                if run is None:
                    screen.warn(f"left out a placement of {mix.name}: a worker got nowhere")
                    continue
                failures = 0
                known.add(homes)
                kept = replace(kept, runs=(*kept.runs, run))
                store.save(kept, path)
                progress.part_or_end((number + len(known) / runs) / len(mixes))
    for mix in mixes:
        count = sum(run.mix == mix.name for run in kept.runs)
        if count < runs:
            screen.warn(f"{mix.name} has {count} of {runs} runs; call again to add the others")
    return kept


def _begin(
    topology: Topology, profiles: dict[str, tuple[Profile, ...]], path: Path, driver: str
) -> Observations:
    """The observations in the file, which must be of this device and driver, or none yet."""
    traces = {one.key: one.trace.digest for workers in profiles.values() for one in workers}
    here = replace(topology.fingerprint, driver=driver, traces=traces)
    if not path.exists():
        today = datetime.date.today()
        source = (
            f"Measured by `eclip calibrate` on {topology.title}, driver {driver}, from {today}: "
            f"seeded random placements, all workers back to back."
        )
        return Observations(fingerprint=here, source=source, date=today, runs=())
    kept = store.load(path, Observations)
    differences = kept.fingerprint.check(here, str(path), "this device")
    if differences:
        raise MismatchError(f"{differences[0]}; give another file with --observations")
    both = replace(kept.fingerprint, traces={**kept.fingerprint.traces, **traces})
    return replace(kept, fingerprint=both)


def _fit(
    found: Observations,
    topology: Topology,
    base: Calibration,
    folders: Sequence[Path],
    seed: int,
) -> Fit:
    from eclip.lab.fit import Replay, fit

    if not found.runs:
        raise UsageError("there are no runs to fit; measure longer: --budget")
    replay = Replay(found, topology, wiring.find_observed(found, topology, base, folders))
    count = len(replay.usable())
    source = (
        f"Sharing, idle_w and launch_ns fitted by `eclip calibrate` to {count} runs of "
        f"{len(found.mixes)} mixes. The runs: {found.source} "
        f"{_NOT_FITTED}{base.source.rpartition(_NOT_FITTED)[2]}"
    )
    start = replace(
        base,
        fingerprint=replace(found.fingerprint, traces={}),
    )
    with screen.progress_bar(f"fitting {count} runs") as progress:
        return fit(replay, start, source, seed=seed, progress=progress.part_or_end)


def describe(fitted: Fit) -> dict[str, Any]:
    """For JSON."""
    calibration = fitted.calibration
    return {
        "sharing": asdict(calibration.sharing),
        "idle_w": calibration.power.idle_w,
        "launch_ns": calibration.costs.launch_ns,
        "errors": {name: msgspec.to_builtins(one) for name, one in _rows(fitted)},
    }


def print_fit(fitted: Fit) -> None:
    calibration = fitted.calibration
    constants = [
        *asdict(calibration.sharing).items(),
        ("idle_w", calibration.power.idle_w),
        ("launch_ns", calibration.costs.launch_ns),
    ]
    screen.print_table(
        "Fitted constants", ["constant", "value"], ([n, f"{v:g}"] for n, v in constants)
    )
    screen.print_table(
        "Simulated against measured",
        ["runs", "count", "rate error", "power error", "STP bias", "STP correlation"],
        (
            [
                name,
                str(one.runs),
                f"{one.rate:.1%}",
                f"{one.power:.1%}",
                f"{one.stp_bias:+.1%}",
                f"{one.stp_correlation:.2f}",
            ]
            for name, one in _rows(fitted)
        ),
    )
    left_out = fitted.left_out.values()
    rate = sum(one.rate for one in left_out) / len(left_out)
    power = sum(one.power for one in left_out) / len(left_out)
    screen.out.print(
        f"On a mix that was not fitted, mean of {len(left_out)}: rates are {rate:.1%} off, power "
        f"{power:.1%}."
    )


def _rows(fitted: Fit) -> list[tuple[str, Errors]]:
    rows = [
        ("all: the calibration written", fitted.fitted),
        ("part: fitted", fitted.seen),
        ("part: not fitted, of the same mixes", fitted.held_runs),
        ("part: not fitted, of other mixes", fitted.held_mixes),
        *((f"not fitted: {mix}", one) for mix, one in fitted.left_out.items()),
        ("with switches, never fitted", fitted.switching),
    ]
    return [(name, one) for name, one in rows if one.runs]

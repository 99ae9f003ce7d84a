"""``eclip run``: a plan file on a device to a run log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eclip.artefacts import store
from eclip.artefacts.measures import measure
from eclip.artefacts.plan import Plan
from eclip.cli import screen, wiring
from eclip.cli.options import (
    ArrivalsOption,
    CalibrationOption,
    DeviceOption,
    GpuOption,
    JsonOption,
    ProfilesOption,
    SecondsOption,
    SeedOption,
    TailOption,
    TraceOption,
    WarmupOption,
)


def run(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the run log.")] = Path(
        "run.json"
    ),
    device: DeviceOption = "sim",
    gpu: GpuOption = 0,
    seconds: SecondsOption = 2.0,
    warmup: WarmupOption = 0.1,
    trace_ms: TraceOption = 20.0,
    seed: SeedOption = 0,
    arrivals: ArrivalsOption = None,
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    tail: TailOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a plan and write what happened."""
    plan = store.load(file, Plan)
    constants = wiring.find_calibration(calibration, plan.topology)
    found = wiring.find_profiles(plan.mix, plan.topology, constants, profiles or [], tail)
    asked = plan.mix.as_asked()
    alone = wiring.find_profiles(asked, plan.topology, constants, profiles or [], tail)
    options = wiring.run_options(device, gpu, seconds, warmup, trace_ms, seed, arrivals)
    with screen.progress_bar(f"running {plan.policy}") as progress:
        (log,) = wiring.run_plans([plan], found, constants, options, progress.part_or_end, alone)
    store.save(log, out)
    for warning in log.warnings:
        screen.warn(warning)
    if as_json:
        screen.print_json(measure(log))
    else:
        screen.print_measures([measure(log)])
        screen.out.print(f"Written to {out}. Next: eclip report {out} -o report.html")

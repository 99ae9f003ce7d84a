"""``eclip run``: runs a plan on a device and writes a run log."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

import eclip
from eclip.cli import screen
from eclip.cli.options import (
    ArrivalsOption,
    CalibrationOption,
    DeviceOption,
    JsonOption,
    ProfilesOption,
    SecondsOption,
    SeedOption,
    StrictOption,
    TailOption,
    TraceOption,
    WarmupOption,
)
from eclip.cli.screen import measured
from eclip.files import outputs
from eclip.files.lateness import lateness_of
from eclip.planner.case import case_of


def run(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the run log.")] = Path(
        "run.json"
    ),
    device: DeviceOption = "sim",
    seconds: SecondsOption = 2.0,
    warmup: WarmupOption = 0.1,
    trace_ms: TraceOption = None,
    seed: SeedOption = 0,
    arrivals: ArrivalsOption = None,
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    tail: TailOption = False,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a plan and write a run log."""
    outputs.check_output(out, eclip.RunLog)
    plan = eclip.load(file, eclip.Plan)
    with screen.progress_bar(f"running {plan.policy}") as progress:
        log = eclip.run(
            plan,
            device,
            seconds=seconds,
            warmup=warmup,
            trace_ms=trace_ms,
            seed=seed,
            arrivals=arrivals,
            case=case_of(plan, calibration, profiles or [], tail=tail),
            command=shlex.join(["eclip", *sys.argv[1:]]),
            progress=progress,
        )
    failed = outputs.save_or_rescue(log, out)
    for warning in log.warnings:
        screen.warn(warning)
    measures = eclip.measure(log)
    lateness = lateness_of(log)
    if as_json:
        told = {"lateness": lateness} if lateness else {}
        screen.print_json(msgspec.to_builtins(measures) | msgspec.to_builtins(told))
    else:
        measured.print_measures([measures])
        for one in lateness:
            screen.out.print(f"Account of {one}.")
        if log.prepared is not None:
            made = log.prepared
            screen.out.print(
                f"Prepared {made.executables} executables in {made.seconds:.2f} s, with "
                f"{made.device_bytes / 2**20:.0f} MiB of the device's memory."
            )
        if failed is None:
            screen.out.print(f"Written to {out}. Next: eclip report {out} -o report.html")
    if failed is not None:
        raise failed
    screen.exit_if_stopped(progress, f"{out} has the run so far")
    screen.exit_if_missed(measures.missed, strict)

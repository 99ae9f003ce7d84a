"""``eclip exec``: an unmodified command under a plan."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from eclip.artefacts import store
from eclip.artefacts.plan import Plan
from eclip.cli import screen
from eclip.cli.options import (
    CalibrationOption,
    GpuOption,
    JsonOption,
    ProfilesOption,
    WorkersOption,
)
from eclip.errors import UsageError
from eclip.frontends.transparent import run_under
from eclip.lab.case import case_of
from eclip.runtime.program import lower
from eclip.runtime.table import plan_table, workers_by


def exec(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The command and its arguments.")
    ],
    file: Annotated[Path, typer.Option("--plan", help="A plan file.")],
    workers: WorkersOption = "stream",
    stats: Annotated[
        bool, typer.Option("--stats", help="At the end, print how many launches went where.")
    ] = False,
    gpu: GpuOption = 0,
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an unmodified command with its kernels on the lanes of a plan."""
    by = workers_by(workers)
    plan = store.load(file, Plan)
    if plan.modelled:
        raise UsageError(
            f"{file} was made from modelled profiles, whose kernels are made up; measure the "
            f"command first with `eclip record` and plan again"
        )
    if plan.models != plan.mix.as_asked().models:
        raise UsageError(
            f"{file} is for kernels that a search chose for fewer {plan.topology.unit_name}s, and "
            f"a command launches its own; plan again with --usual-kernels"
        )
    case = case_of(plan, calibration, profiles or [])
    traces = [profile.trace for profile in case.profiles]
    table = plan_table(lower(plan, traces), traces, by)
    outcome = run_under(command, table, gpu)
    if as_json:
        screen.print_json({"code": outcome.code, "processes": outcome.counters})
        sys.exit(outcome.code)
    if stats and outcome.counters:
        _print_counters(outcome.counters)
    if not outcome.placed and os.environ.get("ECLIP_DISABLE") is None:
        screen.warn(_nothing_placed(outcome.launches))
    sys.exit(outcome.code)


def _nothing_placed(launches: int) -> str:
    if not launches:
        return (
            "nothing was placed: libeclip saw no kernel launch in the command; does it use an "
            "NVIDIA GPU?"
        )
    return (
        f"nothing was placed: libeclip saw {launches} launches, and none is of the plan's kernels; "
        f"record the command again (`eclip record`) and plan from that"
    )


def _print_counters(processes: dict[int, dict[str, int]]) -> None:
    screen.print_table(
        "Launches",
        ["process", "launches", "planned", "redirected", "switches", "barriers", "skipped"],
        (
            [
                str(process),
                str(counts["launches"]),
                _share(counts["planned"], counts["launches"]),
                _share(counts["redirected"], counts["launches"]),
                str(counts["switches"]),
                str(counts["barriers"]),
                str(counts["skipped"]),
            ]
            for process, counts in processes.items()
        ),
    )
    if any(counts["graphs"] or counts["foreign_graphs"] for counts in processes.values()):
        screen.print_table(
            "Graphs",
            [
                "process",
                "planned",
                "foreign",
                "kernels",
                "of them planned",
                "launches",
                "updates",
                "anew",
            ],
            (
                [
                    str(process),
                    str(counts["graphs"]),
                    str(counts["foreign_graphs"]),
                    str(counts["graph_kernels"]),
                    _share(counts["graph_planned"], counts["graph_kernels"]),
                    str(counts["graph_launches"]),
                    str(counts["updates"]),
                    str(counts["reinstantiations"]),
                ]
                for process, counts in processes.items()
            ),
        )
    for process, counts in processes.items():
        if counts["contended"]:
            screen.warn(
                f"process {process}: {counts['contended']} planned launches ran on the whole "
                f"device, because another stream used the worker's lane or it was too small"
            )


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.0%})" if whole else "0"

"""``eclip report``: draws run logs, plans and results as one HTML file, and a Chrome trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import eclip
from eclip.cli import screen
from eclip.cli.options import CalibrationOption, ProfilesOption
from eclip.errors import UsageError
from eclip.files import outputs, store
from eclip.planner.case import case_of
from eclip.reports.marks import REPORT_MARK, TRACE_MARK


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Run logs, plans and results, in any number."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the HTML.")] = Path(
        "report.html"
    ),
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Also write a Chrome trace (.json.gz) of one run log."),
    ] = None,
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
) -> None:
    """Draw run logs, plans and results as one HTML file that works offline.

    Files with the same mix, device and load are compared with each other in one chapter.
    """
    if trace is not None and len(files) > 1:
        raise UsageError("--trace takes one run log; give one file, or leave --trace out")
    outputs.check_output(out, REPORT_MARK)
    if trace is not None:
        outputs.check_output(trace, TRACE_MARK)
    for file in files:
        if store.holds_results(file):
            for warning in store.load_results(file).warnings:
                screen.warn(warning)
    with screen.progress_bar("drawing the report"):
        eclip.report(files, out, trace=trace, case=_case(files, calibration, profiles))
    screen.out.print(f"Report: {out}")
    if trace is not None:
        screen.out.print(f"Trace: {trace} (open it in Perfetto)")


def _case(
    files: list[Path], calibration: Path | None, profiles: list[Path] | None
) -> eclip.Case | None:
    """The case of the first run log or plan, with the given calibration and profiles. None if
    neither is given: every plan then has its own case."""
    if calibration is None and not profiles:
        return None
    for file in files:
        if not store.holds_results(file):
            found = eclip.load(file)
            plan = found.plan if isinstance(found, eclip.RunLog) else found
            if isinstance(plan, eclip.Plan):
                return case_of(plan, calibration, profiles or [])
    return None

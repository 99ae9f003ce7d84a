"""``eclip report``: run logs to one HTML file, and a Chrome trace for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import eclip
from eclip.artefacts import outputs
from eclip.cli import screen
from eclip.cli.options import CalibrationOption, ProfilesOption
from eclip.errors import UsageError
from eclip.lab.case import case_of
from eclip.reports.marks import REPORT_MARK, TRACE_MARK


def report(
    files: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run logs of one mix.")],
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
    """Draw run logs of one mix as one HTML file that works offline."""
    if trace is not None and len(files) > 1:
        raise UsageError("--trace takes one run log; give one file, or leave --trace out")
    outputs.check_output(out, REPORT_MARK)
    if trace is not None:
        outputs.check_output(trace, TRACE_MARK)
    with screen.progress_bar("drawing the report") as progress:
        logs = [eclip.load(file, eclip.RunLog) for file in files]
        progress.part_or_end(0.2)
        case = case_of(logs[0].plan, calibration, profiles or [])
        eclip.report(logs, out, trace=trace, case=case)
    screen.out.print(f"Report: {out}")
    if trace is not None:
        screen.out.print(f"Trace: {trace} (open it in Perfetto)")

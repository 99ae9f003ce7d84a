"""``eclip report``: run logs to one HTML file, and a Chrome trace for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from eclip.artefacts import outputs, store
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import RunLog
from eclip.cli import screen, wiring
from eclip.cli.options import CalibrationOption, ProfilesOption
from eclip.errors import UsageError

# What tells our own files from others, which are never replaced.
REPORT = b"eclip report"
TRACE = b"traceEvents"


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
    outputs.check_output(out, REPORT)
    if trace is not None:
        outputs.check_output(trace, TRACE)
    with screen.progress_bar("drawing the report") as progress:
        logs = [store.load(file, RunLog) for file in files]
        plan = logs[0].plan
        constants = wiring.find_calibration(calibration, plan.topology)
        # A search may have chosen other kernels than the other policies had.
        found = [
            one
            for log in logs
            for one in wiring.find_profiles(log.plan.mix, plan.topology, constants, profiles or [])
        ]
        progress.part_or_end(0.5)
        write_report(logs, found, out)
        if trace is not None:
            progress.part_or_end(0.8)
            write_trace(logs[0], found, trace)
    screen.out.print(f"Report: {out}")
    if trace is not None:
        screen.out.print(f"Trace: {trace} (open it in Perfetto)")


def write_report(logs: Sequence[RunLog], profiles: Sequence[Profile], path: Path) -> None:
    from eclip.report import page

    text = page.render(logs, {profile.key: profile for profile in profiles})
    store.save_export(path, text.encode(), REPORT)


def write_trace(log: RunLog, profiles: Sequence[Profile], path: Path) -> None:
    from eclip.report import chrome_trace

    data = chrome_trace.export(log, {profile.key: profile.trace for profile in profiles})
    store.save_export(path, data, TRACE)

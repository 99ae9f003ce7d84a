"""``eclip report``: run logs to one HTML file, and a Chrome trace for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from eclip.artefacts import store
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import RunLog
from eclip.cli import screen, wiring
from eclip.cli.options import CalibrationOption, ProfilesOption
from eclip.errors import UsageError


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
        progress(0.5)
        write_report(logs, found, out)
        if trace is not None:
            write_trace(logs[0], found, trace)
    screen.out.print(f"Report: {out}")
    if trace is not None:
        screen.out.print(f"Trace: {trace} (open it in Perfetto)")


def write_report(logs: Sequence[RunLog], profiles: Sequence[Profile], path: Path) -> None:
    from eclip.reports import page

    text = page.render(logs, {profile.key: profile for profile in profiles})
    store.save_export(path, text.encode(), b"eclip report")


def write_trace(log: RunLog, profiles: Sequence[Profile], path: Path) -> None:
    from eclip.reports import chrome_trace

    data = chrome_trace.export(log, {profile.key: profile.trace for profile in profiles})
    store.save_export(path, data, b"traceEvents")

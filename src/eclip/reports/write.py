"""Writing reports: run logs, their files, or a comparison's outcome to one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eclip.artefacts import store
from eclip.artefacts.runlog import RunLog
from eclip.lab.case import Case, case_of
from eclip.lab.outcome import Outcome
from eclip.reports import chrome_trace, page
from eclip.reports.marks import REPORT_MARK, TRACE_MARK


def write_report(
    logs: RunLog | str | Path | Outcome | Sequence[RunLog | str | Path],
    path: Path,
    trace: Path | None = None,
    case: Case | None = None,
) -> Path:
    """``trace``: also a Chrome trace of the last log, here."""
    if isinstance(logs, Outcome):
        case, read = case or logs.case, list(logs.logs.values())
    else:
        given = [logs] if isinstance(logs, RunLog | str | Path) else logs
        read = [log if isinstance(log, RunLog) else store.load(log, RunLog) for log in given]
    if read and case is None:
        case = case_of(read[0].plan)
    # A search may have chosen other kernels than the other policies had.
    profiles = {
        profile.model: profile
        for log in read
        if case is not None
        for profile in case.profiles_of(log.plan.mix)
    }
    store.save_export(path, page.render(read, profiles).encode(), REPORT_MARK)
    if trace is not None:
        traces = {model: profile.trace for model, profile in profiles.items()}
        store.save_export(trace, chrome_trace.export(read[-1], traces), TRACE_MARK)
    return path

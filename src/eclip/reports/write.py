"""Writing reports: run logs, plans, comparisons, their files or outcomes to one HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from eclip.contest.outcome import Outcome
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.errors import ArtefactError, UsageError
from eclip.files import store
from eclip.files.comparison import Comparison
from eclip.planner.case import Case, case_of
from eclip.reports import chrome_trace, page
from eclip.reports.chapters import Given, Named, chapters_of
from eclip.reports.marks import REPORT_MARK, TRACE_MARK

Reportable = Given | str | Path


def write_report(
    given: Reportable | Sequence[Reportable],
    path: Path,
    trace: Path | None = None,
    case: Case | None = None,
) -> Path:
    """``trace``: a file for a Chrome trace of the last run log. ``case``: its profiles name the
    kernels; the default is every plan's own case."""
    wanted = [given] if isinstance(given, Reportable) else given
    named = [one for item in wanted for one in _read(item)]
    profiles = _profiles(named, case)
    store.save_export(path, page.render(chapters_of(named), profiles), REPORT_MARK)
    if trace is not None:
        logs = [log for one in named for log in _logs(one.what)]
        if not logs:
            raise UsageError("a trace needs a run log; give one")
        traces = {model: profile.trace for model, profile in profiles.items()}
        store.save_export(trace, chrome_trace.export(logs[-1], traces), TRACE_MARK)
    return path


def _read(item: Reportable) -> list[Named]:
    """The contents of a file, with its name; a results file holds any number of comparisons."""
    if not isinstance(item, str | Path):
        return [Named(item)]
    path = Path(item)
    if store.holds_results(path):
        return [Named(one, path.name) for one in store.load_results(path).comparisons]
    found = store.load(path)
    if not isinstance(found, RunLog | Plan | Comparison):
        kind = type(found).__name__.lower()
        raise ArtefactError(f"{path} holds a {kind}; a report needs run logs, plans or results")
    return [Named(found, path.name)]


def _logs(what: Given) -> Iterable[RunLog]:
    if isinstance(what, Outcome):
        return what.logs.values()
    return [what] if isinstance(what, RunLog) else []


def _plans(what: Given) -> Iterable[Plan]:
    if isinstance(what, Outcome):
        return what.plans.values()
    if isinstance(what, RunLog):
        return [what.plan]
    return [what] if isinstance(what, Plan) else []


def _profiles(named: Sequence[Named], case: Case | None) -> dict[ModelKey, Profile]:
    """The profiles of every plan: a search may have chosen other kernels than other policies."""
    found: dict[ModelKey, Profile] = {}
    for what in (one.what for one in named):
        known = case or (what.case if isinstance(what, Outcome) else None)
        for plan in _plans(what):
            if not set(plan.models) <= found.keys():
                known = known or case_of(plan)
                found |= {one.model: one for one in known.profiles_of(plan.mix)}
    return found

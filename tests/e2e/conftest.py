"""Run logs for the report in a browser, made by the builders of the report's unit tests."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from eclip.profile import Profile
from eclip.runlog import RunLog

# Test modules cannot import each other in importlib mode, so the file is run for its builders.
_BUILDERS = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "test_report.py"))


@pytest.fixture(scope="session")
def report_logs() -> list[RunLog]:
    """Three policies of one mix, with names that a careless page would take for markup."""
    make_log, mix = _BUILDERS["make_log"], _BUILDERS["make_mix"](3, "albert<script>ä")
    return [
        make_log("shared", sizes=(132,), mix=mix),
        make_log("eclip", mix=mix),
        make_log("</script>", sizes=(32, 64), mix=mix),
    ]


@pytest.fixture(scope="session")
def report_profiles(report_logs: list[RunLog]) -> dict[str, Profile]:
    worker = report_logs[0].plan.mix.workers[0]
    return {worker.key: _BUILDERS["make_profile"](worker.model)}

"""The command line in a folder of its own, and run logs for the report in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import Cli
from eclip.artefacts.model_key import ModelKey
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import RunLog
from logs import make_log, make_mix, make_profile


@pytest.fixture(scope="session")
def report_logs() -> list[RunLog]:
    """Three policies of one mix, with names that a careless page would take for markup."""
    mix = make_mix(3, "albert<script>ä")
    return [
        make_log("shared", sizes=(132,), mix=mix),
        make_log("eclip", mix=mix),
        make_log("</script>", sizes=(32, 64), mix=mix),
    ]


@pytest.fixture(scope="session")
def report_profiles(report_logs: list[RunLog]) -> dict[ModelKey, Profile]:
    worker = report_logs[0].plan.mix.workers[0]
    return {worker.model: make_profile(worker.model.name)}


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(tmp_path)
    return Cli(monkeypatch, capsys)

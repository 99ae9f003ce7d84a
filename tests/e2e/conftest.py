"""The command line in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import Cli


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(tmp_path)
    return Cli(monkeypatch, capsys)

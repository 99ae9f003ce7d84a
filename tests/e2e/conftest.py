"""The command line in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Cli
from served_core import Driver, Served


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(tmp_path)
    return Cli(monkeypatch, capsys)


@pytest.fixture(scope="module")
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Serves the CONFIG of the module that asks."""
    with Driver(request.module.CONFIG) as driver:
        yield driver


@pytest.fixture
def served(driver: Driver) -> Served:
    return driver.served

"""``eclip`` run in the test's own process, and what every refusal must look like."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import pytest

from eclip.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs ``eclip`` in this process, in a folder of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: object) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["eclip", *map(str, arguments)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        captured = self.capsys.readouterr()
        assert stop.value.code is None or isinstance(stop.value.code, int)
        return Outcome(stop.value.code or 0, captured.out, captured.err)


def assert_refused(outcome: Outcome, *words: str, code: int = 2) -> None:
    """One line for a person that names the fault, the right exit code, nothing on stdout."""
    assert outcome.code == code
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("eclip: ")
    for word in words:
        assert word in lines[0]

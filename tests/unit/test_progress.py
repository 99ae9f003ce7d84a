"""Progress of the API: a line on a terminal or in a notebook, nothing elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

import eclip
from eclip.progress import Progress, ProgressLine, shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_work_shows_its_phase_on_a_terminal_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    eclip.run(eclip.plan("squeezenet:1"), seconds=0.001, warmup=0)
    text = terminal.getvalue()
    assert "running eclip on squeezenet:1: measuring each worker alone" in text
    assert text.endswith("\r\x1b[2K")


def test_nothing_is_shown_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(None, "planning") as progress:
        progress.phase("searching")
    assert capsys.readouterr() == ("", "")


def test_progress_that_is_given_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    mine = Progress()
    with shown(mine, "planning") as progress:
        assert progress is mine


def test_line_has_the_part_done_and_the_time_and_is_not_written_too_often() -> None:
    now, lines = [0.0], list[str]()
    line = ProgressLine("planning a", lines.append, lambda: now[0])
    line.phase("searching")
    for second in range(100):
        now[0] += 0.01
        line.part(second / 100)
    line.close()
    assert lines[0] == "planning a: searching, 0 s"
    assert lines[-2:] == ["planning a: searching, 99%, 1 s", ""] or len(lines) <= 7
    assert len(lines) <= 7

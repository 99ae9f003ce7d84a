"""Signals: each asks once, however often `timeout` and a terminal send it at the same time."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

import pytest

from eclip.cli import screen
from eclip.cli.screen import interrupt


@dataclass
class Heard:
    """Numbers of signals, and a clock that a test sets."""

    numbers: list[int] = field(default_factory=list)
    now_s: float = 100.0

    def clock(self) -> float:
        return self.now_s

    def handle(self, number: int, frame: object) -> None:
        self.numbers.append(number)

    def send(self, number: signal.Signals, after_s: float) -> None:
        self.now_s += after_s
        os.kill(os.getpid(), number)


def test_signals_within_half_a_second_count_once() -> None:
    heard = Heard()
    with interrupt.handled_by(heard.handle, heard.clock):
        heard.send(signal.SIGTERM, 0)
        heard.send(signal.SIGTERM, 0.01)
        heard.send(signal.SIGTERM, 0.45)
        assert heard.numbers == [signal.SIGTERM]
        heard.send(signal.SIGINT, 0.1)
        assert heard.numbers == [signal.SIGTERM, signal.SIGINT]


def test_second_signal_does_not_reach_the_handler_around_a_block_that_has_ended() -> None:
    outer, inner = Heard(), Heard()
    with interrupt.handled_by(outer.handle, outer.clock):
        with interrupt.handled_by(inner.handle, inner.clock):
            inner.send(signal.SIGTERM, 0)
        outer.send(signal.SIGTERM, 0.2)
        assert (inner.numbers, outer.numbers) == ([signal.SIGTERM], [])
        outer.send(signal.SIGTERM, 1)
        assert outer.numbers == [signal.SIGTERM]


def test_bar_ends_the_command_at_the_second_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    monkeypatch.setattr(screen, "err", screen._Console(stderr=True, get_time=heard.clock))
    with screen.progress_bar("working") as progress:
        heard.send(signal.SIGINT, 0)
        heard.send(signal.SIGINT, 0.1)
        assert progress.stopped
        with pytest.raises(interrupt.Interrupt):
            heard.send(signal.SIGINT, 1)

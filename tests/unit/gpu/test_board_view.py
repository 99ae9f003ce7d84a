"""What people see of a board, while others write it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from eclip.core import rules
from eclip.core.plan import P99_GAIN, Promise
from eclip.core.rules import (
    BUSY_SINCE,
    DEADLINE,
    HEARTBEAT,
    LEFT,
    NAME_BYTES,
    SERVED,
    STOPPED_NS,
    TAIL,
    YIELDED,
)
from eclip.errors import ArtefactError, UsageError
from eclip.gpu.board import VARIABLE, open_board
from eclip.gpu.board_view import SeenWorker, look, look_around

MS = 1_000_000
PROMISE = Promise(bound_ns=5 * MS, request_ns=MS, some_ns=2 * MS, none_ns=MS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "board"


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def only(path: Path) -> SeenWorker:
    (worker,) = look(path).workers
    return worker


def test_workers_are_seen_with_what_they_say(path: Path) -> None:
    with open_board(path) as board:
        service = board.claim(PROMISE, "bert", beats=False)
        board.claim(None, "vgg19")
        row = board.words[service]
        ahead = now_ns() + 10**12  # so that no time of the test counts
        row[[HEARTBEAT, BUSY_SINCE, DEADLINE, LEFT]] = ahead, ahead, ahead + 3 * MS, MS
        row[[SERVED, YIELDED, TAIL]] = 7, 3, 4 * MS
        seen = look(path)
        first, second = seen.workers
        assert (first.name, first.tier, first.state) == ("bert", "service", "busy")
        assert (first.requests, first.yields, first.p99_ms, first.bound_ms) == (7, 3, 4.0, 5.0)
        assert first.slack_ms == pytest.approx((ahead + 2 * MS - seen.seen_ns) / 1e6)
        assert (second.name, second.tier, second.state) == ("vgg19", "background", "idle")
        assert (second.bound_ms, second.slack_ms, second.p99_ms) == (None, None, None)
    assert look(path).workers == ()


def test_a_service_is_seen_with_its_account_also_where_another_row_holds_it(path: Path) -> None:
    with open_board(path) as board:
        promise = msgspec.structs.replace(PROMISE, gain=P99_GAIN)
        first, second = (board.claim(promise, beats=False) for _ in range(2))
        board.claim(PROMISE, beats=False)
        board.words[second, rules.ACCOUNT] = first
        board.words[first, [rules.CREDIT, rules.COUNTED, rules.LATE]] = -1_500_000, 400, 6
        *both, without = look(path).workers
        for seen in both:
            assert (seen.credit, seen.strict, seen.late, seen.counted) == (-1.5, "spent", 6, 400)
        assert (without.credit, without.strict, without.late) == (None, None, None)
        board.words[first, rules.STRICT] = 0
        assert {seen.strict for seen in look(path).workers[:2]} == {""}


@pytest.mark.parametrize(
    ("busy_ns", "silent_ns", "state"),
    [(None, 0, "idle"), (0, 0, "busy"), (51 * MS, 0, "hung"), (0, STOPPED_NS + MS, "stopped")],
)
def test_states_are_those_that_others_decide_by(
    path: Path, busy_ns: int | None, silent_ns: int, state: str
) -> None:
    with open_board(path) as board:
        row = board.words[board.claim(PROMISE, beats=False)]
        now = now_ns()
        row[HEARTBEAT] = now - silent_ns if silent_ns else now + 10**12
        if busy_ns is not None:
            row[BUSY_SINCE] = now - busy_ns if busy_ns else now + 10**12
        assert only(path).state == state


def test_a_long_name_is_cut(path: Path) -> None:
    with open_board(path) as board:
        board.claim(None, "é" * NAME_BYTES)
        assert only(path).name == "é" * (NAME_BYTES // 2)


def test_looking_writes_nothing(path: Path) -> None:
    with open_board(path) as board:
        board.claim(PROMISE, "bert", beats=False)
        before, times = path.read_bytes(), path.stat().st_mtime_ns
        look(path)
        assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, times)


def test_what_is_no_board_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtefactError, match="cannot read the board"):
        look(path)
    path.write_bytes(b"x" * 100)
    path.chmod(0o600)
    pipe = path.with_name("pipe")
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ArtefactError, match="is no board of eclip"):
        look(pipe)
    with pytest.raises(ArtefactError, match="is no board of eclip"):
        look(path)
    monkeypatch.setenv(VARIABLE, str(path.parent))
    with pytest.raises(UsageError, match="there is no board"):
        look_around()

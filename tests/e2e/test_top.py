"""``eclip top``, as a person meets it who wants to know who shares a GPU."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Cli, assert_refused
from eclip.core.plan import Promise
from eclip.gpu.board import VARIABLE, Board, board_path, open_board
from waiting import until

PROMISE = Promise(bound_ns=5_000_000, request_ns=1_000_000, some_ns=0, none_ns=0)


@pytest.fixture
def boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Board, Board]]:
    """Of two GPUs, with a service on one and background on the other."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with open_board(board_path("GPU-1")) as first, open_board(board_path("GPU-2")) as second:
        first.claim(PROMISE, "bert")
        second.claim(None, "training")
        yield first, second


def test_all_boards_of_the_user_are_shown(cli: Cli, boards: tuple[Board, Board]) -> None:
    shown = cli("top", "--once")
    assert shown.code == 0, shown.err
    for word in ("GPU-1: 1 worker", "bert", "service", "GPU-2: 1 worker", "training", "background"):
        assert word in shown.out
    told = cli("top", "--json").data
    assert [one["workers"][0]["name"] for one in told] == ["bert", "training"]
    (one,) = cli("top", "--json", "--board", board_path("GPU-2")).data
    assert one["workers"][0]["tier"] == "background"


def test_bad_input_is_one_line(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert_refused(cli("top"), "there is no board", "eclip exec --service", "ECLIP_BOARD")
    assert_refused(cli("top", "--board", "nowhere"), "cannot read the board nowhere")
    assert_refused(cli("top", "--seconds", 0), "must be at least 0.1")
    Path("text").write_text("no board")
    Path("text").chmod(0o600)
    assert_refused(cli("top", "--board", "text"), "is no board of eclip")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_repaints_on_a_terminal_until_told_to_end(
    boards: tuple[Board, Board], number: signal.Signals, code: int
) -> None:
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-c", "from eclip.cli import main; main()", "top"]
        process = subprocess.Popen(
            [*command, "--seconds", "0.1"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"COLUMNS": "160", "TERM": "xterm"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(theirs)
        said = b""

        def painted_twice() -> bool:
            nonlocal said
            said += os.read(ours, 4096)
            return said.count(b"bert") >= 2

        assert until(painted_twice)
        process.send_signal(number)
        assert process.wait(60) == code
        assert b"Traceback" not in said
    finally:
        os.close(ours)

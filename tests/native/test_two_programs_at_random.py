"""Two programs at random: one of them is killed or stopped, or does whatever it likes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from eclip.core.rules import (
    BACKGROUND,
    YIELDED,
)
from eclip.gpu.board import Board, open_board
from native_build import Native
from two_programs import BUSY_MS, STEADY, Service, goes_on, now_ns, rows_of
from unmodified import FIRST, Running, running
from waiting import until

# Random programs' host functions wait for the program; many stretches are wanted, of graphs too.
QUICK = {"ECLIP_PATIENCE_US": "300", "ECLIP_GRAIN_US": "10", "ECLIP_KERNEL_US": "4"}


SERVING = """
while True:
    launch(2000)
    synchronise()
    say(1)
"""


# What `eclip top` does, without its screen.
WATCHING = """
import sys
from pathlib import Path
from eclip.gpu.board_view import look
print("looking", flush=True)
while True: look(Path(sys.argv[1]))
"""


@contextlib.contextmanager
def _watching(board: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", WATCHING, str(board)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # of a board that has gone it says so
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "looking\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def _stood_still(shot_ns: int, other: Running) -> int:
    """From the shot until it launches again; what it began before does not count."""
    number = other.launched + 1
    assert until(partial(other.has_launched, number), 0.001)
    return int(other.words[FIRST + number]) - shot_ns


def _round(native: Native, folder: Path, dice: random.Random) -> int:
    """Kill or stop one of three processes or remove the board's file, at a random moment: how long
    the other program then stood still, or the service where both are left."""
    path = folder / "board"
    with (
        open_board(path) as board,
        running(native, folder, SERVING, "service") as service,
        running(native, folder, STEADY, "background") as background,
        _watching(path) as watcher,
    ):
        assert goes_on(service)
        assert until(lambda: len(rows_of(board, BACKGROUND)) == 1)
        victims: list[subprocess.Popen[str] | Path]
        victims = [service.child, background.child, watcher, path]
        (victim,) = dice.choices(victims, [4, 3, 1, 1])
        time.sleep(dice.random() * 0.02)
        if isinstance(victim, Path):
            victim.unlink()
        else:
            victim.send_signal(dice.choice([signal.SIGKILL, signal.SIGSTOP]))
        stood_ns = _stood_still(now_ns(), background if victim is service.child else service)
        # Beside a service that is always busy it may take its time, as before.
        assert victim is background.child or goes_on(background, 1)
        return stood_ns


def _shoot(native: Native, folder: Path, rounds: int, seed: int) -> list[float]:
    """Of every round, in ms."""
    dice = random.Random(seed)
    found = []
    for number in range(rounds):
        place = folder / str(number)
        place.mkdir()
        found.append(_round(native, place, dice) / 1e6)
        shutil.rmtree(place)
    return found


def test_whoever_is_left_goes_on(native: Native, tmp_path: Path) -> None:
    """One is killed or stopped, or the board's file is removed."""
    assert max(_shoot(native, tmp_path, 6, 1)) < BUSY_MS


@pytest.mark.long
def test_whoever_is_left_goes_on_a_thousand_times(native: Native, tmp_path: Path) -> None:
    found = np.sort(_shoot(native, tmp_path, 1000, 2))
    print(f"stood still: p50 {found[500]:.1f} ms, p99 {found[990]:.1f}, at most {found[-1]:.1f}; ")
    print(f"longer than 200 ms: {(found > 200).sum()}")
    assert found[-1] < BUSY_MS


@pytest.mark.parametrize("flavour", ["asan", "tsan"])
@pytest.mark.parametrize("tier", ["service", "background"])
def test_random_programs_with_a_tier_under_a_sanitizer(
    native: Native, service: Service, tmp_path: Path, flavour: str, tier: str
) -> None:
    service.raise_busy(launches=False)
    done = native.run(
        f"{flavour}/fuzz",
        *("--programs", 400, "--threads", 3, "--unplanned", 1, "--seed", 50),
        preload=False,  # it is linked in
        ECLIP_TIER=tier,
        ECLIP_BOARD=str(tmp_path / "board"),
        **QUICK,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer of this compiler does not know this kernel's address layout")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_random_programs_are_the_same_while_they_give_way(
    native: Native, board: Board, service: Service, tmp_path: Path, planned: bool, threads: int
) -> None:
    assert fuzz(native, board, service, tmp_path, planned, threads, 1000, 30 + threads) > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(300, 310))
def test_many_random_programs_are_the_same_while_they_give_way(
    native: Native, board: Board, service: Service, tmp_path: Path, seed: int
) -> None:
    planned, threads = bool(seed % 2), 1 + seed % 3
    assert fuzz(native, board, service, tmp_path, planned, threads, 10_000, seed) > 0


def fuzz(
    native: Native,
    board: Board,
    service: Service,
    folder: Path,
    planned: bool,
    threads: int,
    programs: int,
    seed: int,
) -> int:
    """How often they gave way; a difference is an error."""
    words = ("--programs", programs, "--threads", threads, "--unplanned", int(not planned))
    child = subprocess.Popen(
        [str(native.folder / "plain" / "fuzz"), "--seed", str(seed), *map(str, words)],
        env={
            **os.environ,
            "LD_PRELOAD": str(native.library),
            "ECLIP_TIER": "background",
            "ECLIP_BOARD": str(folder / "board"),
            **QUICK,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    dice = random.Random(seed)
    yielded = 0
    while child.poll() is None:
        service.raise_busy(launches=dice.random() < 0.5)
        time.sleep(dice.random() * 0.002)
        service.clear_busy()
        time.sleep(dice.random() * 0.002)
        yielded = max([yielded, *board.words[rows_of(board, BACKGROUND), YIELDED].tolist()])
    out, errors = child.communicate()
    assert child.returncode == 0, out + errors[-4000:]
    assert "no difference" in out
    return yielded

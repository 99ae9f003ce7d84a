"""Two programs at random: one of them is killed or stopped, or does whatever it likes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from eclip.devices.gpu.board import Board
from eclip.runtime.reactions import (
    BACKGROUND,
    SERVICE,
    YIELDED,
)
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


def _stood_still(dice: random.Random, victim: Running, other: Running) -> int:
    """From the shot until the other launches again; what it began before does not count."""
    victim.child.send_signal(dice.choice([signal.SIGKILL, signal.SIGSTOP]))
    shot, before = now_ns(), other.launched
    assert until(lambda: other.launched > before + 1, 0.001)
    return int(other.words[FIRST + before + 1]) - shot


def _shoot(native: Native, board: Board, folder: Path, rounds: int, seed: int) -> float:
    """Kill or stop either side at a random moment; the longest that the other then stood still."""
    dice = random.Random(seed)
    longest_ns = 0
    for _ in range(rounds):
        with (
            running(native, folder, SERVING, "service") as service,
            running(native, folder, STEADY, "background") as background,
        ):
            assert goes_on(service)
            assert until(lambda: len(rows_of(board, BACKGROUND)) == 1)
            both = (service, background) if dice.random() < 0.6 else (background, service)
            time.sleep(dice.random() * 0.02)
            longest_ns = max(longest_ns, _stood_still(dice, *both))
        assert until(lambda: rows_of(board, SERVICE) == rows_of(board, BACKGROUND) == [])
    return longest_ns / 1e6


def test_either_goes_on_when_the_other_is_killed_or_stopped(
    native: Native, board: Board, tmp_path: Path
) -> None:
    assert _shoot(native, board, tmp_path, 6, 1) < BUSY_MS


@pytest.mark.long
def test_either_goes_on_a_thousand_times(native: Native, board: Board, tmp_path: Path) -> None:
    assert _shoot(native, board, tmp_path, 1000, 2) < BUSY_MS


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

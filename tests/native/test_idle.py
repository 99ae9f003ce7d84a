"""What background leaves idle, on a driver with a clock of its own: a busy machine changes nothing.

How long a service lingers is seen on the real clock; there the best of many requests count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from eclip.core.rules import BUSY_SINCE, IDLE, WORDS
from eclip.gpu.board import Board
from native_build import Native
from unmodified import running
from waiting import until

# The device is always behind the host: what is lost is lost by pacing and by holds.
HOST_NS = 3_000
ALIKE, MIXED = [9_000] * 40, [20_000, 30_000, 100_000, 200_000]
DIFFERENT = [*range(5_000, 25_000, 250)]  # each is measured once in a round
SERVICE = ("--rate", 400, "--request-ns", 1_200_000)
BESIDE = ("--beside", 1)


def measure(
    native: Native, folder: Path, kernels: Iterable[int], *words: object
) -> dict[str, float]:
    done = native.run(
        "clocked/idle",
        *("--host-ns", HOST_NS, *words, *kernels),
        preload=True,
        ECLIP_TIER="background",
        ECLIP_BOARD=str(folder / "board"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_what_a_service_takes_of_the_device_makes_no_stretch_shorter(
    native: Native, board: Board, tmp_path: Path
) -> None:
    """The time that stretches in flight wait for a service is no kernel's."""
    beside = measure(native, tmp_path, DIFFERENT, *SERVICE, *BESIDE)
    sliced = measure(native, tmp_path, DIFFERENT, *SERVICE)
    assert beside["busy"] == pytest.approx(sliced["busy"], abs=0.02)
    assert sliced["stretch_us"] > 0.95 * beside["stretch_us"]


@pytest.mark.parametrize("kernels", [ALIKE, MIXED])
def test_a_launch_that_was_held_is_made_once_the_service_has_lingered(
    native: Native, board: Board, tmp_path: Path, kernels: list[int]
) -> None:
    """It looks without a break then: a launch takes 2.5 of these microseconds."""
    assert measure(native, tmp_path, kernels, *SERVICE, *BESIDE)["resumed_us"] < 5


LINGERS = f"""
board = mmap.mmap(os.open(os.environ["ECLIP_BOARD"], os.O_RDWR), 0)
rows = (ctypes.c_int64 * (len(board) // 8)).from_buffer(board)
while True:
    time.sleep(0.001)
    launch(0)
    synchronise()
    done = now()
    while rows[{WORDS + BUSY_SINCE}] != {IDLE}: pass
    say(1, 80_000 < now() - done < 130_000)
"""


def test_a_service_lingers_no_longer_than_it_means_to(
    native: Native, board: Board, tmp_path: Path
) -> None:
    """100 us after its work is done. A timer is 50 us late where nobody asks for less; then hardly
    one in a hundred comes in time."""
    with running(native, tmp_path, LINGERS, "service") as program:
        assert until(lambda: program.words[1] >= 50)
        assert program.launched < 50 * program.words[1]

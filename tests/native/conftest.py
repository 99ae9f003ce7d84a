"""libeclip, the stand-in driver and the programs on it, which make builds before the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eclip.gpu.board import Board, open_board
from hip_bench import StandIn, standing_in
from native_build import Native
from standin_gpu import StandinGpu
from two_programs import Service

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def native() -> Native:
    for tool in ("g++", "make", "strip"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing; install it, then: make native-tests")
    # Asks whether all is built from the source as it is. What a make around us was told is not
    # meant for this one.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    asked = subprocess.run(
        ["make", "-q", "-C", str(ROOT / "native"), "tests", "library"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        pytest.fail(
            "libeclip is not built for the tests, or is older than its source: make native-tests"
            f"\n{asked.stderr}".rstrip(),
            pytrace=False,
        )
    return Native(ROOT / "native" / "build")


@pytest.fixture
def hip(native: Native, tmp_path: Path) -> Iterator[StandIn]:
    with standing_in(tmp_path) as stand_in:
        yield stand_in


@pytest.fixture(scope="session")
def gpu(native: Native) -> StandinGpu:
    return StandinGpu(native.standin)


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    with open_board(tmp_path / "board") as opened:
        yield opened


@pytest.fixture
def service(board: Board) -> Iterator[Service]:
    made = Service(board)
    yield made
    made.close()

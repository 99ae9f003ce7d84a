"""The frontier and the recorder decide the same in Python and in libeclip."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from eclip.gpu.commands import Recorder
from frontier import FOLLOW, HOME, Frontier
from native_build import Native

PROGRAMS = 3000
LANES = 6
CALL, DRAINED, DEVICE_DRAINED = 0, 1, 2
Step = tuple[int, int, int, int]  # what, stream, wish, lanes that would be found empty


@pytest.fixture(scope="module")
def libeclip(native: Native) -> ctypes.CDLL:
    return ctypes.CDLL(str(native.library))


def random_program(dice: random.Random) -> tuple[list[int], list[Step]]:
    kinds = [dice.choice((1, 2)) for _ in range(dice.randint(1, 5))]
    steps: list[Step] = []
    for _ in range(dice.randint(1, 60)):
        what = dice.choices((CALL, DRAINED, DEVICE_DRAINED), (20, 2, 1))[0]
        wish = dice.choice((HOME, FOLLOW, *range(LANES)))
        finished = dice.getrandbits(LANES) if dice.random() < 0.3 else 0
        steps.append((what, dice.randint(0, len(kinds)), wish, finished))
    return kinds, steps


def decide_in_python(kinds: Sequence[int], steps: Sequence[Step], seen: Counter[str]) -> list[int]:
    frontier = Frontier(kinds, LANES)
    written: list[int] = []
    for what, stream, wish, finished in steps:
        if what == CALL:
            queue, barriers, skipped = frontier.call(stream, wish, finished)
            written += [queue, skipped, len(barriers), *itertools.chain(*barriers)]
            seen["barriers"] += len(barriers)
            seen["skipped"] += skipped
        elif what == DRAINED:
            frontier.drained(stream)
        else:
            frontier.device_drained()
    return written


def decide_in_libeclip(
    libeclip: ctypes.CDLL, kinds: Sequence[int], steps: Sequence[Step], apart: int = 1
) -> list[int]:
    program = np.array(steps, dtype=np.int64)
    every_kind = np.array([0, *kinds], dtype=np.int32)
    out = np.zeros(len(steps) * (3 * (LANES + 3) + 3), dtype=np.int32)
    length = libeclip.eclip_frontier(
        ctypes.c_int(len(every_kind)),
        every_kind.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(apart),
        ctypes.c_int(len(steps)),
        program.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
    )
    return [int(word) for word in out[:length]]


@pytest.mark.parametrize("apart", [1, 2**24, 2**24 + 1, 2**29])
def test_the_frontier_decides_alike(libeclip: ctypes.CDLL, apart: int) -> None:
    dice = random.Random(5)
    seen: Counter[str] = Counter()
    for number in range(PROGRAMS):
        kinds, steps = random_program(dice)
        ours = decide_in_python(kinds, steps, seen)
        assert decide_in_libeclip(libeclip, kinds, steps, apart) == ours, (number, kinds, steps)
    assert min(seen["barriers"], seen["skipped"]) > PROGRAMS  # they are worth comparing


def test_a_stream_whose_number_no_lane_can_hold_stays_at_home(libeclip: ctypes.CDLL) -> None:
    steps = [(CALL, stream, lane, 0) for stream in (1, 2, 1) for lane in range(LANES)]
    decided = decide_in_libeclip(libeclip, [1, 2], steps, apart=2**32)
    assert decided == [HOME, 0, 0] * len(steps)


class _Nodes:
    def __init__(self) -> None:
        self.count = 0
        self.written: list[int] = []

    def command(self, command: int, after: Sequence[int]) -> int:
        self.written += [command, len(after), *after]
        self.count += 1
        return self.count - 1

    def join(self, after: Sequence[int]) -> int:
        return self.command(-1, after)


def test_the_recorder_records_alike(libeclip: ctypes.CDLL) -> None:
    dice = random.Random(6)
    for _ in range(PROGRAMS):
        steps = [-1 if dice.random() < 0.3 else number for number in range(dice.randint(1, 80))]
        nodes = _Nodes()
        recorder = Recorder(nodes)
        for step in steps:
            if step < 0:
                recorder.barrier()
            else:
                recorder.command(step)
        program = np.array(steps, dtype=np.int32)
        out = np.zeros(4 * len(steps) * 2 + 8, dtype=np.int32)
        length = libeclip.eclip_record(
            ctypes.c_int(len(steps)),
            program.ctypes.data_as(ctypes.c_void_p),
            out.ctypes.data_as(ctypes.c_void_p),
        )
        assert out[:length].tolist() == nodes.written

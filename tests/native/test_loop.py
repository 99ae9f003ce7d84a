"""The driving loop on the stand-in driver: order, depth and counters under random rules.

The stand-in's kernels run on real threads, in any order that streams and events allow.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.requests import BARRIERS, MOVES, PAUSE_NS, YIELDS
from eclip.core.rules import BACKGROUND, BOUND, NONE, SERVICE, SOME, YIELD, Ints, Rules
from eclip.errors import DeviceError
from eclip.gpu.worker_loop import Runner
from standin_gpu import (
    BEGIN,
    END,
    WHERE,
    WHO,
    Log,
    Part,
    StandinGpu,
    Worker,
    ended,
    make_board,
    make_worker,
    meanwhile,
    place_on,
    raise_busy,
    rules,
    set_idle,
)

Stretches = list[list[Part]]
LANES = 3
REQUESTS = 400
MS = 1_000_000


def random_stretches(random: np.random.Generator, sizes: Sequence[int]) -> Stretches:
    """Every kernel on some lane: those that follow each other on the same one are a graph."""
    made: Stretches = []
    for size in sizes:
        lanes = random.integers(LANES, size=size).tolist()
        made.append(
            [(lane, [_micros(random) for _ in group]) for lane, group in itertools.groupby(lanes)]
        )
    return made


def _micros(random: np.random.Generator) -> int:
    return int(random.choice([0, 0, 0, 30]))


def moved(random: np.random.Generator, sizes: Sequence[int], lane: int) -> Stretches:
    return [[(lane, [_micros(random) for _ in range(size)])] for size in sizes]


def random_rules(random: np.random.Generator, services: int, moves: int) -> Rules:
    return rules(
        *(
            (
                int(random.integers(1, 1 << services)),
                int(random.integers(3)),
                int(random.integers(YIELD, moves + 1)),
            )
            for _ in range(random.integers(1, 4))
        )
    )


def random_worker(
    gpu: StandinGpu, random: np.random.Generator, board: Ints, row: int, services: int
) -> Worker:
    sizes = random.integers(1, 4, size=random.integers(1, 7)).tolist()
    moves = random.permutation(LANES)[: random.integers(LANES + 1)].tolist()
    everybody = (1 << len(board)) - 1
    active = [everybody, 1 << row] if random.integers(2) else [everybody]
    service = board[row, 0] == SERVICE
    return make_worker(
        gpu,
        row,
        [random_stretches(random, sizes) for _ in active],
        [moved(random, sizes, lane) for lane in moves],
        streams=[gpu.stream() for _ in range(LANES)],
        place=place_on(board, row),
        depth=int(random.integers(1, 3)),
        active=active,
        rules=random_rules(random, services, len(moves)),
        bound_ns=int(board[row, BOUND]) if service else 0,
        floor=0.0 if service else float(random.choice([0.0, 0.2])),
    )


# --- What the log must say --------------------------------------------------------------------


def check_order(worker: Worker, log: Log, requests: int) -> None:
    """Kernels one after another, as they were submitted."""
    ran = worker.ran(log)
    assert (ran[:, WHO] % 1000).tolist() == list(range(worker.kernels)) * requests
    assert np.all(ran[1:, BEGIN] >= ran[:-1, END])


def check_depth(worker: Worker, log: Log) -> None:
    """When a stretch is launched, the one ``depth`` before it is done."""
    begun, ends = stretch_times(worker, log)
    deep = worker.depth
    assert np.all(ends[:-deep] <= begun[deep:])
    heads = np.arange(0, len(begun), worker.stretches)[1:]
    assert np.all(ends[heads - 1] <= begun[heads])


def stretch_times(worker: Worker, log: Log) -> tuple[Ints, Ints]:
    """When each stretch was launched, and when its last kernel ended."""
    launches = worker.launches(log)
    parts = [worker.parts[handle] for handle in launches[:, WHO].tolist()]
    begins = np.flatnonzero([part.begins for part in parts])
    done = np.cumsum([part.kernels for part in parts])
    ends = worker.ran(log)[done - 1, END]
    return launches[begins, BEGIN], ends[np.append(begins[1:], len(parts)) - 1]


def check_counters(worker: Worker, log: Log, rows: Ints) -> None:
    """Barriers and moves are those that were launched."""
    launches = worker.launches(log)
    parts = [worker.parts[handle] for handle in launches[:, WHO].tolist()]
    heads = [at for at, part in enumerate(parts) if part.stretch == 0 and part.begins]
    for row, (start, end) in zip(rows, itertools.pairwise([*heads, len(parts)]), strict=True):
        lanes = launches[start:end, WHERE]
        ways = {part.stretch: part.way for part in parts[start:end]}
        assert row[BARRIERS] == np.count_nonzero(lanes[1:] != lanes[:-1])
        assert row[MOVES] == sum(way >= worker.variants for way in ways.values())
        assert sorted(ways) == list(range(worker.stretches))
        assert (row[YIELDS] > 0) == (row[PAUSE_NS] > 0)
        assert row[YIELDS] <= worker.stretches


def check_all(worker: Worker, log: Log, rows: Ints) -> None:
    check_order(worker, log, len(rows))
    check_depth(worker, log)
    check_counters(worker, log, rows)


# --- Random plans -----------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_kernels_take_effect_in_submission_order_whatever_reactions_are_taken(
    gpu: StandinGpu, seed: int, lazy: bool
) -> None:
    """Two services that only the test raises and lowers, and three workers that react to them."""
    random = np.random.default_rng(seed)
    board = make_board(SERVICE, SERVICE, BACKGROUND, BACKGROUND, BACKGROUND)
    board[:2, [SOME, NONE]] = 2 * MS, MS
    gpu.behave(seed, lazy)
    log = gpu.watch()
    workers = [random_worker(gpu, random, board, row, services=2) for row in (2, 3, 4)]
    runners = [worker.runner(most_requests=REQUESTS) for worker in workers]

    def flip() -> None:
        row = int(random.integers(2))
        if random.integers(2):
            raise_busy(board, row, slack_ns=int(random.integers(3 * MS)))
        else:
            set_idle(board, row)
        time.sleep(random.exponential(0.0005))

    with meanwhile(flip):
        for runner in runners:
            runner.start()
        ended(*runners)
    rows = [runner.rows() for runner in runners]
    assert [len(served) for served in rows] == [REQUESTS] * 3
    for worker, served in zip(workers, rows, strict=True):
        check_all(worker, log, served)


def random_arrivals(random: np.random.Generator, count: int) -> Ints:
    """Some at once, some spread over a few milliseconds."""
    offsets = np.cumsum(random.exponential(0.3 * MS, count) * random.integers(0, 2, count))
    return time.monotonic_ns() + offsets.astype(np.int64)


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32), services=st.integers(1, 3), background=st.integers(0, 2))
def test_no_set_of_workers_waits_for_ever(
    gpu: StandinGpu, seed: int, services: int, background: int
) -> None:
    """All have rules about all services, and all requests are served."""
    random = np.random.default_rng(seed)
    board = make_board(*[SERVICE] * services, *[BACKGROUND] * background)
    board[:services, BOUND] = random.integers(MS, 1000 * MS, services)
    board[:services, NONE] = board[:services, BOUND] // 4
    board[:services, SOME] = board[:services, BOUND] // 2
    gpu.behave(seed % 1000, bool(random.integers(2)))
    log = gpu.watch()
    workers = [random_worker(gpu, random, board, row, services) for row in range(len(board))]
    runners: list[Runner] = []
    for worker in workers:
        arrivals = random_arrivals(random, 12) if random.integers(3) else None
        runners.append(worker.runner(arrivals=arrivals, most_requests=12))
    for runner in runners:
        runner.start()
    ended(*runners)
    for worker, runner in zip(workers, runners, strict=True):
        served = runner.rows()
        assert len(served) == 12
        check_all(worker, log, served)
        if worker.number < services:
            assert served[:, YIELDS].max() <= 2
    assert gpu.times_compiled() == 1  # and never in the middle of a run


def test_ways_of_other_lengths_are_refused(gpu: StandinGpu) -> None:
    """The loop would take stretches of one variant for those of the next."""
    two: Stretches = [[(0, [0])], [(0, [0])]]
    with pytest.raises(DeviceError, match="other stretches than its plan"):
        make_worker(gpu, 0, [two], [two[:1]], streams=[gpu.stream()])

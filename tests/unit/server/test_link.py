"""What a front and the device process share, and counters: memory whose words have one writer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eclip.core.requests import (
    ARRIVAL,
    DUE,
    END,
    EXPIRES,
    PROGRAM,
    SLOT,
    START,
    WITH_RESULT,
    Ring,
)
from eclip.core.requests import ROWS as REQUEST_ROWS
from eclip.errors import DeviceError
from eclip.server.counters import Count, CounterPages, add, count, count_in, count_refused
from eclip.server.front.status import p99_ms, percentile_ms
from eclip.server.link import Signal, SlotLayout, Slots, allocate, map_rings, rings_bytes
from eclip.server.messages import Reason
from waiting import PATIENCE_S

# --- Rings --------------------------------------------------------------------------------------

ROWS = 16


def shared_ring() -> tuple[Ring, int]:
    """A ring, and the descriptor of its memory."""
    memory = allocate("eclip-test", rings_bytes([ROWS]))
    (ring,) = map_rings(os.dup(memory), [ROWS])
    return ring, memory


def put(ring: Ring, number: int) -> None:
    """Words that all tell the number."""
    ring.put(number, number, number, program=number, rows=number, due_ns=number)


def told(ring: Ring, number: int) -> set[int]:
    row = ring.row(number)
    return {row[word] for word in (ARRIVAL, EXPIRES, SLOT, PROGRAM, REQUEST_ROWS, DUE)}


def test_rings_of_one_memory_are_apart() -> None:
    memory = allocate("eclip-test", rings_bytes([2, 3, 1]))
    ours, theirs = map_rings(os.dup(memory), [2, 3, 1]), map_rings(memory, [2, 3, 1])
    for number in range(3):
        put(ours[1], number)
    assert [ring.submitted for ring in theirs] == [0, 3, 0]
    assert [told(theirs[1], number) for number in range(3)] == [{0}, {1}, {2}]
    theirs[1].answer(5, 6, WITH_RESULT)
    assert [ring.answered for ring in ours] == [0, 1, 0]
    assert not ours[0].words.any() and not ours[2].words.any()


_ANSWERER = """
import sys
from eclip.core.requests import ARRIVAL, WITH_RESULT
from eclip.server.link import map_rings
(ring,) = map_rings(int(sys.argv[1]), [int(sys.argv[2])])
while True:
    while ring.open:
        number = ring.row(ring.answered)[ARRIVAL]
        ring.answer(number, number, WITH_RESULT)
"""


@contextlib.contextmanager
def other_process(memory: int, program: str) -> Iterator[subprocess.Popen[bytes]]:
    """At the other end of the ring, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(memory), str(ROWS)],
        pass_fds=[memory],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        os.close(memory)


def test_two_processes_lose_and_double_nothing() -> None:
    """As many rows as take the counts beyond two bytes."""
    total, seen = 70_000, 0
    ring, memory = shared_ring()
    with other_process(memory, _ANSWERER) as answerer:
        while seen < total:
            while ring.submitted < min(seen + ROWS, total):
                put(ring, ring.submitted)
            while seen < ring.answered:
                assert (ring.row(seen)[START], ring.row(seen)[END]) == (seen, seen)
                seen += 1
            assert answerer.poll() is None


_WRITER = """
import sys
from eclip.server.link import map_rings
(ring,) = map_rings(int(sys.argv[1]), [int(sys.argv[2])])
while True:
    number = ring.submitted
    if number - ring.answered < int(sys.argv[2]):
        ring.put(number, number, number, program=number, rows=number, due_ns=number)
"""


def test_a_writer_that_is_killed_leaves_whole_rows() -> None:
    """At whatever instruction it dies, what can be read is a beginning of what it wrote."""
    ring, memory = shared_ring()

    def read() -> None:
        while ring.open:
            assert told(ring, ring.answered) == {ring.answered}
            ring.answer(0, 0, WITH_RESULT)

    with other_process(memory, _WRITER):
        while ring.answered < 3_000:
            read()
    read()


def test_a_signal_wakes_and_is_cleared() -> None:
    with Signal() as signal:
        signal.raise_()
        signal.raise_()
        signal.clear()
        signal.clear()  # nothing there is no error
        with pytest.raises(BlockingIOError):
            os.eventfd_read(signal.descriptor)


# --- Slots ------------------------------------------------------------------------------------

LAYOUT = SlotLayout(inputs=(96, 40), outputs=(64,), count=3)


@given(
    slot=st.integers(0, 2),
    values=st.lists(st.integers(-100, 100), min_size=1, max_size=8),
    text=st.binary(max_size=40),
)
def test_tensors_come_back_as_they_were(slot: int, values: list[int], text: bytes) -> None:
    with Slots.create(LAYOUT) as slots:
        numbers = np.array(values, dtype=np.int64)
        slots.array(slot, 2, numbers.shape, numbers.dtype)[...] = numbers
        slots.put_bytes(slot, 1, text, (len(text),))
        assert slots.read(slot, 2, numbers.dtype).tolist() == values
        assert slots.get_bytes(slot, 1) == (text, (len(text),))
        for other in {0, 1, 2} - {slot}:
            assert not slots.room(other, 2).any()


def test_a_tensor_that_does_not_fit_is_refused() -> None:
    with Slots.create(LAYOUT) as slots:
        with pytest.raises(DeviceError, match="65 bytes is given, and a slot has room for 64"):
            slots.array(0, 2, (65,), np.dtype(np.int8))
        with pytest.raises(DeviceError, match="room for 40"):
            slots.put_bytes(0, 1, bytes(41), (41,))


def test_an_error_is_one_line_that_fits() -> None:
    with Slots.create(LAYOUT) as slots:
        slots.put_line(2, "it\nfailed")
        assert slots.get_line(2) == "it failed"
        slots.put_line(2, "ü" * 10_000)
        assert 400 < len(slots.get_line(2)) < 10_000


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DeviceError, match="MiB of shared memory"):
        allocate("eclip-test", 1 << 60)


# --- Counters ---------------------------------------------------------------------------------


def test_fronts_count_for_themselves_and_are_added_up() -> None:
    with CounterPages.create(2) as mine, CounterPages(os.dup(mine.descriptor), 2) as theirs:
        first, second = mine.row(0, 1), theirs.row(1, 1)
        add(first, Count.ARRIVED, 2)
        add(second, Count.ARRIVED)
        count(first, Count.SUCCESS, 100)
        count(second, Count.SUCCESS, 50)
        count_in(second, Count.LATENCIES, 4_000_000)
        count_refused(first, Reason.OVERLOADED)
        assert mine.total(1, Count.ARRIVED) == 3 and mine.total(2, Count.ARRIVED) == 0
        statistics = theirs.statistics(1)
        assert (statistics.success.count, statistics.success.ns) == (2, 150)
        durations = mine.durations(1, Count.LATENCIES, Count.SUCCESS)
        assert sum(durations.buckets) == 1 and durations.buckets[4] == 1  # 3 to 5 ms
        assert mine.refused(1) == {Reason.OVERLOADED: 1}
        for row in (first, second):
            row.release()


def test_percentiles_lie_in_their_buckets() -> None:
    buckets = [0] * 20
    assert percentile_ms(buckets, 0.99) is None
    buckets[3], buckets[7] = 98, 2
    assert 2.0 < (percentile_ms(buckets, 0.5) or 0) <= 3.0
    assert 10.0 < (percentile_ms(buckets, 0.99) or 0) <= 15.0


def test_p99_is_shown_on_the_side_of_the_bound_where_it_is() -> None:
    buckets = [0] * 20
    buckets[9], buckets[12] = 90, 10  # of 100 answers 10 within 75 to 100 ms
    assert (percentile_ms(buckets, 0.99) or 0) > 90
    assert p99_ms(buckets, 0, 80.0) == 80.0  # nobody was late
    assert p99_ms(buckets, 1, 80.0) == 80.0
    assert (p99_ms(buckets, 2, 99.0) or 0) > 99.0
    assert (p99_ms(buckets, 2, 80.0) or 0) > 90
    assert p99_ms([0] * 20, 0, 80.0) is None
    assert p99_ms(buckets, 0, None) == percentile_ms(buckets, 0.99)

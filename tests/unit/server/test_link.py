"""The link between a front and the device process, and counters: shared memory with one writer."""

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

from eclip.errors import DeviceError
from eclip.server.counters import Count, CounterPages, add, count, count_in, count_refused
from eclip.server.front.status import p99_ms, percentile_ms
from eclip.server.link import ENTRIES, DeviceOrder, Link, SlotLayout, Slots, allocate
from eclip.server.messages import Reason
from waiting import PATIENCE_S


@pytest.fixture
def link() -> Iterator[Link]:
    with Link.create() as link:
        yield link


def order(ticket: int) -> DeviceOrder:
    return DeviceOrder(1, ticket, 2, 3, 4, 5, 6, 7)


def test_entries_come_out_once_and_in_order(link: Link) -> None:
    for ticket in range(5):
        link.orders.push(order(ticket))
    assert [DeviceOrder(*words).ticket for words in link.orders.take()] == [0, 1, 2, 3, 4]
    assert list(link.orders.take()) == []
    assert list(link.answers.take()) == []  # the other ring is another one


def test_a_full_ring_refuses_and_goes_on(link: Link) -> None:
    for ticket in range(ENTRIES):
        link.orders.push(order(ticket))
    with pytest.raises(DeviceError, match="a ring is full"):
        link.orders.push(order(-1))
    taken = link.orders.take()
    assert DeviceOrder(*next(taken)).ticket == 0
    link.orders.push(order(ENTRIES))
    rest = [DeviceOrder(*words).ticket for words in taken]
    rest += [DeviceOrder(*words).ticket for words in link.orders.take()]
    assert rest == list(range(1, ENTRIES + 1))


_ANSWERER = """
import sys
from eclip.server.link import Link
link = Link(tuple(map(int, sys.argv[1:4])))
while True:
    for words in link.orders.take():
        link.answers.push(words)
"""


@contextlib.contextmanager
def other_process(link: Link, program: str) -> Iterator[subprocess.Popen[bytes]]:
    """At the other end of the link, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, link.descriptors)],
        pass_fds=link.descriptors,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def test_two_processes_lose_and_double_nothing(link: Link) -> None:
    """As many entries as take the counts beyond two bytes, with few open at a time: so no ring is
    ever full, and none may look as if it were."""
    total, most_open = 70_000, 256
    sent, seen = 0, 0
    with other_process(link, _ANSWERER) as answerer:
        while seen < total:
            while sent < min(seen + most_open, total):
                link.orders.push(order(sent))
                sent += 1
            for words in link.answers.take():
                assert DeviceOrder(*words) == order(seen)
                seen += 1
            assert answerer.poll() is None


_WRITER = """
import sys
from eclip.errors import DeviceError
from eclip.server.link import DeviceOrder, Link
link = Link(tuple(map(int, sys.argv[1:4])))
ticket = 0
while True:
    try:
        link.orders.push(DeviceOrder(1, ticket, *[ticket] * 6))
    except DeviceError:  # full
        continue
    ticket += 1
    link.ordered.raise_()
"""


def test_a_writer_that_is_killed_leaves_whole_entries(link: Link) -> None:
    """At whatever instruction it dies, what can be read is a beginning of what it wrote."""
    seen: list[DeviceOrder] = []
    with other_process(link, _WRITER):
        while len(seen) < 3_000:
            seen += [DeviceOrder(*words) for words in link.orders.take()]
    seen += [DeviceOrder(*words) for words in link.orders.take()]
    assert [one.ticket for one in seen] == list(range(len(seen)))
    assert all(one.epoch == one.ticket for one in seen)
    link.reset()
    assert list(link.orders.take()) == []
    link.orders.push(order(1))
    assert len(list(link.orders.take())) == 1


def test_a_signal_wakes_and_is_cleared(link: Link) -> None:
    link.ordered.raise_()
    link.ordered.raise_()
    link.ordered.clear()
    link.ordered.clear()  # nothing there is no error
    with pytest.raises(BlockingIOError):
        os.eventfd_read(link.ordered.descriptor)


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

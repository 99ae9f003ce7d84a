"""Batches and admission: pure functions over plain numbers."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from eclip.server.queue.admission import Backlog, expected_ns, refuse
from eclip.server.queue.batching import (
    NEVER,
    Batch,
    Buckets,
    form_batch,
    urgency,
    wait_until,
)

MS = 1_000_000


@st.composite
def bucket_sets(draw: st.DrawFn) -> Buckets:
    sizes = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=6)))
    times, costs = (
        sorted(draw(st.lists(st.floats(1e3, 1e8), min_size=len(sizes), max_size=len(sizes))))
        for _ in range(2)
    )
    return Buckets(tuple(sizes), tuple(times), tuple(costs))


def alone(sizes: tuple[int, ...], times_ns: tuple[float, ...]) -> Buckets:
    """Of a service with one instance and nobody beside it: its time is all that a batch costs."""
    return Buckets(sizes, times_ns, times_ns)


@st.composite
def queues(draw: st.DrawFn) -> tuple[Buckets, list[int]]:
    buckets = draw(bucket_sets())
    rows = draw(st.lists(st.integers(1, buckets.largest), min_size=1, max_size=20))
    return buckets, rows


def patient(rows: list[int], buckets: Buckets) -> Batch:
    """Of requests without a bound."""
    return form_batch(rows, [NEVER] * len(rows), buckets, 0)


# --- Forming batches --------------------------------------------------------------------------


@given(queues(), st.floats(0, 1e9))
def test_a_batch_is_a_beginning_of_the_queue_that_its_bucket_holds(
    queue: tuple[Buckets, list[int]], due_ns: float
) -> None:
    buckets, rows = queue
    batch = form_batch(rows, [due_ns] * len(rows), buckets, 0)
    assert batch.requests >= 1
    assert batch.rows == sum(rows[: batch.requests]) <= batch.bucket
    assert batch.bucket in buckets.sizes


@given(queues())
def test_no_other_bucket_serves_more_rows_for_its_cost(queue: tuple[Buckets, list[int]]) -> None:
    buckets, rows = queue
    batch = patient(rows, buckets)
    best = batch.rows / buckets.costs_ns[buckets.sizes.index(batch.bucket)]
    for size, cost_ns in zip(buckets.sizes, buckets.costs_ns, strict=True):
        total = 0
        for count in rows:
            if total + count > size:
                break
            total += count
        assert total / cost_ns <= best


@given(queues(), st.data())
def test_somebody_is_in_time_if_any_bucket_lets_the_first(
    queue: tuple[Buckets, list[int]], data: st.DataObject
) -> None:
    buckets, rows = queue
    dues_ns = [data.draw(st.floats(0, 2e8)) for _ in rows]
    batch = form_batch(rows, dues_ns, buckets, 0)
    took_ns = buckets.times_ns[buckets.sizes.index(batch.bucket)]
    can = [
        time_ns
        for size, time_ns in zip(buckets.sizes, buckets.times_ns, strict=True)
        if size >= rows[0]
    ]
    assert took_ns <= max(dues_ns[: batch.requests]) or min(can) > dues_ns[0]


def test_a_bucket_is_chosen_by_what_it_serves() -> None:
    cheap = alone((1, 4, 8), (1 * MS, 1.2 * MS, 1.4 * MS))
    assert patient([1] * 5, cheap) == Batch(5, 5, 8)  # 5 in 1.4 beats 4 in 1.2
    steep = alone((1, 4, 8), (1 * MS, 1.2 * MS, 4 * MS))
    assert patient([1] * 5, steep) == Batch(4, 4, 4)
    assert form_batch([1] * 5, [1.1 * MS] * 5, steep, 0) == Batch(1, 1, 1)  # only 1 is in time
    assert patient([3, 6], cheap) == Batch(1, 3, 4)  # nobody is passed over


def test_one_late_request_does_not_make_a_batch_small() -> None:
    """Under load every first request is nearly late. If batches of one went for it, all others
    would be late, too."""
    buckets = alone((1, 8), (1 * MS, 1.5 * MS))
    dues_ns = [1.2 * MS, *[9 * MS] * 5]  # the first is in time alone
    assert form_batch([1] * 6, dues_ns, buckets, 0) == Batch(6, 6, 8)
    assert form_batch([1], dues_ns[:1], buckets, 0) == Batch(1, 1, 1)


def test_beside_others_a_large_bucket_must_serve_more() -> None:
    """Two rows in 1.5 ms beat one in 1 ms; but the large bucket keeps three times as much of the
    device from others, and the second row has an instance of its own."""
    beside = Buckets((1, 8), (1 * MS, 1.5 * MS), (2 * MS, 6 * MS))
    assert patient([1] * 2, alone(beside.sizes, beside.times_ns)) == Batch(2, 2, 8)
    assert patient([1] * 2, beside) == Batch(1, 1, 1)
    assert patient([1] * 4, beside) == Batch(4, 4, 8)


@given(queues(), st.floats(0, 1e9), st.floats(0, 1e8), st.floats(0, 1e9))
def test_waiting_leaves_time_for_the_next_bucket(
    queue: tuple[Buckets, list[int]], oldest_ns: float, wait_ns: float, due_ns: float
) -> None:
    buckets, rows = queue
    batch = form_batch(rows, [due_ns] * len(rows), buckets, oldest_ns)
    until_ns = wait_until(batch, due_ns, oldest_ns, wait_ns, buckets)
    assert until_ns <= oldest_ns + wait_ns
    if batch.rows >= buckets.largest:
        assert until_ns == -math.inf
    else:
        assert until_ns + buckets.time_of(batch.rows + 1) <= due_ns + 1  # rounding


def test_priority_goes_before_deadline_before_order() -> None:
    first, second = urgency(1, 9e9, 5), urgency(2, 1e9, 1)
    assert first < second < urgency(0, 1e9, 2)  # none given is behind all that are
    assert urgency(0, 1e9, 9) < urgency(0, 2e9, 1) < urgency(0, NEVER, 0)
    assert urgency(0, 1e9, 1) < urgency(0, 1e9, 2)


# --- Admission --------------------------------------------------------------------------------


backlogs = st.builds(
    Backlog,
    waiting=st.integers(0, 50),
    rows_before=st.integers(0, 500),
    running_ns=st.floats(0, 1e9),
)


@given(bucket_sets(), backlogs, st.floats(-1e9, 1e9), st.integers(1, 4))
def test_what_is_accepted_is_expected_in_time(
    buckets: Buckets, backlog: Backlog, limit_ns: float, instances: int
) -> None:
    refusal = refuse(1, limit_ns, backlog, 40, buckets, instances)
    idle = backlog.waiting == 0 and backlog.running_ns == 0
    if refusal is None:
        assert backlog.waiting < 40
        assert idle or expected_ns(1, backlog, buckets, instances) <= limit_ns
    else:
        assert not idle
        assert refusal.retry_after_s > 0
        assert "\n" not in refusal.line


@given(bucket_sets(), backlogs, st.integers(1, 4))
def test_more_before_means_a_later_answer(
    buckets: Buckets, backlog: Backlog, instances: int
) -> None:
    longer = msgspec.structs.replace(backlog, rows_before=backlog.rows_before + buckets.largest)
    now = expected_ns(1, backlog, buckets, instances)
    assert expected_ns(1, longer, buckets, instances) >= now
    assert expected_ns(1, longer, buckets, instances + 1) <= expected_ns(
        1, longer, buckets, instances
    )
    nobody, many = (
        msgspec.structs.replace(backlog, rows_before=rows) for rows in (0, instances * 64 * 64)
    )
    assert expected_ns(1, many, buckets, instances) > expected_ns(1, nobody, buckets, instances)


def test_rows_that_fit_instances_of_their_own_do_not_wait_for_a_large_batch() -> None:
    buckets = Buckets((1, 8), (1.0 * MS, 3.5 * MS), (1.0 * MS, 3.5 * MS))
    two_before = Backlog(waiting=2, rows_before=2, running_ns=0.0)
    assert expected_ns(1, two_before, buckets, 1) == 3 * MS
    assert expected_ns(1, two_before, buckets, 3) == 1 * MS


def test_an_idle_service_accepts_even_what_seems_hopeless() -> None:
    """Else a wrong expectation could never be corrected."""
    buckets = alone((1,), (50.0 * MS,))
    assert refuse(1, 1 * MS, Backlog(0, 0, 0.0), 10, buckets, 1) is None
    assert refuse(1, 1 * MS, Backlog(0, 0, 1.0), 10, buckets, 1) is not None


def test_a_full_queue_refuses_whatever_the_bound() -> None:
    buckets = alone((1, 8), (1.0 * MS, 2.0 * MS))
    refusal = refuse(1, NEVER, Backlog(10, 0, 0.0), 10, buckets, 1)
    assert refusal is not None and refusal.line == "10 requests wait already"
    assert refuse(1, NEVER, Backlog(9, 0, 0.0), 10, buckets, 1) is None

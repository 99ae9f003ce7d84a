"""Drift: when a server plans again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from eclip.serving.control import Deployment, ServiceSheet
from eclip.serving.counters import Count, CounterPages, add
from eclip.serving.drift import LASTING_S, PAUSE_S, WINDOW_S, DriftWatch, has_drifted
from eclip.serving.link import SlotLayout
from eclip.serving.messages import ModelInfo
from served_core import DIGITS, config_of

SHEET = ServiceSheet(
    id=1,
    row=1,
    settings=config_of(DIGITS).services[0],
    info=ModelInfo("digits", (), (), 8),
    buckets=(1,),
    times_ns=(1,),
    bound_ns=None,
    slots=SlotLayout(inputs=(), outputs=(), count=1),
)
PLANNED = Deployment(
    generation=1,
    server=config_of(DIGITS).server,
    sheets=(SHEET,),
    plan="",
    rates_rps={"digits": 100.0},
    uuid=None,
    device="",
    slices=1,
    homes={},
    policy="",
)


@pytest.fixture
def counters() -> Iterator[CounterPages]:
    with CounterPages.create(1) as pages:
        yield pages


def drive(
    watch: DriftWatch, pages: CounterPages, begin_s: int, seconds: int, rate: int
) -> list[tuple[int, float]]:
    """When it asked for a plan, and for which rate."""
    asked = []
    for second in range(begin_s, begin_s + seconds):
        row = pages.row(0, 1)
        add(row, Count.ARRIVED, rate)
        row.release()
        rates = watch.look(PLANNED, float(second))
        if rates is not None:
            asked.append((second, rates["digits"]))
    return asked


def test_planned_rates_ask_for_nothing(counters: CounterPages) -> None:
    assert drive(DriftWatch(counters), counters, 0, 100, 110) == []


def test_a_rate_that_stays_away_asks_once_in_a_while(counters: CounterPages) -> None:
    watch = DriftWatch(counters)
    assert drive(watch, counters, 0, 20, 100) == []
    asked = drive(watch, counters, 20, 70, 300)
    assert 20 + LASTING_S <= asked[0][0] <= 20 + WINDOW_S + LASTING_S
    assert asked[0][1] > 150
    assert all(late - early >= PAUSE_S for (early, _), (late, _) in itertools.pairwise(asked))
    assert asked[-1][1] == pytest.approx(300, rel=0.05)


def test_a_burst_is_no_drift(counters: CounterPages) -> None:
    watch = DriftWatch(counters)
    drive(watch, counters, 0, 20, 100)
    assert drive(watch, counters, 20, 1, 400) == []
    assert drive(watch, counters, 21, 40, 100) == []


def test_few_requests_say_little() -> None:
    assert not has_drifted(2.0, 0.5, 10.0)
    assert has_drifted(0.0, 100.0, 10.0)
    assert has_drifted(151.0, 100.0, 10.0) and not has_drifted(149.0, 100.0, 10.0)


def test_a_silent_service_says_nothing(counters: CounterPages) -> None:
    watch = DriftWatch(counters)
    assert drive(watch, counters, 0, 40, 0) == []
    asked = drive(watch, counters, 40, 40, 20)  # slower than planned, but there
    assert asked and asked[0][1] < 100 / 1.5

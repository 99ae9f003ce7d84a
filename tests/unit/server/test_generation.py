"""What the device process reads from the marks of rings: which loop hangs."""

from __future__ import annotations

import pytest

from eclip.core.requests import FOREVER_NS, WITH_RESULT, Ring
from eclip.server.device.generation import HangWatch

S = 1_000_000_000


def put(ring: Ring) -> None:
    ring.put(0, FOREVER_NS, 0)


def answer(ring: Ring) -> None:
    ring.answer(0, 0, WITH_RESULT)


@pytest.fixture
def rings() -> list[list[Ring]]:
    """Of two groups, a service and background; each with the rings of two fronts."""
    return [[Ring(4), Ring(4)] for _ in range(2)]


def test_a_front_that_stops_for_31_seconds_makes_no_loop_hang(rings: list[list[Ring]]) -> None:
    """It takes no answer meanwhile; the other front goes on."""
    watch = HangWatch(2)
    (stopped, other), _ = rings
    put(stopped)
    answer(stopped)
    for second in range(31):
        put(other)
        answer(other)
        watch.look(rings, second * S)
        assert second * S - watch.since_ns(0, gives_way=False) == 0
    assert 30 * S - watch.since_ns(1, gives_way=False) == 0  # nothing is open there


def test_a_loop_that_answers_nothing_hangs_from_its_last_answer_on(
    rings: list[list[Ring]],
) -> None:
    watch = HangWatch(2)
    (first, second), _ = rings
    watch.look(rings, 5 * S)
    put(first)
    put(first)
    put(second)
    watch.look(rings, 6 * S)
    assert watch.since_ns(0, gives_way=False) == 5 * S
    answer(first)
    watch.look(rings, 9 * S)
    watch.look(rings, 30 * S)
    assert watch.since_ns(0, gives_way=False) == 9 * S


def test_background_is_held_as_long_as_others_get_on(rings: list[list[Ring]]) -> None:
    watch = HangWatch(2)
    service, background = rings[0][0], rings[1][1]
    put(background)
    for second in range(1, 40):
        put(service)
        answer(service)
        watch.look(rings, second * S)
    assert watch.since_ns(1, gives_way=True) == 39 * S
    for second in range(40, 61):
        watch.look(rings, second * S)
    assert 60 * S - watch.since_ns(1, gives_way=True) == 21 * S


def test_a_door_that_goes_away_is_no_answer_of_a_hanging_loop(rings: list[list[Ring]]) -> None:
    """What is counted are marks that rise; fewer rings count anew."""
    watch = HangWatch(1)
    leaving, staying = rings[0]
    put(leaving)
    answer(leaving)
    put(staying)
    watch.look([[leaving, staying]], 1 * S)
    watch.look([[staying]], 2 * S)
    watch.look([[staying]], 30 * S)
    assert watch.since_ns(0, gives_way=False) == 2 * S

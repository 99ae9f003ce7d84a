"""The frontier's promises: a worker's order whatever lanes it takes, and no barrier beyond it."""

from __future__ import annotations

from frontier import BLOCKING, FOLLOW, HOME, NONBLOCKING, Frontier

LANE_A, LANE_B = 0, 1


def streams(*kinds: int) -> Frontier:
    return Frontier(kinds, lanes=4)


def test_no_barrier_between_kernels_of_one_lane() -> None:
    frontier = streams(NONBLOCKING)
    assert frontier.call(1, LANE_A) == (LANE_A, [], 0)
    assert frontier.call(1, LANE_A) == (LANE_A, [], 0)


def test_a_switch_waits_for_the_lane_it_leaves() -> None:
    frontier = streams(NONBLOCKING)
    frontier.call(1, LANE_A)
    assert frontier.call(1, LANE_B) == (LANE_B, [(1, LANE_A, LANE_B)], 0)


def test_barrier_is_skipped_when_predecessor_is_done() -> None:
    frontier = streams(NONBLOCKING)
    frontier.call(1, LANE_A)
    assert frontier.call(1, LANE_B, finished=1 << LANE_A) == (LANE_B, [], 1)


def test_barrier_is_skipped_after_the_program_waited_for_its_stream() -> None:
    frontier = streams(NONBLOCKING)
    frontier.call(1, LANE_A)
    frontier.drained(1)
    assert frontier.call(1, LANE_B) == (LANE_B, [], 0)


def test_a_call_that_is_not_redirected_first_joins_the_lane() -> None:
    frontier = streams(NONBLOCKING)
    frontier.call(1, LANE_A)
    assert frontier.call(1, HOME) == (HOME, [(1, LANE_A, HOME)], 0)
    assert frontier.call(1, LANE_A) == (LANE_A, [(1, HOME, LANE_A)], 0)


def test_a_following_call_needs_no_barrier() -> None:
    frontier = streams(NONBLOCKING)
    assert frontier.call(1, FOLLOW) == (HOME, [], 0)
    frontier.call(1, LANE_A)
    assert frontier.call(1, FOLLOW) == (LANE_A, [], 0)


def test_a_lane_serves_one_stream_until_it_is_known_to_be_empty() -> None:
    frontier = streams(NONBLOCKING, NONBLOCKING)
    frontier.call(1, LANE_A)
    assert frontier.call(2, LANE_A) == (HOME, [], 0)
    assert frontier.call(2, LANE_A, finished=1 << LANE_A)[0] == LANE_A
    # And the first one knows without asking that its work there is done.
    assert frontier.call(1, LANE_B) == (LANE_B, [], 0)


def test_independent_streams_never_wait_for_each_other() -> None:
    frontier = streams(NONBLOCKING, NONBLOCKING, BLOCKING)
    for lane, stream in enumerate((1, 2, 3)):
        assert frontier.call(stream, lane) == (lane, [], 0)


def test_the_legacy_stream_waits_for_lanes_of_blocking_streams_only() -> None:
    frontier = streams(BLOCKING, NONBLOCKING)
    frontier.call(1, LANE_A)
    frontier.call(2, LANE_B)
    assert frontier.call(0, HOME) == (HOME, [(0, LANE_A, HOME)], 0)
    assert frontier.call(0, HOME) == (HOME, [], 0)


def test_a_blocking_stream_waits_for_the_legacy_stream_once() -> None:
    frontier = streams(BLOCKING)
    frontier.call(0, LANE_A)
    queue, barriers, _ = frontier.call(1, LANE_B)
    assert (queue, barriers) == (LANE_B, [(0, LANE_A, HOME), (1, HOME, LANE_B)])
    assert frontier.call(1, LANE_B) == (LANE_B, [], 0)


def test_the_legacy_stream_alone_stays_on_its_lane_without_barriers() -> None:
    frontier = streams(BLOCKING, BLOCKING, BLOCKING)
    frontier.call(0, LANE_A)
    for _ in range(3):
        assert frontier.call(0, LANE_A) == (LANE_A, [], 0)


def test_idle_blocking_streams_get_no_marker() -> None:
    frontier = streams(*[BLOCKING] * 60)
    frontier.call(1, LANE_A)
    frontier.drained(1)
    assert frontier.call(0, HOME) == (HOME, [], 0)


def test_draining_the_device_empties_all_lanes() -> None:
    frontier = streams(NONBLOCKING, NONBLOCKING)
    frontier.call(1, LANE_A)
    frontier.device_drained()
    assert frontier.call(2, LANE_A) == (LANE_A, [], 0)
    assert frontier.call(1, LANE_B) == (LANE_B, [], 0)

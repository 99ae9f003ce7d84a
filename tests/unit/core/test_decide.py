"""Deciding at a joint: compiled code, a second implementation, and what both promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deciding as oracle
from deciding import Owner, Rule, choice_of
from eclip.core.decide import counts_as_busy, decide, due_after
from eclip.core.rules import (
    ACCOUNT,
    ALWAYS,
    BACKGROUND,
    BANKED_NS,
    BUSY_SINCE,
    FOREIGN_BIT,
    GAIN,
    GO_ON,
    HEARTBEAT,
    IDLE,
    LATEST,
    MOST_ROWS,
    OWED,
    SERVICE,
    STOPPED_NS,
    STRICT,
    WORDS,
    YIELD,
    Ints,
)

LEVELS = {"none": 0, "some": 1, "plenty": 2}
WHEN = LEVELS | {"owed": OWED}
CHOICES = {"go on": GO_ON, "yield": YIELD}
ROWS = 5
NAMED = 8  # words of a row that are decided by
PEERS = (3, 0, 4, 1, 2)  # rows by worker: any order
ACCOUNTS = (1, 2, 3, 4, 0)  # rows that hold the accounts, by row: any, too

# Few values, so that limits are met exactly, and mostly services that are busy; times may be
# negative.
times = st.integers(-6, 6) | st.sampled_from([-STOPPED_NS, STOPPED_NS, STOPPED_NS + 1])
owner = st.builds(
    Owner,
    service=st.sampled_from([True, True, True, False]),
    busy_since=st.sampled_from([0, 0, 0, None]) | times,
    deadline=st.integers(-2, 6) | times,
    left=st.integers(0, 2),
    heartbeat=st.sampled_from([None, None, 0]) | times,
    bound=st.sampled_from([0, 0, 1, STOPPED_NS]),
    some=st.integers(2, 4),
    none=st.integers(0, 2),
    strict=st.sampled_from([False, False, True]),
    latest=st.sampled_from([None, None, 0]) | times,
)
rule = st.builds(
    Rule,
    to=st.frozensets(st.integers(0, ROWS - 1), min_size=1),
    slack=st.sampled_from(sorted(WHEN)),
    choice=st.sampled_from(["yield", "go on", 1, 2]),
)
owners = st.dictionaries(st.integers(0, ROWS - 1), owner, min_size=1)


def board_of(rows: Mapping[int, Owner]) -> Ints:
    board = np.zeros((ROWS, WORDS), dtype=np.int64)
    for row, one in rows.items():
        board[row, :NAMED] = (
            SERVICE if one.service else BACKGROUND,
            IDLE if one.busy_since is None else one.busy_since,
            one.deadline,
            one.left,
            ALWAYS if one.heartbeat is None else one.heartbeat,
            one.bound,
            one.some,
            one.none,
        )
        board[row, ACCOUNT] = ACCOUNTS[row]
        board[ACCOUNTS[row], STRICT] = one.strict
        if one.latest is not None:
            board[row, [GAIN, LATEST]] = 1, one.latest
    return board


def decided(
    board: Ints,
    mine: int,
    wanted: Sequence[Rule],
    overtaken: int = 0,
    now: int = 0,
    peers: Sequence[int] = PEERS,
) -> int:
    """Rules of the oracle name rows; here they name workers, by whose rows are given."""
    return decide(
        board,
        mine,
        np.array(peers, dtype=np.int64),
        np.array([sum(1 << peers.index(row) for row in one.to) for one in wanted], dtype=np.int64),
        np.array([WHEN[one.slack] for one in wanted], dtype=np.int64),
        np.array([CHOICES.get(str(one.choice), one.choice) for one in wanted], dtype=np.int64),
        overtaken,
        now,
    )


@settings(max_examples=1000)
@given(owners, st.data(), st.lists(rule, max_size=3), st.integers(0, 3), times)
def test_both_decide_alike(
    rows: dict[int, Owner], data: st.DataObject, wanted: list[Rule], overtaken: int, now: int
) -> None:
    mine = data.draw(st.sampled_from(sorted(rows)))
    expected = choice_of(rows, mine, wanted, overtaken, now)
    number = CHOICES.get(str(expected), expected)
    assert decided(board_of(rows), mine, wanted, overtaken, now) == number


@given(owner, times)
def test_both_see_who_is_busy(one: Owner, now: int) -> None:
    assert counts_as_busy(board_of({3: one}), 3, now) == one.counts_as_busy(now)
    assert not counts_as_busy(board_of({3: one}), 2, now)  # nobody's row


@given(
    st.fractions(Fraction(1, 10), 1, max_denominator=10),
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=20),
)
def test_both_owe_the_same(floor: Fraction, happened: list[tuple[int, int]]) -> None:
    """Here as a time, there as work. Every stretch is rounded to half a nanosecond."""
    now = due = 0
    for elapsed, done in happened:
        now += elapsed
        due = due_after(due, float(floor), done, now)
    assert abs(floor * (now - due) - oracle.owed(floor, happened)) <= 1 + len(happened) / 2


# --- What both promise ------------------------------------------------------------------------


@given(st.lists(owner, min_size=ROWS, max_size=ROWS), times)
def test_of_busy_services_that_all_wait_for_each_other_exactly_one_goes_on(
    rows: list[Owner], now: int
) -> None:
    """Whatever their limits, also equal ones."""
    known = dict(enumerate(rows))
    board = board_of(known)
    busy = [row for row, one in known.items() if one.service and one.counts_as_busy(now)]
    everybody = [Rule(frozenset(range(ROWS)), "none", "yield")]
    going = [row for row in busy if decided(board, row, everybody, 0, now) != YIELD]
    assert len(going) == min(len(busy), 1)


@pytest.mark.parametrize(("overtaken", "choice"), [(0, YIELD), (1, YIELD), (2, GO_ON), (3, GO_ON)])
def test_a_service_that_was_overtaken_twice_goes_on(overtaken: int, choice: int) -> None:
    rows = {0: Owner(True, 0, deadline=5), 1: Owner(True, 0, deadline=6)}
    wanted = [Rule(frozenset({0}), "plenty", "yield")]
    assert decided(board_of(rows), 1, wanted, overtaken) == choice


@pytest.mark.parametrize(
    ("slack", "least"), [(0, "none"), (9, "none"), (10, "some"), (19, "some"), (20, "plenty")]
)
def test_levels_of_slack_begin_at_their_limits(slack: int, least: str) -> None:
    rows = {0: Owner(True, 0, deadline=slack + 3, left=3, some=20, none=10), 1: Owner(False, 0)}
    for level, number in LEVELS.items():
        wanted = [Rule(frozenset({0}), level, "yield")]
        assert (decided(board_of(rows), 1, wanted) == YIELD) == (number >= LEVELS[least])


@given(owners, st.data(), st.lists(rule, max_size=3), times)
def test_nobody_gives_way_to_the_idle_or_to_background_that_is_owed_nothing(
    rows: dict[int, Owner], data: st.DataObject, wanted: list[Rule], now: int
) -> None:
    mine = data.draw(st.sampled_from(sorted(rows)))
    others = [one for row, one in rows.items() if row != mine and one.counts_as_busy(now)]
    if not any(one.service or one.is_owed(now) for one in others):
        assert decided(board_of(rows), mine, wanted, 0, now) == GO_ON


@given(st.lists(owner, min_size=ROWS, max_size=ROWS), st.lists(rule, max_size=3), times)
def test_whoever_is_owed_goes_on_and_so_never_do_all_of_background_wait(
    rows: list[Owner], wanted: list[Rule], now: int
) -> None:
    """Whatever their rules: who waits for a floor waits for somebody who does not wait."""
    known = dict(enumerate(rows))
    board = board_of(known)
    everybody = Rule(frozenset(range(ROWS)), "owed", "yield")
    for row, one in known.items():
        if one.is_owed(now):
            assert decided(board, row, [everybody, *wanted], 0, now) != YIELD
        elif decided(board, row, [everybody], 0, now) == YIELD:
            assert any(two.is_owed(now) and two.counts_as_busy(now) for two in rows)


@given(owners, st.data(), st.lists(rule, max_size=3), times)
def test_deciding_writes_nothing(
    rows: dict[int, Owner], data: st.DataObject, wanted: list[Rule], now: int
) -> None:
    board = board_of(rows)
    decided(board, data.draw(st.sampled_from(sorted(rows))), wanted, 0, now)
    assert np.array_equal(board, board_of(rows))


@pytest.mark.parametrize("row", [1, MOST_ROWS - 1])
def test_a_service_that_no_plan_names_is_foreign(row: int) -> None:
    board = np.zeros((MOST_ROWS, WORDS), dtype=np.int64)
    board[0, :2] = BACKGROUND, 0
    board[row, 0] = SERVICE
    board[row, [BUSY_SINCE, HEARTBEAT]] = 0, ALWAYS

    def choice(peers: list[int], who: int) -> int:
        rows, bits, level, yields = (
            np.array(words, dtype=np.int64) for words in (peers, [who], [2], [YIELD])
        )
        return decide(board, 0, rows, bits, level, yields, 0, 0)

    assert choice([0], 1 << FOREIGN_BIT) == YIELD
    assert choice([0], 1) == GO_ON  # of its own session only
    assert choice([0, row], 1 << FOREIGN_BIT) == GO_ON  # it is no stranger there
    assert choice([0, row], 1 << 1) == YIELD
    board[row, 0] = BACKGROUND  # whose floor is nobody's business there
    assert choice([0], 1 << FOREIGN_BIT) == GO_ON


def test_a_floor_is_kept_by_whoever_goes_on_while_it_is_owed() -> None:
    """Steps of a millisecond, in which it may work or not, beside a service that is always busy."""
    due, worked = 0, 0
    for now in range(10**6, 10_001 * 10**6, 10**6):
        if due < now:
            due = due_after(due, 0.25, 1e6, now)
            worked += 1
    assert worked == pytest.approx(2500, abs=2)


def test_what_is_banked_is_used_up_in_a_tenth_of_a_second() -> None:
    due = 0
    for now in range(10**6, 10_001 * 10**6, 10**6):  # ten seconds at full speed
        due = due_after(due, 0.25, 1e6, now)
    assert due == now + BANKED_NS == now + STOPPED_NS

"""An account's words: what they count, what replicas share, and that plans carry the gain."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eclip.core import credit, rules
from eclip.core.credit import charge, end_period, expect, fate_of, foresee, is_strict, warm
from eclip.core.plan import Promise
from eclip.core.rules import ALWAYS, WORDS, Ints

MS = 1_000_000
PROMISE = Promise(bound_ns=10 * MS, request_ns=4 * MS, some_ns=0, none_ns=0, gain=0.005)


def board_with(*promises: Promise) -> Ints:
    board = np.zeros((len(promises), WORDS), dtype=np.int64)
    for number, promise in enumerate(promises):
        rules.enter(board, number, promise, ALWAYS)
    return board


requests = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(1, MS)), max_size=60
)


@given(requests, st.booleans())
def test_counters_are_what_verdicts_add_up_to(
    happened: list[tuple[bool, bool, bool, int]], rich: bool
) -> None:
    """Of requests late or not, by the host's fault or not, and periods that end behind them or
    not; two rows with one account."""
    board = board_with(PROMISE, PROMISE)
    board[1, rules.ACCOUNT] = 0
    if rich:
        warm(board)
    now = 0
    seen: Counter[tuple[int, int]] = Counter()
    strict_ns = 0
    for index, (late, by_host, ends, took) in enumerate(happened):
        row = index % 2
        board[row, [rules.DEADLINE, rules.LEFT, rules.LATEST]] = now + MS, 0, now + MS
        foresee(board, row, now)
        was_strict = is_strict(board, row, now)
        now += took
        seen[fate_of(charge(board, row, late, by_host, now))] += 1
        strict_ns += took if was_strict else 0
        if ends:
            end_period(board, row, now)
            assert board[0, rules.STRICT_SINCE] == rules.IDLE
    counted = board[0]
    assert counted[rules.COUNTED] == len(happened)
    assert counted[rules.LATE] == sum(late for late, *_ in happened)
    assert counted[rules.LATE_HOST] == sum(late and by_host for late, by_host, *_ in happened)
    fates: Counter[int] = Counter()
    for (fate, reason), count in seen.items():
        fates[fate] += count
        assert (fate, reason) != (credit.PAID, credit.NOT_STRICT)
    assert counted[rules.LOST] == fates[credit.WAS_LOST]
    assert counted[rules.LATE_STRICT] == fates[credit.WAS_STRICT]
    audited = sum(count for (_, reason), count in seen.items() if reason == credit.AUDIT)
    spent = sum(count for (_, reason), count in seen.items() if reason == rules.SPENT)
    assert counted[rules.AUDITED] == audited
    assert counted[rules.FREE] == len(happened) - audited - spent
    assert counted[rules.AUDITED_LATE] + counted[rules.FREE_LATE] <= counted[rules.LATE]
    assert not board[1, rules.COUNTED : rules.STRICT_NS + 3].any()
    if happened and happened[-1][2]:
        assert counted[rules.STRICT_NS : rules.STRICT_NS + 3].sum() == strict_ns


def test_credit_falls_as_far_as_requests_are_late_and_is_capped() -> None:
    board = board_with(PROMISE)
    for _ in range(2000):
        charge(board, 0, False, False, 0)
    assert board[0, rules.CREDIT] == credit.MOST_CREDIT * rules.ONE_CREDIT
    for _ in range(100):
        charge(board, 0, True, False, 0)
    assert board[0, rules.CREDIT] == -95 * rules.ONE_CREDIT
    end_period(board, 0, 0)
    assert board[0, rules.STRICT] == rules.SPENT


def test_a_request_that_comes_behind_others_may_be_too_late_from_the_start() -> None:
    board = board_with(PROMISE)
    warm(board)
    board[0, rules.LATEST] = 10 * MS
    expect(board, 0, 11 * MS, 4 * MS, 1 * MS)
    assert not is_strict(board, 0, 7 * MS)
    assert is_strict(board, 0, 7 * MS + 1)
    expect(board, 0, 12 * MS, 12 * MS, 2 * MS)
    assert is_strict(board, 0, 2 * MS + 1)
    assert board[0, rules.STRICT] == credit.NOT_STRICT  # its owner has not looked yet
    foresee(board, 0, 2 * MS + 1)
    assert board[0, rules.STRICT] == credit.EARLY


def test_a_service_without_a_gain_has_no_account() -> None:
    board = board_with(msgspec.structs.replace(PROMISE, gain=0.0))
    before = board.copy()
    foresee(board, 0, 100 * MS)
    assert charge(board, 0, True, True, 100 * MS) == credit.NO_VERDICT
    end_period(board, 0, 100 * MS)
    assert np.array_equal(board, before)
    assert not is_strict(board, 0, 100 * MS)


def test_a_stored_promise_without_a_gain_is_what_it_was() -> None:
    """Plans of version 0.1 have no gain, and are written as they were."""
    stored = b'{"bound_ns":5,"request_ns":3,"some_ns":2,"none_ns":1}'
    promise = msgspec.json.decode(stored, type=Promise)
    assert promise.gain == 0
    assert msgspec.json.encode(promise) == stored


@pytest.mark.parametrize("gain", [-0.001, 1e-7, 0.006, 1.0, float("nan")])
def test_gains_are_refused_in_words(gain: float) -> None:
    with pytest.raises(ValueError, match="a gain is 0, or"):
        msgspec.structs.replace(PROMISE, gain=gain)

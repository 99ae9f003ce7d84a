"""A service's account: credit for lateness, kept where its requests end.

An account belongs to a service with a bound, in a plan that gives it a gain. It starts at 0. Each
request in time adds the gain (at most 0.005 for a p99), each late one takes 1, and the credit never
exceeds MOST_CREDIT. It is never clipped below, so a cluster of late requests is not forgotten.

A *busy period* of a service lasts from a request that finds it idle to the next moment at which
none waits or runs. A period is *strict* if background with a rule for the service launches nothing
during it, as if all its rules were *yield*. A period begins strict if the credit is spent, and now
and then by chance: an *audit*. A period that began free turns strict as soon as one of its requests
cannot be in time any more (*early*), and stays so. So no request is late in a free period, and the
credit needs to be known only between two periods: charges and gains are written when requests end.

This keeps, over any N requests in a row, on any device and for any arrivals::

    late <= gain * N + MOST_CREDIT + lost + strict

*lost* are requests that were late without credit in periods that began free, *strict* those in
periods that began strict. The proof: before the last late request that left credit behind it, every
late one took 1 from at most MOST_CREDIT and what the requests in time had added.

All words stand in the row of the board that ACCOUNT names. Functions are compiled, for the
simulator's core and the driving loop of a GPU alike. Times are nanoseconds of the caller's clock.
"""

from __future__ import annotations

from eclip.core.rules import (
    ACCOUNT,
    AUDITED,
    AUDITED_LATE,
    COUNTED,
    CREDIT,
    DEADLINE,
    DRAW,
    FREE,
    FREE_LATE,
    GAIN,
    IDLE,
    LATE,
    LATE_HOST,
    LATE_STRICT,
    LATEST,
    LEFT,
    LOST,
    ONE_CREDIT,
    SPENT,
    STRICT,
    STRICT_NS,
    STRICT_SINCE,
    Ints,
)
from eclip.jit import inlined

MOST_CREDIT = 5
_MOST = MOST_CREDIT * ONE_CREDIT

NOT_STRICT, EARLY, AUDIT = 0, 2, 3  # in STRICT, beside SPENT
REASONS = ("spent", "early", "audit")  # to be strict
IN_TIME, PAID, WAS_LOST, WAS_STRICT = range(4)  # fates of a request; the last three were late
NO_VERDICT = 0  # of a request without an account

# One in so many periods that could be free is an audit: the upper bits of a generator modulo 2^31.
AUDIT_ONE_IN = 32
_STEP, _PLUS, _BITS, _UNUSED_BITS = 1103515245, 12345, 0x7FFFFFFF, 16


def fate_of(verdict: int) -> tuple[int, int]:
    """What became of a request by its verdict, and why its period was strict when it ended."""
    return (verdict - 1) >> 2, (verdict - 1) & 3


@inlined
def is_strict(board: Ints, row: int, now: int) -> bool:
    """Background launches nothing beside the busy service of this row."""
    if board[row, GAIN] == 0:
        return False
    return bool(board[board[row, ACCOUNT], STRICT] != NOT_STRICT or now > board[row, LATEST])


@inlined
def foresee(board: Ints, row: int, now: int) -> None:
    """Turn the period strict if a request cannot be in time any more. Called where it is known how
    far the running request is: when it begins and at its joints."""
    if board[row, GAIN] == 0:
        return
    account = board[row, ACCOUNT]
    too_late = now > board[row, LATEST] or now > board[row, DEADLINE] - board[row, LEFT]
    if too_late and board[account, STRICT] == NOT_STRICT:
        board[account, STRICT] = EARLY
    if board[account, STRICT] != NOT_STRICT and board[account, STRICT_SINCE] == IDLE:
        board[account, STRICT_SINCE] = now


@inlined
def expect(board: Ints, row: int, due: int, before_ns: int, now: int) -> None:
    """A request has come, behind others that take ``before_ns`` once the running one has ended."""
    board[row, LATEST] = min(board[row, LATEST], max(now, due - before_ns))


@inlined
def charge(board: Ints, row: int, late: bool, by_host: bool, now: int) -> int:
    """A request has ended or expired; its verdict. ``by_host``: it would have been in time if the
    host had begun it when it could."""
    if board[row, GAIN] == 0:
        return NO_VERDICT
    account = board[row, ACCOUNT]
    if (late or now > board[row, LATEST]) and board[account, STRICT] == NOT_STRICT:
        board[account, STRICT] = EARLY
        board[account, STRICT_SINCE] = now
    reason = board[account, STRICT]
    board[account, COUNTED] += 1
    board[account, LATE] += late
    if reason == AUDIT:
        board[account, AUDITED] += 1
        board[account, AUDITED_LATE] += late
    elif reason != SPENT:
        board[account, FREE] += 1
        board[account, FREE_LATE] += late
    fate = IN_TIME
    if late:
        board[account, LATE_HOST] += by_host
        board[account, CREDIT] -= ONE_CREDIT
        if board[account, CREDIT] > 0:
            fate = PAID
        elif reason == EARLY:
            fate = WAS_LOST
            board[account, LOST] += 1
        else:
            fate = WAS_STRICT
            board[account, LATE_STRICT] += 1
    else:
        board[account, CREDIT] = min(board[account, CREDIT] + board[row, GAIN], _MOST)
    return int(1 + reason + 4 * fate)


@inlined
def end_period(board: Ints, row: int, now: int) -> None:
    """No request waits or runs: say how the next period begins."""
    if board[row, GAIN] == 0:
        return
    account = board[row, ACCOUNT]
    reason = board[account, STRICT]
    if reason != NOT_STRICT and board[account, STRICT_SINCE] != IDLE:
        board[account, STRICT_NS + reason - 1] += now - board[account, STRICT_SINCE]
    board[account, STRICT_SINCE] = IDLE
    begins = NOT_STRICT
    if board[account, CREDIT] <= 0:
        begins = SPENT
    else:
        board[account, DRAW] = (board[account, DRAW] * _STEP + _PLUS) & _BITS
        if (board[account, DRAW] >> _UNUSED_BITS) % AUDIT_ONE_IN == 0:
            begins = AUDIT
    board[account, STRICT] = begins


def warm(board: Ints) -> None:
    """Give every account the most credit, as it has after a while on a device that keeps bounds."""
    accounts = board[:, GAIN] > 0
    board[accounts, CREDIT] = _MOST
    board[accounts, STRICT] = NOT_STRICT

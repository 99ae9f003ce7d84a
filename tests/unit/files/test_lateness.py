"""What accounts say of a run, and whose fault lateness was."""

from __future__ import annotations

import msgspec
import pytest

from eclip.core.credit import AUDIT, EARLY, IN_TIME, NOT_STRICT, PAID, WAS_LOST, WAS_STRICT
from eclip.core.plan import P99_GAIN, Promise
from eclip.core.rules import SPENT
from eclip.core.runlog import Requests, RunLog
from eclip.files.lateness import ENOUGH_AUDITED, lateness_of
from logs import make_log

MS = 1_000_000
PROMISE = Promise(bound_ns=10 * MS, request_ns=MS, some_ns=0, none_ns=0, gain=P99_GAIN)
Told = tuple[int, int, int]  # fate, reason, and by how many ms the host began it late


def log_of(*told: Told) -> RunLog:
    """A service's requests, 100 ms apart: 5 ms each if in time, else 5 ms too late."""
    log = make_log("shared")
    worker = msgspec.structs.replace(log.plan.workers[0], promise=PROMISE)
    plan = msgspec.structs.replace(log.plan, workers=(worker, *log.plan.workers[1:]))
    arrival = tuple(100 * MS * index for index in range(len(told)))
    took = [(5 if fate == IN_TIME else 15) * MS for fate, *_ in told]
    return msgspec.structs.replace(
        log,
        plan=plan,
        requests=Requests(
            worker=(0,) * len(told),
            arrival_ns=arrival,
            start_ns=tuple(at + host * MS for at, (*_, host) in zip(arrival, told, strict=True)),
            end_ns=tuple(at + ns for at, ns in zip(arrival, took, strict=True)),
            verdict=tuple(1 + reason + 4 * fate for fate, reason, _ in told),
        ),
    )


def test_requests_are_counted_by_their_fates() -> None:
    (found,) = lateness_of(
        log_of(
            (IN_TIME, SPENT, 0),
            (IN_TIME, NOT_STRICT, 0),
            (PAID, EARLY, 0),
            (WAS_LOST, EARLY, 0),
            (WAS_STRICT, SPENT, 6),
            (WAS_STRICT, SPENT, 4),
        )
    )
    assert (found.requests, found.late) == (6, 4)
    assert found.share == pytest.approx(4 / 6)
    assert (found.paid, found.lost, found.strict) == (1, 1, 2)
    assert (found.in_strict_periods, found.audited) == (3, 0)
    assert found.by_host == 1  # 5 ms too late, of which the host lost 6
    assert found.by_own_queueing is None
    assert str(found) == (
        f"{found.name}: 4 of 6 requests late (66.67%): 1 paid by credit, 1 lost when the service "
        f"turned strict, 2 while it was strict. Causes: the host 1; 0 audited requests are too few "
        f"to tell own queueing from sharing"
    )


def test_audits_tell_own_queueing_from_sharing() -> None:
    """2% late in audits, 5% in free periods: of those two fifths are its own."""
    audits = [(PAID, AUDIT, 0)] * 2 + [(IN_TIME, AUDIT, 0)] * (ENOUGH_AUDITED - 2)
    free = [(PAID, EARLY, 0)] * 50 + [(IN_TIME, NOT_STRICT, 0)] * 950
    (found,) = lateness_of(log_of(*audits, *free, (WAS_STRICT, SPENT, 0)))
    assert found.by_own_queueing == pytest.approx(2 + 20 + 1)
    assert found.by_sharing == pytest.approx(30)
    assert str(found).endswith("Causes: own queueing 23, sharing 30")
    (fewer,) = lateness_of(log_of(*audits[:-1], *free))
    assert fewer.by_sharing is None


def test_audits_that_are_late_more_often_blame_no_sharing() -> None:
    audits = [(PAID, AUDIT, 0)] * ENOUGH_AUDITED
    (found,) = lateness_of(log_of(*audits, *[(PAID, EARLY, 0), (IN_TIME, NOT_STRICT, 0)] * 50))
    assert found.by_own_queueing == ENOUGH_AUDITED + 50
    assert found.by_sharing == 0


def test_a_run_without_accounts_says_nothing() -> None:
    assert lateness_of(make_log("shared")) == ()

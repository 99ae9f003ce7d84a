"""Lateness: what the accounts of services say of a run, and whose fault late requests were.

Three causes, of which two are told apart by *audits*: busy periods that were strict by chance.

- *host*: in time but for what the host lost between when the request could begin and its start.
- *own queueing*: late in strict periods, and as many of the requests of free periods as audits say.
  It includes the wait for the stretch that is in flight when a request comes.
- *sharing*: the other late requests of periods that began free. Which periods are audits is drawn,
  so this difference is caused by the plan's rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from eclip.core.credit import AUDIT, IN_TIME, PAID, WAS_LOST, WAS_STRICT, fate_of
from eclip.core.rules import SPENT
from eclip.core.runlog import RunLog

ENOUGH_AUDITED = 100  # requests: with fewer, own queueing and sharing are not told apart


class Lateness(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a service with an account, in one run."""

    name: str
    gain: float  # of a request in time
    requests: int
    late: int
    paid: int  # late, and credit was left
    lost: int  # late without credit, in periods that began free
    strict: int  # likewise, in periods that began strict
    in_strict_periods: int  # requests of periods that began strict for want of credit
    audited: int
    audited_late: int
    by_host: int  # late, as the following
    by_own_queueing: float | None  # None: too few audits
    by_sharing: float | None

    @property
    def share(self) -> float:
        return self.late / max(self.requests, 1)

    def __str__(self) -> str:
        """``bert: 12 of 3000 requests late (0.40%): 9 paid by credit, …``"""
        said = f"{self.name}: {self.late} of {self.requests} requests late ({self.share:.2%})"
        if not self.late:
            return said
        said += f": {self.paid} paid by credit"
        said += f", {self.lost} lost when the service turned strict" if self.lost else ""
        said += f", {self.strict} while it was strict" if self.strict else ""
        causes = [("the host", float(self.by_host))]
        if self.by_own_queueing is not None and self.by_sharing is not None:
            causes += [("own queueing", self.by_own_queueing), ("sharing", self.by_sharing)]
        blamed = ", ".join(f"{name} {count:.0f}" for name, count in causes if round(count))
        few = self.by_sharing is None
        why = f"{self.audited} audited requests are too few to tell own queueing from sharing"
        parts = [part for part in (blamed, why if few else "") if part]
        return f"{said}. Causes: {'; '.join(parts)}"


def lateness_of(log: RunLog) -> tuple[Lateness, ...]:
    """One for each service with an account."""
    return tuple(
        _of_worker(log, index)
        for index, worker in enumerate(log.plan.workers)
        if log.requests.verdict and worker.promise is not None and worker.promise.gain
    )


def _of_worker(log: RunLog, worker: int) -> Lateness:
    planned = log.plan.workers[worker]
    assert planned.promise is not None
    fates: Counter[int] = Counter()
    periods: Counter[int] = Counter()  # requests by how their period began
    late: Counter[int] = Counter()
    by_host: Counter[int] = Counter()
    for fate, reason, host in _requests(log, worker, planned.promise.bound_ns):
        began = reason if reason in (SPENT, AUDIT) else 0
        fates[fate] += 1
        periods[began] += 1
        late[began] += fate != IN_TIME
        by_host[began] += fate != IN_TIME and host
    own = sharing = None
    if periods[AUDIT] >= ENOUGH_AUDITED:
        apart = {began: late[began] - by_host[began] for began in (0, SPENT, AUDIT)}
        expected = min(periods[0] * apart[AUDIT] / periods[AUDIT], apart[0])
        own = apart[SPENT] + apart[AUDIT] + expected
        sharing = apart[0] - expected
    return Lateness(
        name=planned.name,
        gain=planned.promise.gain,
        requests=sum(fates.values()),
        late=sum(late.values()),
        paid=fates[PAID],
        lost=fates[WAS_LOST],
        strict=fates[WAS_STRICT],
        in_strict_periods=periods[SPENT],
        audited=periods[AUDIT],
        audited_late=late[AUDIT],
        by_host=sum(by_host.values()),
        by_own_queueing=own,
        by_sharing=sharing,
    )


def _requests(log: RunLog, worker: int, bound_ns: int) -> Iterator[tuple[int, int, bool]]:
    """Fate, reason, and whether it would have been in time on a host without delays."""
    columns = log.requests
    before = None
    for of, arrival, start, end, verdict in zip(
        *(columns.worker, columns.arrival_ns, columns.start_ns, columns.end_ns, columns.verdict),
        strict=True,
    ):
        if of != worker:
            continue
        could = arrival if before is None else max(arrival, before)
        yield *fate_of(verdict), end - max(start - could, 0) <= arrival + bound_ns
        before = end

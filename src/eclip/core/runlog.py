"""RunLog: the record of a plan's run.

Requests, energy and counters are always there. Kernels are there inside the trace window only, so
that a long run stays small. Times are nanoseconds since the measured part of the run began, so
requests that began during the warm-up have a negative start. Records are columns: a request or
kernel is one index in each. ``measures`` imports run logs, so it is imported where a notebook
shows a log.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from eclip.core.display import html_table, number
from eclip.core.made import Made
from eclip.core.plan import Plan

MOST_VERDICT = 16
MOST_LAG_NS = 1_000_000  # of a load generator that counts as punctual
OTHERS_IDLE = "; all others idle"  # the end of the label of a worker's load alone


class Requests(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Requests that completed in the measured part, in order of completion."""

    worker: tuple[int, ...]
    arrival_ns: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    verdict: tuple[int, ...] = ()  # of accounts (core/credit.py); empty: no service has one

    def __post_init__(self) -> None:
        _check_columns("requests", self)
        for times in zip(self.arrival_ns, self.start_ns, self.end_ns, strict=True):
            if list(times) != sorted(times):
                raise ValueError("a request ends before it starts, or starts before it arrives")
        if not all(0 <= verdict <= MOST_VERDICT for verdict in self.verdict):
            raise ValueError(f"a verdict is 0 to {MOST_VERDICT}")


class KernelRecords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels that ended inside [0, window_ns), in order of completion.

    On a GPU recording slows launches, so kernels come from a separate run after the measured run,
    under the same load. They show how the plan runs, but are not kernels of the logged requests.
    """

    window_ns: int
    worker: tuple[int, ...]
    position: tuple[int, ...]
    lane: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    own_run: bool = False  # True: a separate run; times are since its beginning

    def __post_init__(self) -> None:
        _check_columns("kernels", self)

    def rows(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Worker, position, lane, start and end of every kernel."""
        return zip(self.worker, self.position, self.lane, self.start_ns, self.end_ns, strict=True)


class WorkerCounters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sums over a worker's requests. Waits are None on a GPU, which cannot count them."""

    kernels: int
    barriers: int
    lane_waits: int | None  # waits behind another worker's kernel on a lane owned by all
    false_waits: int | None  # waits behind an unrelated lane that shares a hardware queue
    false_wait_ns: int | None
    yields: int = 0  # stops at a joint for another worker
    moves: int = 0  # stretches on another lane than planned
    longest_pause_ns: int = 0  # at a joint


class Prepared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of opening a session."""

    executables: int
    seconds: float
    device_bytes: int  # as the device reports them: in large blocks, some allocated before


class RunLog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of a plan's run: requests, energy, kernels. A notebook shows it as a table."""

    plan: Plan
    device: str
    modelled: bool  # True: time and energy are simulated
    load: str  # its label: "closed loop", …
    seed: int
    duration_ns: int
    energy_uj: int
    requests: Requests
    kernels: KernelRecords
    counters: tuple[WorkerCounters, ...]  # one per worker
    unfinished: tuple[int, ...]  # per worker: requests begun or waiting when the run ended
    # Per worker: requests that arrived in the measured part; None: closed loop.
    offered: tuple[int | None, ...]
    # Per worker: the longest delay of a due request by the load generator.
    lag_ns: tuple[int, ...]
    # Per worker: its rate with all others present but idle; empty: not measured.
    alone_rps: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()
    prepared: Prepared | None = None  # None: not known
    made: Made | None = None  # None: not known

    def __post_init__(self) -> None:
        workers = len(self.plan.workers)
        columns = (self.counters, self.unfinished, self.offered, self.lag_ns)
        if {len(column) for column in columns} != {workers}:
            raise ValueError(
                f"counters, unfinished, offered and lag_ns need {workers} entries each"
            )
        if len(self.alone_rps) not in (0, workers):
            raise ValueError(f"alone_rps needs {workers} entries, or none")
        if self.duration_ns < 1 or self.energy_uj < 0:
            raise ValueError("a run lasts at least 1 ns and takes no negative energy")
        if not all(0 < rate < float("inf") for rate in self.alone_rps):
            raise ValueError("every alone_rps must be a finite number above 0")
        for records in (self.requests, self.kernels):
            if any(not 0 <= worker < workers for worker in records.worker):
                raise ValueError("a record belongs to a worker that does not exist")
        if any(not 0 <= lane < len(self.plan.lanes) for lane in self.kernels.lane):
            raise ValueError("a kernel ran on a lane that does not exist")
        for worker, position in zip(self.kernels.worker, self.kernels.position, strict=True):
            if not 0 <= position < self.plan.workers[worker].kernels:
                raise ValueError(f"worker {worker} has no kernel {position}")

    @property
    def lagged(self) -> bool:
        """True if the load generator was late, so that latencies include its delay."""
        return max(self.lag_ns) > MOST_LAG_NS

    def __repr__(self) -> str:
        kind = "modelled" if self.modelled else "measured"
        return (
            f"RunLog({self.plan.policy} on {self.plan.mix.name}, {self.device}, {kind}, "
            f"{self.duration_ns / 1e9:g} s, {len(self.requests.worker)} requests)"
        )

    def _repr_html_(self) -> str:
        from eclip.core.measures import measure

        if not self.alone_rps:
            return html_table(repr(self), ["worker"], ([one.name] for one in self.plan.workers))
        found = measure(self)
        return html_table(
            f"{self!r}: STP {found.stp:.3f}, fairness {found.fairness:.2f}, {found.power_w:.0f} W",
            ["worker", "offered/s", "served/s", "of alone", "p50 ms", "p99 ms"],
            (
                [
                    worker.name,
                    "closed loop" if worker.offered_rps is None else number(worker.offered_rps, 1),
                    number(worker.rate_rps, 1),
                    f"{worker.ratio:.0%}",
                    number(worker.p50_ms),
                    number(worker.p99_ms),
                ]
                for worker in found.workers
            ),
        )


def _check_columns(name: str, columns: Requests | KernelRecords) -> None:
    lengths = {
        len(column)
        for field in columns.__struct_fields__
        if isinstance(column := getattr(columns, field), tuple)
        and not (field == "verdict" and not column)
    }
    if len(lengths) > 1:
        raise ValueError(f"the columns of {name} have different lengths")

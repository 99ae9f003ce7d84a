"""RunLog: what happened when a plan ran.

Requests, energy and counters are always there; kernels only inside the trace window, so that a long
run stays small. Times are nanoseconds since the measured part of the run began: what began during
the warm-up has a negative start. Columns, not records: a request or kernel is one index in each.
"""

from __future__ import annotations

import msgspec

from eclip.artefacts.plan import Plan


class Requests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests that completed in the measured part, in order of completion."""

    worker: tuple[int, ...]
    arrival_ns: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_columns("requests", self)
        for times in zip(self.arrival_ns, self.start_ns, self.end_ns, strict=True):
            if list(times) != sorted(times):
                raise ValueError("a request ends before it starts, or starts before it arrives")


class KernelRecords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels that ended inside [0, window_ns), in order of completion.

    On a GPU recording slows launches, so there they come from a run of their own after the measured
    one, under the same load from its start: they show how the plan runs, not the logged requests.
    """

    window_ns: int
    worker: tuple[int, ...]
    position: tuple[int, ...]
    lane: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    own_run: bool = False  # a run of their own: times are since that one's beginning

    def __post_init__(self) -> None:
        _check_columns("kernels", self)


class WorkerCounters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the worker's requests took. Waits are None where the device cannot see them: a GPU."""

    kernels: int
    barriers: int
    lane_waits: int | None  # waits behind another worker's kernel on a lane owned by all
    false_waits: int | None  # waits behind an unrelated lane that shares a hardware queue
    false_wait_ns: int | None


class RunLog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    plan: Plan
    device: str
    modelled: bool  # time and energy are a simulator's
    load: str  # for a person: "closed loop", …
    seed: int
    duration_ns: int
    energy_uj: int
    requests: Requests
    kernels: KernelRecords
    counters: tuple[WorkerCounters, ...]  # one per worker
    unfinished: tuple[int, ...]  # per worker: requests begun or waiting when the run ended
    alone_rps: tuple[float, ...]  # per worker: rate with the whole device to itself
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        workers = len(self.plan.workers)
        if {len(self.counters), len(self.unfinished), len(self.alone_rps)} != {workers}:
            raise ValueError(f"counters, unfinished and alone_rps need {workers} entries each")
        if self.duration_ns < 1 or self.energy_uj < 0:
            raise ValueError("a run lasts at least 1 ns and takes no negative energy")
        if not all(0 < rate < float("inf") for rate in self.alone_rps):
            raise ValueError("every alone_rps must be a finite number above 0")
        for columns in (self.requests, self.kernels):
            if any(not 0 <= worker < workers for worker in columns.worker):
                raise ValueError("a record belongs to a worker that does not exist")
        if any(not 0 <= lane < len(self.plan.lanes) for lane in self.kernels.lane):
            raise ValueError("a kernel ran on a lane that does not exist")
        for worker, position in zip(self.kernels.worker, self.kernels.position, strict=True):
            if not 0 <= position < self.plan.workers[worker].kernels:
                raise ValueError(f"worker {worker} has no kernel {position}")


def _check_columns(name: str, columns: Requests | KernelRecords) -> None:
    lengths = {
        len(column)
        for field in columns.__struct_fields__
        if isinstance(column := getattr(columns, field), tuple)
    }
    if len(lengths) > 1:
        raise ValueError(f"the columns of {name} have different lengths")

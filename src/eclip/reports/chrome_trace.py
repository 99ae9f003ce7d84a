"""Export of a run log as a Chrome trace, which Perfetto and chrome://tracing open.

A process per worker holds a thread per lane with the kernels on it, and the worker's requests as
asynchronous slices, because requests may wait while others run. Where kernels were recorded, only
requests that meet their window are exported: the rest of a long run would hide the window. If the
kernels come from a separate run, no requests are exported, since they differ. Process 0 is the
device with the number of occupied slices. Time 0 is the earliest moment exported, because viewers
drop negative times, which the warm-up has. One log gives the same bytes every time.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from eclip.core.model_key import ModelKey
from eclip.core.runlog import RunLog
from eclip.core.trace import Trace
from eclip.reports.labels import lane_title

Event = dict[str, Any]
Request = tuple[int, int, int, int]  # worker, arrival, start, end

_DEVICE = 0  # process id; worker w is process w + 1


def export(log: RunLog, traces: Mapping[ModelKey, Trace]) -> bytes:
    """Gzipped JSON. ``traces`` by ``model:batch`` give the kernels their names."""
    requests = [
        request
        for request in zip(
            log.requests.worker,
            log.requests.arrival_ns,
            log.requests.start_ns,
            log.requests.end_ns,
            strict=True,
        )
        if not log.kernels.worker
        or (request[1] < log.kernels.window_ns and not log.kernels.own_run)
    ]
    origin_ns = min((0, *(arrival_ns for _, arrival_ns, _, _ in requests), *log.kernels.start_ns))
    document = {
        "displayTimeUnit": "ns",
        "otherData": {
            "policy": log.plan.policy,
            "mix": log.plan.mix.name,
            "device": log.device,
            "modelled": log.modelled,
            "load": log.load,
            "seed": log.seed,
            "measured_from_us": -origin_ns / 1e3,
            "kernels_from_a_run_of_their_own": log.kernels.own_run,
            "requests_left_out": len(log.requests.worker) - len(requests),
        },
        "traceEvents": [
            *_metadata(log),
            *_kernels(log, traces, origin_ns),
            *_requests(requests, origin_ns),
            *_occupied_slices(log, origin_ns),
        ],
    }
    return gzip.compress(msgspec.json.encode(document), mtime=0)


def _metadata(log: RunLog) -> Iterator[Event]:
    plan = log.plan
    label = "modelled" if log.modelled else "measured"

    def name(what: str, process: int, thread: int = 0, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}

    yield name("process_name", _DEVICE, name=log.device)
    yield name("process_labels", _DEVICE, labels=label)
    yield name("process_sort_index", _DEVICE, sort_index=_DEVICE)
    used: dict[int, set[int]] = {}
    for part in plan.main.assignments:
        used.setdefault(part.worker, set()).update(group.lane for group in part.groups)
    for worker, lane in zip(log.kernels.worker, log.kernels.lane, strict=True):
        used[worker].add(lane)
    for index, planned in enumerate(plan.workers):
        process = index + 1
        yield name("process_name", process, name=f"{planned.name} ({planned.model})")
        yield name("process_labels", process, labels=label)
        yield name("process_sort_index", process, sort_index=process)
        for lane in sorted(used[index]):
            yield name("thread_name", process, _thread(lane), name=lane_title(plan, lane))
            yield name("thread_sort_index", process, _thread(lane), sort_index=lane)


def _thread(lane: int) -> int:
    return lane + 1  # viewers take thread 0 for an idle one


def _kernels(log: RunLog, traces: Mapping[ModelKey, Trace], origin_ns: int) -> Iterator[Event]:
    records = log.kernels
    names = [
        [kernel.name for kernel in traces[worker.model].kernels] if worker.model in traces else []
        for worker in log.plan.workers
    ]
    for worker, position, lane, start_ns, end_ns in records.rows():
        known = 0 <= position < len(names[worker])
        yield {
            "ph": "X",
            "name": names[worker][position] if known else f"kernel {position}",
            "cat": "kernel",
            "pid": worker + 1,
            "tid": _thread(lane),
            "ts": (start_ns - origin_ns) / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "args": {"position": position},
        }


def _requests(requests: Sequence[Request], origin_ns: int) -> Iterator[Event]:
    for index, (worker, arrival_ns, start_ns, end_ns) in enumerate(requests):
        common = {"cat": "request", "id2": {"local": index}, "pid": worker + 1, "tid": 0}
        parts = [("waiting", arrival_ns, start_ns), ("running", start_ns, end_ns)]
        # The outer slice comes first: its name is the name of the track.
        moments = [("b", "request", arrival_ns)]
        for name, begin_ns, finish_ns in parts:
            if finish_ns > begin_ns:
                moments += [("b", name, begin_ns), ("e", name, finish_ns)]
        moments.append(("e", "request", end_ns))
        for phase, name, time_ns in moments:
            yield common | {"ph": phase, "name": name, "ts": (time_ns - origin_ns) / 1e3}


def _occupied_slices(log: RunLog, origin_ns: int) -> Iterator[Event]:
    """A counter event at every moment at which the number of slices in use changes."""
    records = log.kernels
    changes = sorted(
        [(time_ns, -1, lane) for time_ns, lane in zip(records.end_ns, records.lane, strict=True)]
        + [(time_ns, 1, lane) for time_ns, lane in zip(records.start_ns, records.lane, strict=True)]
    )
    on_slice = [0] * len(log.plan.topology.slice_units)
    masks = [tuple(lane.mask) for lane in log.plan.lanes]
    shown = None
    for index, (time_ns, step, lane) in enumerate(changes):
        for part in masks[lane]:
            on_slice[part] += step
        if index + 1 < len(changes) and changes[index + 1][0] == time_ns:
            continue
        occupied = sum(1 for kernels in on_slice if kernels)
        if occupied != shown:
            shown = occupied
            yield {
                "ph": "C",
                "name": "occupied slices",
                "pid": _DEVICE,
                "tid": 0,
                "ts": (time_ns - origin_ns) / 1e3,
                "args": {"count": occupied},
            }

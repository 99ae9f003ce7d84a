"""The simulator's event loop, compiled.

A worker is idle, in a delay (launch, gap, barrier), queued for a hardware queue or a link, copying,
running a kernel, or held at a joint (``stretches.py``). A hardware queue holds one kernel at a time
and serves waiters in the order they became ready; lanes beyond the number of queues share one,
which is how they come to wait falsely. A link, one for each direction between host and device, is a
queue like these. It holds one worker at a time: copies are not shared out, and a worker whose next
copy is queued right behind keeps the link. A copy is a row of ``kernels`` like any step. Events are
handled in worker order at equal times and nothing is random here, so equal inputs give equal logs.

``advance`` stops when a record buffer is full; the caller empties it and goes on. Cost: O(workers ×
slices) per event and at most three events per kernel (its start, last wave and end), so it is
linear in the kernels simulated.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eclip.core import credit, decide, rules
from eclip.core.copies import NO_LINK
from eclip.core.credit import NO_VERDICT
from eclip.jit import compiled_with, inlined
from eclip.sim import contention, stretches
from eclip.sim.contention import (
    RUNNING_KERNEL,
    Floats,
    Ints,
    Records,
    contend,
    draw_w,
)
from eclip.sim.stretches import (
    AT_JOINT,
    COPYING,
    DELAY,
    IDLE,
    QUEUED,
    RUNNING,
    Joined,
    Stretches,
    accept_request,
    end_stretch,
    keeps_link,
    rest,
    settle,
    settle_account,
)

NOBODY = -1
DONE, BUFFER_FULL = 0, 1
# What is due within an instant happens now: 1 ps, or after hours what a float can tell apart.
_INSTANT = 1e-3
_ROUNDING = 4 * np.finfo(np.float64).eps

# A step of a request: a kernel, or a copy or a part of one.
KERNEL = np.dtype(
    [
        ("lane", np.int64),
        ("position", np.int32),  # of the kernel that it is or goes with, in the request
        ("link", np.int16),  # of a copy, else NO_LINK
        ("queue", np.int16),
        ("barrier", np.int64),  # 1 where it waits on another lane
        ("before_ns", np.float64),  # barrier and lane switch
        ("busy_ns", np.float64),
        ("gap_ns", np.float64),  # idle time after it
        ("tail_ns", np.float64),
        ("body_room", np.float64),
        ("tail_room", np.float64),
        ("open", np.float64),
        ("dram_rate", np.float64),
        ("l2_rate", np.float64),
        ("pressing", np.float64),
        ("power_w", np.float64),
    ]
)
ROUTE = np.dtype(
    [
        ("first", np.int64),
        ("end", np.int64),
        ("launch_ns", np.float64),
        ("stretch", np.int64),  # its first, in Stretches.rows
    ]
)
WORKER = np.dtype(
    [
        *RUNNING_KERNEL,
        ("phase", np.int64),
        ("due", np.float64),  # end of the delay, or the arrival an idle worker waits for
        ("kernel", np.int64),  # the current one, in Setup.kernels
        ("route_end", np.int64),
        ("kernel_start", np.float64),
        ("ready_at", np.float64),  # when a queued kernel began to wait
        ("falsely", np.int64),  # 1 where it waits behind an unrelated lane
        ("closed", np.int64),  # 1 runs back to back
        ("arrival", np.float64),
        ("start", np.float64),
        ("next_arrival", np.int64),  # in Setup.arrivals
        ("arrival_end", np.int64),
        ("kernels", np.int64),  # counters, as the following
        ("barriers", np.int64),
        ("lane_waits", np.int64),
        ("false_waits", np.int64),
        ("false_wait_ns", np.float64),
    ]
)
CLOCK = np.dtype(
    [
        ("now", np.float64),
        ("energy_nj", np.float64),
        ("holder", np.int64),  # whose turn it is, where workers take turns
        ("turn_ready", np.float64),
        ("turn_end", np.float64),
        ("tickets", np.int64),
        ("requests", np.int64),  # rows filled in the buffers
        ("kernels", np.int64),
    ]
)


class Setup(NamedTuple):
    """What does not change during a run."""

    kernels: Records  # KERNEL, all routes one after another
    routes: Records  # ROUTE, variant × worker
    variant_active: Ints  # per variant a bit set of workers; the smallest sets first
    queues: int  # of lanes, and the two links behind them
    lane_units: Floats  # lane × slice: units of the slice if the lane has it, else 0
    lane_total: Floats
    arrivals: Ints  # all workers' arrivals one after another
    begins: Ints  # when the host can begin each of them; without stalls the arrivals themselves
    limits: Records  # LIMITS, one entry
    turns: int  # 1: time-sliced
    turn_ns: float
    turn_switch_ns: float
    trace_until: float
    gives_way: int  # 1: some worker has joints
    stretches: Stretches


class State(NamedTuple):
    workers: Records  # WORKER
    clock: Records  # CLOCK, one entry
    queue_holder: Ints  # per queue: the worker whose kernel or copy is in it
    active: Ints  # scratch, per worker
    scratch: Floats  # 2 × slices
    request_rows: Ints  # buffer of (worker, arrival, start, end, verdict)
    kernel_rows: Ints  # buffer of (worker, position, lane, start, end)
    joined: Joined


@compiled_with(
    *(contention.__file__, stretches.__file__),
    *(decide.__file__, credit.__file__, rules.__file__),
)
def advance(m: Setup, s: State, until: float, finish: bool) -> int:
    """Handle all events before ``until``; with ``finish`` let the time up to it pass as well.

    DONE, or BUFFER_FULL if the caller must empty a buffer first. Where a run is cut into several
    calls does not change it: only the last one finishes.
    """
    # Taken out of their tuples once: inside the loop that would cost as much as the work itself.
    kernels = m.kernels
    lane_units, lane_total, limits = m.lane_units, m.lane_total, m.limits
    workers, queue_holder = s.workers, s.queue_holder
    active, held, crowd = s.active, s.scratch[0], s.scratch[1]
    request_rows, kernel_rows = s.request_rows, s.kernel_rows
    gives_way, fixed, joined = m.gives_way, m.stretches, s.joined
    clock = s.clock[0]
    count = workers.shape[0]
    while True:
        if (
            clock["requests"] + count > request_rows.shape[0]
            or clock["kernels"] + count > kernel_rows.shape[0]
        ):
            return BUFFER_FULL
        if m.turns:
            _pass_turn(workers, clock, m.turn_ns, m.turn_switch_ns)
        running = _find_running(workers, clock, active, m.turns)
        if running > 0:
            contend(active, running, workers, lane_units, lane_total, limits, held, crowd)
        power_w = draw_w(active, running, workers, limits)
        now = _next_event(workers, clock, active, running, m.turns)
        if gives_way:
            now = min(now, max(joined.wake[0], clock["now"]))
        if now >= until:
            if finish:
                _elapse(workers, clock, active, running, power_w, until)
            return DONE
        _elapse(workers, clock, active, running, power_w, now)
        instant = _INSTANT + _ROUNDING * abs(now)
        for index in range(count):
            worker = workers[index]
            if worker["phase"] == RUNNING:
                if worker["remaining"] <= instant:
                    served = kernels[worker["kernel"]]["queue"]
                    _finish_kernel(worker, index, clock, kernels, kernel_rows, m.trace_until)
                    if gives_way and worker["kernel"] == worker["route_end"]:
                        end_stretch(fixed, joined, workers, index, now)
                    _serve_queue(workers, clock, kernels, queue_holder, served)
                elif worker["remaining"] <= worker["tail_ns"] + instant:
                    worker["tail_ns"] = np.inf  # from here on it is in its last wave
            elif worker["due"] <= now + instant:
                if worker["phase"] == COPYING:
                    _finish_copy(m, s, index)
                elif worker["phase"] == DELAY and worker["kernel"] < worker["route_end"]:
                    _enter_queue(workers, index, clock, kernels, queue_holder)
                elif worker["phase"] <= DELAY:
                    _change_request(m, s, index, instant)
        if gives_way and (joined.unsettled[0] or joined.wake[0] <= now + instant):
            settle(fixed, joined, workers, kernels, now)


@inlined
def _find_running(workers: Records, clock: np.void, active: Ints, turns: int) -> int:
    """List the workers whose kernels make progress; with turns, only the holder's does."""
    running = 0
    for index in range(workers.shape[0]):
        if workers[index]["phase"] == RUNNING and (
            not turns or (clock["holder"] == index and clock["now"] >= clock["turn_ready"])
        ):
            active[running] = index
            running += 1
    return running


@inlined
def _next_event(workers: Records, clock: np.void, active: Ints, running: int, turns: int) -> float:
    soonest = np.inf
    for index in range(workers.shape[0]):
        worker = workers[index]
        if worker["phase"] <= COPYING:
            soonest = min(soonest, worker["due"])
    for i in range(running):
        worker = workers[active[i]]
        left = worker["remaining"]
        if left > worker["tail_ns"]:
            left -= worker["tail_ns"]
        soonest = min(soonest, clock["now"] + left / worker["speed"])
    if turns and clock["holder"] != NOBODY:
        soonest = min(soonest, clock["turn_end"])
        if clock["now"] < clock["turn_ready"]:
            soonest = min(soonest, clock["turn_ready"])
    return float(max(soonest, clock["now"]))


@inlined
def _elapse(
    workers: Records, clock: np.void, active: Ints, running: int, power_w: float, until: float
) -> None:
    elapsed = until - clock["now"]
    for i in range(running):
        workers[active[i]]["remaining"] -= workers[active[i]]["speed"] * elapsed
    # Only the measured part, from time 0 on, counts.
    clock["energy_nj"] += power_w * (max(until, 0.0) - max(clock["now"], 0.0))
    clock["now"] = until


@inlined
def _pass_turn(workers: Records, clock: np.void, turn_ns: float, turn_switch_ns: float) -> None:
    """Time-slicing: the worker that holds the device, and until when; a holder that has nothing
    queued, as between two of its requests or at a joint, gives it up at once."""
    holder = clock["holder"]
    kept = (
        holder != NOBODY
        and workers[holder]["phase"] != IDLE
        and workers[holder]["phase"] != AT_JOINT
        and clock["now"] < clock["turn_end"] - _INSTANT - _ROUNDING * abs(clock["now"])
    )
    if not kept:
        clock["holder"] = NOBODY
        count = workers.shape[0]
        for step in range(1, count + 1):
            candidate = (max(holder, 0) + step) % count
            if workers[candidate]["phase"] != IDLE and workers[candidate]["phase"] != AT_JOINT:
                clock["holder"] = candidate
                clock["turn_ready"] = clock["now"]
                if candidate != holder:
                    clock["turn_ready"] += turn_switch_ns
                clock["turn_end"] = clock["turn_ready"] + turn_ns
                break


@inlined
def _begin_request(
    workers: Records, index: int, now: float, arrivals: Ints, routes: Records, variant_active: Ints
) -> int:
    """Which variant it takes; gives the first of its route's stretches."""
    worker = workers[index]
    if worker["closed"]:
        worker["arrival"] = now
    else:
        worker["arrival"] = arrivals[worker["next_arrival"]]
        worker["next_arrival"] += 1
    worker["start"] = now
    worker["phase"] = DELAY
    active = 0
    for other in range(workers.shape[0]):
        if workers[other]["phase"] != IDLE:
            active |= 1 << other
    variant = 0  # sets are sorted by size, and the last holds everyone
    while active & ~variant_active[variant]:
        variant += 1
    route = routes[variant, index]
    worker["route_end"] = route["end"]
    worker["kernel"] = route["first"]
    worker["due"] = now + route["launch_ns"]
    return int(route["stretch"])


@inlined
def _enter_queue(
    workers: Records, index: int, clock: np.void, kernels: Records, queue_holder: Ints
) -> None:
    worker = workers[index]
    kernel = kernels[worker["kernel"]]
    queue = kernel["queue"]
    occupant = queue_holder[queue]
    if occupant == index:  # a link that it kept
        occupant = NOBODY
    if occupant == NOBODY:
        queue_holder[queue] = index
        _start_kernel(worker, kernel, clock)
    else:
        worker["phase"] = QUEUED
        worker["ready_at"] = clock["now"]
        worker["ticket"] = clock["tickets"]
        clock["tickets"] += 1
        if kernel["link"] == NO_LINK:
            worker["falsely"] = workers[occupant]["lane"] != kernel["lane"]
            if clock["now"] >= 0.0:
                worker["false_waits"] += worker["falsely"]
                worker["lane_waits"] += 1 - worker["falsely"]
        else:
            worker["falsely"] = 0


@inlined
def _serve_queue(
    workers: Records, clock: np.void, kernels: Records, queue_holder: Ints, served: int
) -> None:
    """A kernel or copy left the queue: the one that has waited longest enters."""
    queue_holder[served] = NOBODY
    for other in range(workers.shape[0]):
        waiter = workers[other]
        if waiter["phase"] == QUEUED and kernels[waiter["kernel"]]["queue"] == served:
            first = queue_holder[served]
            if first == NOBODY or waiter["ticket"] < workers[first]["ticket"]:
                queue_holder[served] = other
    if queue_holder[served] != NOBODY:
        waiter = workers[queue_holder[served]]
        if clock["now"] >= 0.0 and waiter["falsely"]:
            waiter["false_wait_ns"] += clock["now"] - max(waiter["ready_at"], 0.0)
        _start_kernel(waiter, kernels[waiter["kernel"]], clock)


@inlined
def _start_kernel(worker: np.void, kernel: np.void, clock: np.void) -> None:
    if kernel["link"] != NO_LINK:
        worker["phase"] = COPYING
        worker["due"] = clock["now"] + kernel["busy_ns"]
        return
    worker["phase"] = RUNNING
    worker["kernel_start"] = clock["now"]
    worker["ticket"] = clock["tickets"]
    clock["tickets"] += 1
    worker["lane"] = kernel["lane"]
    worker["remaining"] = kernel["busy_ns"]
    worker["tail_ns"] = kernel["tail_ns"]
    worker["body_room"] = kernel["body_room"]
    worker["tail_room"] = kernel["tail_room"]
    worker["open"] = kernel["open"]
    worker["dram_rate"] = kernel["dram_rate"]
    worker["l2_rate"] = kernel["l2_rate"]
    worker["pressing"] = kernel["pressing"]
    worker["power_w"] = kernel["power_w"]


@inlined
def _finish_kernel(
    worker: np.void,
    index: int,
    clock: np.void,
    kernels: Records,
    rows: Ints,
    trace_until: float,
) -> None:
    now = clock["now"]
    done = worker["kernel"]
    kernel = kernels[done]
    if now >= 0.0:
        worker["kernels"] += 1
        worker["barriers"] += kernel["barrier"]
        if now < trace_until:
            row = clock["kernels"]
            rows[row, 0] = index
            rows[row, 1] = kernel["position"]
            rows[row, 2] = kernel["lane"]
            rows[row, 3] = round(worker["kernel_start"])
            rows[row, 4] = round(now)
            clock["kernels"] += 1
    _go_on(worker, kernels, now)


@inlined
def _go_on(worker: np.void, kernels: Records, now: float) -> None:
    """To the next step of its route."""
    done = worker["kernel"]
    worker["kernel"] = done + 1
    worker["phase"] = DELAY
    worker["due"] = now + kernels[done]["gap_ns"]
    if done + 1 < worker["route_end"]:
        worker["due"] += kernels[done + 1]["before_ns"]


@inlined
def _finish_request(worker: np.void, index: int, clock: np.void, begins: Ints) -> None:
    now = clock["now"]
    worker["phase"] = IDLE
    if clock["holder"] == index:
        clock["turn_end"] = now
    if worker["closed"]:
        worker["due"] = now
    elif worker["next_arrival"] < worker["arrival_end"]:
        worker["due"] = max(now, begins[worker["next_arrival"]])
    else:
        worker["due"] = np.inf


@inlined
def _record(worker: np.void, index: int, clock: np.void, rows: Ints, verdict: int) -> None:
    row = clock["requests"]
    rows[row, 0] = index
    rows[row, 1] = round(worker["arrival"])
    rows[row, 2] = round(worker["start"])
    rows[row, 3] = round(clock["now"])
    rows[row, 4] = verdict
    clock["requests"] += 1


@compiled_with(stretches.__file__, decide.__file__, credit.__file__, rules.__file__)
def _change_request(m: Setup, s: State, index: int, instant: float) -> None:
    """A request ends, and the next one begins if it is there already; or an idle worker's begins.
    Not inlined, as ``_finish_copy``."""
    workers, clock = s.workers, s.clock[0]
    worker, now = workers[index], clock["now"]
    if worker["phase"] == DELAY:
        _finish_request(worker, index, clock, m.begins)
        verdict = NO_VERDICT
        if m.gives_way:
            verdict = settle_account(m.stretches, s.joined, worker, index, now)
        if now >= 0.0:
            _record(worker, index, clock, s.request_rows, verdict)
    if worker["due"] <= now + instant:
        first = _begin_request(workers, index, now, m.arrivals, m.routes, m.variant_active)
        if m.gives_way:
            accept_request(m.stretches, s.joined, workers, index, m.arrivals, now, first)
    elif m.gives_way:
        rest(s.joined, index)


@compiled_with(stretches.__file__, decide.__file__, credit.__file__, rules.__file__)
def _finish_copy(m: Setup, s: State, index: int) -> None:
    """Not inlined: it is rare, and a longer loop is slower for all workers."""
    worker, clock = s.workers[index], s.clock[0]
    link = m.kernels[worker["kernel"]]["queue"]
    _go_on(worker, m.kernels, clock["now"])
    if m.gives_way and worker["kernel"] == worker["route_end"]:
        end_stretch(m.stretches, s.joined, s.workers, index, clock["now"])
    if not keeps_link(m.stretches, s.joined, s.workers, m.kernels, index, link):
        _serve_queue(s.workers, clock, m.kernels, s.queue_holder, link)

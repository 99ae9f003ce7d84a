"""A coarse simulation, request by request, for a search's first look at a set.

A request is work for its time alone. Requests that run together slow each other down by pair, as
measured by the simulator kernel by kernel (``scores.py``); the slowdowns of several neighbours add
up. Workers yield by the rules of ``core/decide.py``: of two services the more urgent goes on, a
request is overtaken at most twice, and a yielding worker stops only after its stretches in flight.
A run takes about a hundredth of the simulator's time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eclip.core.rules import MOST_OVERTAKEN, MOST_QUEUED
from eclip.jit import compiled

Floats = npt.NDArray[np.float64]


@compiled
def most_late(count: int) -> int:
    """The number of ``count`` requests that may be later than their p99."""
    return max((count - 1) // 100, 0)


@compiled
def run_coarsely(
    arrivals: Floats,  # ns, worker after worker
    first: npt.NDArray[np.int64],  # index of each worker's first arrival, and the total count
    request_ns: Floats,
    bound_ns: Floats,
    drain_ns: Floats,  # in flight when a worker yields
    slower: Floats,  # (worker, other): how much longer it takes beside the other, less 1
    yields: bool,
    hopeless: Floats,  # ends a run when a worker's p99 is surely longer
) -> Floats:
    """Every request's latency, in the order of the arrivals; infinite if it was not answered."""
    workers = len(request_ns)
    latency = np.full(len(arrivals), np.inf)
    head = first[:-1].copy()  # the request that each worker is at, or waits for
    left = request_ns.copy()
    active = np.zeros(workers, dtype=np.bool_)
    held = np.zeros(workers, dtype=np.bool_)
    hold_at = np.full(workers, np.inf)
    overtaken = np.zeros(workers, dtype=np.int64)
    must_act = np.zeros(workers)  # when the most urgent request begun or queued must act, at latest
    late = np.zeros(workers, dtype=np.int64)
    may_be_late = np.zeros(workers, dtype=np.int64)
    for worker in range(workers):
        arrived = arrivals[first[worker] : first[worker + 1]]
        may_be_late[worker] = most_late(int(np.count_nonzero(arrived >= 0)))
    speed = np.ones(workers)
    running = np.zeros(workers, dtype=np.int64)
    now = arrivals.min()
    while True:
        event, who, what = np.inf, -1, 0
        for worker in range(workers):
            if not active[worker]:
                if head[worker] < first[worker + 1] and arrivals[head[worker]] < event:
                    event, who, what = arrivals[head[worker]], worker, 0
                continue
            if hold_at[worker] < event:
                event, who, what = hold_at[worker], worker, 1
            if not held[worker] and now + left[worker] / speed[worker] < event:
                event, who, what = now + left[worker] / speed[worker], worker, 2
        if who < 0:
            return latency
        event = max(event, now)
        for worker in range(workers):
            if active[worker] and not held[worker]:
                left[worker] -= (event - now) * speed[worker]
        now = event
        if what == 0:
            active[who] = True
            left[who] = request_ns[who]
            overtaken[who] = 0
        elif what == 1:
            held[who] = True
            hold_at[who] = np.inf
        else:
            latency[head[who]] = now - arrivals[head[who]]
            if arrivals[head[who]] >= 0 and latency[head[who]] > hopeless[who]:
                late[who] += 1
                if late[who] > may_be_late[who]:
                    return latency
            head[who] += 1
            hold_at[who] = np.inf
            overtaken[who] = 0
            left[who] = request_ns[who]
            active[who] = head[who] < first[who + 1] and arrivals[head[who]] <= now
        if yields and what != 1 and active[who]:
            must_act[who] = np.inf
            for behind in range(min(first[who + 1] - head[who], MOST_QUEUED)):
                arrival = arrivals[head[who] + behind]
                if arrival > now:
                    break
                latest = arrival + bound_ns[who] - (behind + 1) * request_ns[who]
                must_act[who] = min(must_act[who], latest)
        if yields:
            first_to_act, earliest = -1, np.inf  # all other active workers give way to first_to_act
            for worker in range(workers):
                if active[worker]:
                    latest = must_act[worker] + request_ns[worker] - left[worker]
                    if first_to_act < 0 or latest < earliest:
                        first_to_act, earliest = worker, latest
            for worker in range(workers):
                if not active[worker]:
                    continue
                if worker == first_to_act or overtaken[worker] >= MOST_OVERTAKEN:
                    hold_at[worker] = np.inf
                    if held[worker]:
                        held[worker] = False
                        overtaken[worker] += 1
                elif not held[worker] and hold_at[worker] == np.inf:
                    hold_at[worker] = now + drain_ns[worker]
        count = 0
        for worker in range(workers):
            if active[worker] and not held[worker]:
                running[count] = worker
                count += 1
        for i in range(count):
            longer = 1.0
            for j in range(count):
                if i != j:
                    longer += slower[running[i], running[j]]
            speed[running[i]] = 1 / longer


@compiled
def value_at(values: Floats, rank: int) -> float:
    """The value at index ``rank`` of the sorted values. Changes the order of ``values``.

    This is Hoare's selection. Numba takes four seconds to compile ``np.partition``.
    """
    low, high = 0, len(values) - 1
    while low < high:
        pivot = values[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while values[right] > pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if rank <= right:
            high = right
        elif rank >= left:
            low = left
        else:
            break
    return float(values[rank])


@compiled
def p99(took_ns: Floats) -> float:
    """Without interpolation: of a few requests, the slowest one counts. As NumPy's percentile with
    the method "higher", in a fifth of its time."""
    if len(took_ns) == 0:
        return 0.0
    return value_at(took_ns.copy(), len(took_ns) - 1 - most_late(len(took_ns)))


@compiled
def tail_coarsely(
    arrivals: Floats,  # as above; those before time 0 warm up and are not counted
    first: npt.NDArray[np.int64],
    request_ns: Floats,
    bound_ns: Floats,
    drain_ns: Floats,
    slower: Floats,
    yields: bool,
    hopeless: float,  # times its bound: a worker this late ends the run
) -> float:
    """p99 over bound, of the worker that has it worst."""
    took = run_coarsely(
        arrivals, first, request_ns, bound_ns, drain_ns, slower, yields, hopeless * bound_ns
    )
    worst = 0.0
    for worker in range(len(request_ns)):
        begin, end = first[worker], first[worker + 1]
        while begin < end and arrivals[begin] < 0:
            begin += 1
        worst = max(worst, p99(took[begin:end]) / bound_ns[worker])
    return worst

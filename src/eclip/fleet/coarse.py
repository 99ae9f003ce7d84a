"""A coarse simulation, request by request: what a search looks at before it asks the simulator.

A request is work for its time alone. Requests that run together slow each other down by pair, as
measured by the simulator kernel by kernel (``scores.py``); with more than two, the slowdowns add
up. Workers that give way do it by the rules of ``devices/deciding.py``: of two services the one
that must act first goes on, a request is overtaken at most twice, and what yields stops only when
its stretches in flight are done. A run takes about a hundredth of the simulator's time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eclip.jit import compiled
from eclip.runtime.reactions import MOST_OVERTAKEN, MOST_QUEUED

Floats = npt.NDArray[np.float64]


@compiled
def run_coarsely(
    arrivals: Floats,  # of all workers, one after another, ns
    first: npt.NDArray[np.int64],  # where each worker's begin, and where the last one's end
    request_ns: Floats,
    bound_ns: Floats,
    drain_ns: Floats,  # what is in flight when a worker yields
    slower: Floats,  # (worker, other): how much longer it takes beside the other, less 1
    yields: bool,
    hopeless: Floats,  # ends a run in which more than 1% of a worker's requests take so long
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
    speed = np.ones(workers)
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
            late[who] += latency[head[who]] > hopeless[who]
            if 100 * late[who] > first[who + 1] - first[who]:
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
            for worker in range(workers):
                if not active[worker]:
                    continue
                own_limit = must_act[worker] + request_ns[worker] - left[worker]
                gives_way = False
                if overtaken[worker] < MOST_OVERTAKEN:
                    for other in range(workers):
                        if other == worker or not active[other]:
                            continue
                        limit = must_act[other] + request_ns[other] - left[other]
                        if limit < own_limit or (limit == own_limit and other < worker):
                            gives_way = True
                if not gives_way:
                    hold_at[worker] = np.inf
                    if held[worker]:
                        held[worker] = False
                        overtaken[worker] += 1
                elif not held[worker] and hold_at[worker] == np.inf:
                    hold_at[worker] = now + drain_ns[worker]
        for worker in range(workers):
            if active[worker] and not held[worker]:
                longer = 1.0
                for other in range(workers):
                    if other != worker and active[other] and not held[other]:
                        longer += slower[worker, other]
                speed[worker] = 1 / longer

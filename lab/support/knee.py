"""The largest load that is served: found by steps, then by halving."""

from __future__ import annotations

import math
from collections.abc import Callable

WANTED = 0.99  # of the requests, within their bounds
STEP, HALVINGS = 1.5, 4  # which leave 1.5^(1/16), 2.6%, between what is served and what is not
LEAST_LOAD, MOST_LOAD = 0.05, 8.0


def find_knee(attain: Callable[[float], float], first: float) -> float:
    """``attain``: the part of the requests that is answered in time at a load.

    Steps go up from a load that is served and down from one that is not, until there is one of
    each. 0: none of the loads tried is served. Every load is tried once.
    """
    served, missed, load = 0.0, math.inf, first
    while not (served and missed < math.inf) and LEAST_LOAD <= load <= MOST_LOAD:
        if attain(load) >= WANTED:
            served, load = load, load * STEP
        else:
            missed, load = load, load / STEP
    if not served or missed == math.inf:
        return served
    for _ in range(HALVINGS):
        middle = math.sqrt(served * missed)
        if attain(middle) >= WANTED:
            served = middle
        else:
            missed = middle
    return served

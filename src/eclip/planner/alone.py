"""Alone: what workers give in one session of plain streams while all others are idle.

Rates alone are of closed loops. The p99 alone at a rate is computed from times of requests: a bound
of so many times the p99 alone is one number, whatever arrivals a run happens to have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eclip.core.device import MIN_SECONDS, Device, Session, Window
from eclip.core.load import Load, closed_loop, load_of_mix
from eclip.core.mix import Mix
from eclip.core.model_key import ModelKey
from eclip.core.plan import unpartitioned
from eclip.core.profile import Profile, Times
from eclip.core.program import lower
from eclip.errors import DeviceError

_ARRIVALS = 200_000  # of which a p99 alone is taken: another seed changes it by about 1%
_DRAWS = 64  # of arrivals, among which the typical ones are looked for
REQUESTS = 20  # enough for a median-stable rate on a GPU; the simulator repeats itself exactly


def p99_alone_ns(rate_rps: float, times_ns: Times) -> float:
    """The p99 of requests that arrive at random at this rate, each from arrival to completion.

    ``times_ns``: of requests that did not wait; one of them is drawn for each arrival. A request
    waits until all before it are done (the recursion of Lindley).
    """
    random = np.random.default_rng(0)
    gaps = random.exponential(1e9 / rate_rps, _ARRIVALS)
    took = random.choice(np.asarray(times_ns, dtype=np.float64), _ARRIVALS)
    return _p99_ns(gaps[1:], took)


def typical_load(
    mix: Mix, seconds: float, warmup_seconds: float, alone_rps: Sequence[float], seed: int = 0
) -> Load:
    """Few arrivals that give every service about the p99 alone of many.

    Of some hundred arrivals the p99 alone is off by a tenth and more, and so is every plan's. Of
    several draws, that with the least error is taken; the error is the largest of all services.
    """
    wanted = {
        service: p99_alone_ns(mix.workers[service].rate_rps or 0.0, np.array([1e9 / alone]))
        for service, alone in enumerate(alone_rps)
        if service in mix.services
    }

    def error(load: Load) -> float:
        errors = [0.0]
        for service, tail_ns in wanted.items():
            arrivals = load.arrivals[service]
            if arrivals is not None and np.count_nonzero(arrivals >= 0):
                took = np.full(len(arrivals), 1e9 / alone_rps[service])
                found_ns = _p99_ns(np.diff(arrivals), took, int(np.searchsorted(arrivals, 0)))
                errors.append(abs(np.log(found_ns / tail_ns)))
        return max(errors)

    draws = [
        load_of_mix(mix, seconds, warmup_seconds, _DRAWS * seed + draw)
        for draw in range(_DRAWS if wanted else 1)
    ]
    return min(draws, key=error)


def _p99_ns(gaps: Times, took: Times, first: int = 0) -> float:
    """The p99 of the requests from ``first`` on, ``gaps`` between their arrivals."""
    grown = np.cumsum(took[:-1] - gaps)
    waited = np.append(0.0, grown - np.minimum(np.minimum.accumulate(grown), 0.0))
    return float(np.percentile((waited + took)[first:], 99))


def alone_rates(
    device: Device, profiles: Sequence[Profile], sources: Sequence[Any]
) -> tuple[float, ...]:
    """Closed-loop rate of every worker with all others present but idle; equal models share one
    measurement."""
    plan = unpartitioned(device.topology, profiles)
    rates: dict[ModelKey, float] = {}
    with device.open(lower(plan, [profile.trace for profile in profiles]), sources) as session:
        for worker, profile in enumerate(profiles):
            if profile.model not in rates:
                rates[profile.model] = alone_rate(session, worker, profiles)
    return tuple(rates[profile.model] for profile in profiles)


def alone_rate(
    session: Session, worker: int, profiles: Sequence[Profile], least_s: float = MIN_SECONDS
) -> float:
    """Closed-loop rate of one worker of the session while the others are idle."""
    load = closed_loop(len(profiles), only=worker)
    request_s = profiles[worker].request_ns[-1] / 1e9
    # Short requests take longer than their kernels: launching them counts too.
    for factor in (1, 10, 100, 1000):
        window = Window(
            seconds=max(least_s, factor * (REQUESTS + 5) * request_s),
            warmup_seconds=2 * request_s,
            trace_ms=0.0,
        )
        ends = session.run(load, window).requests.end_ns
        if len(ends) >= REQUESTS:
            return (len(ends) - 1) * 1e9 / (ends[-1] - ends[0])
    raise DeviceError(
        f"{profiles[worker].model} alone completed {len(ends)} requests in {window.seconds:g} s"
    )

"""Alone: closed-loop rates of workers in one session of plain streams, all others idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eclip.core.device import MIN_SECONDS, Device, Session, Window
from eclip.core.load import closed_loop
from eclip.core.model_key import ModelKey
from eclip.core.plan import unpartitioned
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.errors import DeviceError

REQUESTS = 20  # enough for a median-stable rate on a GPU; the simulator repeats itself exactly


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

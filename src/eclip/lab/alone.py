"""How fast a worker is with the whole device to itself: the denominator of STP and fairness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from eclip.artefacts.plan import unpartitioned
from eclip.artefacts.profile import Profile
from eclip.devices.base import MIN_SECONDS, Device, Window
from eclip.devices.load import CLOSED_LOOP, Load
from eclip.errors import DeviceError
from eclip.runtime.program import lower

Source = TypeVar("Source")
REQUESTS = 20  # enough for a median-stable rate on a GPU; the simulator repeats itself exactly


def alone_rates(
    device: Device[Source], profiles: Sequence[Profile], sources: Sequence[Source]
) -> tuple[float, ...]:
    """Closed-loop rate of every worker, measured alone on all units; equal models share one run."""
    rates: dict[str, float] = {}
    for profile, source in zip(profiles, sources, strict=True):
        if profile.key not in rates:
            rates[profile.key] = _alone_rate(device, profile, source)
    return tuple(rates[profile.key] for profile in profiles)


def _alone_rate(device: Device[Source], profile: Profile, source: Source) -> float:
    load = Load(label="closed loop", seed=0, arrivals=(CLOSED_LOOP,))
    program = lower(unpartitioned(device.topology, [profile]), [profile.trace])
    request_s = profile.request_ns[-1] / 1e9
    with device.open(program, [source]) as session:
        # Short requests take longer than their kernels: launching them counts too.
        for factor in (1, 10, 100, 1000):
            window = Window(
                seconds=max(MIN_SECONDS, factor * (REQUESTS + 5) * request_s),
                warmup_seconds=2 * request_s,
                trace_ms=0.0,
            )
            ends = session.run(load, window, alone_rps=[1.0]).requests.end_ns
            if len(ends) >= REQUESTS:
                return (len(ends) - 1) * 1e9 / (ends[-1] - ends[0])
    raise DeviceError(f"{profile.key} alone completed {len(ends)} requests in {window.seconds:g} s")

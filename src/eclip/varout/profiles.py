"""Profiles of models with variable-output stages: expected and tail times from a distribution.

A profile is measured with the lengths of its own inputs. The model of a stage gives its time for
any length, so the stage's kernel times are scaled to the expected time over the distribution, and
to the tail; the rest of the profile stays as measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from eclip.core.lengths import Lengths
from eclip.core.profile import Profile
from eclip.core.trace import KernelLengths, Trace
from eclip.errors import UsageError
from eclip.files.machine import Machine
from eclip.varout import gpu_model
from eclip.varout.estimate import TAIL
from eclip.varout.mechanisms import Mechanism

STAGE_KERNELS = frozenset(
    f"eclip_{name}"
    for name in (
        "select", "resume", "consume", "advance", "resident", "merged", "next", "clear", "valid",
        "values", "take", "put", "overlaps", "suppress", "route", "expand",
    )
)  # fmt: skip


def stage_kernels(trace: Trace) -> list[int]:
    """Where a trace has kernels of variable-output stages."""
    return [
        position for position, kernel in enumerate(trace.kernels) if kernel.name in STAGE_KERNELS
    ]


def annotate(
    profile: Profile,
    lengths: Lengths,
    machine: Machine,
    mechanism: Mechanism,
    capacity: int,
    profiled_length: int,
    kernels: Sequence[int] | None = None,
) -> Profile:
    """The profile with the lengths of one stage, which had ``profiled_length`` when measured."""
    if machine.gpu is None:
        raise UsageError(f"{machine.title} is no GPU, so it says nothing about a profile's times")
    if profile.trace.lengths:
        raise UsageError(f"{profile.model} has its lengths already; annotate the measured profile")
    places = stage_kernels(profile.trace) if kernels is None else sorted(set(kernels))
    if not places or not 0 <= places[0] <= places[-1] < len(profile.trace.kernels):
        raise UsageError(
            f"{profile.model} has no variable-output kernels"
            + ("; name their positions" if kernels is None else f" at {places}")
        )
    times = gpu_model.times_ns(machine.gpu, mechanism, capacity, lengths.values)
    tail = gpu_model.time_ns(machine.gpu, mechanism, capacity, lengths.quantile(TAIL))
    measured = gpu_model.time_ns(machine.gpu, mechanism, capacity, profiled_length)
    if times is None or tail is None or measured is None:
        raise UsageError(f"{mechanism.value} cannot serve lengths up to {lengths.longest}")
    expected = float(times @ lengths.weights)
    busy = list(profile.busy_ns)
    tails = []
    for place in places:
        row = busy[place]
        busy[place] = tuple(max(1, round(time * expected / measured)) for time in row)
        tails.append(tuple(max(1, round(time * tail / measured)) for time in row))
    trace = msgspec.structs.replace(
        profile.trace,
        lengths=tuple(KernelLengths(kernel=place, lengths=lengths) for place in places),
    )
    request = tuple(
        time + sum(new[size] - old[size] for new, old in zip(busy, profile.busy_ns, strict=True))
        for size, time in enumerate(profile.request_ns)
    )
    return msgspec.structs.replace(
        profile,
        trace=trace,
        busy_ns=tuple(busy),
        request_ns=request,
        tail_ns=tuple(tails),
        source=f"{profile.source}; expected and tail times of {len(places)} kernels from "
        f"{lengths.samples} lengths and {machine.title}",
    )

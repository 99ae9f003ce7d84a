"""Observations: runs measured on a device, to which the simulator's constants are fitted.

A run holds its mix, its workers' homes and the lanes of their kernels. Its plan can be rebuilt from
them and from profiles of the same traces, without a planner; the fingerprint holds the digests of
the traces. All workers ran back to back.
"""

from __future__ import annotations

import datetime

import msgspec

from eclip.core.fingerprint import Fingerprint
from eclip.core.mix import Mix, parse_mix
from eclip.core.model_key import ModelKey
from eclip.errors import UsageError


class ObservedHome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker's lanes lay: the fields of ``planning.placement.Home``, in a file."""

    first: int
    step: int
    most: int
    price: float = 0.0
    switch_max: int = 0
    priority: int = 0
    kernels_for: int = 0

    def __post_init__(self) -> None:
        if self.first < 0 or self.step not in (-1, 1) or self.most < 1:
            raise ValueError("a home has a first slice, a step of 1 or -1 and at least 1 slice")
        counts = (self.switch_max, self.priority, self.kernels_for)
        if not 0 <= self.price < float("inf") or min(counts) < 0:
            raise ValueError("the price, switches, priority and kernels of a home are at least 0")


Groups = tuple[tuple[int, int], ...]  # one after the other: slices of the lane, kernels on it


class ObservedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mix: str  # as parse_mix reads it
    kind: str  # for a person: shared, split, …
    homes: tuple[ObservedHome, ...]  # one per worker; none: plain streams on all units
    routes: tuple[Groups, ...] = ()  # one per home; none: as a planner finds them
    alone_rps: tuple[float, ...]  # per worker: with the whole device to itself
    rates_rps: tuple[float, ...]  # per worker: in this run
    power_w: float
    seconds: float
    switch_ns: float = 0.0  # what its planner took a switch to cost

    def __post_init__(self) -> None:
        workers = len(self.models)
        if {len(self.alone_rps), len(self.rates_rps)} != {workers}:
            raise ValueError(f"{self.mix} has {workers} workers, and needs as many rates")
        if self.homes and len(self.homes) != workers:
            raise ValueError(f"{self.mix} has {workers} workers, and needs as many homes or none")
        if self.routes and len(self.routes) != len(self.homes):
            raise ValueError(f"{self.mix} needs as many routes as homes, or none")
        if any(not route or min(map(min, route)) < 1 for route in self.routes):
            raise ValueError("a route has groups of at least 1 kernel on at least 1 slice")
        for value in (*self.alone_rps, *self.rates_rps, self.power_w, self.seconds):
            if not 0 < value < float("inf"):
                raise ValueError("rates, power and seconds must be finite numbers above 0")
        if not 0 <= self.switch_ns < float("inf"):
            raise ValueError("the cost of a switch is a finite number of at least 0")

    @property
    def models(self) -> tuple[ModelKey, ...]:
        """Of every worker, with its usual kernels: ``alone_rps`` are of these."""
        try:
            return parse_mix(self.mix).models
        except UsageError as error:
            raise ValueError(str(error)) from None

    @property
    def ratios(self) -> tuple[float, ...]:
        """Per worker: its rate in this run over that alone."""
        pairs = zip(self.rates_rps, self.alone_rps, strict=True)
        return tuple(rate / alone for rate, alone in pairs)

    @property
    def ran(self) -> Mix:
        """The mix with the kernels that its workers had in this run."""
        mix = parse_mix(self.mix)
        if not self.homes:
            return mix
        workers = (
            msgspec.structs.replace(one, model=one.model.with_kernels_for(home.kernels_for))
            if home.kernels_for
            else one
            for one, home in zip(mix.workers, self.homes, strict=True)
        )
        return msgspec.structs.replace(mix, workers=tuple(workers))


class ObservedJoints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of joints for the background of a pair; the service is its first worker."""

    mix: str  # as parse_mix reads it
    joints: int  # of the background
    plain_ns: float  # its request without joints, like the next two with the service idle
    deep_ns: float  # with two stretches in flight
    shallow_ns: float  # with one
    gap_ns: float  # by its profile, between the kernels before and after a joint; the mean
    resume_ns: float  # from the end of the service's request to the background's next kernel

    def __post_init__(self) -> None:
        if self.joints < 1:
            raise ValueError(f"the background of {self.mix} has no joints")
        for value in (self.plain_ns, self.deep_ns, self.shallow_ns):
            if not 0 < value < float("inf"):
                raise ValueError("the times of requests must be finite numbers above 0")
        if not (0 <= self.gap_ns < float("inf") and -float("inf") < self.resume_ns < float("inf")):
            raise ValueError("gaps and the time to resume must be finite numbers")


class Observations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs measured on one device, for fitting a calibration or continuing a search."""

    fingerprint: Fingerprint
    source: str  # a sentence on how they were measured
    date: datetime.date  # of the first run
    runs: tuple[ObservedRun, ...]
    modelled: bool = False  # by a simulator
    joints: tuple[ObservedJoints, ...] = ()

    def __post_init__(self) -> None:
        slices = len(self.fingerprint.slice_units)
        for run in self.runs:
            for model in run.models:
                if str(model) not in self.fingerprint.traces:
                    raise ValueError(f"the fingerprint lacks the trace of {model}")
            sizes = [home.most for home in run.homes]
            sizes += [size for route in run.routes for size, _ in route]
            if any(home.first >= slices for home in run.homes) or max(sizes, default=0) > slices:
                raise ValueError(f"a home lies outside the device's {slices} slices")

    @property
    def mixes(self) -> tuple[str, ...]:
        """In the order they were measured."""
        return tuple(dict.fromkeys(run.mix for run in self.runs))

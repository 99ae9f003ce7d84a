"""A server in simulated time: its own batching, admission and device process, without a clock.

Everything between a request and its answer is the server's code, in one thread. What waits for the
clock there is an event here, and the clock jumps to the next one. So a busy machine changes
nothing, and the same arrivals give the same answers. What processes need to wake each other, when
they stand still, and how much batches disturb one another is the machine's (machines.py). There are
no protocols, and nothing is computed.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec
import numpy as np
from lab.support.machines import EVEN, Machine, Stalls, Ways
from lab.support.offered import Service, Tally, arrivals_of, zeros

from eclip.core import requests as device_requests
from eclip.core.calibration import Calibration
from eclip.core.device import Closing
from eclip.core.profile import Profile
from eclip.core.requests import NO_DESCRIPTOR, Ring
from eclip.core.topology import Topology
from eclip.planner.case import find_calibration, find_topology
from eclip.server.config import ServingConfig
from eclip.server.control import Deployment, ServiceSpec
from eclip.server.counters import WORDS, Count
from eclip.server.device import generation
from eclip.server.device.deploying import make_deployment, profiles_of
from eclip.server.device.generation import Generation
from eclip.server.device.host import ServingHost
from eclip.server.front.front_queue import FrontQueue
from eclip.server.front.open_service import OpenService, collect
from eclip.server.front.replica import OpenBatch, OpenRequest, Replica
from eclip.server.link import Signal, Slots
from eclip.server.messages import RefusedError
from eclip.sim import pacing
from eclip.sim.device import SimDevice, SimSession
from served_core import request


class VirtualTime:
    """Stands for the module ``time`` and for an event loop."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._number = itertools.count()

    def monotonic_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / 1e9

    def at(self, at_ns: int, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(at_ns, self.now_ns), next(self._number), call))

    @property
    def next_ns(self) -> int | None:
        return self._events[0][0] if self._events else None

    def run_next(self) -> None:
        self.now_ns, _, call = heapq.heappop(self._events)
        call()

    # As an event loop:

    def create_future(self) -> VirtualFuture:
        return VirtualFuture(self)

    def call_at(self, when_s: float, call: Callable[..., object], *given: object) -> Timer:
        timer = Timer(call, given)
        self.at(round(when_s * 1e9) + 1, timer.run)
        return timer


class Timer:
    def __init__(self, call: Callable[..., object], given: Sequence[object]) -> None:
        self._call, self._given, self._cancelled = call, given, False

    def run(self) -> None:
        if not self._cancelled:
            self._call(*self._given)

    def cancel(self) -> None:
        self._cancelled = True


class VirtualFuture:
    """When it was answered; never, if it failed."""

    def __init__(self, clock: VirtualTime) -> None:
        self._clock = clock
        self.error: BaseException | None = None
        self.answered_ns: int | None = None

    def done(self) -> bool:
        return self.answered_ns is not None or self.error is not None

    def set_result(self, _: object) -> None:
        self.answered_ns = self._clock.now_ns

    def set_exception(self, error: BaseException) -> None:
        self.error = error


class _Replica(Replica):
    """Batches reach the device process a little later, and their ends the front."""

    def __init__(self, place: int, run: _Run, ring: Ring) -> None:
        super().__init__(1, place, ring, NO_DESCRIPTOR)
        self._run = run
        self.seen = 0  # of the answers

    @property
    def answered(self) -> int:
        return self.seen

    def submit(self, batch: OpenBatch, slot: int, program: int, rows: int, due_ns: int) -> None:
        self.batches.append(batch)
        self._run.later(
            lambda: self._ring.put(
                *(self._run.now_ns, batch.expires_ns, slot, program, rows, due_ns)
            )
        )

    def cancel(self, batch: OpenBatch) -> None:
        raise AssertionError("nobody leaves here")


class VirtualServer(Closing):
    """``slower``: how many times longer a service's batches take than its profile says."""

    def __init__(
        self,
        config: ServingConfig,
        machine: Machine = EVEN,
        slower: Mapping[str, float] | None = None,
    ) -> None:
        self._machine, self._slower = machine, slower or {}
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        made = make_deployment(config, {}, generation=1, folder=folder)
        specs = [
            msgspec.structs.replace(spec, id=place + 1, row=place)
            for place, spec in enumerate(made.specs)
        ]
        self.deployment: Deployment = msgspec.structs.replace(made, specs=tuple(specs))
        topology: Topology = find_topology("h200")
        self._device = self._stack.enter_context(
            contextlib.closing(SimDevice(topology, _calibration_of(machine, topology)))
        )

    def close(self) -> None:
        self._stack.close()

    def run(
        self,
        services: Sequence[Service],
        load: float,
        seconds: float,
        arrivals: Sequence[tuple[float, Service]] | None = None,
    ) -> dict[str, Any]:
        """What arrivals of a load, or these, are answered in time; as ``offered.Front.run``."""
        arrivals = arrivals_of(services, load, seconds) if arrivals is None else arrivals
        with _Run(self.deployment, self._device, self._machine, self._slower, seconds) as run:
            return {"load": load} | run.serve(services, arrivals)


def _calibration_of(machine: Machine, topology: Topology) -> Calibration:
    found = find_calibration(None, topology)
    presence = found.interference.presence + machine.presence
    interference = msgspec.structs.replace(found.interference, presence=presence)
    return msgspec.structs.replace(found, interference=interference)


def _slowed(profile: Profile, times: float) -> Profile:
    """With kernels that take so many times longer."""
    busy = tuple(tuple(round(times * ns) for ns in row) for row in profile.busy_ns)
    added = np.array(busy).sum(axis=0) - np.array(profile.busy_ns).sum(axis=0)
    request = tuple((np.array(profile.request_ns) + added).tolist())
    return msgspec.structs.replace(profile, busy_ns=busy, request_ns=request)


class _Run(Closing):
    """From an empty server to the last answer."""

    def __init__(
        self,
        deployment: Deployment,
        device: SimDevice,
        machine: Machine,
        slower: Mapping[str, float],
        seconds: float,
    ) -> None:
        self._stalls = Stalls(machine, seconds, 1)  # of the front
        self._ways = Ways(machine, Stalls(machine, seconds, 2), 3)
        self._ways_back = Ways(machine, self._stalls, 4)
        self._clock = clock = VirtualTime()
        self._stack = contextlib.ExitStack()
        for module in (device_requests, pacing, generation):
            self._stack.enter_context(mock.patch.object(module, "time", clock))
        slots = {
            spec.id: self._stack.enter_context(Slots.create(spec.slots))
            for spec in deployment.specs
        }

        def slowed_profiles(specs: Sequence[ServiceSpec], host: ServingHost) -> list[Profile]:
            found = iter(profiles_of(specs, host))
            return [
                _slowed(next(found), slower.get(spec.name, 1.0))
                for spec in specs
                for _ in range(spec.settings.replicas * len(spec.buckets))
            ]

        # Nobody waits for the clock in a thread, and the first request is as fast as the others.
        with (
            mock.patch.object(pacing.Pacer, "start", lambda self: None),
            mock.patch.object(generation, "_warm", lambda session: None),
            mock.patch.object(generation, "profiles_of", slowed_profiles),
        ):
            opened = self._stack.enter_context(Generation(deployment, device, {0: slots}))
        session = cast(SimSession, opened.session)
        pacer = session._pacer
        assert pacer is not None
        self._pacer = pacer
        self._rings = [Ring(spec.slots.count) for spec in deployment.groups]
        self._answered = [0] * len(self._rings)
        self._wakeup = self._stack.enter_context(Signal())
        opened.attach(0, self._rings, self._wakeup.descriptor, slots)
        row = memoryview(bytearray(8 * WORDS)).cast("q")
        self._front_queue = FrontQueue(
            cast(Any, clock), row, lambda: row[Count.TAKEN], clock.monotonic_ns
        )
        self._front_queue.epoch = 1
        self._replicas: list[_Replica] = []  # by group
        self._services: dict[int, OpenService] = {}
        for group, spec in enumerate(deployment.groups):
            if spec.id not in self._services:
                counted = memoryview(bytearray(8 * WORDS)).cast("q")
                self._services[spec.id] = OpenService(
                    spec, slots[spec.id], counted, self._front_queue
                )
            service = self._services[spec.id]
            there = service.on_device.replicas
            replica = _Replica(len(there), self, self._rings[group])
            service.on_device.replicas = [*there, replica]
            self._replicas.append(replica)

    def close(self) -> None:
        self._stack.close()

    @property
    def now_ns(self) -> int:
        return self._clock.now_ns

    def later(self, put: Callable[[], object]) -> None:
        """In the device process."""

        def arrive() -> None:
            put()
            self._pacer.ring(0)

        self._clock.at(self._ways.arrives_ns(self._clock.now_ns), arrive)

    def _take_answers(self) -> None:
        """Those that there are now, a little later."""
        answered = [ring.answered for ring in self._rings]
        if answered != self._answered:
            self._answered = answered
            at_ns = self._ways_back.arrives_ns(self._clock.now_ns)
            self._clock.at(at_ns, lambda: self._collect(answered))

    def _collect(self, answered: Sequence[int]) -> None:
        for replica, count in zip(self._replicas, answered, strict=True):
            replica.seen = count
        for service in self._services.values():
            collect(service)
        self._front_queue.advance()

    def serve(
        self, services: Sequence[Service], arrivals: Sequence[tuple[float, Service]]
    ) -> dict[str, Any]:
        by_name = {one.spec.name: one for one in self._services.values()}
        inputs = {service.name: zeros(by_name[service.name].spec.info, 1) for service in services}
        asked: list[tuple[Service, OpenRequest | None]] = []

        def arrive(service: Service, at_ns: int) -> None:
            open_ = by_name[service.name]
            wanted = request(service.name, inputs[service.name])
            wanted = msgspec.structs.replace(wanted, arrival_ns=at_ns)
            try:
                asked.append((service, open_.accept(wanted, 0)))
            except RefusedError:
                asked.append((service, None))
            open_.advance()

        for at_s, service in arrivals:
            at_ns = round(at_s * 1e9)
            self._clock.at(self._stalls.over_ns(at_ns), functools.partial(arrive, service, at_ns))
        self._run_out()
        if any(pending is not None and pending.waits for _, pending in asked):
            raise AssertionError("an accepted request was never answered")
        tally = Tally(services)
        tally.late_s = [0.0]
        for service, pending in asked:
            answered_ns = None if pending is None else _answered_ns(pending)
            took_ms = (
                float("inf")
                if answered_ns is None or pending is None
                else (answered_ns - pending.asked.arrival_ns) / 1e6
            )
            tally.count(service, took_ms <= service.bound_ms)
        return tally.row()

    def _run_out(self) -> None:
        """Until nothing is left to do."""
        clock, pacer = self._clock, self._pacer
        while True:
            next_ns = clock.next_ns
            due_ns = pacer.look_ahead(next_ns)
            if due_ns is None and next_ns is None:
                return
            if next_ns is not None and (due_ns is None or next_ns <= due_ns):
                clock.run_next()
            else:
                assert due_ns is not None
                clock.now_ns = max(clock.now_ns, due_ns)
            pacer.catch_up()
            self._take_answers()


def _answered_ns(pending: OpenRequest) -> int | None:
    return cast(VirtualFuture, pending.future).answered_ns

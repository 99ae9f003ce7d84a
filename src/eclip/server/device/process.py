"""The device process: owns the device and its sessions, in which loops serve the fronts' rings.

Its Python opens and ends generations, attaches fronts, counts, and is on no request's way. The next
generation is opened in a thread, beside the one that runs; fronts go over to it, and the old one
ends when what it runs has ended. When the server is gone, a session fails, or something hangs for
too long, the process ends at once: fronts then run again what was open.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from eclip.core.device import Device
from eclip.devices import open_device
from eclip.errors import EclipError
from eclip.jit import get_ready
from eclip.planner.case import find_calibration, find_topology
from eclip.server.control import (
    Attach,
    AttachCounters,
    AttachRings,
    AttachSlots,
    Channel,
    Deploy,
    Deployed,
    Detach,
    Detached,
    NotDeployed,
    Retire,
    Retired,
    Said,
    Stop,
)
from eclip.server.counters import Count, CounterPages, beat
from eclip.server.device.generation import Generation
from eclip.server.device.parts import Parts, process_age_s
from eclip.server.link import Signal, Slots, map_rings
from eclip.server.log import log_to_server, report

_LOOK_S = 0.1  # how often it counts, and looks for what hangs
_WAIT_S = 0.002  # likewise, while it waits for what runs to end
_METER_S = _BEAT_S = 1.0
_HANGS_S = 20.0
# How long a thread that computes, as one that opens a generation does, may keep Python's lock from
# a simulator's pacer. 0.5 ms were too long for batches of 1 ms.
_SWITCH_S = 0.00005


class EnergyMeter(threading.Thread):
    """Counts what the device has drawn, in a thread of its own: beside load, an H200's driver takes
    3 to 12 ms to say it, and the loop would let every batch wait."""

    def __init__(self, device: Device, counters: CounterPages) -> None:
        super().__init__(name="energy", daemon=True)
        self._device, self._counters = device, counters
        self._ended = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(EclipError):  # then nobody is told the power, and all else goes on
            self._count()

    def _count(self) -> None:
        before_mj = self._device.energy_mj()  # the count may have begun anew
        while before_mj is not None and not self._ended.wait(_METER_S):
            now_mj = self._device.energy_mj()
            if now_mj is None:
                return
            row = self._counters.of_device(0)
            row[Count.ENERGY_MJ] += now_mj - before_mj
            row[Count.METERED_NS] = time.monotonic_ns()
            before_mj = now_mj

    def close(self) -> None:
        self._ended.set()
        self.join()


@dataclass(eq=False)
class AttachedFront:
    """A sitting of a front."""

    number: int
    wakeup: Signal
    leaving: bool = False


class DeviceProcess:
    def __init__(self, channel: Channel, parts: Parts | None = None) -> None:
        self._channel = channel
        self._parts = parts or Parts()  # of what is opened next
        self._selector = selectors.DefaultSelector()
        self._device: Device | None = None
        self._counters: CounterPages | None = None
        self._meter: EnergyMeter | None = None
        self._beat_s = 0.0  # when the next one is due
        self._fronts: dict[int, AttachedFront] = {}
        # Of every attachment, by service: they stay when a front goes, for sessions hold their
        # addresses.
        self._slots: dict[int, dict[int, Slots]] = {}
        self._generations: list[Generation] = []  # the newest first
        self._opened: collections.deque[tuple[Deploy, Generation | str, float]] = (
            collections.deque()
        )
        self._retiring: int | None = None
        self._stopping = False
        self._woken = Signal()
        self._selector.register(channel.fileno(), selectors.EVENT_READ, self._listen)
        self._selector.register(self._woken.descriptor, selectors.EVENT_READ, self._woke)

    def run(self) -> None:
        while not (self._stopping and not any(one.open for one in self._generations)):
            leaving = any(one.leaving for one in self._fronts.values())
            waits = leaving or self._stopping or self._retiring is not None
            for key, _ in self._selector.select(_WAIT_S if waits else _LOOK_S):
                key.data()
            self._count()
            self._look_for_hanging()
            self._finish()
        for generation in self._generations:
            generation.close()
        if self._meter is not None:
            self._meter.close()
        if self._device is not None:
            self._device.close()

    def _count(self) -> None:
        if self._counters is None:
            return
        if time.monotonic() > self._beat_s:
            self._beat_s = time.monotonic() + _BEAT_S
            beat(self._counters.of_device(0))
        for generation in self._generations:
            for row, (busy_ns, yields) in generation.count().items():
                words = self._counters.of_device(row)
                words[Count.BUSY_NS] += busy_ns
                words[Count.YIELDS] += yields

    def _woke(self) -> None:
        self._woken.clear()
        while self._opened:
            self._begin(*self._opened.popleft())

    # --- The server's words ----------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while (received := self._channel.receive()) is not None:
                self._hear(*received)
        except EOFError:
            os._exit(1)  # nobody is left to work for

    def _hear(self, message: Any, descriptors: list[int]) -> None:
        match message:
            case Attach(front=number):
                self._fronts[number] = AttachedFront(number, Signal(descriptors[0]))
            case AttachRings(front=number, generation=wanted, rows=rows):
                rings, front = map_rings(descriptors[0], rows), self._fronts[number]
                for generation in self._generations:
                    if generation.number == wanted and not front.leaving:
                        wakeup = front.wakeup.descriptor
                        generation.attach(number, rings, wakeup, self._slots[number])
            case AttachCounters(fronts=fronts):
                self._counters = CounterPages(descriptors[0], fronts)
            case AttachSlots(front=number, service=service, layout=layout):
                self._slots.setdefault(number, {})[service] = Slots(descriptors[0], layout)
            case Detach(front=number):
                self._fronts[number].leaving = True
                for generation in self._generations:
                    generation.leave(number)
            case Deploy():
                threading.Thread(target=self._open, args=(message,), daemon=True).start()
            case Retire(before=before):
                self._retiring = before
            case Stop():
                self._stopping = True
            case _:
                raise EclipError(f"a device process cannot do {message}")

    def _open(self, deploy: Deploy) -> None:
        """In a thread of its own, beside what runs."""
        begin = time.monotonic()
        server = deploy.deployment.server
        opened: Generation | str
        try:
            if self._device is None:
                with self._parts.part("device"):
                    topology = find_topology(server.topology)
                    calibration = find_calibration(None, topology)
                    self._device = open_device(server.device, topology, calibration)
            opened = Generation(deploy.deployment, self._device, self._slots, self._parts)
        except EclipError as error:
            opened = str(error)
        except Exception as error:  # a model of the user's may raise anything
            opened = report("a deployment could not be opened", error)
        self._opened.append((deploy, opened, time.monotonic() - begin))
        self._woken.raise_()

    def _begin(self, deploy: Deploy, opened: Generation | str, seconds: float) -> None:
        """From here on fronts are attached to the new generation, too."""
        number = deploy.deployment.generation
        if isinstance(opened, str):
            self._channel.send(NotDeployed(number, opened))
            return
        self._generations.insert(0, opened)
        # Of what was warmed there is nothing left: it says that the session has failed.
        self._selector.register(opened.session.wakeup, selectors.EVENT_READ, self._look_for_failed)
        if self._meter is None and self._device is not None and self._counters is not None:
            self._meter = EnergyMeter(self._device, self._counters)
            self._meter.start()
        gc.freeze()  # what was just made stays: no need to look at it again and again
        server = opened.session.doors.server
        bells = [] if server is None else server.bells
        places = {bell: place for place, bell in enumerate(dict.fromkeys(bells))}
        of_groups = tuple(places[bell] for bell in bells)
        answer = Deployed(number, seconds, opened.failed, of_groups, self._parts.take())
        self._channel.send(answer, [*places])

    def _finish(self) -> None:
        """Say what has come to its end."""
        for front in [one for one in self._fronts.values() if one.leaving]:
            if not any(one.uses(front.number) for one in self._generations):
                del self._fronts[front.number]
                front.wakeup.close()
                self._channel.send(Detached(front.number))
        if self._retiring is None:
            return
        before = self._retiring
        if not any(one.number >= before for one in self._generations):
            return  # a process that starts anew is told, too, and still opens what is to stay
        for generation in [one for one in self._generations if one.number < before]:
            if not generation.open:
                self._selector.unregister(generation.session.wakeup)
                generation.close()
                self._generations.remove(generation)
        if not any(one.number < before for one in self._generations):
            self._drop_slots()
            self._channel.send(Retired(before))
            self._retiring = None

    def _drop_slots(self) -> None:
        """Those of services that no generation has any more."""
        kept = {service for one in self._generations for service in one.stages}
        kept |= {service for one in self._generations for service in one.failed}
        for slots in self._slots.values():
            for service in [one for one in slots if one not in kept]:
                slots.pop(service).close()

    def _look_for_hanging(self) -> None:
        for generation in self._generations:
            name = generation.hanging(time.monotonic_ns(), _HANGS_S * 1e9)
            if name is not None:
                self._end(f"{name} hangs for {_HANGS_S:.0f} s; the device process starts anew")

    def _look_for_failed(self) -> None:
        for generation in self._generations:
            generation.session.poll()
            if generation.failure:
                self._end(f"{generation.failure}; the device process starts anew")

    def _end(self, line: str) -> None:
        """At once: the next process begins anew."""
        self._channel.send(Said(line))
        os._exit(1)


def main(descriptor: int) -> None:
    """The whole life of the process, which hears from the server through this descriptor."""
    log_to_server()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_S)
    parts = Parts()
    parts.add("imports", process_age_s())
    with parts.part("numba's tables"):
        get_ready()  # a spare process waits long enough
    with Channel(socket.socket(fileno=descriptor)) as channel:
        DeviceProcess(channel, parts).run()
    os._exit(0)  # a function that hangs in its thread may not keep us

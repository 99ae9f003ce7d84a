"""Seats: the places of fronts. A seat's link and slots stay, whichever process sits there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from eclip.errors import DeviceError
from eclip.server.bell import Bell
from eclip.server.control import (
    AttachSlots,
    Listening,
    LoadAsked,
    Message,
    Said,
    ServiceSheet,
    Settled,
    Welcome,
)
from eclip.server.front.guests import Guest, visitors
from eclip.server.link import Link, Slots
from eclip.server.log import ServerLog
from eclip.server.supervisor.children import BackOff, Child, start_child


class FrontSeat:
    def __init__(self, number: int) -> None:
        self.number = number
        self.link = Link.create()
        self.slots: dict[int, Slots] = {}  # by service id
        self.child: Child | Guest | None = None
        self.settled = 0  # the last offer of which it has
        self.ports: Listening | None = None

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        if self.child is not None:
            self.child.channel.send(message, descriptors)

    def add_slots(self, sheet: ServiceSheet) -> bool:
        """Memory for a service's tensors, unless it is there."""
        if sheet.id in self.slots:
            return False
        self.slots[sheet.id] = Slots.create(sheet.slots)
        return True

    def send_slots(self, services: Iterable[int]) -> None:
        for service in services:
            slots = self.slots[service]
            self.send(AttachSlots(self.number, service, slots.layout), (slots.descriptor,))

    def drop_slots(self, kept: set[int]) -> None:
        for service in [one for one in self.slots if one not in kept]:
            self.slots.pop(service).close()

    def close(self) -> None:
        self.link.close()
        self.drop_slots(set())


class SeatKeeper:
    """Keeps fronts running."""

    def __init__(
        self,
        seats: int,
        log: ServerLog,
        bell: Bell,
        welcome: Callable[[FrontSeat], None],
        load: Callable[[FrontSeat, LoadAsked], None],
    ) -> None:
        """``welcome`` tells a new front all there is; ``load`` is what a front asks for."""
        self.seats = [FrontSeat(number) for number in range(seats)]
        self.leaving = False
        self._log = log
        self._bell = bell
        self._welcome = welcome
        self._load = load

    async def keep(self, seat: FrontSeat, clear: Callable[[FrontSeat], Awaitable[None]]) -> None:
        """Run a front there, again and again; ``clear`` takes what one has left from the device. If
        the first never listens, no other would."""
        back_off = BackOff()
        listened = False
        while not self.leaving:
            back_off.begin()
            child = await start_child("front.process")
            self.take(seat, child)
            await child.ended.wait()
            listened |= seat.ports is not None
            seat.child = seat.ports = None
            child.close()
            self._bell.ring()
            if self.leaving:
                return
            if not listened:
                raise DeviceError(
                    f"a front ended with status {child.process.returncode} before it listened; "
                    f"what it said is above"
                )
            pause_s = back_off.pause_s()
            self._log.write(
                "front ended",
                front=seat.number,
                status=child.process.returncode,
                again_in_s=pause_s,
            )
            await asyncio.sleep(pause_s)
            await clear(seat)

    async def receive(
        self,
        door: Path,
        seats: Sequence[FrontSeat],
        clear: Callable[[FrontSeat], Awaitable[None]],
    ) -> None:
        """Give guests these seats as they come; who finds none is sent away."""
        free = list(seats)

        async def host(seat: FrontSeat, guest: Guest) -> None:
            await guest.ended.wait()
            seat.child = None
            guest.close()
            self._bell.ring()
            if not self.leaving:
                await clear(seat)
                free.append(seat)

        async with asyncio.TaskGroup() as hosts:
            async for guest in visitors(door):
                if not free or self.leaving:
                    guest.close()
                    continue
                seat = free.pop()
                self.take(seat, guest)
                hosts.create_task(host(seat, guest))

    def tell(self, message: Message) -> None:
        for seat in self.seats:
            seat.send(message)

    def have_settled(self, offer: int) -> bool:
        return all(seat.child is None or seat.settled >= offer for seat in self.seats)

    def send_slots(self, services: Iterable[int]) -> None:
        for seat in self.seats:
            seat.send_slots(services)

    def drop_slots(self, kept: set[int]) -> None:
        for seat in self.seats:
            seat.drop_slots(kept)

    async def close(self) -> None:
        """At once."""
        for seat in self.seats:
            if seat.child is not None:
                await seat.child.kill()
            seat.close()

    def take(self, seat: FrontSeat, child: Child | Guest) -> None:
        seat.child = child
        child.listen(lambda message: self._hear(seat, message), self._bell)
        self._welcome(seat)

    def _hear(self, seat: FrontSeat, message: Message) -> None:
        match message:
            case Listening():
                seat.ports = message
            case Settled(number=number):
                seat.settled = number
            case LoadAsked():
                self._load(seat, message)
            case Said(line=line):
                self._log.write("front says", front=seat.number, line=line)


def welcome_front(
    seat: FrontSeat, welcome: Welcome, counters: int, services: Iterable[int]
) -> None:
    """The first words to a front: its link, the counters, and its slots of these services."""
    seat.send(welcome, (*seat.link.descriptors, counters))
    seat.send_slots(services)

"""Attachments of fronts: their slots stay when a front is started anew; all else is a sitting's."""

from __future__ import annotations

import asyncio
import time
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
    ServiceSpec,
    Settled,
    Welcome,
)
from eclip.server.counters import Count, CounterPages
from eclip.server.front.guests import Guest, visitors
from eclip.server.link import Signal, Slots
from eclip.server.log import ServerLog
from eclip.server.supervisor.children import BackOff, Child, start_child

_SILENT_S = 3.5  # in which a front's loop does not go round, which it does twice a second


class Attachment:
    def __init__(self, number: int) -> None:
        self.number = number
        self.answered: Signal | None = None  # of the sitting
        self.slots: dict[int, Slots] = {}  # by service id
        self.child: Child | Guest | None = None
        self.settled = 0  # the last offer of which it has
        self.ports: Listening | None = None

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        if self.child is not None:
            self.child.channel.send(message, descriptors)

    def add_slots(self, spec: ServiceSpec) -> bool:
        """Memory for a service's tensors, unless it is there."""
        if spec.id in self.slots:
            return False
        self.slots[spec.id] = Slots.create(spec.slots)
        return True

    def send_slots(self, services: Iterable[int]) -> None:
        for service in services:
            slots = self.slots[service]
            self.send(AttachSlots(self.number, service, slots.layout), (slots.descriptor,))

    def drop_slots(self, kept: set[int]) -> None:
        for service in [one for one in self.slots if one not in kept]:
            self.slots.pop(service).close()

    def sit_down(self, child: Child | Guest) -> None:
        """A front begins, with a descriptor that no other had."""
        if self.answered is not None:
            self.answered.close()
        self.child, self.answered = child, Signal()

    def close(self) -> None:
        if self.answered is not None:
            self.answered.close()
        self.drop_slots(set())


class Attachments:
    """Keeps fronts running."""

    def __init__(
        self,
        attachments: int,
        log: ServerLog,
        bell: Bell,
        counters: CounterPages,
        welcome: Callable[[Attachment], None],
        load: Callable[[Attachment, LoadAsked], None],
    ) -> None:
        """``welcome`` tells a new front all there is; ``load`` is what a front asks for."""
        self.attachments = [Attachment(number) for number in range(attachments)]
        self.leaving = False
        self._log = log
        self._bell = bell
        self._counters = counters
        self._welcome = welcome
        self._load = load

    async def keep(
        self, attachment: Attachment, clear: Callable[[Attachment], Awaitable[None]]
    ) -> None:
        """Run a front there, again and again; ``clear`` takes what one has left from the device. If
        the first never listens, no other would."""
        back_off = BackOff()
        listened = False
        while not self.leaving:
            back_off.begin()
            child = await start_child("front.process", self._log)
            self.take(attachment, child)
            await child.until_ended(
                lambda: self._beat(attachment),
                _SILENT_S,
                lambda pid: self._log.write(
                    "front does not go on; it is ended", front=attachment.number, pid=pid
                ),
            )
            listened |= attachment.ports is not None
            attachment.child = attachment.ports = None
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
                front=attachment.number,
                status=child.process.returncode,
                again_in_s=pause_s,
            )
            await asyncio.sleep(pause_s)
            await clear(attachment)

    async def receive(
        self,
        door: Path,
        attachments: Sequence[Attachment],
        clear: Callable[[Attachment], Awaitable[None]],
    ) -> None:
        """Give guests these attachments as they come; a guest that finds none is sent away."""
        free = list(attachments)

        async def host(attachment: Attachment, guest: Guest) -> None:
            await guest.ended.wait()
            attachment.child = None
            guest.close()
            self._bell.ring()
            if not self.leaving:
                await clear(attachment)
                free.append(attachment)

        async with asyncio.TaskGroup() as hosts:
            async for guest in visitors(door):
                if not free or self.leaving:
                    guest.close()
                    continue
                attachment = free.pop()
                self.take(attachment, guest)
                hosts.create_task(host(attachment, guest))

    def tell(self, message: Message) -> None:
        for attachment in self.attachments:
            attachment.send(message)

    def have_settled(self, offer: int) -> bool:
        return all(
            attachment.child is None or attachment.settled >= offer
            for attachment in self.attachments
        )

    def send_slots(self, services: Iterable[int]) -> None:
        for attachment in self.attachments:
            attachment.send_slots(services)

    def drop_slots(self, kept: set[int]) -> None:
        for attachment in self.attachments:
            attachment.drop_slots(kept)

    async def close(self) -> None:
        """At once."""
        for attachment in self.attachments:
            if attachment.child is not None:
                await attachment.child.kill()
            attachment.close()

    def take(self, attachment: Attachment, child: Child | Guest) -> None:
        attachment.sit_down(child)
        child.listen(lambda message, _: self._hear(attachment, message), self._bell)
        self._welcome(attachment)

    def _beat(self, attachment: Attachment) -> int:
        """The front's last sign of life. A front that does not listen yet is given its time."""
        if attachment.ports is None:
            return time.monotonic_ns()
        return int(self._counters.row(attachment.number, 0)[Count.HEARTBEAT_NS])

    def _hear(self, attachment: Attachment, message: Message) -> None:
        match message:
            case Listening():
                attachment.ports = message
            case Settled(number=number):
                attachment.settled = number
            case LoadAsked():
                self._load(attachment, message)
            case Said(line=line):
                self._log.write("front says", front=attachment.number, line=line)


def welcome_front(
    attachment: Attachment, welcome: Welcome, counters: int, services: Iterable[int]
) -> None:
    """The first words to a front: its descriptor, the counters, and its slots of these services."""
    assert attachment.answered is not None
    attachment.send(welcome, (attachment.answered.descriptor, counters))
    attachment.send_slots(services)

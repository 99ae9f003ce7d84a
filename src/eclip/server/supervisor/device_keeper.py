"""Keeps a device process running: starts it, hands it what is deployed, starts it anew."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

from eclip.server.bell import Bell
from eclip.server.control import (
    Attach,
    AttachCounters,
    AttachRings,
    AttachSlots,
    Deploy,
    Deployed,
    Deployment,
    Detach,
    Detached,
    Message,
    NotDeployed,
    Retire,
    Retired,
    Said,
    Stop,
)
from eclip.server.counters import Count, CounterPages
from eclip.server.link import allocate, rings_bytes
from eclip.server.log import ServerLog
from eclip.server.supervisor.attachments import Attachment
from eclip.server.supervisor.children import BackOff, Child, start_child

_DEPLOY_S = 600.0  # models are loaded and warmed
_SILENT_S = 30.0  # in which its loop does not go round, which it says once a second


class DeviceKeeper:
    """``changed`` is called when the process is up (with its answer) or down (with None)."""

    def __init__(
        self, log: ServerLog, bell: Bell, changed: Callable[[Deployed | None], None]
    ) -> None:
        self.child: Child | None = None
        self.epoch = 0  # of the process; each has its own
        self.up = False  # it runs what is deployed
        self.restarts = 0
        self.refusal: str | None = None  # why it could not open what it never ran before
        self._log = log
        self._bell = bell
        self._changed = changed
        self._answers: dict[int, Deployed | NotDeployed] = {}  # by generation
        self._deployed: dict[int, Deployed] = {}  # by generation, as the next
        self._bells: dict[int, list[int]] = {}  # by generation: descriptors of its loops
        self._retired = 0
        self._detached: set[int] = set()
        self.leaving = False
        # The next process, started ahead: it has imported what it needs, which takes seconds.
        self._spare: Child | None = None

    async def start_ahead(self) -> None:
        """Start the first process beside what is done before it is needed."""
        self._spare = await start_child("device.process", self._log)

    async def keep(
        self,
        attachments: Iterable[Attachment],
        deployment: Callable[[], Deployment],
        counters: CounterPages,
    ) -> None:
        """Run the process with the deployment of the moment, again and again."""
        back_off = BackOff()
        while not self.leaving:
            back_off.begin()
            child = self.child = self._spare or await start_child("device.process", self._log)
            self._spare = None
            child.listen(self._hear, self._bell)
            self.epoch += 1
            self._send(AttachCounters(counters.fronts), (counters.descriptor,))
            for attachment in attachments:
                self.attach(attachment)
                for service in attachment.slots:
                    self.attach_slots(attachment, service)
            answer = await self.deploy(deployment())
            if isinstance(answer, Deployed):
                self.up = True
                self._log.write(
                    "device process is ready",
                    pid=child.pid,
                    seconds=round(answer.seconds, 2),
                    parts=answer.parts,
                )
                self._changed(answer)
                self._bell.ring()
                self._spare = await start_child("device.process", self._log)
                await child.until_ended(
                    lambda: counters.of_device(0)[Count.HEARTBEAT_NS],
                    _SILENT_S,
                    lambda pid: self._log.write(
                        "device process does not go on; it is ended", pid=pid
                    ),
                )
            else:
                self._log.write("device process is not ready", reason=answer.reason)
                if not self.restarts:
                    self.refusal = answer.reason
                await child.end(0.0)
            self.up, self.child = False, None
            child.close()
            self._answers.clear()
            self._close_bells()
            self._changed(None)
            self._bell.ring()
            if self.leaving:
                return
            self.restarts += 1
            pause_s = back_off.pause_s()
            status = child.process.returncode
            self._log.write("device process ended", status=status, again_in_s=pause_s)
            await asyncio.sleep(pause_s)

    def attach(self, attachment: Attachment) -> None:
        """A sitting begins."""
        if attachment.answered is not None:
            self._send(Attach(attachment.number), (attachment.answered.descriptor,))

    def attach_rings(self, attachments: Iterable[Attachment], deployment: Deployment) -> None:
        """New rings for these sittings and a generation that is there; both ends own them."""
        answer = self._deployed.get(deployment.generation)
        firsts: dict[int, int] = {}
        for group, spec in enumerate(deployment.groups):
            firsts.setdefault(spec.id, group)
        rows = tuple(spec.slots.count for spec in deployment.groups)
        for attachment in attachments:
            if answer is None or attachment.child is None:
                continue
            message = AttachRings(
                attachment.number, deployment.generation, rows, firsts, answer.bells
            )
            memory = allocate("eclip-rings", rings_bytes(rows))
            self._send(message, (memory,))
            attachment.send(message, (memory, *self._bells[deployment.generation]))
            os.close(memory)

    def _close_bells(self, before: int | None = None) -> None:
        for generation in [one for one in self._bells if before is None or one < before]:
            del self._deployed[generation]
            for bell in self._bells.pop(generation):
                os.close(bell)

    def attach_slots(self, attachment: Attachment, service: int) -> None:
        slots = attachment.slots[service]
        self._send(AttachSlots(attachment.number, service, slots.layout), (slots.descriptor,))

    async def detach(self, attachment: Attachment) -> None:
        """Returns when nothing uses what the sitting had any more."""
        child, number = self.child, attachment.number
        if child is None:
            return
        self._detached.discard(number)
        self._send(Detach(number))
        await self._bell.until(lambda: number in self._detached or child.ended.is_set())

    async def deploy(self, deployment: Deployment) -> Deployed | NotDeployed:
        """The process's answer; its death is one, too."""
        child, generation = self.child, deployment.generation
        if child is None:
            return NotDeployed(generation, "there is no device process")
        self._send(Deploy(deployment))
        try:
            async with asyncio.timeout(_DEPLOY_S):
                await self._bell.until(lambda: generation in self._answers or child.ended.is_set())
        except TimeoutError:
            return NotDeployed(generation, f"not ready after {_DEPLOY_S:.0f} s")
        if generation in self._answers:
            return self._answers.pop(generation)
        names = ", ".join(spec.name for spec in deployment.specs)
        return NotDeployed(
            generation,
            f"the device process ended with status {child.process.returncode} while it loaded "
            f"{names}; what it said is in the log, and load = false leaves a service out",
        )

    async def retire(self, before: int) -> None:
        """End older generations; returns when they have ended."""
        child = self.child
        if child is not None:
            self._send(Retire(before))
            await self._bell.until(lambda: self._retired >= before or child.ended.is_set())
            self._close_bells(before)

    async def stop(self) -> None:
        """When what runs has ended."""
        self.leaving = True
        if self.child is not None:
            self._send(Stop())
            await self.child.end()

    async def close(self) -> None:
        """At once."""
        self._close_bells()
        for child in (self.child, self._spare):
            if child is not None:
                await child.kill()

    def _send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        if self.child is not None:
            self.child.channel.send(message, descriptors)

    def _hear(self, message: Message, descriptors: list[int]) -> None:
        if isinstance(message, Deployed):
            self._deployed[message.generation] = message
            self._bells[message.generation] = descriptors
        match message:
            case Deployed(generation=number) | NotDeployed(generation=number):
                self._answers[number] = message
            case Retired(before=before):
                self._retired = before
            case Detached(front=front):
                self._detached.add(front)
            case Said(line=line):
                self._log.write("device process says", line=line)

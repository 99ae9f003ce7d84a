"""The core of a front: what stands behind its protocols.

The server tells it which services there are and whether the device process runs. Every accepted
request is answered exactly once. When the device process dies, what was open there is queued again,
once; a request that meets a second death fails.

All of it runs in the thread of one event loop, whose clock is CLOCK_MONOTONIC.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping

from eclip.core.device import Closing
from eclip.errors import EclipError
from eclip.server.control import (
    AttachRings,
    AttachSlots,
    Channel,
    DeviceDown,
    DeviceUp,
    Leave,
    LoadAnswer,
    LoadAsked,
    Offer,
    Retired,
    ServiceSpec,
    Settled,
    TakeAccess,
    Welcome,
)
from eclip.server.counters import Count, CounterPages, count_refused
from eclip.server.front.front_queue import FrontQueue
from eclip.server.front.open_service import RETRY_S, OpenService, collect
from eclip.server.front.replica import FrontRings
from eclip.server.front.status import ServerStatus
from eclip.server.link import Signal, Slots
from eclip.server.messages import (
    Counters,
    InferRequest,
    InferResponse,
    ModelInfo,
    Reason,
    RefusedError,
    ServerState,
    Statistics,
)

_GIVE_UP_S = 15.0  # without a device process, accepted requests are answered with an error
_STOPS = "the server stops"


class FrontServices(Closing):
    """The services of a front, as the server offers them and the device process answers."""

    def __init__(
        self,
        front: int,
        front_queue: FrontQueue,
        counters: CounterPages,
        channel: Channel,
        answered: Signal,
    ) -> None:
        self.front_queue = front_queue
        self.counters = counters
        self.services: dict[str, OpenService] = {}  # by name
        self.models: dict[str, ModelInfo] = {}  # all that are offered, loaded or not
        self.offer = Offer(0, (), (), (), {})
        self.live = True
        self.started = False
        self.not_ready = False  # the server stops
        self.strict_readiness = False
        self.take_access: Callable[[], None] = lambda: None  # nothing, where nobody connects
        self.leaving = asyncio.Event()  # the server wants us to drain and end, or is gone
        self._front = front
        self._channel = channel
        self._answered = answered
        self._rings = FrontRings()
        self._by_id: dict[int, OpenService] = {}  # those that are gone but not done, too
        self._slots: dict[int, Slots] = {}  # by service id
        self._settled = True  # of the offer, the server was told
        self._loads: dict[int, asyncio.Future[None]] = {}
        self._give_up: asyncio.TimerHandle | None = None
        self._refuses = False  # it drains
        self._drained = asyncio.Event()
        front_queue.loop.add_reader(channel.fileno(), self._listen)
        front_queue.loop.add_reader(answered.descriptor, self._take_answers)

    def find(self, name: str) -> OpenService:
        """The service, if it takes requests."""
        service = self.services.get(name)
        if service is None:
            if name not in self.models:
                raise RefusedError(Reason.UNKNOWN_MODEL, f"there is no model {name!r}")
            why = self.offer.idle.get(name) or "load it first"
            raise RefusedError(Reason.NOT_READY, f"{name} is not loaded: {why}", RETRY_S)
        if self._refuses:
            count_refused(service.row, Reason.NOT_READY)
            raise RefusedError(Reason.NOT_READY, _STOPS, RETRY_S)
        if not self.front_queue.epoch:
            count_refused(service.row, Reason.NOT_READY)
            line = "the device process starts; ask again"
            raise RefusedError(Reason.NOT_READY, line, RETRY_S)
        return service

    async def ask_server(self, name: str, *, load: bool) -> None:
        """To load or unload a model; returns when that is done."""
        if name not in self.models:
            raise RefusedError(Reason.UNKNOWN_MODEL, f"there is no model {name!r}")
        number = self.front_queue.number()
        self._loads[number] = self.front_queue.loop.create_future()
        self._channel.send(LoadAsked(number, name, load))
        await self._loads[number]

    async def drain(self) -> None:
        """Accept nothing more, and wait until all is answered."""
        self._refuses = True
        self._look_around()
        await self._drained.wait()

    def give_up(self) -> None:
        """Requests that still wait are told that the server ends."""
        for service in self._by_id.values():
            service.refuse_all(RefusedError(Reason.LOST, "the server ended before it was answered"))

    def close(self) -> None:
        self.give_up()
        loop = self.front_queue.loop
        loop.remove_reader(self._channel.fileno())
        loop.remove_reader(self._answered.descriptor)
        if self._give_up is not None:
            self._give_up.cancel()
        self._channel.close()
        for service in self._by_id.values():
            service.row.release()
        for slots in self._slots.values():
            slots.close()
        self._rings.close()
        self._answered.close()
        self.counters.close()

    def _take_answers(self) -> None:
        self._answered.clear()
        for service in self._by_id.values():
            collect(service)
        self.front_queue.advance()
        self._look_around()

    def _listen(self) -> None:
        try:
            while (received := self._channel.receive()) is not None:
                self._hear(*received)
        except EOFError:  # the server is gone
            self.front_queue.loop.remove_reader(self._channel.fileno())
            self.live = False
            self.leaving.set()

    def _hear(self, message: object, descriptors: list[int]) -> None:
        match message:
            case AttachSlots(service=service, layout=layout):
                self._slots[service] = Slots(descriptors[0], layout)
            case AttachRings():
                self._rings.take(message, descriptors)
            case Offer():
                self._take_offer(message)
            case Retired(before=before):
                self._retired(before)
            case DeviceUp(epoch=epoch):
                self._device_up(epoch)
            case DeviceDown():
                self._device_down()
            case Leave(now=now):
                self.not_ready = True
                if now:
                    self.leaving.set()
            case TakeAccess():
                self.take_access()
            case LoadAnswer(number=number, error=error):
                waiting = self._loads.pop(number, None)
                if waiting is not None and not waiting.done():
                    if error is None:
                        waiting.set_result(None)
                    else:
                        waiting.set_exception(RefusedError(Reason.BAD_REQUEST, error))
            case _:
                raise EclipError(f"a front cannot do {message}")

    def _retired(self, before: int) -> None:
        """Older generations have ended. What is left there, of a front that was stopped too long,
        runs again or is refused."""
        for service in self._by_id.values():
            collect(service)
            service.run_again(before)
            if service not in self.services.values():
                _refuse_gone(service)
        self._rings.close(before)
        self._look_around()

    def _take_offer(self, offer: Offer) -> None:
        services: dict[str, OpenService] = {}
        for spec in offer.specs:
            service = self._by_id.get(spec.id)
            if service is None:
                service = _opened(self, self._front, spec, self._slots[spec.id])
                self._by_id[spec.id] = service
            service.spec = spec
            service.on_device.replicas = self._rings.of(spec.id)
            services[spec.name] = service
        for service in self._by_id.values():
            if service not in services.values() and not service.on_device.replicas:
                _refuse_gone(service)
        for key in [one for one in self._slots if one not in {*offer.deployed, *self._by_id}]:
            self._slots.pop(key).close()
        self.services = services
        self.offer = offer
        self.models = {info.name: info for info in offer.known}
        self._settled = False
        self._look_around()

    def _look_around(self) -> None:
        """Say what has come to its end: services that are gone, or everything."""
        if not self._settled:
            kept = {service.spec.id for service in self.services.values()}
            gone = [service for key, service in self._by_id.items() if key not in kept]
            stays = all(service.on_device.have_moved for service in self.services.values())
            if stays and all(service.idle for service in gone):
                for service in gone:
                    service.row.release()
                    del self._by_id[service.spec.id]
                    self._slots.pop(service.spec.id).close()
                self._channel.send(Settled(self.offer.number))
                self._settled = True
        if self._refuses and all(service.idle for service in self._by_id.values()):
            self._drained.set()

    def _device_up(self, epoch: int) -> None:
        self.front_queue.epoch = epoch
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        self.started = True
        self.front_queue.advance()

    def _device_down(self) -> None:
        self._take_answers()  # those that it still gave
        self.front_queue.epoch = 0
        for service in self._by_id.values():
            service.run_again()
        self._rings.close()
        self._look_around()
        if self._give_up is None:
            self._give_up = self.front_queue.loop.call_later(_GIVE_UP_S, self._abandon)

    def _abandon(self) -> None:
        line = f"there is no device process for {_GIVE_UP_S:.0f} s"
        for service in self._by_id.values():
            service.refuse_all(RefusedError(Reason.LOST, line))
        self._look_around()


def _refuse_gone(service: OpenService) -> None:
    line = f"{service.spec.name} is not loaded any more"
    service.refuse_all(RefusedError(Reason.NOT_READY, line, RETRY_S))


def _opened(behind: FrontServices, front: int, spec: ServiceSpec, slots: Slots) -> OpenService:
    counters = behind.counters
    return OpenService(
        *(spec, slots, counters.row(front, spec.row), behind.front_queue),
        lambda word: counters.total(spec.row, word),
        front * spec.slots.count,
    )


class FrontCore(Closing):
    """``Core`` of messages.py."""

    def __init__(self, services: FrontServices) -> None:
        self.behind = services
        self._nobody = services.front_queue.row
        self.count_connections = functools.partial(_count_connections, self._nobody)
        self._status = ServerStatus(services.counters)
        self._status.keep_sampling(services.front_queue.loop, lambda: services.offer)

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        return self.behind.models

    @property
    def live(self) -> bool:
        return self.behind.live

    @property
    def started(self) -> bool:
        return self.behind.started

    @property
    def ready(self) -> bool:
        behind = self.behind
        loaded = bool(behind.services)
        if behind.strict_readiness:
            loaded = loaded and not any(behind.offer.idle.values())
        return loaded and behind.front_queue.epoch > 0 and not behind.not_ready

    def why_not_ready(self, name: str) -> str | None:
        behind = self.behind
        if name not in behind.services:
            return behind.offer.idle.get(name) or "it is not loaded"
        if behind.not_ready:
            return "the server stops"
        return None if behind.front_queue.epoch else "the device process starts"

    def statistics(self, name: str) -> Statistics:
        service = self.behind.services.get(name)
        if service is None:
            return Statistics()
        return self.behind.counters.statistics(service.spec.row)

    def counters(self) -> Counters:
        for service in self.behind.services.values():
            service.note_due()
        return self._status.counters(self.behind.offer)

    def state(self) -> ServerState:
        offer = self.behind.offer
        services = [name for name in self.behind.services if self.why_not_ready(name) is None]
        note = "; ".join(f"{name} is not loaded: {why}" for name, why in offer.idle.items() if why)
        if self.behind.not_ready:
            note = "stopping"
        if not self.behind.front_queue.epoch:
            note = "the device process starts"
        return self._status.state(offer, self.ready, services, note)

    def refuse(self, model: str, reason: Reason) -> None:
        service = self.behind.services.get(model)
        count_refused(self._nobody if service is None else service.row, reason)

    async def infer(self, request: InferRequest) -> InferResponse:
        service = self.behind.find(request.model)
        pending = service.accept(request, _elsewhere(self.behind, service, Count.WAITING))
        service.advance()
        try:
            return await pending.future
        except asyncio.CancelledError:
            count_refused(service.row, Reason.CANCELLED)
            service.withdraw(pending)
            raise

    def slack_ns(self, name: str) -> float | None:
        if self.why_not_ready(name) is not None:
            return None
        service = self.behind.services[name]
        return service.slack_ns(
            _elsewhere(self.behind, service, Count.WAITING),
            _elsewhere(self.behind, service, Count.RUNNING),
        )

    async def load(self, name: str) -> None:
        await self.behind.ask_server(name, load=True)

    async def unload(self, name: str) -> None:
        await self.behind.ask_server(name, load=False)

    def close(self) -> None:
        self._status.close()
        self._nobody.release()
        self.behind.close()


def _count_connections(row: memoryview, change: int) -> None:
    row[Count.CONNECTIONS] += change
    row[Count.CONNECTED] += change > 0


def _elsewhere(behind: FrontServices, service: OpenService, word: Count) -> int:
    """What other fronts have counted."""
    if behind.counters.fronts == 1:
        return 0
    return behind.counters.total(service.spec.row, word) - int(service.row[word])


async def open_core(channel: Channel) -> tuple[FrontCore, Welcome]:
    """A front's core, when the server has said its first word."""
    loop = asyncio.get_running_loop()
    while (received := channel.receive()) is None:
        readable = loop.create_future()
        loop.add_reader(channel.fileno(), readable.set_result, None)
        await readable
        loop.remove_reader(channel.fileno())
    message, descriptors = received
    if not isinstance(message, Welcome):
        raise EclipError(f"a front is welcomed first, not told {message}")
    answered, counters = descriptors
    rows = CounterPages(counters, message.attachments)
    own = rows.row(message.front, 0)
    front_queue = FrontQueue(loop, own, lambda: rows.total(0, Count.TAKEN))
    services = FrontServices(message.front, front_queue, rows, channel, Signal(answered))
    services.strict_readiness = message.server.strict_readiness
    return FrontCore(services), message

"""The server: starts the processes that serve, and changes what they serve.

It holds all shared memory, so that a process that starts anew finds what its predecessor had. Every
change (a model loaded or unloaded, the file read again, a new plan) takes the same way: plan it,
open it on the device beside what runs, tell the fronts, and end the old generation when no front
needs it any more. A change that fails leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eclip.errors import DeviceError, EclipError, UsageError
from eclip.server.bell import Bell
from eclip.server.config import (
    ServerSettings,
    ServiceSettings,
    ServingConfig,
    check_files,
    check_workers,
)
from eclip.server.control import (
    Deployed,
    Deployment,
    DeviceDown,
    DeviceUp,
    Leave,
    LoadAnswer,
    LoadAsked,
    NotDeployed,
    Offer,
    Retired,
    ServiceSpec,
    TakeAccess,
    Welcome,
)
from eclip.server.counters import ROWS, Count, CounterPages
from eclip.server.device.claim import claimed
from eclip.server.device.models import info_of, tensors_of
from eclip.server.folder import own_folder
from eclip.server.log import ServerLog
from eclip.server.messages import ModelInfo
from eclip.server.ports import reserve_ports
from eclip.server.supervisor.attachments import Attachment, Attachments, welcome_front
from eclip.server.supervisor.children import Chores, Planners
from eclip.server.supervisor.device_keeper import DeviceKeeper
from eclip.server.supervisor.drift import DriftWatch
from eclip.server.supervisor.planner_process import PlanRequest

_FRONT_PACKAGES = (
    *("google.protobuf", "grpc", "httptools", "prometheus_client"),
    *("starlette", "uvicorn", "uvloop"),
)
_LEAST_S = 1.0  # for fronts to answer what is open, where the grace time is shorter
_LOOK_S = 1.0
_FOLLOWS = "larger batches and more instances follow"


class Supervisor:
    """``own_fronts``: fronts are its processes; otherwise the caller takes the attachments. So many
    ``guests`` may come through its door besides."""

    def __init__(
        self, config: ServingConfig, log: ServerLog, *, own_fronts: bool = True, guests: int = 0
    ) -> None:
        self.config = config
        self.bell = Bell()
        self.chores = Chores(self.bell)
        self.planners = Planners(log)
        attachments = config.server.fronts + guests
        self.counters = CounterPages.create(attachments)
        self.device = DeviceKeeper(log, self.bell, self._device_changed)
        self.fronts = Attachments(
            attachments,
            log,
            self.bell,
            self.counters,
            self._welcome,
            lambda attachment, asked: self.chores.begin(self._load(attachment, asked)),
        )
        self.server = config.server  # with the ports that were found free
        self._log = log
        self._own_fronts = own_fronts
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(own_folder())
        self._regions = self._folder / "regions"  # of shared memory: clients name its files
        self._regions.mkdir()
        self.door: Path | None = self._folder / "door" if guests else None
        self._changing = asyncio.Lock()
        self._search: asyncio.Task[Deployment] | None = None  # for new rates
        self.services = Services(config)
        self._access = ""  # the digest of token and certificate
        self._stopping = False
        self.stopped = False

    # --- Life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when every model is ready and every front takes requests."""
        if self._own_fronts:
            check_packages()
        self._access = check_files(self.config.server)
        self.server = reserve_ports(self.config.server, self._stack)
        wanted = {service.name for service in self.config.services if service.load}
        begin_s = time.monotonic()
        await self.device.start_ahead()
        staged = self.config.server.staged
        if staged is None:
            staged = not self.config.server.device.startswith("sim")
        planned = await self._plan(self.config, wanted, {}, 0.0, smallest=staged)
        seconds = round(time.monotonic() - begin_s, 2)
        self._log.write("planned", seconds=seconds, parts=planned.parts)
        if planned.uuid is not None:
            self._stack.enter_context(claimed(planned.uuid))
        self.services.take(self.config, self.services.with_ids(planned))
        _share_slots(self.fronts.attachments, self.device, self.services.deployed.specs)
        self.chores.begin(
            self.device.keep(self.fronts.attachments, lambda: self.services.deployed, self.counters)
        )
        own = self.fronts.attachments[: self.config.server.fronts]
        if self._own_fronts:
            for attachment in own:
                self.chores.begin(self.fronts.keep(attachment, self._clear))
            await self.bell.until(
                lambda: all(attachment.ports for attachment in own) or self._cannot_start
            )
        await self.bell.until(lambda: self.device.up or self._cannot_start)
        self.chores.check()
        if self.device.refusal is not None:
            raise DeviceError(self.device.refusal)
        if not (offer := self.services.offer(0)).specs:
            raise UsageError(
                "; ".join(f"service {name!r}: {why}" for name, why in offer.idle.items() if why)
            )
        if self.door is not None:
            self.chores.begin(
                self.fronts.receive(self.door, self.fronts.attachments[len(own) :], self._clear)
            )
        if self.config.server.replan:
            self.chores.begin(self._watch_rates())
        self._log.write(
            "serving, but not all models" if self.services.failed else "ready",
            http=self.server.http_port,
            grpc=self.server.grpc_port,
            services=self.services.deployed.in_words,
            notes=[*self.services.deployed.notes, *[_FOLLOWS] * staged],
            seconds=round(time.monotonic() - begin_s, 2),
        )
        if staged:
            self.chores.begin(_complete(self, self.services.deployed, wanted, begin_s))

    @property
    def _cannot_start(self) -> bool:
        return self.device.refusal is not None or self.chores.failure is not None

    async def stop(self) -> None:
        """Not ready at once; serve on for the grace time; answer what is open; end. When it is
        asked a second time, the grace time is over."""
        again, self._stopping = self._stopping, True
        self.device.leaving = self.fronts.leaving = True
        self.fronts.tell(Leave(now=again))
        if again:
            return
        self._log.write("stopping", grace_seconds=self.server.grace_seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.server.grace_seconds):
                await self.bell.until(
                    lambda: all(attachment.child is None for attachment in self.fronts.attachments)
                )
        self.fronts.tell(Leave(now=True))
        fronts = [
            attachment.child
            for attachment in self.fronts.attachments
            if attachment.child is not None
        ]
        await asyncio.gather(*(child.end(_drain_s(self.server) + _LEAST_S) for child in fronts))
        await self.device.stop()
        await self.close()
        self.stopped = True
        self._log.write("stopped")

    async def close(self) -> None:
        """At once: what still runs is ended."""
        self.device.leaving = self.fronts.leaving = True
        await self.chores.end()
        await self.device.close()
        await self.fronts.close()
        self.counters.close()
        self._stack.close()

    def _welcome(self, attachment: Attachment) -> None:
        attachments = len(self.fronts.attachments)
        welcome = Welcome(attachment.number, attachments, self.server, str(self._regions))
        welcome_front(attachment, welcome, self.counters.descriptor, self.services.ids)
        self.device.attach(attachment)
        if self.device.up:
            self.device.attach_rings([attachment], self.services.deployed)
        attachment.settled = self.services.offers
        attachment.send(self.services.offer(self.device.restarts))
        if self.device.up:
            attachment.send(DeviceUp(self.device.epoch))

    async def _clear(self, attachment: Attachment) -> None:
        await self.device.detach(attachment)
        self.counters.forget(attachment.number)

    def _device_changed(self, answer: Deployed | None) -> None:
        if answer is None:
            self.fronts.tell(DeviceDown())
            return
        self.services.note_failed(answer, self._log)
        self.device.attach_rings(self.fronts.attachments, self.services.deployed)
        self.fronts.tell(self.services.offer(self.device.restarts, new=True))
        self.fronts.tell(DeviceUp(self.device.epoch))

    # --- Changes ---------------------------------------------------------------------------------

    async def change(
        self,
        config: ServingConfig,
        wanted: set[str],
        rates_rps: dict[str, float] | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Serve this from now on; raises what is wrong with it, and then nothing has changed. A
        search for new rates is given up, since a client waits for this."""
        if self._search is not None:
            self._search.cancel()
        async with self._changing:
            planned = await self._plan(config, wanted, rates_rps or {}, seconds)
            await self._deploy(config, planned)

    async def _deploy(self, config: ServingConfig, planned: Deployment) -> None:
        """Changes are made one at a time."""
        deployment = self.services.with_ids(planned)
        await self.bell.until(lambda: self.device.up)
        added = _share_slots(self.fronts.attachments, self.device, deployment.specs)
        answer = await self.device.deploy(deployment)
        if isinstance(answer, NotDeployed):
            self.fronts.drop_slots(self.services.ids)
            await self.device.retire(self.services.deployed.generation)  # drops them there
            raise DeviceError(answer.reason)
        self.config = config
        self.services.take(config, deployment)
        self.fronts.send_slots(added)
        self.device.attach_rings(self.fronts.attachments, self.services.deployed)
        self.services.note_failed(answer, self._log)
        offer = self.services.offer(self.device.restarts, new=True)
        self.fronts.tell(offer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_drain_s(self.server)):
                await self.bell.until(lambda: self.fronts.have_settled(offer.number))
        number = deployment.generation
        retired = asyncio.ensure_future(self.device.retire(number))
        if (await asyncio.wait([retired], timeout=_drain_s(self.server)))[0]:
            self.fronts.tell(Retired(number))
            self.fronts.drop_slots(self.services.ids)
        else:  # something hangs there, which the device process looks after
            ending = _end_old(retired, number, self._changing, self.fronts, self.services)
            self.chores.begin(ending)
        self._log.write(
            "deployed",
            generation=deployment.generation,
            services=deployment.in_words,
            seconds=round(answer.seconds, 2),
            notes=list(deployment.notes),
        )

    async def reload(self, config: ServingConfig) -> None:
        """The configuration is another now, or what is in the files of the token and the
        certificate."""
        access = check_files(self.server)
        if access != self._access:
            self._access = access
            self.fronts.tell(TakeAccess())
        # A policy is a matter of plans: a fleet may place a GPU's services anew under another one.
        server = msgspec.structs.replace(self.config.server, policy=config.server.policy)
        if config.server != server:
            self._log.write("changes of [server] need a restart; its policy and services are taken")
        config = msgspec.structs.replace(config, server=server)
        await self.change(config, {service.name for service in config.services if service.load})

    async def _load(self, attachment: Attachment, asked: LoadAsked) -> None:
        error: str | None = None
        loaded = {spec.name for spec in self.services.deployed.specs}
        wanted = loaded | {asked.name} if asked.load else loaded - {asked.name}
        try:
            if not wanted:
                raise UsageError(f"{asked.name} is the only model that is loaded; stop the server")
            await self.change(self.config, wanted)
            if asked.load:
                error = self.services.failed.get(asked.name)
        except (EclipError, OSError) as refusal:
            error = str(refusal)
        attachment.send(LoadAnswer(asked.number, error))

    async def _watch_rates(self) -> None:
        watch = DriftWatch()
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self.device.up or self._changing.locked() or self._stopping:
                continue
            deployment = self.services.deployed
            arrived = {
                spec.name: self.counters.total(spec.row, Count.ARRIVED) for spec in deployment.specs
            }
            watch.take(arrived, time.monotonic())
            measured = watch.drifted(deployment.rates_rps)
            if measured is None:
                continue
            rates = deployment.known_rps | measured
            self._log.write("rates have drifted; planning again", rates_rps=rates)
            try:
                await self._replan(deployment, rates)
            except (EclipError, OSError) as error:
                self._log.write("the old plan stays", reason=str(error))

    async def _replan(self, deployment: Deployment, rates_rps: dict[str, float]) -> None:
        """Another plan, unless what runs suits the new rates, too, or something else runs by the
        time that it is found."""
        loaded = {spec.name for spec in deployment.specs}
        seconds = self.server.replan_seconds
        search = asyncio.create_task(self._plan(self.config, loaded, rates_rps, seconds))
        self._search = search
        try:
            await asyncio.wait([search])
        finally:
            self._search = None
            search.cancel()
            await asyncio.wait([search])  # until its process has ended, too
        async with self._changing:
            if search.cancelled() or self.services.deployed is not deployment:
                raise UsageError("the configuration has changed meanwhile")
            planned = search.result()
            if deployment.does_all_of(planned):
                kept = msgspec.structs.replace(
                    deployment, rates_rps=planned.rates_rps, assumed=planned.assumed
                )
                self.services.take(self.config, kept)
                self._log.write("what runs suits the new rates, too")
                return
            await self._deploy(self.config, planned)

    async def _plan(
        self,
        config: ServingConfig,
        wanted: set[str],
        rates_rps: dict[str, float],
        seconds: float,
        *,
        smallest: bool = False,
    ) -> Deployment:
        services = tuple(service for service in config.services if service.name in wanted)
        if not services:
            raise UsageError("no service is to be loaded; give one load = true")
        if (too_many := check_workers(services)) is not None:
            raise UsageError(too_many)
        for service in config.services:
            if service.name not in wanted:  # clients are told of it, too
                _unloaded(service)
        request = PlanRequest(
            config=ServingConfig(server=config.server, services=services),
            rates_rps=rates_rps,
            generation=self.services.next_generation(),
            folder=str(self._folder),
            seconds=seconds,
            may_measure=not self.device.up,
            smallest=smallest,
        )
        return await self.planners.plan(request)


async def _complete(
    server: Supervisor, first: Deployment, wanted: set[str], begin_s: float
) -> None:
    """Open what the first generation left out, beside it; any other change does that, too."""
    async with server._changing:
        if server.services.deployed is not first:
            return
        try:
            planned = await server._plan(server.config, wanted, {}, 0.0)
            await server._deploy(server.config, planned)
        except (EclipError, OSError) as error:
            server._log.write("larger batches are not opened", reason=str(error))
            return
    seconds = round(time.monotonic() - begin_s, 2)
    server._log.write("complete", services=server.services.deployed.in_words, seconds=seconds)


class Services:
    """What is configured and what is deployed, with the numbers that tell one from another."""

    def __init__(self, config: ServingConfig) -> None:
        self.offers = 0
        self.failed: dict[str, str] = {}  # deployed but not loaded, and why
        self._config = config
        self._deployment: Deployment | None = None
        self._generation = self._ids = 0
        self._rows: dict[str, int] = {}  # of the counters, by name

    @property
    def deployed(self) -> Deployment:
        if self._deployment is None:
            raise DeviceError("nothing is deployed yet")
        return self._deployment

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def take(self, config: ServingConfig, deployment: Deployment) -> None:
        self._config, self._deployment = config, deployment

    def with_ids(self, planned: Deployment) -> Deployment:
        """A service that runs as before keeps its id, so that its requests go over to the new
        generation. Any other is a new one."""
        before = () if self._deployment is None else self._deployment.specs
        known = {spec.name: spec for spec in before if spec.name not in self.failed}
        specs = []
        for spec in planned.specs:
            old = known.get(spec.name)
            if old is not None and _runs_alike(old, spec):
                key = old.id
            else:
                self._ids += 1
                key = self._ids
            row = self._rows.setdefault(spec.name, len(self._rows) + 1)
            if row >= ROWS:
                raise UsageError(f"a server counts {ROWS} services over its life; start it anew")
            specs.append(msgspec.structs.replace(spec, id=key, row=row))
        return msgspec.structs.replace(planned, specs=tuple(specs))

    @property
    def ids(self) -> set[int]:
        return {spec.id for spec in self.deployed.specs}

    def note_failed(self, answer: Deployed, log: ServerLog) -> None:
        names = {spec.id: spec.name for spec in self.deployed.specs}
        # A model's own error may have several lines; a client gets one.
        self.failed = {
            names[key]: " ".join(reason.splitlines()) for key, reason in answer.failed.items()
        }
        for name, reason in self.failed.items():
            log.write("service not loaded", service=name, reason=reason)

    def offer(self, restarts: int, *, new: bool = False) -> Offer:
        """What fronts are told."""
        self.offers += new
        specs = tuple(one for one in self.deployed.specs if one.name not in self.failed)
        infos = {spec.name: spec.info for spec in self.deployed.specs}
        there = {spec.name for spec in specs}
        return Offer(
            number=self.offers,
            specs=specs,
            deployed=tuple(self.ids),
            known=tuple(infos.get(one.name) or _unloaded(one) for one in self._config.services),
            idle={
                one.name: self.failed.get(one.name, "")
                for one in self._config.services
                if one.name not in there
            },
            device=self.deployed.device,
            slices=self.deployed.slices,
            homes=self.deployed.homes,
            plan=f"{self.deployed.policy}, generation {self.deployed.generation}",
            restarts=restarts,
        )


def _share_slots(
    attachments: Sequence[Attachment], device: DeviceKeeper, specs: Sequence[ServiceSpec]
) -> set[int]:
    """Give new services slots, of which the device is told; fronts are when it runs them."""
    added = set()
    for attachment in attachments:
        for spec in specs:
            if attachment.add_slots(spec):
                device.attach_slots(attachment, spec.id)
                added.add(spec.id)
    return added


async def _end_old(
    retired: Awaitable[None],
    before: int,
    changing: asyncio.Lock,
    fronts: Attachments,
    services: Services,
) -> None:
    """When old generations have ended at last, and nothing is just being deployed."""
    await retired
    async with changing:
        fronts.tell(Retired(before))
        fronts.drop_slots(services.ids)


def _drain_s(server: ServerSettings) -> float:
    """For fronts to answer what is open of a service, or of a server, that goes."""
    return max(_LEAST_S, server.grace_seconds)


def _unloaded(settings: ServiceSettings) -> ModelInfo:
    inputs, outputs = tensors_of(settings, computed=True)
    return info_of(settings, inputs, outputs, (settings.batches or (1,))[-1])


def _runs_alike(old: ServiceSpec, new: ServiceSpec) -> bool:
    def essence(spec: ServiceSpec) -> tuple[Any, ...]:
        settings = spec.settings
        return (
            (settings.model, settings.file, settings.replicas, settings.profile),
            (spec.info, spec.buckets, spec.slots, spec.function, spec.timing_only),
        )

    return essence(old) == essence(new)


def check_packages() -> None:
    """Those of fronts, which import them in their own processes."""
    for name in _FRONT_PACKAGES:
        found = None
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.util.find_spec(name)
        if found is None:
            raise UsageError(
                f"the package {name} is missing; install what a server needs: "
                f"pip install 'eclip[serve]'"
            )

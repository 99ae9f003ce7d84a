"""A router's backends: the GPUs' deployments, and the choice between them for each request.

A request goes to the deployment with its model loaded and the largest slack. Slack of deployments
on this machine is current, read from shared memory. Slack of other deployments is from their last
answer, minus the requests sent since; then the better of two random choices is taken
(``routing.py``). A request that a deployment refused is offered to another. An accepted request is
answered with its outcome, and never sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path
from typing import Protocol

from eclip.errors import DeviceError
from eclip.fleet.orders import GpuPlace, RoutingTable
from eclip.fleet.place.routing import choose
from eclip.fleet.place.spec import GpuId
from eclip.server.front.core import FrontCore
from eclip.server.front.guests import enter
from eclip.server.messages import (
    DeviceState,
    InferRequest,
    InferResponse,
    ModelInfo,
    Reason,
    RefusedError,
)
from eclip.server.protocol.http_client import RemoteFront

TRIES = 3  # deployments that a request is offered to
_FRESH_NS = 20_000_000  # as old as simulated routers' view
# After this silence a deployment gets the next request: only an answer tells its slack, and without
# an answer it would get no requests as long as others have slack.
_STALE_NS = 1_000_000_000
ASK_NS = 1e12
_AGAIN_S = (0.02, 0.05, 0.1, 0.2, 0.5)  # between attempts to enter a door
_DRAIN_S = 20.0
_RETRY_S = 1.0


class Backend(Protocol):
    """A GPU's deployment, as a router reaches it."""

    place: GpuPlace
    near: bool  # through shared memory

    def info(self, model: str) -> ModelInfo | None:
        """The model's description; None: the model takes no requests now."""
        ...

    def slack_ns(self, model: str) -> tuple[float, bool]:
        """The slack, and whether it is current."""
        ...

    async def infer(self, request: InferRequest) -> InferResponse: ...

    def state(self) -> tuple[DeviceState, ...]: ...

    async def close(self) -> None: ...


class NearBackend:
    """A deployment on this machine, attached through shared memory. Reconnects by itself."""

    def __init__(self, place: GpuPlace) -> None:
        self.place = place
        self.near = True
        self._core: FrontCore | None = None
        self._leaves = False
        self._visit = asyncio.create_task(self._keep_visiting(Path(place.door or "")))

    def info(self, model: str) -> ModelInfo | None:
        core = self._core
        if core is None or core.why_not_ready(model) is not None:
            return None
        return core.behind.services[model].spec.info

    def slack_ns(self, model: str) -> tuple[float, bool]:
        slack_ns = None if self._core is None else self._core.slack_ns(model)
        return (0.0, False) if slack_ns is None else (slack_ns, True)

    async def infer(self, request: InferRequest) -> InferResponse:
        if self._core is None:
            raise RefusedError(Reason.NOT_READY, f"{self.place.gpu} is not connected", _RETRY_S)
        return await self._core.infer(request)

    def state(self) -> tuple[DeviceState, ...]:
        return () if self._core is None else self._core.state().devices

    async def close(self) -> None:
        """Close after open requests are answered."""
        self._leaves = True
        if self._core is not None:
            self._core.behind.leaving.set()
        else:
            self._visit.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._visit

    async def _keep_visiting(self, door: Path) -> None:
        attempt = 0
        while not self._leaves:
            try:
                core = await enter(door)
            except DeviceError:
                await asyncio.sleep(_AGAIN_S[min(attempt, len(_AGAIN_S) - 1)])
                attempt += 1
                continue
            attempt = 0
            with core:
                self._core = core
                await core.behind.leaving.wait()
                if core.live:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_DRAIN_S):
                            await core.behind.drain()
                self._core = None


class FarBackend:
    """A deployment on another machine, over HTTP."""

    def __init__(self, place: GpuPlace, token: str | None) -> None:
        self.place = place
        self.near = False
        self._front = RemoteFront(place.http, token)
        self._sent: dict[str, int] = {}  # by model: requests since the last answer
        self._taken_ns: dict[str, float] = {}  # by model: slack that a request uses up
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def info(self, model: str) -> ModelInfo | None:
        return self.place.models.get(model) if self._front.connected else None

    def slack_ns(self, model: str) -> tuple[float, bool]:
        slack_ns, said_ns = self._front.slack.get(model, (0.0, 0))
        sent = self._sent.get(model, 0)
        age_ns = time.monotonic_ns() - said_ns
        if sent == 0 and age_ns > _STALE_NS:
            return ASK_NS, False
        fresh = sent == 0 and age_ns < _FRESH_NS
        return slack_ns - sent * self._taken_ns.get(model, 1e6), fresh

    async def infer(self, request: InferRequest) -> InferResponse:
        model = request.model
        began_ns = time.monotonic_ns()
        self._sent[model] = self._sent.get(model, 0) + 1
        self._open += 1
        self._idle.clear()
        try:
            response = await self._front.infer(request)
            took_ns = time.monotonic_ns() - began_ns
            self._taken_ns[model] = min(took_ns, self._taken_ns.get(model, took_ns))
            return response
        except RefusedError:
            self._front.slack[model] = (0.0, time.monotonic_ns())  # a refusal means no slack
            raise
        finally:
            self._sent[model] = 0
            self._open -= 1
            if not self._open:
                self._idle.set()

    def state(self) -> tuple[DeviceState, ...]:
        return ()

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S if self._front.connected else 0):
                await self._idle.wait()
        await self._front.close()


class Backends:
    """``host``: this machine; its deployments are near."""

    def __init__(self, host: str, *, shared_memory: bool = True, token: str | None = None) -> None:
        self.here: dict[GpuId, Backend] = {}
        self.models: dict[str, ModelInfo] = {}  # as clients are told
        self.shares: dict[str, dict[GpuId, float]] = {}  # by model
        self._host = host
        self._shared_memory = shared_memory
        self._token = token
        self._random = random.Random()
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, table: RoutingTable) -> None:
        """Route by this table from now on. Removed deployments may still answer open requests."""
        places = {place.gpu: place for place in table.places}
        for gpu, backend in list(self.here.items()):
            if not _same_server(places.get(gpu), backend.place):
                task = asyncio.create_task(self.here.pop(gpu).close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        for gpu, place in places.items():
            if gpu in self.here:
                self.here[gpu].place = place
            else:
                self.here[gpu] = self._reach(place)
        self.shares = table.shares
        self.models = {
            name: info
            for place in table.places
            for name, info in place.models.items()
            if name in table.shares
        }

    def candidates(self, name: str, without: frozenset[GpuId] = frozenset()) -> list[Backend]:
        """Deployments whose inputs and outputs of the model match the description for clients.
        While a model changes, some deployments differ."""
        info = self.models.get(name)
        if info is None:
            return []
        shares = self.shares.get(name, {})
        return [
            backend
            for gpu, backend in self.here.items()
            if gpu in shares and gpu not in without and backend.info(name) == info
        ]

    def choose(self, name: str, without: frozenset[GpuId] = frozenset()) -> Backend | None:
        """The deployment for the next request for the model."""
        candidates = self.candidates(name, without)
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        slack = [one.slack_ns(name) for one in candidates]
        if all(fresh for _, fresh in slack):
            return candidates[max(range(len(slack)), key=lambda index: slack[index][0])]
        shares = self.shares[name]
        chosen = choose(
            [slack_ns for slack_ns, _ in slack],
            [shares[one.place.gpu] for one in candidates],
            self._random.random(),
            self._random.random(),
        )
        return candidates[chosen] if chosen >= 0 else None

    async def infer(self, request: InferRequest) -> InferResponse:
        refusal = RefusedError(
            Reason.NOT_READY, f"no GPU has {request.model} ready; ask again", _RETRY_S
        )
        tried: frozenset[GpuId] = frozenset()
        while len(tried) < TRIES and (backend := self.choose(request.model, tried)) is not None:
            tried |= {backend.place.gpu}
            try:
                return await backend.infer(request)
            except RefusedError as error:
                if error.reason not in (Reason.OVERLOADED, Reason.NOT_READY):
                    raise
                refusal = error  # try another deployment
        raise refusal

    async def close(self) -> None:
        """Close all deployments after open requests are answered."""
        closing = [backend.close() for backend in self.here.values()]
        await asyncio.gather(*closing, *self._closing, return_exceptions=True)

    def _reach(self, place: GpuPlace) -> Backend:
        near = self._shared_memory and place.host == self._host
        if near and place.door is not None and Path(place.door).exists():
            return NearBackend(place)
        return FarBackend(place, self._token)


def _same_server(now: GpuPlace | None, before: GpuPlace) -> bool:
    return now is not None and (now.grpc, now.door, now.pid) == (
        before.grpc,
        before.door,
        before.pid,
    )

"""The router: the same front as a server's, before the GPUs of a fleet.

Its core answers from the replicas, and counts. Its choice is also an endpoint: a gateway that sends
requests itself asks ``/eclip/route/MODEL`` where the next one should go.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from eclip.fleet.backends import ASK_NS, Backends
from eclip.server.descriptions import describe_server
from eclip.server.messages import (
    BUCKETS_S,
    Counters,
    DeviceCounters,
    DeviceState,
    InferRequest,
    InferResponse,
    ModelInfo,
    Reason,
    RefusedError,
    ServerState,
    ServiceCounters,
    Statistics,
)
from eclip.server.protocol.http import answer_json


class RouterCore:
    """``Core`` of messages.py."""

    def __init__(self, backends: Backends) -> None:
        self.live = True
        self.started = False
        self.leaving = False
        self.arrived: dict[str, int] = {}  # requests by model
        self._backends = backends
        self._counts: dict[str, ServiceCounters] = {}
        self._latencies: dict[str, list[int]] = {}
        self._refused: dict[str, dict[Reason, int]] = {}
        self._connections = self._connected = 0
        self._began_s = time.monotonic()

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        return self._backends.models

    @property
    def ready(self) -> bool:
        shares = self._backends.shares
        ready = bool(shares) and all(self.why_not_ready(name) is None for name in shares)
        self.started = self.started or ready
        return ready and not self.leaving

    def why_not_ready(self, name: str) -> str | None:
        if self.leaving:
            return "the router stops"
        return None if self._backends.candidates(name) else "no GPU has it ready"

    def slack_ns(self, name: str) -> float | None:
        candidates = self._backends.candidates(name)
        known = (one.slack_ns(name)[0] for one in candidates)
        return max((slack_ns for slack_ns in known if slack_ns < ASK_NS), default=None)

    async def infer(self, request: InferRequest) -> InferResponse:
        model = request.model
        counts = self._count(model)
        self.arrived[model] = self.arrived.get(model, 0) + 1
        counts.running += 1
        try:
            response = await self._backends.infer(request)
        except RefusedError as error:
            self.refuse(model, error.reason)
            counts.statistics.fail.count += 1
            raise
        finally:
            counts.running -= 1
        took_ns = time.monotonic_ns() - request.arrival_ns
        counts.statistics.success.count += 1
        counts.statistics.success.ns += took_ns
        counts.latency.total_s += took_ns / 1e9
        self._latencies[model][bisect.bisect_left(BUCKETS_S, took_ns / 1e9)] += 1
        return response

    def statistics(self, name: str) -> Statistics:
        return self._count(name).statistics

    def refuse(self, model: str, reason: Reason) -> None:
        self._count(model)
        refused = self._refused[model]
        refused[reason] = refused.get(reason, 0) + 1

    def count_connections(self, change: int) -> None:
        self._connections += change
        self._connected += change > 0

    def counters(self) -> Counters:
        here = self._backends.here
        devices = {str(gpu): _counters_of(backend.state()) for gpu, backend in here.items()}
        return Counters(dict(self._counts), devices, self._connections, self._connected)

    def state(self) -> ServerState:
        states = [state for one in self._backends.here.values() for state in one.state()]
        uptime_s = time.monotonic() - self._began_s
        note = "a router: of GPUs on other machines their own pages say more"
        return ServerState(describe_server()["version"], uptime_s, self.ready, note, tuple(states))

    async def load(self, name: str) -> None:
        raise _by_file(name)

    async def unload(self, name: str) -> None:
        raise _by_file(name)

    def _count(self, name: str) -> ServiceCounters:
        counts = self._counts.get(name)
        if counts is None:
            counts = self._counts[name] = ServiceCounters()
            self._latencies[name] = [0] * (len(BUCKETS_S) + 1)
            counts.latency.buckets = self._latencies[name]
            self._refused[name] = {}
            counts.refused = self._refused[name]
        return counts


def choice_route(backends: Backends) -> Route:
    """The endpoint that a gateway asks."""

    async def answer(request: Request) -> Response:
        model = request.path_params["model"]
        if model not in backends.models:
            return answer_json({"error": f"there is no model {model!r}"}, 404)
        backend = backends.choose(model)
        if backend is None:
            line = f"no GPU has {model} ready; ask again"
            return answer_json({"error": line}, 503, {"retry-after": "1"})
        slack_ns, fresh = backend.slack_ns(model)
        place = backend.place
        return answer_json(
            {
                "model": model,
                "gpu": str(place.gpu),
                "http": place.http,
                "grpc": place.grpc,
                "slack_ms": None if slack_ns >= ASK_NS else round(slack_ns / 1e6, 3),
                "fresh": fresh,
            },
            headers={"cache-control": "no-store"},
        )

    return Route("/eclip/route/{model}", answer, methods=["GET"])


def _counters_of(states: tuple[DeviceState, ...]) -> DeviceCounters:
    if not states:
        return DeviceCounters()
    return DeviceCounters(states[0].busy_share, states[0].power_w, states[0].restarts)


def _by_file(name: str) -> RefusedError:
    line = f"{name}: a fleet's models are those of its file; change it and run eclip fleet up"
    return RefusedError(Reason.UNSUPPORTED, line)

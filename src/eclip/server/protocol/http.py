"""The Open Inference Protocol v2 over HTTP, as Triton's clients speak it, and what people look at:
``/metrics`` and the live page at ``/``.

Every error is one line: ``{"error": "..."}``. A request whose client has gone is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib import resources
from typing import Any, cast

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eclip.server import descriptions
from eclip.server.access import Access
from eclip.server.limits import Limits
from eclip.server.log import report
from eclip.server.messages import Core, InferRequest, InferResponse, Reason, RefusedError
from eclip.server.protocol.bodies import Bodies, ClientGoneError, Headers, choose_coding, compress
from eclip.server.protocol.connections import CONNECTION, Client, Connections, GuardedConnection
from eclip.server.protocol.http_infer import read_request, write_response
from eclip.server.protocol.metrics import Metrics
from eclip.server.protocol.tracing import Tracing, trace_fields
from eclip.server.shared_memory import Region, Regions
from eclip.server.tensors import parse_json

STATUSES = {
    Reason.BAD_REQUEST: 400,
    Reason.UNKNOWN_MODEL: 404,
    Reason.UNKNOWN_REGION: 404,
    Reason.ALREADY_EXISTS: 400,
    Reason.OVERLOADED: 429,
    Reason.NOT_READY: 503,
    Reason.EXPIRED: 504,
    Reason.CANCELLED: 499,
    Reason.UNSUPPORTED: 501,
    Reason.FAILED: 500,
    Reason.LOST: 503,
}
# In a request: its sender, a router, wants to know what the next one would have left of its bound.
SLACK = b"eclip-slack-ns"
# What changes the server, or what it may read.
_CONTROL_PATHS = ("/v2/repository/models/", "/v2/systemsharedmemory/")
_TRACE = b"traceparent"
# What needs no token: probes of an orchestrator, and a page without anything of this server on it.
_OPEN_PATHS = frozenset({"/", "/v2/health/live", "/v2/health/ready", "/v2/health/startup"})


class _IndexQuestion(msgspec.Struct):
    ready: bool = False


class _RegisterQuestion(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


class _LoadQuestion(msgspec.Struct):
    parameters: dict[str, Any] = {}


_load_questions = msgspec.json.Decoder(_LoadQuestion)
_index_questions = msgspec.json.Decoder(_IndexQuestion)
_register_questions = msgspec.json.Decoder(_RegisterQuestion)


# --- Answers ----------------------------------------------------------------------------------


def answer_json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def answer_nothing(good: bool = True, line: str = "") -> Response:
    if good:
        return Response(media_type="text/plain")
    return answer_json({"error": line}, 400) if line else Response(status_code=400)


def answer_refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, RefusedError):
        raise error
    headers = {}
    if error.reason in (Reason.OVERLOADED, Reason.NOT_READY):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    return answer_json({"error": str(error)}, STATUSES[error.reason], headers)


def answer_http_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return answer_json({"error": error.detail}, error.status_code, dict(error.headers or {}))


class _Door:
    """What every request passes: a token and, where it changes the server, a source that may. A
    fault behind the door is logged here; the client gets its type and number."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refuse(scope["path"], scope["method"], dict(scope["headers"]))
        if refused is not None:
            await refused(scope, receive, send)
            return
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            trace = trace_fields(dict(scope["headers"]).get(_TRACE))
            line = report("a request failed", error, path=scope["path"], **trace)
            if begun:
                scope[CONNECTION].abort()
            else:
                failure = answer_json({"error": f"the server failed: {line}"}, 500)
                await failure(scope, receive, send)

    def _refuse(self, path: str, method: str, headers: Headers) -> Response | None:
        token = self._access.token
        if path not in _OPEN_PATHS and token is not None:
            if not token.is_shown(headers.get(b"authorization")):
                line = "this server wants the header 'Authorization: Bearer TOKEN'"
                return answer_json({"error": line}, 401, {"www-authenticate": "Bearer"})
        elif method == "POST" and path.startswith(_CONTROL_PATHS):
            why = self._access.why_no_control(headers)
            if why is not None:
                return answer_json({"error": why}, 403)
        return None


# --- Inference --------------------------------------------------------------------------------


class InferEndpoint:
    """An ASGI application of its own: Starlette's request objects cost as much as the rest."""

    def __init__(self, core: Core, regions: Regions, limits: Limits, bodies: Bodies) -> None:
        self._core = core
        self._regions = regions
        self._limits = limits
        self._bodies = bodies
        self._tracing = Tracing()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        try:
            answer_headers, body = await self._answer(scope, headers, receive)
        except ClientGoneError:
            return
        coding = choose_coding(headers.get(b"accept-encoding", b""))
        if coding != b"identity":
            body = await compress(body, coding)
            answer_headers.append((b"content-encoding", coding))
        answer_headers.append((b"content-length", b"%d" % len(body)))
        if SLACK in headers:
            slack_ns = self._core.slack_ns(scope["path_params"]["model"])
            if slack_ns is not None:
                answer_headers.append((SLACK, b"%d" % slack_ns))
        await send({"type": "http.response.start", "status": 200, "headers": answer_headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(
        self, scope: Scope, headers: Headers, receive: Receive
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        in_core = False
        names = scope["path_params"]
        name = names["model"]
        try:
            model = descriptions.find_model(self._core, name, names.get("version", ""))
            async with self._bodies.read(headers, receive) as body:
                request, wishes = read_request(model, headers, body, self._regions, self._limits)
                in_core = True
                response = await infer_while_connected(self._core, request, scope[CONNECTION])
                in_core = False
                answer = write_response(response, wishes, self._regions)
                timing = self._tracing.timing(request, response, headers.get(_TRACE))
                answer[0].append((b"server-timing", timing.encode()))
                return answer
        except RefusedError as error:
            if not in_core:
                self._core.refuse(name if name in self._core.models else "", error.reason)
            raise


async def infer_while_connected(core: Core, request: InferRequest, client: Client) -> InferResponse:
    """The result; a client that goes away cancels the request."""
    if client.gone:
        raise ClientGoneError
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    client.watch(task)
    try:
        return await core.infer(request)
    except asyncio.CancelledError:
        if client.gone:
            raise ClientGoneError from None
        raise
    finally:
        client.unwatch(task)


# --- Everything else --------------------------------------------------------------------------


class _Endpoints:
    """Small questions: health, metadata, statistics, repository."""

    def __init__(self, core: Core, bodies: Bodies) -> None:
        self._core = core
        self._bodies = bodies

    async def server(self, _: Request) -> Response:
        return answer_json(descriptions.describe_server())

    async def live(self, _: Request) -> Response:
        return answer_nothing(self._core.live)

    async def ready(self, _: Request) -> Response:
        return answer_nothing(self._core.ready)

    async def startup(self, _: Request) -> Response:
        return answer_nothing(self._core.started)

    async def model(self, request: Request) -> Response:
        model = descriptions.find_model(self._core, **_model_and_version(request))
        return answer_json(descriptions.describe_model(model))

    async def model_ready(self, request: Request) -> Response:
        ready = descriptions.is_ready(self._core, **_model_and_version(request))
        return answer_nothing(ready, "the model is not ready")

    async def model_config(self, request: Request) -> Response:
        model = descriptions.find_model(self._core, **_model_and_version(request))
        return answer_json(descriptions.describe_configuration(model))

    async def model_statistics(self, request: Request) -> Response:
        model = descriptions.find_model(self._core, **_model_and_version(request))
        return answer_json(descriptions.describe_statistics(self._core, [model]))

    async def statistics(self, _: Request) -> Response:
        models = list(self._core.models.values())
        return answer_json(descriptions.describe_statistics(self._core, models))

    async def index(self, request: Request) -> Response:
        async with self._bodies.read(dict(request.scope["headers"]), request.receive) as body:
            asked = parse_json(body, _index_questions) if body else _IndexQuestion()
        return answer_json(descriptions.describe_repository(self._core, asked.ready))

    async def load(self, request: Request) -> Response:
        async with self._bodies.read(dict(request.scope["headers"]), request.receive) as body:
            asked = parse_json(body, _load_questions) if body else _LoadQuestion()
        descriptions.refuse_overrides(asked.parameters)
        await self._core.load(request.path_params["model"])
        return answer_nothing()

    async def unload(self, request: Request) -> Response:
        await self._core.unload(request.path_params["model"])
        return answer_nothing()


class _Views:
    """What machines and people look at."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._metrics = Metrics(core)
        self._page = resources.files(__package__).joinpath("page/index.html").read_bytes()

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=Metrics.MEDIA_TYPE)

    async def state(self, _: Request) -> Response:
        return answer_json(self._core.state(), headers={"cache-control": "no-store"})

    async def page(self, _: Request) -> Response:
        # The page's own script and style are inside it; it asks this server only.
        policy = (
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        return Response(
            self._page, media_type="text/html", headers={"content-security-policy": policy}
        )


class _RegionEndpoints:
    def __init__(self, regions: Regions, bodies: Bodies) -> None:
        self._regions = regions
        self._bodies = bodies

    async def status(self, request: Request) -> Response:
        name = request.path_params.get("region")
        regions = self._regions.all() if name is None else [self._regions.get(name)]
        return answer_json(regions)

    async def register(self, request: Request) -> Response:
        async with self._bodies.read(dict(request.scope["headers"]), request.receive) as body:
            asked: _RegisterQuestion = parse_json(body, _register_questions)
        name = request.path_params["region"]
        self._regions.register(Region(name, asked.key, asked.offset, asked.byte_size))
        return answer_nothing()

    async def unregister(self, request: Request) -> Response:
        if "region" in request.path_params:
            self._regions.unregister(request.path_params["region"])
        else:
            self._regions.unregister_all()
        return answer_nothing()


def _model_and_version(request: Request) -> dict[str, str]:
    names = request.path_params
    return {"name": names["model"], "version": names.get("version", "")}


def make_app(
    core: Core,
    regions: Regions,
    limits: Limits,
    access: Access,
    more: Sequence[Route] = (),
) -> Starlette:
    """The application. The routes of inferences stand first: routes are tried in their order.
    ``more`` are those that only this core has."""
    bodies = Bodies(limits)  # of all: they share its limit
    infer = InferEndpoint(core, regions, limits, bodies)
    small = _Endpoints(core, bodies)
    memory = _RegionEndpoints(regions, bodies)
    views = _Views(core)

    def of_model(suffix: str, endpoint: Any, method: str = "GET") -> list[Route]:
        places = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        return [Route(place + suffix, endpoint, methods=[method]) for place in places]

    def route(path: str, endpoint: Callable[..., Awaitable[Response]], method: str) -> Route:
        return Route(path, endpoint, methods=[method])

    region = "/v2/systemsharedmemory/region/{region}"
    routes = [
        *of_model("/infer", infer, "POST"),
        route("/v2/models/stats", small.statistics, "GET"),
        *of_model("", small.model),
        *of_model("/ready", small.model_ready),
        *of_model("/config", small.model_config),
        *of_model("/stats", small.model_statistics),
        route("/v2", small.server, "GET"),
        route("/v2/health/live", small.live, "GET"),
        route("/v2/health/ready", small.ready, "GET"),
        route("/v2/health/startup", small.startup, "GET"),
        route("/v2/repository/index", small.index, "POST"),
        route("/v2/repository/models/{model}/load", small.load, "POST"),
        route("/v2/repository/models/{model}/unload", small.unload, "POST"),
        route("/v2/systemsharedmemory/status", memory.status, "GET"),
        route("/v2/systemsharedmemory/unregister", memory.unregister, "POST"),
        route(f"{region}/status", memory.status, "GET"),
        route(f"{region}/register", memory.register, "POST"),
        route(f"{region}/unregister", memory.unregister, "POST"),
        route("/metrics", views.metrics, "GET"),
        route("/eclip/state", views.state, "GET"),
        route("/", views.page, "GET"),
        *more,
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(_Door, access)],
        exception_handlers={
            RefusedError: answer_refused,
            HTTPException: answer_http_error,
        },
    )


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the whole server's business, not this protocol's."""
        yield


class HttpServer:
    """Serves an application on a bound socket until it is stopped."""

    def __init__(
        self, app: Starlette, listener: socket.socket, core: Core, limits: Limits, access: Access
    ) -> None:
        self._listener = listener
        tls = None if access.tls is None else access.tls.tls
        connections = Connections(
            limits, core.count_connections, lambda reason: core.refuse("", reason)
        )
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=functools.partial(GuardedConnection, connections),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(limits.idle_s),
                ssl_certfile=None if tls is None else tls.certificate,
                ssl_keyfile=None if tls is None else tls.key,
            )
        )
        self._server.config.load()
        if access.tls is not None:
            access.tls.context = self._server.config.ssl
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.001)

    async def stop(self, grace_s: float) -> None:
        """Requests under way have so long to end."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        if self._task is not None:
            await self._task

"""The Open Inference Protocol v2 over gRPC, as Triton's clients speak it.

grpc cancels a call's task when its client cancels it, goes away, or its deadline passes; that
cancels the request in the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError, Message

from eclip.server import descriptions
from eclip.server.access import Access, Token
from eclip.server.limits import Limits
from eclip.server.log import report
from eclip.server.messages import Core, InferRequest, Reason, RefusedError, bounded_timeout
from eclip.server.protocol import inference_pb2 as pb
from eclip.server.protocol.rpc_infer import read_request, write_response
from eclip.server.protocol.tracing import Tracing, trace_fields
from eclip.server.shared_memory import Region, Regions
from eclip.server.tensors import bad_request

SERVICE = "inference.GRPCInferenceService"  # the name that clients call
CODES = {
    Reason.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_REGION: grpc.StatusCode.NOT_FOUND,
    Reason.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Reason.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Reason.EXPIRED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.FAILED: grpc.StatusCode.INTERNAL,
    Reason.LOST: grpc.StatusCode.UNAVAILABLE,
}
_LEFT_OUT = {
    "ModelStreamInfer": "streaming",
    "CudaSharedMemoryStatus": "CUDA shared memory",
    "CudaSharedMemoryRegister": "CUDA shared memory",
    "CudaSharedMemoryUnregister": "CUDA shared memory",
    "TraceSetting": "trace settings",
    "LogSettings": "log settings",
}
_HEALTH = "grpc.health.v1.Health"  # which probes of Kubernetes call
_OPEN_METHODS = frozenset(
    (
        *(f"/{SERVICE}/{name}" for name in ("ServerLive", "ServerReady")),
        *(f"/{_HEALTH}/{name}" for name in ("Check", "Watch")),
    )
)
_ALWAYS = ("ServerLive", "ServerReady")  # methods that are answered however many calls are open
_WATCH_S = 0.5

Context = grpc.aio.ServicerContext[Any, Any]


# --- Methods ----------------------------------------------------------------------------------


class _Inference:
    def __init__(self, core: Core, regions: Regions, limits: Limits) -> None:
        self._core = core
        self._regions = regions
        self._limits = limits
        self._tracing = Tracing()

    async def infer(self, asked: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        in_core = False
        name = asked.model_name
        try:
            model = descriptions.find_model(self._core, name, asked.model_version)
            request = read_request(model, asked, self._regions, self._limits)
            in_core = True
            response = await self._core.infer(within_deadline(request, context))
            in_core = False
            answer = write_response(response, asked, self._regions)
            timing = self._tracing.timing(request, response, _trace_of(context))
            context.set_trailing_metadata((("server-timing", timing),))
            return answer
        except RefusedError as error:
            if not in_core:
                self._core.refuse(name if name in self._core.models else "", error.reason)
            raise


def within_deadline(request: InferRequest, context: Context) -> InferRequest:
    """A client's deadline is a timeout, too."""
    left_s = context.time_remaining()
    if left_s is None:
        return request
    left_ns = bounded_timeout(max(1, left_s * 1e9))
    if left_ns is None or (request.timeout_ns is not None and request.timeout_ns <= left_ns):
        return request
    return msgspec.structs.replace(request, timeout_ns=left_ns)


class _Questions:
    """Small questions: health, metadata, statistics, repository."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def live(self, _: pb.ServerLiveRequest, __: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._core.live)

    async def ready(self, _: pb.ServerReadyRequest, __: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._core.ready)

    async def model_ready(self, asked: pb.ModelReadyRequest, _: Context) -> pb.ModelReadyResponse:
        ready = descriptions.is_ready(self._core, asked.name, asked.version)
        return pb.ModelReadyResponse(ready=ready)

    async def server(self, _: pb.ServerMetadataRequest, __: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**descriptions.describe_server())

    async def model(self, asked: pb.ModelMetadataRequest, _: Context) -> pb.ModelMetadataResponse:
        model = descriptions.find_model(self._core, asked.name, asked.version)
        return pb.ModelMetadataResponse(**descriptions.describe_model(model))

    async def config(self, asked: pb.ModelConfigRequest, _: Context) -> pb.ModelConfigResponse:
        model = descriptions.find_model(self._core, asked.name, asked.version)
        configuration = pb.ModelConfig(**descriptions.describe_configuration(model))
        return pb.ModelConfigResponse(config=configuration)

    async def statistics(
        self, asked: pb.ModelStatisticsRequest, _: Context
    ) -> pb.ModelStatisticsResponse:
        models = list(self._core.models.values())
        if asked.name:
            models = [descriptions.find_model(self._core, asked.name, asked.version)]
        return pb.ModelStatisticsResponse(**descriptions.describe_statistics(self._core, models))

    async def index(
        self, asked: pb.RepositoryIndexRequest, _: Context
    ) -> pb.RepositoryIndexResponse:
        models = descriptions.describe_repository(self._core, asked.ready)
        return pb.RepositoryIndexResponse(models=models)

    async def load(
        self, asked: pb.RepositoryModelLoadRequest, _: Context
    ) -> pb.RepositoryModelLoadResponse:
        descriptions.refuse_overrides(asked.parameters)
        await self._core.load(asked.model_name)
        return pb.RepositoryModelLoadResponse()

    async def unload(
        self, asked: pb.RepositoryModelUnloadRequest, _: Context
    ) -> pb.RepositoryModelUnloadResponse:
        await self._core.unload(asked.model_name)
        return pb.RepositoryModelUnloadResponse()


class _RegionQuestions:
    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    async def status(
        self, asked: pb.SystemSharedMemoryStatusRequest, _: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in [self._regions.get(asked.name)] if asked.name else self._regions.all():
            status = answer.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return answer

    async def register(
        self, asked: pb.SystemSharedMemoryRegisterRequest, _: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._regions.register(Region(asked.name, asked.key, asked.offset, asked.byte_size))
        return pb.SystemSharedMemoryRegisterResponse()

    async def unregister(
        self, asked: pb.SystemSharedMemoryUnregisterRequest, _: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        if asked.name:
            self._regions.unregister(asked.name)
        else:
            self._regions.unregister_all()
        return pb.SystemSharedMemoryUnregisterResponse()


# --- The server -------------------------------------------------------------------------------

Method = Callable[[Any, Context], Awaitable[Message]]


class _Calls:
    """The calls that are open, of which there may be so many."""

    def __init__(self, core: Core, limits: Limits) -> None:
        self._core = core
        self._most = limits.calls
        self._open = 0

    def answering(self, name: str, method: Method) -> Method:
        """A method that turns errors into gRPC's statuses."""

        async def answer(asked: Any, context: Context) -> Message:
            self._open += 1
            try:
                if self._open > self._most and name not in _ALWAYS:
                    self._core.refuse("", Reason.OVERLOADED)
                    raise RefusedError(Reason.OVERLOADED, "too many calls are open; ask again", 1.0)
                if asked is None:
                    raise bad_request("the message is not what this method takes")
                return await method(asked, context)
            except RefusedError as error:
                metadata: Sequence[tuple[str, str]] = ()
                if error.reason in (Reason.OVERLOADED, Reason.NOT_READY):
                    metadata = (("retry-after", f"{error.retry_after_s or 1.0:g}"),)
                await context.abort(CODES[error.reason], str(error), metadata)
            except Exception as error:
                line = report(
                    "a call failed", error, method=name, **trace_fields(_trace_of(context))
                )
                await context.abort(grpc.StatusCode.INTERNAL, f"the server failed: {line}")
            finally:
                self._open -= 1
            raise AssertionError("abort raises")

        return answer


def _trace_of(context: Context) -> str | None:
    """The caller's trace, to find a request's lines of the log by."""
    for name, value in context.invocation_metadata() or ():
        if name == "traceparent":
            return str(value)
    return None


def _reading(kind: type[Message]) -> Callable[[bytes], Message | None]:
    """A reader that gives nothing for bytes that are no message; grpc would call them our fault."""

    def read(raw: bytes) -> Message | None:
        try:
            return kind.FromString(raw)
        except DecodeError:
            return None

    return read


def _left_out(what: str) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def refuse(_: Any, context: Context) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"eclip has no {what}")
        raise AssertionError("abort raises")

    if what == "streaming":
        return grpc.stream_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def _methods(core: Core, regions: Regions, limits: Limits) -> dict[str, tuple[Method, Any]]:
    inference = _Inference(core, regions, limits)
    small = _Questions(core)
    memory = _RegionQuestions(regions)
    return {
        "ModelInfer": (inference.infer, pb.ModelInferRequest),
        "ServerLive": (small.live, pb.ServerLiveRequest),
        "ServerReady": (small.ready, pb.ServerReadyRequest),
        "ModelReady": (small.model_ready, pb.ModelReadyRequest),
        "ServerMetadata": (small.server, pb.ServerMetadataRequest),
        "ModelMetadata": (small.model, pb.ModelMetadataRequest),
        "ModelConfig": (small.config, pb.ModelConfigRequest),
        "ModelStatistics": (small.statistics, pb.ModelStatisticsRequest),
        "RepositoryIndex": (small.index, pb.RepositoryIndexRequest),
        "RepositoryModelLoad": (small.load, pb.RepositoryModelLoadRequest),
        "RepositoryModelUnload": (small.unload, pb.RepositoryModelUnloadRequest),
        "SystemSharedMemoryStatus": (memory.status, pb.SystemSharedMemoryStatusRequest),
        "SystemSharedMemoryRegister": (memory.register, pb.SystemSharedMemoryRegisterRequest),
        "SystemSharedMemoryUnregister": (memory.unregister, pb.SystemSharedMemoryUnregisterRequest),
    }


class _Health:
    """The standard protocol for health. The server's name is the empty one or the service's; a
    model has its own; ``live`` asks only whether the process lives."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def _status(self, name: str) -> pb.HealthCheckResponse.ServingStatus:
        kinds = pb.HealthCheckResponse
        if name in ("", SERVICE):
            good = self._core.ready
        elif name == "live":
            good = self._core.live
        elif name in self._core.models:
            good = self._core.why_not_ready(name) is None
        else:
            return kinds.SERVICE_UNKNOWN
        return kinds.SERVING if good else kinds.NOT_SERVING

    async def check(self, asked: Any, context: Context) -> pb.HealthCheckResponse:
        if asked is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no HealthCheckRequest")
        status = self._status(asked.service)
        if status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return pb.HealthCheckResponse(status=status)

    async def watch(self, asked: Any, context: Context) -> AsyncIterator[pb.HealthCheckResponse]:
        if asked is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no HealthCheckRequest")
        last = None
        while True:
            status = self._status(asked.service)
            if status != last:
                yield pb.HealthCheckResponse(status=status)
            last = status
            await asyncio.sleep(_WATCH_S)


class _TokenInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, token: Token) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        shown = dict(handler_call_details.invocation_metadata).get("authorization", "")
        text = shown if isinstance(shown, bytes) else shown.encode()
        if handler_call_details.method in _OPEN_METHODS or self._token.is_shown(text):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse_stranger)


async def _refuse_stranger(_: Any, context: Context) -> bytes:
    line = "this server wants the metadata 'authorization: Bearer TOKEN'"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, line)
    raise AssertionError("abort raises")


def make_server(
    core: Core, regions: Regions, limits: Limits, access: Access, reuse_port: bool
) -> grpc.aio.Server:
    def write(answer: Any) -> bytes:
        return bytes(answer.SerializeToString())

    calls = _Calls(core, limits)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        name: grpc.unary_unary_rpc_method_handler(
            calls.answering(name, method),
            request_deserializer=_reading(request),
            response_serializer=write,
        )
        for name, (method, request) in _methods(core, regions, limits).items()
    }
    handlers |= {name: _left_out(what) for name, what in _LEFT_OUT.items()}
    health, read = _Health(core), _reading(pb.HealthCheckRequest)
    probes: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Check": grpc.unary_unary_rpc_method_handler(health.check, read, write),
        "Watch": grpc.unary_stream_rpc_method_handler(health.watch, read, write),
    }
    token = access.token
    server = grpc.aio.server(
        interceptors=[_TokenInterceptor(token)] if token is not None else [],
        options=[
            ("grpc.so_reuseport", int(reuse_port)),
            ("grpc.max_receive_message_length", limits.body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", limits.header_bytes),
            ("grpc.absolute_max_metadata_size", limits.header_bytes),
            ("grpc.max_concurrent_streams", 2 * limits.calls),
            ("grpc.max_connection_idle_ms", int(limits.idle_s * 1000)),
            ("grpc.max_allowed_incoming_connections", limits.connections),
        ],
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(SERVICE, handlers),
            grpc.method_handlers_generic_handler(_HEALTH, probes),
        )
    )
    return server


def add_port(server: grpc.aio.Server, address: str, access: Access) -> int:
    """The port it listens on; with port 0 in the address, a free one."""
    tls = access.tls
    if tls is None:
        return server.add_insecure_port(address)

    def configuration() -> Any:  # asked for at every handshake
        return grpc.ssl_server_certificate_configuration([tls.pair])

    credentials = grpc.dynamic_ssl_server_credentials(configuration(), configuration)
    return server.add_secure_port(address, credentials)

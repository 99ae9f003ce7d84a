"""A deployment on another machine, as a core sees it: gRPC to its front.

Only what was certainly not accepted there may be tried elsewhere. That is a request for which there
was no connection, or which the front refused with ``retry-after``. A connection that breaks while
an answer is due leaves open whether the request ran: it is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc

from eclip.serving import inference_pb2 as pb
from eclip.serving.messages import (
    InferRequest,
    InferResponse,
    Reason,
    RefusedError,
)
from eclip.serving.rpc import CODES, SERVICE, SLACK
from eclip.serving.tensors import DATATYPES, from_raw, to_raw

_RETRY_AFTER = "retry-after"
_REASONS = {
    code: reason
    for reason, code in CODES.items()
    if reason not in (Reason.UNKNOWN_REGION, Reason.LOST)  # another reason has their code
}
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class RemoteFront:
    """``connected`` follows the connection; ``slack`` is what the last answer said, and when."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        self.connected = False
        self.slack: dict[str, tuple[float, int]] = {}  # by model: ns, and when it was said
        self._metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._infer: Any = self._channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        self._watching = asyncio.create_task(self._watch())

    async def infer(self, request: InferRequest) -> InferResponse:
        if not self.connected:
            line = f"there is no connection to {self.address}"
            raise RefusedError(Reason.NOT_READY, line, 1.0)
        timeout_s = None
        if request.timeout_ns is not None:
            timeout_s = (request.arrival_ns + request.timeout_ns - time.monotonic_ns()) / 1e9
        call = self._infer(_message(request), timeout=timeout_s, metadata=self._metadata)
        try:
            answer = await call
            trailers = await call.trailing_metadata()
        except grpc.aio.AioRpcError as error:
            raise _refusal(error, self.address) from None
        except asyncio.CancelledError:
            if call.cancelled() and not _asked_to_stop():
                raise _lost(self.address) from None  # the channel was closed
            raise
        for key, value in trailers or ():
            if key == SLACK:
                self.slack[request.model] = (float(value), time.monotonic_ns())
        return _response(answer)

    async def close(self) -> None:
        self.connected = False
        self._watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watching
        await self._channel.close()

    async def _watch(self) -> None:
        while True:
            state = self._channel.get_state(try_to_connect=True)
            self.connected = state is grpc.ChannelConnectivity.READY
            await self._channel.wait_for_state_change(state)


def _message(request: InferRequest) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=request.model, id=request.id)
    for tensor in request.inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.data.shape)
        message.raw_input_contents.append(bytes(to_raw(tensor)))
    for name in request.outputs:
        message.outputs.add(name=name)
    if request.priority:
        message.parameters["priority"].int64_param = request.priority
    return message


def _response(answer: pb.ModelInferResponse) -> InferResponse:
    tensors = [
        from_raw(output.name, DATATYPES[output.datatype], tuple(output.shape), memoryview(raw))
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    ]
    return InferResponse(answer.model_name, tensors, answer.id, answer.model_version)


def _refusal(error: grpc.aio.AioRpcError, address: str) -> RefusedError:
    reason = _REASONS.get(error.code(), Reason.FAILED)
    after = dict(error.trailing_metadata() or ()).get(_RETRY_AFTER)
    if reason is Reason.NOT_READY and after is None:
        return _lost(address)
    return RefusedError(reason, error.details() or str(error.code()), float(after or 1.0))


def _lost(address: str) -> RefusedError:
    line = f"the connection to {address} ended before its answer came; it may have run"
    return RefusedError(Reason.LOST, line)


def _asked_to_stop() -> bool:
    """Whether it is our own task that somebody cancels."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

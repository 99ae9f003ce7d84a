"""Whatever is sent, the answer is a refusal or a result, and soon: never a fault, never silence."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

import hostile
from numpy_server import NumpyServer

_EXAMPLES = settings(max_examples=60)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumpyServer]:
    limits = {"read_s": 1.0, "elements": 100_000, "body_bytes": 1_000_000}
    server = NumpyServer(tmp_path_factory.mktemp("target") / "log", limits=limits)
    yield server
    connection = HTTPConnection(server.http, timeout=hostile.PATIENCE_S)
    connection.request("GET", "/v2/health/ready")
    assert connection.getresponse().status == 200
    connection.close()
    assert server.stop() == 0
    assert server.complaints() == ""


# --- Bytes ------------------------------------------------------------------------------------


@_EXAMPLES
@given(traffic=hostile.TRAFFIC)
def test_bytes_of_any_kind(target: NumpyServer, traffic: bytes) -> None:
    hostile.send_bytes(target.ports.http, traffic)


# --- Requests ---------------------------------------------------------------------------------


@_EXAMPLES
@given(
    model=hostile.MODELS,
    request=hostile.REQUESTS,
    binary=hostile.BINARY,
    length=hostile.LENGTHS,
    headers=hostile.HEADERS,
)
def test_requests_that_are_nearly_right(
    target: NumpyServer, model: str, request: Any, binary: bytes, length: Any, headers: Any
) -> None:
    hostile.send_request(target.ports.http, model, request, binary, length, headers)


# --- Messages ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def channel(target: NumpyServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(target.grpc) as channel:
        yield channel


@_EXAMPLES
@given(method=hostile.METHODS, message=st.binary(max_size=60))
def test_messages_of_any_bytes(channel: grpc.Channel, method: str, message: bytes) -> None:
    hostile.call(channel, method, message)


@_EXAMPLES
@given(message=hostile.MESSAGES)
def test_messages_that_are_nearly_right(
    channel: grpc.Channel, message: pb.ModelInferRequest
) -> None:
    hostile.call(channel, "ModelInfer", message.SerializeToString())

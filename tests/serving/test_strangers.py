"""Clients as they are: many, half-closed, with offers of other protocols. None stops another."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from numpy_server import NumpyServer
from waiting import until

Start = Callable[..., NumpyServer]
_INFER = "/v2/models/identity_fp32/infer"
_WAIT_S = 60.0


def infer_body(value: float = 1.5) -> bytes:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [value]}
    return json.dumps({"inputs": [tensor]}).encode()


def head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *more, "", ""]
    return "\r\n".join(lines).encode()


def connect(server: NumpyServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.ports.http), _WAIT_S)


def answer_of(connection: socket.socket) -> tuple[int, Any, dict[str, str]]:
    response = HTTPResponse(connection)
    response.begin()
    body = response.read()
    return response.status, json.loads(body or b"null"), dict(response.headers.items())


def get(server: NumpyServer, path: str, **headers: str) -> tuple[int, str]:
    connection = HTTPConnection(server.http, timeout=_WAIT_S)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body


def post(server: NumpyServer, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection(server.http, timeout=_WAIT_S)
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text or b"null")


# --- Offers of other protocols ----------------------------------------------------------------

_OFFER = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAI")


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_offers_another_protocol_is_read_on(
    server: NumpyServer, pause: bool, chunked: bool
) -> None:
    """Java's client offers h2c with each request."""
    body = infer_body()
    first = head(_INFER, len(body), *_OFFER)
    if chunked:
        length = f"Content-Length: {len(body)}".encode()
        first = first.replace(length, b"Transfer-Encoding: chunked")
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with connect(server) as connection:
        for _ in range(3):  # the connection stays
            for part in [first, body] if pause else [first + body]:
                connection.sendall(part)
                time.sleep(0.02 * pause)
            status, answer, _ = answer_of(connection)
            assert (status, answer["outputs"][0]["data"]) == (200, [1.5])


def test_a_proxy_is_not_what_this_server_is(server: NumpyServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n")
        assert answer_of(connection)[0] == 405


# --- Half a connection ------------------------------------------------------------------------


def test_a_client_that_ends_its_sending_gets_its_answer(server: NumpyServer) -> None:
    body = json.dumps(
        {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [0.3]}]}
    ).encode()
    with connect(server) as connection:
        connection.sendall(head("/v2/models/slow/infer", len(body)) + body)
        connection.shutdown(socket.SHUT_WR)
        status, answer, _ = answer_of(connection)
        assert (status, answer["outputs"][0]["name"]) == (200, "OUT")
        assert connection.recv(1) == b""  # and then the connection ends


# --- Many -------------------------------------------------------------------------------------


@pytest.fixture
def files() -> Iterator[int]:
    """How many descriptors this test may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_health_answers_beside_5000_idle_connections(start: Start, files: int) -> None:
    if files < 5500:
        pytest.skip(f"this host allows {files} open files; 5500 are needed")
    server = start()
    with contextlib.ExitStack() as stack:
        for _ in range(5000):
            stack.enter_context(connect(server))
        assert get(server, "/v2/health/live")[0] == 200
        assert get(server, "/v2/health/ready")[0] == 200
        assert post(server, _INFER, infer_body())[0] == 200
        shown = re.search(r"^eclip_http_connections (\S+)$", get(server, "/metrics")[1], re.M)
        assert shown is not None and 1 <= float(shown[1]) <= 4097


def test_beyond_the_limit_idle_connections_end_and_working_ones_stay(start: Start) -> None:
    server = start(limits={"connections": 8})
    body = infer_body()
    with contextlib.ExitStack() as stack:
        working = [stack.enter_context(connect(server)) for _ in range(8)]
        for connection in working[:-1]:
            connection.sendall(head(_INFER, len(body)))  # the bodies come later
        assert get(server, "/v2/health/live")[0] == 200
        assert until(lambda: working[-1].recv(1) == b"", patience_s=_WAIT_S)  # it was idle
        last = stack.enter_context(connect(server))
        last.sendall(head(_INFER, len(body)))
        time.sleep(0.05)
        for path in ("/v2/health/live", "/v2/health/ready", "/metrics"):
            assert get(server, path)[0] == 200
        with connect(server) as refused:
            refused.sendall(head(_INFER, len(body)) + body)
            status, answer, headers = answer_of(refused)
            assert (status, headers["retry-after"]) == (503, "1")
            assert "too many connections" in answer["error"]
        for connection in [*working[:-1], last]:
            connection.sendall(body)
            assert answer_of(connection)[0] == 200
    counted = re.search(
        r'eclip_requests_refused_total{model_name="",reason="overloaded"} (\S+)',
        get(server, "/metrics")[1],
    )
    assert counted is not None and float(counted[1]) >= 1


def test_health_answers_beside_all_calls_that_may_be_open(start: Start) -> None:
    server = start(limits={"calls": 3})
    asked = pb.ModelInferRequest(
        model_name="slow", inputs=[{"name": "IN", "datatype": "FP32", "shape": [1, 1]}]
    )
    asked.inputs[0].contents.fp32_contents.append(20.0)
    own = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
    with (
        grpc.insecure_channel(server.grpc, own) as busy,
        grpc.insecure_channel(server.grpc, own) as free,
    ):
        infer: Any = busy.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        calls = [infer.future(asked.SerializeToString()) for _ in range(3)]
        ready: Any = free.unary_unary("/inference.GRPCInferenceService/ServerReady")
        check: Any = free.unary_unary("/grpc.health.v1.Health/Check")
        more: Any = free.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def refuses() -> bool:
            for place, call in enumerate(calls):
                if call.done():  # it met the one that asks here
                    calls[place] = infer.future(asked.SerializeToString())
            with pytest.raises(grpc.RpcError) as refused:
                more(asked.SerializeToString(), timeout=0.5)
            return refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        assert until(refuses, patience_s=_WAIT_S)
        assert pb.ServerReadyResponse.FromString(ready(b"")).ready
        assert check(b"") == b"\x08\x01"  # SERVING
        for call in calls:
            call.cancel()


# --- Health as Kubernetes asks ----------------------------------------------------------------


def test_the_standard_health_protocol(start: Start) -> None:
    server = start(token="secret")  # a probe has none
    with grpc.insecure_channel(server.grpc) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        for name in (b"", b"live", b"identity_fp32", b"inference.GRPCInferenceService"):
            assert check(b"\x0a" + bytes([len(name)]) + name) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as unknown:
            check(b"\x0a\x04nope")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watching = watch(b"")
        assert next(watching) == b"\x08\x01"
        watching.cancel()


# --- Who may change the server ----------------------------------------------------------------

_LOAD = "/v2/repository/models/identity_fp32/load"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "eclip.models.svc.cluster.local"}, 200),
        ({"Host": "eclip"}, 200),
        ({"Host": "10.0.0.7:8000", "Origin": "http://10.0.0.7:8000"}, 200),
        ({"Host": "named.example.org"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_pages_of_others_cannot_change_the_server(
    named: NumpyServer, headers: dict[str, str], status: int
) -> None:
    assert post(named, _LOAD, b"", **headers)[0] == status
    assert post(named, "/v2/systemsharedmemory/unregister", b"", **headers)[0] == status
    assert post(named, _INFER, infer_body(), **headers)[0] == 200  # inference is for all


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumpyServer]:
    server = NumpyServer(tmp_path_factory.mktemp("named") / "log", hosts=["named.example.org"])
    yield server
    assert server.stop() == 0
    assert server.complaints() == ""


def test_who_shows_the_token_may_come_from_anywhere(start: Start) -> None:
    server = start(token="secret")
    headers = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert post(server, _LOAD, b"", **headers)[0] == 401
    assert post(server, _LOAD, b"", Authorization="Bearer secret", **headers)[0] == 200


def test_a_load_cannot_bring_settings(server: NumpyServer) -> None:
    for name in ("config", "file:1/model.pt"):
        status, answer = post(server, _LOAD, json.dumps({"parameters": {name: "{}"}}).encode())
        assert status == 400 and "settings of a model are in the server's file" in answer["error"]
    assert post(server, _LOAD, b'{"parameters": {"unload_dependents": false}}')[0] == 200
    with grpc.insecure_channel(server.grpc) as channel:
        load: Any = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
        asked = pb.RepositoryModelLoadRequest(model_name="identity_fp32")
        asked.parameters["config"].string_param = "{}"
        with pytest.raises(grpc.RpcError) as refused:
            load(asked.SerializeToString())
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

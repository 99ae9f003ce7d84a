"""What a client may not do: too much, too slowly, without a token. Every refusal is one line."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2 as pb

from numpy_server import NumpyServer
from waiting import PATIENCE_S, until

_LIMITS = {
    "body_bytes": 200_000,
    "bodies_bytes": 500_000,
    "json_bytes": 50_000,
    "header_bytes": 4096,
    "tensors": 3,
    "dimensions": 4,
    "elements": 10_000,
    "regions": 3,
}
Start = Callable[..., NumpyServer]
_INFER = "/v2/models/identity_fp32/infer"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumpyServer]:
    server = NumpyServer(tmp_path_factory.mktemp("strict") / "log", limits=_LIMITS)
    yield server
    assert server.alive
    server.stop()
    assert server.complaints() == ""


def post(server: NumpyServer, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    connection = HTTPConnection(server.http, timeout=PATIENCE_S)
    try:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, text, headers or {})
        return read(connection.getresponse())
    finally:
        connection.close()


def read(response: HTTPResponse) -> tuple[int, str]:
    body = json.loads(response.read() or b"{}")
    return response.status, body.get("error", "")


def talk(server: NumpyServer, *parts: bytes, pause_s: float = 0.0) -> tuple[int, str]:
    """Send raw bytes; the status and line of what comes back before the connection ends."""
    with socket.create_connection(("127.0.0.1", server.ports.http), PATIENCE_S) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused already; the answer is there
        response = HTTPResponse(connection)
        response.begin()
        return read(response)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [1.0]} | changes


# --- Too much ---------------------------------------------------------------------------------


def test_a_body_that_is_announced_too_large_is_not_read(strict: NumpyServer) -> None:
    head = f"POST {_INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: 200001\r\n\r\n"
    assert talk(strict, head.encode())[0] == 413


def test_a_body_in_chunks_that_becomes_too_large_is_refused(strict: NumpyServer) -> None:
    head = f"POST {_INFER} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert talk(strict, head.encode(), *[chunk] * 4)[0] == 413


@pytest.mark.parametrize("size", [199_000, 20 << 20])
def test_a_body_that_grows_when_decompressed_is_limited(strict: NumpyServer, size: int) -> None:
    bomb = gzip.compress(bytes(size))
    status, line = post(strict, _INFER, bomb, {"content-encoding": "gzip"})
    assert (status, bool(line)) == (400 if size < _LIMITS["body_bytes"] else 413, True)


def test_a_message_that_grows_when_decompressed_is_limited(strict: NumpyServer) -> None:
    with grpc.insecure_channel(strict.grpc) as channel:
        call: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
        request = pb.ModelInferRequest(raw_input_contents=[bytes(10 << 20)])
        for compression in (grpc.Compression.Gzip, grpc.Compression.NoCompression):
            with pytest.raises(grpc.RpcError) as refused:
                call(request.SerializeToString(), compression=compression, timeout=PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_bodies_of_all_requests_together_are_limited(strict: NumpyServer) -> None:
    head = f"POST {_INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: 190000\r\n\r\n".encode()
    held = [socket.create_connection(("127.0.0.1", strict.ports.http)) for _ in range(2)]
    for connection in held:
        connection.sendall(head + bytes(189_999))
    assert until(lambda: talk(strict, head, bytes(190_000))[0] == 429, patience_s=60)
    for connection in held:
        connection.close()
    assert until(lambda: talk(strict, head, bytes(190_000))[0] == 400, patience_s=60)


@pytest.mark.parametrize(
    "words", ["transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", "content-length: 190000\r\n\r\n{"]
)
def test_a_body_counts_by_what_has_arrived(strict: NumpyServer, words: str) -> None:
    head = f"POST {_INFER} HTTP/1.1\r\nhost: x\r\n{words}".encode()
    held = [socket.create_connection(("127.0.0.1", strict.ports.http)) for _ in range(20)]
    for connection in held:
        connection.sendall(head)
    for _ in range(5):  # the first of them arrives after all of the others are read
        assert post(strict, _INFER, {"inputs": [tensor()]})[0] == 200
    for connection in held:
        connection.close()


def test_a_head_is_limited(strict: NumpyServer) -> None:
    start = b"GET /v2 HTTP/1.1\r\nhost: x\r\n"
    assert talk(strict, start + b"a: " + b"x" * 5000 + b"\r\n\r\n")[0] == 431
    assert talk(strict, start + b"a: ", *[b"x" * 1000] * 6)[0] == 431
    assert talk(strict, b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")[0] == 431
    assert talk(strict, start + b"a: " + b"x" * 3000 + b"\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"inputs": [tensor()] * 4}, "3 inputs"),
        ({"inputs": [tensor()], "outputs": [{"name": "OUT"}] * 4}, "3 inputs and as many outputs"),
        ({"inputs": [tensor(shape=[1, 1, 1, 1, 1])]}, "more than 4 dimensions"),
        ({"inputs": [tensor(shape=[10_001])]}, "at most 10000 elements"),
        ({"inputs": [tensor(shape=[101, 100])]}, "at most 10000 elements"),
        ({"inputs": [tensor(shape=[10**18, 10**18])]}, "at most 10000 elements"),
        ({"inputs": [tensor(data=[1.0] * 15_000)]}, "more than 50000 bytes"),
        (b'{"inputs":' + b"[" * 20_000 + b"]" * 20_000 + b"}", "nested too deeply|Expected"),
        (b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b',"inputs":[]}', "nested too deeply"),
        (b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,1],"data":' + b"[" * 9000 + b"1"
         + b"]" * 9000 + b"}]}", "nested too deeply"),
        ({"inputs": [tensor(data=[10**400])]}, "out of range"),
        (b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,1],"data":[' + b"1" * 9000
         + b"]}]}", "not a valid request|out of range"),
        (b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,1],"data":[NaN]}]}', "not a valid"),
        (b'{"inputs":[{"name":"\xff"}]}', "not a valid request"),
        ({"inputs": [tensor(parameters={"binary_data_size": 2**63})]}, "not a valid request"),
    ],
)  # fmt: skip
def test_too_much_of_something_is_refused_in_one_line(
    strict: NumpyServer, body: Any, line: str
) -> None:
    status, error = post(strict, _INFER, body)
    assert status == 400
    assert re.search(line, error), error
    assert "\n" not in error


def test_texts_cannot_ask_for_more_memory_than_they_bring(strict: NumpyServer) -> None:
    given = {"name": "IN", "datatype": "BYTES", "shape": [1, 9999]}
    body = json.dumps({"inputs": [given | {"parameters": {"binary_data_size": 8}}]}).encode()
    header = {"Inference-Header-Content-Length": str(len(body))}
    status, line = post(strict, "/v2/models/identity_bytes/infer", body + bytes(8), header)
    assert (status, "too few bytes" in line) == (400, True)


# --- Too slow ---------------------------------------------------------------------------------


def test_a_request_that_arrives_too_slowly_is_refused(start: Start) -> None:
    server = start(limits={"read_s": 0.3})
    head = f"POST {_INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode()
    assert talk(server, b"GET /v2 HT")[0] == 408
    assert talk(server, head)[0] == 408
    assert talk(server, head, *[b" "] * 20, pause_s=0.05)[0] == 408


def test_a_silent_connection_is_ended(start: Start) -> None:
    server = start(limits={"idle_s": 1.0})
    with socket.create_connection(("127.0.0.1", server.ports.http), PATIENCE_S) as connection:
        assert connection.recv(1) == b""
    with socket.create_connection(("127.0.0.1", server.ports.http), PATIENCE_S) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n")
        while connection.recv(4096):
            pass


def test_an_answer_that_nobody_reads_is_dropped(start: Start) -> None:
    server = start(limits={"write_s": 0.3})
    given = tensor(shape=[8, 1_000_000], data=...) | {
        "parameters": {"binary_data_size": 32_000_000}
    }
    del given["data"]
    body = {"inputs": [given], "parameters": {"binary_data_output": True}}
    text = json.dumps(body).encode()
    head = (
        f"POST {_INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text) + 32_000_000}\r\n"
        f"inference-header-content-length: {len(text)}\r\n\r\n"
    )
    files = Path(f"/proc/{server.pid}/fd")
    before = len(list(files.iterdir()))
    with socket.create_connection(("127.0.0.1", server.ports.http), PATIENCE_S) as connection:
        connection.sendall(head.encode() + text + bytes(32_000_000))
        assert until(lambda: len(list(files.iterdir())) <= before)  # it has closed its end
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                received += len(part)
        assert received < 32_000_000
    assert server.stop() == 0
    assert server.complaints() == ""


# --- Shared memory ----------------------------------------------------------------------------


@pytest.fixture
def memory(strict: NumpyServer) -> Iterator[Path]:
    path = Path(f"/dev/shm/limits{time.monotonic_ns()}")
    path.write_bytes(bytes(1000))
    yield path
    path.unlink(missing_ok=True)
    post(strict, "/v2/systemsharedmemory/unregister", b"")


def register(server: NumpyServer, name: str, key: str, size: int, offset: int = 0) -> Any:
    body = {"key": key, "offset": offset, "byte_size": size}
    return post(server, f"/v2/systemsharedmemory/region/{name}/register", body)


@pytest.mark.parametrize(
    "key",
    ["/../etc/passwd", "..", ".", "", "/", "a/b", "//x", "x\0y", "/dev/null", "eclip-ring", "ä",
     "x" * 300],
)  # fmt: skip
def test_keys_that_lead_elsewhere_are_refused(strict: NumpyServer, key: str) -> None:
    assert register(strict, "r", key, 8)[0] == 400


def test_links_and_folders_are_not_followed(strict: NumpyServer, memory: Path) -> None:
    link = memory.with_name(f"{memory.name}link")
    link.symlink_to("/etc/hostname")
    folder = memory.with_name(f"{memory.name}folder")
    folder.mkdir()
    try:
        assert register(strict, "r", link.name, 1)[0] == 400
        assert register(strict, "r", folder.name, 1)[0] == 400
    finally:
        link.unlink()
        folder.rmdir()


def test_regions_are_bounded_by_their_objects(strict: NumpyServer, memory: Path) -> None:
    for size, offset in ((1001, 0), (1, 1000), (2**62, 2**62), (0, 0), (-1, 0), (8, -8)):
        assert register(strict, "r", memory.name, size, offset)[0] == 400
    for name in ("%2E%2E", "%2Ehidden", "a%2520b"):  # names may be anything: they are no paths
        assert register(strict, name, memory.name, 8)[0] == 200
    assert register(strict, "r", memory.name, 8) == (
        400, "there are 3 shared memory regions; unregister some first",
    )  # fmt: skip


def test_an_object_that_becomes_shorter_is_an_error_and_no_crash(
    strict: NumpyServer, memory: Path
) -> None:
    assert register(strict, "r", memory.name, 1000)[0] == 200
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 400}
    given = {"name": "IN", "datatype": "FP32", "shape": [1, 100], "parameters": place}
    output = {"name": "OUT", "parameters": place | {"shared_memory_offset": 400}}
    assert post(strict, _INFER, {"inputs": [given], "outputs": [output]})[0] == 200
    for size in (600, 100):  # no room for the output; none for the input
        os.truncate(memory, size)
        status, line = post(strict, _INFER, {"inputs": [given], "outputs": [output]})
        assert (status, "become shorter" in line) == (400, True)
        assert memory.stat().st_size == size


# --- Doors ------------------------------------------------------------------------------------


def shown(text: str) -> dict[str, str]:
    """Anew every time: clients write into it."""
    return {"authorization": text}


def test_a_token_opens_both_protocols(start: Start) -> None:
    server = start(token="secret")
    sample = np.ones((1, 2), np.float32)
    for module, address in ((tritonclient.http, server.http), (tritonclient.grpc, server.grpc)):
        given = module.InferInput("IN", sample.shape, "FP32")
        given.set_data_from_numpy(sample)
        with module.InferenceServerClient(address) as client:
            assert client.is_server_live() and client.is_server_ready()
            for wrong in ("", "Bearer secreT", "secret"):
                with pytest.raises(tritonclient.http.InferenceServerException, match="Bearer"):
                    client.infer("identity_fp32", [given], headers=shown(wrong))
                with pytest.raises(tritonclient.http.InferenceServerException, match="Bearer"):
                    client.get_server_metadata(headers=shown(wrong))
            answer = client.infer("identity_fp32", [given], headers=shown("Bearer secret"))
            np.testing.assert_array_equal(answer.as_numpy("OUT"), sample)
    for path, status in (("/", 200), ("/metrics", 401), ("/eclip/state", 401)):
        connection = HTTPConnection(server.http)
        connection.request("GET", path)
        assert connection.getresponse().status == status
        connection.close()
    assert server.stop() == 0


def test_both_protocols_speak_tls(start: Start, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )  # fmt: skip
    tls = {"certificate": str(certificate), "key": str(key)}
    server = start(host="localhost", tls=tls)
    context = ssl.create_default_context(cafile=certificate)
    connection = HTTPSConnection("localhost", server.ports.http, context=context)
    connection.request("GET", "/v2/health/ready")
    assert connection.getresponse().status == 200
    connection.close()
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{server.ports.grpc}", credentials) as channel:
        ready: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerReady", None, None)
        assert pb.ServerReadyResponse.FromString(ready(b"")).ready
    assert server.stop() == 0


def test_a_fault_of_ours_is_one_line_and_the_server_lives(start: Start) -> None:
    server = start()
    body = {"inputs": [tensor()]}
    line = r"the server failed: ZeroDivisionError, fault [0-9a-f]{8} in the server's log"
    status, said = post(server, "/v2/models/broken/infer", body)
    assert status == 500 and re.fullmatch(line, said)
    with grpc.insecure_channel(server.grpc) as channel:
        call: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
        request = pb.ModelInferRequest(
            model_name="broken",
            inputs=[{"name": "IN", "datatype": "FP32", "shape": [1, 1]}],
            raw_input_contents=[bytes(4)],
        )
        with pytest.raises(grpc.RpcError) as refused:
            call(request.SerializeToString())
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        assert re.fullmatch(line, refused.value.details() or "")
    assert post(server, "/v2/models/full/infer", body)[0] == 429
    assert post(server, "/v2/models/identity_fp32/infer", body)[0] == 200
    assert server.stop() == 0
    assert server.complaints().count("ZeroDivisionError") >= 2


def test_retry_after_is_said(server: NumpyServer) -> None:
    connection = HTTPConnection(server.http)
    connection.request("POST", "/v2/models/full/infer", json.dumps({"inputs": [tensor()]}))
    response = connection.getresponse()
    assert (response.status, response.headers["retry-after"]) == (429, "1")
    connection.close()

"""Requests that are wrong, or nearly right: bytes, HTTP with JSON, and messages of gRPC.

They know the names of all models that tests serve, so most of them reach a model's checks.
"""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import grpc
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from reference_models import MODELS as REFERENCE
from reference_models import NUMPY_TYPES

# Hanging is waiting longer than this. The server gives a slow sender 1 s.
PATIENCE_S = 120.0
_HTTP = {200, 400, 404, 405, 408, 413, 429, 431, 501, 503, 504}
_GRPC = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_INPUT_NAMES = ["IN", "INPUT0", "INPUT1", "TEXT", "a", "b", "text"]
_OUTPUT_NAMES = ["OUT", "OUTPUT0", "UPPER", "NOPE", "sum", "text"]
_GOOD_SHAPES = st.sampled_from([[1, 2], [2, 2], [1, 4], [1, 1]])
# Microseconds around what a 64-bit clock of nanoseconds holds, and what clients write for none.
_TIMEOUTS = st.sampled_from([1, 10**6, 2**53, 9_223_372_036_854_775, 2**62, 2**63 - 1])
DEADLINES_S = st.sampled_from([0.0005, 1.0, 3600.0, 9e8, 9.2e9])

_WORDS = st.sampled_from(
    [b"GET ", b"POST ", b"/v2/models/identity_fp32/infer", b"/v2", b" HTTP/1.1\r\n", b"\r\n",
     b"host: x\r\n", b"content-length: 5\r\n", b"content-length: 99999999999999999999\r\n",
     b"content-length: -1\r\n", b"transfer-encoding: chunked\r\n", b"5\r\nabcde\r\n", b"0\r\n\r\n",
     b"inference-header-content-length: 3\r\n", b"content-encoding: gzip\r\n", b"{}", b"[",
     b"expect: 100-continue\r\n", b"upgrade: websocket\r\nconnection: upgrade\r\n", b"\x00", b"%zz",
     b"accept-encoding: gzip;q=nan\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff" * 40]
)  # fmt: skip
TRAFFIC = st.lists(st.one_of(_WORDS, st.binary(max_size=40)), max_size=14).map(b"".join)


def send_bytes(port: int, traffic: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        try:
            connection.sendall(traffic)
            connection.shutdown(socket.SHUT_WR)
            answer = bytearray()
            while part := connection.recv(65536):
                answer += part
        except (BrokenPipeError, ConnectionResetError, OSError) as error:
            assert not isinstance(error, TimeoutError)
            return
    for line in answer.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 "):
            assert int(line.split()[1]) in _HTTP | {100, 426}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
_DATATYPES = st.sampled_from([*NUMPY_TYPES, "BF16", "NOPE", ""])
_SIZES = st.integers(-2, 9) | st.sampled_from([2**31, 2**63, 10**30])
_PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "binary_data_size": _SIZES | _JSON,
        "binary_data": st.booleans() | _JSON,
        "classification": _SIZES,
        "shared_memory_region": st.sampled_from(["x", "..", "", "a/b"]) | _JSON,
        "shared_memory_offset": _SIZES | _JSON,
        "shared_memory_byte_size": _SIZES | _JSON,
    },
)
_INPUTS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(_INPUT_NAMES) | _JSON,
        "datatype": _DATATYPES | _JSON,
        "shape": st.lists(_SIZES, max_size=4)
        | st.sampled_from([[1, 2], [2, 2], [1, 4], [1, 1]])
        | _JSON,
    },
    optional={
        "data": st.lists(st.integers(-9, 300) | st.text(max_size=3), max_size=6) | _JSON,
        "parameters": _PARAMETERS | _JSON,
    },
)
_OUTPUTS = st.fixed_dictionaries(
    {"name": st.sampled_from(_OUTPUT_NAMES) | _JSON},
    optional={"parameters": _PARAMETERS | _JSON},
)
_REQUEST_PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "timeout": _TIMEOUTS | _SIZES | _JSON,
        "priority": _SIZES,
        "binary_data_output": _JSON,
    },
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(_INPUTS, max_size=3) | _JSON},
    optional={
        "id": st.text(max_size=5) | _JSON,
        "outputs": st.lists(_OUTPUTS, max_size=3) | _JSON,
        "parameters": _REQUEST_PARAMETERS | _JSON,
    },
)
MODELS = st.sampled_from(
    [*(one.name for one in REFERENCE), "identity_bf16", "nope", *(4 * ["add", "shout", "slow"])]
)
BINARY = st.binary(max_size=40)
LENGTHS = st.none() | st.integers(-1, 20) | st.just("all") | st.text(max_size=3)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "accept-encoding": st.sampled_from(["gzip", "deflate", "gzip;q=inf", "x,,;q="]),
        "content-encoding": st.sampled_from(["gzip", "deflate", "identity", "x"]),
    },
)


def send_request(
    port: int,
    model: str,
    request: Any,
    binary: bytes,
    length: int | str | None,
    headers: dict[str, str],
) -> None:
    text = json.dumps(request).encode("utf-8", "surrogatepass")
    if length is not None:
        shown = len(text) if length == "all" else length
        headers = headers | {"inference-header-content-length": str(shown)}
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        path = f"/v2/models/{model}/infer"
        connection.putrequest("POST", path)
        for name, value in (headers | {"content-length": str(len(text + binary))}).items():
            connection.putheader(name, value.encode("utf-8", "replace"))
        connection.endheaders(text + binary)
        check_answer(connection.getresponse())
    except ValueError as error:  # http.client itself refuses some headers
        assert "Invalid header" in str(error)
    finally:
        connection.close()


def check_answer(response: HTTPResponse) -> None:
    body = response.read()
    assert response.status in _HTTP, body
    if response.status != 200:
        line = json.loads(body)["error"]
        assert line and "\n" not in line


METHODS = st.sampled_from(
    ["ModelInfer", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ServerLive",
     "RepositoryIndex", "RepositoryModelLoad", "SystemSharedMemoryStatus",
     "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"]
)  # fmt: skip
_INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 9)
_PB_PARAMETERS = st.dictionaries(
    st.sampled_from(["timeout", "priority", "shared_memory_region", "shared_memory_byte_size",
                     "shared_memory_offset", "classification", "triton_x"]),
    st.builds(pb.InferParameter, int64_param=_INT64 | _TIMEOUTS)
    | st.builds(pb.InferParameter, string_param=st.text(max_size=4))
    | st.builds(pb.InferParameter, bool_param=st.booleans())
    | st.builds(pb.InferParameter),
    max_size=3,
)  # fmt: skip
_CONTENTS = st.builds(
    pb.InferTensorContents,
    int_contents=st.lists(st.integers(-300, 300), max_size=4),
    fp32_contents=st.lists(st.floats(width=32), max_size=2),
    bytes_contents=st.lists(st.binary(max_size=4), max_size=2),
)
_PB_INPUTS = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=st.sampled_from(_INPUT_NAMES),
    datatype=_DATATYPES,
    shape=st.lists(_INT64, max_size=3) | _GOOD_SHAPES,
    parameters=_PB_PARAMETERS,
    contents=st.none() | _CONTENTS,
)
MESSAGES = st.builds(
    pb.ModelInferRequest,
    model_name=MODELS,
    model_version=st.sampled_from(["", "1", "2"]),
    id=st.text(st.characters(codec="utf-8"), max_size=4),
    parameters=_PB_PARAMETERS,
    inputs=st.lists(_PB_INPUTS, max_size=3),
    outputs=st.lists(
        st.builds(
            pb.ModelInferRequest.InferRequestedOutputTensor,
            name=st.sampled_from(_OUTPUT_NAMES),
            parameters=_PB_PARAMETERS,
        ),
        max_size=2,
    ),
    raw_input_contents=st.lists(st.binary(max_size=20), max_size=3),
)


def call(channel: grpc.Channel, method: str, message: bytes, timeout_s: float = PATIENCE_S) -> None:
    try:
        ask: Any = channel.unary_unary(f"/inference.GRPCInferenceService/{method}", None, None)
        ask(message, timeout=timeout_s)
    except grpc.RpcError as error:
        assert error.code() in _GRPC, error
        line = error.details()
        assert line and "\n" not in line


def good_bodies(model: str) -> dict[str, Any]:
    """What a model of the real server answers."""
    if model == "shout":
        text = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["ab"]}
        return {"inputs": [text]}
    tensor = {"datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    return {"inputs": [{"name": name, **tensor} for name in "ab"]}


# Right but for their numbers: they reach the device.
NEARLY = st.tuples(
    st.sampled_from(["add", "shout", "slow"]),
    st.fixed_dictionaries({}, optional={"timeout": _TIMEOUTS, "priority": _SIZES | _TIMEOUTS}),
)

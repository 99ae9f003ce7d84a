"""Requests, good and bad, that eclip and a real Triton must answer alike; and how they are sent.

An answer is what a client can tell apart: status, and for a good one every field. Where eclip
answers differently on purpose, the request says what with and why.
"""

from __future__ import annotations

import gzip
import http.client
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import serialize_byte_tensor

from reference_models import NUMPY_TYPES

KEY = "eclipgolden"  # stands for the names of two objects in shared memory: KEYa and KEYb
REGION_BYTES = 4096
Answer = dict[str, Any]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Asked:
    """One request. ``instead`` is the status that eclip has where it differs on purpose."""

    name: str
    path: str  # of HTTP, or a method of gRPC
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    instead: str | None = None

    @property
    def over_grpc(self) -> bool:
        return not self.path.startswith("/")


_DECODERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
}

# --- Sending ----------------------------------------------------------------------------------


class Asker:
    """Sends requests to one server, in order. Nothing of a client library is in between."""

    def __init__(self, http_address: str, grpc_address: str, key: str) -> None:
        self._http = http.client.HTTPConnection(http_address, timeout=60)
        self._channel = grpc.insecure_channel(grpc_address)
        self._key = key

    def ask(self, asked: Asked) -> Answer:
        answer = self._call(asked) if asked.over_grpc else self._request(asked)
        text = json.dumps(answer, sort_keys=True)
        return json.loads(text.replace(self._key, KEY))  # type: ignore[no-any-return]

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    def _request(self, asked: Asked) -> Answer:
        body = asked.body.replace(KEY.encode(), self._key.encode())
        self._http.request(asked.method, asked.path, body or None, asked.headers)
        response = self._http.getresponse()
        content = response.read()
        if response.status != 200:
            json.loads(content)["error"].encode()
            return {"status": str(response.status)}
        coding = response.headers.get("content-encoding", "")
        content = _DECODERS[coding](content)
        length = response.headers.get("inference-header-content-length")
        split = len(content) if length is None else int(length)
        return {
            "status": "200",
            "coding": coding,
            "type": response.headers.get("content-type") if content else None,
            "json": json.loads(content[:split]) if split else None,
            "binary": content[split:].hex(),
        }

    def _call(self, asked: Asked) -> Answer:
        message = getattr(pb, f"{asked.path}Request").FromString(asked.body)
        if asked.path == "SystemSharedMemoryRegister":
            message.key = message.key.replace(KEY, self._key)
        call: Callable[..., Any] = self._channel.unary_unary(
            f"/inference.GRPCInferenceService/{asked.path}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=getattr(pb, f"{asked.path}Response").FromString,
        )
        try:
            answer = call(message, timeout=60)
        except grpc.RpcError as error:
            return {"status": error.code().name}
        return {
            "status": "OK",
            "message": MessageToDict(answer, preserving_proto_field_name=True),
        }


# --- Requests ---------------------------------------------------------------------------------


def golden_requests() -> list[Asked]:
    asked = [
        *_good_http(),
        *_questions(),
        *_bad_json(),
        *_bad_tensors(),
        *_bad_binary(),
        *_memory_http(),
        *_good_grpc(),
        *_bad_grpc(),
        *_memory_grpc(),
    ]
    names = [one.name for one in asked]
    if len(set(names)) != len(names):
        raise ValueError("two requests have the same name")
    return asked


def _sample(datatype: str, shape: tuple[int, ...], seed: int) -> Array:
    random = np.random.default_rng([seed, *shape])
    kind = NUMPY_TYPES[datatype]
    if kind is bytes:
        texts = [f"text {seed} ä\n{'x' * int(random.integers(9))}".encode() for _ in range(99)]
        return np.array(texts[: int(np.prod(shape))], object).reshape(shape)
    dtype: np.dtype[Any] = np.dtype(kind)
    if dtype.kind in "iu":
        return np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(
            shape
        )
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    return (random.standard_normal(shape) * 100).astype(dtype)


def _raw(data: Array) -> bytes:
    if data.dtype == object:
        return bytes(serialize_byte_tensor(data).item())
    return data.tobytes()


def _listed(data: Array) -> list[Any]:
    values = data.tolist()
    if data.dtype == object:
        return [[text.decode() for text in row] for row in values]
    return list(values)


def _infer(
    name: str,
    model: str,
    body: Any,
    binary: bytes | None = None,
    headers: dict[str, str] | None = None,
    instead: str | None = None,
) -> Asked:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = {} if binary is None else {"Inference-Header-Content-Length": str(len(text))}
    return Asked(
        name,
        f"/v2/models/{model}/infer",
        text + (binary or b""),
        length | (headers or {}),
        instead=instead,
    )


def _good_http() -> Iterator[Asked]:
    for number, datatype in enumerate(NUMPY_TYPES):
        for shape in ((1, 1), (2, 3), (8, 2)):
            data = _sample(datatype, shape, number)
            tensor = {"name": "IN", "datatype": datatype, "shape": shape}
            raw = _raw(data)
            model = f"identity_{datatype.lower()}"
            for out in ("default", "binary", "json", "all binary"):
                asked: dict[str, Any] = {"id": f"{datatype} {out}"}
                if out in ("binary", "json"):
                    wish = {"binary_data": out == "binary"}
                    asked["outputs"] = [{"name": "OUT", "parameters": wish}]
                elif out == "all binary":
                    asked["parameters"] = {"binary_data_output": True}
                binary = tensor | {"parameters": {"binary_data_size": len(raw)}}
                name = f"http {datatype} {shape} {out}"
                yield _infer(f"{name}, binary in", model, asked | {"inputs": [binary]}, raw)
                if shape == (2, 3):
                    listed = tensor | {"data": _listed(data)}
                    yield _infer(f"{name}, json in", model, asked | {"inputs": [listed]})
    yield from _good_variants()


LEFT = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]}
RIGHT = {"name": "INPUT1", "datatype": "INT32", "shape": [1, 4], "data": [[5, 6, 7, 8]]}
BOTH = {"inputs": [LEFT, RIGHT]}


def _gzip(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)


def _good_variants() -> Iterator[Asked]:
    out0, out1 = {"name": "OUTPUT0"}, {"name": "OUTPUT1"}
    for name, body in {
        "two inputs": BOTH,
        "inputs in another order": {"inputs": [RIGHT, LEFT]},
        "one output": BOTH | {"outputs": [out1]},
        "outputs in another order": BOTH | {"outputs": [out1, out0]},
        "an output twice": BOTH | {"outputs": [out1, out1]},
        "no outputs": BOTH | {"outputs": []},
        "one output binary": BOTH
        | {"outputs": [out0, out1 | {"parameters": {"binary_data": True}}]},
        "parameters": BOTH | {"parameters": {"timeout": 10_000_000, "priority": 3, "mine": 1.5}},
        "sequence": BOTH | {"parameters": {"sequence_id": 7, "sequence_start": True}},
        "unknown fields": BOTH | {"model_name": "x", "bogus": [1, {"a": None}]},
        "id with quotes": BOTH | {"id": 'a"\\\u2028é'},
        "an empty id": BOTH | {"id": ""},
        "deeper lists": {"inputs": [LEFT | {"data": [[[1, 2], [3, 4]]]}, RIGHT]},
        "ragged lists": {"inputs": [LEFT | {"data": [[1, 2], 3, [[4]]]}, RIGHT]},
        "all binary but one": BOTH
        | {
            "parameters": {"binary_data_output": True},
            "outputs": [out0, out1 | {"parameters": {"binary_data": False}}],
        },
    }.items():
        yield _infer(f"http {name}", "add_sub", body)
    text = json.dumps(BOTH).encode()
    for coding, squeeze in (("gzip", _gzip), ("deflate", zlib.compress)):
        yield _infer(
            f"http {coding} in", "add_sub", squeeze(text), headers={"Content-Encoding": coding}
        )
        yield _infer(f"http {coding} out", "add_sub", BOTH, headers={"Accept-Encoding": coding})
    for accepted in (
        "br",
        "gzip, deflate",
        "deflate;q=0.9, gzip;q=0.1",
        "gzip;q=0",
        "*",
        "gzip;q=x",
    ):
        yield _infer(
            f"http accepts {accepted}", "add_sub", BOTH, headers={"Accept-Encoding": accepted}
        )
    pair = {"name": "IN", "datatype": "FP32", "shape": [2, 2]}
    for name, data in (
        ("numbers", [1, 2.5, -3, 4e-3]),
        ("whole", [1, 2, 3, 4]),
        ("large", [1e39] * 4),
    ):
        yield _infer(f"http without batch, {name}", "pairs", {"inputs": [pair | {"data": data}]})
    odd = np.array([[np.nan, np.inf], [-np.inf, -0.0]], np.float32)
    sized = pair | {"parameters": {"binary_data_size": 16}}
    yield _infer("http NaN out as json", "pairs", {"inputs": [sized]}, odd.tobytes())
    bare = {"Inference-Header-Content-Length": "0"}
    yield _infer("http bare tensor", "pairs", b"abcdefgh", headers=bare)
    yield _infer("http bare tensor with batch", "identity_int8", b"abc", headers=bare)
    yield _infer("http bare tensor of two", "add_sub", b"abcdefgh", headers=bare)
    yield _infer("http bare tensor, odd size", "pairs", b"abcdefg", headers=bare)
    truth = {
        "name": "IN",
        "datatype": "BOOL",
        "shape": [1, 2],
        "parameters": {"binary_data_size": 2},
    }
    yield _infer("http bool from 7", "identity_bool", {"inputs": [truth]}, b"\x07\x00")
    yield Asked("http version", "/v2/models/add_sub/versions/1/infer", text)
    many = {"name": "TEXT", "datatype": "BYTES", "shape": [2, 2], "data": ["a", "ß", "", "\u0000"]}
    yield _infer("http texts", "upper", {"inputs": [many]})


def _questions() -> Iterator[Asked]:
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        *(
            f"/v2/models/{model}"
            for model in ("add_sub", "pairs", "upper", "identity_fp16", "nope")
        ),
        *(f"/v2/models/add_sub/versions/{version}" for version in ("1", "2")),
        *(f"/v2/models/add_sub{suffix}" for suffix in ("/ready", "/versions/1/ready")),
        "/v2/models/nope/ready",
        "/v2/models/add_sub/versions/2/ready",
        "/v2/nothing",
        "/v2/models",
        "/v2/models/add_sub/infer",
        "/v2/repository/index",
        "/v2/systemsharedmemory/region/nope/status",
    ):
        yield Asked(f"http GET {path}", path, method="GET")
    yield Asked(
        "http statistics of nobody", "/v2/models/nope/stats", method="GET",
        instead="404",  # Triton says 400 here and 404 everywhere else
    )  # fmt: skip
    for path in ("/v2", "/v2/models/add_sub", "/v2/health/live"):
        yield Asked(f"http POST {path}", path)
    for model, version in (("add_sub", ""), ("upper", "1"), ("nope", ""), ("add_sub", "2")):
        for kind in ("Metadata", "Ready"):
            message = getattr(pb, f"Model{kind}Request")(name=model, version=version)
            yield Asked(
                f"grpc {kind} {model} {version}",
                f"Model{kind}",
                message.SerializeToString(deterministic=True),
            )
    for kind in ("Live", "Ready"):
        yield Asked(f"grpc server {kind}", f"Server{kind}")


def _bad_json() -> Iterator[Asked]:
    for name, body in {
        "nothing": b"",
        "a bracket": b"[",
        "no object": b"7",
        "no inputs": {},
        "inputs null": {"inputs": None},
        "inputs no list": {"inputs": {"a": 1}},
        "an input that is a number": {"inputs": [5]},
        "id number": BOTH | {"id": 5},
        "trailing": json.dumps(BOTH).encode() + b"x",
        "timeout below zero": BOTH | {"parameters": {"timeout": -1}},
        "timeout a text": BOTH | {"parameters": {"timeout": "x"}},
        "priority below zero": BOTH | {"parameters": {"priority": -1}},
        "binary_data_output a number": BOTH | {"parameters": {"binary_data_output": 1}},
        "reserved parameter": BOTH | {"parameters": {"triton_x": 1}},
        "unknown output": BOTH | {"outputs": [{"name": "NOPE"}]},
        "output without a name": BOTH | {"outputs": [{}]},
        "output binary a number": BOTH
        | {"outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": 1}}]},
    }.items():
        yield _infer(f"bad: {name}", "add_sub", body)
    wish = {"outputs": [{"name": "OUTPUT0", "parameters": {"classification": 2}}]}
    yield _infer("bad: classification", "add_sub", BOTH | wish, instead="400")  # left out
    yield _infer("bad: unknown model", "nope", BOTH)
    yield Asked("bad: version", "/v2/models/add_sub/versions/2/infer", json.dumps(BOTH).encode())
    yield Asked("bad: method", "/v2/models/add_sub/infer", method="DELETE")
    for coding in ("br", "gzip", "deflate"):
        yield _infer(f"bad: {coding}", "add_sub", BOTH, headers={"Content-Encoding": coding})
    yield Asked("bad: index", "/v2/repository/index", b"xx")
    for length in ("99999", "-1", "abc", "5"):
        header = {"Inference-Header-Content-Length": length}
        yield _infer(f"bad: json length {length}", "add_sub", BOTH, headers=header)


def _bad_tensors() -> Iterator[Asked]:
    def left(what: str, instead: str | None = None, **changes: Any) -> Asked:
        tensor = {key: value for key, value in (LEFT | changes).items() if value is not ...}
        return _infer(
            f"bad tensor: {what}", "add_sub", {"inputs": [tensor, RIGHT]}, instead=instead
        )

    yield left("too few", data=[1, 2, 3])
    yield left("too many", data=[1, 2, 3, 4, 5])
    yield left("a fraction", data=[1, 2, 3, 4.5])
    yield left("a whole float", data=[1, 2, 3, 4.0])
    yield left("a text", data=[1, 2, 3, "a"])
    yield left("a null", data=[1, 2, 3, None])
    yield left("a bool", data=[1, 2, 3, True])
    yield left("an object", data=[1, 2, 3, {}])
    yield left("no list", data=7)
    yield left("null", data=None)
    yield left("too large", data=[1, 2, 3, 99999999999], instead="400")  # Triton wraps around
    yield left("NaN", data=[1, 2, 3, float("nan")])
    yield left("no data", data=...)
    yield left("no name", name=...)
    yield left("no shape", shape=...)
    yield left("no datatype", datatype=...)
    yield left("another datatype", datatype="FP32")
    yield left("an unknown datatype", datatype="NOPE")
    yield left("datatype a number", datatype=5)
    for shape in ([4], [1, -4], [2, 2], [], [1, 5], [9, 4], [0, 4], [1, 4, 1], "x", [1.0, 4], None):
        yield left(f"shape {shape}", shape=shape)
    for name, inputs in {
        "one missing": [LEFT],
        "none": [],
        "twice": [LEFT, LEFT],
        "three": [LEFT, RIGHT, RIGHT],
        "another": [LEFT, RIGHT | {"name": "NOPE"}],
        "one too many": [LEFT, RIGHT, RIGHT | {"name": "NOPE"}],
    }.items():
        yield _infer(f"bad inputs: {name}", "add_sub", {"inputs": inputs})
    for model, datatype, data in (
        ("identity_bool", "BOOL", [1]),
        ("identity_bytes", "BYTES", [5]),
        ("identity_fp16", "FP16", [1.5]),
        ("identity_fp32", "FP32", ["a"]),
        ("identity_fp64", "FP64", [True]),
    ):
        tensor = {"name": "IN", "datatype": datatype, "shape": [1, 1], "data": data}
        yield _infer(f"bad element: {datatype}", model, {"inputs": [tensor]})
    for model, datatype, value in (("uint8", "UINT8", 300), ("int8", "INT8", -129)):
        tensor = {"name": "IN", "datatype": datatype, "shape": [1, 1], "data": [value]}
        name = f"bad element: {datatype} {value}"
        yield _infer(name, f"identity_{model}", {"inputs": [tensor]}, instead="400")
    wide = {"name": "IN", "datatype": "FP32", "shape": [9, 1], "data": [0.0] * 9}
    yield _infer("bad batch", "identity_fp32", {"inputs": [wide]})


def _bad_binary() -> Iterator[Asked]:
    def pair(name: str, size: Any, binary: bytes, **changes: Any) -> Asked:
        tensor = {
            "name": "IN", "datatype": "FP32", "shape": [1, 2],
            "parameters": {"binary_data_size": size},
        }  # fmt: skip
        return _infer(f"bad binary: {name}", "pairs", {"inputs": [tensor | changes]}, binary)

    yield pair("nothing came", 8, b"")
    yield pair("too little came", 8, b"1234567")
    yield pair("too much came", 8, b"123456789")
    yield pair("announced too small", 4, b"1234")
    yield pair("announced too large", 12, b"123456789012")
    yield pair("announced below zero", -8, b"12345678")
    yield pair("announced as text", "8", b"12345678")
    yield pair("and data", 8, b"12345678", data=[1, 2])

    def text(name: str, raw: bytes, shape: Sequence[int]) -> Asked:
        tensor = {
            "name": "IN", "datatype": "BYTES", "shape": shape,
            "parameters": {"binary_data_size": len(raw)},
        }  # fmt: skip
        wish = {"parameters": {"binary_data_output": True}}
        return _infer(f"bad texts: {name}", "identity_bytes", {"inputs": [tensor]} | wish, raw)

    yield text("cut in the text", b"\x05\x00\x00\x00ab", [1, 1])
    yield text("cut in the length", b"\x01\x00\x00\x00a\x01\x00", [1, 2])
    yield text("too few", b"\x01\x00\x00\x00a", [1, 2])
    yield text("too many", b"\x01\x00\x00\x00a" * 3, [1, 2])
    yield text("huge length", b"\xff\xff\xff\xffa", [1, 1])


def _memory_http() -> Iterator[Asked]:
    base = "/v2/systemsharedmemory"

    def register(name: str, region: str, instead: str | None = None, **body: Any) -> Asked:
        text = json.dumps(body).encode()
        path = f"{base}/region/{region}/register"
        return Asked(f"memory: register {name}", path, text, instead=instead)

    def infer(name: str, given: dict[str, Any], wish: dict[str, Any]) -> Asked:
        tensor = {"name": "IN", "datatype": "FP32", "shape": [2, 2], "parameters": given}
        output = {"name": "OUT", "parameters": wish}
        body = {"inputs": [tensor], "outputs": [output]}
        return _infer(f"memory: {name}", "pairs", body)

    def place(region: str, size: Any, offset: int | None = None) -> dict[str, Any]:
        where = {"shared_memory_region": region, "shared_memory_byte_size": size}
        return where if offset is None else where | {"shared_memory_offset": offset}

    yield Asked("memory: status of none", f"{base}/status", method="GET")
    yield register("missing object", "x", key=f"/{KEY}nope", offset=0, byte_size=64)
    yield register("without size", "x", key=f"/{KEY}a")
    yield register("too large", "x", key=f"/{KEY}a", byte_size=REGION_BYTES + 1)
    yield register("key a number", "x", key=5, byte_size=64)
    yield register("escape", "x", key="/../../etc/passwd", byte_size=12)
    yield register("empty", "x", key=f"/{KEY}a", byte_size=0)
    yield register("below zero", "x", key=f"/{KEY}a", offset=-5, byte_size=10)
    yield register("x", "x", key=f"/{KEY}a", offset=0, byte_size=4096)
    yield register("x again", "x", key=f"/{KEY}a", offset=0, byte_size=4096)
    yield register("y", "y", key=f"{KEY}b", offset=0, byte_size=4096)
    yield Asked("memory: status", f"{base}/status", method="GET")
    yield Asked("memory: status of y", f"{base}/region/y/status", method="GET")
    yield infer("in", place("x", 16), {})
    yield infer("in, offset", place("x", 16, 8), {"binary_data": True})
    yield infer("in and out", place("x", 16, 8), place("y", 64))
    yield infer("out, offset", place("x", 16, 8), place("y", 16, 32))
    yield infer("what came out", place("y", 16, 32), {})
    yield infer("past the end", place("x", 16, 4081), {})
    yield infer("too small", place("x", 12), {})
    yield infer("too large", place("x", 20), {})
    yield infer("no size", {"shared_memory_region": "x"}, {})
    yield infer("size below zero", place("x", -16), {})
    yield infer("unknown region", place("nope", 16), {})
    yield infer("out, unknown region", place("x", 16), place("nope", 64))
    yield infer("out, past the end", place("x", 16), place("y", 64, 4090))
    yield infer("out and binary", place("x", 16), place("y", 64) | {"binary_data": True})
    yield infer("in and binary", place("x", 16) | {"binary_data_size": 16}, {})
    yield Asked("memory: unregister nobody", f"{base}/region/nope/unregister")
    yield Asked("memory: unregister x", f"{base}/region/x/unregister")
    yield Asked("memory: unregister all", f"{base}/unregister")
    yield Asked("memory: status at the end", f"{base}/status", method="GET")


CONTENTS = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents",
    "UINT32": "uint_contents", "UINT64": "uint64_contents", "INT8": "int_contents",
    "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def _call(name: str, message: pb.ModelInferRequest, instead: str | None = None) -> Asked:
    return Asked(
        f"grpc {name}", "ModelInfer", message.SerializeToString(deterministic=True), instead=instead
    )


def _good_grpc() -> Iterator[Asked]:
    for number, datatype in enumerate(NUMPY_TYPES):
        for shape in ((1, 1), (2, 3), (8, 2)):
            data = _sample(datatype, shape, number)
            message = pb.ModelInferRequest(
                model_name=f"identity_{datatype.lower()}",
                id=str(shape),
                inputs=[{"name": "IN", "datatype": datatype, "shape": shape}],
                outputs=[{"name": "OUT"}] if shape == (8, 2) else [],
            )
            raw = pb.ModelInferRequest.FromString(message.SerializeToString(deterministic=True))
            raw.raw_input_contents.append(_raw(data))
            yield _call(f"{datatype} {shape} raw", raw)
            if datatype in CONTENTS:
                values = data.ravel().tolist()
                getattr(message.inputs[0].contents, CONTENTS[datatype]).extend(values)
                yield _call(f"{datatype} {shape} typed", message)


def _add_sub(**changes: Any) -> pb.ModelInferRequest:
    fields: dict[str, Any] = {
        "model_name": "add_sub",
        "inputs": [
            {"name": name, "datatype": "INT32", "shape": [1, 4]} for name in ("INPUT0", "INPUT1")
        ],
        "raw_input_contents": [bytes(range(16)), bytes(16)],
    }
    return pb.ModelInferRequest(**(fields | changes))


def _bad_grpc() -> Iterator[Asked]:
    yield _call("two inputs", _add_sub())
    yield _call("one output", _add_sub(outputs=[{"name": "OUTPUT1"}]))
    yield _call("version", _add_sub(model_version="1"))
    parameters = {"timeout": {"int64_param": 10_000_000}, "priority": {"uint64_param": 2}}
    yield _call("parameters", _add_sub(parameters=parameters))
    yield _call("bad: reserved", _add_sub(parameters={"triton_x": {"int64_param": 1}}))
    below = _add_sub(parameters={"timeout": {"int64_param": -1}})
    yield _call("bad: timeout below zero", below, instead="INVALID_ARGUMENT")  # Triton: no timeout
    yield _call("bad: timeout a text", _add_sub(parameters={"timeout": {"string_param": "x"}}))
    yield _call("bad: unknown model", _add_sub(model_name="nope"))
    yield _call("bad: unknown version", _add_sub(model_version="2"))
    yield _call("bad: unknown output", _add_sub(outputs=[{"name": "NOPE"}]))
    yield _call("bad: no inputs", _add_sub(inputs=[], raw_input_contents=[]))
    yield _call("bad: raw too few", _add_sub(raw_input_contents=[bytes(16)]))
    many = _add_sub(raw_input_contents=[bytes(16)] * 3)
    yield _call("bad: raw too many", many, instead="INVALID_ARGUMENT")  # Triton: left unread
    yield _call("bad: raw too short", _add_sub(raw_input_contents=[bytes(16), bytes(15)]))
    yield _call("bad: raw too long", _add_sub(raw_input_contents=[bytes(16), bytes(17)]))
    wish = [{"name": "OUTPUT0", "parameters": {"classification": {"int64_param": 2}}}]
    yield _call("bad: classification", _add_sub(outputs=wish), instead="INVALID_ARGUMENT")
    for name, field_name, value in (
        ("shape", "shape", [2, 4]),
        ("batch", "shape", [9, 4]),
        ("no shape", "shape", []),
        ("below zero", "shape", [-1, 4]),
        ("datatype", "datatype", "FP32"),
        ("unknown datatype", "datatype", "NOPE"),
        ("name", "name", "NOPE"),
        ("twice", "name", "INPUT0"),
    ):
        message = _add_sub()
        other: dict[str, Any] = {"name": "INPUT1", "datatype": "INT32", "shape": [1, 4]}
        message.inputs[1].CopyFrom(
            pb.ModelInferRequest.InferInputTensor(**(other | {field_name: value}))
        )
        yield _call(f"bad tensor: {name}", message)
    both = _add_sub()
    both.inputs[0].contents.int_contents.extend([1, 2, 3, 4])
    yield _call("bad: raw and typed", both)
    for name, contents in {
        "too few": {"int_contents": [1, 2, 3]},
        "too many": {"int_contents": [1, 2, 3, 4, 5]},
        "another field": {"fp32_contents": [1, 2, 3, 4]},
        "none": {},
    }.items():
        message = _add_sub(raw_input_contents=[])
        for tensor in message.inputs:
            tensor.contents.CopyFrom(pb.InferTensorContents(**contents))
        yield _call(f"bad contents: {name}", message)


def _memory_grpc() -> Iterator[Asked]:
    def register(name: str, region: str, key: str, byte_size: int, offset: int = 0) -> Asked:
        message = pb.SystemSharedMemoryRegisterRequest(
            name=region, key=key, offset=offset, byte_size=byte_size
        )
        path = "SystemSharedMemoryRegister"
        return Asked(
            f"grpc memory: register {name}", path, message.SerializeToString(deterministic=True)
        )

    def place(region: str, size: int, offset: int = 0) -> dict[str, Any]:
        return {
            "shared_memory_region": {"string_param": region},
            "shared_memory_byte_size": {"int64_param": size},
            "shared_memory_offset": {"int64_param": offset},
        }

    def infer(name: str, given: dict[str, Any], wish: dict[str, Any]) -> Asked:
        message = pb.ModelInferRequest(
            model_name="pairs",
            inputs=[{"name": "IN", "datatype": "FP32", "shape": [2, 2], "parameters": given}],
            outputs=[{"name": "OUT", "parameters": wish}],
        )
        return _call(f"memory: {name}", message)

    def region(name: str, method: str, region: str) -> Asked:
        path = f"SystemSharedMemory{method}"
        message = getattr(pb, f"{path}Request")(name=region)
        return Asked(f"grpc memory: {name}", path, message.SerializeToString(deterministic=True))

    yield register("x", "x", f"/{KEY}a", 4096)
    yield register("x again", "x", f"/{KEY}a", 4096)
    yield register("missing object", "z", f"/{KEY}nope", 4096)
    yield register("y", "y", f"/{KEY}b", 4096)
    yield region("status", "Status", "")
    yield region("status of y", "Status", "y")
    yield region("status of nobody", "Status", "nope")
    yield infer("in", place("x", 16), {})
    yield infer("in and out", place("x", 16, 8), place("y", 64))
    yield infer("out, offset", place("x", 16, 8), place("y", 16, 32))
    yield infer("what came out", place("y", 16, 32), {})
    yield infer("past the end", place("x", 16, 4081), {})
    yield infer("too small", place("x", 12), {})
    yield infer("unknown region", place("nope", 16), {})
    yield infer("out, unknown region", place("x", 16), place("nope", 64))
    yield region("unregister x", "Unregister", "x")
    yield region("unregister all", "Unregister", "")
    yield region("status at the end", "Status", "")

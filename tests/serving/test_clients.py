"""Triton's own clients, HTTP and gRPC, against a real server."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from eclip.server.messages import InferRequest
from eclip.server.protocol.rpc import within_deadline
from numpy_server import NumpyServer
from waiting import until

Array = npt.NDArray[Any]

_RANDOM = np.random.default_rng(7)
_LIMITS = np.iinfo
SAMPLES: dict[str, Array] = {
    "BOOL": np.array([[True, False, True]]),
    **{
        f"{kind}{bits}": np.array(
            [[_LIMITS(f"{kind.lower()}{bits}").min, 1, _LIMITS(f"{kind.lower()}{bits}").max]],
            f"{kind.lower()}{bits}",
        )
        for kind in ("INT", "UINT")
        for bits in (8, 16, 32, 64)
    },
    "FP16": np.array([[1.5, -np.inf, 6e-8]], np.float16),
    "FP32": np.array([[1.5, -0.0, 3.4e38]], np.float32),
    "FP64": np.array([[0.1, 1e308, 5e-324]], np.float64),
    "BYTES": np.array([[b"", "größe".encode(), b"\x00tail"]], object),
    "BF16": np.array([[1.5, -2.0, 3e38]], ml_dtypes.bfloat16),
}
JSON_TYPES = sorted(set(SAMPLES) - {"FP16", "BF16"})
CLIENTS: dict[str, ModuleType] = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(params=["http", "grpc"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    return CLIENTS[request.param]


@pytest.fixture
def client(module: ModuleType, server: NumpyServer) -> Iterator[Any]:
    with connect(module, server) as client:
        yield client


def connect(module: ModuleType, server: NumpyServer) -> Any:
    address = server.http if module is tritonclient.http else server.grpc
    return module.InferenceServerClient(address)


def make_input(module: ModuleType, name: str, data: Array, **options: Any) -> Any:
    tensor = module.InferInput(name, data.shape, np_to_triton_dtype(data.dtype))
    tensor.set_data_from_numpy(data, **options)
    return tensor


def slow_input(module: ModuleType, seconds: float) -> Any:
    return make_input(module, "IN", np.array([[seconds]], np.float32))


def read_journal(server: NumpyServer) -> list[dict[str, Any]]:
    with connect(tritonclient.http, server) as client:
        nothing = make_input(tritonclient.http, "IN", np.zeros(1, np.float32))
        lines = client.infer("journal", [nothing]).as_numpy("OUT")
    return [json.loads(line) for line in lines]


def entry_of(server: NumpyServer, event: str, request_id: str) -> dict[str, Any] | None:
    found = [
        entry
        for entry in read_journal(server)
        if entry["event"] == event and entry["id"] == request_id
    ]
    return found[0] if found else None


def status_of(error: InferenceServerException) -> str:
    return str(error.status()).removeprefix("StatusCode.")


# --- Tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", sorted(SAMPLES))
def test_every_datatype_comes_back_bit_by_bit(
    client: Any, module: ModuleType, datatype: str
) -> None:
    sample = SAMPLES[datatype]
    result = client.infer(
        f"identity_{datatype.lower()}", [make_input(module, "IN", sample)], request_id="me"
    )
    answer = result.as_numpy("OUT")
    assert answer.shape == sample.shape
    assert answer.dtype == sample.dtype
    assert answer.tolist() == sample.tolist()
    response = result.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "me"


@pytest.mark.parametrize("datatype", JSON_TYPES)
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_json_and_binary_mix(
    server: NumpyServer, datatype: str, binary_in: bool, binary_out: bool
) -> None:
    sample = SAMPLES[datatype]
    module = tritonclient.http
    with connect(module, server) as client:
        answer = client.infer(
            f"identity_{datatype.lower()}",
            [make_input(module, "IN", sample, binary_data=binary_in)],
            outputs=[module.InferRequestedOutput("OUT", binary_data=binary_out)],
        )
    assert ("data" in answer.get_output("OUT")) is not binary_out
    values = answer.as_numpy("OUT").tolist()
    if datatype == "BYTES" and not binary_out:
        values = [[text.encode() for text in row] for row in values]
    assert values == sample.tolist()


@pytest.mark.parametrize("shape", [(1, 0), (8, 1), (3, 5), (1, 10_000)])
def test_shapes(client: Any, module: ModuleType, shape: tuple[int, ...]) -> None:
    sample = _RANDOM.random(shape, np.float32)
    answer = client.infer("identity_fp32", [make_input(module, "IN", sample)])
    np.testing.assert_array_equal(answer.as_numpy("OUT"), sample, strict=True)


def test_several_tensors_in_any_order_and_chosen_outputs(client: Any, module: ModuleType) -> None:
    left, right = (_RANDOM.integers(0, 99, (2, 4), np.int32) for _ in range(2))
    inputs = [make_input(module, "INPUT1", right), make_input(module, "INPUT0", left)]
    both = client.infer("add_sub", inputs)
    np.testing.assert_array_equal(both.as_numpy("OUTPUT0"), left + right)
    np.testing.assert_array_equal(both.as_numpy("OUTPUT1"), left - right)
    one = client.infer("add_sub", inputs, outputs=[module.InferRequestedOutput("OUTPUT1")])
    assert one.as_numpy("OUTPUT0") is None
    np.testing.assert_array_equal(one.as_numpy("OUTPUT1"), left - right)


def test_texts(client: Any, module: ModuleType) -> None:
    sample = np.array([[b"a", b"xyz"], [b"", b"q" * 70_000]], object)
    answer = client.infer("upper", [make_input(module, "TEXT", sample)]).as_numpy("UPPER")
    assert answer.tolist() == [[b"A", b"XYZ"], [b"", b"Q" * 70_000]]


@pytest.mark.parametrize("asking", [None, "gzip", "deflate"])
@pytest.mark.parametrize("answering", [None, "gzip", "deflate"])
def test_compressed_bodies(server: NumpyServer, asking: str | None, answering: str | None) -> None:
    sample = np.zeros((8, 50_000), np.float32)
    sample[3, 3] = 3
    module = tritonclient.http
    with connect(module, server) as client:
        answer = client.infer(
            "identity_fp32",
            [make_input(module, "IN", sample)],
            request_compression_algorithm=asking,
            response_compression_algorithm=answering,
        )
    np.testing.assert_array_equal(answer.as_numpy("OUT"), sample)


def test_compressed_messages(server: NumpyServer) -> None:
    sample = np.zeros((8, 50_000), np.float32)
    module = tritonclient.grpc
    with connect(module, server) as client:
        for algorithm in ("gzip", "deflate"):
            tensor = make_input(module, "IN", sample)
            answer = client.infer("identity_fp32", [tensor], compression_algorithm=algorithm)
            np.testing.assert_array_equal(answer.as_numpy("OUT"), sample)


def test_clients_of_an_event_loop(server: NumpyServer) -> None:
    """All at once on one connection or several; each gets its own answer."""

    async def ask(module: ModuleType, address: str) -> None:
        async with module.InferenceServerClient(address) as client:
            samples = [_RANDOM.random((1, 100), np.float32) for _ in range(20)]
            answers = await asyncio.gather(
                *(
                    client.infer("identity_fp32", [make_input(module, "IN", sample)])
                    for sample in samples
                )
            )
            for sample, answer in zip(samples, answers, strict=True):
                np.testing.assert_array_equal(answer.as_numpy("OUT"), sample)

    async def ask_both() -> None:
        await ask(tritonclient.http.aio, server.http)
        await ask(tritonclient.grpc.aio, server.grpc)

    asyncio.run(ask_both())


# --- Questions --------------------------------------------------------------------------------


def test_health_and_metadata(client: Any, module: ModuleType) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("add_sub") and client.is_model_ready("add_sub", "1")
    assert not client.is_model_ready("add_sub", "2") and not client.is_model_ready("nope")
    options = {"as_json": True} if module is tritonclient.grpc else {}
    server = client.get_server_metadata(**options)
    assert server["name"] == "eclip" and "binary_tensor_data" in server["extensions"]
    model = client.get_model_metadata("add_sub", **options)
    assert model["versions"] == ["1"]
    shape = [str(size) if options else size for size in (-1, 4)]  # protobuf's JSON has no int64
    assert model["inputs"][1] == {"name": "INPUT1", "datatype": "INT32", "shape": shape}
    config = client.get_model_config("upper", **options)
    config = config["config"] if options else config
    assert config["max_batch_size"] == 4
    assert config["input"][0]["data_type"] == "TYPE_STRING"


def test_statistics(client: Any, module: ModuleType) -> None:
    sample = make_input(module, "IN", np.zeros((1, 2), np.float32))
    options = {"as_json": True} if module is tritonclient.grpc else {}

    def count() -> int:
        (statistics,) = client.get_inference_statistics("identity_fp32", **options)["model_stats"]
        return int(statistics["inference_stats"]["success"].get("count", 0))

    before = count()
    for _ in range(3):
        client.infer("identity_fp32", [sample])
    assert count() == before + 3
    assert len(client.get_inference_statistics(**options)["model_stats"]) > 15


def test_a_model_is_unloaded_and_loaded(client: Any, module: ModuleType) -> None:
    options = {"as_json": True} if module is tritonclient.grpc else {}

    def states() -> dict[str, str]:
        index = client.get_model_repository_index(**options)
        models = index["models"] if options else index
        return {model["name"]: model["state"] for model in models}

    sample = make_input(module, "IN", np.zeros((1, 2), np.uint16))
    client.unload_model("identity_uint16")
    try:
        assert states()["identity_uint16"] == "UNAVAILABLE"
        assert states()["identity_int16"] == "READY"
        assert not client.is_model_ready("identity_uint16")
        with pytest.raises(InferenceServerException, match="not loaded") as refused:
            client.infer("identity_uint16", [sample])
        assert status_of(refused.value) in ("503", "UNAVAILABLE")
    finally:
        client.load_model("identity_uint16")
    assert states()["identity_uint16"] == "READY"
    client.infer("identity_uint16", [sample])


# --- Refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "version", "statuses", "line"),
    [
        ("nope", "", ("404", "NOT_FOUND"), "there is no model 'nope'"),
        ("slow", "2", ("404", "NOT_FOUND"), "has version 1, not '2'"),
        ("full", "", ("429", "RESOURCE_EXHAUSTED"), "full queue"),
        ("pairs", "", ("400", "INVALID_ARGUMENT"), r"expects \[-1, 2\]"),
    ],
)
def test_refusals_have_a_status_and_a_line(
    client: Any, module: ModuleType, model: str, version: str, statuses: str, line: str
) -> None:
    sample = make_input(module, "IN", np.zeros((1, 3), np.float32))
    with pytest.raises(InferenceServerException, match=line) as refused:
        client.infer(model, [sample], model_version=version)
    assert status_of(refused.value) in statuses


def test_wrong_tensors_are_refused(client: Any, module: ModuleType) -> None:
    good = make_input(module, "INPUT0", np.zeros((1, 4), np.int32))
    other = np.zeros((1, 4), np.int32)
    for inputs, line in (
        ([good], "also needs: INPUT1"),
        ([good, good], "given twice"),
        ([good, make_input(module, "INPUT2", other)], "has no input 'INPUT2'"),
        ([good, make_input(module, "INPUT1", other.astype(np.int64))], "must be INT32"),
        ([good, make_input(module, "INPUT1", np.zeros((2, 4), np.int32))], "different batches"),
        ([good, make_input(module, "INPUT1", np.zeros((9, 4), np.int32))], "must be 1 to 8"),
        ([good, make_input(module, "INPUT1", np.zeros((4,), np.int32))], "1 to 8|expects"),
    ):
        with pytest.raises(InferenceServerException, match=line) as refused:
            client.infer("add_sub", inputs)
        assert status_of(refused.value) in ("400", "INVALID_ARGUMENT")
    with pytest.raises(InferenceServerException, match="has no output 'NOPE'"):
        client.infer(
            "add_sub",
            [good, make_input(module, "INPUT1", other)],
            outputs=[module.InferRequestedOutput("NOPE")],
        )
    with pytest.raises(InferenceServerException, match="classification is not supported"):
        client.infer(
            "add_sub",
            [good, make_input(module, "INPUT1", other)],
            outputs=[module.InferRequestedOutput("OUTPUT0", class_count=2)],
        )


def test_what_is_left_out_says_so(server: NumpyServer) -> None:
    with connect(tritonclient.grpc, server) as client:
        for ask in (client.get_cuda_shared_memory_status, client.get_log_settings):
            with pytest.raises(InferenceServerException, match="eclip has no ") as refused:
                ask()
            assert status_of(refused.value) == "UNIMPLEMENTED"
        heard: list[Any] = []
        client.start_stream(lambda result, error: heard.append(error))
        assert until(lambda: bool(heard))
        assert "eclip has no streaming" in str(heard[0])
        client.stop_stream()


# --- Time -------------------------------------------------------------------------------------


def test_timeout_and_priority_reach_the_core(
    client: Any, module: ModuleType, server: NumpyServer
) -> None:
    request_id = uuid.uuid4().hex
    client.infer(
        "slow",
        [slow_input(module, 0)],
        outputs=[module.InferRequestedOutput("OUT")],
        request_id=request_id,
        timeout=7_000_000,
        priority=3,
    )
    entry = entry_of(server, "told", request_id)
    assert entry is not None
    assert (entry["timeout_ns"], entry["priority"], entry["outputs"]) == (7_000_000_000, 3, ["OUT"])
    with pytest.raises(InferenceServerException, match="time is over") as refused:
        client.infer("slow", [slow_input(module, 60)], timeout=20_000)
    assert status_of(refused.value) in ("504", "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("timeout", [2**53, 2**62, 2**63 - 1])
def test_a_timeout_that_never_ends_is_none(
    client: Any, module: ModuleType, server: NumpyServer, timeout: int
) -> None:
    request_id = uuid.uuid4().hex
    client.infer("slow", [slow_input(module, 0)], request_id=request_id, timeout=timeout)
    entry = entry_of(server, "told", request_id)
    assert entry is not None and entry["timeout_ns"] is None


@pytest.mark.parametrize("left_s", [2562047 * 3600.0, math.inf])
def test_a_deadline_in_centuries_is_none(left_s: float) -> None:
    """Clients in Java, Go and C++ send it for "none"; grpc's client in Python cannot."""
    asked = InferRequest("slow", [], 1, timeout_ns=7)
    context: Any = SimpleNamespace(time_remaining=lambda: left_s)
    assert within_deadline(asked, context) is asked
    unlimited = InferRequest("slow", [], 1)
    assert within_deadline(unlimited, context) is unlimited


def test_a_deadline_is_a_timeout(server: NumpyServer) -> None:
    request_id = uuid.uuid4().hex
    module = tritonclient.grpc
    with connect(module, server) as client:
        with pytest.raises(InferenceServerException):
            client.infer(
                "slow", [slow_input(module, 60)], request_id=request_id, client_timeout=0.3
            )
        entry = entry_of(server, "told", request_id)
        # gRPC's clock and ours differ by a little.
        assert entry is not None and 0 < entry["timeout_ns"] <= 310_000_000


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_client_that_goes_cancels_its_request(server: NumpyServer, protocol: str) -> None:
    request_id = uuid.uuid4().hex

    async def ask_and_leave(ask: Callable[[], Awaitable[Any]]) -> None:
        task = asyncio.ensure_future(ask())
        while await asyncio.to_thread(entry_of, server, "told", request_id) is None:
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def leave() -> None:
        module = {"http": tritonclient.http.aio, "grpc": tritonclient.grpc.aio}[protocol]
        async with module.InferenceServerClient(getattr(server, protocol)) as client:
            await ask_and_leave(
                lambda: client.infer("slow", [slow_input(module, 400)], request_id=request_id)
            )

    asyncio.run(leave())
    assert until(lambda: entry_of(server, "cancelled", request_id) is not None)


def test_a_client_that_goes_cancels_all_that_it_sent_at_once(server: NumpyServer) -> None:
    """Requests one after another on a connection, of which the first is being answered."""
    request_id = uuid.uuid4().hex
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [400]}
    body = json.dumps({"id": request_id, "inputs": [tensor]}).encode()
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    host, _, port = server.http.partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head.encode() + body) * 3)
        assert until(lambda: entry_of(server, "told", request_id) is not None)
    assert until(lambda: entry_of(server, "cancelled", request_id) is not None, patience_s=20.0)


def test_a_client_that_goes_after_a_large_body_cancels_its_request(server: NumpyServer) -> None:
    """Its connection is not read while a large body waits to be taken."""
    request_id = uuid.uuid4().hex
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [400]}
    body = json.dumps({"id": request_id, "inputs": [tensor]}).encode() + b" " * 1_000_000
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    host, _, port = server.http.partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body[:-200_000])
        time.sleep(0.3)  # most of it is taken before the rest comes, in one piece
        connection.sendall(body[-200_000:])
        assert until(lambda: entry_of(server, "told", request_id) is not None)
    assert until(lambda: entry_of(server, "cancelled", request_id) is not None, patience_s=20.0)

"""An inference over HTTP: JSON, with tensors inside it, behind it as binary data, or in shared
memory."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from eclip.server.limits import Limits
from eclip.server.messages import (
    InferRequest,
    InferResponse,
    ModelInfo,
    Tensor,
    bounded_timeout,
)
from eclip.server.protocol.bodies import Headers
from eclip.server.shared_memory import MemoryPlace, Regions
from eclip.server.tensors import (
    DATATYPES,
    arrange_inputs,
    bad_request,
    check_input,
    check_outputs,
    check_shape,
    from_json,
    from_raw,
    parse_json,
    to_json,
    to_raw,
)

JSON_LENGTH = b"inference-header-content-length"

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _InputParameters(msgspec.Struct, gc=False):
    binary_data_size: _Count | None = None
    shared_memory_region: str | None = None
    shared_memory_offset: _Count = 0
    shared_memory_byte_size: _Count = 0


class _Input(msgspec.Struct, gc=False):
    name: str
    datatype: str
    shape: list[_Count]
    parameters: _InputParameters | None = None
    data: msgspec.Raw = msgspec.Raw()  # empty: it is elsewhere


class _OutputParameters(msgspec.Struct, gc=False):
    binary_data: bool = False
    classification: _Count = 0
    shared_memory_region: str | None = None
    shared_memory_offset: _Count = 0
    shared_memory_byte_size: _Count = 0


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: _OutputParameters | None = None


class _RequestParameters(msgspec.Struct, gc=False):
    """Others are the model's own in Triton; eclip's models have none, and they are left alone."""

    timeout: _Count = 0  # µs; 0: none
    priority: _Count = 0
    binary_data_output: bool = False


class _Request(msgspec.Struct, gc=False):
    inputs: list[_Input]
    id: str = ""
    outputs: list[_Output] = []
    parameters: dict[str, Any] | None = None


_requests = msgspec.json.Decoder(_Request)


class Wishes(msgspec.Struct, frozen=True):
    """How a client wants its outputs: binary, in shared memory, or else as JSON."""

    binary: bool  # all of them, where none is named
    outputs: Mapping[str, bool | MemoryPlace]  # those that are named; True: binary


def read_request(
    model: ModelInfo, headers: Headers, body: memoryview, regions: Regions, limits: Limits
) -> tuple[InferRequest, Wishes]:
    arrival_ns = time.monotonic_ns()
    json_bytes = _json_bytes(headers, len(body))
    if json_bytes == 0 and JSON_LENGTH in headers:
        return _read_bare_tensor(model, body, arrival_ns)
    if json_bytes > limits.json_bytes:
        raise bad_request(f"the JSON has more than {limits.json_bytes} bytes; send binary data")
    asked: _Request = parse_json(body[:json_bytes], _requests)
    if len(asked.inputs) > limits.tensors or len(asked.outputs) > limits.tensors:
        raise bad_request(f"a request may have {limits.tensors} inputs and as many outputs")
    parameters = _request_parameters(asked.parameters)
    inputs = _read_inputs(model, asked.inputs, body[json_bytes:], regions, limits)
    names = check_outputs(model, (output.name for output in asked.outputs))
    request = InferRequest(
        model.name,
        arrange_inputs(model, inputs),
        arrival_ns,
        asked.id,
        names,
        bounded_timeout(parameters.timeout * 1000),
        parameters.priority,
    )
    return request, Wishes(parameters.binary_data_output, _read_outputs(asked.outputs, regions))


def _json_bytes(headers: Headers, body_bytes: int) -> int:
    text = headers.get(JSON_LENGTH)
    if text is None:
        return body_bytes
    if not text.isdigit() or len(text) > 18 or int(text) > body_bytes:
        raise bad_request(
            f"Inference-Header-Content-Length must be a number from 0 to {body_bytes}, the body's "
            f"length"
        )
    return int(text)


def _request_parameters(given: Mapping[str, Any] | None) -> _RequestParameters:
    if not given:
        return _RequestParameters()
    if any(key.startswith("triton_") for key in given):
        raise bad_request("parameters that begin with 'triton_' are reserved")
    try:
        return msgspec.convert(given, _RequestParameters)
    except msgspec.ValidationError as error:
        raise bad_request(f"the request's parameters are not valid: {error}") from None


def _read_inputs(
    model: ModelInfo,
    inputs: Sequence[_Input],
    binary: memoryview,
    regions: Regions,
    limits: Limits,
) -> list[Tensor]:
    tensors = []
    used = 0  # bytes of the binary data
    for given in inputs:
        name = given.name
        shape = check_shape(name, given.shape, limits)
        datatype = check_input(model, name, given.datatype, shape)
        parameters = given.parameters or _InputParameters()
        size, region = parameters.binary_data_size, parameters.shared_memory_region
        if bool(given.data) + (size is not None) + (region is not None) != 1:
            raise bad_request(
                f"input {name!r} needs one of: data, the parameter binary_data_size, the "
                f"parameter shared_memory_region"
            )
        if given.data:
            tensors.append(from_json(name, datatype, shape, given.data))
        elif region is not None:
            place = MemoryPlace(
                region, parameters.shared_memory_offset, parameters.shared_memory_byte_size
            )
            tensors.append(from_raw(name, datatype, shape, memoryview(regions.read(place))))
        elif size is not None:
            if size > len(binary) - used:
                raise bad_request(f"input {name!r} is announced with {size} bytes; fewer came")
            tensors.append(from_raw(name, datatype, shape, binary[used : used + size]))
            used += size
    if used != len(binary):
        raise bad_request(f"{len(binary) - used} bytes of binary data belong to no input")
    return tensors


def _read_outputs(outputs: Sequence[_Output], regions: Regions) -> Mapping[str, bool | MemoryPlace]:
    wishes: dict[str, bool | MemoryPlace] = {}
    for output in outputs:
        given = output.parameters or _OutputParameters()
        if given.classification:
            raise bad_request("classification is not supported; take the output and sort it")
        region = given.shared_memory_region
        if region is None:
            wishes[output.name] = given.binary_data
            continue
        if given.binary_data:
            raise bad_request(f"output {output.name!r} cannot be both binary and in memory")
        place = MemoryPlace(region, given.shared_memory_offset, given.shared_memory_byte_size)
        regions.check(place)
        wishes[output.name] = place
    return wishes


def _read_bare_tensor(
    model: ModelInfo, body: memoryview, arrival_ns: int
) -> tuple[InferRequest, Wishes]:
    """The body is the only input, without JSON; its length decides the one free dimension."""
    shape = list(model.inputs[0].shape)
    datatype = DATATYPES[model.inputs[0].datatype]
    if len(model.inputs) > 1 or shape.count(-1) > 1 or datatype.dtype.hasobject:
        raise bad_request(
            f"a body without JSON suits a model with one input of numbers and at most one free "
            f"dimension; model {model.name!r} is another"
        )
    if -1 in shape:
        rest = -math.prod(shape) * datatype.dtype.itemsize
        shape[shape.index(-1)] = len(body) // rest if rest else 0
    if model.max_batch > 0:
        shape.insert(0, 1)
    tensor = from_raw(model.inputs[0].name, datatype, tuple(shape), body)
    return InferRequest(model.name, (tensor,), arrival_ns), Wishes(True, {})


def write_response(
    response: InferResponse, wishes: Wishes, regions: Regions
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body."""
    outputs: list[dict[str, Any]] = []
    binary: list[memoryview | bytes] = []
    for tensor in response.outputs:
        if wishes.outputs and tensor.name not in wishes.outputs:
            continue  # the core may compute more than was asked for
        wish = wishes.outputs.get(tensor.name, wishes.binary)
        output: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.data.shape,
        }
        if isinstance(wish, MemoryPlace):
            regions.write(wish, tensor.name, to_raw(tensor))
        elif wish:
            raw = to_raw(tensor)
            binary.append(raw)
            output["parameters"] = {"binary_data_size": len(raw)}
        else:
            output["data"] = to_json(tensor)
        outputs.append(output)
    answer: dict[str, Any] = {"id": response.id} if response.id else {}
    answer |= {
        "model_name": response.model,
        "model_version": response.version,
        "outputs": outputs,
    }
    text = msgspec.json.encode(answer)
    if not binary:
        return [(b"content-type", b"application/json")], text
    headers = [
        (b"content-type", b"application/octet-stream"),
        (JSON_LENGTH, b"%d" % len(text)),
    ]
    return headers, b"".join([text, *binary])

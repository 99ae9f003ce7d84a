"""An inference over gRPC: tensors as raw bytes, as typed contents, or in shared memory."""

from __future__ import annotations

import time
from collections.abc import Mapping

from eclip.server.limits import Limits
from eclip.server.messages import (
    InferRequest,
    InferResponse,
    ModelInfo,
    Tensor,
    bounded_timeout,
)
from eclip.server.protocol import inference_pb2 as pb
from eclip.server.shared_memory import MemoryPlace, Regions
from eclip.server.tensors import (
    Datatype,
    Shape,
    arrange_inputs,
    bad_request,
    check_input,
    check_outputs,
    check_shape,
    from_raw,
    gather,
    to_raw,
)

Parameters = Mapping[str, pb.InferParameter]


def _number(parameters: Parameters, name: str) -> int:
    parameter = parameters.get(name)
    if parameter is None:
        return 0
    kind = parameter.WhichOneof("parameter_choice")
    value = getattr(parameter, kind) if kind in ("int64_param", "uint64_param") else -1
    if value < 0:
        raise bad_request(f"parameter {name!r} must be a number from 0")
    return int(value)


def _place(parameters: Parameters) -> MemoryPlace | None:
    """Where a tensor is in shared memory, if it is there."""
    parameter = parameters.get("shared_memory_region")
    if parameter is None:
        return None
    offset = _number(parameters, "shared_memory_offset")
    byte_size = _number(parameters, "shared_memory_byte_size")
    return MemoryPlace(parameter.string_param, offset, byte_size)


def read_request(
    model: ModelInfo, asked: pb.ModelInferRequest, regions: Regions, limits: Limits
) -> InferRequest:
    arrival_ns = time.monotonic_ns()
    if len(asked.inputs) > limits.tensors or len(asked.outputs) > limits.tensors:
        raise bad_request(f"a request may have {limits.tensors} inputs and as many outputs")
    if any(key.startswith("triton_") for key in asked.parameters):
        raise bad_request("parameters that begin with 'triton_' are reserved")
    return InferRequest(
        model.name,
        arrange_inputs(model, _read_inputs(model, asked, regions, limits)),
        arrival_ns,
        asked.id,
        check_outputs(model, _read_outputs(asked, regions)),
        bounded_timeout(_number(asked.parameters, "timeout") * 1000),
        _number(asked.parameters, "priority"),
    )


def _read_inputs(
    model: ModelInfo, asked: pb.ModelInferRequest, regions: Regions, limits: Limits
) -> list[Tensor]:
    tensors = []
    raws = iter(asked.raw_input_contents)
    for given in asked.inputs:
        name = given.name
        shape = check_shape(name, given.shape, limits)
        datatype = check_input(model, name, given.datatype, shape)
        place = _place(given.parameters)
        if place is not None:
            if given.HasField("contents"):
                raise bad_request(f"input {name!r} is in shared memory and in the message, too")
            tensors.append(from_raw(name, datatype, shape, memoryview(regions.read(place))))
        elif asked.raw_input_contents:
            raw = next(raws, None)
            if raw is None or given.HasField("contents"):
                raise bad_request(
                    f"raw_input_contents must hold all inputs or none; input {name!r} differs"
                )
            tensors.append(from_raw(name, datatype, shape, memoryview(raw)))
        else:
            tensors.append(_from_contents(name, datatype, shape, given.contents))
    if next(raws, None) is not None:
        raise bad_request("raw_input_contents has more tensors than there are inputs")
    return tensors


def _from_contents(
    name: str, datatype: Datatype, shape: Shape, contents: pb.InferTensorContents
) -> Tensor:
    if datatype.contents is None:
        raise bad_request(f"{datatype.name} has no typed contents; send {name!r} raw")
    filled = [field.name for field, _ in contents.ListFields()]
    if filled not in ([], [datatype.contents]):
        raise bad_request(f"the contents of input {name!r} must be in {datatype.contents}")
    values = getattr(contents, datatype.contents)
    return Tensor(name, datatype.name, gather(name, datatype, shape, values))


def _read_outputs(asked: pb.ModelInferRequest, regions: Regions) -> list[str]:
    for output in asked.outputs:
        if _number(output.parameters, "classification"):
            raise bad_request("classification is not supported; take the output and sort it")
        place = _place(output.parameters)
        if place is not None:
            regions.check(place)
    return [output.name for output in asked.outputs]


def write_response(
    response: InferResponse, asked: pb.ModelInferRequest, regions: Regions
) -> pb.ModelInferResponse:
    answer = pb.ModelInferResponse(
        model_name=response.model, model_version=response.version, id=response.id
    )
    places = {output.name: _place(output.parameters) for output in asked.outputs}
    for tensor in response.outputs:
        if places and tensor.name not in places:
            continue  # the core may compute more than was asked for
        answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.data.shape)
        raw = to_raw(tensor)
        place = places.get(tensor.name)
        if place is not None:
            regions.write(place, tensor.name, raw)
            raw = b""  # clients count: every output has its raw contents
        answer.raw_output_contents.append(bytes(raw))
    return answer

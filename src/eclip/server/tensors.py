"""The protocol's datatypes as NumPy arrays, read strictly and written without needless copies.

What comes from a client is refused with one line unless it is exactly what it says it is: datatype,
shape, number of elements and number of bytes agree. Arrays read from binary data are views of it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from eclip.server.limits import Limits
from eclip.server.messages import (
    Array,
    ModelInfo,
    Reason,
    RefusedError,
    Tensor,
    TensorInfo,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Datatype:
    name: str
    dtype: np.dtype[Any]
    json_types: frozenset[type] | None  # what an element may be in JSON; None: binary only
    contents: str | None  # the field of gRPC's typed contents; None: raw only

    def raw_bytes(self, shape: Sequence[int]) -> int | None:
        """How many bytes a tensor has; None where its elements' lengths decide."""
        return None if self.dtype.hasobject else math.prod(shape) * self.dtype.itemsize


_INTEGERS = frozenset({int})
_NUMBERS = frozenset({int, float})
DATATYPES = {
    datatype.name: datatype
    for datatype in (
        Datatype("BOOL", np.dtype(np.bool_), frozenset({bool}), "bool_contents"),
        Datatype("UINT8", np.dtype(np.uint8), _INTEGERS, "uint_contents"),
        Datatype("UINT16", np.dtype(np.uint16), _INTEGERS, "uint_contents"),
        Datatype("UINT32", np.dtype(np.uint32), _INTEGERS, "uint_contents"),
        Datatype("UINT64", np.dtype(np.uint64), _INTEGERS, "uint64_contents"),
        Datatype("INT8", np.dtype(np.int8), _INTEGERS, "int_contents"),
        Datatype("INT16", np.dtype(np.int16), _INTEGERS, "int_contents"),
        Datatype("INT32", np.dtype(np.int32), _INTEGERS, "int_contents"),
        Datatype("INT64", np.dtype(np.int64), _INTEGERS, "int64_contents"),
        Datatype("FP16", np.dtype(np.float16), None, None),
        Datatype("FP32", np.dtype(np.float32), _NUMBERS, "fp32_contents"),
        Datatype("FP64", np.dtype(np.float64), _NUMBERS, "fp64_contents"),
        Datatype("BYTES", np.dtype(object), frozenset({str}), "bytes_contents"),
        Datatype("BF16", np.dtype(np.uint16), None, None),  # bit patterns: NumPy has no such type
    )
}
_LENGTH = struct.Struct("<I")  # before every element of a BYTES tensor


def bad_request(line: str) -> RefusedError:
    return RefusedError(Reason.BAD_REQUEST, line)


def parse_json(text: memoryview | msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    """An error in it is the client's."""
    try:
        return decoder.decode(text)
    except RecursionError:
        raise bad_request("the JSON is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise bad_request(f"the JSON is not a valid request: {error}") from None


# --- What a tensor says of itself -------------------------------------------------------------


def check_shape(name: str, sizes: Sequence[int], limits: Limits) -> Shape:
    if len(sizes) > limits.dimensions:
        raise bad_request(f"tensor {name!r} has more than {limits.dimensions} dimensions")
    shape = tuple(sizes)  # once: protobuf makes its numbers anew whenever they are looked at
    if (shape and min(shape) < 0) or max(math.prod(shape), *shape, 0) > limits.elements:
        raise bad_request(
            f"tensor {name!r} has shape {list(shape)}; sizes must be positive and a tensor has at "
            f"most {limits.elements} elements"
        )
    return shape


def check_input(model: ModelInfo, name: str, datatype: str, shape: Shape) -> Datatype:
    """That the model has such an input, of this datatype and with room for this shape."""
    for info in model.inputs:
        if info.name == name:
            break
    else:
        known = ", ".join(info.name for info in model.inputs)
        raise bad_request(f"model {model.name!r} has no input {name!r}; its inputs: {known}")
    if datatype != info.datatype:
        raise bad_request(f"input {name!r} must be {info.datatype}, not {datatype!r}")
    check_fit(model, info, shape)
    return DATATYPES[datatype]


def check_fit(model: ModelInfo, info: TensorInfo, shape: Shape) -> None:
    rows = shape
    if model.max_batch > 0:
        rows = shape[1:]
        if not shape or not 1 <= shape[0] <= model.max_batch:
            raise bad_request(
                f"input {info.name!r} has shape {list(shape)}; the first dimension is the batch "
                f"and must be 1 to {model.max_batch}"
            )
    if len(rows) != len(info.shape) or any(
        size != allowed != -1 for size, allowed in zip(rows, info.shape, strict=True)
    ):
        batch = [-1] if model.max_batch > 0 else []
        raise bad_request(
            f"input {info.name!r} has shape {list(shape)}; the model expects "
            f"{[*batch, *info.shape]} (-1: any size)"
        )


def arrange_inputs(model: ModelInfo, inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """All inputs of the model, once each, in its order and with one batch."""
    given: dict[str, Tensor] = {}
    for tensor in inputs:
        if tensor.name in given:
            raise bad_request(f"input {tensor.name!r} is given twice")
        given[tensor.name] = tensor
    if len(given) < len(model.inputs):
        missing = ", ".join(info.name for info in model.inputs if info.name not in given)
        raise bad_request(f"model {model.name!r} also needs: {missing}")
    arranged = tuple(given[info.name] for info in model.inputs)
    if model.max_batch > 0 and len({tensor.data.shape[0] for tensor in arranged}) > 1:
        raise bad_request("inputs have different batches (first dimensions)")
    return arranged


def check_outputs(model: ModelInfo, names: Iterable[str]) -> tuple[str, ...]:
    """Names of outputs, each once; the model must have them."""
    wanted = tuple(dict.fromkeys(names))
    if not wanted:
        return ()
    known = {info.name for info in model.outputs}
    if unknown := [name for name in wanted if name not in known]:
        raise bad_request(
            f"model {model.name!r} has no output {unknown[0]!r}; its outputs: "
            f"{', '.join(sorted(known))}"
        )
    return wanted


# --- Reading ----------------------------------------------------------------------------------


def from_raw(name: str, datatype: Datatype, shape: Shape, raw: memoryview) -> Tensor:
    """A view of the bytes, or for BYTES its elements."""
    if datatype.dtype.hasobject:
        return Tensor(name, datatype.name, _split_bytes(name, shape, raw))
    expected = datatype.raw_bytes(shape)
    if len(raw) != expected:
        raise bad_request(
            f"input {name!r} has {len(raw)} bytes; {datatype.name} of shape {list(shape)} "
            f"has {expected}"
        )
    if datatype.name == "BOOL":
        return Tensor(name, datatype.name, _truths(raw).reshape(shape))
    return Tensor(name, datatype.name, np.frombuffer(raw, datatype.dtype).reshape(shape))


def _truths(raw: memoryview) -> Array:
    """A byte other than 0 and 1 is no bool to NumPy; here it counts as true."""
    numbers = np.frombuffer(raw, np.uint8)
    return (numbers if numbers.max(initial=0) <= 1 else (numbers != 0)).view(np.bool_)


def _split_bytes(name: str, shape: Shape, raw: memoryview) -> Array:
    elements = []
    place, end = 0, len(raw)
    count = math.prod(shape)
    if count * _LENGTH.size > end:  # before anything of that size is made
        raise bad_request(f"input {name!r} has too few bytes for {count} elements")
    while place < end:
        if end - place < _LENGTH.size:
            raise bad_request(f"input {name!r} ends within the length of an element")
        (length,) = _LENGTH.unpack_from(raw, place)
        place += _LENGTH.size
        if length > end - place:
            raise bad_request(f"input {name!r} ends within an element of {length} bytes")
        elements.append(bytes(raw[place : place + length]))
        place += length
    return gather(name, DATATYPES["BYTES"], shape, elements)


_any_json = msgspec.json.Decoder()


def from_json(name: str, datatype: Datatype, shape: Shape, data: msgspec.Raw) -> Tensor:
    """From nested or flat lists; only the shape says how elements are arranged."""
    if datatype.json_types is None:
        raise bad_request(f"{datatype.name} cannot be sent as JSON; send {name!r} as binary data")
    values = parse_json(data, _any_json)
    if type(values) is not list:
        raise bad_request(f"the data of input {name!r} must be a list")
    while list in (kinds := set(map(type, values))):
        values = [
            element for value in values for element in (value if type(value) is list else (value,))
        ]
    if not kinds <= datatype.json_types:
        allowed = " or ".join(sorted(kind.__name__ for kind in datatype.json_types))
        raise bad_request(f"elements of input {name!r} must be {allowed} for {datatype.name}")
    if datatype.dtype.hasobject:
        values = [value.encode() for value in values]
    return Tensor(name, datatype.name, gather(name, datatype, shape, values))


def gather(name: str, datatype: Datatype, shape: Shape, values: Sequence[Any]) -> Array:
    """An array of single elements, which must be as many as the shape says."""
    if len(values) != math.prod(shape):
        raise bad_request(
            f"input {name!r} has {len(values)} elements; shape {list(shape)} has {math.prod(shape)}"
        )
    if datatype.dtype.hasobject:
        elements = np.empty(len(values), object)
        elements[:] = values  # NumPy would look into a list that is given to its constructor
        return elements.reshape(shape)
    try:
        if datatype.dtype.kind != "f":
            return np.array(values, datatype.dtype).reshape(shape)
        with np.errstate(over="ignore"):  # too large for FP32 is infinite, as everywhere
            return np.array(values, datatype.dtype).reshape(shape)
    except OverflowError:
        raise bad_request(
            f"an element of input {name!r} is out of range for {datatype.name}"
        ) from None


# --- Writing ----------------------------------------------------------------------------------


def to_raw(tensor: Tensor) -> memoryview | bytes:
    """Its bytes as they are in memory, where it is contiguous: no copy."""
    data = tensor.data
    if data.dtype.hasobject:
        parts: list[bytes] = []
        for element in data.ravel().tolist():
            parts += (_LENGTH.pack(len(element)), element)
        return b"".join(parts)
    if data.size == 0:
        return b""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def to_json(tensor: Tensor) -> list[Any] | msgspec.Raw:
    """Its elements in one flat list."""
    datatype = DATATYPES[tensor.datatype]
    if datatype.json_types is None:
        raise bad_request(
            f"{datatype.name} cannot be sent as JSON; ask for {tensor.name!r} as binary data"
        )
    values: list[Any] = tensor.data.ravel().tolist()
    if datatype.dtype.hasobject:
        try:
            return [value.decode() for value in values]
        except UnicodeDecodeError:
            raise bad_request(
                f"output {tensor.name!r} is not text; ask for it as binary data"
            ) from None
    if datatype.dtype.kind == "f" and not np.isfinite(tensor.data).all():
        # NaN and Infinity are no JSON, but what clients of this protocol read and Triton writes.
        return msgspec.Raw(json.dumps(values).encode())
    return values

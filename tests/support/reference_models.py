"""NumPy models that eclip's test core and a real Triton (through pytriton) both serve.

It imports NumPy and nothing of eclip: Triton's Python is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Compute = Callable[[Mapping[str, Array]], Mapping[str, Array]]

NUMPY_TYPES: dict[str, type[np.generic] | type[bytes]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": bytes,
}


@dataclass(frozen=True)
class ReferenceModel:
    name: str
    inputs: Sequence[tuple[str, str, tuple[int, ...]]]  # name, datatype, shape without the batch
    outputs: Sequence[tuple[str, str, tuple[int, ...]]]
    max_batch: int  # 0: no batch dimension
    compute: Compute


def identity(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    return {"OUT": inputs["IN"]}


def add_sub(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    left, right = inputs["INPUT0"], inputs["INPUT1"]
    return {"OUTPUT0": np.add(left, right), "OUTPUT1": np.subtract(left, right)}


def upper(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    texts = inputs["TEXT"]
    raised = [text.upper() for text in texts.ravel().tolist()]
    answer = np.empty(len(raised), object)
    answer[:] = raised
    return {"UPPER": answer.reshape(texts.shape)}


MODELS = (
    *(
        ReferenceModel(
            f"identity_{datatype.lower()}",
            [("IN", datatype, (-1,))],
            [("OUT", datatype, (-1,))],
            8,
            identity,
        )
        for datatype in NUMPY_TYPES
    ),
    ReferenceModel(
        "add_sub",
        [("INPUT0", "INT32", (4,)), ("INPUT1", "INT32", (4,))],
        [("OUTPUT0", "INT32", (4,)), ("OUTPUT1", "INT32", (4,))],
        8,
        add_sub,
    ),
    ReferenceModel("pairs", [("IN", "FP32", (-1, 2))], [("OUT", "FP32", (-1, 2))], 0, identity),
    ReferenceModel("upper", [("TEXT", "BYTES", (-1,))], [("UPPER", "BYTES", (-1,))], 4, upper),
)

"""Models: what a service runs, and what its requests look like.

A CPU function takes a dictionary of arrays, the batch first, and returns one. On a simulator it
gives the answers. A service that has none there has one output, ``simulated_ms``: how long its
batch took on the simulated device. Answers are never made up. What needs torch is imported when a
GPU asks for it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eclip.errors import UsageError, unknown_name
from eclip.models import files, zoo
from eclip.models.zoo import transformer
from eclip.server.config import FUNCTION, ServiceSettings, TensorSettings
from eclip.server.link import IN_FLIGHT, SlotLayout
from eclip.server.messages import ModelInfo, TensorInfo
from eclip.server.tensors import DATATYPES

Arrays = Mapping[str, npt.NDArray[Any]]
CpuFunction = Callable[[Arrays], Arrays]

TIMING = TensorSettings(name="simulated_ms", datatype="FP64", shape=(1,))
_IMAGE = (3, 224, 224)
_CLASSES = 1000
_HIDDEN = 768
_OPEN_ROOM = 64 << 10  # bytes of a row whose size is left open


def tensors_of(
    settings: ServiceSettings, *, computed: bool
) -> tuple[tuple[TensorSettings, ...], tuple[TensorSettings, ...]]:
    """Inputs and outputs, as written or as the zoo has them. ``computed``: somebody computes."""
    inputs, outputs = settings.inputs, settings.outputs
    if not inputs or not outputs:
        known = _zoo_tensors(settings.model or "")
        if known is None:
            raise UsageError(
                f"service {settings.name!r}: inputs and outputs are needed, with name, datatype "
                f"and shape; only the zoo's are known ({', '.join(zoo.NAMES)})"
            )
        inputs, outputs = inputs or known[0], outputs or known[1]
    return inputs, outputs if computed else (TIMING,)


def info_of(
    settings: ServiceSettings,
    inputs: tuple[TensorSettings, ...],
    outputs: tuple[TensorSettings, ...],
    largest: int,
) -> ModelInfo:
    return ModelInfo(
        name=settings.name,
        inputs=tuple(TensorInfo(one.name, one.datatype, one.shape) for one in inputs),
        outputs=tuple(TensorInfo(one.name, one.datatype, one.shape) for one in outputs),
        max_batch=largest if settings.batched else 0,
    )


def slots_of(
    settings: ServiceSettings,
    inputs: tuple[TensorSettings, ...],
    outputs: tuple[TensorSettings, ...],
    largest: int,
) -> SlotLayout:
    """Room for full batches: those on the device, and one that is being filled."""
    return SlotLayout(
        inputs=tuple(largest * _row_bytes(one) for one in inputs),
        outputs=tuple(largest * _row_bytes(one) for one in outputs),
        count=IN_FLIGHT * settings.replicas + 1,
    )


def find_function(reference: str) -> CpuFunction:
    """``module:function``, as the configuration names it."""
    module, _, name = reference.partition(":")
    try:
        function: CpuFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot find the function {reference}: {error}") from None
    if not callable(function):
        raise UsageError(f"{reference} is no function")
    return function


def function_of(settings: ServiceSettings) -> str | None:
    if settings.model is None or not settings.computes_on_cpu:
        return None
    return settings.model.removeprefix(FUNCTION)


def compute(
    function: CpuFunction, inputs: Arrays, info: ModelInfo, rows: int
) -> list[npt.NDArray[Any]]:
    """The function's outputs in the model's order, which must be what was promised."""
    outputs = function(inputs)
    found = []
    for wanted in info.outputs:
        if wanted.name not in outputs:
            raise UsageError(f"{info.name} gave no output {wanted.name!r}")
        array = np.asarray(outputs[wanted.name])
        shape = (rows, *wanted.shape) if info.max_batch else wanted.shape
        dtype = DATATYPES[wanted.datatype].dtype
        fits = len(array.shape) == len(shape) and all(
            asked in (-1, size) for asked, size in zip(shape, array.shape, strict=True)
        )
        if array.dtype != dtype or not fits:
            raise UsageError(
                f"{info.name} gave {wanted.name!r} as {array.dtype}{list(array.shape)}, not as "
                f"{wanted.datatype}{list(shape)}"
            )
        found.append(array)
    return found


def example_inputs(info: ModelInfo, rows: int) -> dict[str, npt.NDArray[Any]]:
    """Inputs to warm a function with: zeros, and empty texts."""
    examples: dict[str, npt.NDArray[Any]] = {}
    for tensor in info.inputs:
        shape = tuple(max(size, 1) for size in tensor.shape)
        shape = (rows, *shape) if info.max_batch else shape
        if tensor.datatype == "BYTES":
            examples[tensor.name] = np.full(shape, b"", dtype=object)
        else:
            examples[tensor.name] = np.zeros(shape, DATATYPES[tensor.datatype].dtype)
    return examples


def announce_files(services: Iterable[ServiceSettings]) -> None:
    """So that this process and those that it starts find the models of these services."""
    files.announce(
        {
            files.name_of(one.name): files.FileModel(
                file=str(Path(one.file).resolve()),
                inputs=tuple((_torch_type(given.datatype), given.shape) for given in one.inputs),
                batched=one.batched,
            )
            for one in services
            if one.file is not None
        }
    )


def _torch_type(datatype: str) -> str:
    """``FP16`` is float16, ``BF16`` bfloat16, ``INT64`` int64."""
    return datatype.replace("FP", "float").replace("BF", "bfloat").lower()


def check_file(settings: ServiceSettings, file: str) -> None:
    """Refuse a file that cannot be served where it must be loaded: on a GPU."""
    if not Path(file).is_file():
        raise UsageError(f"service {settings.name!r}: file: there is no file {file}")
    if not settings.inputs or any(
        one.datatype == "BYTES" or -1 in one.shape for one in settings.inputs
    ):
        raise UsageError(
            f"service {settings.name!r}: file: its inputs are needed, with a datatype other than "
            f"BYTES and a shape without -1"
        )


def check_model(settings: ServiceSettings) -> None:
    """Refuse a name that means nothing, before anything is opened."""
    model = settings.model
    if model is not None and ":" not in model and model.partition("~")[0] not in zoo.NAMES:
        known = [*zoo.NAMES, "module:factory", "numpy:module:function"]
        raise UsageError(f"service {settings.name!r}: {unknown_name('model', model, known)}")


def _zoo_tensors(
    model: str,
) -> tuple[tuple[TensorSettings, ...], tuple[TensorSettings, ...]] | None:
    name = model.partition("~")[0]
    if name not in zoo.NAMES:
        return None
    if zoo.inputs(name, 1)[0].startswith("int64"):
        tokens = TensorSettings(name="tokens", datatype="INT64", shape=(transformer.TOKENS,))
        hidden = (transformer.TOKENS, _HIDDEN)
        return (tokens,), (TensorSettings(name="hidden", datatype="FP16", shape=hidden),)
    image = TensorSettings(name="image", datatype="FP16", shape=_IMAGE)
    return (image,), (TensorSettings(name="scores", datatype="FP16", shape=(_CLASSES,)),)


def _row_bytes(tensor: TensorSettings) -> int:
    if tensor.room is not None:
        return tensor.room
    if tensor.datatype == "BYTES" or -1 in tensor.shape:
        return _OPEN_ROOM
    return math.prod(tensor.shape) * DATATYPES[tensor.datatype].dtype.itemsize

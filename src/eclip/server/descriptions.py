"""What a server says of itself and its models, in the words of the protocol.

HTTP sends these as JSON; gRPC's messages have the same names and are made from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from importlib import metadata
from typing import Any

from eclip.server.messages import Core, ModelInfo, Phase, Reason, RefusedError, TensorInfo
from eclip.server.tensors import bad_request

Description = dict[str, Any]

EXTENSIONS = (
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


def find_model(core: Core, name: str, version: str = "") -> ModelInfo:
    model = core.models.get(name)
    if model is None:
        raise RefusedError(Reason.UNKNOWN_MODEL, f"there is no model {name!r}")
    if version not in ("", model.version):
        raise RefusedError(
            Reason.UNKNOWN_MODEL, f"model {name!r} has version {model.version}, not {version!r}"
        )
    return model


def refuse_overrides(parameters: Collection[str]) -> None:
    """A model's settings are the server's file; a client cannot bring others with a load."""
    given = [name for name in parameters if name == "config" or name.startswith("file:")]
    if given:
        raise bad_request(
            f"a load cannot bring {given[0][:100]!r}: settings of a model are in the server's "
            f"file; change them there and send SIGHUP"
        )


def is_ready(core: Core, name: str, version: str = "") -> bool:
    model = core.models.get(name)
    return model is not None and version in ("", model.version) and core.why_not_ready(name) is None


def describe_server() -> Description:
    return {"name": "eclip", "version": metadata.version("eclip"), "extensions": EXTENSIONS}


def describe_model(model: ModelInfo) -> Description:
    batch = [-1] if model.max_batch > 0 else []

    def describe(tensors: Sequence[TensorInfo]) -> list[Description]:
        return [
            {"name": info.name, "datatype": info.datatype, "shape": [*batch, *info.shape]}
            for info in tensors
        ]

    return {
        "name": model.name,
        "versions": [model.version],
        "platform": model.platform,
        "inputs": describe(model.inputs),
        "outputs": describe(model.outputs),
    }


def describe_configuration(model: ModelInfo) -> Description:
    def describe(tensors: Sequence[TensorInfo]) -> list[Description]:
        return [
            {
                "name": info.name,
                "data_type": f"TYPE_{info.datatype.replace('BYTES', 'STRING')}",
                "dims": list(info.shape),
            }
            for info in tensors
        ]

    return {
        "name": model.name,
        "platform": "",
        "backend": model.platform,
        "max_batch_size": model.max_batch,
        "input": describe(model.inputs),
        "output": describe(model.outputs),
    }


def describe_statistics(core: Core, models: Sequence[ModelInfo]) -> Description:
    return {"model_stats": [_statistics(core, model) for model in models]}


def _statistics(core: Core, model: ModelInfo) -> Description:
    statistics = core.statistics(model.name)
    phases = {
        name: getattr(statistics, name)
        for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    }
    phases |= {"cache_hit": Phase(), "cache_miss": Phase()}  # there is no response cache
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": statistics.last_ms,
        "inference_count": statistics.inferences,
        "execution_count": statistics.executions,
        "inference_stats": {name: dataclasses.asdict(phase) for name, phase in phases.items()},
    }


def describe_repository(core: Core, ready_only: bool) -> list[Description]:
    index = []
    for model in core.models.values():
        why = core.why_not_ready(model.name)
        if why is None:
            state = {"state": "READY"}
        elif not ready_only:
            state = {"state": "UNAVAILABLE", "reason": why}
        else:
            continue
        index.append({"name": model.name, "version": model.version, **state})
    return index

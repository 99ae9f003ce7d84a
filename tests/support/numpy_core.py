"""A small core that computes with NumPy in the event loop: what protocols are tested against."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from eclip.server.messages import (
    Counters,
    DeviceCounters,
    DeviceState,
    InferRequest,
    InferResponse,
    ModelInfo,
    Reason,
    RefusedError,
    ServerState,
    ServiceCounters,
    ServiceState,
    Statistics,
    Tensor,
    TensorInfo,
)
from reference_models import MODELS, ReferenceModel, identity

_EXTRA = (
    ReferenceModel("identity_bf16", [("IN", "BF16", (-1,))], [("OUT", "BF16", (-1,))], 8, identity),
    ReferenceModel(
        "image", [("IN", "FP32", (3, 224, 224))], [("OUT", "FP32", (3, 224, 224))], 8, identity
    ),
    # Those below answer in their own way: see NumpyCore.infer.
    ReferenceModel("slow", [("IN", "FP32", (-1,))], [("OUT", "FP32", (-1,))], 8, identity),
    ReferenceModel("full", [("IN", "FP32", (-1,))], [("OUT", "FP32", (-1,))], 8, identity),
    ReferenceModel("journal", [("IN", "FP32", (-1,))], [("OUT", "BYTES", (-1,))], 0, identity),
    ReferenceModel("broken", [("IN", "FP32", (-1,))], [("OUT", "FP32", (-1,))], 8, identity),
)  # fmt: skip


def describe(model: ReferenceModel) -> ModelInfo:
    return ModelInfo(
        model.name,
        tuple(TensorInfo(*tensor) for tensor in model.inputs),
        tuple(TensorInfo(*tensor) for tensor in model.outputs),
        model.max_batch,
        "python",
    )


class NumpyCore:
    def __init__(self, idle_models: int = 0) -> None:
        tensors = [("IN", "FP32", (-1,))], [("OUT", "FP32", (-1,))]
        idle = [
            ReferenceModel(f"idle{index}", *tensors, 8, identity) for index in range(idle_models)
        ]
        self._models = {model.name: model for model in (*MODELS, *_EXTRA, *idle)}
        self._infos = {name: describe(model) for name, model in self._models.items()}
        self._loaded = set(self._models)
        self._statistics = {name: Statistics() for name in self._models}
        self._datatypes = {
            name: {output: datatype for output, datatype, _ in model.outputs}
            for name, model in self._models.items()
        }
        self.refused: Counter[tuple[str, Reason]] = Counter()
        self._journal: list[dict[str, Any]] = []  # what was told and what happened to ``slow``
        self._connections = self._connected = 0
        self._started_s = time.monotonic()
        self.live = True
        self.ready = True
        self.started = True

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        return self._infos

    def why_not_ready(self, name: str) -> str | None:
        return None if name in self._loaded else "it is not loaded"

    def statistics(self, name: str) -> Statistics:
        return self._statistics[name]

    def slack_ns(self, name: str) -> float | None:
        return None  # no model has a bound

    async def infer(self, request: InferRequest) -> InferResponse:
        statistics = self._statistics[request.model]
        if request.model not in self._loaded:
            raise RefusedError(Reason.NOT_READY, f"model {request.model!r} is not loaded", 2.0)
        if request.model == "full":
            raise RefusedError(Reason.OVERLOADED, "model 'full' has a full queue", 0.2)
        if request.model == "broken":
            raise ZeroDivisionError
        if request.model == "journal":
            return self._read(request)
        if request.model == "slow":
            await self._linger(request)
        inputs = {tensor.name: tensor.data for tensor in request.inputs}
        outputs = self._models[request.model].compute(inputs)
        datatypes = self._datatypes[request.model]
        statistics.success.count += 1
        statistics.success.ns += time.monotonic_ns() - request.arrival_ns
        statistics.executions += 1
        statistics.inferences += 1
        return InferResponse(
            request.model,
            [Tensor(name, datatypes[name], data) for name, data in outputs.items()],
            request.id,
        )

    async def _linger(self, request: InferRequest) -> None:
        """As many seconds as its input says, or until its time is over."""
        self._write("told", request)
        seconds = float(np.max(request.inputs[0].data.astype(np.float64)))
        try:
            if request.timeout_ns is None:
                await asyncio.sleep(seconds)
            else:
                async with asyncio.timeout(request.timeout_ns / 1e9):
                    await asyncio.sleep(seconds)
        except TimeoutError:
            raise RefusedError(Reason.EXPIRED, "the request's time is over") from None
        except asyncio.CancelledError:
            self._write("cancelled", request)
            raise

    def _write(self, event: str, request: InferRequest) -> None:
        entry = {
            "event": event,
            "id": request.id,
            "timeout_ns": request.timeout_ns,
            "priority": request.priority,
            "outputs": list(request.outputs),
        }
        self._journal.append(entry)

    def _read(self, request: InferRequest) -> InferResponse:
        """The journal, so that a test in another process sees it."""
        lines = np.empty(len(self._journal), object)
        lines[:] = [json.dumps(entry).encode() for entry in self._journal]
        return InferResponse(request.model, [Tensor("OUT", "BYTES", lines)], request.id)

    def refuse(self, model: str, reason: Reason) -> None:
        self.refused[model, reason] += 1

    def count_connections(self, change: int) -> None:
        self._connections += change
        self._connected += change > 0

    def counters(self) -> Counters:
        services = {}
        nobody = {reason: self.refused["", reason] for reason in Reason if self.refused["", reason]}
        if nobody:
            services[""] = ServiceCounters(refused=nobody)
        for name in sorted(self._models):
            statistics = self._statistics[name]
            services[name] = ServiceCounters(
                statistics,
                refused={reason: self.refused[name, reason] for reason in Reason},
                bound_s=0.005,
            )
            services[name].latency.buckets[3] = statistics.success.count  # type: ignore[index]
            services[name].latency.total_s = statistics.success.ns / 1e9
        return Counters(
            services, {"sim": DeviceCounters(0.5, 321.0)}, self._connections, self._connected
        )

    def state(self) -> ServerState:
        """Numbers that a page can draw; they move."""
        now_s = time.monotonic() - self._started_s

        def service(name: str, first: int, last: int, bound_ms: float | None) -> ServiceState:
            p99_ms = 3 + 2.5 * math.sin(now_s / 3 + first)
            return ServiceState(
                name=name,
                tier="background" if bound_ms is None else "service",
                ready=name in self._loaded,
                rate_rps=100.0 + first,
                goodput_rps=99.0,
                p50_ms=None if bound_ms is None else 1.25,
                p99_ms=None if bound_ms is None else p99_ms,
                bound_ms=bound_ms,
                waiting=first,
                running=1,
                refused_rps=0.5,
                yields_rps=0.0 if bound_ms is not None else 1200.0,
                slices=tuple(range(first, last)),
                active=math.sin(now_s + first) > 0,
            )

        services = [
            service("image", 0, 6, 5.0),
            service("upper", 4, 12, 3.0),
            service("<script>pairs</script>", 0, 16, None),
        ]
        device = DeviceState("h200", 16, 0.63, 321.0, 0, "searched for 20 s", tuple(services))
        return ServerState("0.1.0", now_s, self.ready, "a new plan is being searched", (device,))

    async def load(self, name: str) -> None:
        self._known(name)
        self._loaded.add(name)

    async def unload(self, name: str) -> None:
        self._known(name)
        self._loaded.discard(name)

    def _known(self, name: str) -> None:
        if name not in self._models:
            raise RefusedError(Reason.UNKNOWN_MODEL, f"there is no model {name!r}")

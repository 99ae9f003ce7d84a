"""Load that is offered to servers: the services of a mix, and who of them is answered in time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eclip.core.model_key import ModelKey
from eclip.models.library import find_profile
from eclip.planner.case import find_calibration, find_topology
from eclip.server.messages import ModelInfo, RefusedError
from eclip.server.tensors import DATATYPES
from served_core import Driver, request

MIXES = {
    "three": ("resnet50", "bert", "densenet121"),
    "four": ("resnet152", "vit_b_16", "gpt2", "efficientnet"),
    "five": ("albert", "vgg19", "convnext", "shufflenet", "resnext101"),
    "six": ("bert", "resnet50", "mobilenet_v3", "densenet201", "vit_b_16", "alexnet"),
}
EXPECTED_LOAD = 1.0
BATCHES = (1, 8)
MOST_OF_BOUND = 0.7  # that a batch may take: a larger one would be late too often
LEAD_S = 0.05  # from the call to the time that arrivals count from


@dataclass(frozen=True)
class Service:
    name: str
    rest_ms: float  # of one request with the device to itself
    bound_ms: float
    batches: tuple[int, ...]
    share: float  # of the load

    def rate_rps(self, load: float) -> float:
        return 1e3 * load * self.share / self.rest_ms

    def settings(self) -> dict[str, Any]:
        """As a server's configuration has them. All servers expect the same rate, by which they
        choose their instances."""
        return {
            "name": self.name,
            "model": self.name,
            "bound": f"{self.bound_ms:.3f}ms",
            "rate": self.rate_rps(EXPECTED_LOAD),
            "batches": list(self.batches),
        }


def services_of(mix: str, times: float) -> list[Service]:
    """Bounds are so many times what a request takes at rest. All have equal shares of the load."""
    return _services(dict.fromkeys(MIXES[mix], 1.0), BATCHES, times)


def random_services(seed: int, times: float) -> list[Service]:
    random = np.random.default_rng(seed)
    models = sorted({name for names in MIXES.values() for name in names})
    chosen = random.choice(models, random.integers(2, 7), replace=False).tolist()
    weights = {name: float(2 ** random.uniform(-1, 1)) for name in chosen}
    return _services(weights, (*BATCHES, 32) if random.random() < 0.5 else BATCHES, times)


def _services(weights: dict[str, float], batches: Sequence[int], times: float) -> list[Service]:
    topology = find_topology("h200")
    calibration = find_calibration(None, topology)

    def takes_ms(name: str, batch: int) -> float:
        profile = find_profile(ModelKey(name, batch), topology, calibration, [])
        return float(profile.request_ns[-1] / 1e6)

    services = []
    for name, weight in weights.items():
        rest_ms = takes_ms(name, 1)
        bound_ms = times * rest_ms
        fitting = tuple(
            size for size in batches if takes_ms(name, size) <= MOST_OF_BOUND * bound_ms
        )
        share = weight / sum(weights.values())
        services.append(Service(name, rest_ms, bound_ms, fitting, share))
    return services


def arrivals_of(
    services: Sequence[Service], load: float, seconds: float
) -> list[tuple[float, Service]]:
    """Poisson arrivals, the same ones for every way. A higher load has the same gaps, shortened:
    so chance, too, is the same at every load."""
    due: list[tuple[float, Service]] = []
    for place, service in enumerate(services):
        random, at_s = np.random.default_rng(place), 0.0
        while (at_s := at_s + random.exponential(1 / service.rate_rps(load))) < seconds:
            due.append((at_s, service))
    return sorted(due, key=lambda pair: pair[0])


def zeros(model: ModelInfo, rows: int) -> dict[str, npt.NDArray[Any]]:
    """Inputs: what is computed does not depend on their values."""
    return {
        tensor.name: np.zeros((rows, *tensor.shape), DATATYPES[tensor.datatype].dtype)
        for tensor in model.inputs
    }


class Front:
    """Sends requests when they are due, and sees which are answered within their bounds."""

    def __init__(self, driver: Driver, services: Sequence[Service]) -> None:
        self._driver, self._services = driver, services
        self._cores = {name: one.core for one in driver.servers for name in one.core.models}
        self._inputs = {
            service.name: zeros(self._cores[service.name].models[service.name], 1)
            for service in services
        }
        # A collection of all that was imported stops the front for 60 ms (measured on two busy
        # cores): 2% of the requests of a run would be late.
        gc.collect()
        gc.freeze()

    def run(self, load: float, seconds: float) -> dict[str, Any]:
        due = arrivals_of(self._services, load, seconds)
        return {"load": load} | self._driver(self._send(due), 60.0 + 10 * seconds)

    def rest_ms(self, requests: int = 30) -> dict[str, float]:
        """Of every service: what a request takes when nothing else is asked, the front included."""
        return self._driver(self._rest_ms(requests))

    async def _rest_ms(self, requests: int) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        medians = {}
        for service in self._services:
            took_s = []
            for _ in range(requests):
                begin_s = loop.time()
                await self._infer(service)
                took_s.append(loop.time() - begin_s)
            medians[service.name] = 1e3 * float(np.median(took_s))
        return medians

    async def _infer(self, service: Service) -> None:
        asked = request(service.name, self._inputs[service.name])
        await self._cores[service.name].infer(asked)

    async def _send(self, due: Sequence[tuple[float, Service]]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        tally = Tally(self._services)
        begin_s = loop.time() + LEAD_S
        asked = []
        for at_s, service in due:
            while (left_s := begin_s + at_s - loop.time()) > 0:
                await asyncio.sleep(left_s - 1e-3 if left_s > 2e-3 else 0)
            tally.late_s.append(-left_s)
            asked.append(asyncio.ensure_future(self._ask(service, begin_s + at_s, tally)))
        await asyncio.gather(*asked)
        return tally.row()

    async def _ask(self, service: Service, due_s: float, tally: Tally) -> None:
        """A request that is refused has missed its bound."""
        took_s = float("inf")
        try:
            await self._infer(service)
            took_s = asyncio.get_running_loop().time() - due_s
        except RefusedError:
            pass
        tally.count(service, 1e3 * took_s <= service.bound_ms)


class Tally:
    def __init__(self, services: Sequence[Service]) -> None:
        self.late_s: list[float] = []  # the generator itself, of every request
        self._asked = {service.name: 0 for service in services}
        self._within = dict(self._asked)

    def count(self, service: Service, within: bool) -> None:
        self._asked[service.name] += 1
        self._within[service.name] += within

    def row(self) -> dict[str, Any]:
        parts = {name: self._within[name] / asked for name, asked in self._asked.items() if asked}
        total = sum(self._asked.values())
        return {
            "requests": total,
            "attained": sum(self._within.values()) / total if total else 0.0,
            "worst": min(parts.values(), default=0.0),
            "services": parts,
            "generator_late_ms": 1e3 * float(np.percentile(self.late_s, 99)) if total else 0.0,
        }

"""The controller's handles to the actors of a fleet.

Liveness is taken from Ray: a node is gone if Ray's list says so, and Ray restarts an actor that
does not answer. This module sends no heartbeats.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import ActorDiedError, RayError

from eclip.fleet.config import RouterSettings
from eclip.fleet.orders import GpuOrder, GpuPlace, RoutingTable
from eclip.fleet.place.spec import Fleet, GpuId, gpu_ids
from eclip.fleet.rates import RouterReport
from eclip.fleet.ray.actors import GpuActor, RouterActor, gpu_actor_name, router_name
from eclip.fleet.ray.cluster import MACHINE

ANSWER_S = 1.0  # for small questions
_ADOPT_S = _LEAVE_S = 10.0
_ROUTERS_S = 60.0  # for routers to start
Key = TypeVar("Key")
_DEPLOY_S = 600.0
# Ray keeps them: they live until they are killed, and take no CPU from its accounts.
KEPT: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": -1,
    "lifetime": "detached",
    "get_if_exists": True,
}


class GpuHandles:
    """The GPUs' actors, with their configurations (``orders``) and addresses (``places``)."""

    def __init__(self) -> None:
        self.orders: dict[GpuId, GpuOrder] = {}
        self.places: dict[GpuId, GpuPlace] = {}
        self._actors: dict[GpuId, Any] = {}
        self._lock = threading.Lock()  # of orders and places: Ray calls from other threads

    def adopt(self, fleet: Fleet) -> None:
        """Take over running actors; an actor whose GPU has left the file is ended."""
        known = {gpu_actor_name(gpu): gpu for gpu in gpu_ids(fleet)}
        for name in ray.util.list_named_actors():
            if not name.startswith(gpu_actor_name("")):
                continue
            actor = ray.get_actor(name)
            if name not in known:
                ray.kill(actor)
                continue
            self._actors[known[name]] = actor
        calls = {gpu: actor.running.remote() for gpu, actor in self._actors.items()}
        for gpu, running in answers_to(calls, _ADOPT_S).items():
            if isinstance(running, tuple):  # not an error, and not nothing
                self.orders[gpu], self.places[gpu] = running

    @property
    def gpus(self) -> list[GpuId]:
        """The GPUs of all actors, idle actors included."""
        return list(self._actors)

    def start(self, orders: Iterable[GpuOrder]) -> None:
        """Start all at the same time; returns when they serve."""
        waiting = {}
        for order in orders:
            self._note(order)
            waiting[order.gpu] = self._actor(order.gpu).running.remote()
        for gpu, answer in waiting.items():
            running = ray.get(answer, timeout=_DEPLOY_S)
            if running is None or running[0] != self.orders[gpu]:  # an actor with another order
                self.deploy(self.orders[gpu])
            else:
                self.arrived(running[1])

    def deploy(self, order: GpuOrder) -> None:
        """Deploy the order; returns when the GPU serves it."""
        self._note(order)
        self.arrived(ray.get(self._actor(order.gpu).deploy.remote(order), timeout=_DEPLOY_S))

    def arrived(self, place: GpuPlace) -> None:
        with self._lock:
            self.places[place.gpu] = place

    def lose(self, gpus: Iterable[GpuId]) -> None:
        """Drop the addresses of GPUs that are gone, so that no request is sent there."""
        with self._lock:
            for gpu in gpus:
                self.places.pop(gpu, None)

    def end(self, gpus: Iterable[GpuId], seconds: float = _LEAVE_S) -> None:
        """Answer open requests there for up to ``seconds``, then end the actors."""
        leaving = []
        for gpu in list(gpus):
            with self._lock:
                self.orders.pop(gpu, None)
                self.places.pop(gpu, None)
            if gpu in self._actors:
                leaving.append(self._actors.pop(gpu))
        end_all(leaving, seconds)

    def look(self) -> bool:
        """True if any address changed. Actors that Ray has given up are created again."""
        before = dict(self.places)
        calls = {gpu: actor.running.remote() for gpu, actor in self._actors.items()}
        for gpu, running in answers_to(calls).items():
            if isinstance(running, ActorDiedError):
                del self._actors[gpu]
                self.start([self.orders[gpu]])
            elif isinstance(running, RayError):
                self.lose([gpu])  # Ray restarts the actor, which then reports its place
            elif running is not None:
                self.arrived(running[1])
        return before != self.places

    def _note(self, order: GpuOrder) -> None:
        with self._lock:
            self.orders[order.gpu] = order

    def _actor(self, gpu: GpuId) -> Any:
        if gpu not in self._actors:
            options = ray.remote(GpuActor).options(
                name=gpu_actor_name(gpu),
                resources={gpu.kind: 1},
                num_gpus=1 if _has_gpus(gpu.machine) else 0,
                label_selector={MACHINE: gpu.machine},
                max_concurrency=4,
                **KEPT,
            )
            self._actors[gpu] = options.remote(gpu)
        return self._actors[gpu]


class RouterHandles:
    """The routers, dealt to the machines in turn."""

    def __init__(self, settings: RouterSettings, fleet: Fleet) -> None:
        self.reports: tuple[RouterReport, ...] = ()
        self._settings = settings
        self._machines = list(dict.fromkeys(group.machine for group in fleet.gpus))
        self._actors: dict[int, Any] = {}

    def start(self) -> None:
        """Start missing routers; returns when they take requests."""
        for number in range(self._settings.count):
            if number not in self._actors:
                machine = self._machines[number % len(self._machines)]
                options = ray.remote(RouterActor).options(
                    name=router_name(number),
                    label_selector={MACHINE: machine},
                    max_concurrency=4,
                    **KEPT,
                )
                self._actors[number] = options.remote(number, self._settings)
        calls = {number: router.report.remote() for number, router in self._actors.items()}
        answers = answers_to(calls, _ROUTERS_S)
        for number, answer in answers.items():
            if isinstance(answer, ActorDiedError):
                del self._actors[number]
                raise answer  # an error at start, which a restart would not mend
        self._note(answers.values())

    def tell(self, table: RoutingTable) -> None:
        """Send the table to the running routers; returns when they have taken it."""
        answers = [router.take.remote(table) for router in self._actors.values()]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=ANSWER_S)

    def look(self) -> None:
        calls = {number: router.report.remote() for number, router in self._actors.items()}
        answers = answers_to(calls)
        for number, answer in answers.items():
            if isinstance(answer, ActorDiedError):
                del self._actors[number]
        self._note(answers.values())
        if len(self._actors) < self._settings.count:
            self.start()

    def _note(self, answers: Iterable[Any]) -> None:
        """Keep the routers' reports. Routers without an answer are restarted by Ray, or wait for
        their machine."""
        self.reports = tuple(one for one in answers if isinstance(one, RouterReport))

    def end(self) -> None:
        end_all(self._actors.values(), 40.0)
        self._actors.clear()


def answers_to(calls: Mapping[Key, Any], seconds: float = ANSWER_S) -> dict[Key, Any]:
    """Result or RayError per call; calls that take longer than ``seconds`` are missing."""
    if not calls:
        return {}
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=seconds)
    found: dict[Key, Any] = {}
    for key, call in calls.items():
        if call in ready:
            try:
                found[key] = ray.get(call)
            except RayError as error:
                found[key] = error
    return found


def fleet_there(fleet: Fleet) -> Fleet:
    """The fleet without GPUs on nodes that Ray does not list as alive."""
    groups = []
    for group in fleet.gpus:
        count = sum(int(node["Resources"].get(group.kind, 0)) for node in _nodes(group.machine))
        if count:
            groups.append(msgspec.structs.replace(group, count=min(count, group.count)))
    return msgspec.structs.replace(fleet, gpus=tuple(groups))


def end_all(actors: Iterable[Any], seconds: float) -> None:
    actors = list(actors)
    answers = [actor.leave.remote() for actor in actors]
    if answers:
        ray.wait(answers, num_returns=len(answers), timeout=seconds)
    for actor in actors:
        ray.kill(actor)


def _nodes(machine: str) -> list[Mapping[str, Any]]:
    return [
        node for node in ray.nodes() if node["Alive"] and node["Labels"].get(MACHINE) == machine
    ]


def _has_gpus(machine: str) -> bool:
    """True if Ray knows real GPUs there; Ray then shows an actor its own GPU only."""
    return any("GPU" in node["Resources"] for node in _nodes(machine))

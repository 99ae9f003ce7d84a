"""Serving while something changes or dies: models, configurations, rates and processes. The
processes are real; the test itself is the front, so that it sees every answer."""

from __future__ import annotations

import asyncio
import collections
import os
import signal

import msgspec
import numpy as np
import pytest

from eclip.errors import DeviceError, UsageError
from eclip.server.control import Deployment
from eclip.server.counters import Count
from eclip.server.messages import Reason, RefusedError
from eclip.server.supervisor import device_keeper, drift
from eclip.server.supervisor.planner_process import PlanRequest
from served_core import (
    ADD,
    DIGITS,
    SHOUT,
    Driver,
    Served,
    add_request,
    config_of,
    held,
    named,
    output,
    request,
)

CONFIG = config_of(
    {**DIGITS, "bound": "2s"},
    {**ADD, "instances": 2, "queue": 100_000},
    {"name": "timed", "model": "alexnet", "batches": [1]},
    {**ADD, "name": "later", "load": False},
)


class Load:
    """Requests that keep coming; every answer is looked at."""

    def __init__(self, served: Served, every_s: float = 0.004) -> None:
        self.seen: collections.Counter[str] = collections.Counter()
        self._core = served.core
        self._every_s = every_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._sent = 0
        self._over = False

    async def _one(self, number: int) -> None:
        try:
            response = await self._core.infer(add_request(number))
            right = output(response, "sum").tolist() == [[2 * number + 1] * 4]
            self.seen["right" if right else "wrong"] += 1
        except RefusedError as error:
            self.seen[error.reason.value] += 1

    async def __aenter__(self) -> Load:
        self._sender = asyncio.ensure_future(self._send())
        return self

    async def _send(self) -> None:
        while not self._over:
            task = asyncio.ensure_future(self._one(self._sent))
            self._tasks.add(task)
            self._sent += 1
            await asyncio.sleep(self._every_s)

    async def __aexit__(self, *error: object) -> None:
        self._over = True
        await self._sender
        await asyncio.gather(*self._tasks)
        assert sum(self.seen.values()) == self._sent  # each exactly once


def test_models_are_loaded_and_unloaded_while_others_serve(driver: Driver, served: Served) -> None:
    async def change() -> collections.Counter[str]:
        async with Load(served) as load:
            with pytest.raises(RefusedError, match="later is not loaded: load it first"):
                await served.core.infer(named(add_request(1), "later"))
            await served.core.load("later")
            assert served.core.why_not_ready("later") is None
            await served.core.infer(named(add_request(1), "later"))
            await served.core.unload("later")
            assert served.core.why_not_ready("later") == "it is not loaded"
            with pytest.raises(RefusedError, match="there is no model 'nobody'"):
                await served.core.load("nobody")
        return load.seen

    assert set(driver(change())) == {"right"}


def test_a_new_configuration_drops_nothing(driver: Driver, served: Served) -> None:
    """Another bound keeps the service as it is; other batches are another service."""

    async def reload() -> collections.Counter[str]:
        supervisor = served.supervisor
        changed = [
            msgspec.structs.replace(one, bound="60s", batches=(1, 2)) if one.name == "add" else one
            for one in CONFIG.services
            if one.name != "timed"
        ]
        async with Load(served) as load:
            await supervisor.reload(msgspec.structs.replace(CONFIG, services=tuple(changed)))
            assert "timed" not in served.core.models
            assert served.core.models["add"].max_batch == 2
            await supervisor.reload(CONFIG)
        return load.seen

    assert set(driver(reload())) == {"right"}
    assert served.core.models["add"].max_batch == 4


def test_another_policy_is_taken_and_other_settings_of_the_server_are_not(
    driver: Driver, served: Served
) -> None:
    """A fleet may place a GPU's services anew under another policy."""
    other = msgspec.structs.replace(CONFIG.server, policy="shared", grace_seconds=7.0)
    driver(served.supervisor.reload(msgspec.structs.replace(CONFIG, server=other)))
    assert served.supervisor.services.deployed.policy == "shared"
    assert served.supervisor.config.server.grace_seconds == CONFIG.server.grace_seconds
    assert "changes of [server] need a restart" in served.log.getvalue()
    driver(served.core.infer(add_request(1)))
    driver(served.supervisor.reload(CONFIG))
    assert served.supervisor.services.deployed.policy != "shared"


def test_a_bad_configuration_changes_nothing(driver: Driver, served: Served) -> None:
    changed = [
        msgspec.structs.replace(one, bound="1us") if one.name == "add" else one
        for one in CONFIG.services
    ]
    with pytest.raises(UsageError, match=r"service 'add': bound 0.001ms cannot be kept: a batch"):
        driver(served.supervisor.reload(msgspec.structs.replace(CONFIG, services=tuple(changed))))
    driver(served.core.infer(add_request(1)))


def test_what_the_device_refuses_leaves_nothing(
    driver: Driver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = served.supervisor.planners.plan

    async def planned_badly(request: PlanRequest) -> Deployment:
        return msgspec.structs.replace(await plan(request), plan="/nowhere/plan.json")

    async def handles() -> list[int]:
        return [held(pid)[0] for pid in (os.getpid(), served.device_pid)]

    changed = [
        msgspec.structs.replace(one, batches=(1, 2)) if one.name == "add" else one
        for one in CONFIG.services
    ]
    before = driver(handles())
    monkeypatch.setattr(served.supervisor.planners, "plan", planned_badly)
    with pytest.raises(DeviceError, match="nowhere"):
        driver(served.supervisor.reload(msgspec.structs.replace(CONFIG, services=tuple(changed))))
    monkeypatch.undo()
    driver(served.core.infer(add_request(1)))
    assert driver(handles()) == before


def test_a_killed_planner_harms_nobody(driver: Driver, served: Served) -> None:
    async def kill() -> tuple[collections.Counter[str], BaseException | None]:
        async with Load(served) as load:
            planning = asyncio.ensure_future(
                served.supervisor.change(CONFIG, {"add", "digits"}, {"add": 500.0}, 30.0)
            )
            while served.supervisor.planners.pid is None:
                await asyncio.sleep(0.01)
            os.kill(served.supervisor.planners.pid, signal.SIGKILL)
            await asyncio.wait([planning])
        return load.seen, planning.exception()

    seen, error = driver(kill())
    assert set(seen) == {"right"}
    assert "the planner process ended with status -9" in str(error)


def test_a_killed_device_process_loses_no_request(driver: Driver, served: Served) -> None:
    async def kill() -> collections.Counter[str]:
        async with Load(served) as load:
            await asyncio.sleep(0.2)
            restarts = served.supervisor.device.restarts
            os.kill(served.device_pid, signal.SIGKILL)
            while not (
                served.supervisor.device.up and served.supervisor.device.restarts > restarts
            ):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
        return load.seen

    seen = driver(kill())
    assert set(seen) <= {"right", "not ready"}  # refused while it started, never lost or wrong
    assert seen["right"] > 20


def test_a_stopped_device_process_is_replaced_and_loses_no_request(
    driver: Driver, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, it neither ends nor answers: SIGSTOP, or a driver that never returns."""
    monkeypatch.setattr(device_keeper, "_SILENT_S", 2.0)
    device = served.supervisor.device

    async def stop() -> str:
        await served.core.infer(add_request(1))
        restarts, pid = device.restarts, served.device_pid
        os.kill(pid, signal.SIGSTOP)
        open_ = asyncio.ensure_future(served.core.infer(add_request(2)))
        while not (device.up and device.restarts > restarts):
            await asyncio.sleep(0.01)
        assert output(await open_, "sum").tolist() == [[5, 5, 5, 5]]
        return f'does not go on; it is ended","pid":{pid}'

    words = driver(stop(), patience_s=120.0)
    assert words in served.log.getvalue()


def test_rates_that_drift_get_a_plan_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a process of its own, taken over between two requests; nothing is dropped."""
    monkeypatch.setattr(drift, "WINDOW_S", 2.0)  # ten seconds, for people
    monkeypatch.setattr(drift, "LASTING_S", 0.5)
    background = {**SHOUT, "tier": "background"}
    settings = {"replan": True, "replan_seconds": 0.5}
    driver = Driver(config_of({**ADD, "bound": "2s", "rate": 20.0}, background, **settings))
    served = driver.served

    async def drift_until_planned() -> collections.Counter[str]:
        async with Load(served) as load:
            while served.supervisor.services.deployed.generation == 1:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)
        return load.seen

    try:
        assert set(driver(drift_until_planned())) == {"right"}
        assert served.supervisor.services.deployed.rates_rps["add"] > 1.5 * 20.0
        said = served.log.getvalue()
        assert "rates have drifted" in said
        assert "best of" in said  # a search
    finally:
        driver.close()


def test_rates_that_fall_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs has instances enough, and opening it anew would disturb whoever is served."""
    monkeypatch.setattr(drift, "WINDOW_S", 2.0)
    monkeypatch.setattr(drift, "LASTING_S", 0.5)
    with Driver(config_of({**ADD, "bound": "2s", "rate": 4000.0}, replan=True)) as driver:
        served = driver.served
        services = served.supervisor.services

        async def load_until_planned() -> collections.Counter[str]:
            async with Load(served) as load:
                while services.deployed.rates_rps["add"] == 4000.0:
                    await asyncio.sleep(0.05)
            return load.seen

        assert set(driver(load_until_planned())) == {"right"}
        assert services.deployed.rates_rps["add"] < 4000.0 / 1.5
        assert services.deployed.generation == 1
        assert "what runs suits the new rates" in served.log.getvalue()


def test_a_search_for_new_rates_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up for a change that somebody asked for."""
    monkeypatch.setattr(drift, "WINDOW_S", 2.0)
    monkeypatch.setattr(drift, "LASTING_S", 0.5)
    services = {**ADD, "bound": "2s", "rate": 20.0}, {**SHOUT, "tier": "background"}
    with Driver(config_of(*services, replan=True, replan_seconds=600.0)) as driver:
        served = driver.served
        changed = config_of({**services[0], "bound": "3s"}, services[1], replan=True,
                            replan_seconds=600.0)  # fmt: skip

        async def reload_while_it_searches() -> collections.Counter[str]:
            async with Load(served) as load:
                while "rates have drifted" not in served.log.getvalue():
                    await asyncio.sleep(0.05)
                while served.supervisor.planners.pid is None:
                    await asyncio.sleep(0.01)
                await served.supervisor.reload(changed)
            return load.seen

        seen = driver(reload_while_it_searches(), patience_s=120.0)
        assert seen["right"] and set(seen) <= {"right", "overloaded"}  # of a busy machine
        assert served.core.counters().services["add"].bound_s == 3.0
        assert "the configuration has changed meanwhile" in served.log.getvalue()


def test_a_server_that_ends_while_it_searches_waits_for_the_end_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drift, "WINDOW_S", 2.0)
    monkeypatch.setattr(drift, "LASTING_S", 0.5)
    services = {**ADD, "bound": "2s", "rate": 20.0}, {**SHOUT, "tier": "background"}
    driver = Driver(config_of(*services, replan=True))
    served = driver.served
    searches: list[str] = []

    async def search(_: PlanRequest) -> Deployment:
        searches.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(2.0)  # as long as a process takes to end
            searches.append("ended")
        raise AssertionError("nobody ends it but by giving it up")

    async def load_until_it_searches() -> None:
        async with Load(served):
            while not searches:
                await asyncio.sleep(0.05)

    monkeypatch.setattr(served.supervisor.planners, "plan", search)
    try:
        driver(load_until_it_searches(), patience_s=120.0)
    finally:
        driver.close()
    assert searches == ["begun", "ended"]


def test_background_that_gives_way_is_counted_and_a_hanging_function_harms_nobody() -> None:
    hangs = {**ADD, "name": "hangs", "model": "numpy:serving_functions:hang"}
    shout = {**SHOUT, "profile": "vgg19", "batches": [8], "tier": "background"}
    driver = Driver(config_of({**ADD, "bound": "2s"}, shout, hangs))
    served = driver.served
    rows = {spec.name: spec.row for spec in served.supervisor.services.deployed.specs}

    def yields(name: str) -> int:
        return served.supervisor.counters.of_device(rows[name])[Count.YIELDS]

    async def shout_beside_services() -> None:
        text = np.full((8, 1), b"x", dtype=object)
        while not yields("shout"):
            await served.core.infer(request("shout", {"text": text}))

    async def ask() -> collections.Counter[str]:
        stuck = [
            asyncio.ensure_future(served.core.infer(named(add_request(13), "hangs")))
            for _ in range(4)
        ]
        async with Load(served) as load:
            await shout_beside_services()
            while not load.seen["right"]:
                await asyncio.sleep(0.005)
        for one in stuck:
            one.cancel()
        return load.seen

    try:
        seen = driver(ask())
        assert seen["right"] > 0 and set(seen) <= {"right", "not ready"}
    finally:
        driver.close()


def test_a_staged_server_answers_in_its_smallest_batch_and_opens_the_others_then() -> None:
    with Driver(config_of({**ADD, "instances": 2}, staged=True)) as driver:
        served = driver.served
        assert served.core.models["add"].max_batch == 4  # a client need not know

        async def refused() -> RefusedError | None:
            """What two rows are told, unless their bucket is there already."""
            if served.core.behind.services["add"].spec.buckets == (1,):
                with pytest.raises(RefusedError, match="not ready for 2 rows") as refusal:
                    await served.core.infer(add_request(3, rows=2))
                return refusal.value
            return None

        refusal = driver(refused())
        assert refusal is None or refusal.reason is Reason.NOT_READY

        async def complete() -> None:
            while '"complete"' not in served.log.getvalue():
                response = await served.core.infer(add_request(3))
                assert output(response, "sum").tolist() == [[7] * 4]

        driver(complete())
        (spec,) = served.supervisor.services.deployed.specs
        assert (spec.buckets, spec.settings.replicas) == ((1, 4), 2)
        response = driver(served.core.infer(add_request(5, rows=4)))
        assert output(response, "sum").tolist() == [[11] * 4] * 4
        assert served.core.ready

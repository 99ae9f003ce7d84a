"""Serving, from an accepted request to the simulated device and back. The processes are real; the
test itself is the front, so that it sees every answer."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import signal
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from eclip.artefacts import store
from eclip.artefacts.calibration import Calibration
from eclip.errors import DeviceError, UsageError
from eclip.serving import drift
from eclip.serving.control import Deployment
from eclip.serving.counters import Count
from eclip.serving.demo_models import classify
from eclip.serving.messages import InferRequest, InferResponse, Reason, RefusedError, Tensor
from eclip.serving.planner_process import PlanRequest
from served_core import (
    ADD,
    DIGITS,
    SHOUT,
    Driver,
    Served,
    add_request,
    config_of,
    image_request,
    output,
    request,
)

SLOW = {**ADD, "name": "slow", "model": "numpy:serving_functions:slow", "batches": [1, 2]}
TIGHT = {**SLOW, "name": "tight", "bound": "200ms", "queue": 40}
BROKEN = {**ADD, "name": "broken", "model": "numpy:serving_functions:broken"}
WRONG = {**ADD, "name": "wrong", "model": "numpy:serving_functions:wrong"}
CONFIG = config_of(
    {**DIGITS, "bound": "2s"},
    {**ADD, "instances": 2, "queue": 100_000},
    {**SHOUT, "tier": "background"},
    SLOW,
    TIGHT,
    BROKEN,
    WRONG,
    {"name": "timed", "model": "alexnet", "batches": [1]},
    {**ADD, "name": "later", "load": False},
)


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver(CONFIG)
    yield driver
    driver.close()


@pytest.fixture
def served(driver: Driver) -> Served:
    return driver.served


def slow_request(number: int, rows: int = 1, **more: Any) -> InferRequest:
    return _named(add_request(number, rows, **more), "slow")


def _named(asked: InferRequest, model: str) -> InferRequest:
    return dataclasses.replace(asked, model=model)


async def outcome(work: Awaitable[InferResponse]) -> InferResponse | Reason:
    try:
        return await work
    except RefusedError as error:
        return error.reason


def test_answers_are_those_of_the_functions(driver: Driver, served: Served) -> None:
    asked = image_request(1, rows=3)
    response = driver(served.core.infer(asked))
    expected = classify({"image": np.asarray(asked.inputs[0].data)})
    assert np.array_equal(output(response, "scores"), expected["scores"])
    assert np.array_equal(output(response, "label"), expected["label"])
    text = np.array([[b"ab"], [b""], [b"\xc3\xa4x"]], dtype=object)
    shouted = driver(served.core.infer(request("shout", {"text": text})))
    assert output(shouted, "text").tolist() == [[b"AB"], [b""], [b"\xc3\xa4X"]]
    only = driver(served.core.infer(image_request(1, outputs=("label",), id="7")))
    assert [tensor.name for tensor in only.outputs] == ["label"] and only.id == "7"


def test_requests_are_joined_and_everybody_gets_its_own_rows(
    driver: Driver, served: Served
) -> None:
    before = served.core.statistics("add")

    async def many() -> list[InferResponse]:
        asked = [served.core.infer(add_request(n, rows=1 + n % 2)) for n in range(60)]
        return await asyncio.gather(*asked)

    for number, response in enumerate(driver(many())):
        assert output(response, "sum").tolist() == [[2 * number + 1] * 4] * (1 + number % 2)
    after = served.core.statistics("add")
    assert after.inferences - before.inferences == 90
    assert after.success.count - before.success.count == 60
    assert 23 <= after.executions - before.executions < 60  # at most 4 rows in a batch


def test_without_a_function_only_the_time_is_told(driver: Driver, served: Served) -> None:
    (info,) = served.core.models["timed"].outputs
    assert info.name == "simulated_ms"
    image = np.zeros((1, 3, 224, 224), dtype=np.float16)
    asked = InferRequest("timed", [Tensor("image", "FP16", image)], time.monotonic_ns())
    (sheet,) = [one for one in served.core.behind.offer.sheets if one.name == "timed"]
    took_ms = output(driver(served.core.infer(asked)), "simulated_ms")
    assert took_ms.shape == (1, 1)
    assert took_ms[0, 0] >= 0.9 * sheet.times_ns[0] / 1e6  # as the simulator has it, no less


def test_a_timeout_is_kept_in_the_queue_and_on_the_device(driver: Driver, served: Served) -> None:
    async def expire() -> list[InferResponse | Reason]:
        asked = [slow_request(number, timeout_ns=15_000_000) for number in range(1, 7)]
        return await asyncio.gather(*(outcome(served.core.infer(one)) for one in asked))

    reasons = driver(expire())  # the function takes 30 ms
    assert all(one in (Reason.EXPIRED, Reason.OVERLOADED) for one in reasons)
    assert Reason.EXPIRED in reasons
    late = driver(outcome(served.core.infer(slow_request(1, timeout_ns=0))))
    assert late is Reason.EXPIRED
    response = driver(served.core.infer(slow_request(4)))  # what expired is in nobody's way
    assert output(response, "sum").tolist() == [[9] * 4]


def test_what_cannot_be_kept_is_refused_at_once(driver: Driver, served: Served) -> None:
    """Batches of 2 take 30 ms: within 200 ms about a dozen can be answered."""

    async def flood() -> tuple[list[float], list[float]]:
        refused_s: list[float] = []
        answered_s: list[float] = []

        async def one(number: int) -> None:
            begin = time.monotonic()
            try:
                await served.core.infer(_named(add_request(number), "tight"))
                answered_s.append(time.monotonic() - begin)
            except RefusedError as error:
                assert error.reason is Reason.OVERLOADED and (error.retry_after_s or 0) > 0
                refused_s.append(time.monotonic() - begin)

        for _ in range(8):  # it learns what a batch really takes
            await one(1)
        answered_s.clear()
        await asyncio.gather(*(one(number) for number in range(1, 101)))
        return refused_s, answered_s

    refused_s, answered_s = driver(flood())
    assert len(refused_s) + len(answered_s) == 100
    assert 1 <= len(answered_s) <= 50
    assert np.median(refused_s) < min(answered_s)
    counted = served.core.counters().services["tight"]
    assert counted.refused[Reason.OVERLOADED] == len(refused_s)
    assert counted.statistics.success.count == 8 + len(answered_s)


def test_priority_goes_first(driver: Driver, served: Served) -> None:
    async def order() -> list[str]:
        done: list[str] = []

        async def one(name: str, priority: int) -> None:
            await served.core.infer(slow_request(1, rows=2, priority=priority))
            done.append(name)

        # All in one turn of the loop: the first two go to the device, the others wait.
        asked = [("first", 0), ("second", 0), ("low 0", 2), ("low 1", 2), ("high", 1)]
        await asyncio.gather(*(one(*each) for each in asked))
        return done

    done = driver(order())
    assert done.index("high") < done.index("low 0") < done.index("low 1")


def test_cancelling_frees_the_way(driver: Driver, served: Served) -> None:
    async def cancel() -> int:
        tasks = [asyncio.ensure_future(served.core.infer(slow_request(n))) for n in range(1, 9)]
        await asyncio.sleep(0.01)  # the first run, the others wait
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return sum(isinstance(one, asyncio.CancelledError) for one in results)

    assert driver(cancel()) == 8
    response = driver(served.core.infer(slow_request(20)))
    assert output(response, "sum").tolist() == [[41] * 4]
    state = served.core.counters().services["slow"]
    assert (state.waiting, state.running) == (0, 0)


def test_a_function_that_raises_fails_its_request_only(driver: Driver, served: Served) -> None:
    broken = _named(add_request(13), "broken")
    with pytest.raises(RefusedError, match="broken: ValueError: 13 brings bad luck") as refusal:
        driver(served.core.infer(broken))
    assert refusal.value.reason is Reason.FAILED
    driver(served.core.infer(_named(add_request(12), "broken")))


def test_a_model_that_cannot_be_loaded_leaves_the_others(driver: Driver, served: Served) -> None:
    assert not served.core.model_ready("wrong")
    assert not served.core.ready  # one that should be loaded is not
    with pytest.raises(
        RefusedError, match=r"wrong is not loaded: wrong gave 'sum' as float32"
    ) as no:
        driver(served.core.infer(_named(add_request(1), "wrong")))
    assert no.value.reason is Reason.NOT_READY
    with pytest.raises(RefusedError, match="there is no model 'other'") as unknown:
        driver(served.core.infer(_named(add_request(1), "other")))
    assert unknown.value.reason is Reason.UNKNOWN_MODEL


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
            with pytest.raises(RefusedError, match="later is not loaded: it was unloaded"):
                await served.core.infer(_named(add_request(1), "later"))
            await served.core.load("later")
            assert served.core.model_ready("later")
            await served.core.infer(_named(add_request(1), "later"))
            await served.core.unload("later")
            assert not served.core.model_ready("later")
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
        return [_held(pid)[0] for pid in (os.getpid(), served.device_pid)]

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


def test_what_the_device_draws_is_told(driver: Driver, served: Served) -> None:
    idle_w = store.load_builtin("h200", Calibration).power.idle_w

    async def power_w(busy: bool) -> float:
        """Of the last seconds."""
        begin_s = time.monotonic()
        while True:
            if busy:
                await asyncio.gather(*(served.core.infer(add_request(n, rows=4)) for n in range(9)))
            else:
                await asyncio.sleep(0.05)
            (device,) = served.core.counters().devices.values()
            (shown,) = served.core.state().devices
            if time.monotonic() > begin_s + 7.0 and device.power_w is not None:
                assert shown.power_w is not None
                return device.power_w

    idle, busy = driver(power_w(busy=False)), driver(power_w(busy=True))
    assert idle == pytest.approx(idle_w, rel=0.05)
    assert busy > 1.005 * idle_w  # by how much depends on how fast this machine asks


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
        assert "best of" in said  # a search, not the usual manner
    finally:
        driver.close()


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


def test_background_that_gives_way_is_counted_and_a_hanging_function_harms_nobody() -> None:
    hangs = {**ADD, "name": "hangs", "model": "numpy:serving_functions:hang"}
    shout = {**SHOUT, "profile": "vgg19", "batches": [8], "tier": "background"}
    driver = Driver(config_of({**ADD, "bound": "2s"}, shout, hangs))
    served = driver.served
    rows = {sheet.name: sheet.row for sheet in served.supervisor.services.deployed.sheets}

    def yields(name: str) -> int:
        return served.supervisor.counters.of_device(rows[name])[Count.YIELDS]

    async def shout_beside_services() -> None:
        text = np.full((8, 1), b"x", dtype=object)
        while not yields("shout"):
            await served.core.infer(request("shout", {"text": text}))

    async def ask() -> collections.Counter[str]:
        stuck = [
            asyncio.ensure_future(served.core.infer(_named(add_request(13), "hangs")))
            for _ in range(4)
        ]
        async with Load(served) as load:
            await shout_beside_services()
        for one in stuck:
            one.cancel()
        return load.seen

    try:
        seen = driver(ask())
        assert seen["right"] > 0 and set(seen) <= {"right", "not ready"}
    finally:
        driver.close()


def _held(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads, and MiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    words = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return descriptors, int(words["Threads"]), int(words["VmRSS"].split()[0]) >> 10


async def _many(served: Served, count: int) -> None:
    async def client(first: int) -> None:
        for number in range(first, first + count // 64):
            response = await served.core.infer(add_request(number, rows=2))
            assert output(response, "sum")[1, 3] == 2 * number + 1

    await asyncio.gather(*(client(1000 * one) for one in range(64)))


@pytest.mark.parametrize(
    "requests",
    [20_000, pytest.param(1_000_000, marks=(pytest.mark.long, pytest.mark.timeout(7200)))],
)
def test_nothing_leaks(requests: int) -> None:
    driver = Driver(config_of({**ADD, "batches": [1, 8, 32], "instances": 2}))
    try:
        served = driver.served
        driver(_many(served, requests // 4))
        pids = (os.getpid(), served.device_pid)
        before = [_held(pid) for pid in pids]
        driver(_many(served, requests), patience_s=7200.0)
        for (fds, threads, mib), (fds_then, threads_then, mib_then) in zip(
            [_held(pid) for pid in pids], before, strict=True
        ):
            assert fds <= fds_then + 2 and threads <= threads_then + 1
            assert mib <= mib_then + 24
        assert served.core.statistics("add").success.count >= requests
    finally:
        driver.close()

"""Serving, from an accepted request to the simulated device and back. The processes are real; the
test itself is the front, so that it sees every answer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from eclip.core.calibration import Calibration
from eclip.files import store
from eclip.server.demo_models import classify
from eclip.server.descriptions import describe_repository
from eclip.server.messages import InferRequest, InferResponse, Reason, RefusedError, Tensor
from served_core import (
    ADD,
    DIGITS,
    SHOUT,
    Driver,
    Served,
    add_request,
    config_of,
    held,
    image_request,
    named,
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
)


def slow_request(number: int, rows: int = 1, **more: Any) -> InferRequest:
    return named(add_request(number, rows, **more), "slow")


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
    (spec,) = [one for one in served.core.behind.offer.specs if one.name == "timed"]
    took_ms = output(driver(served.core.infer(asked)), "simulated_ms")
    assert took_ms.shape == (1, 1)
    assert took_ms[0, 0] >= 0.9 * spec.times_ns[0] / 1e6  # as the simulator has it, no less


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
                await served.core.infer(named(add_request(number), "tight"))
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
    async def cancel() -> list[bool]:
        tasks = [asyncio.ensure_future(served.core.infer(slow_request(n))) for n in range(1, 9)]
        await asyncio.sleep(0.01)  # the first run, the others wait
        open_ones = [task for task in tasks if not task.done()]  # on a busy machine not all eight
        for task in open_ones:
            task.cancel()
        results = await asyncio.gather(*open_ones, return_exceptions=True)
        return [isinstance(one, asyncio.CancelledError) for one in results]

    cancelled = driver(cancel())
    assert cancelled
    assert all(cancelled)
    response = driver(served.core.infer(slow_request(20)))
    assert output(response, "sum").tolist() == [[41] * 4]
    state = served.core.counters().services["slow"]
    assert (state.waiting, state.running) == (0, 0)


def test_a_function_that_raises_fails_its_request_only(driver: Driver, served: Served) -> None:
    broken = named(add_request(13), "broken")
    with pytest.raises(
        RefusedError, match=r"model broken failed: ValueError, fault [0-9a-f]{8} in"
    ) as refusal:
        driver(served.core.infer(broken))
    assert refusal.value.reason is Reason.FAILED
    driver(served.core.infer(named(add_request(12), "broken")))


def test_a_model_that_cannot_be_loaded_leaves_the_others(driver: Driver, served: Served) -> None:
    assert served.core.why_not_ready("wrong") is not None
    assert served.core.ready  # for the others; a strict server is not
    state = served.core.state()  # and the live page says so
    assert state.ready and "wrong is not loaded: wrong gave 'sum' as float32" in state.note
    index = {model["name"]: model for model in describe_repository(served.core, ready_only=False)}
    assert index["add"] == {"name": "add", "version": "1", "state": "READY"}
    assert index["wrong"]["reason"].startswith("wrong gave 'sum' as float32")
    with pytest.raises(
        RefusedError, match=r"wrong is not loaded: wrong gave 'sum' as float32"
    ) as no:
        driver(served.core.infer(named(add_request(1), "wrong")))
    assert no.value.reason is Reason.NOT_READY
    with pytest.raises(RefusedError, match="there is no model 'other'") as unknown:
        driver(served.core.infer(named(add_request(1), "other")))
    assert unknown.value.reason is Reason.UNKNOWN_MODEL


def test_what_the_device_draws_is_told(driver: Driver, served: Served) -> None:
    idle_w = store.load_builtin("h200", Calibration).power.idle_w

    async def until_it_draws(fits: Callable[[float], bool], busy: bool) -> None:
        """In the mean of the last seconds."""
        while True:
            if busy:
                await asyncio.gather(*(served.core.infer(add_request(n, rows=4)) for n in range(9)))
            else:
                await asyncio.sleep(0.05)
            (device,) = served.core.counters().devices.values()
            (shown,) = served.core.state().devices
            if device.power_w is not None and fits(device.power_w):
                assert shown.power_w is not None
                return

    driver(until_it_draws(lambda power_w: power_w == pytest.approx(idle_w, rel=0.002), busy=False))
    driver(until_it_draws(lambda power_w: power_w > 1.005 * idle_w, busy=True))


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
        before = [held(pid) for pid in pids]
        driver(_many(served, requests), patience_s=7200.0)
        for (fds, threads, mib), (fds_then, threads_then, mib_then) in zip(
            [held(pid) for pid in pids], before, strict=True
        ):
            assert fds <= fds_then + 2 and threads <= threads_then + 1
            assert mib <= mib_then + 24
        assert served.core.statistics("add").success.count >= requests
    finally:
        driver.close()

"""A server on a GPU, from an accepted request to its answer: planner, device process and shared
memory are real, and the test itself is the front. The same tests run on the simulator, where a
function gives the answers: so what is tested here is known to be right without a GPU."""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eclip.core.model_key import ModelKey
from eclip.errors import DeviceError
from eclip.gpu.board import VARIABLE
from eclip.server import demo_models
from eclip.server.counters import Count
from eclip.server.messages import InferResponse, RefusedError
from served_core import ADD, Driver, Served, config_of, request

Arrays = Mapping[str, npt.NDArray[Any]]
SMALL, LARGE, BESIDE = "small", "large", "beside"
BOUND = "2s"
PATIENCE_S = 200.0
RIGHT, WRONG, NOT_READY, LOST = "right", "wrong", "not ready", "lost"


@dataclass(frozen=True)
class Model:
    """A service, inputs for so many rows of it, and what the model itself makes of them in a batch
    of so many rows."""

    settings: Mapping[str, Any]
    draw: Callable[[np.random.Generator, int], Arrays]
    answer: Callable[[Arrays, int], Sequence[npt.NDArray[Any]]]


@dataclass(frozen=True)
class Rig:
    device: str
    models: Mapping[str, Model]

    def config(self, *names: str, bound: str = BOUND) -> Any:
        services = [
            {**model.settings, "name": name}
            | ({} if model.settings.get("tier") == "background" else {"bound": bound})
            for name, model in self.models.items()
            if name in names
        ]
        return config_of(*services, device=self.device)

    def case(self, name: str, rows: int, seed: int = 0) -> Case:
        model = self.models[name]
        inputs = model.draw(np.random.default_rng(seed), rows)
        wanted = {
            batch: [array.tobytes() for array in model.answer(inputs, batch)]
            for batch in model.settings["batches"]
            if batch >= rows
        }
        return Case(name, inputs, wanted)


@dataclass(frozen=True)
class Case:
    """A request, and its outputs as bytes from a batch of each size that holds it."""

    model: str
    inputs: Arrays
    wanted: Mapping[int, Sequence[bytes]]

    async def ask(self, served: Served) -> InferResponse:
        return await served.core.infer(request(self.model, self.inputs))

    def is_right(self, response: InferResponse, *batches: int) -> bool:
        """As a batch of one of these sizes gives it; none said: of any."""
        found = [tensor.data.tobytes() for tensor in response.outputs]
        return any(found == self.wanted[batch] for batch in batches or self.wanted)

    async def outcome(self, served: Served) -> str:
        try:
            return RIGHT if self.is_right(await self.ask(served)) else WRONG
        except RefusedError as error:
            return error.reason.value


# --- On the simulator ----------------------------------------------------------------------------


def _numbers(random: np.random.Generator, rows: int) -> Arrays:
    return {name: random.integers(0, 1 << 20, (rows, 4), np.int32) for name in "ab"}


def _added(inputs: Arrays, batch: int) -> list[npt.NDArray[Any]]:
    return [demo_models.add(inputs)["sum"]]


def on_simulator(request: pytest.FixtureRequest) -> Rig:
    small = {**ADD, "batches": [1, 8], "profile": "alexnet"}
    large = {**ADD, "batches": [1, 32], "profile": "bert"}
    beside = {**ADD, "batches": [32], "profile": "vgg19", "tier": "background"}
    return Rig(
        "sim",
        {
            SMALL: Model(small, _numbers, _added),
            LARGE: Model(large, _numbers, _added),
            BESIDE: Model(beside, _numbers, _added),
        },
    )


# --- On a GPU ------------------------------------------------------------------------------------


class Captured:
    """A model of the zoo in this process, captured for every batch that is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._made: dict[int, Any] = {}

    def __call__(self, inputs: Arrays, batch: int) -> list[npt.NDArray[Any]]:
        import torch

        if batch not in self._made:
            self._made[batch] = self._capture(batch)
        model = self._made[batch]
        (given,) = inputs.values()
        rows = np.zeros((batch, *given.shape[1:]), given.dtype)
        rows[: len(given)] = given
        tensor = torch.from_numpy(rows).cuda()
        with torch.inference_mode():
            model.load([tensor])
            torch.cuda.synchronize()
            model.graph.replay()
            torch.cuda.synchronize()
            return [made.cpu().numpy()[: len(given)] for made in model.tensors()]

    def _capture(self, batch: int) -> Any:
        from eclip.capture.named import build
        from eclip.capture.torch import capture

        key = ModelKey(self._name, batch)
        model = capture(*build(key), key)
        model.graph.instantiate()
        return model


def _photographs(random: np.random.Generator, rows: int) -> Arrays:
    return {"image": random.standard_normal((rows, 3, 224, 224)).astype(np.float16)}


def _tokens(random: np.random.Generator, rows: int) -> Arrays:
    return {"tokens": random.integers(0, 30_000, (rows, 128), np.int64)}


def on_gpu(request: pytest.FixtureRequest) -> Rig:
    request.getfixturevalue("device")  # before torch: it asks for hardware queues
    small = {"model": "alexnet", "batches": [1, 8]}
    large = {"model": "bert", "batches": [1, 32]}
    beside = {"model": "vgg19", "batches": [32], "tier": "background"}
    return Rig(
        "cuda",
        {
            SMALL: Model(small, _photographs, Captured("alexnet")),
            LARGE: Model(large, _tokens, Captured("bert")),
            BESIDE: Model(beside, _photographs, Captured("vgg19")),
        },
    )


# --- The tests -----------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[pytest.param(on_simulator, marks=pytest.mark.simulated), pytest.param(on_gpu)],
    ids=["sim", "cuda"],
)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """All servers but one are on the board."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("board")))
        yield request.param(request)


@pytest.fixture(scope="module")
def driver(rig: Rig) -> Iterator[Driver]:
    with started(rig.config(SMALL, LARGE)) as driver:
        yield driver


def started(config: Any) -> Driver:
    begin_s = time.monotonic()
    driver = Driver(config)
    print(f"a server was ready after {time.monotonic() - begin_s:.1f} s")
    return driver


async def ask_until(
    served: Served, case: Case, over: Callable[[], bool], pause_s: float = 0.01
) -> collections.Counter[str]:
    """One request after another, and how each ended."""
    seen: collections.Counter[str] = collections.Counter()
    while not over():
        seen[await case.outcome(served)] += 1
        await asyncio.sleep(pause_s)
    return seen


@pytest.mark.parametrize(("name", "largest"), [(SMALL, 8), (LARGE, 32)])
def test_answers_are_those_of_the_model_bit_by_bit(
    driver: Driver, rig: Rig, name: str, largest: int
) -> None:
    for rows, batch in ((1, 1), (largest, largest), (3, largest), (1, 1)):
        case = rig.case(name, rows, seed=rows)
        before = driver.served.core.statistics(name).executions
        response = driver(case.ask(driver.served), PATIENCE_S)
        assert case.is_right(response, batch)
        assert not rig.case(name, rows, seed=99).is_right(response)
        assert driver.served.core.statistics(name).executions == before + 1


def test_requests_that_share_a_batch_get_their_own_rows(driver: Driver, rig: Rig) -> None:
    cases = [rig.case(name, 1 + seed % 2, seed) for seed in range(12) for name in (SMALL, LARGE)]

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(case.outcome(driver.served) for case in cases))

    assert driver(ask_all(), PATIENCE_S) == [RIGHT] * len(cases)


def test_a_cancelled_request_is_not_run_and_harms_nobody(driver: Driver, rig: Rig) -> None:
    cases = [rig.case(LARGE, 32, seed) for seed in range(6)]
    statistics = driver.served.core.statistics

    async def cancel_second() -> int:
        """Batches that ran; the second was behind the first on the device when it was stopped."""
        before = statistics(LARGE).executions
        tasks = [asyncio.ensure_future(case.ask(driver.served)) for case in cases]
        await asyncio.sleep(0)
        tasks[1].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for number, (case, response) in enumerate(zip(cases, ended, strict=True)):
            if number == 1:
                assert isinstance(response, asyncio.CancelledError)
            else:
                assert isinstance(response, InferResponse) and case.is_right(response)
        return statistics(LARGE).executions - before

    # The device may have got so far on a busy machine, but not every time.
    ran = [driver(cancel_second(), PATIENCE_S) for _ in range(10)]
    assert set(ran) <= {5, 6} and 5 in ran
    counted = driver.served.core.counters().services[LARGE]
    assert (counted.waiting, counted.running) == (0, 0)


def test_another_bound_is_taken_over_while_requests_come(driver: Driver, rig: Rig) -> None:
    """The next generation is captured and warmed beside the one that serves, in the same slots."""
    cases = [rig.case(SMALL, 1), rig.case(LARGE, 3)]

    async def reload() -> list[collections.Counter[str]]:
        change = asyncio.ensure_future(
            driver.served.supervisor.reload(rig.config(SMALL, LARGE, bound="3s"))
        )
        asked = [ask_until(driver.served, case, change.done) for case in cases]
        seen = await asyncio.gather(*asked)
        await change
        return [*seen, *[await ask_until(driver.served, cases[0], iter([False, True]).__next__)]]

    seen = driver(reload(), PATIENCE_S)
    assert all(set(one) == {RIGHT} for one in seen)
    assert driver.served.core.counters().services[SMALL].bound_s == 3.0


def test_a_server_that_is_not_on_the_board_is_refused(
    driver: Driver, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver.served.supervisor.services.deployed.uuid is None:
        pytest.skip("every server has a simulator of its own")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(DeviceError, match="another server runs on GPU-"):
        Driver(rig.config(BESIDE))
    case = rig.case(SMALL, 1)
    assert case.is_right(driver(case.ask(driver.served), PATIENCE_S))


def test_two_servers_on_the_board_share_the_device(driver: Driver, rig: Rig) -> None:
    service, background = rig.case(LARGE, 1), rig.case(BESIDE, 32)
    with started(rig.config(BESIDE)) as second:
        supervisor = second.served.supervisor
        deployed = supervisor.services.deployed
        on_board = deployed.uuid is not None  # a simulator is on none
        end_s = time.monotonic() + (30.0 if on_board else 2.0)

        def yields() -> int:
            return supervisor.counters.of_device(deployed.specs[0].row)[Count.YIELDS]

        def over() -> bool:
            return time.monotonic() > end_s or yields() > 0

        beside = second.begin(ask_until(second.served, background, over, 0.0))
        seen = driver(ask_until(driver.served, service, beside.done, 0.0), PATIENCE_S)
        assert set(seen) == {RIGHT} and set(beside.result()) == {RIGHT}
        print(f"{seen.total()} requests of the service, {yields()} yields beside it")
        assert yields() > 0 or not on_board


def test_a_killed_device_process_comes_back(driver: Driver, rig: Rig) -> None:
    cases = [rig.case(SMALL, 8), rig.case(LARGE, 2)]
    device = driver.served.supervisor.device
    restarts, killed = device.restarts, driver.served.device_pid

    async def kill() -> list[collections.Counter[str]]:
        def back() -> bool:
            return device.up and device.restarts > restarts

        async def ask(case: Case) -> collections.Counter[str]:
            seen = await ask_until(driver.served, case, back)
            after_s = time.monotonic() + 0.5
            return seen + await ask_until(driver.served, case, lambda: time.monotonic() > after_s)

        asked = [asyncio.ensure_future(ask(case)) for case in cases]
        await asyncio.sleep(0.2)
        begin_s = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        while not back():
            await asyncio.sleep(0.01)
        print(f"the device process was back after {time.monotonic() - begin_s:.1f} s")
        return await asyncio.gather(*asked)

    for seen in driver(kill(), PATIENCE_S):
        assert set(seen) <= {RIGHT, NOT_READY, LOST} and seen[RIGHT] > 3
        # Only the one that was under way, and only where the device process takes long to start.
        assert seen[LOST] <= 1
    assert driver.served.device_pid != killed

"""A server used by a process that is no child of it, and over HTTP: as routers do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from eclip.errors import DeviceError
from eclip.fleet.backends import ASK_NS, Backends
from eclip.fleet.orders import GpuPlace, RoutingTable
from eclip.fleet.place.spec import GpuId
from eclip.server.config import ServingConfig
from eclip.server.front.core import FrontCore
from eclip.server.front.guests import enter
from eclip.server.messages import Reason, RefusedError
from eclip.server.protocol.http_client import RemoteFront
from eclip.server.supervisor.running import RunningServer
from served_core import ADD, add_request, config_of, output
from waiting import PATIENCE_S

SLOW = {**ADD, "name": "slow", "model": "numpy:serving_functions:slow", "batches": [1]}
CONFIG = config_of(ADD, SLOW, {**ADD, "name": "other", "load": False})
NEAR, FAR = GpuId("a", "h200", 0), GpuId("b", "h200", 0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def enter_when_free(door: Path) -> FrontCore:
    core = None
    while core is None:
        with contextlib.suppress(DeviceError):  # the seat is being cleared
            core = await enter(door)
        await asyncio.sleep(0.01)
    await until(lambda: core.started)
    return core


def with_server(config: ServingConfig, work: Callable[[RunningServer], Awaitable[None]]) -> None:
    with RunningServer(config, guests=1) as server:

        async def run() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await work(server)

        asyncio.run(run())


def place_of(server: RunningServer, gpu: GpuId, host: str) -> GpuPlace:
    return GpuPlace(
        gpu=gpu,
        host=host,
        http=server.url.removeprefix("http://"),
        grpc=server.grpc,
        door=str(server.door),
        models=server.models(),
        pid=1,
    )


def test_a_guest_is_answered_leaves_and_makes_room_for_the_next() -> None:
    async def visit(server: RunningServer) -> None:
        assert server.door is not None
        for number in range(3):
            core = await enter_when_free(server.door)
            answer = await core.infer(add_request(number))
            assert output(answer, "sum").tolist() == [[2 * number + 1] * 4]
            if number == 0:
                with pytest.raises(DeviceError, match="lets nobody in"):
                    await enter(server.door)  # there is one seat
            core.close()

    with_server(CONFIG, visit)


def test_slack_falls_with_what_waits() -> None:
    async def visit(server: RunningServer) -> None:
        assert server.door is not None
        with await enter(server.door) as core:
            await until(lambda: core.started)
            free = core.slack_ns("slow")
            asked = msgspec.structs.replace(add_request(1), model="slow")
            tasks = [asyncio.create_task(core.infer(asked)) for _ in range(5)]
            await asyncio.sleep(0)
            loaded = core.slack_ns("slow")
            assert free is not None and loaded is not None and loaded < free
            await asyncio.gather(*tasks)
            assert core.slack_ns("other") is None  # not loaded

    with_server(CONFIG, visit)


def test_replicas_near_and_far_answer_and_count_as_fresh() -> None:
    async def visit(server: RunningServer) -> None:
        backends = Backends("here")
        table = RoutingTable(
            places=(place_of(server, NEAR, "here"), place_of(server, FAR, "there")),
            shares={"add": {NEAR: 0.5, FAR: 0.5}, "slow": {FAR: 1.0}},
        )
        backends.take(table)
        near, far = backends.here[NEAR], backends.here[FAR]
        assert (near.near, far.near) == (True, False)
        await until(lambda: len(backends.candidates("add")) == 2)
        for backend in (near, far):
            answer = await backend.infer(add_request(4, id="x"))
            assert output(answer, "sum").tolist() == [[9] * 4] and answer.id == "x"
            slack_ns, fresh = backend.slack_ns("add")
            assert fresh and slack_ns < 0  # without a bound, what a request takes
        assert backends.choose("slow") is far  # the only one with a share
        assert backends.choose("other") is None
        with pytest.raises(RefusedError, match="no GPU has other ready") as refusal:
            await backends.infer(msgspec.structs.replace(add_request(1), model="other"))
        assert refusal.value.reason is Reason.NOT_READY
        await backends.close()

    with_server(CONFIG, visit)


def test_two_that_are_far_both_get_requests() -> None:
    """Only answers tell slack: one that has said nothing yet, or not lately, must be asked."""

    async def visit(server: RunningServer) -> None:
        backends = Backends("here")
        places = (place_of(server, NEAR, "there"), place_of(server, FAR, "there"))
        shares = {"add": {NEAR: 0.5, FAR: 0.5}}
        backends.take(RoutingTable(places=places, shares=shares))
        await until(lambda: len(backends.candidates("add")) == 2)
        first = backends.choose("add")
        assert first is not None
        await first.infer(add_request(1))
        second = backends.choose("add")
        assert second is not None and second is not first
        await second.infer(add_request(1))
        assert first.slack_ns("add")[0] < ASK_NS > second.slack_ns("add")[0]
        await backends.close()

    with_server(CONFIG, visit)


def test_what_one_did_not_accept_another_gets_and_what_was_accepted_is_lost_with_it() -> None:
    async def visit(server: RunningServer) -> None:
        backends = Backends("here")
        nobody = GpuPlace(  # where nobody listens
            gpu=NEAR, host="there", http="127.0.0.1:9", grpc="", door=None,
            models=server.models(), pid=1,
        )  # fmt: skip
        shares = {NEAR: 1.0, FAR: 1.0}
        backends.take(
            RoutingTable(
                places=(nobody, place_of(server, FAR, "there")),
                shares={"add": shares, "slow": shares},
            )
        )
        await until(lambda: backends.candidates("add"))
        for number in range(20):
            answer = await backends.infer(add_request(number))
            assert output(answer, "sum").tolist() == [[2 * number + 1] * 4]
        front = RemoteFront(server.url.removeprefix("http://"))
        await until(lambda: front.connected)
        asked = msgspec.structs.replace(add_request(1), model="slow")
        lost = asyncio.create_task(front.infer(asked))
        await asyncio.sleep(0.01)
        await front.close()  # as when its machine is gone
        with pytest.raises(RefusedError) as refusal:
            await lost
        assert refusal.value.reason is Reason.LOST
        with pytest.raises(RefusedError) as refusal:
            await front.infer(asked)
        assert refusal.value.reason is Reason.NOT_READY  # it never left: another may be asked
        await backends.close()

    with_server(CONFIG, visit)


def test_a_server_that_ends_tells_its_guests_what_is_lost() -> None:
    async def visit(server: RunningServer) -> None:
        assert server.door is not None
        core = await enter(server.door)
        await until(lambda: core.started)
        asked = msgspec.structs.replace(add_request(1), model="slow")
        waiting = asyncio.create_task(core.infer(asked))
        await asyncio.sleep(0.001)
        core.close()
        with pytest.raises(RefusedError) as refusal:
            await waiting
        assert refusal.value.reason is Reason.LOST

    with_server(CONFIG, visit)

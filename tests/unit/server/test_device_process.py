"""The device process between two deployments, without a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eclip.server.control import Channel, Deployed, Retire, Retired, Stop
from eclip.server.counters import Count, CounterPages
from eclip.server.device.generation import Generation
from eclip.server.device.process import DeviceProcess
from eclip.server.link import Signal
from waiting import until


class KeptSlots:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def server() -> Iterator[tuple[DeviceProcess, Channel]]:
    ours, theirs = Channel.pair()
    with Channel(theirs) as channel:
        yield DeviceProcess(channel), ours
        ours.close()


def opened(number: int, *services: int) -> Generation:
    stages = dict.fromkeys(services)
    return cast(Generation, SimpleNamespace(number=number, open=0, stages=stages, failed={}))


def heard(channel: Channel) -> list[Any]:
    found = []
    while (received := channel.receive()) is not None:
        found.append(received[0])
    return found


def test_a_process_that_starts_anew_keeps_the_slots_of_what_it_opens(
    server: tuple[DeviceProcess, Channel],
) -> None:
    """The one before died while older generations were to end: the server says so to the next one,
    which has none yet. It must not take the slots for those of nobody."""
    process, channel = server
    kept, gone = KeptSlots(), KeptSlots()
    process._slots = cast(Any, {0: {1: kept, 2: gone}})
    process._hear(Retire(before=7), [])
    process._finish()
    assert not kept.closed and not gone.closed
    assert heard(channel) == []
    process._generations = [opened(7, 1)]
    process._finish()
    assert not kept.closed and gone.closed
    assert heard(channel) == [Retired(before=7)]


class SlowMeter:
    """A device that says what it has drawn when it may."""

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()
        self._mj = 0

    def energy_mj(self) -> int:
        self.asked.set()
        self.may.wait()
        self._mj += 7
        return self._mj

    def close(self) -> None:
        pass


def test_the_process_goes_on_while_a_device_takes_long_to_tell_its_energy(
    server: tuple[DeviceProcess, Channel],
) -> None:
    process, channel = server
    device, counted = SlowMeter(), threading.Event()

    def count() -> dict[int, tuple[int, int]]:
        counted.set()
        return {}

    with Signal() as bell:
        loops = SimpleNamespace(bells=[bell.descriptor, bell.descriptor])
        doors = SimpleNamespace(server=loops)
        generation = SimpleNamespace(
            number=1,
            open=False,
            failed={},
            stages={},
            count=count,
            close=lambda: None,
            hanging=lambda now_ns, most_ns: None,
            uses=lambda front: False,
            session=SimpleNamespace(wakeup=bell.descriptor, doors=doors),
        )
        run_with(process, channel, generation, device, counted)
        assert heard(channel) == [Deployed(1, 0.1, {}, (0, 0))]


def run_with(
    process: DeviceProcess, channel: Channel, generation: Any, device: Any, counted: threading.Event
) -> None:
    deploy = SimpleNamespace(deployment=SimpleNamespace(generation=1))
    with CounterPages.create(1) as counters:
        process._device, process._counters = device, counters
        process._begin(cast(Any, deploy), generation, 0.1)
        loop = threading.Thread(target=process.run, daemon=True)
        loop.start()
        assert device.asked.wait(60)
        counted.clear()
        assert counted.wait(60)
        device.may.set()
        assert until(lambda: counters.of_device(0)[Count.ENERGY_MJ] == 7)
        channel.send(Stop())
        loop.join()

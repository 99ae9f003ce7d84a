"""The device process between two deployments, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eclip.serving.control import Channel, Retire, Retired
from eclip.serving.device_process import DeviceProcess
from eclip.serving.generation import Generation


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

"""A server in simulated time, and what its plans are worth there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lab.support.machines import Machine, Stalls, Ways
from lab.support.offered import Service, random_services, services_of
from lab.support.virtual import VirtualServer

from eclip.server.config import ServingConfig
from served_core import config_of

SECONDS = 0.3


def config(services: list[Service], server: dict[str, Any], **of_services: Any) -> ServingConfig:
    settings = [one.settings() | of_services for one in services]
    return config_of(*settings, device="sim", **server)


def test_the_same_arrivals_give_the_same_answers() -> None:
    services = random_services(1, 5.0)
    with VirtualServer(config(services, {})) as server:
        calm, first, again = (server.run(services, load, SECONDS) for load in (0.2, 3.0, 3.0))
    assert calm["attained"] == 1.0
    assert 0 < first["attained"] < 0.95
    assert first == again


def test_a_server_answers_more_in_time_than_with_plain_streams_and_one_instance() -> None:
    services = services_of("three", 5.0)
    attained = []
    for server, of_services in (({}, {}), ({"policy": "shared"}, {"instances": 1})):
        with VirtualServer(config(services, server, **of_services)) as served:
            attained.append(served.run(services, 2.2, SECONDS)["attained"])
    ours, streams = attained
    assert ours > 0.98 > 0.97 > streams


def test_twice_the_load_that_is_served_is_refused_not_served_late() -> None:
    """Who must start first goes first. Under more load than the device serves, that would be
    whoever is about to be late, and then everybody is."""
    services = services_of("three", 10.0)
    with VirtualServer(config(services, {})) as server:
        in_time = {load: load * server.run(services, load, SECONDS)["attained"] for load in (6, 12)}
    assert in_time[6] > 5.5
    assert in_time[12] > 0.7 * in_time[6]


def test_a_service_slower_than_its_profile_is_named_and_harms_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    services = services_of("three", 5.0)
    shares = []
    for server, of_services in (({}, {}), ({"policy": "shared"}, {"instances": 1})):
        made = config(services, server, **of_services)
        with VirtualServer(made, slower={"bert": 3.0}) as served:
            shares.append(served.run(services, 0.7, SECONDS)["services"])
    ours, streams = shares
    assert "bert takes" in caplog.text and len(caplog.records) == 1
    assert all(ours[name] >= streams[name] - 0.01 for name in ("resnet50", "densenet121"))


def test_a_machine_has_its_ways_and_keeps_messages_in_order() -> None:
    machine = Machine("one", way_us=110.0, way_p99_us=420.0)
    ways = Ways(machine, Stalls(machine, 1.0, 1), 2)
    # So far apart that none waits for the one before it.
    took = np.array([ways.arrives_ns(at) - at for at in range(0, 10**12, 10**8)]) / 1e3
    assert np.median(took) == pytest.approx(110, rel=0.05)
    assert np.percentile(took, 99) == pytest.approx(420, rel=0.15)
    close = [ways.arrives_ns(10**12 + at) for at in range(0, 10**6, 1000)]
    assert close == sorted(close)


def test_a_process_that_stands_still_reads_when_it_goes_on() -> None:
    machine = Machine("stalls", stalls_per_s=100.0)
    stalls = Stalls(machine, 1.0, 3)
    late = [stalls.over_ns(at) - at for at in range(0, 10**9, 10**5)]
    assert min(late) >= 0 and 1e6 < max(late) < 100e6
    assert 0.1 < np.mean(np.array(late) > 0) < 0.9
    assert Stalls(Machine("none"), 1.0, 3).over_ns(5) == 5

"""A server in simulated time, and what its plans are worth there."""

from __future__ import annotations

from typing import Any

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

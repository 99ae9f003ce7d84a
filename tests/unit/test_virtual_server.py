"""A server in simulated time, and what its plans are worth there."""

from __future__ import annotations

from typing import Any

from bench.support.offered import Service, random_services, services_of
from bench.support.virtual import VirtualServer

from eclip.serving.config import ServingConfig
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
    assert ours > 0.97 > 0.95 > streams

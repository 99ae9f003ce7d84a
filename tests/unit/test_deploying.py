"""What a server deploys: how many instances when nobody says it, and under which policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from eclip.artefacts import store
from eclip.artefacts.plan import Plan
from eclip.errors import UsageError
from eclip.serving.config import make_config
from eclip.serving.deploying import make_deployment, resolve
from eclip.serving.host import ServingHost, find_host


def instances_of(host: ServingHost, *services: dict[str, Any]) -> list[int]:
    given = [{"model": "bert", "batches": [1], **service} for service in services]
    config = make_config({"service": given}, "the test")
    return [one.settings.copies for one in resolve(config, host, {})]


@pytest.fixture(scope="module")
def host() -> ServingHost:
    return find_host(make_config({"service": [{"name": "a", "model": "bert"}]}, "the test").server)


def test_a_rate_that_one_instance_serves_easily_gets_one(host: ServingHost) -> None:
    assert instances_of(host, {"name": "a", "rate": 10.0}, {"name": "b"}) == [1, 1]


def test_a_rate_beyond_one_instance_gets_more(host: ServingHost) -> None:
    asked = [{"name": "a", "rate": rate} for rate in (10.0, 1200.0, 2000.0)]
    found = [instances_of(host, one)[0] for one in asked]
    assert found == sorted(found) and found[0] == 1 < found[1] < found[2]


def test_what_is_said_is_kept(host: ServingHost) -> None:
    assert instances_of(host, {"name": "a", "rate": 1200.0, "instances": 1}) == [1]
    assert instances_of(host, {"name": "a", "rate": 10.0, "instances": 3}) == [3]


def test_background_work_is_never_multiplied(host: ServingHost) -> None:
    background = {"name": "b", "rate": 1200.0, "tier": "background"}
    assert instances_of(host, {"name": "a"}, background) == [1, 1]


def test_memory_limits_it(host: ServingHost) -> None:
    fast = {"name": "a", "rate": 1200.0}
    assert instances_of(host, fast) > [1]
    topology = msgspec.structs.replace(host.topology, memory_bytes=1 << 30)
    small = ServingHost(topology, host.calibration, host.computes, host.folders, host.title)
    assert instances_of(small, fast) == [1]


@pytest.mark.parametrize(("policy", "priorities"), [("shared", {0}), ("priority", {0, 1})])
def test_a_policy_can_be_asked_for(policy: str, priorities: set[int], tmp_path: Path) -> None:
    services = [
        {"name": name, "model": name, "bound": bound, "batches": [1], "rate": 10.0}
        for name, bound in (("bert", "20ms"), ("alexnet", "5ms"))
    ]
    config = make_config({"server": {"policy": policy}, "service": services}, "the test")
    made = make_deployment(config, {}, generation=1, folder=tmp_path)
    plan = store.load(made.plan, Plan)
    assert made.policy == plan.policy == policy
    assert not plan.gives_way
    assert {lane.priority for lane in plan.lanes} == priorities


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ({"model": "brt"}, r"service 'a': unknown model 'brt'; choose one of: albert"),
        ({"model": "bert", "profile": "brt"}, r"service 'a': profile: unknown model 'brt'"),
        ({"model": "my.module:factory"}, r"service 'a': profile: unknown model"),
        ({"file": "a.ts"}, r"service 'a': profile: unknown model"),
    ],
)
def test_a_model_whose_times_nobody_knows_is_refused_with_its_service(
    host: ServingHost, service: dict[str, Any], said: str
) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [4]}
    given = {"name": "a", "inputs": [tensor], "outputs": [tensor], **service}
    with pytest.raises(UsageError, match=said):
        resolve(make_config({"service": [given]}, "the test"), host, {})

"""What a server deploys: how many instances when nobody says it, and under which policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.errors import UsageError
from eclip.files import store
from eclip.server.config import ServiceSettings, ServingConfig, make_config
from eclip.server.control import Deployment
from eclip.server.device.deploying import _wanted, make_deployment, resolve
from eclip.server.device.host import ServingHost, find_host


def instances_of(host: ServingHost, *services: dict[str, Any]) -> list[int]:
    given = [{"model": "bert", "batches": [1], **service} for service in services]
    config = make_config({"service": given}, "the test")
    return [one.settings.replicas for one in resolve(config, host, {})]


@pytest.fixture(scope="module")
def host() -> ServingHost:
    return find_host(make_config({"service": [{"name": "a", "model": "bert"}]}, "the test").server)


def test_a_rate_that_one_instance_serves_easily_gets_one(host: ServingHost) -> None:
    assert instances_of(host, {"name": "a", "rate": 10.0}, {"name": "b"}) == [1, 1]


def test_a_rate_beyond_one_instance_gets_more(host: ServingHost) -> None:
    """A request of bert takes 1 ms alone."""
    found = [instances_of(host, {"name": "a", "rate": rate})[0] for rate in (100.0, 200.0, 400.0)]
    assert found == [1, 2, 3]
    assert instances_of(host, {"name": "a", "rate": 1e5}) == [4]


def test_instances_and_buckets_are_shared_out_evenly(host: ServingHost) -> None:
    """A plan has 32 workers. A batch of 32 would be late."""
    services = [{"name": name, "model": "bert", "rate": 1e3, "bound": "3ms"} for name in "abcdefgh"]

    def chosen(*given: dict[str, Any]) -> list[tuple[int, tuple[int, ...]]]:
        resolved = resolve(make_config({"service": list(given)}, "the test"), host, {})
        return [(one.settings.replicas, one.batches) for one in resolved]

    assert chosen(*services[:1]) == [(4, (1, 2, 4, 8, 16))]
    for count in range(2, 9):
        found = chosen(*services[:count])
        instances = [copies for copies, _ in found]
        assert max(instances) - min(instances) <= 1
        assert all({1, 8} <= {*batches} for _, batches in found)
        assert sum(copies * len(batches) for copies, batches in found) <= 32
    assert chosen(*(one | {"batches": [1, 8]} for one in services)) == [(2, (1, 8))] * 8
    assert chosen(services[0] | {"bound": "2ms", "instances": 1}) == [(1, (1, 2, 4, 8))]


def test_rates_beyond_the_device_are_said(tmp_path: Path) -> None:
    def notes(rate: float) -> tuple[str, ...]:
        service = {"name": "a", "model": "bert", "rate": rate, "batches": [1, 8], "bound": "20ms"}
        config = make_config({"service": [service]}, "the test")
        return make_deployment(config, {}, generation=1, folder=tmp_path).notes

    assert notes(300.0) == ()
    (line,) = notes(1e6)
    assert "times what the device can do with full batches: requests will be refused" in line


def test_a_deployment_stays_where_other_rates_need_no_more_of_it(tmp_path: Path) -> None:
    services = [{"name": name, "model": "bert", "batches": [1, 8], "rate": 300.0} for name in "ab"]
    job = {"name": "job", "model": "vgg19", "batches": [1], "tier": "background"}
    alone = make_config({"service": services}, "the test")
    beside = make_config({"service": [*services, job]}, "the test")

    def made(config: ServingConfig, a: float, b: float) -> Deployment:
        return make_deployment(config, {"a": a, "b": b}, generation=1, folder=tmp_path)

    runs = made(alone, 300.0, 300.0)
    assert runs.does_all_of(made(alone, 300.0, 10.0))
    assert not runs.does_all_of(made(alone, 500.0, 10.0))  # more instances of one
    assert not made(beside, 300.0, 300.0).does_all_of(made(beside, 100.0, 100.0))


def test_services_wait_for_room_on_the_device_and_background_does_not(tmp_path: Path) -> None:
    service = {"name": "a", "model": "bert", "rate": 300.0, "batches": [1, 8], "bound": "20ms"}
    job = {"name": "job", "model": "vgg19", "batches": [1], "tier": "background"}
    config = make_config({"service": [service, job]}, "the test")
    ours, background = make_deployment(config, {}, generation=1, folder=tmp_path).specs
    assert 0 < ours.parts[0] < ours.parts[1] <= 1  # a larger batch keeps more of it busy
    assert background.parts == (0.0,)


@pytest.mark.parametrize("policy", ["shared", "yield"])
def test_what_is_compared_with_has_one_instance_and_no_turns(policy: str, tmp_path: Path) -> None:
    service = {"name": "a", "model": "bert", "rate": 600.0, "batches": [1, 8], "bound": "20ms"}
    copies, parts = [], []
    for server in ({}, {"policy": policy}):
        config = make_config({"server": server, "service": [service]}, "the test")
        (spec,) = make_deployment(config, {}, generation=1, folder=tmp_path).specs
        copies.append(spec.settings.replicas)
        parts.append(any(spec.parts))
    assert copies == [4, 1]
    assert parts == [True, False]


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_services_run_together_and_background_gives_way(tmp_path: Path, seconds: float) -> None:
    services = [
        {"name": name, "model": name, "bound": "50ms", "batches": [1, 8], "instances": 1}
        for name in ("bert", "vgg19")
    ]
    background = {"name": "job", "model": "vgg19", "batches": [1], "tier": "background"}
    config = make_config({"service": [*services, background]}, "the test")
    made = make_deployment(config, {}, generation=1, folder=tmp_path, seconds=seconds)
    plan = store.load(made.plan, Plan)
    giving = [one.name for one in plan.workers if one.joints and one.joints.rules]
    assert giving == ["job.1:1"]
    assert bool(made.notes) == bool(seconds)  # only background is searched for


def test_what_is_given_up_stops_soon_though_nobody_gives_way(tmp_path: Path) -> None:
    services = [
        {"name": name, "model": name, "bound": "50ms", "batches": [1, 32], "instances": 1}
        for name in ("bert", "vgg19")
    ]
    config = make_config({"service": services}, "the test")
    plan = store.load(make_deployment(config, {}, generation=1, folder=tmp_path).plan, Plan)
    for worker in plan.workers:
        assert worker.joints is not None and not worker.joints.rules
        assert worker.joints.longest_ns <= 2_000_000
    assert [len(one.joints.at) > 0 for one in plan.workers if one.joints] == [False, True] * 2


@pytest.mark.parametrize("asked", [True, False])
def test_services_go_in_turn_if_asked_or_beside_other_servers(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eclip.server.device.deploying.shares_gpu", lambda: not asked)
    server = {"policy": "yield"} if asked else {}
    services = [{"name": name, "model": name, "bound": "50ms"} for name in ("bert", "vgg19")]
    config = make_config({"server": server, "service": services}, "the test")
    made = make_deployment(config, {}, generation=1, folder=tmp_path)
    workers = store.load(made.plan, Plan).workers
    assert all(worker.joints and worker.joints.rules for worker in workers)


def test_what_a_batch_costs_grows_with_those_who_share_the_device(tmp_path: Path) -> None:
    bert = {"name": "bert", "model": "bert", "bound": "50ms", "batches": [1, 8]}
    costs = []
    for instances in (1, 4):
        config = make_config({"service": [bert | {"instances": instances}]}, "the test")
        (spec,) = make_deployment(config, {}, generation=1, folder=tmp_path).specs
        costs.append(spec.costs_ns)
    assert costs[0] == spec.times_ns  # alone, a batch costs its time
    assert costs[1][1] / costs[1][0] > 1.5 * spec.times_ns[1] / spec.times_ns[0]


def test_a_rate_that_nobody_knows_is_no_reason_for_more_instances(
    host: ServingHost, tmp_path: Path
) -> None:
    services = [{"name": name, "model": "bert", "batches": [1]} for name in ("a", "b")]
    config = make_config({"service": services}, "the test")
    first = make_deployment(config, {}, generation=1, folder=tmp_path)
    assert {*first.rates_rps} == {*first.assumed} == {"a", "b"}
    again = make_deployment(config, first.known_rps | {"a": 300.0}, generation=2, folder=tmp_path)
    assert again.known_rps == {"a": 300.0}
    assert again.in_words == {"a": "2 instances, batches of 1", "b": "1 instance, batches of 1"}


def test_buckets_that_were_never_measured_do_not_keep_a_server_from_planning(
    host: ServingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ServingHost.profile

    def profile(self: ServingHost, model: ModelKey) -> Profile:
        if model.batch > 1:
            raise UsageError(f"{model} has no profile, and the server runs")
        return known(self, model)

    monkeypatch.setattr(ServingHost, "profile", profile)
    wanted = _wanted(ServiceSettings(name="a", model="bert", bound="1s"), 300.0, host)
    assert wanted == 2


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
        (
            {"model": "brt"},
            r"service 'a': unknown model 'brt'; did you mean bert",
        ),
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

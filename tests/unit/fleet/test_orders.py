"""From a placement to what each GPU is told, to rates, and to Kubernetes' manifests."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
import yaml

from eclip.errors import ArtefactError, PlanningError, UsageError
from eclip.fleet.config import FleetFile, load_fleet_file
from eclip.fleet.kubernetes import render, render_text
from eclip.fleet.orders import GpuPlace, join, orders_of, table_of
from eclip.fleet.place.placement import Instance, PlacedGpu, Placement
from eclip.fleet.place.spec import Fleet, GpuId
from eclip.fleet.planning import Planned, without_short
from eclip.fleet.rates import RateWatch, RouterReport, with_rates
from eclip.fleet.ray.cluster import MACHINE
from eclip.fleet.replanning import AGAIN_AFTER_S, Replanning
from eclip.server.config import make_config

FLEET = """
[router]
count = 3
token_file = "token"

[server]
device = "cuda"

[[service]]
name = "search"
model = "bert:8"
rate = 300
bound = "5ms"

[[service]]
name = "own"
model = "resnet50:1"
rate = 10
bound = "40ms"
[service.serve]
model = "my.package:factory"
queue = 7
inputs = [{ name = "a\\tb", datatype = "FP16", shape = [3, -1], room = 64 }]
outputs = [{ name = "c", datatype = "FP16", shape = [2] }]

[[gpus]]
machine = "node-1"
kind = "h200"
count = 2
"""
FIRST, SECOND = GpuId("node-1", "h200", 0), GpuId("node-1", "h200", 1)


@pytest.fixture
def file(tmp_path: Path) -> FleetFile:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    return load_fleet_file(path)


def placed(gpu: GpuId, **shares: float) -> PlacedGpu:
    instances = tuple(
        Instance(service=name, share=share, rate_rps=100 * share, p99_ms=1.0, bound_ms=5.0)
        for name, share in shares.items()
    )
    return PlacedGpu(gpu=gpu, policy="yield", instances=instances, power_w=100.0)


def placement(*gpus: PlacedGpu) -> Placement:
    return Placement(objective="fewest", gpus=gpus, refused={}, goodput_rps=0.0, power_w=0.0)


BOTH = placement(placed(FIRST, search=0.5, own=1.0), placed(SECOND, search=0.5))


def test_an_order_has_the_services_of_its_gpu_as_a_server_wants_them(file: FleetFile) -> None:
    orders = orders_of(file, BOTH)
    config = orders[FIRST].config
    search, own = config.services
    assert (search.model, search.batches, search.bound, search.rate) == ("bert", (8,), "5ms", 50.0)
    assert (own.model, own.profile, own.queue) == ("my.package:factory", "resnet50", 7)
    assert (config.server.device, config.server.topology) == ("cuda", "h200")
    assert config.server.token_file == "token"
    # As it was found to keep its bounds.
    assert config.server.policy == BOTH.gpus[0].policy
    assert [service.instances for service in config.services] == [1, 1]
    assert orders[FIRST].guests == 3  # one seat for every router
    assert [service.name for service in orders[SECOND].config.services] == ["search"]


def test_while_instances_move_a_gpu_has_the_old_ones_too(file: FleetFile) -> None:
    old = orders_of(file, BOTH)[FIRST]
    new = orders_of(file, placement(placed(FIRST, search=1.0)))[FIRST]
    both = join(old, new)
    assert {one.name: one.rate for one in both.config.services} == {"search": 100.0, "own": 100.0}
    assert join(new, new) == new


def test_routers_are_told_only_of_gpus_that_are_there(file: FleetFile) -> None:
    place = GpuPlace(gpu=FIRST, host="h", http="h:1", grpc="h:2", door=None, models={}, pid=1)
    table = table_of(BOTH, {FIRST: place})
    assert [one.gpu for one in table.places] == [FIRST]
    assert table.shares == {"search": {FIRST: 0.5, SECOND: 0.5}, "own": {FIRST: 1.0}}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('device = "cuda"', 'host = "0.0.0.0"', "host is set by the fleet"),
        ('device = "cuda"', "http_port = 8000", "http_port is set by the fleet"),
        ("queue = 7", "queu = 7", "queu"),
        ("queue = 7", "queue = 0", "queue: 1 to"),
        ("count = 3", "count = 0", "1 to 64"),
        ("[router]", '[ray]\naddress = "nobody"\n[router]', "HOST:PORT"),
        ("[router]", "[ray]\nport = 1\n[router]", "1024"),
        ("count = 3", "http_port = 1\ngrpc_port = 1", "another than http_port"),
    ],
)
def test_what_cannot_be_right_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET.replace(old, new, 1))
    with pytest.raises((UsageError, ArtefactError), match=words):
        orders_of(load_fleet_file(path), BOTH)


def test_a_service_with_too_few_instances_is_placed_anew(file: FleetFile) -> None:
    services = tuple(msgspec.structs.replace(one, instances=2) for one in file.fleet.services)
    fleet = msgspec.structs.replace(file.fleet, services=services)
    left = without_short(BOTH, fleet)
    assert [(one.gpu, list(one.shares)) for one in left.gpus] == [
        (FIRST, ["search"]),
        (SECOND, ["search"]),
    ]
    assert without_short(BOTH, file.fleet) == BOTH


def report(pid: int, **arrived: int) -> RouterReport:
    return RouterReport(
        number=0, http="", grpc="", ready=True, near=0, far=0, arrived=arrived, pid=pid
    )


def test_rates_that_stay_off_are_told_once(file: FleetFile) -> None:
    watch = RateWatch(file.fleet)
    drifts = []
    for second in range(40):
        watch.take([report(1, search=900 * second)], float(second))
        drifts.append(watch.drifted())
    told = [drift for drift in drifts if drift is not None]
    assert told == [{"search": pytest.approx(900)}]  # three times what was planned
    assert drifts.index(told[0]) == 10  # half a window, then long enough
    services = with_rates(file.fleet, told[0]).services
    assert [one.rate_rps for one in services] == [pytest.approx(900), 10]


def test_a_router_that_starts_anew_counts_from_zero(file: FleetFile) -> None:
    watch = RateWatch(file.fleet)
    for second in range(8):
        pid, count = (1, 300 * second) if second < 4 else (2, 300 * (second - 4))
        watch.take([report(pid, search=count)], float(second))
        assert watch.drifted() is None
    assert 200 < watch.rates_rps["search"] <= 300


def refuse(fleet: Fleet) -> Planned:
    raise PlanningError("no GPU has room")


def accept(fleet: Fleet) -> Planned:
    return Planned(placement=BOTH, moves=None)


def test_a_plan_that_failed_is_made_again_after_a_while_until_there_is_one(
    file: FleetFile,
) -> None:
    replanning = Replanning(file.fleet)

    def reason(now_s: float) -> str:
        return replanning.reason(file.fleet, drifted=False, now_s=now_s)

    assert reason(1e6) == ""  # nothing has failed
    for begun_s in (100.0, 200.0):  # and not only the first time
        with pytest.raises(PlanningError, match="room"):
            replanning.plan(file.fleet, refuse, begun_s)
        assert reason(begun_s + 0.9 * AGAIN_AFTER_S) == ""
        assert reason(begun_s + 1.1 * AGAIN_AFTER_S) == "the last attempt failed"
    assert replanning.plan(file.fleet, accept, 300.0).placement == BOTH
    assert reason(1e6) == ""


def test_a_gpu_that_went_is_a_reason_once_and_again_when_it_is_back(file: FleetFile) -> None:
    (group,) = file.fleet.gpus
    half = msgspec.structs.replace(
        file.fleet, gpus=(msgspec.structs.replace(group, count=group.count - 1),)
    )
    replanning = Replanning(file.fleet)
    assert replanning.reason(file.fleet, drifted=True, now_s=0) == "rates have drifted"
    assert replanning.reason(half, drifted=True, now_s=0) == f"{SECOND} gone"
    assert replanning.gone(half) == {SECOND}
    with pytest.raises(PlanningError):  # also where the rest was not planned, it is not new
        replanning.plan(half, refuse, 0.0)
    assert replanning.reason(half, drifted=False, now_s=1) == ""
    assert replanning.reason(file.fleet, drifted=False, now_s=1) == f"{SECOND} back"


def test_manifests_have_a_pod_for_each_gpu_and_files_that_a_server_reads(file: FleetFile) -> None:
    manifests = list(yaml.safe_load_all(render_text(file, BOTH, "eclip:1")))
    assert manifests == render(file, BOTH, "eclip:1")
    kinds = [one["kind"] for one in manifests]
    assert kinds == ["ConfigMap", "Deployment"] * 2 + ["Service"] * 2
    maps = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "ConfigMap"}
    pods = [one for one in manifests if one["kind"] == "Deployment"]
    for pod, gpu in zip(pods, (FIRST, SECOND), strict=True):
        assert pod["apiVersion"] == "apps/v1" and pod["spec"]["replicas"] == 1
        template = pod["spec"]["template"]
        labels, spec = template["metadata"]["labels"], template["spec"]
        assert pod["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (container,) = spec["containers"]
        assert container["image"] == "eclip:1"
        assert container["command"] == ["eclip", "serve", "/etc/eclip/models.toml"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        text = maps[spec["volumes"][0]["configMap"]["name"]]["data"]["models.toml"]
        config = make_config(tomllib.loads(text), "the manifest")
        assert config.services == orders_of(file, BOTH)[gpu].config.services
        assert config.server.host == "0.0.0.0"
    for one in manifests:
        name = one["metadata"]["name"]
        assert name == name.lower() and len(name) <= 63 and name.isascii()
        if one["kind"] == "Service":
            (selector,) = one["spec"]["selector"].items()
            having = [pod for pod in pods if selector in pod["metadata"]["labels"].items()]
            assert len(having) == (2 if name == "search" else 1)


def test_examples_are_fleets_and_the_cluster_of_kuberay_has_their_labels() -> None:
    examples = Path(__file__).parents[3] / "examples"
    for name in ("fleet.toml", "fleet-local.toml"):
        assert load_fleet_file(examples / name).fleet.count == 4
    cluster, keeper, service = yaml.safe_load_all((examples / "kuberay.yaml").read_text())
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["labels"] == {MACHINE: group["groupName"]}
        assert list(group["resources"]) == ["h200"]
    (container,) = keeper["spec"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["eclip", "fleet", "up"]
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]

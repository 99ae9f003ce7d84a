"""``eclip fleet`` as its users meet it: a plan, what must move, JSON, and ways to get it wrong."""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.metadata
import json
import signal
import socket
import socketserver
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from commands import Cli, assert_refused, started
from eclip.errors import DeviceError
from eclip.fleet import running
from eclip.fleet.config import load_fleet_file
from eclip.fleet.ray import cluster
from running_fleet import free_ports

FLEET = """
[[service]]
name = "search"
model = "alexnet:1"
rate = 300
bound = "5ms"
instances = 2

[[service]]
name = "photos"
model = "resnet50:8"
rate = 100
bound = "12ms"

[[gpus]]
machine = "a"
kind = "h200"

[[gpus]]
machine = "b"
kind = "h200"
"""


@pytest.fixture
def fleet(cli: Cli) -> Path:
    path = Path("fleet.toml")  # the fixture cli works in a folder of its own
    path.write_text(FLEET)
    return path


def test_plan_is_printed_and_written_and_then_nothing_moves(cli: Cli, fleet: Path) -> None:
    told = json.loads(
        cli(
            "fleet",
            "plan",
            fleet,
            "--steps",
            "2",
            "-o",
            "p.json",
            "--scores",
            "s.json.gz",
            "--json",
        ).out
    )
    machines = [placed["gpu"]["machine"] for placed in told["placement"]["gpus"]]
    assert machines == ["a", "b"]
    assert Path("s.json.gz").exists()
    again = cli("fleet", "plan", fleet, "--steps", "0", "--running", "p.json").out
    assert "Nothing has to be loaded or unloaded." in again and "modelled" in again
    assert "2 GPUs, objective fewest" in cli("inspect", "p.json").out
    assert cli("inspect", "p.json", "--json").data == told["placement"]
    assert "sets of services" in cli("inspect", "s.json.gz").out


def test_simulated_day_is_printed_as_json_and_drawn(cli: Cli, fleet: Path) -> None:
    command = ("fleet", "plan", fleet, "--steps", 0, "--simulate", "--picture", "day.svg")
    told = cli(*command, "--json").data
    assert [day["label"] for day in told["days"]] == ["following", "static"]
    assert "picture of a simulated day" in cli("inspect", "day.svg").out


def test_fleet_rendered_for_kubernetes_is_known_to_inspect(cli: Cli, fleet: Path) -> None:
    assert cli("fleet", "render", fleet, "--k8s", "-o", "fleet.yaml", "--seconds", 0.1).code == 0
    assert "Deployment" in cli("inspect", "fleet.yaml").out


def test_a_day_that_is_interrupted_leaves_the_placement(fleet: Path, tmp_path: Path) -> None:
    text = ["fleet", "plan", fleet, "--steps", "0", "--simulate", "--picture", "day.svg"]
    place = "eclip.fleet.place.simulate:cells_of"
    with started(*text, folder=Path.cwd(), mark=tmp_path / "mark", place=place) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err
    assert "2 GPUs, objective fewest" in out and "A simulated day" not in out
    assert err.splitlines()[-1].endswith("found until then; no day was simulated")
    assert not Path("day.svg").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("h200", "h300"), "h300"),
        (("5ms", "0.01ms"), "one request takes"),
        (("photos", "search"), "two entries"),
        (("rate = 300", "rate = 300\\nrat = 1"), "rat"),
        (("alexnet:1", "alexnot:1"), "unknown model"),
        (("[[service]]", 'objective = "most"\\n[[service]]'), "unknown objective"),
    ],
)
def test_bad_fleets_end_in_one_line(
    cli: Cli, fleet: Path, change: tuple[str, str], words: str
) -> None:
    fleet.write_text(FLEET.replace(*change, 1).replace("\\n", "\n"))
    assert_refused(cli("fleet", "plan", fleet, "--steps", "0"), words)


def test_options_that_go_together_are_named(cli: Cli, fleet: Path) -> None:
    assert_refused(cli("fleet", "plan", fleet, "--picture", "d.svg"), "--simulate")
    assert_refused(
        cli("fleet", "plan", fleet, "--exact", "--running", "p.json"), "cannot be combined"
    )
    assert_refused(cli("fleet", "plan", fleet, "--running", "p.json"), "cannot read p.json")
    assert_refused(cli("fleet", "plan", fleet, "-o", "missing/p.json"), "no folder missing")
    assert_refused(cli("fleet", "plan", fleet, "--scores", "missing/s.gz"), "no folder missing")
    assert_refused(cli("fleet", "plan", fleet, "--scores", "."), "folder")
    Path("s.gz").write_bytes(b"")
    assert_refused(cli("fleet", "plan", fleet, "--scores", "s.gz"), "s.gz")


# --- Running a fleet, without one: what is refused before anything starts -----------------------


def test_ray_that_is_missing_or_another_is_refused(
    cli: Cli, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    for name in ("up", "status", "down"):
        with monkeypatch.context() as patched:
            patched.setattr(importlib.metadata, "version", version)
            assert_refused(cli("fleet", name, fleet), "pip install 'eclip[fleet]'")
            patched.setattr(importlib.metadata, "version", lambda _: "2.9.3")
            assert_refused(cli("fleet", name, fleet), "ray is 2.9.3 and must be")


def test_a_cluster_that_does_not_answer_is_named(cli: Cli, fleet: Path) -> None:
    text = fleet.read_text()
    fleet.write_text(f'[ray]\naddress = "127.0.0.1:9"\n{text}')
    for name in ("up", "status", "down"):
        assert_refused(cli("fleet", name, fleet), "cannot reach Ray at 127.0.0.1:9")
    fleet.write_text(f"[ray]\nport = 59999\n{text}")
    assert_refused(cli("fleet", "status", fleet), "is the fleet up?")
    assert_refused(cli("fleet", "up", fleet, "--detach"), "--detach needs an address")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_listens_and_is_not_ray_is_named(cli: Cli, fleet: Path, answer: bytes) -> None:
    """Ray's client would try for minutes."""
    text = fleet.read_text()
    with listening(answer) as port:
        fleet.write_text(f'[ray]\naddress = "127.0.0.1:{port}"\n{text}')
        for name in ("up", "status", "down"):
            assert_refused(cli("fleet", name, fleet), f"127.0.0.1:{port} is not Ray", "the address")
        fleet.write_text(f"[ray]\nport = {port}\n{text}")
        assert_refused(cli("fleet", "up", fleet), f"127.0.0.1:{port} is not Ray", "another port")


def test_a_routers_port_that_somebody_has_is_refused_before_anything_starts(
    cli: Cli, fleet: Path
) -> None:
    text = fleet.read_text()
    with listening(b"") as taken:
        ray, free = free_ports(2)
        for name, other in (("http_port", "grpc_port"), ("grpc_port", "http_port")):
            ports = f"{name} = {taken}\n{other} = {free}"
            fleet.write_text(f"[ray]\nport = {ray}\n[router]\n{ports}\n{text}")
            assert_refused(
                cli("fleet", "up", fleet), f"127.0.0.1:{taken}", f"another host or {name}"
            )


def test_two_that_start_a_fleet_at_one_port_are_told_apart(cli: Cli, fleet: Path) -> None:
    text = fleet.read_text()
    (port,) = free_ports(1)
    fleet.write_text(f"[ray]\nport = {port}\n{text}")
    with cluster.claim_port(load_fleet_file(fleet).ray):
        assert_refused(cli("fleet", "up", fleet), "another eclip fleet up is starting", str(port))


def test_a_fleet_that_another_command_has_changed_meanwhile_is_left_alone(
    cli: Cli, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = fleet.read_text()
    fleet.write_text(f'[ray]\naddress = "127.0.0.1:9"\n{text}')
    done = []

    def bring_up(*_: object) -> None:
        raise cluster.GoneError("another eclip fleet up or down was given at the same time")

    for name in ("connect", "running_placement", "check_nodes"):
        monkeypatch.setattr(cluster, name, lambda *_: None)
    monkeypatch.setattr(cluster, "take_down", lambda: done.append("down"))
    monkeypatch.setattr(cluster, "bring_up", bring_up)
    assert_refused(cli("fleet", "up", fleet, "--seconds", "0.1"), "at the same time", code=1)
    assert not done


def test_a_change_is_not_taken_for_the_end_of_the_fleet(
    fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one controller replaces another there is none. A keeper that saw this ended Ray."""
    monkeypatch.setattr(running, "_LOOK_S", 0.0)
    monkeypatch.setattr(cluster, "answers", lambda *_: True)
    looks = iter([*"+--+-----+", *"------"])
    monkeypatch.setattr(
        cluster, "find_controller", lambda: None if next(looks) == "-" else "a controller"
    )
    said: list[str] = []
    with running.FleetRunner(fleet) as keeper:
        keeper.stay(threading.Event(), said.append)
    assert said == ["the fleet was taken down"] and not list(looks)


def test_an_actor_that_was_ended_for_good_is_told_from_one_that_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = importlib.import_module("ray")

    def get(error: Exception, timeout: float) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)
    for error in (ray.exceptions.ActorDiedError(), ray.exceptions.ActorUnavailableError("", None)):
        method = types.SimpleNamespace(remote=lambda error=error: error)
        with pytest.raises(DeviceError) as seen:
            cluster.ask(method)
        ended = isinstance(error, ray.exceptions.ActorDiedError)
        assert isinstance(seen.value, cluster.GoneError) == ended


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[int]:
    """Somebody who says this to everybody and hangs up; the port."""

    class Says(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):  # one who only looks whether somebody is there
                self.request.sendall(answer)
                self.request.shutdown(socket.SHUT_WR)
                self.request.recv(1000)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Says) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("h200", "h300"), "h300"),
        (("5ms", "0.01ms"), "one request takes"),
        (("rate = 300", "rate = 3000000"), "search"),
        (("[[service]]", "[server]\nhost = 'x'\n[[service]]"), "host is set by the fleet"),
        (("[[service]]", "[router]\nport = 1\n[[service]]"), "port"),
    ],
)
def test_up_refuses_what_cannot_be_kept(
    cli: Cli, fleet: Path, change: tuple[str, str], words: str
) -> None:
    fleet.write_text("[ray]\nport = 59999\n" + FLEET.replace(*change, 1))
    assert_refused(cli("fleet", "up", fleet, "--seconds", "0.1"), words)


def test_render_writes_manifests_and_nothing_else(cli: Cli, fleet: Path) -> None:
    assert_refused(cli("fleet", "render", fleet), "--k8s")
    text = cli("fleet", "render", fleet, "--k8s", "--seconds", "0.1").out
    manifests = list(yaml.safe_load_all(text))
    kinds = collections.Counter(one["kind"] for one in manifests)
    assert kinds == {"ConfigMap": 2, "Deployment": 2, "Service": 2}
    cli("fleet", "render", fleet, "--k8s", "--seconds", "0.1", "-o", "fleet.yaml")
    assert Path("fleet.yaml").read_text() == text

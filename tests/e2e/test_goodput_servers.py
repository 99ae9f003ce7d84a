"""What the bench of goodput starts, on simulators: servers of their own, and background beside."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from lab.serving import goodput, hops
from lab.serving.goodput import MPS, measure_beside, started
from lab.support.mps import client_pids, under_mps
from lab.support.offered import MIXES, Front, services_of

from eclip.cuda.processes.mps import PIPES, SHARE
from eclip.gpu.board import VARIABLE
from eclip.server.device.claim import claimed
from standins import install_control

UUID = "GPU-12345678"
PATIENT = 10_000.0  # times what a request takes: nothing here depends on a quiet machine


@pytest.fixture(autouse=True)
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_control(tmp_path, "working")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(goodput, "gpu_uuid", lambda: UUID)


def test_every_model_has_a_server_under_one_daemon_and_one_front_asks_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SHARE, "30")  # another's, which would limit all servers
    services = services_of("three", PATIENT)
    with started(services, MPS, "sim") as (driver, about):
        assert about == {"servers": 3, "mps_clients": 0}  # simulators are no clients
        variables = [
            dict(
                line.split("=", 1)
                for line in Path(f"/proc/{one.device_pid}/environ").read_text().split("\0")
                if line
            )
            for one in driver.servers
        ]
        assert len({one.device_pid for one in driver.servers}) == 3
        for name in (PIPES, VARIABLE):
            (place,) = {each[name] for each in variables}
            assert Path(place).is_dir()
        for each in variables:
            assert each["CUDA_VISIBLE_DEVICES"] == UUID
            assert SHARE not in each
        for one in driver.servers:
            plan = one.supervisor.services.deployed
            assert plan.policy == "shared"
        found = Front(driver, services).run(0.1, 0.5)
        assert found["attained"] == found["worst"] == 1.0
        asked = [
            one.core.statistics(name).success.count
            for one in driver.servers
            for name in one.core.models
        ]
        assert len(asked) == 3
        assert sum(asked) == found["requests"]
        assert all(asked)
    assert VARIABLE not in os.environ


def test_clients_are_those_that_the_daemon_names() -> None:
    with under_mps(UUID) as daemon:
        assert client_pids(daemon) == set()
        (daemon.pipes / "clients").write_text("12\n345\n")
        assert client_pids(daemon) == {12, 345}


def test_servers_of_one_block_do_not_refuse_each_other() -> None:
    uuid = f"GPU-goodput-{os.getpid()}"
    with under_mps(uuid), claimed(uuid), claimed(uuid):
        pass
    Path(f"/dev/shm/eclip-server-{os.geteuid()}-{uuid}").unlink()


def test_background_runs_beside_services_and_all_of_it_is_counted() -> None:
    row = measure_beside("three", PATIENT, device="sim", seconds=1.0, goodput=0.1)
    assert row["attained"] == row["attained_alone"] == 1.0
    assert 0 < row["busy_share"] < 1
    assert row["alone_rps"] > 0
    assert row["beside_rps"] > 0


def test_hops_of_batches_add_up_to_the_latency(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everybody is late with a bound of nothing, so every batch has a line."""
    monkeypatch.setattr(hops, "WARM_S", 0.1)
    printed: list[hops.Hops] = []
    print_load = hops.print_load

    def noted(load: float, found: Sequence[hops.Hops], bounds_ms: dict[str, float]) -> None:
        printed.extend(found)
        print_load(load, found, dict.fromkeys(bounds_ms, 0.0))

    monkeypatch.setattr(hops, "print_load", noted)
    monkeypatch.setattr("sys.argv", ["hops.py", "three", "--loads", "0.1", "--seconds", "0.5"])
    hops.main()
    said = capsys.readouterr().out
    assert f"{len(printed)} late batches" in said
    assert {one.service for one in printed} == set(MIXES["three"])
    assert all(min(one.each_ns) >= 0 and len(one.each_ns) == len(hops.HOPS) for one in printed)

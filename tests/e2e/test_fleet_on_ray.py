"""A fleet on a real Ray of this machine, with simulated GPUs and Triton's clients.

One test a cluster: tests of one file may run in several processes, and each would start its own.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from eclip.fleet.config import load_fleet_file
from eclip.fleet.ray import cluster as ray_cluster
from fleet_functions import JOURNAL
from running_fleet import PATH, PATIENCE_S, Load, RunningFleet, fleet, free_ports, write_fleet

# A cluster that somebody else runs: a line on its input lets it take its next step.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

common = dict(num_cpus=0, object_store_memory=80_000_000, node_ip_address="127.0.0.1",
              include_log_monitor=False, include_dashboard=False, no_monitor=True,
              resources={{"h200": 1}})
cluster = Cluster()
cluster.add_node(gcs_server_port={port}, labels={{"machine": "node-1"}}, **common)
for step in range(2):
    print("without node-2", flush=True)
    sys.stdin.readline()
    node = cluster.add_node(labels={{"machine": "node-2"}}, **common)
    print("with node-2", flush=True)
    sys.stdin.readline()
    if not step:
        cluster.remove_node(node, allow_graceful=False)
cluster.shutdown()
"""


@contextlib.contextmanager
def loading(running: RunningFleet) -> Iterator[Load]:
    """Clients ask for the length of the block."""
    load = Load(f"127.0.0.1:{running.http_port}")
    thread = threading.Thread(target=lambda: asyncio.run(load.run()))
    thread.start()
    try:
        yield load
    finally:
        load.stopped = True
        thread.join()


@contextlib.contextmanager
def connected(running: RunningFleet) -> Iterator[None]:
    ray_cluster.connect(running.settings)
    try:
        yield
    finally:
        ray_cluster.disconnect()


def wait_until(running: RunningFleet, condition: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not condition(status := running.status()):
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return status


def assert_answered(load: Load, running: RunningFleet, broken: int) -> None:
    """Every request once: with its own result, or, where its GPU or router was killed, an error."""
    counts = collections.Counter(how for _, how, _ in load.outcomes)
    assert counts["answered"] > 100
    assert counts["wrong"] == counts["nobody there"] == 0
    assert counts["connection broken"] <= broken
    ran = collections.Counter(int(line) for line in running.journal.read_text().split())
    del ran[0]  # warm-ups
    assert max(ran.values()) == 1
    assert {number for _, how, number in load.outcomes if how == "answered"} <= ran.keys()


def eclip(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eclip", "fleet", *arguments, str(file)],
        capture_output=True,
        text=True,
        check=False,
    )


def listeners(running: RunningFleet) -> set[str]:
    """Addresses that Ray's processes of this fleet listen on."""
    pids = {running.process.pid, *running.children("")}
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.long  # a cluster takes 30 s to start on two quiet cores, and minutes on busy ones
def test_a_fleet_answers_and_heals() -> None:
    with fleet({"node-1": 1, "node-2": 1}, 2, True) as running:
        client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{running.grpc_port}")
        given = tritonclient.grpc.InferInput("number", (1, 1), "INT64")
        given.set_data_from_numpy(np.array([[1 << 40]]))
        assert client.infer("double", [given]).as_numpy("twice").tolist() == [[2 << 40]]
        assert client.is_server_ready() and not client.is_model_ready("other")
        client.close()
        address = f"http://127.0.0.1:{running.http_port}/eclip/route/double"
        with urllib.request.urlopen(address) as answer:
            choice = json.load(answer)
        assert choice["gpu"] in ("node-1/h200/0", "node-2/h200/0") and choice["fresh"]
        # 127.0.0.1, as the tables have it: of IPv4, and of IPv6 that means it
        assert listeners(running) <= {"0100007F", "0000000000000000FFFF00000100007F"}

        with connected(running):
            before = running.status()
            assert [one.near for one in before.routers] == [2, 2]
            with loading(running) as load:
                time.sleep(1.0)
                gpu, router = before.gpus[0].pid, before.routers[0].pid
                os.kill(gpu, signal.SIGKILL)
                os.kill(router, signal.SIGKILL)
                healed = wait_until(
                    running,
                    lambda now: (
                        now.ready
                        and all(one.state == "ready" and one.pid != gpu for one in now.gpus)
                        and len(now.routers) == 2
                        and all(one.ready and one.pid != router for one in now.routers)
                    ),
                )
                time.sleep(0.5)
            assert healed.gpus[1].pid == before.gpus[1].pid  # nobody else was disturbed
            assert_answered(load, running, broken=12)

        down = eclip(running.file, "down")
        assert (down.returncode, down.stdout) == (0, "The fleet of fleet.toml is down.\n")
        assert running.process.wait(30) == 0
        assert "the fleet was taken down" in running.log.read_text()
        assert not running.ray_folder.exists()  # what other Rays of the machine share is left alone
        again = eclip(running.file, "status")
        assert again.returncode == 2 and "is the fleet up?" in again.stderr


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_is_named_and_nothing_stays_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers are never ready then, and the command waited for ten minutes."""
    port, http, grpc = free_ports(3)
    file = tmp_path / "fleet.toml"
    write_fleet(file, {"node-1": 1}, 1, True, (f"port = {port}", http, grpc))
    text = file.read_text()
    begin, end = text.index("[[service]]"), text.index("[[gpus]]")
    broken = text[begin:end].replace('"double"', '"broken"')
    file.write_text(text + broken.replace("fleet_functions:double", "fleet_functions:nothing"))
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setenv(JOURNAL, str(tmp_path / "journal"))
    up = eclip(file, "up")
    assert up.returncode == 1 and up.stdout == ""
    (line,) = up.stderr.splitlines()
    assert line.startswith("eclip: service 'broken' was not loaded on node-1/h200/0: ")
    assert "nothing" in line
    assert not ray_cluster.answers(load_fleet_file(file).ray)


@pytest.mark.long
def test_a_model_is_changed_under_load_and_a_machine_and_the_head_are_lost() -> None:
    with fleet({"node-1": 2, "node-2": 2}, 2, True) as running:
        with loading(running) as load:
            time.sleep(1.0)
            running.change("fleet_functions:double", "fleet_functions:double_again")
            changed = eclip(running.file, "up")
            assert changed.returncode == 0 and "is changed and up: 4 of 4" in changed.stdout
            assert not load.lines
            with connected(running):
                (raylet,) = [
                    pid
                    for pid in running.children("raylet/raylet")
                    if b"--head" not in Path(f"/proc/{pid}/cmdline").read_bytes()
                ]
                os.kill(raylet, signal.SIGKILL)
                gone = wait_until(running, lambda now: now.ready and now.placements > 1)
                assert [one.state for one in gone.gpus] == ["ready", "ready", "gone", "gone"]
        assert_answered(load, running, broken=12)
        for words in ("gcs_server", "raylet/raylet"):
            for pid in running.children(words):
                os.kill(pid, signal.SIGKILL)
        running.wait_for("is back after")
        with connected(running):
            assert [one.state for one in running.status().gpus] == ["ready"] * 4
        running.journal.write_text("")  # another load counts from 1 again
        with loading(running) as load:
            time.sleep(2.0)
        assert_answered(load, running, broken=0)


@pytest.mark.long
def test_gpus_of_other_machines_are_reached_over_tcp() -> None:
    with fleet({"node-1": 1, "node-2": 1}, 1, False) as running, connected(running):
        assert running.status().routers[0].far == 2
        with loading(running) as load:
            time.sleep(1.0)
            os.kill(running.status().gpus[0].pid, signal.SIGKILL)
            time.sleep(3.0)
        assert_answered(load, running, broken=0)


@pytest.mark.long
def test_a_fleet_is_placed_again_when_rates_drift_and_nobody_notices() -> None:
    with fleet({"node-1": 1, "node-2": 1}, 1, True) as running, connected(running):
        running.change("replan = false\n\n[ray]", "replan = true\n\n[ray]")
        running.change("rate = 100", "rate = 10")
        assert eclip(running.file, "up").returncode == 0
        with loading(running) as load:
            now = wait_until(running, lambda now: now.placements > 1)
            assert now.rates_rps["double"] > 15
            time.sleep(1.0)
        assert sum(gpu.services["double"] for gpu in now.gpus) > 15
        assert not load.lines
        assert_answered(load, running, broken=0)


@pytest.mark.long
def test_a_cluster_that_is_there_is_used_and_a_machine_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, http, grpc = free_ports(3)
    file = tmp_path / "fleet.toml"
    where = (f'address = "127.0.0.1:{port}"', http, grpc)
    write_fleet(file, {"node-1": 1, "node-2": 1}, 1, True, where)
    (tmp_path / "journal").touch()
    given = {JOURNAL: str(tmp_path / "journal"), "PYTHONPATH": PATH, **ray_cluster.THIS_MACHINE}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER.format(port=port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def step(said: str) -> None:
        assert cluster.stdin is not None and cluster.stdout is not None
        cluster.stdin.write("\n")
        cluster.stdin.flush()
        assert cluster.stdout.readline().strip() == said

    def states() -> list[str]:
        told = json.loads(eclip(file, "status", "--json").stdout or "{}")
        return [gpu["state"] for gpu in told.get("gpus", [])] if told.get("ready") else []

    def until_states(wanted: list[str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (seen := states()) != wanted:
            assert time.monotonic() < deadline, seen

    try:
        assert cluster.stdout is not None
        assert cluster.stdout.readline().strip() == "without node-2"
        lacking = eclip(file, "up", "--detach")
        assert lacking.returncode == 2
        assert "--labels machine=node-2 --resources '{\"h200\": 1}'" in lacking.stderr
        step("with node-2")
        up = eclip(file, "up", "--detach")
        assert up.returncode == 0, up.stderr
        until_states(["ready", "ready"])
        step("without node-2")
        until_states(["ready", "gone"])
        step("with node-2")
        until_states(["ready", "ready"])
        assert eclip(file, "down").returncode == 0
        again = eclip(file, "status")
        assert again.returncode == 2 and "no fleet is up" in again.stderr
    finally:
        cluster.communicate("\n", PATIENCE_S)

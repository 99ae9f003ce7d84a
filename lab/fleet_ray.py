"""A fleet on a local Ray with simulated GPUs: what failures cost, and what the router adds.

    PYTHONPATH=src python lab/fleet_ray.py [failures] [latency]

``failures``: 4 GPUs on two machines, two routers, Triton's client under load. Then kill -9 of a
GPU's actor, of a router, of a machine (a Ray node with all its actors), a rolling change of the
model, and kill -9 of Ray's head. Every request is accounted for, and the model itself writes down
what it ran. ``latency``: the round trip through a router, near (shared memory) and far (TCP),
against the same GPU asked directly, and the routers' time on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.http.aio

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from lab.support.processes import cpu_s
from lab.support.tables import print_table

from eclip.fleet.ray import cluster
from running_fleet import CLIENTS, PATIENCE_S, Load, RunningFleet, fleet


class Trial:
    """What happened to requests between two moments."""

    def __init__(self, load: Load) -> None:
        self.began_s = time.monotonic()
        self._load = load
        self._first = len(load.outcomes)

    def row(self, name: str, recovery: str) -> list[str]:
        outcomes = self._load.outcomes[self._first :]
        counts = collections.Counter(how for _, how, _ in outcomes)
        answered = [when for when, how, _ in outcomes if how == "answered"]
        gap_s = max(np.diff([self.began_s, *answered]), default=0.0)
        hows = ("answered", "wrong", "refused", "lost", "connection broken", "nobody there")
        return [name, *(str(counts[how]) for how in hows), f"{gap_s:.2f}", recovery]


async def break_things(running: RunningFleet) -> None:
    ask = asyncio.to_thread
    load = Load(f"127.0.0.1:{running.http_port}")
    working = asyncio.create_task(load.run())
    rows = []
    await asyncio.sleep(2.0)
    trial = Trial(load)
    await asyncio.sleep(5.0)
    rows.append(trial.row("nothing, 5 s", "-"))

    async def seen(condition: Any, what: str) -> float:
        began_s = time.monotonic()
        while not condition(await ask(running.status)):
            if time.monotonic() > began_s + PATIENCE_S:
                raise SystemExit(f"waited {PATIENCE_S:.0f} s for {what}")
            await asyncio.sleep(0.05)
        return time.monotonic() - began_s

    def gpus(status: Any) -> set[int]:
        return {gpu.pid for gpu in status.gpus if gpu.state == "ready"}

    before = await ask(running.status)
    victim = before.gpus[0].pid
    trial = Trial(load)
    os.kill(victim, signal.SIGKILL)
    took_s = await seen(
        lambda now: victim not in gpus(now) and len(gpus(now)) == len(gpus(before)), "the actor"
    )
    await asyncio.sleep(1.0)
    rows.append(trial.row("kill -9 of a GPU's actor", f"{took_s:.1f} s, by Ray"))

    victim = before.routers[0].pid
    trial = Trial(load)
    os.kill(victim, signal.SIGKILL)
    took_s = await seen(
        lambda now: (
            len(now.routers) == len(before.routers)
            and all(one.ready and one.pid != victim for one in now.routers)
        ),
        "the router",
    )
    await asyncio.sleep(1.0)
    rows.append(trial.row("kill -9 of a router", f"{took_s:.1f} s, by Ray"))

    trial = Trial(load)
    text = running.file.read_text().replace(
        "fleet_functions:double", "fleet_functions:double_again"
    )
    running.file.write_text(text)
    changed = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "eclip", "fleet", "up", str(running.file), "--seconds", "1",
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    await changed.wait()
    took_s = time.monotonic() - trial.began_s
    await asyncio.sleep(1.0)
    rows.append(trial.row("rolling change of the model", f"{took_s:.1f} s, the whole command"))

    trial = Trial(load)
    (raylet,) = [pid for pid in running.children("raylet/raylet") if not is_head(pid)]
    os.kill(raylet, signal.SIGKILL)
    noticed_s = await seen(lambda now: any(gpu.state == "gone" for gpu in now.gpus), "the node")
    took_s = noticed_s + await seen(lambda now: now.ready and now.placements > 1, "placing again")
    await asyncio.sleep(1.0)
    text = f"noticed by Ray {noticed_s:.1f} s, placed again {took_s:.1f} s"
    rows.append(trial.row("kill -9 of a machine's Ray node", text))

    await ask(cluster.disconnect)
    trial = Trial(load)
    for words in ("gcs_server", "raylet/raylet"):
        for pid in running.children(words):
            os.kill(pid, signal.SIGKILL)
    took_s = await asyncio.to_thread(running.wait_for, "is back after")
    await asyncio.sleep(2.0)
    rows.append(trial.row("kill -9 of Ray's head", f"{took_s:.1f} s, all from fleet.toml"))

    load.stopped = True
    await working
    columns = ["what", "answered", "wrong", "refused", "lost", "broken", "nobody", "gap s",
               "recovery"]  # fmt: skip
    print_table(f"{len(load.outcomes)} requests, {CLIENTS} connections", columns, rows)
    ran = collections.Counter(int(line) for line in running.journal.read_text().split())
    del ran[0]  # warm-ups
    answered = {number for _, how, number in load.outcomes if how == "answered"}
    print(f"Ran twice: {sum(times > 1 for times in ran.values())}. "
          f"Answered without having run: {len(answered - ran.keys())}.")  # fmt: skip
    for line, times in load.lines.most_common(12):
        print(f"  {times} × {line}")


def is_head(raylet: int) -> bool:
    return b"--head" in Path(f"/proc/{raylet}/cmdline").read_bytes()


def memory_gib(pid: int) -> float:
    """Of a process and all that it started; pages that several have in common count once."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
    family, found = [pid], 0
    for one in family:
        family += [child for child, parent in parents.items() if parent == one]
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found / 2**20


# --- Latency ----------------------------------------------------------------------------------


def ask_in_turns(
    addresses: dict[str, tuple[ModuleType, str]], count: int, pid: int
) -> dict[str, tuple[float, float, float]]:
    """p50 and p10 of the round trip in ms, and ms of the process' time for a request. Addresses are
    asked in turns of 50, so that what else the machine does meets all alike; the p10 is that of
    requests that met little of it."""
    times: dict[str, list[float]] = {name: [] for name in addresses}
    used = dict.fromkeys(addresses, 0.0)
    clients = {
        name: (module, module.InferenceServerClient(address))
        for name, (module, address) in addresses.items()
    }
    for turn in range(count // 50 + 1):
        for name, (module, client) in clients.items():
            given = module.InferInput("number", (1, 1), "INT64")
            given.set_data_from_numpy(np.array([[1]]))
            before_s = cpu_s(pid)
            for _ in range(50):
                begin_s = time.perf_counter()
                client.infer("double", [given])
                if turn:
                    times[name].append(time.perf_counter() - begin_s)
            if turn:
                used[name] += cpu_s(pid) - before_s
    for _, client in clients.values():
        client.close()
    return {
        name: (
            1e3 * float(np.percentile(taken, 50)),
            1e3 * float(np.percentile(taken, 10)),
            1e3 * used[name] / len(taken),
        )
        for name, taken in times.items()
    }


def measure_latency(count: int) -> None:
    rows = []
    for near in (True, False):
        with fleet({"node-1": 1}, 1, near) as running:
            cluster.connect(running.settings)
            now = running.status()
            grpc = f"127.0.0.1:{running.grpc_port}"
            http = f"127.0.0.1:{running.http_port}"
            gpu = now.gpus[0].http
            controller = cluster.find_controller()
            assert controller is not None
            (place,) = cluster.ask(controller.table).places
            figures = ask_in_turns(
                {
                    "HTTP direct": (tritonclient.http, gpu),
                    "HTTP routed": (tritonclient.http, http),
                    "gRPC direct": (tritonclient.grpc, place.grpc),
                    "gRPC routed": (tritonclient.grpc, grpc),
                },
                count,
                now.routers[0].pid,
            )
            cluster.disconnect()
        how = "shared memory" if near else "TCP"
        for protocol in ("HTTP", "gRPC"):
            direct, routed = figures[f"{protocol} direct"], figures[f"{protocol} routed"]
            rows.append(
                [
                    f"{protocol}, {how}",
                    f"{direct[0]:.2f}",
                    f"{routed[0]:.2f}",
                    f"{routed[0] - direct[0]:+.2f}",
                    f"{direct[1]:.2f}",
                    f"{routed[1]:.2f}",
                    f"{routed[1] - direct[1]:+.2f}",
                    f"{routed[2]:.2f}",
                ]
            )
    columns = ["client, way to the GPU", "direct p50 ms", "routed", "added", "direct p10 ms",
               "routed", "added", "router's CPU ms"]  # fmt: skip
    print_table(f"Router, {count} requests in turn each", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["failures", "latency"])
    parser.add_argument("--requests", type=int, default=1000)
    given = parser.parse_args()
    if "failures" in given.parts:
        began_s = time.monotonic()
        with fleet({"node-1": 2, "node-2": 2}, 2, True) as running:
            print(f"From fleet.toml to a fleet that serves: {time.monotonic() - began_s:.1f} s, "
                  f"{memory_gib(running.process.pid):.1f} GiB")  # fmt: skip
            cluster.connect(running.settings)
            asyncio.run(break_things(running))
    if "latency" in given.parts:
        measure_latency(given.requests)


if __name__ == "__main__":
    main()

"""Claims of docs/results.md about goodput: how much load a server takes with 99% in their bounds.

    PYTHONPATH=.:src:tests/support python3 bench/serving/goodput.py FOLDER --device cuda

Services of a mix get Poisson arrivals, each for an equal part of the device's time at load 1. The
load rises until less than 90% of the requests are answered within their bounds, and is then halved
towards 99%. A request that is refused has missed its bound. The bench itself is the front, so
protocols are not measured. Results are in FOLDER as soon as a way is done; what is there is not
measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.support.kept import add_rows, read_rows
from bench.support.tables import print_table

from eclip.artefacts.model_key import ModelKey
from eclip.frontends.library import find_profile
from eclip.lab.case import find_calibration, find_topology
from eclip.serving.messages import RefusedError
from eclip.serving.tensors import DATATYPES
from served_core import Driver, config_of, request

MIXES = {
    "three": ("resnet50", "bert", "densenet121"),
    "four": ("resnet152", "vit_b_16", "gpt2", "efficientnet"),
    "five": ("albert", "vgg19", "convnext", "shufflenet", "resnext101"),
    "six": ("bert", "resnet50", "mobilenet_v3", "densenet201", "vit_b_16", "alexnet"),
}
WAYS = {"eclip": None, "streams": "shared", "priorities": "priority"}
BATCHES = (1, 8)
MOST_OF_BOUND = 0.7  # that a batch may take: a larger one would be late too often
WANTED, HOPELESS = 0.99, 0.90
FIRST_LOAD, STEP, HALVINGS = 0.5, 1.5, 4
MOST_LOAD = 8.0
SETTLE_S = 0.5
LATE_MS = 1.0  # of the generator itself, above which a run is marked


@dataclass(frozen=True)
class Service:
    name: str
    rest_ms: float  # of one request with the device to itself
    bound_ms: float
    batches: tuple[int, ...]
    share: int  # of how many

    def rate_rps(self, load: float) -> float:
        return 1e3 * load / self.rest_ms / self.share


def services_of(mix: str, times: float) -> list[Service]:
    topology = find_topology("h200")
    calibration = find_calibration(None, topology)

    def takes_ms(name: str, batch: int) -> float:
        profile = find_profile(ModelKey(name, batch), topology, calibration, [])
        return float(profile.request_ns[-1] / 1e6)

    found = []
    for name in MIXES[mix]:
        rest_ms = takes_ms(name, 1)
        bound_ms = times * rest_ms
        fitting = tuple(one for one in BATCHES if takes_ms(name, one) <= MOST_OF_BOUND * bound_ms)
        found.append(Service(name, rest_ms, bound_ms, fitting, len(MIXES[mix])))
    return found


def start(services: Sequence[Service], way: str, device: str) -> Driver:
    settings = [
        {
            "name": one.name,
            "model": one.name,
            "bound": f"{one.bound_ms:.3f}ms",
            "rate": one.rate_rps(1.0),
            "batches": list(one.batches),
        }
        for one in services
    ]
    server = {"device": device, "replan": True, "replan_seconds": 5.0}
    if WAYS[way] is not None:
        server |= {"policy": WAYS[way], "replan": False}
    return Driver(config_of(*settings, **server))


class Front:
    """Sends requests when they are due, and sees which are answered within their bounds."""

    def __init__(self, driver: Driver, services: Sequence[Service]) -> None:
        self._driver, self._services = driver, services
        models = driver.served.core.models
        self._inputs = {
            one.name: {
                tensor.name: np.zeros((1, *tensor.shape), DATATYPES[tensor.datatype].dtype)
                for tensor in models[one.name].inputs
            }
            for one in services
        }

    def run(self, load: float, seconds: float, seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        due: list[tuple[float, Service]] = []
        for one in self._services:
            count = random.poisson(one.rate_rps(load) * seconds)
            due += [(at, one) for at in random.uniform(0, seconds, count).tolist()]
        due.sort(key=lambda pair: pair[0])
        return self._driver(self._send(due, load), 60.0 + 10 * seconds)

    async def _send(self, due: Sequence[tuple[float, Service]], load: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        kept = {one.name: [0, 0] for one in self._services}  # within the bound, and all
        late_s: list[float] = []
        begin = loop.time() + 0.05

        async def ask(at: float, one: Service) -> None:
            ended = float("inf")
            try:
                await self._driver.served.core.infer(request(one.name, self._inputs[one.name]))
                ended = loop.time()
            except RefusedError:
                pass
            kept[one.name][1] += 1
            kept[one.name][0] += 1e3 * (ended - begin - at) <= one.bound_ms

        asked = []
        for at, one in due:
            while (left := begin + at - loop.time()) > 0:
                await asyncio.sleep(left - 1e-3 if left > 2e-3 else 0)
            late_s.append(-left)
            asked.append(asyncio.ensure_future(ask(at, one)))
        await asyncio.gather(*asked)
        within, total = (sum(pair[index] for pair in kept.values()) for index in (0, 1))
        return {
            "load": load,
            "requests": total,
            "attained": within / max(total, 1),
            "worst": min(pair[0] / max(pair[1], 1) for pair in kept.values()),
            "generator_late_ms": 1e3 * float(np.percentile(late_s, 99)),
        }


def sweep(front: Front, seconds: float) -> tuple[float, list[dict[str, Any]]]:
    """The largest load that was seen to be served, and every run."""
    runs: list[dict[str, Any]] = []

    def serves(load: float) -> float:
        runs.append(front.run(load, seconds, seed=len(runs)))
        print(json.dumps(runs[-1]), flush=True)
        time.sleep(SETTLE_S)
        return float(runs[-1]["attained"])

    good, bad, load = 0.0, MOST_LOAD, FIRST_LOAD
    while load < MOST_LOAD:
        attained = serves(load)
        if attained >= WANTED:
            good = load
        else:
            bad = min(bad, load)
        if attained < HOPELESS:
            break
        load *= STEP
    for _ in range(HALVINGS):
        middle = (good + bad) / 2
        if serves(middle) >= WANTED:
            good = middle
        else:
            bad = middle
    return good, runs


def measure(mix: str, times: float, way: str, device: str, seconds: float) -> dict[str, Any]:
    services = services_of(mix, times)
    with start(services, way, device) as driver:
        front = Front(driver, services)
        front.run(0.2, SETTLE_S, seed=1)  # warm
        goodput, runs = sweep(front, seconds)
    return {"mix": mix, "bound": times, "way": way, "goodput": goodput, "runs": runs}


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    found = {(row["mix"], row["bound"], row["way"]): row for row in rows}
    lines = []
    for mix, times in dict.fromkeys((row["mix"], row["bound"]) for row in rows):
        cells = [found.get((mix, times, way)) for way in WAYS]
        base = found.get((mix, times, "streams"))
        ours = found.get((mix, times, "eclip"))
        ratio = (
            f"{ours['goodput'] / base['goodput']:.2f}" if ours and base and base["goodput"] else ""
        )
        marked = any(
            run["generator_late_ms"] > LATE_MS for one in cells if one for run in one["runs"]
        )
        lines.append(
            [
                f"{mix}, bound {times:g}",
                *("" if one is None else f"{one['goodput']:.2f}" for one in cells),
                ratio,
                "generator late" if marked else "",
            ]
        )
    columns = ["mix", *WAYS, "eclip ÷ streams", ""]
    print_table(
        "Load at which 99% keep their bounds, of the device's time at batch 1", columns, lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="sim")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--bounds", default="5,3,10")
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    results = given.folder / "goodput.jsonl"
    rows = read_rows(results)
    done = {(row["mix"], row["bound"], row["way"]) for row in rows}
    for times in map(float, given.bounds.split(",")):
        for mix in given.mixes.split(","):
            for way in WAYS:
                if (mix, times, way) in done:
                    continue
                row = measure(mix, times, way, given.device, given.seconds)
                rows.append(row)
                add_rows(results, [row])
    print_rows(rows)


if __name__ == "__main__":
    main()

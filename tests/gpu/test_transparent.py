"""Unmodified programs under ``eclip exec``: the same outputs, on the plan's SMs.

The programs in ``apps/`` are recorded with ``eclip record``, planned (twelve groups and more over
three lanes of their own for each model), and run with the plan and without. What does not depend
on each other runs at once: no time is looked at here, only outputs and places.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.topology import Mask, Topology
from eclip.core.trace import Trace
from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import call, cu
from eclip.cuda.lanes import LanePool
from eclip.cuda.stressors import Stressors
from eclip.files import store

ROOT = Path(__file__).parents[2]
APPS = Path(__file__).parent / "apps"
MODELS = ("resnet50:8", "bert:8")
ROW = 256
BLOCKS = 600  # what the programs' telling kernel has, and its row on top
GROUPS = 12
# Three lanes a worker; the workers overlap in the middle.
MASKS = (("0-3", "0-7", "0-11"), ("12-15", "8-15", "4-15"))
# A recorded request may begin in the middle of what the program calls one: then its first and its
# last are planned only in part, here one of forty.
REQUESTS = 40
RECORDED = 8
# What a program is called with to be recorded, and to be run.
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "two_models.py": (("eager",), ("all",)),
    "server.py": ((), ()),
}

Found = dict[str, np.ndarray[Any, Any]]
PlanOf = Callable[..., Plan]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if shutil.which("g++") is None:
        pytest.skip("libeclip needs g++ to be built")
    subprocess.run(["make", "-s", "-C", str(ROOT / "native"), "library"], check=True)


@pytest.fixture(scope="module")
def slices_sms(device: CudaDevice, stressors: Stressors) -> list[frozenset[int]]:
    """The SMs of every slice, as a lane of its own shows them."""
    masks = [Mask([index]) for index in range(len(device.topology.slice_units))]
    data = int(call(cu.cuMemAlloc, 4 * ROW))
    seen = []
    with contextlib.closing(LanePool(device.slices, masks)) as pool:
        for lane in pool.lanes:
            call(cu.cuMemsetD32, data, 0, ROW)
            call(cu.cuCtxSynchronize)
            stressors.launch("where", lane.stream, 4000, 128, data, 20_000, 0)
            call(cu.cuStreamSynchronize, lane.stream)
            counts = np.zeros(ROW, dtype=np.uint32)
            call(cu.cuMemcpyDtoH, counts.ctypes.data, data, counts.nbytes)
            seen.append(frozenset(np.flatnonzero(counts).tolist()))
    call(cu.cuMemFree, data)
    return seen


def eclip(*arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "eclip", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def app(name: str, *arguments: object) -> list[object]:
    return [sys.executable, APPS / name, *arguments]


def plain(path: Path, name: str, *arguments: object) -> Found:
    subprocess.run([str(word) for word in app(name, path, *arguments)], check=True, timeout=200)
    with np.load(path) as found:
        return dict(found)


def record(folder: Path, name: str) -> Path:
    """The profiles of a program's models."""
    folder.mkdir()
    models = [word for model in MODELS for word in ("--as", model)]
    command = app(name, folder / "recorded.npz", RECORDED, *PROGRAMS[name][0])
    eclip("record", "--sizes", "64,132", *models, "-o", folder / "profiles", "--", *command)
    return folder / "profiles"


class Planned:
    """A program that was recorded, planned and run with its plan."""

    def __init__(self, name: str, folder: Path, plan_of: PlanOf, topology: Topology) -> None:
        profiles = record(folder, name)
        self.traces: list[Trace] = [
            store.load(profiles / f"{model.replace(':', '-')}.json.gz", Profile).trace
            for model in MODELS
        ]
        masks = [[Mask.parse(mask) for mask in masks] for masks in MASKS]
        self.routes = [
            [position * GROUPS // len(trace.kernels) % 3 for position in range(len(trace.kernels))]
            for trace in self.traces
        ]
        file = folder / "plan.json"
        store.save(plan_of(topology, self.traces, masks, self.routes), file)
        command = app(name, folder / "planned.npz", REQUESTS, *PROGRAMS[name][1])
        done = eclip(*("exec", "--plan", file, "--profiles", profiles, "--json", "--", *command))
        report = json.loads(done.stdout[done.stdout.index("{") :])
        (self.counts,) = report["processes"].values()
        print(f"\n{name}: {self.counts}\n{done.stderr}")
        with np.load(folder / "planned.npz") as loaded:
            self.found: Found = dict(loaded)

    def assert_places(self, name: str, slices_sms: Sequence[frozenset[int]]) -> None:
        """Every place ran on its lane's SMs only."""
        counts = self.found[name]
        looked = 0
        for trace, route, masks in zip(self.traces, self.routes, MASKS, strict=True):
            for kernel, lane in zip(trace.kernels, route, strict=True):
                if kernel.name != "where_am_i":
                    continue
                allowed = frozenset().union(*(slices_sms[s] for s in Mask.parse(masks[lane])))
                seen = set(np.flatnonzero(counts[kernel.grid[0] - BLOCKS]).tolist())
                assert seen
                assert seen <= allowed, (kernel.grid, masks[lane], sorted(seen - allowed))
                looked += 1
        assert looked == 16

    def assert_planned(self) -> None:
        """Of the launches of requests; making and capturing models launches kernels as well."""
        requests = (REQUESTS + 1) * sum(len(trace.kernels) for trace in self.traces)
        assert self.counts["planned"] >= 0.95 * min(requests, self.counts["launches"])
        assert self.counts["redirected"] > 0


@dataclass(frozen=True)
class Runs:
    """A program under a plan and by itself, both under way."""

    planned: Future[Planned]
    plain: Future[Found]


@pytest.fixture(scope="module")
def runs(
    library: None, device: CudaDevice, plan_of: PlanOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Runs]]:
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor() as pool:
        yield {
            name: Runs(
                pool.submit(
                    Planned, name, folder / name.removesuffix(".py"), plan_of, device.topology
                ),
                pool.submit(plain, folder / f"{name}.npz", name, REQUESTS, *PROGRAMS[name][1]),
            )
            for name in PROGRAMS
        }


def assert_same(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        if not name.endswith("where"):
            assert np.isfinite(expected[name]).all()
            assert np.array_equal(found[name], expected[name]), name


def test_two_models_in_two_threads(
    runs: dict[str, Runs], slices_sms: Sequence[frozenset[int]]
) -> None:
    planned = runs["two_models.py"].planned.result()
    assert_same(planned.found, runs["two_models.py"].plain.result())
    planned.assert_places("eager_where", slices_sms)
    planned.assert_planned()
    counts = planned.counts
    assert (counts["graphs"], counts["foreign_graphs"]) == (2, 0)
    assert counts["graph_launches"] == 2 * REQUESTS
    assert counts["graph_planned"] >= 0.95 * counts["graph_kernels"]
    planned.assert_places("graph_where", slices_sms)


def test_an_aiohttp_server(runs: dict[str, Runs], slices_sms: Sequence[frozenset[int]]) -> None:
    planned = runs["server.py"].planned.result()
    assert_same(planned.found, runs["server.py"].plain.result())
    planned.assert_planned()
    planned.assert_places("where", slices_sms)

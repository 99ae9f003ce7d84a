"""Unmodified programs under ``eclip exec``: the same outputs, on the plan's SMs.

The programs in ``apps/`` are recorded with ``eclip record``, planned (twelve groups and more over
three lanes of their own for each model), and run with the plan and without.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eclip import store
from eclip.devices.cuda.device import CudaDevice
from eclip.devices.cuda.driver import call, cu
from eclip.devices.cuda.lanes import LanePool
from eclip.devices.cuda.stressors import Stressors
from eclip.plan import Plan
from eclip.profile import Profile
from eclip.topology import Mask
from eclip.trace import Trace

ROOT = Path(__file__).parents[2]
APPS = Path(__file__).parent / "apps"
MODELS = ("resnet50:8", "bert:8")
ROW = 256
BLOCKS = 600  # what the programs' telling kernel has, and its row on top
GROUPS = 12
# Three lanes a worker; the workers overlap in the middle.
MASKS = (("0-3", "0-7", "0-11"), ("12-15", "8-15", "4-15"))
REQUESTS = 30

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


class Planned:
    """A program with its recorded profiles and a plan."""

    def __init__(
        self, folder: Path, plan_of: PlanOf, device: CudaDevice, command: Sequence[object]
    ) -> None:
        self.profiles = folder / "profiles"
        names = [word for model in MODELS for word in ("--as", model)]
        sizes = ("--sizes", "64,132")
        eclip("record", *sizes, *names, "-o", self.profiles, "--", *command)
        self.traces: list[Trace] = [
            store.load(self.profiles / f"{model.replace(':', '-')}.json.gz", Profile).trace
            for model in MODELS
        ]
        masks = [[Mask.parse(mask) for mask in masks] for masks in MASKS]
        self.routes = [
            [position * GROUPS // len(trace.kernels) % 3 for position in range(len(trace.kernels))]
            for trace in self.traces
        ]
        self.file = folder / "plan.json"
        self.plan = plan_of(device.topology, self.traces, masks, self.routes)
        store.save(self.plan, self.file)

    def run(self, command: Sequence[object]) -> dict[str, int]:
        done = eclip(
            *("exec", "--plan", self.file, "--profiles", self.profiles, "--json"),
            *("--", *command),
        )
        report = json.loads(done.stdout[done.stdout.index("{") :])
        (counts,) = report["processes"].values()
        return dict(counts)

    def assert_places(self, counts: Any, slices_sms: Sequence[frozenset[int]]) -> int:
        """Every place ran on its lane's SMs only; how many were looked at."""
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
        return looked


def assert_same(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        if not name.endswith("where"):
            assert np.isfinite(expected[name]).all()
            assert np.array_equal(found[name], expected[name]), name


def test_two_models_in_two_threads(
    device: CudaDevice,
    plan_of: PlanOf,
    slices_sms: Sequence[frozenset[int]],
    tmp_path: Path,
) -> None:
    planned = Planned(
        tmp_path, plan_of, device, app("two_models.py", tmp_path / "recorded.npz", 12, "eager")
    )
    expected = plain(tmp_path / "plain.npz", "two_models.py", REQUESTS, "all")
    counts = planned.run(app("two_models.py", tmp_path / "planned.npz", REQUESTS, "all"))
    with np.load(tmp_path / "planned.npz") as loaded:
        found = dict(loaded)
    print("\ntwo models in two threads:", counts)
    assert_same(found, expected)
    assert planned.assert_places(found["eager_where"], slices_sms) == 16
    assert planned.assert_places(found["graph_where"], slices_sms) == 16
    # Making the models and capturing them launches kernels too, which no plan knows.
    assert counts["planned"] >= 0.95 * (counts["launches"] - _setup(planned, counts))
    assert counts["redirected"] > 0
    assert counts["graphs"] == 2
    assert counts["graph_planned"] >= 0.95 * counts["graph_kernels"]


def _setup(planned: Planned, counts: dict[str, int]) -> int:
    """Launches outside of requests: all that are more than whole requests."""
    served = (REQUESTS + 1) * sum(len(trace.kernels) for trace in planned.traces)
    return max(0, counts["launches"] - served)


def test_an_aiohttp_server(
    device: CudaDevice,
    plan_of: PlanOf,
    tmp_path: Path,
) -> None:
    planned = Planned(tmp_path, plan_of, device, app("server.py", tmp_path / "recorded.npz", 12))
    expected = plain(tmp_path / "plain.npz", "server.py", REQUESTS)
    counts = planned.run(app("server.py", tmp_path / "planned.npz", REQUESTS))
    with np.load(tmp_path / "planned.npz") as loaded:
        found = dict(loaded)
    print("\naiohttp server:", counts)
    assert_same(found, expected)
    assert counts["planned"] >= 0.95 * (counts["launches"] - _setup(planned, counts))
    assert counts["redirected"] > 0

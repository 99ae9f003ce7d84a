"""The contention model: what kernels that run together leave each other, and what they draw."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.devices.sim import device as sim
from eclip.devices.sim.contention import LIMITS, RUNNING_KERNEL, contend, draw_w
from simulations import arrivals, flat_profile, free, pinned, run


def latencies(masks: Sequence[str], dram_bytes: int = 0) -> list[int]:
    """How long one kernel of 1 ms takes on each of these lanes, all begun together."""
    profiles = [
        flat_profile(f"m{n}", [1_000_000], dram_bytes=dram_bytes) for n in range(len(masks))
    ]
    plan = pinned(profiles, masks)
    log = run(plan, profiles, arrivals(*[[0]] * len(masks)), free())
    return [log.requests.end_ns[log.requests.worker.index(n)] for n in range(len(masks))]


def test_identical_kernels_on_the_same_units_take_twice_as_long_each() -> None:
    assert latencies(["0-3", "0-3"]) == [2_000_000] * 2
    assert latencies(["1-2", "1-2", "1-2"]) == [3_000_000] * 3


def test_kernels_on_disjoint_lanes_do_not_notice_each_other() -> None:
    assert latencies(["0-1", "2", "3"]) == [1_000_000] * 3


def test_partial_overlap_lies_between() -> None:
    assert latencies(["0-1", "1-2"]) == [1_333_333] * 2


def test_the_rest_of_a_kernel_runs_alone_once_the_other_is_done() -> None:
    profiles = [flat_profile("long", [1_000_000]), flat_profile("short", [200_000])]
    log = run(pinned(profiles, ["0-3", "0-3"]), profiles, arrivals([0], [0]), free())
    assert log.requests.worker == (1, 0)
    assert log.requests.end_ns == (400_000, 1_200_000)


def test_memory_bound_kernels_on_disjoint_lanes_share_the_bandwidth() -> None:
    half, most = 500_000_000, 800_000_000  # of the 1000 bytes/ns that the memory gives
    assert latencies(["0", "1"], dram_bytes=half) == [1_000_000] * 2
    assert latencies(["0", "1"], dram_bytes=most) == [1_600_000] * 2
    assert latencies(["0", "1", "2"], dram_bytes=half) == [1_500_000] * 3


Lanes = list[tuple[frozenset[int], float, float]]  # slices, DRAM rate, L2 rate
LIMIT = 100.0


def speeds(lanes: Lanes, units: Sequence[int]) -> list[float]:
    """``contend`` on one running kernel per lane, with 100 bytes/ns of DRAM and of L2."""
    running = np.zeros(len(lanes), dtype=RUNNING_KERNEL)
    lane_units = np.array(
        [[float(u) * (s in mask) for s, u in enumerate(units)] for mask, _, _ in lanes]
    )
    for row, (_, dram, l2) in enumerate(lanes):
        running[row] = (row, dram, l2, 1.0, 0.0)
    limits = np.array([(LIMIT, LIMIT, 0.0, 0.0, 0.0)], dtype=LIMITS)
    contend(
        np.arange(len(lanes)),
        len(lanes),
        running,
        lane_units,
        lane_units.sum(axis=1),
        limits,
        np.zeros(len(units)),
    )
    return [float(speed) for speed in running["speed"]]


def unit_shares(lanes: Lanes, units: Sequence[int]) -> list[float]:
    users = [sum(index in mask for mask, _, _ in lanes) for index in range(len(units))]
    return [
        sum(units[index] / users[index] for index in mask) / sum(units[index] for index in mask)
        for mask, _, _ in lanes
    ]


UNITS = st.lists(st.integers(1, 20), min_size=4, max_size=4)
RATES = st.floats(0.0, LIMIT) | st.just(0.0) | st.just(LIMIT)
MASKS = st.frozensets(st.integers(0, 3), min_size=1)


@settings(max_examples=200, deadline=None)
@given(
    lanes=st.lists(st.tuples(MASKS, RATES, RATES), min_size=1, max_size=5),
    units=UNITS,
)
def test_nobody_exceeds_its_share_of_units_nor_all_together_the_bandwidth(
    lanes: Lanes, units: list[int]
) -> None:
    found = speeds(lanes, units)
    for speed, share in zip(found, unit_shares(lanes, units), strict=True):
        assert 0 < speed <= share * (1 + 1e-9)
    for rates in ([dram for _, dram, _ in lanes], [l2 for _, _, l2 in lanes]):
        assert np.dot(found, rates) <= LIMIT * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(
    masks=st.lists(MASKS, min_size=1, max_size=5),
    units=UNITS,
    data=st.data(),
    resource=st.sampled_from([1, 2]),
)
def test_bandwidth_is_shared_max_min_fairly(
    masks: list[frozenset[int]], units: list[int], data: st.DataObject, resource: int
) -> None:
    rates = data.draw(st.lists(RATES, min_size=len(masks), max_size=len(masks)))
    lanes: Lanes = [
        (mask, rate, 0.0) if resource == 1 else (mask, 0.0, rate)
        for mask, rate in zip(masks, rates, strict=True)
    ]
    shares = unit_shares(lanes, units)
    found = speeds(lanes, units)
    taken = [speed * rate for speed, rate in zip(found, rates, strict=True)]
    held_back = [speed < share * (1 - 1e-9) for speed, share in zip(found, shares, strict=True)]
    if any(held_back):
        assert sum(taken) == pytest.approx(LIMIT, rel=1e-9)
    for index, slow in enumerate(held_back):
        if slow:
            assert taken[index] >= max(taken) * (1 - 1e-9)


@settings(max_examples=150, deadline=None)
@given(
    masks=st.lists(MASKS, min_size=2, max_size=6),
    units=UNITS,
)
def test_one_more_kernel_on_the_units_speeds_up_nobody(
    masks: list[frozenset[int]], units: list[int]
) -> None:
    lanes: Lanes = [(mask, 0.0, 0.0) for mask in masks]
    fewer = speeds(lanes[:-1], units)
    assert all(
        now <= before * (1 + 1e-12)
        for now, before in zip(speeds(lanes, units), fewer, strict=False)
    )


@settings(max_examples=150, deadline=None)
@given(rates=st.lists(st.floats(0.0, 3 * LIMIT), min_size=2, max_size=4))
def test_one_more_kernel_on_the_memory_speeds_up_nobody(rates: list[float]) -> None:
    lanes: Lanes = [(frozenset({index}), rate, 0.0) for index, rate in enumerate(rates)]
    fewer = speeds(lanes[:-1], [1] * 4)
    assert all(
        now <= before * (1 + 1e-9)
        for now, before in zip(speeds(lanes, [1] * 4), fewer, strict=False)
    )


def test_kernel_profiled_above_the_limit_is_not_slowed_down_by_one_that_needs_no_memory() -> None:
    greedy, modest = (frozenset({0}), 1.5 * LIMIT, 0.0), (frozenset({1}), 0.0, 0.0)
    assert speeds([greedy], [1] * 4) == [1.0]
    assert speeds([greedy, modest], [1] * 4) == [1.0, 1.0]


REPLACED_MODEL = """
import numpy as np
from eclip import store
from eclip.calibration import Calibration
from eclip.devices.base import Window
from eclip.devices.load import Load
from eclip.devices.sim.device import SimDevice
from eclip.frontends.synthetic import synthetic_profile
from eclip.plan import unpartitioned
from eclip.runtime.program import lower
from eclip.topology import Topology

mi50 = store.load_builtin(Topology, "mi50")
profiles = [synthetic_profile(0, 1, mi50, name=name) for name in "ab"]
device = SimDevice(mi50, store.load_builtin(Calibration, "mi50"))
session = device.open(lower(unpartitioned(mi50, profiles), [p.trace for p in profiles]), profiles)
log = session.run(Load("", 0, (np.array([0]),) * 2), Window(), [1.0] * 2)
print(log.requests.end_ns[-1])
"""


def test_replaced_contention_model_is_used_although_the_old_one_was_compiled_before(
    tmp_path: Path,
) -> None:
    package = tmp_path / "eclip"
    source = Path(sim.__file__).parents[2]
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def simulate() -> int:
        done = subprocess.run(
            [sys.executable, "-c", REPLACED_MODEL],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return int(done.stdout)

    before = simulate()
    model = package / "devices" / "sim" / "contention.py"
    text = model.read_text()
    model.write_text(text.replace("mine / lane_total[lane]", "0.25 * mine / lane_total[lane]"))
    assert model.read_text() != text
    assert simulate() > 2 * before


def test_power_counts_every_busy_unit_once_and_the_memory_traffic() -> None:
    units = np.array([10.0, 20.0])
    running = np.zeros(2, dtype=RUNNING_KERNEL)
    running[0] = (0, 100.0, 0.0, 0.5, 1.0)
    running[1] = (1, 40.0, 0.0, 0.8, 0.25)
    lane_units = np.array([[10.0, 20.0], [10.0, 0.0]])
    limits = np.array([(1e3, 1e3, 80.0, 2.0, 30.0)], dtype=LIMITS)

    def power(*active: int) -> float:
        indices = np.array(active, dtype=np.int64)
        return draw_w(indices, len(active), running, lane_units, units, limits, np.zeros(2))

    assert power() == 80
    assert power(0) == pytest.approx(80 + 2 * 15 + 3)
    assert power(1) == pytest.approx(80 + 2 * 8 + 0.3)
    assert power(0, 1) == pytest.approx(80 + 2 * (10 + 10) + 3 + 0.3)

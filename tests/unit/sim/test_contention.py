"""The contention model: what kernels that run together leave each other, and what they draw."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eclip.core.calibration import Calibration, Interference
from eclip.sim import device as sim
from eclip.sim.contention import LIMITS, RUNNING_KERNEL, contend, draw_w
from simulations import (
    CALIBRATIONS,
    H200,
    NO_SHARING,
    arrivals,
    closed,
    flat_profile,
    free,
    pinned,
    run,
)
from waiting import PATIENCE_S

MS = 1_000_000


def ends(
    masks: Sequence[str],
    *,
    calibration: Calibration | None = None,
    dram_bytes: int = 0,
    blocks: Sequence[int] | None = None,  # 60 fill the MI50 once, where a unit has room for one
    busy_ns: Sequence[int] | None = None,
    per_unit: int = 1,
) -> list[int]:
    """When one kernel, of 1 ms unless told, ends on each of these lanes; all begin at 0 in turn."""
    count = len(masks)
    profiles = [
        flat_profile(f"m{n}", [busy], dram_bytes=dram_bytes, blocks=grid, per_unit=per_unit)
        for n, (busy, grid) in enumerate(
            zip(busy_ns or [MS] * count, blocks or [60_000] * count, strict=True)
        )
    ]
    load = arrivals(*[[0]] * count)
    log = run(pinned(profiles, masks), profiles, load, calibration or free())
    return [log.requests.end_ns[log.requests.worker.index(n)] for n in range(count)]


def sharing(
    cohabit: float = 0.0, crowding: float = 0.0, presence: float = 0.0, pressure: float = 0.0
) -> Interference:
    return Interference(cohabit=cohabit, crowding=crowding, presence=presence, pressure=pressure)


# --- Waiting for units ------------------------------------------------------------------------


def test_kernel_waits_behind_whoever_fills_its_units_and_came_first() -> None:
    assert ends(["0-3", "0-3"]) == [MS, 2 * MS]
    assert ends(["1-2", "1-2", "1-2"]) == [MS, 2 * MS, 3 * MS]


def test_short_kernel_waits_for_all_of_a_long_one() -> None:
    assert ends(["0-3", "0-3"], busy_ns=[12 * MS, MS]) == [12 * MS, 13 * MS]


def test_whoever_waits_keeps_its_place() -> None:
    """The first worker's second kernel comes after the second worker's first."""
    profiles = [flat_profile("a", [MS, MS]), flat_profile("b", [MS])]
    log = run(pinned(profiles, ["0-3", "0-3"]), profiles, arrivals([0], [10]), free())
    assert log.kernels.worker == (0, 1, 0)
    assert log.kernels.end_ns == (MS, 2 * MS, 3 * MS)


def test_only_the_units_in_common_are_waited_for() -> None:
    # Half of the second lane is free at once; the rest of its work has it whole.
    assert ends(["0-1", "1-2"]) == [MS, MS + MS // 2]


def test_last_wave_leaves_room() -> None:
    # One and a half waves: full for half a millisecond, then half of the units are free.
    later_fits = ends(["0-3", "0-3"], blocks=[90, 30], busy_ns=[MS, 200_000])
    assert later_fits == [MS, 700_000]
    later_wants_all = ends(["0-3", "0-3"], blocks=[90, 60_000], busy_ns=[MS, MS])
    assert later_wants_all == [MS, MS + 750_000]


def test_kernels_that_fit_side_by_side_do_not_wait() -> None:
    assert ends(["0-3", "0-3", "0-3"], blocks=[20, 20, 20]) == [MS] * 3


def test_cohabiting_kernel_gets_that_much_room_from_one_that_fills_the_units() -> None:
    calibration = free(sharing=sharing(cohabit=0.1))
    assert ends(["0-3", "0-3"], calibration=calibration) == [MS, MS + 900_000]


def test_crowded_kernel_is_slower_by_its_neighbours_on_the_unit() -> None:
    calibration = free(sharing=sharing(crowding=1.0))
    found = ends(["0-3", "0-3"], blocks=[120, 120], per_unit=4, calibration=calibration)
    # Half of the room is taken, three quarters of that on units with room for others.
    assert found == [MS, pytest.approx(MS + MS * (1 - 1 / 1.375), abs=1)]


def test_kernel_whose_blocks_fill_a_unit_has_nobody_beside_it() -> None:
    crowded = sharing(crowding=1.0)
    filling, small = (Running(frozenset({0}), room=0.5, open=part) for part in (0.0, 0.75))
    for pair in ([filling, filling], [filling, small], [small, filling]):
        assert speeds(pair, [10], crowded) == [1.0, 1.0]
    assert speeds([small, small], [10], crowded) == [1.0, pytest.approx(1 / 1.375)]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("constants", [NO_SHARING, CALIBRATIONS["h200"].interference])
def test_identical_full_kernels_on_the_same_units_take_as_many_times_as_long(
    workers: int, constants: Interference
) -> None:
    profiles = [flat_profile(f"m{n}", [20_000] * 10, H200) for n in range(workers)]
    plan = pinned(profiles, ["0-3"] * workers, H200)
    log = run(plan, profiles, closed(plan), free(H200, constants))
    took = np.subtract(log.requests.end_ns, log.requests.start_ns) / 200_000
    assert took.mean() == pytest.approx(workers, rel=0.08)
    for worker in range(workers):
        mine = took[np.array(log.requests.worker) == worker]
        assert mine.mean() == pytest.approx(took.mean(), rel=0.05)


# --- Memory -----------------------------------------------------------------------------------


def test_kernels_on_disjoint_lanes_notice_each_other_only_through_memory() -> None:
    hard_on_units = free(sharing=sharing(cohabit=0.5, crowding=9.0))
    assert ends(["0-1", "2", "3"], calibration=hard_on_units) == [MS] * 3


def test_every_neighbour_that_runs_slows_down_everybody() -> None:
    calibration = free(sharing=sharing(presence=0.1))
    assert ends(["0-1", "2", "3"], calibration=calibration) == [MS * 12 // 10] * 3
    assert ends(["0"], calibration=calibration) == [MS]


def test_neighbours_slow_down_by_what_they_draw_from_l2() -> None:
    calibration = free(sharing=sharing(pressure=0.5))  # per root of a TB/s: of a MB in 1 µs
    found = ends(["0", "1"], calibration=calibration, dram_bytes=160_000_000)
    assert found == [MS * 12 // 10] * 2


def test_memory_bound_kernels_on_disjoint_lanes_share_the_bandwidth() -> None:
    half, most = 500_000_000, 800_000_000  # of the 1000 bytes/ns that the memory gives
    assert ends(["0", "1"], dram_bytes=half) == [MS] * 2
    assert ends(["0", "1"], dram_bytes=most) == [1_600_000] * 2
    assert ends(["0", "1", "2"], dram_bytes=half) == [1_500_000] * 3


# --- The function itself ----------------------------------------------------------------------

LIMIT = 100.0


@dataclass(frozen=True)
class Running:
    mask: frozenset[int]
    room: float = 1.0  # now, be it in its last wave or before
    in_body: bool = True
    dram: float = 0.0
    l2: float = 0.0
    open: float = 1.0  # part of its room on units where others can be beside it


def speeds(
    kernels: Sequence[Running],  # in the order they came
    units: Sequence[int],
    constants: Interference = NO_SHARING,
    order: Sequence[int] | None = None,  # in which they are handed to ``contend``
) -> list[float]:
    """``contend`` with 100 bytes/ns of DRAM and of L2."""
    running = np.zeros(len(kernels), dtype=RUNNING_KERNEL)
    for ticket, (row, kernel) in enumerate(zip(running, kernels, strict=True)):
        row["lane"] = row["ticket"] = ticket
        row["remaining"], row["tail_ns"] = 100.0, 50.0 if kernel.in_body else np.inf
        row["body_room"], row["tail_room"] = (
            (kernel.room, np.nan) if kernel.in_body else (np.nan, kernel.room)
        )
        row["dram_rate"], row["l2_rate"] = kernel.dram, kernel.l2
        row["pressing"] = kernel.l2**0.5
        row["open"] = kernel.open
    lane_units = np.array(
        [[float(u) * (s in kernel.mask) for s, u in enumerate(units)] for kernel in kernels]
    )
    limits = np.zeros(1, dtype=LIMITS)
    for name in constants.__struct_fields__:
        limits[name] = getattr(constants, name)
    limits["dram_rate"] = limits["l2_rate"] = LIMIT
    contend(
        np.array(range(len(kernels)) if order is None else order),
        len(kernels),
        running,
        lane_units,
        lane_units.sum(axis=1),
        limits,
        *np.zeros((2, len(units))),
    )
    return [float(speed) for speed in running["speed"]]


UNITS = st.lists(st.integers(1, 20), min_size=4, max_size=4)
RATES = st.floats(0.0, LIMIT) | st.just(0.0) | st.just(LIMIT)
MASKS = st.frozensets(st.integers(0, 3), min_size=1)
ROOMS = st.floats(0.01, 1.0) | st.just(1.0)
ON_UNITS = st.lists(st.builds(Running, MASKS, ROOMS, st.booleans()), min_size=1, max_size=5)
ANYTHING = st.lists(
    st.builds(Running, MASKS, ROOMS, st.booleans(), RATES, RATES, st.floats(0.0, 1.0)),
    min_size=1,
    max_size=5,
)
CONSTANTS = st.builds(
    sharing, st.floats(0.0, 1.0), st.floats(0.0, 3.0), st.floats(0.0, 0.2), st.floats(0.0, 0.1)
)


def test_neighbour_that_draws_four_times_as_much_presses_twice_as_much() -> None:
    def slower(l2: float) -> float:
        kernels = [Running(frozenset({0})), Running(frozenset({1}), l2=l2)]
        return 1 / speeds(kernels, [10, 10], sharing(pressure=0.1))[0] - 1

    assert slower(9.0) == pytest.approx(0.3)
    assert slower(36.0) == pytest.approx(0.6)


def test_bandwidth_is_shared_by_rates_whose_roots_would_fit() -> None:
    kernels = [Running(frozenset({n}), l2=0.8 * LIMIT) for n in range(2)]
    assert speeds(kernels, [10, 10]) == [pytest.approx(0.625)] * 2


@given(kernels=ANYTHING, units=UNITS, constants=CONSTANTS, data=st.data())
def test_speeds_depend_on_who_came_first_and_not_on_the_order_they_are_listed_in(
    kernels: list[Running], units: list[int], constants: Interference, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(kernels))))
    assert speeds(kernels, units, constants, order) == speeds(kernels, units, constants)


@given(kernels=ANYTHING, units=UNITS, constants=CONSTANTS)
def test_nobody_is_faster_than_alone_and_somebody_gets_on(
    kernels: list[Running], units: list[int], constants: Interference
) -> None:
    found = speeds(kernels, units, constants)
    assert all(0 <= speed <= 1 + 1e-9 for speed in found)
    assert found[0] > 0
    assert speeds(kernels[:1], units, constants) == [1.0]


@given(kernels=ON_UNITS, units=UNITS)
def test_units_do_no_more_work_than_there_are(kernels: list[Running], units: list[int]) -> None:
    done = sum(
        speed * kernel.room * sum(units[s] for s in kernel.mask)
        for speed, kernel in zip(speeds(kernels, units), kernels, strict=True)
    )
    touched = frozenset().union(*(kernel.mask for kernel in kernels))
    assert done <= sum(units[s] for s in touched) * (1 + 1e-9)


@given(kernels=ON_UNITS, units=UNITS, later=st.builds(Running, MASKS, ROOMS, st.booleans()))
def test_who_comes_later_takes_no_unit_from_those_who_came_before(
    kernels: list[Running], units: list[int], later: Running
) -> None:
    before = speeds(kernels, units)
    assert speeds([*kernels, later], units)[:-1] == pytest.approx(before, rel=1e-12)


@given(kernels=ON_UNITS, units=UNITS, constants=CONSTANTS)
def test_lanes_that_nobody_else_touches_feel_only_presence(
    kernels: list[Running], units: list[int], constants: Interference
) -> None:
    apart = Running(frozenset({4}))
    found = speeds([*kernels, apart], [*units, 7], constants)
    # What the others get of units is not changed by somebody who has none of theirs.
    on_units = speeds(
        kernels, units, sharing(cohabit=constants.cohabit, crowding=constants.crowding)
    )
    assert found[-1] == pytest.approx(1 / (1 + constants.presence * sum(on_units)))


@given(kernels=ANYTHING, units=UNITS, constants=CONSTANTS)
def test_all_together_stay_within_the_bandwidth(
    kernels: list[Running], units: list[int], constants: Interference
) -> None:
    found = speeds(kernels, units, constants)
    assert np.dot(found, [kernel.dram for kernel in kernels]) <= LIMIT * (1 + 1e-9)
    assert np.dot(found, [kernel.l2 for kernel in kernels]) <= LIMIT * (1 + 1e-9)


@given(kernels=ON_UNITS, units=UNITS, data=st.data(), dram=st.booleans())
def test_bandwidth_is_shared_max_min_fairly(
    kernels: list[Running], units: list[int], data: st.DataObject, dram: bool
) -> None:
    rates = data.draw(st.lists(RATES, min_size=len(kernels), max_size=len(kernels)))
    hungry = [
        Running(one.mask, one.room, one.in_body, *((rate, 0.0) if dram else (0.0, rate)))
        for one, rate in zip(kernels, rates, strict=True)
    ]
    wanted = speeds(kernels, units)
    found = speeds(hungry, units)
    taken = [speed * rate for speed, rate in zip(found, rates, strict=True)]
    held_back = [speed < want * (1 - 1e-9) for speed, want in zip(found, wanted, strict=True)]
    if any(held_back):
        assert sum(taken) == pytest.approx(LIMIT, rel=1e-9)
    for index, slow in enumerate(held_back):
        if slow:
            assert taken[index] >= max(taken) * (1 - 1e-9)


@given(rates=st.lists(st.floats(0.0, 3 * LIMIT), min_size=2, max_size=4))
def test_one_more_kernel_on_the_memory_speeds_up_nobody(rates: list[float]) -> None:
    kernels = [Running(frozenset({index}), dram=rate) for index, rate in enumerate(rates)]
    fewer = speeds(kernels[:-1], [1] * 4)
    assert all(
        now <= before * (1 + 1e-9)
        for now, before in zip(speeds(kernels, [1] * 4), fewer, strict=False)
    )


def test_kernel_profiled_above_the_limit_is_not_slowed_down_by_one_that_needs_no_memory() -> None:
    greedy, modest = Running(frozenset({0}), dram=1.5 * LIMIT), Running(frozenset({1}))
    assert speeds([greedy], [1] * 4) == [1.0]
    assert speeds([greedy, modest], [1] * 4) == [1.0, 1.0]


# --- Power ------------------------------------------------------------------------------------


def test_power_is_idle_power_and_what_everybody_draws_for_the_work_it_gets_done() -> None:
    running = np.zeros(2, dtype=RUNNING_KERNEL)
    running["power_w"], running["speed"] = [100.0, 40.0], [1.0, 0.25]
    limits = np.zeros(1, dtype=LIMITS)
    limits["idle_w"] = 80.0

    def power(*active: int) -> float:
        return draw_w(np.array(active, dtype=np.int64), len(active), running, limits)

    assert power() == 80
    assert power(0) == 180
    assert power(1) == 90
    assert power(0, 1) == 190


def test_work_takes_the_same_energy_above_idle_however_long_others_make_it() -> None:
    profiles = [
        flat_profile(f"m{n}", [300_000] * 5, dram_bytes=50_000_000, blocks=50) for n in range(3)
    ]
    load = arrivals(*[[0]] * 3)
    logs = [
        run(pinned(profiles, masks), profiles, load, free(sharing=constants))
        for masks in (["0", "1", "2"], ["0", "0", "0"])
        for constants in (NO_SHARING, sharing(0.1, 0.5, 0.05, 0.2))
    ]
    assert len({log.requests.end_ns[-1] for log in logs}) == 4
    assert len({log.energy_uj for log in logs}) == 1
    # 15 of the 50 blocks at a time: all units of a slice.
    power = CALIBRATIONS["mi50"].power
    kernel_uj = 300 * 15 * power.busy_unit_w + 50 * power.dram_pj_per_byte
    idle_uj = power.idle_w * 0.02 * 1e6
    assert logs[0].energy_uj == pytest.approx(idle_uj + 15 * kernel_uj, rel=1e-6)


def test_measured_energy_of_a_request_is_what_it_draws_alone() -> None:
    flat = flat_profile("a", [MS, MS], gap_ns=500_000)
    profile = msgspec.structs.replace(flat, energy_uj=(400_000,) * len(flat.sizes))
    log = run(
        pinned([profile], ["0-3"]), [profile], arrivals([0]), free(), seconds=0.003, trace_ms=0
    )
    assert log.energy_uj == pytest.approx(400_000, rel=1e-6)


# --- The cache of compiled code ---------------------------------------------------------------

REPLACED_MODEL = """
import numpy as np
from eclip.files import store
from eclip.core.calibration import Calibration
from eclip.core.device import Window
from eclip.core.load import Load
from eclip.sim.device import SimDevice
from eclip.models.synthetic import synthetic_profile
from eclip.core.plan import unpartitioned
from eclip.core.program import lower
from eclip.core.topology import Topology

mi50 = store.load_builtin("mi50", Topology)
profiles = [synthetic_profile(0, 1, mi50, name=name) for name in "ab"]
device = SimDevice(mi50, store.load_builtin("mi50", Calibration))
session = device.open(lower(unpartitioned(mi50, profiles), [p.trace for p in profiles]), profiles)
log = session.run(Load("", 0, (np.array([0]),) * 2), Window())
print(log.requests.end_ns[-1])
"""


@pytest.mark.slow
def test_replaced_contention_model_is_used_although_the_old_one_was_compiled_before(
    tmp_path: Path,
) -> None:
    package = tmp_path / "eclip"
    source = Path(sim.__file__).parents[1]
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def simulate() -> int:
        done = subprocess.run(
            [sys.executable, "-c", REPLACED_MODEL],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return int(done.stdout)

    before = simulate()
    model = package / "sim" / "contention.py"
    text = model.read_text()
    model.write_text(text.replace("= got / wanted", "= 0.1 * got / wanted"))
    assert model.read_text() != text
    assert simulate() > 2 * before

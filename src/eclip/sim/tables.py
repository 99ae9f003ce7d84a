"""What the simulator's core reads of a program: kernels as they are on a lane, and stretches.

Kernels come from profiles, what they cost besides from the calibration.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eclip.core.calibration import Bandwidth, Calibration, Costs
from eclip.core.copies import NO_LINK
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.program import NO_WAIT, Program, Route
from eclip.core.rules import Rules
from eclip.core.topology import Mask, Topology
from eclip.sim import events, stretches
from eclip.sim.contention import Floats, Ints, Records


class KernelTables:
    """The kernels of every worker as the core reads them, per lane size; made once, on demand."""

    def __init__(self, profiles: Sequence[Profile], calibration: Calibration) -> None:
        self.profiles = profiles
        self.calibration = calibration
        self._tables: dict[tuple[int, int], Records] = {}  # by a profile's id

    def at(self, worker: int, units: int) -> Records:
        key = (id(self.profiles[worker]), units)
        if key not in self._tables:
            self._tables[key] = _table(self.profiles[worker], units, self.calibration)
        return self._tables[key]

    def of(self, workers: Sequence[int]) -> KernelTables:
        """For some of these workers, in any order and number; what is made is there for all."""
        other = KernelTables([self.profiles[worker] for worker in workers], self.calibration)
        other._tables = self._tables
        return other

    def under(self, calibration: Calibration) -> KernelTables:
        """The same kernels under other constants; a table depends on few of them."""
        other = KernelTables(self.profiles, calibration)
        known = self.calibration
        if (known.power, known.memory) == (calibration.power, calibration.memory):
            other._tables = self._tables
        return other


def _table(profile: Profile, units: int, calibration: Calibration) -> Records:
    """All steps of a request on a lane of so many units."""
    power = calibration.power
    dram_bytes, l2_bytes = _traffic(profile, calibration.memory)
    blocks = np.array([kernel.blocks for kernel in profile.trace.kernels], dtype=np.float64)
    busy, gap = profile.busy_at(units), profile.gap_at(units)
    waves = profile.waves_at(units)
    last = np.ceil(waves)
    rows = np.zeros(len(blocks), dtype=events.KERNEL)
    rows["busy_ns"] = busy
    rows["gap_ns"] = gap - profile.copied_ns()
    rows["tail_ns"] = busy / last
    rows["body_room"] = np.minimum(waves, 1.0)
    rows["tail_room"] = waves - last + 1
    rows["open"] = 1 - 1 / np.maximum(profile.blocks_per_unit, 1)
    rows["dram_rate"] = dram_bytes / busy
    rows["l2_rate"] = l2_bytes / busy
    whole_ns = profile.busy_at(profile.sizes[-1])
    rows["pressing"] = np.sqrt(l2_bytes / whole_ns) * whole_ns / busy
    if profile.energy_uj:
        # All kernels alike: energy was measured for whole requests.
        mean_w = np.array(profile.energy_uj) * 1e3 / np.array(profile.request_ns)
        drawn_w = max(float(np.interp(units, profile.sizes, mean_w)) - power.idle_w, 0.0)
        rows["power_w"] = drawn_w * (busy + gap).sum() / busy.sum()
    else:
        # byte/ns · pJ/byte = mW
        rows["power_w"] = (
            np.minimum(blocks, units) * power.busy_unit_w
            + rows["dram_rate"] * power.dram_pj_per_byte * 1e-3
        )
    steps = profile.steps
    every = np.zeros(len(steps.kernel), dtype=events.KERNEL)
    every["busy_ns"] = steps.copy_ns
    every[steps.link == NO_LINK] = rows
    every["position"] = steps.kernel
    every["link"] = steps.link
    return every


def _traffic(profile: Profile, memory: Bandwidth) -> tuple[Floats, Floats]:
    """DRAM and L2 bytes of every kernel: as counted, or as kernels usually have."""
    if any(profile.l2_bytes) or any(profile.dram_bytes):
        return np.array(profile.dram_bytes, float), np.array(profile.l2_bytes, float)
    busy_s = profile.busy_at(profile.sizes[-1]) / 1e9
    return busy_s * memory.usual_dram_bytes_per_s, busy_s * memory.usual_l2_bytes_per_s


def kernels_of(plan: Plan, route: Route, tables: KernelTables) -> Records:
    rows = tables.at(route.worker, plan.units(int(route.lane[0]))).copy()
    lanes = route.lane[rows["position"]]
    for lane in np.unique(lanes).tolist():
        here = lanes == lane
        rows[here] = tables.at(route.worker, plan.units(lane))[here]
    rows["lane"] = lanes
    place = np.flatnonzero(rows["link"] == NO_LINK)  # of every kernel
    barriers = route.wait_on != NO_WAIT
    rows["barrier"][place] = barriers
    cost_ns = {
        (left, entered): switch_cost_ns(
            plan.topology, tables.calibration.costs, plan.lanes[left].mask, plan.lanes[entered].mask
        )
        for left, entered in set(
            zip(route.wait_on[barriers].tolist(), route.lane[barriers].tolist(), strict=True)
        )
    }
    for k in np.flatnonzero(barriers).tolist():
        rows["before_ns"][place[k]] = cost_ns[int(route.wait_on[k]), int(route.lane[k])]
    return rows


def switch_cost_ns(topology: Topology, costs: Costs, left: Mask, entered: Mask) -> float:
    """A barrier, and entering units the last lane did not have: nothing extra for nested lanes."""
    common = topology.units_of(left & entered)
    smaller = min(topology.units_of(left), topology.units_of(entered))
    return costs.barrier_ns + costs.switch_ns * (1 - common / smaller)


class JointTables:
    """The stretches of every worker with joints, on its routes and where it may move to."""

    def __init__(self, program: Program, tables: KernelTables) -> None:
        self._plan = program.plan
        self._rules = program.rules
        self._costs = tables.calibration.costs
        self._cuts = {
            worker: _Cuts.of(rules, tables.profiles[worker])
            for worker, rules in enumerate(program.rules)
            if program.plan.workers[worker].joints is not None
        }
        self._rows: list[Records] = []
        self._filled = 0
        self._moves: list[list[int]] = [[] for _ in program.rules]
        self._lanes: list[set[int]] = [set(rules.moves) for rules in program.rules]

    def add(self, worker: int, kernels: Records, first: int) -> int:
        """The worker's kernels on a route or where it moves; gives the number of its first stretch.

        The barrier at a joint is decided while running, so the kernels lose theirs, and its cost:
        where copies come before a kernel, the first of them pays."""
        if worker not in self._cuts:
            return 0
        cuts = self._cuts[worker]
        kernels["barrier"][cuts.heads] = 0
        kernels["before_ns"][cuts.heads] = 0
        rows = np.zeros(len(cuts.pieces), dtype=stretches.STRETCH)
        rows["first"] = first + cuts.pieces
        rows["end"] = first + np.append(cuts.pieces[1:], len(kernels))
        inside = np.add.reduceat(kernels["barrier"], cuts.pieces)
        rows["launch_ns"] = self._costs.launch_ns + inside * self._costs.launch_switch_ns
        rows["alone_ns"][cuts.last] = cuts.alone_ns
        promise = self._plan.workers[worker].promise
        if promise is not None:
            passed = np.rint(promise.request_ns * np.cumsum(cuts.alone_ns) / cuts.alone_ns.sum())
            rows["left_ns"][cuts.last] = np.diff(passed, prepend=0)
        self._lanes[worker] |= set(kernels["lane"].tolist())
        self._rows.append(rows)
        self._filled += len(rows)
        return self._filled - len(rows)

    def add_move(self, worker: int, kernels: Records, first: int) -> None:
        self._moves[worker].append(self.add(worker, kernels, first))

    def columns(self) -> stretches.Stretches:
        every = self._rules
        joints = np.zeros(len(every), dtype=stretches.JOINTS)
        moves = np.zeros((len(every), max(1, *map(len, self._moves))), dtype=np.int64)
        ends = np.cumsum([len(rules.choice) for rules in every])
        for index, rules in enumerate(every):
            moves[index, : len(self._moves[index])] = self._moves[index]
            row = joints[index]
            row["jointed"] = index in self._cuts
            row["stretches"] = len(self._cuts[index].pieces) if index in self._cuts else 1
            row["rules_first"] = ends[index] - len(rules.choice)
            row["rules_end"] = ends[index]
            for name in ("depth", "floor", "bound_ns", "request_ns"):
                row[name] = getattr(rules, name)
        return stretches.Stretches(
            joints=joints,
            rows=np.concatenate([np.zeros(0, dtype=stretches.STRETCH), *self._rows]),
            moves=moves,
            peers=np.arange(len(every), dtype=np.int64),
            who=np.concatenate([rules.who for rules in every]),
            level=np.concatenate([rules.level for rules in every]),
            choice=np.concatenate([rules.choice for rules in every]),
            switch_ns=self._switch_ns(),
            joint_ns=float(self._costs.joint_ns),
            notice_ns=float(self._costs.notice_ns),
            hold_ns=float(self._costs.hold_ns),
        )

    def _switch_ns(self) -> Floats:
        """Between the lanes that one worker may use."""
        plan = self._plan
        costs = np.zeros((len(plan.lanes), len(plan.lanes)))
        for lanes in self._lanes:
            for left, entered in itertools.permutations(lanes, 2):
                costs[left, entered] = switch_cost_ns(
                    plan.topology, self._costs, plan.lanes[left].mask, plan.lanes[entered].mask
                )
        return costs


@dataclass(frozen=True)
class _Cuts:
    """Where a worker with joints is cut: its stretches, and the parts of long copies in them.

    What is done of a request, parts included, counts at the end of its stretch, as on a GPU.
    """

    pieces: Ints  # the first step of each
    heads: Ints  # the first kernel of each, where one follows
    last: Ints  # of every stretch, the number of its last piece
    alone_ns: Floats  # what every stretch takes on all units, undisturbed

    @classmethod
    def of(cls, rules: Rules, profile: Profile) -> _Cuts:
        steps = profile.steps
        firsts, pieces = steps.firsts(rules.begins), steps.pieces(rules.begins)
        kernels = np.flatnonzero(steps.link == NO_LINK)
        following = np.searchsorted(kernels, pieces)
        return cls(
            pieces=pieces,
            heads=kernels[following[following < len(kernels)]],
            last=np.append(np.searchsorted(pieces, firsts[1:]), len(pieces)) - 1,
            alone_ns=np.add.reduceat(profile.step_ns_at(profile.sizes[-1]), firsts),
        )

"""The ways of sharing that a visit compares, as data: eclip's policies by name, and other plans.

Workers of a mix with a bound are services, the last worker is background.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from eclip.contest.confirm.plans import make_plan, policy_options
from eclip.core.plan import Lane, Plan, unpartitioned
from eclip.planner.case import Case
from eclip.planner.joints import far_mask
from eclip.planner.policies import with_shares

# What eclip recommends: what it promises is held against the other ways.
OURS = ("search", "yield")


def _masks(share: float) -> Callable[[Case], Plan]:
    """Background on this part of the device, services on the rest."""

    def make(case: Case) -> Plan:
        topology, plain = case.topology, unpartitioned(case.topology, case.profiles, case.mix)
        units = min(topology.lane_sizes, key=lambda size: abs(size - share * topology.units))
        part = far_mask(topology, units)
        last = len(case.profiles) - 1
        lanes = [
            Lane(lane.owner, part if lane.owner == last else topology.full - part)
            for lane in plain.lanes
        ]
        return msgspec.structs.replace(plain, lanes=tuple(lanes))

    return make


def _mps(share: int, *, below: bool = False) -> Callable[[Case], Plan]:
    """Services have all units, background this share in percent, and less priority if ``below``."""

    def make(case: Case) -> Plan:
        plain = unpartitioned(case.topology, case.profiles, case.mix)
        last = len(case.profiles) - 1
        return with_shares(plain, (*[100] * last, share), below_normal=(last,) if below else ())

    return make


PLANS: dict[str, Callable[[Case], Plan]] = {
    **{f"masks {percent}": _masks(percent / 100) for percent in (25, 50, 75)},
    **{f"MPS {percent}": _mps(percent) for percent in (25, 50)},
    "MPS below": _mps(100, below=True),
}


def plan_of(name: str, case: Case) -> Plan:
    made = (
        PLANS[name](case)
        if name in PLANS
        else make_plan(case, name, policy_options(mix=case.mix, seconds=4.0))
    )
    return msgspec.structs.replace(made, policy=name)

"""Calibration: a device's interference, cost and power constants.

Every number that the simulator uses is in a profile or here. A better model replaces this file and
``sim/contention.py`` together.
"""

from __future__ import annotations

import msgspec

from eclip.core.fingerprint import Fingerprint

MOST_NS = 10**12  # of a constant: a thousand seconds, so that sums over a model stay countable


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times besides kernels."""

    launch_ns: int  # starting a request
    launch_switch_ns: int  # what each lane switch adds to starting a request
    barrier_ns: int  # one lane waiting on another's completion
    switch_ns: int  # entering units the previous lane did not have; nothing between nested lanes
    turn_ns: int  # how long a time-sliced worker keeps the device
    turn_switch_ns: int  # handing the device to the next worker
    # Assumed where a file does not have them.
    joint_ns: int = 1_500  # from a stretch to the next, if launched ahead
    notice_ns: int = 5_500  # until the host sees that a stretch is done, before it launches another
    hold_ns: int = 8_000  # until the host sees that held work may go on


class Compute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak rates of a unit; used for modelled profiles only."""

    unit_flops: float  # half precision with matrix units, one unit, per second
    unit_bytes_per_s: float  # memory traffic one unit can keep in flight
    kernel_latency_ns: int  # the shortest kernel
    gap_ns: int  # between two kernels of one lane


class Interference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much kernels slow each other down."""

    cohabit: float  # part of its lane's room open to later kernels while its own blocks wait
    crowding: float  # how much slower a later kernel gets for every whole neighbour on its units
    presence: float  # the same for every neighbour that runs, wherever it does
    pressure: float  # the same for the root of every neighbour's L2 rate in TB/s


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates that all lanes share."""

    dram_bytes_per_s: float
    l2_bytes_per_s: float
    l2_bytes: int
    # Assumed traffic of a busy kernel, if its profile has no counts.
    usual_dram_bytes_per_s: float = 0.0
    usual_l2_bytes_per_s: float = 0.0


class Power(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the power model. Idle units still draw ``idle_w``: no device gates single units.

    An ``idle_w`` fitted to runs includes clocks and memory under load; a device without any work
    may draw less.
    """

    idle_w: float
    busy_unit_w: float
    dram_pj_per_byte: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device's constants, which the simulator and modelled profiles are made from."""

    fingerprint: Fingerprint
    modelled: bool  # some constant is assumed, not measured or fitted; the source says which
    source: str
    costs: Costs
    compute: Compute
    interference: Interference
    memory: Bandwidth
    power: Power

    def __post_init__(self) -> None:
        for part in (self.costs, self.compute, self.interference, self.memory, self.power):
            for name in part.__struct_fields__:
                if not 0 <= getattr(part, name) < float("inf"):
                    raise ValueError(f"{name} must be a finite number of at least 0")
                if name.endswith("_ns") and getattr(part, name) > MOST_NS:
                    raise ValueError(f"{name} must be at most {MOST_NS} ns")
        for name in ("dram_bytes_per_s", "l2_bytes_per_s"):
            if getattr(self.memory, name) <= 0:
                raise ValueError(f"{name} must be more than 0")
        if self.interference.cohabit > 1:
            raise ValueError("cohabit is a part of a lane's room, at most 1")
        if self.costs.turn_ns == 0:
            raise ValueError("turn_ns must be more than 0")

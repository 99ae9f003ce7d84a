"""Who runs how fast, and what that draws: the simulator's whole model of interference and power.

``contend`` and ``draw_w`` are pure functions of what is active; the core calls them whenever the
set of running kernels changes. A better model replaces this file and the constants in the
calibration.

Units: a slice used by n running kernels gives each 1/n of itself, and a kernel's speed is its
share of its lane's units. So two identical kernels on the same units take twice as long each, as
the paper measured; kernels on disjoint lanes do not notice each other; partial overlap lies
between. Memory: DRAM and L2 bandwidth are then shared max-min fairly among all lanes: who asks for
less than an equal share gets all of it, the others split the rest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eclip.jit import compiled

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]

# A running kernel. Rates are bytes per ns at full speed; occupancy is the part of its lane's units
# on which it has blocks; speed, the result, is 1 for as fast as alone on the lane.
RUNNING_KERNEL = [
    ("lane", np.int64),
    ("dram_rate", np.float64),
    ("l2_rate", np.float64),
    ("occupancy", np.float64),
    ("speed", np.float64),
]

# The constants of a calibration as the functions below want them.
LIMITS = np.dtype(
    [
        ("dram_rate", np.float64),
        ("l2_rate", np.float64),
        ("idle_w", np.float64),
        ("busy_unit_w", np.float64),
        ("dram_pj_per_byte", np.float64),
    ]
)


@compiled
def contend(
    active: Ints,  # indices into ``running``
    count: int,  # how many entries of ``active`` count
    running: Records,
    lane_units: Floats,  # lane × slice: units of the slice if the lane has it, else 0
    lane_total: Floats,
    limits: Records,  # one entry
    users: Floats,  # scratch, one entry per slice
) -> None:
    """Set the speed of every active kernel."""
    if count == 1:
        running[active[0]]["speed"] = 1.0
        return
    slices = users.shape[0]
    for s in range(slices):
        users[s] = 0.0
    for i in range(count):
        lane = running[active[i]]["lane"]
        for s in range(slices):
            users[s] += 1.0 if lane_units[lane, s] > 0.0 else 0.0
    for s in range(slices):
        users[s] = 1.0 / max(users[s], 1.0)
    for i in range(count):
        lane = running[active[i]]["lane"]
        mine = 0.0
        for s in range(slices):
            mine += lane_units[lane, s] * users[s]
        running[active[i]]["speed"] = mine / lane_total[lane]
    _share_bandwidth(active, count, running, "dram_rate", limits[0]["dram_rate"])
    _share_bandwidth(active, count, running, "l2_rate", limits[0]["l2_rate"])


@compiled
def _share_bandwidth(active: Ints, count: int, running: Records, rate: str, limit: float) -> None:
    """Slow down those who ask for more than their max-min fair share of ``limit``."""
    # A kernel was profiled alone at its rate, so alone it reaches it whatever the limit says: it
    # never asks for more than the limit.
    total = 0.0
    for i in range(count):
        kernel = running[active[i]]
        total += min(kernel[rate], limit) * kernel["speed"]
    if total <= limit:
        return
    level = limit / count
    while True:
        satisfied = 0.0
        greedy = 0
        for i in range(count):
            kernel = running[active[i]]
            demand = min(kernel[rate], limit) * kernel["speed"]
            if demand <= level:
                satisfied += demand
            else:
                greedy += 1
        if greedy == 0:
            return
        raised = (limit - satisfied) / greedy
        if raised <= level * (1.0 + 1e-12):
            break
        level = raised
    for i in range(count):
        kernel = running[active[i]]
        asked = min(kernel[rate], limit)
        if asked * kernel["speed"] > level:
            kernel["speed"] = level / asked


@compiled
def draw_w(
    active: Ints,
    count: int,
    running: Records,
    lane_units: Floats,
    slice_units: Floats,
    limits: Records,
    filled: Floats,  # scratch, one entry per slice
) -> float:
    """Power of the whole device. Idle units are inside ``idle_w``: nothing gates them."""
    slices = filled.shape[0]
    for s in range(slices):
        filled[s] = 0.0
    traffic = 0.0  # bytes per ns
    for i in range(count):
        kernel = running[active[i]]
        traffic += kernel["dram_rate"] * kernel["speed"]
        for s in range(slices):
            filled[s] += kernel["occupancy"] * lane_units[kernel["lane"], s]
    busy_units = 0.0
    for s in range(slices):
        busy_units += min(filled[s], slice_units[s])
    constants = limits[0]
    return float(
        constants["idle_w"]
        + busy_units * constants["busy_unit_w"]
        + traffic * constants["dram_pj_per_byte"] * 1e-3  # byte/ns · pJ/byte = mW
    )

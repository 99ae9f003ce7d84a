"""Contention: how fast each running kernel is, and what that draws. The whole model of interference
and power.

``contend`` and ``draw_w`` are pure functions of what is active; the core calls them whenever the
set of running kernels changes. A better model replaces this file and the constants in the
calibration.

Units: a GPU hands out room for thread blocks in the order kernels came. While a kernel still has
blocks to hand out (all its waves but the last) it keeps every unit of its lane full, and whoever
came later finds only ``cohabit`` of the room there: that is how a short kernel waits behind a long
one. In its last wave, or if it never filled its lane, it holds only the part its blocks take, and
the rest is free for others. Blocks go where there is room: a kernel that wants less than its lane
takes it from every slice in proportion to what is free there. A kernel runs as fast as the room it
gets compares with the room it wants. Kernels resident side by side on one unit also share its
pipelines: ``crowding`` is how much slower the later one gets for every whole neighbour. A kernel of
which one block fills a unit is beside nobody, whoever came first. Kernels on disjoint lanes notice
nothing of this.

Memory: whoever runs anywhere makes memory slower to answer for all the others: a kernel takes
``presence`` longer for every neighbour, and ``pressure`` longer for every unit of its pressing: the
square root of the L2 rate that it has on the whole device. So a kernel that draws four times as
much disturbs twice as much. It presses in proportion to its progress: half as much on a lane where
it takes twice as long. Above that, DRAM and L2 bandwidth are shared max-min fairly among all lanes,
by the rates themselves: who asks for less than an equal share gets all of it, the others split the
rest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eclip.jit import compiled

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]

# A running kernel. Rates are bytes per ns at full speed; speed, the result, is 1 for as fast as
# alone on the lane.
RUNNING_KERNEL = [
    ("lane", np.int64),
    ("ticket", np.int64),  # the earlier one has the lower number
    ("remaining", np.float64),  # ns at full speed
    ("tail_ns", np.float64),  # of those the last wave, in which no block waits for room
    ("body_room", np.float64),  # part of its lane's room that it holds before the last wave ...
    ("tail_room", np.float64),  # ... and in it
    ("open", np.float64),  # part of that room on units where others can be beside it
    ("dram_rate", np.float64),
    ("l2_rate", np.float64),
    ("pressing", np.float64),  # root of its L2 rate on the whole device, at its pace on the lane
    ("power_w", np.float64),  # above idle, at full speed
    ("speed", np.float64),
]

# The constants of a calibration as the functions below want them.
LIMITS = np.dtype(
    [
        ("cohabit", np.float64),
        ("crowding", np.float64),
        ("presence", np.float64),
        ("pressure", np.float64),
        ("dram_rate", np.float64),
        ("l2_rate", np.float64),
        ("idle_w", np.float64),
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
    held: Floats,  # scratch, one entry per slice
    crowd: Floats,  # the same
) -> None:
    """Set the speed of every active kernel."""
    if count == 1:
        running[active[0]]["speed"] = 1.0
        return
    for i in range(1, count):  # in the order they came; there are few
        moved = active[i]
        j = i - 1
        while j >= 0 and running[active[j]]["ticket"] > running[moved]["ticket"]:
            active[j + 1] = active[j]
            j -= 1
        active[j + 1] = moved
    slices = held.shape[0]
    cohabit, crowding = limits[0]["cohabit"], limits[0]["crowding"]
    presence, pressure = limits[0]["presence"], limits[0]["pressure"]
    for s in range(slices):
        held[s] = crowd[s] = 0.0
    disturbance = 0.0
    for i in range(count):
        kernel = running[active[i]]
        lane = kernel["lane"]
        in_body = kernel["remaining"] > kernel["tail_ns"]
        room = kernel["body_room"] if in_body else kernel["tail_room"]
        wanted = room * lane_total[lane]
        free = 0.0
        for s in range(slices):
            free += lane_units[lane, s] * max(1.0 - held[s], cohabit)
        part = min(1.0, wanted / free)  # of what is free: blocks go where there is room
        beside = kernel["open"]
        slower = crowding if beside > 0.0 else 0.0
        got = 0.0
        for s in range(slices):
            units = lane_units[lane, s]
            if units > 0.0:
                taken = part * max(1.0 - held[s], cohabit)
                got += units * taken / (1.0 + slower * min(crowd[s], 1.0))
                held[s] += taken
                crowd[s] += taken * beside
        speed = got / wanted
        kernel["speed"] = speed
        disturbance += (presence + pressure * kernel["pressing"]) * speed
    for i in range(count):
        kernel = running[active[i]]
        speed = kernel["speed"]
        own = (presence + pressure * kernel["pressing"]) * speed
        kernel["speed"] = speed / (1.0 + (disturbance - own))
    _share_bandwidth(active, count, running, "dram_rate", limits[0]["dram_rate"])
    _share_bandwidth(active, count, running, "l2_rate", limits[0]["l2_rate"])


@compiled
def _share_bandwidth(active: Ints, count: int, running: Records, rate: str, limit: float) -> None:
    """Slow down kernels that ask for more than their max-min fair share of ``limit``."""
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
def draw_w(active: Ints, count: int, running: Records, limits: Records) -> float:
    """Power of the whole device: idle, and what the kernels draw for the work they get done."""
    total = limits[0]["idle_w"]
    for i in range(count):
        kernel = running[active[i]]
        total += kernel["power_w"] * kernel["speed"]
    return float(total)

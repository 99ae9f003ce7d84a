"""The pool of lanes a policy may choose from, as the ECLIP paper lays it out.

Every worker has a home slice and, from there, one mask for each size, each containing the smaller
ones; first come the slices the workers divide among themselves, then those least wanted by others.
The smallest sizes are dropped first when the hardware queues do not suffice. On an MI50 with two
workers this gives exactly the masks printed in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from eclip.core.plan import ALL_WORKERS, Lane
from eclip.core.topology import Topology


@dataclass(frozen=True)
class Pool:
    lanes: tuple[Lane, ...]
    sizes: tuple[int, ...]  # units, rising; the same for every worker
    lane_of: tuple[tuple[int, ...], ...]  # per worker, per size


def build_pool(topology: Topology, workers: int) -> Pool:
    """Masked lanes per worker, and the whole device: a lane each, or one owned by all.

    One hardware queue stays with the default stream. Where the queues allow no own lane of the
    whole device for each worker, they share one, as in the paper.
    """
    queues = topology.hardware_queues - 1
    masked = min(len(topology.lane_sizes) - 1, queues // workers)
    sizes = topology.lane_sizes[len(topology.lane_sizes) - 1 - masked :]
    own_full = (masked + 1) * workers <= queues
    lanes: list[Lane] = []
    lane_of: list[tuple[int, ...]] = []
    for worker, order in enumerate(slice_orders(len(topology.slice_units), workers)):
        mine = [Lane(worker, topology.take(size, order)) for size in sizes[:-1]]
        if own_full:
            mine.append(Lane(worker, topology.full))
        lane_of.append(tuple(range(len(lanes), len(lanes) + len(mine))))
        lanes += mine
    if not own_full:
        lane_of = [(*mine, len(lanes)) for mine in lane_of]
        lanes.append(Lane(ALL_WORKERS, topology.full))
    return Pool(lanes=tuple(lanes), sizes=sizes, lane_of=tuple(lane_of))


def slice_orders(slices: int, workers: int) -> list[list[int]]:
    """Per worker the order in which its lanes grow over the slices.

    Slices are dealt out in turn, so that homes lie apart and small lanes are disjoint; the last of
    several workers counts from the far end. Then each worker adds, one at a time, the slice that
    the fewest have, and of those the nearest to home.
    """
    orders = [list(range(worker, slices, workers)) for worker in range(workers)]
    for worker in range(slices, workers):  # more workers than slices: homes repeat
        orders[worker] = [worker % slices]
    if workers > 1:
        orders[-1].reverse()
    wanted = [sum(index in order for order in orders) for index in range(slices)]
    while True:
        shortest = min(orders, key=len)
        missing = [index for index in range(slices) if index not in shortest]
        if not missing:
            return orders
        home = shortest[0]
        chosen = min(missing, key=lambda index: (wanted[index], abs(index - home)))
        wanted[chosen] += 1
        shortest.append(chosen)

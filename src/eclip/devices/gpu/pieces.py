"""Captured graphs as rows of nodes in launch order, and the pieces they are cut into.

Kernel nodes are a worker's kernels; memory nodes (memset, memcpy) go with the kernel that follows
them, or the last. A copy between host and device that takes longer than a stretch should is cut
into parts, so that a worker with joints can give way inside it. Launch order respects all edges, so
running the nodes one after another is always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eclip.errors import DeviceError
from eclip.runtime.program import Route

PART_BYTES = 4 << 20  # of a copy that is cut: about 80 us over PCIe


@dataclass(frozen=True)
class RowNode:
    handle: Any
    is_kernel: bool
    kernel: int  # position of the kernel it is, or goes with
    copy_bytes: int = 0  # of a copy between host and device that can be cut


@dataclass(frozen=True)
class RowPiece:
    """What one executable holds: consecutive kernels with the memory nodes around them, or a part
    of a long copy, which has no kernels."""

    kernels: range
    nodes: tuple[int, ...]  # their places in the captured graph, rising
    part: range | None = None  # bytes of the copy

    @property
    def place(self) -> tuple[int, int, int]:
        """Different for any two pieces of a worker."""
        return self.nodes[0], len(self.nodes), self.part.start if self.part else -1

    def lane(self, route: Route) -> int:
        """A copy goes with the kernel behind it, or with the last."""
        return int(route.lane[min(self.kernels.start, len(route.lane) - 1)])


class NodeRow:
    """The nodes of a captured graph in launch order."""

    def __init__(self, nodes: Sequence[tuple[Any, bool, int]], atomic: bool = False) -> None:
        """``nodes``: handle, whether it is a kernel, and how much it copies. ``atomic``: some node
        cannot be moved or copied, so the graph runs as it was captured, whole and on one lane."""
        self.kernel_count = sum(is_kernel for _, is_kernel, _ in nodes)
        if self.kernel_count == 0:
            raise DeviceError("the captured graph launches no kernel, so there is nothing to place")
        self.atomic = atomic
        made = []
        seen = 0
        for handle, is_kernel, copied in nodes:
            made.append(RowNode(handle, is_kernel, min(seen, self.kernel_count - 1), copied))
            seen += is_kernel
        self.nodes = tuple(made)

    def piece(self, kernels: range) -> RowPiece:
        """These kernels and the memory nodes that go with them."""
        inside = (place for place, node in enumerate(self.nodes) if node.kernel in kernels)
        return RowPiece(kernels, tuple(inside))

    def pieces(self, kernels: range) -> list[RowPiece]:
        """The same, in order, with long copies apart and in parts."""
        cut: list[RowPiece] = []
        run: list[int] = []
        first = kernels.start
        for place, node in enumerate(self.nodes):
            if node.kernel not in kernels:
                continue
            if node.copy_bytes <= PART_BYTES:
                run.append(place)
                continue
            until = first + sum(self.nodes[earlier].is_kernel for earlier in run)
            if run:
                cut.append(RowPiece(range(first, until), tuple(run)))
            here = range(until, until)
            cut += [RowPiece(here, (place,), part) for part in _parts(node.copy_bytes)]
            first, run = until, []
        if run:
            cut.append(RowPiece(range(first, kernels.stop), tuple(run)))
        return cut

    def at_barriers(self, piece: RowPiece, route: Route) -> list[RowPiece]:
        """A piece cut where its route changes lanes."""
        if not piece.kernels:
            return [piece]
        # What goes with a kernel behind a long copy may be before that copy.
        last = piece.kernels[-1]
        return [
            RowPiece(
                kernels,
                tuple(
                    place for place in piece.nodes if min(self.nodes[place].kernel, last) in kernels
                ),
            )
            for kernels in route.segments(piece.kernels)
        ]


def in_launch_order(nodes: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Handles so that every edge goes forward; among equals, as they were given."""
    before = dict.fromkeys(nodes, 0)
    after: dict[int, list[int]] = {node: [] for node in nodes}
    for source, target in edges:
        before[target] += 1
        after[source].append(target)
    rank = {node: index for index, node in enumerate(nodes)}
    ready = sorted((node for node, waits in before.items() if waits == 0), key=rank.__getitem__)
    ordered = []
    while ready:
        node = ready.pop(0)
        ordered.append(node)
        for follower in after[node]:
            before[follower] -= 1
            if before[follower] == 0:
                ready.append(follower)
        ready.sort(key=rank.__getitem__)
    return ordered


def _parts(size: int) -> list[range]:
    """Equal parts, none larger than it should be."""
    count = -(-size // PART_BYTES)
    ends = [size * part // count for part in range(count + 1)]
    return [range(start, end) for start, end in pairwise(ends)]

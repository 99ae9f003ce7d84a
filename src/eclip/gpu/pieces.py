"""Captured graphs as nodes in launch order, and the pieces they are cut into.

Kernel nodes are a worker's kernels; memory nodes (memset, memcpy) go with the kernel that follows
them, or the last. A copy between host and device that takes longer than a stretch should is cut
into parts, so that a worker with joints can give way inside it. Launch order respects all edges, so
running the nodes one after another is always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eclip.core.copies import PART_BYTES, parts_of
from eclip.core.program import Route
from eclip.errors import DeviceError

KERNEL = "KERNEL"  # the one kind of node that both vendors must name alike


@dataclass(frozen=True)
class Node:
    handle: Any
    kind: str
    kernel: int  # position of the kernel it is, or goes with
    instead: Any = None  # on CUDA, the kernel that stands for a function of one context
    copy_bytes: int = 0  # of a copy between host and device that can be cut
    to_device: bool = False  # of such a copy


@dataclass(frozen=True)
class Piece:
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


class CapturedGraph:
    """A captured graph in launch order; its owner keeps it alive."""

    def __init__(self, graph: Any, nodes: Sequence[Node], obstacle: str = "") -> None:
        """``graph``: the vendor's handle. ``obstacle``: a part that can neither be moved nor
        copied, for a person; with one the graph runs whole and on one lane."""
        self.graph = graph
        self.nodes = tuple(nodes)
        self.kernel_count = sum(node.kind == KERNEL for node in nodes)
        self.obstacle = obstacle

    @property
    def atomic(self) -> bool:
        return bool(self.obstacle)

    def piece(self, kernels: range) -> Piece:
        """These kernels and the memory nodes that go with them."""
        inside = (place for place, node in enumerate(self.nodes) if node.kernel in kernels)
        return Piece(kernels, tuple(inside))

    def pieces(self, kernels: range) -> list[Piece]:
        """The same, in order, with long copies apart and in parts."""
        cut: list[Piece] = []
        run: list[int] = []
        first = kernels.start
        for place, node in enumerate(self.nodes):
            if node.kernel not in kernels:
                continue
            if node.copy_bytes <= PART_BYTES:
                run.append(place)
                continue
            until = first + sum(self.nodes[earlier].kind == KERNEL for earlier in run)
            if run:
                cut.append(Piece(range(first, until), tuple(run)))
            here = range(until, until)
            cut += [Piece(here, (place,), part) for part in parts_of(node.copy_bytes)]
            first, run = until, []
        if run:
            cut.append(Piece(range(first, kernels.stop), tuple(run)))
        return cut

    def at_barriers(self, piece: Piece, route: Route) -> list[Piece]:
        """A piece cut where its route changes lanes."""
        if not piece.kernels:
            return [piece]
        # What goes with a kernel behind a long copy may be before that copy.
        last = piece.kernels[-1]
        return [
            Piece(
                kernels,
                tuple(
                    place for place in piece.nodes if min(self.nodes[place].kernel, last) in kernels
                ),
            )
            for kernels in route.segments(piece.kernels)
        ]


def kernels_beside(kinds: Sequence[str]) -> list[int]:
    """For every node in launch order, the position of the kernel that it is, or goes with."""
    count = kinds.count(KERNEL)
    if count == 0:
        raise DeviceError("the captured graph launches no kernel, so there is nothing to place")
    beside = []
    seen = 0
    for kind in kinds:
        beside.append(min(seen, count - 1))
        seen += kind == KERNEL
    return beside


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

"""The flat table that libeclip dispatches from: (worker, position) → identity and lane.

``native/table.cpp`` reads the table. The table has no barriers: a program makes calls between
kernels that no plan knows, so libeclip decides by the actual lane of a kernel's predecessor. A lane
that all workers own becomes a lane for each worker, since libeclip's lanes serve one stream at a
time. A lane of all slices without a priority is left out, because the user's own stream serves as
such a lane. The variant with all workers active is in the kernels' rows; the other variants follow.
Graphs that the program launches may be cut at joints.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

from eclip.core.plan import ALL_WORKERS, Lane, Lanes
from eclip.core.program import Program, Route
from eclip.core.topology import Topology
from eclip.core.trace import Kernel, Trace
from eclip.errors import UsageError, unknown_name

VERSION = 4
MOST_LANES = 64
MOST_WORKERS = 32
_MAGIC = b"ECLIPTBL"
_COARSE_UNITS = 8  # smaller slices come from a split that ignores which SMs schedule together
_WORD = (1 << 64) - 1
_PRIME = 0x100000001B3
_BASIS = 0xCBF29CE484222325


class WorkersBy(enum.Enum):
    """How libeclip tells workers apart."""

    THREAD = "thread"
    STREAM = "stream"


def workers_by(name: str) -> WorkersBy:
    """The WorkersBy with this name."""
    ways = {way.value: way for way in WorkersBy}
    if name not in ways:
        raise unknown_name("way to tell workers apart", name, ways)
    return ways[name]


def hash_bytes(data: bytes) -> int:
    """FNV-1a, 64 bits."""
    value = _BASIS
    for byte in data:
        value = (value ^ byte) * _PRIME & _WORD
    return value


def identity(kernel: Kernel) -> int:
    """A hash of the launch's name, grid and block, by which libeclip recognises it."""
    value = hash_bytes(kernel.name.encode())
    for number in (*kernel.grid, *kernel.block):
        value = (value ^ number) * _PRIME & _WORD
    return value


def plan_table(program: Program, traces: Sequence[Trace], by: WorkersBy) -> bytes:
    """The table of a plan; traces are those the program is made for."""
    plan = program.plan
    if not isinstance(plan.sharing, Lanes):
        raise UsageError(
            f"a plan of {plan.policy} needs one process per model; choose another policy"
        )
    if len(plan.workers) > MOST_WORKERS:
        raise UsageError(f"libeclip serves at most {MOST_WORKERS} workers, not {len(plan.workers)}")
    numbers: dict[tuple[int, int], int] = {}  # of worker and lane of the plan

    def lanes_of(routes: Sequence[Route]) -> list[int]:
        """Of all kernels, worker after worker; -1 for workers that the variant does not know."""
        by_worker = {route.worker: route.lane.tolist() for route in routes}
        return [
            numbers.setdefault((worker, lane), len(numbers)) if lane >= 0 else -1
            for worker, trace in enumerate(traces)
            for lane in by_worker.get(worker, [-1] * len(trace.kernels))
        ]

    lanes = lanes_of(program.routes[plan.variants.index(plan.main)])
    others = sorted(
        (pair for pair in zip(plan.variants, program.routes, strict=True) if pair[0] != plan.main),
        key=lambda pair: len(pair[0].active),
    )
    variants = [(variant.active, lanes_of(routes)) for variant, routes in others]
    known: dict[Kernel, int] = {}
    identities = []
    for trace in traces:
        for kernel in trace.kernels:
            if kernel not in known:
                known[kernel] = identity(kernel)
            identities.append(known[kernel])
    joints = [
        position in (worker.joints.at if worker.joints else ())
        for worker, trace in zip(plan.workers, traces, strict=True)
        for position in range(len(trace.kernels))
    ]
    return _table(
        plan.topology,
        mode=0,
        by=by,
        lanes=[(worker, plan.lanes[lane]) for worker, lane in numbers],
        counts=[len(trace.kernels) for trace in traces],
        kernels=list(zip(identities, lanes, joints, strict=True)),
        variants=variants,
    )


def record_table(topology: Topology, units: int, by: WorkersBy) -> bytes:
    """A table that sends every launch to a lane of one size, to be timed."""
    try:
        mask = topology.take(units, range(len(topology.slice_units)))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return _table(
        topology, mode=1, by=by, lanes=[(-1, Lane(ALL_WORKERS, mask))], counts=[], kernels=[]
    )


def _table(
    topology: Topology,
    mode: int,
    by: WorkersBy,
    lanes: Sequence[tuple[int, Lane]],
    counts: Sequence[int],
    kernels: Sequence[tuple[int, int, bool]],
    variants: Sequence[tuple[Sequence[int], Sequence[int]]] = (),
) -> bytes:
    if len(lanes) > MOST_LANES:
        raise UsageError(f"libeclip keeps at most {MOST_LANES} lanes, this plan needs {len(lanes)}")
    split_units = topology.slice_units[0]
    body = struct.pack(
        "<10I",
        mode,
        1 if by is WorkersBy.STREAM else 0,
        split_units,
        int(split_units < _COARSE_UNITS),
        len(topology.slice_units),
        len(lanes),
        len(counts),
        len(kernels),
        len(variants),
        0,
    )
    body += struct.pack(f"<{len(topology.slice_units)}I", *topology.slice_units)
    for worker, lane in lanes:
        bits = sum(1 << index for index in lane.mask)
        whole = lane.mask == topology.full
        words = (bits & _WORD, bits >> 64)
        body += struct.pack("<iIQQiI", worker, whole, *words, lane.priority, 0)
    body += struct.pack(f"<{len(counts)}I", *counts)
    body += b"".join(struct.pack("<QiI", *kernel) for kernel in kernels)
    for active, lane_of in variants:
        bits = sum(1 << worker for worker in active)
        body += struct.pack(f"<I{len(kernels)}i", bits, *lane_of)
    head = struct.pack("<8sIIQ", _MAGIC, VERSION, len(body) + 24, hash_bytes(body))
    return head + body

"""Modelled profiles: a model's expected cost on a device, from its architecture alone.

A roofline with waves. A kernel takes the longer of its arithmetic, which comes in waves of resident
blocks, and its memory traffic, part of which L2 serves, on top of the time of the shortest
kernel. More units never make a kernel slower; a bigger batch never makes a request faster. Rates
and latencies come from the calibration; the constants here belong to classes of kernels, never to
one model, and were fitted to probe runs of eight models on one H200, 2026-11-15
(tests/unit/models/test_modelled.py holds the table).

Memory comes from the architecture, too: half-precision weights, and as activations the largest set
of tensors alive at once (zoo/ops.py). Workspaces and executables are assumed constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.calibration import Calibration
from eclip.core.footprint import Footprint
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile, Times
from eclip.core.topology import Topology
from eclip.core.trace import Kernel, Trace, with_traces
from eclip.errors import MismatchError, UsageError
from eclip.models import zoo
from eclip.models.zoo.ops import HALF, Kind, Op, Tape

_MOST_NS = 10**15  # of a kernel: sums over a model stay countable


class _Class(msgspec.Struct, frozen=True):
    matrix: bool  # on matrix units, whose blocks fill a pipeline before they produce anything
    arithmetic: float  # share of its arithmetic peak that the class reaches
    memory: float  # share of the memory rates that it reaches


_CLASSES: dict[Kind, _Class] = {
    # Library kernels reach about half of the peak once their pipeline is full. Products with the
    # few rows of a small batch have too few loads in flight to fill the memory's rate.
    "gemm": _Class(True, 0.50, 0.40),
    # The same tiles with longer inner loops; their inputs are shared by neighbouring blocks.
    "conv": _Class(True, 0.60, 0.90),
    # Between its two products the matrix units wait for a softmax.
    "attention": _Class(True, 0.40, 0.80),
    # Every product needs its own address and bounds check; neighbours overlap, so L1 helps little.
    "depthwise": _Class(False, 0.20, 0.50),
    "pointwise": _Class(False, 0.50, 0.95),
    # Threads wait for each other between the passes over a row.
    "reduction": _Class(False, 0.30, 0.70),
    # Reads or writes come in pieces shorter than a cache line.
    "transpose": _Class(False, 0.50, 0.70),
}
_VECTOR_SHARE = 1 / 15  # of the matrix rate, by datasheet: 67 of 989 TFLOP/s on Hopper
_NO_MATRIX_UNITS = frozenset({"gfx906"})  # there the vector units' rate is the whole rate
# One unit keeps a fixed number of bytes in flight, and L2 answers sooner than DRAM.
_L2_UNIT_GAIN = 1.3
# Of the L2 cache that a kernel finds holding its predecessor's output; the rest holds weights and
# what else passes through.
_L2_SHARE = 0.6
# Torch's allocator takes memory in blocks of 2 MiB, and for tensors below 10 MiB 20 MiB at once
# (kRoundLarge, kLargeBuffer in its CUDACachingAllocator).
_BLOCK_BYTES, _SEGMENT_BYTES = 2 << 20, 20 << 20
# Torch gives cuBLAS 32 MiB a stream on Hopper; as much again is assumed for cuBLASLt and cuDNN.
_WORKSPACES_BYTES = 64 << 20
# Assumed, rather too large: device memory of an executable graph for every kernel.
_EXECUTABLE_KERNEL_BYTES = 64 << 10


def model_names() -> tuple[str, ...]:
    return zoo.NAMES


def model_profile(
    model: ModelKey,
    topology: Topology,
    calibration: Calibration,
    sizes: Sequence[int] | None = None,
) -> Profile:
    """The modelled profile at ``sizes``, which must end with the whole device."""
    sizes = profiled_sizes(topology, sizes)
    if not calibration.compute.unit_flops or not calibration.compute.unit_bytes_per_s:
        raise UsageError(
            f"the calibration for {topology.title} leaves out what one unit can compute and move, "
            f"so {model.name} cannot be modelled with it"
        )
    tape = zoo.forward_pass(model.name, model.batch)
    ops = tape.ops
    trace = Trace(
        model=model,
        kernels=tuple(map(_kernel, ops)),
        inputs=zoo.inputs(model.name, model.batch),
    )
    traffic = weights, misses, hits = _traffic(ops, calibration)
    with np.errstate(all="ignore"):  # checked below
        busy = _busy_ns(ops, traffic, sizes, topology, calibration)
    if not ((busy >= 0) & (busy < _MOST_NS)).all():  # beyond, the conversion had overflown
        raise MismatchError(
            f"a kernel of {model} would take over {_MOST_NS / 1e9:.0f} s with this calibration; "
            f"correct its unit_flops, unit_bytes_per_s, dram_bytes_per_s and l2_bytes_per_s"
        )
    gap_ns = calibration.compute.gap_ns
    return Profile(
        trace=trace,
        fingerprint=with_traces(topology.fingerprint, [trace]),
        modelled=True,
        source=(
            f"Modelled from the architecture of {model.name}: a roofline with waves of blocks over "
            f"the calibration of {calibration.fingerprint.device or topology.title}, not measured."
        ),
        sizes=sizes,
        request_ns=tuple((busy.sum(axis=0) + gap_ns * len(ops)).tolist()),
        busy_ns=tuple(map(tuple, busy.tolist())),
        gap_ns=((gap_ns,) * len(sizes),) * len(ops),
        spread_ns=((0,) * len(sizes),) * len(ops),
        dram_bytes=_whole(weights + misses),
        l2_bytes=_whole(weights + misses + hits),  # what DRAM moves passes through L2
        blocks_per_unit=tuple(op.blocks_per_unit for op in ops),
        footprint=footprint_of(tape),
    )


def footprint_of(tape: Tape) -> Footprint:
    """The memory of a captured forward pass. A capture has its own pool: whole blocks for the
    largest set of tensors alive at once, and a segment for small tensors."""
    blocks = -(-tape.live_bytes // _BLOCK_BYTES)
    return Footprint(
        weights_bytes=tape.parameters * HALF,
        activations_bytes=blocks * _BLOCK_BYTES + _SEGMENT_BYTES,
        workspaces_bytes=_WORKSPACES_BYTES,
        executables_bytes=len(tape.ops) * _EXECUTABLE_KERNEL_BYTES,
        modelled=True,
    )


def profiled_sizes(topology: Topology, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes asked for, or those that the device's lanes come in."""
    if sizes is None:
        return topology.lane_sizes
    rising = list(sizes) == sorted(set(sizes))
    if not rising or min(sizes, default=0) < 1 or sizes[-1] != topology.units:
        raise UsageError(
            f"cannot profile lanes of {list(sizes)} units: sizes start at 1 unit and rise to all "
            f"{topology.units} of {topology.title}"
        )
    return tuple(sizes)


def _whole(column: Times) -> tuple[int, ...]:
    return tuple(column[:, 0].astype(np.int64).tolist())


def _kernel(op: Op) -> Kernel:
    return Kernel(
        name=op.name, grid=op.grid, block=(op.threads, 1, 1), shared_bytes=op.shared_bytes
    )


def _traffic(ops: Sequence[Op], calibration: Calibration) -> tuple[Times, Times, Times]:
    """A column each: bytes of weights, of activations that miss in L2, of activations that hit.

    Weights come from DRAM. A kernel finds the activations of the one before it in L2 as far as
    they fit there beside what it writes.
    """
    weights = _column(op.weight_bytes for op in ops)
    activations = _column(op.read_bytes + op.written_bytes for op in ops)
    hits = np.minimum(activations, np.rint(_L2_SHARE * calibration.memory.l2_bytes))
    return weights, activations - hits, hits


def _busy_ns(
    ops: Sequence[Op],
    traffic: tuple[Times, Times, Times],
    sizes: Sequence[int],
    topology: Topology,
    calibration: Calibration,
) -> npt.NDArray[np.int64]:
    """A row per kernel, a column per size. No term grows with the units, so no time does."""
    compute, memory = calibration.compute, calibration.memory
    classes = [_CLASSES[op.kind] for op in ops]
    units = np.array(sizes, dtype=np.float64)

    blocks = _column(op.blocks for op in ops)
    resident = _column(op.blocks_per_unit for op in ops)
    waves = np.ceil(blocks / (units * resident))
    sharing = np.minimum(resident, np.ceil(blocks / units))  # blocks on one unit in a wave
    vector_share = 1.0 if topology.compute in _NO_MATRIX_UNITS else _VECTOR_SHARE
    reach = _column(of.arithmetic * (1.0 if of.matrix else vector_share) for of in classes)
    block_s = _column(op.flops for op in ops) / blocks / (compute.unit_flops * reach)
    fill_s = _column(of.matrix for of in classes) * compute.kernel_latency_ns / 1e9
    arithmetic_s = waves * (sharing * block_s + fill_s)

    # Weights are divided among columns and depths of tiles; every row of tiles reads them again, so
    # more rows do not bring them in sooner.
    weight_readers = _column(op.grid[0] * op.grid[2] for op in ops)
    weights, misses, hits = traffic
    unit_rate, dram_rate, l2_rate = (
        compute.unit_bytes_per_s,
        memory.dram_bytes_per_s,
        memory.l2_bytes_per_s,
    )
    active = np.minimum(units, blocks)
    memory_s = (
        weights / np.minimum(dram_rate, np.minimum(units, weight_readers) * unit_rate)
        + misses / np.minimum(dram_rate, active * unit_rate)
        + hits / np.minimum(l2_rate, active * unit_rate * _L2_UNIT_GAIN)
    ) / _column(of.memory for of in classes)

    busy_ns = compute.kernel_latency_ns + 1e9 * np.maximum(arithmetic_s, memory_s)
    return np.maximum(np.rint(busy_ns), 1).astype(np.int64)


def _column(values: Iterable[float]) -> Times:
    return np.array(list(values), dtype=np.float64)[:, None]

"""Synthetic profiles: seeded random kernels of mixed classes, for tests and benchmarks.

The same arguments give the same profile, on every machine. Kernels are of four classes: time falls
with every unit, falls up to some size, hardly falls at all, or falls until memory is the limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eclip.core.footprint import Footprint
from eclip.core.model_key import parse_model
from eclip.core.profile import Profile, Table
from eclip.core.topology import Topology
from eclip.core.trace import Kernel, Trace, with_traces
from eclip.errors import UsageError
from eclip.models.modelled import profiled_sizes

_CLASSES = ("scaling", "saturating", "flat", "memory")
_SHARES = (0.35, 0.30, 0.20, 0.15)
_MEDIAN_NS, _SIGMA = 5000, 0.9  # of a kernel's time on the whole device, lognormal
_FLOOR_NS = 1000  # the part no unit shortens
_GAP_NS, _GAP_SPREAD_NS = 800, 800
_BYTES_PER_NS = 3000.0  # of a memory-bound kernel; other kernels move a tenth at most
_MEMORY_LIMIT = 0.4  # of the units: enough to draw all the memory can give
_WEIGHTS_BYTES, _EXECUTABLE_BYTES = 256 << 10, 64 << 10  # of one kernel


def synthetic_profile(
    seed: int,
    kernels: int,
    topology: Topology,
    name: str = "synthetic",
    batch: int = 1,
    sizes: Sequence[int] | None = None,
) -> Profile:
    if kernels < 1:
        raise UsageError(f"a synthetic profile needs at least one kernel, not {kernels}")
    sizes = profiled_sizes(topology, sizes)
    rng = np.random.default_rng(seed)
    units = np.array(sizes, dtype=np.float64)

    kind = rng.choice(len(_CLASSES), size=kernels, p=_SHARES)
    whole_ns = rng.lognormal(np.log(_MEDIAN_NS), _SIGMA, kernels) + _FLOOR_NS
    memory = kind == _CLASSES.index("memory")
    # The units beyond which a kernel gets no faster; saturating kernels keep the random ones.
    limit = topology.units * rng.uniform(0.1, 0.9, kernels)
    limit[kind == _CLASSES.index("scaling")] = topology.units
    limit[kind == _CLASSES.index("flat")] = units[0]
    limit[memory] = topology.units * _MEMORY_LIMIT
    slowdown = np.maximum(limit[:, None] / units, 1.0)
    busy = np.rint(_FLOOR_NS + (whole_ns - _FLOOR_NS)[:, None] * slowdown).astype(np.int64)
    gap = (_GAP_NS + rng.integers(0, _GAP_SPREAD_NS, kernels))[:, None].repeat(len(sizes), axis=1)
    spread = np.rint(busy * rng.uniform(0.0, 0.05, kernels)[:, None]).astype(np.int64)

    intensity = np.where(memory, rng.uniform(0.6, 1.0, kernels), rng.uniform(0.0, 0.1, kernels))
    dram = np.rint(intensity * _BYTES_PER_NS * whole_ns).astype(np.int64)
    l2 = np.rint(dram * rng.uniform(1.0, 2.0, kernels)).astype(np.int64)
    resident = rng.integers(1, 17, kernels)
    blocks = np.ceil(limit * resident * rng.uniform(0.5, 4.0, kernels)).astype(np.int64)

    trace = Trace(
        model=parse_model(f"{name}:{batch}"),
        kernels=tuple(
            Kernel(name=f"{_CLASSES[of]}_{index}", grid=(grid, 1, 1), block=(256, 1, 1))
            for index, (of, grid) in enumerate(zip(kind.tolist(), blocks.tolist(), strict=True))
        ),
    )
    return Profile(
        trace=trace,
        fingerprint=with_traces(topology.fingerprint, [trace]),
        modelled=True,
        source=f"Synthetic: {kernels} random kernels of mixed classes from seed {seed}.",
        sizes=sizes,
        request_ns=tuple((busy.sum(axis=0) + gap.sum(axis=0)).tolist()),
        busy_ns=_table(busy),
        gap_ns=_table(gap),
        spread_ns=_table(spread),
        dram_bytes=tuple(dram.tolist()),
        l2_bytes=tuple(l2.tolist()),
        blocks_per_unit=tuple(resident.tolist()),
        footprint=Footprint(
            weights_bytes=kernels * _WEIGHTS_BYTES,
            activations_bytes=batch * int(dram.max()),  # of the kernel with the most traffic
            workspaces_bytes=0,
            executables_bytes=kernels * _EXECUTABLE_BYTES,
            modelled=True,
        ),
    )


def _table(values: npt.NDArray[np.int64]) -> Table:
    return tuple(map(tuple, values.tolist()))

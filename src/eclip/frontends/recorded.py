"""Recordings of an unmodified program to profiles: one recording per lane size.

A recording is libeclip's list of launches, each with its time (``native/recording.h`` has the
lines). A request is what repeats: the shortest run of launches that the rest of a worker's list
repeats, from where the program waited for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.errors import ArtefactError, MismatchError
from eclip.frontends.library import split_key
from eclip.frontends.spans import close_spans
from eclip.profile import Profile
from eclip.topology import Topology
from eclip.trace import Kernel, Trace

_LEAST_REQUESTS = 3  # one to begin with, which is left out, and two to compare
_LEAST_SHARE = 0.5  # of a worker's launches that must repeat


@dataclass
class Launches:
    """What one worker launched, in order."""

    kernels: list[Kernel] = field(default_factory=list)
    blocks_per_unit: list[int] = field(default_factory=list)
    busy_ns: list[int] = field(default_factory=list)
    gap_ns: list[int] = field(default_factory=list)  # before the kernel
    marks: set[int] = field(default_factory=set)  # launches that the program waited before


@dataclass(frozen=True)
class Requests:
    """A worker's requests, without the first: kernel times, request × kernel."""

    kernels: tuple[Kernel, ...]
    blocks_per_unit: tuple[int, ...]
    busy_ns: npt.NDArray[np.int64]
    gap_ns: npt.NDArray[np.int64]  # before the kernel; the first of a request has none


def read_recording(path: Path) -> list[Launches]:
    """The workers of a recording, in the order in which they first launched."""
    workers: dict[str, Launches] = {}
    overhead = 0
    marked = False
    try:
        lines = path.read_text().splitlines()
    except OSError:
        lines = []
    for number, line in enumerate(lines, 1):
        kind, _, rest = line.partition(" ")
        try:
            if kind == "C":
                overhead = int(rest)
            elif kind == "S":
                marked = True
            elif kind == "K":
                worker, *words = rest.split(" ", 12)
                numbers = [int(word) for word in words[:11]]
                found = workers.setdefault(worker, Launches())
                if marked:
                    for other in workers.values():
                        other.marks.add(len(other.kernels))
                    marked = False
                found.kernels.append(_kernel(words[11], numbers[2:10]))
                found.blocks_per_unit.append(numbers[10])
                found.busy_ns.append(max(1, numbers[0] - overhead))
                found.gap_ns.append(numbers[1])
            else:
                raise ValueError(f"unknown line {kind!r}")
        except (ValueError, IndexError) as error:
            raise ArtefactError(f"the recording is damaged at line {number}: {error}") from None
    return list(workers.values())


def _kernel(name: str, numbers: Sequence[int]) -> Kernel:
    return Kernel(
        name=name,
        grid=(numbers[0], numbers[1], numbers[2]),
        block=(numbers[3], numbers[4], numbers[5]),
        shared_bytes=numbers[6],
        cluster=numbers[7],
    )


def find_requests(launches: Launches) -> Requests:
    ids = _number_kernels(launches.kernels)
    period = _period(ids)
    if period is None:
        raise MismatchError(
            f"{len(ids)} launches hold no request that repeats; let the program serve the same "
            f"request at least {_LEAST_REQUESTS} times"
        )
    repeating = _repeating_from(ids, period)
    first = repeating + (_phase(launches, repeating, period) - repeating) % period
    count = (len(ids) - first) // period
    if count < _LEAST_REQUESTS:
        raise MismatchError(
            f"only {count} whole requests were recorded; let the program serve the same request "
            f"at least {_LEAST_REQUESTS} times"
        )
    chosen = slice(first + period, first + count * period)  # the first one warms up
    busy = np.array(launches.busy_ns[chosen], dtype=np.int64).reshape(count - 1, period)
    gap = np.array(launches.gap_ns[chosen], dtype=np.int64).reshape(count - 1, period)
    gap[:, 0] = 0
    return Requests(
        kernels=tuple(launches.kernels[first : first + period]),
        blocks_per_unit=tuple(launches.blocks_per_unit[first : first + period]),
        busy_ns=busy,
        gap_ns=gap,
    )


def _phase(launches: Launches, repeating: int, period: int) -> int:
    """Where requests begin: of the places that the program waited at, the one idle longest."""
    gaps: dict[int, list[int]] = {}
    for mark in sorted(launches.marks):
        if repeating <= mark < len(launches.kernels):
            gaps.setdefault(mark % period, []).append(launches.gap_ns[mark])
    if not gaps:
        return repeating % period
    most = max(len(seen) for seen in gaps.values())
    usual = {place: seen for place, seen in gaps.items() if 2 * len(seen) >= most}
    return max(usual, key=lambda place: float(np.median(usual[place])))


def _number_kernels(kernels: Sequence[Kernel]) -> npt.NDArray[np.int64]:
    numbers: dict[Kernel, int] = {}
    return np.array(
        [numbers.setdefault(kernel, len(numbers)) for kernel in kernels], dtype=np.int64
    )


def _period(ids: npt.NDArray[np.int64]) -> int | None:
    """The shortest period that the end of the list keeps for most of its length."""
    for period in range(1, len(ids) // 2 + 1):
        if ids[-1] != ids[-1 - period]:
            continue
        repeats = len(ids) - _repeating_from(ids, period)
        if repeats >= max(2 * period, _LEAST_SHARE * len(ids)):
            return period
    return None


def _repeating_from(ids: npt.NDArray[np.int64], period: int) -> int:
    different = np.flatnonzero(ids[period:] != ids[:-period])
    return int(different[-1]) + 1 if different.size else 0


def make_profile(
    key: str,
    topology: Topology,
    sizes: Sequence[int],
    requests: Sequence[Requests],
    source: str,
) -> Profile:
    """The profile of one worker from its requests at every size; all must launch the same."""
    kernels = requests[0].kernels
    for size, other in zip(sizes, requests, strict=True):
        if other.kernels != kernels:
            raise MismatchError(
                f"{key} launches other kernels on {size} {topology.unit_name}s than on {sizes[0]}; "
                f"make the program choose the same ones (no autotuning) and record again"
            )
    repeats = min(len(one.busy_ns) for one in requests)
    spans = np.stack([_spans(one)[-repeats:] for one in requests])
    request_ns = np.median(spans[..., -1, 1] - spans[..., 0, 0], axis=1)
    busy, gap, spread = close_spans(spans, request_ns)
    model, batch = split_key(key)
    trace = Trace(model=model, batch=batch, kernels=kernels)
    none = (0,) * len(kernels)
    return Profile(
        trace=trace,
        fingerprint=msgspec.structs.replace(topology.fingerprint, traces={trace.key: trace.digest}),
        modelled=False,
        source=source,
        sizes=tuple(sizes),
        request_ns=tuple((busy + gap).sum(axis=0).astype(np.int64).tolist()),
        busy_ns=_rows(busy),
        gap_ns=_rows(gap),
        spread_ns=_rows(spread),
        dram_bytes=none,
        l2_bytes=none,
        blocks_per_unit=requests[0].blocks_per_unit,
    )


def _spans(requests: Requests) -> npt.NDArray[np.int64]:
    """Start and end of every kernel: request × kernel × 2."""
    ends = np.cumsum(requests.busy_ns + requests.gap_ns, axis=1)
    return np.stack([ends - requests.busy_ns, ends], axis=-1)


def _rows(table: npt.NDArray[np.float64]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, table.astype(np.int64).tolist()))

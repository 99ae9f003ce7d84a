"""Recordings of an unmodified program to profiles: one recording per lane size.

A recording is libeclip's list of launches, each with its time (``native/recording.h`` has the
lines). A request is the shortest sequence of launches that most of a worker's list repeats. A
request begins where the program waited for the device longest, summed over all sizes: a program may
wait several times in a request, and at a single size chance may pick the wrong wait.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.core.trace import Kernel, Trace, with_traces
from eclip.errors import ArtefactError, MismatchError
from eclip.models.spans import close_spans, rows_of

_LEAST_REQUESTS = 3  # one to begin with, which is left out, and two to compare
# Of a worker's launches that must repeat without a break. Layers repeat inside a request too, but
# in the fewest requests that we take they are less than this.
_LEAST_SHARE = 0.4
_NAME_LENGTH = 60  # of a kernel in a message; names of templates have hundreds of letters


@dataclass
class Launches:
    """The launches of one worker, in order."""

    kernels: list[Kernel] = field(default_factory=list)
    blocks_per_unit: list[int] = field(default_factory=list)
    busy_ns: list[int] = field(default_factory=list)
    gap_ns: list[int] = field(default_factory=list)  # before the kernel
    marks: set[int] = field(default_factory=set)  # launches that the program waited before


@dataclass(frozen=True)
class RecordedRequests:
    """A worker's requests, without the first: kernel times, request × kernel."""

    kernels: tuple[Kernel, ...]
    blocks_per_unit: tuple[int, ...]
    busy_ns: npt.NDArray[np.int64]
    gap_ns: npt.NDArray[np.int64]  # before the kernel
    idle_ns: npt.NDArray[np.float64]  # per kernel: how long the program waited before it, if it did

    def beginning_at(self, kernel: int) -> RecordedRequests:
        """The same requests, cut at another kernel. Incomplete requests at the ends are dropped."""
        if kernel == 0:
            return self
        count, period = self.busy_ns.shape
        whole = slice(kernel, kernel + (count - 1) * period)
        return replace(
            self,
            kernels=self.kernels[kernel:] + self.kernels[:kernel],
            blocks_per_unit=self.blocks_per_unit[kernel:] + self.blocks_per_unit[:kernel],
            busy_ns=self.busy_ns.ravel()[whole].reshape(count - 1, period),
            gap_ns=self.gap_ns.ravel()[whole].reshape(count - 1, period),
            idle_ns=np.roll(self.idle_ns, -kernel),
        )


def read_recording(path: Path) -> list[Launches]:
    """The workers of a recording, in the order in which they first launched."""
    workers: dict[str, Launches] = {}
    overhead = 0
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
                for worker, waited in workers.items():
                    if rest in ("", worker):
                        waited.marks.add(len(waited.kernels))
            elif kind == "K":
                worker, *words = rest.split(" ", 12)
                numbers = [int(word) for word in words[:11]]
                found = workers.setdefault(worker, Launches())
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


def find_requests(launches: Launches) -> RecordedRequests:
    ids = _number_kernels(launches.kernels)
    found = _repeating(ids)
    if found is None:
        raise MismatchError(
            f"{len(ids)} launches hold no request that repeats; let the program serve the same "
            f"request at least {_LEAST_REQUESTS} times"
        )
    period, start, stop = found
    idle = _idle(launches, period, start, stop)
    first = start + int(np.argmax(idle))
    count = (stop - first) // period
    if count < _LEAST_REQUESTS:
        raise MismatchError(
            f"only {count} whole requests were recorded; let the program serve the same request "
            f"at least {_LEAST_REQUESTS} times"
        )
    chosen = slice(first + period, first + count * period)  # the first one warms up
    return RecordedRequests(
        kernels=tuple(launches.kernels[first : first + period]),
        blocks_per_unit=tuple(launches.blocks_per_unit[first : first + period]),
        busy_ns=np.array(launches.busy_ns[chosen], dtype=np.int64).reshape(count - 1, period),
        gap_ns=np.array(launches.gap_ns[chosen], dtype=np.int64).reshape(count - 1, period),
        idle_ns=np.roll(idle, start - first),
    )


def _idle(launches: Launches, period: int, start: int, stop: int) -> npt.NDArray[np.float64]:
    """Per kernel of a request, from ``start`` on: the usual gap where the program usually waits."""
    gaps: dict[int, list[int]] = {}
    for mark in sorted(launches.marks):
        if start <= mark < stop:
            gaps.setdefault((mark - start) % period, []).append(launches.gap_ns[mark])
    idle = np.zeros(period)
    most = max(map(len, gaps.values()), default=0)
    for place, seen in gaps.items():
        if 2 * len(seen) >= most:
            idle[place] = 1 + float(np.median(seen))
    return idle


def _number_kernels(kernels: Sequence[Kernel]) -> npt.NDArray[np.int64]:
    numbers: dict[Kernel, int] = {}
    return np.array(
        [numbers.setdefault(kernel, len(numbers)) for kernel in kernels], dtype=np.int64
    )


def _repeating(ids: npt.NDArray[np.int64]) -> tuple[int, int, int] | None:
    """The shortest period that a large part of the list keeps, and from where to where it does."""
    for period in range(1, len(ids) // 2 + 1):
        same = ids[period:] == ids[:-period]
        least = max(period, _LEAST_SHARE * len(ids) - period)
        if np.count_nonzero(same) < least:
            continue
        breaks = np.concatenate(([-1], np.flatnonzero(~same), [len(same)]))
        longest = int(np.argmax(np.diff(breaks)))
        start, stop = int(breaks[longest]) + 1, int(breaks[longest + 1])
        if stop - start >= least:
            return period, start, stop + period
    return None


def align(
    key: str, unit_name: str, sizes: Sequence[int], requests: Sequence[RecordedRequests]
) -> list[RecordedRequests]:
    """Requests of one worker that all launch the same kernels, cut at its longest pauses."""
    first = requests[0]
    aligned = [first]
    for size, other in zip(sizes[1:], requests[1:], strict=True):
        shift = _rotation(first.kernels, other.kernels)
        if shift is None:
            raise MismatchError(
                f"{key} launches other kernels on {size} {unit_name}s than on {sizes[0]}: "
                f"{_difference(first.kernels, other.kernels, sizes[0], size)}; make the program "
                f"choose the same ones (no autotuning) and record again"
            )
        aligned.append(other.beginning_at(shift))
    # Relative to the longest of its own size, so that one slow recording does not decide alone.
    idle = sum(one.idle_ns / max(1.0, one.idle_ns.max()) for one in aligned)
    begin = int(np.argmax(idle))
    aligned = [one.beginning_at(begin) for one in aligned]
    for size, one in zip(sizes, aligned, strict=True):
        if len(one.busy_ns) == 0:
            raise MismatchError(
                f"too few whole requests of {key} were recorded on {size} {unit_name}s; let the "
                f"program serve some more"
            )
    return aligned


def _rotation(wanted: Sequence[Kernel], given: Sequence[Kernel]) -> int | None:
    """From which kernel on the given request is the wanted one."""
    if len(wanted) != len(given):
        return None
    twice = tuple(given) * 2
    for shift in range(len(given)):
        if twice[shift : shift + len(wanted)] == tuple(wanted):
            return shift
    return None


def _difference(one: Sequence[Kernel], other: Sequence[Kernel], size: int, other_size: int) -> str:
    """Where two requests part and how far, for a person. Both may begin anywhere."""
    ids = _number_kernels([*one, *other]).tolist()
    mine, theirs = ids[: len(one)], ids[len(one) :]
    turned = [theirs[shift:] + theirs[:shift] for shift in range(len(theirs))]
    shift = max(range(len(turned)), key=lambda at: _common(mine, turned[at]))
    other = (*other[shift:], *other[:shift])
    steps = difflib.SequenceMatcher(None, mine, turned[shift], autojunk=False).get_opcodes()
    parts = [step for step in steps if step[0] != "equal"]
    _, from_one, to_one, from_other, to_other = parts[0]
    count = max(sum(part[2] - part[1] for part in parts), sum(part[4] - part[3] for part in parts))
    return (
        f"a request has {len(one)} kernels on {size} and {len(other)} on {other_size}, {count} of "
        f"them differ, first kernel {from_one}: {_name(one[from_one:to_one])} on {size}, "
        f"{_name(other[from_other:to_other])} on {other_size}"
    )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How much of the beginning and of the end is the same."""
    pairs = list(zip(one, other, strict=False)), list(zip(one[::-1], other[::-1], strict=False))
    return sum(len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], p))) for p in pairs)


def _name(kernels: Sequence[Kernel]) -> str:
    if not kernels:
        return "none"
    kernel = kernels[0]
    short = kernel.name if len(kernel.name) <= _NAME_LENGTH else f"{kernel.name[:_NAME_LENGTH]}…"
    return f"{short} (grid {kernel.grid}, block {kernel.block}, {kernel.shared_bytes} bytes shared)"


def make_profile(
    model: ModelKey,
    topology: Topology,
    sizes: Sequence[int],
    requests: Sequence[RecordedRequests],
    source: str,
) -> Profile:
    """The profile of one worker from its requests at every size; all must launch the same."""
    aligned = align(str(model), topology.unit_name, sizes, requests)
    kernels = aligned[0].kernels
    repeats = min(len(one.busy_ns) for one in aligned)
    spans = np.stack([_spans(one)[-repeats:] for one in aligned])
    request_ns = np.median(spans[..., -1, 1] - spans[..., 0, 0], axis=1)
    busy, gap, spread = close_spans(spans, request_ns)
    trace = Trace(model=model, kernels=kernels)
    none = (0,) * len(kernels)
    return Profile(
        trace=trace,
        fingerprint=with_traces(topology.fingerprint, [trace]),
        modelled=False,
        source=source,
        sizes=tuple(sizes),
        request_ns=tuple((busy + gap).sum(axis=0).astype(np.int64).tolist()),
        busy_ns=rows_of(busy),
        gap_ns=rows_of(gap),
        spread_ns=rows_of(spread),
        dram_bytes=none,
        l2_bytes=none,
        blocks_per_unit=aligned[0].blocks_per_unit,
        footprint=None,  # launches do not show allocations
    )


def _spans(requests: RecordedRequests) -> npt.NDArray[np.int64]:
    """Start and end of every kernel: request × kernel × 2."""
    gap_ns = requests.gap_ns.copy()
    gap_ns[:, 0] = 0  # between requests
    ends = np.cumsum(requests.busy_ns + gap_ns, axis=1)
    return np.stack([ends - requests.busy_ns, ends], axis=-1)

"""Recording: runs an unmodified command once per lane size and makes profiles of its models."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.errors import DeviceError, MismatchError
from eclip.programs.recorded import (
    Launches,
    RecordedRequests,
    find_requests,
    make_profile,
    read_recording,
)
from eclip.programs.table import WorkersBy, record_table
from eclip.programs.transparent import Vendor, run_under, vendor_of


class CommandStopped(DeviceError):  # noqa: N818 - it is no error of the command's
    """A signal ended the recording, and was passed on to the command."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"the command was stopped by signal {signal}")
        self.signal = signal


def record_command(
    command: Sequence[str],
    models: Sequence[ModelKey],  # of its workers, in the order of their first launch
    topology: Topology,
    sizes: Sequence[int],  # of lanes, in units, rising
    by: WorkersBy,
    *,
    gpu: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Profile]:
    """Run the command once per lane size; a profile for every model."""
    tables = [record_table(topology, size, by) for size in sizes]
    recordings = []
    for size, table in zip(sizes, tables, strict=True):
        tell(f"recording on {size} {topology.unit_name}s")
        recordings.append(_record(list(command), table, size, gpu, models, vendor_of(topology)))
    source = f"recorded from `{' '.join(command)}` on {time.strftime('%Y-%m-%d')}"
    return [
        make_profile(model, topology, sizes, [one[index] for one in recordings], source)
        for index, model in enumerate(models)
    ]


def _record(
    command: list[str],
    table: bytes,
    size: int,
    gpu: int,
    models: Sequence[ModelKey],
    vendor: Vendor,
) -> list[RecordedRequests]:
    """The requests of every worker on lanes of one size."""
    with tempfile.TemporaryDirectory(prefix="eclip-") as place:
        log = Path(place) / "recording"
        outcome = run_under(command, table, gpu, record_to=log, vendor=vendor)
        if outcome.signal is not None:
            raise CommandStopped(outcome.signal)
        if outcome.code != 0:
            raise DeviceError(f"the command ended with status {outcome.code} on {size} units")
        found = read_recording(log)
    unseen = sum(counts["whole_graphs"] for counts in outcome.counters.values())
    return _busiest(found, models, unseen)


def _busiest(
    found: list[Launches], models: Sequence[ModelKey], unseen_graphs: int
) -> list[RecordedRequests]:
    """The workers that launched most as requests, in the order of their first launch."""
    requests: list[RecordedRequests] = []
    reasons = []
    for launches in found:
        try:
            requests.append(find_requests(launches))
        except MismatchError as error:
            reasons.append(str(error))
    if len(requests) < len(models):
        why = f" ({reasons[0]})" if reasons else ""
        if unseen_graphs:
            why += (
                f"; {unseen_graphs} graphs cannot be recorded (loops, choices or memory of their "
                f"own): let the program run without these"
            )
        raise DeviceError(
            f"{len(found)} workers launched kernels that libeclip saw, {len(requests)} of them "
            f"serve requests, {len(models)} were named with --as{why}"
        )
    ranked = sorted(range(len(requests)), key=lambda index: -requests[index].busy_ns.size)
    return [requests[index] for index in sorted(ranked[: len(models)])]

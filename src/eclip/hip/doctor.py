"""Findings on whether this host can run plans on an AMD GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eclip.core.plan import Lane
from eclip.core.topology import Mask
from eclip.gpu.findings import Finding, Findings
from eclip.hip.api import ENTRY_POINTS
from eclip.hip.driver import QUEUES, QUEUES_VARIABLE, HipGpu, check_version
from eclip.hip.energy import RocmSmi
from eclip.hip.lanes import MaskedLanes, MaskedStreams, slice_bits

_RUNS_WITHOUT = ("hipGraphUpload",)


def examine(index: int, library: Path | None = None, nodes: Path | None = None) -> list[Finding]:
    """``library`` and ``nodes`` stand in for ROCm's libraries and the kernel driver's files."""
    findings = Findings()
    made: dict[str, Any] = {}

    def gpu() -> str:
        made["gpu"] = HipGpu(index, library, nodes)
        check_version(made["gpu"].version)
        return f"{made['gpu'].name}, HIP {made['gpu'].version}"

    def lanes() -> str:
        build = made["gpu"].build
        streams = MaskedStreams(made["gpu"])
        MaskedLanes(streams, [Lane(0, Mask([0])), Lane(1, Mask([0, 1]))]).close()
        streams.close()
        sizes = sorted({len(bits) for bits in slice_bits(build)})
        return (
            f"{build.engines} shader engines on {build.dies} XCD, slices of {sizes} "
            f"{build.unit_name}s; masks are kept and may overlap"
        )

    def memory() -> str:
        total = made["gpu"].memory_bytes
        return f"{made['gpu'].free_memory() / 2**30:.1f} of {total / 2**30:.1f} GiB free"

    def energy() -> str:
        counter = RocmSmi(made["gpu"].bus_place, library)
        counter.close()
        return "rocm-smi tells energy"

    if not findings.look(
        "driver and GPU", gpu, "install ROCm and AMD's driver; see docs/guides/amd-gpus.md"
    ):
        return findings
    findings.look("CU masks", lanes, "update ROCm; unset masks for the whole process")
    findings.look("memory", memory, "")
    newer = [name for name in _RUNS_WITHOUT if not made["gpu"].hip.has(name)]
    findings += [
        Finding(what="queues", state="ok", found=f"{QUEUES_VARIABLE}={QUEUES} asked for"),
        Finding(
            what="entry points",
            state="warning" if newer else "ok",
            found=f"{len(ENTRY_POINTS) - len(newer)} of {len(ENTRY_POINTS)}",
            remedy=f"first launches are slower without {', '.join(newer)}" if newer else "",
        ),
    ]
    findings.look("energy", energy, "install rocm-smi-lib to measure energy", failed="warning")
    return findings

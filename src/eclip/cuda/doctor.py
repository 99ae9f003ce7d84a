"""Findings on whether this host can run plans on an NVIDIA GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from eclip.core.topology import Mask
from eclip.cuda.driver import CONNECTIONS, Gpu, call, cu
from eclip.cuda.energy import Nvml
from eclip.cuda.lanes import LanePool, Slices
from eclip.cuda.tracer import Tracer
from eclip.gpu.energy import next_tick
from eclip.gpu.findings import Finding, Findings

_PACKAGES = {
    "cuda.bindings": "pip install cuda-bindings",
    "pynvml": "pip install nvidia-ml-py",
    "torch": "pip install torch, for profiling and running models",
    "cupti": "pip install 'cupti-python>=13.0,<13.1', for profiling and recording kernels",
}
INSTALL = (
    "pip install cuda-bindings nvidia-ml-py 'cupti-python>=13.0,<13.1' (in a checkout: "
    "pip install -e '.[cuda]')"
)
_NOT_TO_RUN = ("cupti",)  # plans run without it


def examine(index: int) -> list[Finding]:
    return [*_packages(), *_device(index)]


def _packages() -> list[Finding]:
    findings = []
    for name, remedy in _PACKAGES.items():
        try:
            there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            there = False
        findings.append(
            Finding(
                what=f"package {name}",
                state="ok" if there else "warning" if name in _NOT_TO_RUN else "missing",
                found="installed" if there else "not installed",
                remedy="" if there else remedy,
            )
        )
    return findings


def _device(index: int) -> list[Finding]:
    findings = Findings()
    look = findings.look
    made: dict[str, Any] = {}

    def driver() -> str:
        made["gpu"] = Gpu(index)
        version = call(cu.cuDriverGetVersion)
        return f"{made['gpu'].name}, CUDA {version // 1000}.{version % 1000 // 10}"

    def lanes() -> str:
        slices = Slices(made["gpu"])
        LanePool(slices, [Mask([0]), Mask([0, 1])]).close()
        slices.close()
        return f"{len(slices.units)} slices of {sorted(set(slices.units))} SMs; overlap works"

    def memory() -> str:
        free, total = call(cu.cuMemGetInfo)
        return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"

    def energy() -> str:
        made["nvml"] = Nvml(made["gpu"].uuid)
        next_tick(made["nvml"])
        return f"driver {made['nvml'].driver()}, the energy counter moves"

    def recording() -> str:
        with Tracer([]):
            pass
        return "attaches and detaches"

    if not look("driver and GPU", driver, "install NVIDIA's driver, CUDA 13.0 or newer"):
        return findings
    look("green contexts", lanes, "they were tried on an H200 with CUDA 13.0; update the driver")
    look("memory", memory, "")
    findings.append(
        Finding(what="connections", state="ok", found=f"{CONNECTIONS} hardware queues asked for")
    )
    if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or Path("/tmp/nvidia-mps").exists():
        findings.append(
            Finding(
                what="MPS",
                state="warning",
                found="a daemon may be running",
                remedy="its clients would share the GPU with the lanes; stop it to measure",
            )
        )
    wanted = "cupti-python 13.0 and the libcupti that torch brings, to profile and record kernels"
    look("CUPTI", recording, wanted, failed="warning")
    if look("energy", energy, "NVML must answer: same driver version, permission to read"):
        others = made["nvml"].other_processes()
        findings.append(
            Finding(
                what="other processes",
                state="warning" if others else "ok",
                found=", ".join(map(str, others)) or "none",
                remedy="they disturb measurements; stop them to profile" if others else "",
            )
        )
    return findings

"""Precompile: compile what a server runs, for every processor, into the package.

    python -m eclip.server.device.precompile [FOLDER]

A wheel and an image do this when they are built. A server that is started from them compiles
nothing (jit.py). What is compiled is found by running it: a server's generation on the simulator,
with a background service and a bound in times of its p99 alone, and the loop of a GPU with nothing
to do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from eclip.core.rules import NO_RULES
from eclip.devices import open_device
from eclip.gpu.entry_points import EntryPoints
from eclip.gpu.steps import LAUNCH, whole_request
from eclip.gpu.worker_loop import WorkerLoop
from eclip.jit import EVERY_PROCESSOR, FILL, SHIPPED, get_ready
from eclip.planner.case import find_calibration, find_topology
from eclip.server.config import make_config
from eclip.server.device.deploying import make_deployment
from eclip.server.device.generation import Generation
from eclip.server.link import Slots

_CONFIG = {
    "server": {"device": "sim"},
    "service": [
        {"name": "a", "model": "alexnet", "bound": "5x", "rate": 100, "batches": [1]},
        {"name": "b", "model": "squeezenet", "tier": "background", "floor": 0.1, "batches": [1]},
    ],
}


class _NoGpu:
    """A GPU of which nothing is ever asked: its functions are names that the C library has."""

    entry_points = EntryPoints("libc.so.6", *["getpid"] * 5)

    def make_current(self) -> None:
        pass

    def describe(self, status: int) -> str:
        return str(status)


def run_everything() -> None:
    get_ready()
    WorkerLoop(_NoGpu(), whole_request((LAUNCH, 0, 0)), rules=NO_RULES)  # compiles
    config = make_config(_CONFIG, "precompile")
    with tempfile.TemporaryDirectory() as folder:
        deployment = make_deployment(config, {}, generation=1, folder=Path(folder), seconds=0.1)
        topology = find_topology(config.server.topology)
        device = open_device("sim", topology, find_calibration(None, topology))
        slots = {spec.id: Slots.create(spec.slots) for spec in deployment.specs}
        with device, Generation(deployment, device, {0: slots}):
            pass  # opening it runs every worker once


def main(folder: Path) -> None:
    """In a process of its own: numba reads its variables once."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    code = f"from {__spec__.name} import run_everything; run_everything()"
    with tempfile.TemporaryDirectory() as cache:
        own = {FILL: str(folder.resolve()), "NUMBA_CACHE_DIR": cache} | EVERY_PROCESSOR
        subprocess.run([sys.executable, "-c", code], env=os.environ | own, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)

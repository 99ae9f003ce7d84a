"""A device whose models are one kernel on the stand-in driver: the rest is the server's own way.

``on_standin()`` lets servers of this process start device processes with it. They are planned for
the simulator; each bucket of an instance is a loop of a GPU's session, with one kernel of KERNEL_US
on real threads. Nothing is computed, and inputs and outputs lie in slots.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import eclip.server.device.process
from eclip.core.calibration import Calibration
from eclip.core.device import Capability, Slot, SourceKind
from eclip.core.plan import Sharing
from eclip.core.program import Program
from eclip.core.requests import LoopGroup
from eclip.core.rules import board_of
from eclip.core.topology import Topology
from eclip.desk import Desk, Submitting, slots_for
from eclip.gpu.serving import Loops
from eclip.gpu.worker_loop import Place
from eclip.server.supervisor import children
from standin_gpu import StandinGpu, make_worker

KERNEL_US = 20
LIBRARY = Path(__file__).parents[2] / "native/build/plain/libstandin.so"
_CHILD = f"import sys; from {__name__} import run_child; run_child('{{module}}', {{argument}})"


class StandinSession(Submitting):
    def __init__(self, program: Program) -> None:
        gpu = StandinGpu(LIBRARY)
        gpu.behave(0, lazy=False)
        board = board_of(program.plan)
        rows = np.array(program.plan.everyone)
        self._loops = [
            make_worker(
                gpu,
                worker,
                [[[(0, [KERNEL_US])]]],
                streams=[gpu.stream()],
                place=Place(board, worker, rows),
                bound_ns=program.rules[worker].bound_ns,
            ).loop
            for worker in program.plan.everyone
        ]
        self._server: Loops | None = None

    def _begin_serving(
        self,
        slots: int | Sequence[Sequence[Slot]],
        background: Collection[int],
        groups: Sequence[LoopGroup] | None,
    ) -> Desk:
        given = slots_for(slots, len(self._loops), lambda worker: Slot())
        copies = [np.zeros((len(each), 2), dtype=np.uint64) for each in given]
        desk = Desk(given, background, groups)
        self._server = Loops(self._loops, desk, copies)
        for runner in self._server.runners:
            runner.start()
        return desk

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            for runner in self._server.runners:
                runner.join()
            self._server.close()
            self.desk.close()
            self._server = None


class StandinDevice:
    modelled = False
    capabilities = frozenset({Capability.JOINTS, Capability.SUBMIT})
    title = "the stand-in driver"
    driver = uuid = None
    index = 0

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def energy_mj(self) -> int | None:
        return None

    def source_kind(self, sharing: Sharing) -> SourceKind:
        return SourceKind.PROFILE

    def open(
        self, program: Program, sources: Sequence[Any], *, brief: bool = False
    ) -> StandinSession:
        return StandinSession(program)

    def close(self) -> None:
        pass


def run_child(module: str, *descriptor: int) -> None:
    """The whole life of a process that a server starts."""
    # The planner simulates: only what requests take is another device's.
    on_standin = mock.patch.object(eclip.server.device.process, "open_device", _open)
    with on_standin:
        importlib.import_module(f"eclip.server.{module}").main(*descriptor)


def _open(name: str, topology: Topology, calibration: Calibration) -> StandinDevice:
    return StandinDevice(topology)


@contextlib.contextmanager
def on_standin() -> Iterator[None]:
    """Servers that this process starts meanwhile serve on the stand-in."""
    if not LIBRARY.exists():
        sys.exit(f"{LIBRARY} is missing; build it first: make native-tests")
    with mock.patch.object(children, "_CHILD", _CHILD):
        yield

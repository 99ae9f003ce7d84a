"""Workers in processes of their own whose loops run on the stand-in driver, each on its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from eclip.core.model_key import ModelKey
from eclip.cuda.processes.child import Attached, Facts
from eclip.gpu.steps import Ints
from standin_gpu import StandinGpu, Worker, make_worker
from standins import KERNELS, UNITS, trace_of

ENTRY = f"{__name__}:open_on_standin"
LIBRARY = "STANDIN_LIBRARY"  # a variable: the stand-in driver
_MICROS = 200  # that a kernel takes


class ServedOnStandin:
    def __init__(self, model: ModelKey, worker: Worker) -> None:
        self._worker = worker
        digest = trace_of(model.name, model.batch).digest
        self.facts = Facts(trace=digest, kernels=KERNELS, units=UNITS, mps=False)

    def serve(self, arrivals: Ints | None, stop_at_ns: int, stop: Ints) -> Ints:
        return self._worker.loop.drive(arrivals, stop_at_ns, stop)


@contextlib.contextmanager
def open_on_standin(model: ModelKey, attached: Attached) -> Iterator[ServedOnStandin]:
    gpu = StandinGpu(Path(os.environ[LIBRARY]))
    gpu.behave(0, lazy=False)
    worker = make_worker(
        gpu,
        0,
        [[[(0, [_MICROS] * len(part))] for part in attached.rules.stretches(KERNELS)]],
        streams=[gpu.stream()],
        place=attached.place,
        depth=attached.rules.depth,
        rules=attached.rules,
    )
    yield ServedOnStandin(model, worker)

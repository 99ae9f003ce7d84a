"""A worker in a separate process: its captured graph on one stream of the primary context.

The graph is launched whole, or cut at the worker's joints. Under MPS its share of units is set by
MPS; otherwise there is no limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from eclip.core.program import on_one_lane
from eclip.core.topology import Mask
from eclip.cuda.driver import Gpu, call, cu
from eclip.cuda.graphs import Executable
from eclip.cuda.lanes import GpuLane
from eclip.cuda.placing import CudaPlacer
from eclip.cuda.processes.child import Facts, Seated
from eclip.errors import MismatchError
from eclip.gpu import worker_loop
from eclip.gpu.closing import Releases
from eclip.gpu.executables import Capture, Executables
from eclip.gpu.steps import ANYBODY, LAUNCH, Ints, Ways, whole_request


class ServedCapture:
    """The entry point of a child of ``ProcessSets``."""

    def __init__(self, facts: Facts, worker: worker_loop.WorkerLoop) -> None:
        self.facts = facts
        self._worker = worker

    def serve(self, arrivals: Ints | None, stop_at_ns: int, stop: Ints) -> Ints:
        return self._worker.drive(arrivals, stop_at_ns, stop)


@contextlib.contextmanager
def open_capture(
    gpu: Gpu, made: Capture, seated: Seated | None, warmups: int
) -> Iterator[ServedCapture]:
    """``seated``: its seat on the board, if workers give way. The warm-up is off the board."""
    facts = Facts(
        trace=made.trace.digest,
        kernels=len(made.trace.kernels),
        units=gpu.attribute("MULTIPROCESSOR_COUNT"),
        mps=bool(gpu.attribute("MPS_ENABLED")),
    )
    with contextlib.ExitStack() as stack:
        stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stack.callback(call, cu.cuStreamDestroy, stream)
        owner = Releases()
        stack.callback(owner.close)
        lane = GpuLane(Mask(()), stream, gpu.context)
        executables = Executables([made], CudaPlacer([lane]))
        place, behaviour = None, worker_loop.NO_BEHAVIOUR
        if seated is not None:
            place = seated.place
            behaviour = executables.behaviour(0, seated.worker, seated.conduct, owner)
        if seated is None or seated.worker.joints is None:
            ways = _whole(made, lane, owner)
        else:
            ways = _cut(executables, made, seated, owner)
        worker_loop.WorkerLoop(gpu, ways, behaviour=behaviour).drive(most_requests=warmups)
        yield ServedCapture(facts, worker_loop.WorkerLoop(gpu, ways, place, behaviour))


def _whole(made: Capture, lane: GpuLane, owner: Releases) -> Ways:
    executable = Executable(made.graph.graph)
    owner.callback(executable.close)
    executable.upload(lane.stream)
    return whole_request((LAUNCH, executable.handle, lane.stream))


def _cut(executables: Executables, made: Capture, seated: Seated, owner: Releases) -> Ways:
    kernels = len(made.trace.kernels)
    if kernels != seated.worker.kernels:  # under a share libraries may choose others
        raise MismatchError(
            f"it launches {kernels} kernels in a process of its own and {seated.worker.kernels} in "
            f"its plan, so its joints mean nothing here; plan it with lanes or a larger share"
        )
    route = on_one_lane(0, kernels, 0)
    steps = executables.stretches(route, seated.conduct.stretches(kernels), owner)
    return Ways([(ANYBODY, steps)])

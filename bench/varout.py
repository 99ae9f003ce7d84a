"""Claims of docs/varout.md about an H200: mechanisms against the model, the pick, PyTorch, memory.

One command on a host with a GPU: ``python bench/varout.py [mechanisms|grid|torch|memory]``, all of
them without an argument; each ends in a short table. Without a GPU it says so and does nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from eclip.cli import screen
from eclip.lengths import lengths_of
from eclip.machine import Machine
from eclip.varout import estimate, gpu_model
from eclip.varout.mechanisms import Mechanism

INPUTS = 1 << 20
CAPACITY = 1 << 14
RATES = (0.0, 0.01, 0.1, 0.5, 1.0)
REQUESTS = 60


@contextlib.contextmanager
def stream_of_own() -> Iterator[Any]:
    from eclip.devices.cuda.driver import call, cu

    stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
    try:
        yield stream
    finally:
        call(cu.cuStreamDestroy, stream)


class Timed:
    """A stage whose input changes from request to request; only the request is timed."""

    def __init__(self, mechanism: Mechanism, capacity: int, stream: Any, inputs: int) -> None:
        import torch

        from eclip.devices.cuda.driver import call, cu
        from eclip.varout.cuda.stage import Compaction, built

        self.x = torch.zeros(inputs, device="cuda")
        self.y = torch.zeros_like(self.x)
        self.stage = Compaction(self.x, self.y, mechanism, capacity)
        self._stream = stream
        self._torch_stream = torch.cuda.ExternalStream(int(stream))
        self._stack = contextlib.ExitStack()
        self._executable = self._stack.enter_context(built(self.stage, stream))
        self._events = [call(cu.cuEventCreate, 0) for _ in range(2)]

    def request_ns(self, given: Any) -> float:
        import torch

        from eclip.devices.cuda.driver import call, cu

        with torch.cuda.stream(self._torch_stream):
            self.x.copy_(given)
        begin, end = self._events
        call(cu.cuEventRecord, begin, self._stream)
        call(cu.cuGraphLaunch, self._executable.handle, self._stream)
        call(cu.cuEventRecord, end, self._stream)
        call(cu.cuStreamSynchronize, self._stream)
        return float(call(cu.cuEventElapsedTime, begin, end)) * 1e6

    def close(self) -> None:
        from eclip.devices.cuda.driver import call, cu

        self._stack.close()
        for event in self._events:
            call(cu.cuEventDestroy, event)


def mechanisms(machine: Machine, stream: Any) -> None:
    """Mean time of a request when a share of them overflows, beside the prediction."""
    from eclip.varout.cuda.measure import data_of

    if machine.gpu is None:
        raise SystemExit("the machine file is not of a GPU")
    short, long = CAPACITY // 2, 5 * CAPACITY // 2
    inputs = {length: data_of(INPUTS, length) for length in (short, long)}
    rows, errors = [], []
    for mechanism in estimate.CHOICES:
        with contextlib.closing(Timed(mechanism, CAPACITY, stream, INPUTS)) as timed:
            for _ in range(5):
                timed.request_ns(inputs[short])
            for rate in RATES:
                random = np.random.default_rng(0)
                overflows = random.permutation(REQUESTS) < round(rate * REQUESTS)
                lengths = [long if over else short for over in overflows]
                measured = statistics.fmean(timed.request_ns(inputs[length]) for length in lengths)
                share = float(np.mean(overflows))
                low, high = (
                    gpu_model.time_ns(machine.gpu, mechanism, CAPACITY, length) or 0.0
                    for length in (short, long)
                )
                predicted = (1 - share) * low + share * high
                errors.append(abs(predicted / measured - 1))
                rows.append(
                    [
                        mechanism.value,
                        f"{rate:.0%}",
                        f"{measured / 1e3:.2f}",
                        f"{predicted / 1e3:.2f}",
                        f"{predicted / measured - 1:+.1%}",
                    ]
                )
    screen.print_table(
        f"{INPUTS} inputs, capacity {CAPACITY}, lengths {short} and {long}",
        ["mechanism", "overflow", "measured µs", "predicted µs", "error"],
        rows,
    )
    screen.out.print(f"largest error {max(errors):.1%} (claim: at most 15%)\n")


def grid(machine: Machine, stream: Any) -> None:
    """The pick against the best, at 100 points."""
    from eclip.varout.cuda.measure import measure

    if machine.gpu is None:
        raise SystemExit("the machine file is not of a GPU")
    capacities = np.unique(np.geomspace(1 << 10, 1 << 19, 10).astype(int)).tolist()
    lengths = np.unique(np.geomspace(1 << 9, INPUTS, 10).astype(int)).tolist()
    # Allocating for the maximum is no answer to a capacity, so it is not among the choices here.
    able = [one for one in estimate.CHOICES if one is not Mechanism.MAXIMUM]
    points = [(capacity, length) for capacity in capacities for length in lengths]
    measured = [
        {one: measure(one, capacity, INPUTS, length, stream).time_ns for one in able}
        for capacity, length in points
    ]
    predicted = [
        {one: gpu_model.time_ns(machine.gpu, one, capacity, length) or math.inf for one in able}
        for capacity, length in points
    ]
    for allowed in (able, [one for one in able if one is not Mechanism.MERGE]):
        picks = [min(allowed, key=times.__getitem__) for times in predicted]
        ratios = [
            times[pick] / min(times[one] for one in allowed)
            for pick, times in zip(picks, measured, strict=True)
        ]
        good = sum(ratio <= 1.05 for ratio in ratios)
        names = [pick.value for pick in picks]
        chosen = ", ".join(f"{name} {names.count(name)}" for name in sorted(set(names)))
        screen.out.print(
            f"{'with' if Mechanism.MERGE in allowed else 'without'} merging: the pick is the best "
            f"or within 5% of it at {good} of {len(points)} points (claim: 90%), at worst "
            f"{max(ratios):.2f} times it; picked: {chosen}"
        )


def against_torch(machine: Machine, stream: Any) -> None:
    """Host time from the call to the end, consumer included."""
    import torch

    from eclip.devices.cuda.driver import call, cu
    from eclip.varout.cuda.measure import data_of
    from eclip.varout.cuda.stage import Compaction, built

    rows = []
    for power in (10, 12, 14, 16, 18, 20, 22, 24, 26):
        inputs = 1 << power
        for share in (0.02, 0.5):
            x = data_of(inputs, max(1, round(share * inputs)))
            y = torch.zeros_like(x)

            def eager(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                where = torch.nonzero(x).flatten()
                y[where] = 2 * x[where] + 1
                torch.cuda.synchronize()

            times = {"torch": _host_ns(eager)}
            for mechanism in (Mechanism.SWAP, Mechanism.SPILL, Mechanism.MERGE):
                stage = Compaction(x, y, mechanism, max(2, round(1.25 * share * inputs)))
                with built(stage, stream) as executable:

                    def captured(handle: Any = executable.handle) -> None:
                        call(cu.cuGraphLaunch, handle, stream)
                        call(cu.cuStreamSynchronize, stream)

                    times[mechanism.value] = _host_ns(captured)
            rows.append(
                [
                    str(inputs),
                    f"{share:.0%}",
                    *(f"{time_ns / 1e3:.1f}" for time_ns in times.values()),
                    *(f"{times['torch'] / times[one]:.2f}" for one in ("swap", "spill", "merge")),
                ]
            )
    screen.print_table(
        "PyTorch's nonzero and indexing against one graph (host time, consumer included)",
        ["inputs", "set", "torch µs", "swap µs", "spill µs", "merge µs", "torch/swap",
         "torch/spill", "torch/merge"],
        rows,
    )  # fmt: skip
    screen.out.print("claim: at least 3 up to 65536 inputs, at least 0.97 at any size\n")


def _host_ns(request: Callable[[], None], repeats: int = 30) -> float:
    for _ in range(5):
        request()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        request()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times)


def memory(machine: Machine, stream: Any) -> None:
    """Lognormal lengths whose longest is at least 16 times their mean."""
    for inputs in (INPUTS, 1 << 24):
        _memory(machine if inputs == INPUTS else measured(inputs), stream, inputs)
    screen.out.print("claim: at most 0.25 of the memory for at most 1.05 of the time\n")


def _memory(machine: Machine, stream: Any, inputs: int) -> None:
    from eclip.varout.cuda.measure import data_of

    random = np.random.default_rng(1)
    drawn = np.minimum(np.exp(random.normal(np.log(inputs / 90), 0.9, 1000)), inputs)
    sample = [*drawn.astype(int).tolist(), inputs]
    lengths = lengths_of(sample, "lognormal")
    requests = random.choice(sample, 100).tolist()
    rows = []
    base: tuple[float, int] | None = None
    for mechanism in (Mechanism.MAXIMUM, Mechanism.SWAP, Mechanism.DOUBLE_CONDITIONAL,
                      Mechanism.RESIDENT, Mechanism.MERGE):  # fmt: skip
        limit = None if base is None else base[1] // 4
        choice = estimate.choose(machine, lengths, [mechanism], 0.0, limit)
        capacity = max(2, choice.capacity)
        with contextlib.closing(Timed(mechanism, capacity, stream, inputs)) as timed:
            times = [timed.request_ns(data_of(inputs, length)) for length in requests]
        mean, used = statistics.fmean(times[10:]), timed.stage.memory_bytes
        base = base or (mean, used)
        rows.append(
            [
                mechanism.value,
                str(capacity),
                f"{used / 1e6:.3f}",
                f"{used / base[1]:.2f}",
                f"{mean / 1e3:.2f}",
                f"{mean / base[0]:.3f}",
            ]
        )
    screen.print_table(
        f"{inputs} inputs, lognormal, longest / mean = {lengths.longest / lengths.mean:.1f}",
        ["mechanism", "capacity", "buffer MB", "of maximum", "mean µs", "of maximum"],
        rows,
    )


def measured(inputs: int) -> Machine:
    from eclip.varout.cuda.measure import measure_machine

    return measure_machine(inputs=inputs)


PARTS: dict[str, Callable[[Machine, Any], None]] = {
    "mechanisms": mechanisms,
    "grid": grid,
    "torch": against_torch,
    "memory": memory,
}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise SystemExit(f"unknown part {unknown[0]}; choose from {', '.join(PARTS)}")
    # Before torch initialises the driver, which reads it then.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        import torch
    except ModuleNotFoundError:
        screen.out.print("bench/varout.py needs torch and a GPU: nothing was measured")
        return
    if not torch.cuda.is_available():
        screen.out.print("bench/varout.py needs a GPU: nothing was measured")
        return
    machine = measured(INPUTS)
    with stream_of_own() as stream:
        for name in wanted:
            PARTS[name](machine, stream)


if __name__ == "__main__":
    main()

"""Claims of docs/varout.md about an H200: mechanisms against the model, the pick, PyTorch, memory.

On a host with a GPU: ``python lab/varout.py [--machine FILE] [PART ...]``, all parts without one;
each ends in a table and a line that holds it against its claim. FILE is what ``eclip varout
measure`` wrote; without it the GPU is measured first. Without a GPU it says so and does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.tables import print_table

from eclip.core.lengths import Lengths, lengths_of
from eclip.files import store
from eclip.files.machine import GpuStage, Machine
from eclip.varout import estimate, gpu_model
from eclip.varout.mechanisms import Mechanism

INPUTS = 1 << 20
CAPACITY = 1 << 14
RATES = (0.0, 0.01, 0.1, 0.5, 1.0)
REQUESTS = 60
UNMERGED = tuple(one for one in estimate.CHOICES if one is not Mechanism.MERGE)
BY_CAPACITY = tuple(
    one for one in UNMERGED if one not in (Mechanism.MAXIMUM, Mechanism.SPILL)
)  # those whose memory is their capacity and no more
WORST = 6  # points of the grid that are shown


@contextlib.contextmanager
def stream_of_own() -> Iterator[Any]:
    from eclip.cuda.driver import call, cu

    stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
    try:
        yield stream
    finally:
        call(cu.cuStreamDestroy, stream)


def stage_at(machine: Machine, inputs: int) -> GpuStage:
    if machine.gpu is None:
        raise SystemExit("the machine file is not of a GPU")
    return gpu_model.at_inputs([machine.gpu, *machine.sizes], inputs)


def data(inputs: int, length: int, seed: int = 0) -> Any:
    """Written and complete: requests run on another stream."""
    import torch

    from eclip.varout.cuda.measure import data_of

    given = data_of(inputs, length, seed)
    torch.cuda.synchronize()
    return given


def mechanisms(machine: Machine, stream: Any) -> None:
    """Mean time of a request when a share of them overflows, beside the prediction."""
    from eclip.varout.cuda.measure import Timed

    stage = stage_at(machine, INPUTS)
    short, long = CAPACITY // 2, 5 * CAPACITY // 2
    inputs = {length: data(INPUTS, length) for length in (short, long)}
    rows, errors = [], []
    for mechanism in estimate.CHOICES:
        low, high = (
            gpu_model.time_ns(stage, mechanism, CAPACITY, length) or 0.0 for length in (short, long)
        )
        with Timed(mechanism, CAPACITY, INPUTS, stream) as timed:
            for rate in RATES:
                random = np.random.default_rng(0)
                overflows = random.permutation(REQUESTS) < round(rate * REQUESTS)
                given = [inputs[long if over else short] for over in overflows]
                means = _mean_of_each_graph(timed, given)
                measured = statistics.fmean(means)
                share = float(np.mean(overflows))
                predicted = (1 - share) * low + share * high
                errors.append(abs(predicted / measured - 1))
                rows.append(
                    [
                        mechanism.value,
                        f"{rate:.0%}",
                        f"{measured / 1e3:.2f}",
                        f"{min(means) / 1e3:.2f} to {max(means) / 1e3:.2f}",
                        f"{predicted / 1e3:.2f}",
                        f"{predicted / measured - 1:+.1%}",
                    ]
                )
    print_table(
        f"{INPUTS} inputs, capacity {CAPACITY}, lengths {short} and {long}",
        ["mechanism", "overflow", "measured µs", "of each graph", "predicted µs", "error"],
        rows,
    )
    print(
        f"largest error {max(errors):.1%}, median {statistics.median(errors):.1%} "
        f"(claim: at most 15%)\n"
    )


def _mean_of_each_graph(timed: Any, requests: Sequence[Any]) -> list[float]:
    """Nanoseconds of a request, for several graphs of a stage: they are not equally fast."""
    from eclip.varout.cuda.measure import BUILDS

    means = []
    for _ in range(BUILDS):
        timed.rebuild()
        for given in requests[:5]:
            timed.request_ns(given)
        means.append(statistics.fmean(timed.request_ns(given) for given in requests))
    return means


Times = dict[Mechanism, float]


def grid(machine: Machine, stream: Any) -> None:
    """The pick against the best, at 100 points."""
    from eclip.varout.cuda.measure import measure

    stage = stage_at(machine, INPUTS)
    capacities = np.unique(np.geomspace(1 << 10, 1 << 19, 10).astype(int)).tolist()
    lengths = np.unique(np.geomspace(1 << 9, INPUTS, 10).astype(int)).tolist()
    # Allocating for the maximum is no answer to a capacity, so it is not among the choices here.
    able = [one for one in estimate.CHOICES if one is not Mechanism.MAXIMUM]
    points: dict[tuple[int, int], tuple[Times, Times]] = {}
    for length in lengths:
        given = data(INPUTS, length)
        for capacity in capacities:
            points[capacity, length] = (
                {one: measure(one, capacity, given, length, stream).time_ns for one in able},
                {one: gpu_model.time_ns(stage, one, capacity, length) or math.inf for one in able},
            )
    for title, allowed in (
        ("everything allowed", able),
        ("without merging", [one for one in able if one is not Mechanism.MERGE]),
        ("without merging or an arena", BY_CAPACITY),
    ):
        _judge_grid(title, allowed, points)


def _judge_grid(
    title: str, allowed: Sequence[Mechanism], points: dict[tuple[int, int], tuple[Times, Times]]
) -> None:
    judged = []
    for point, (measured, predicted) in points.items():
        pick = min(allowed, key=predicted.__getitem__)
        best = min(allowed, key=measured.__getitem__)
        judged.append((measured[pick] / measured[best], point, pick, best))
    judged.sort(key=lambda one: -one[0])
    print_table(
        f"{title}: the worst points, measured / predicted µs",
        ["capacity", "length", "pick", "best", "ratio", *(one.value for one in allowed)],
        [
            [
                str(point[0]),
                str(point[1]),
                pick.value,
                best.value,
                f"{ratio:.2f}",
                *(
                    f"{points[point][0][one] / 1e3:.1f} / {points[point][1][one] / 1e3:.1f}"
                    for one in allowed
                ),
            ]
            for ratio, point, pick, best in judged[:WORST]
        ],
    )
    errors = {
        one: [abs(predicted[one] / measured[one] - 1) for measured, predicted in points.values()]
        for one in allowed
    }
    picks, bests = ([one.value for one in each] for each in list(zip(*judged, strict=True))[2:])
    for kind, names in (("picked", picks), ("best", bests)):
        counted = ", ".join(f"{name} {names.count(name)}" for name in sorted(set(names)))
        print(f"{kind}: {counted}")
    print(
        "median and largest error of the prediction: "
        + ", ".join(
            f"{one.value} {statistics.median(found):.0%} {max(found):.0%}"
            for one, found in errors.items()
        )
    )
    good = sum(one[0] <= 1.05 for one in judged)
    print(
        f"{title}: the pick is the best or within 5% of it at {good} of {len(judged)} points "
        f"(claim: 90%), at worst {judged[0][0]:.2f} times it\n"
    )


def sample_around(length: int, inputs: int) -> Lengths:
    """What a profile of requests with about this length would have seen."""
    drawn = np.random.default_rng(0).normal(length, 0.1 * length, 16)
    return lengths_of(np.clip(drawn, 1, inputs).astype(int).tolist())


def eager_request(x: Any, y: Any) -> Callable[[], None]:
    import torch

    def request() -> None:
        where = torch.nonzero(x).flatten()
        y[where] = 2 * x[where] + 1
        torch.cuda.synchronize()

    return request


def eager_cases(
    powers: Sequence[int],
) -> Iterator[tuple[int, int, Any, Any, float, list[str]]]:
    """Inputs, length, data, room for the result, PyTorch's time in ns, and a row that begins so."""
    import torch

    for power in powers:
        inputs = 1 << power
        for share in (0.02, 0.5):
            length = max(1, round(share * inputs))
            x = data(inputs, length)
            y = torch.zeros_like(x)
            eager = _host_ns(eager_request(x, y))
            yield inputs, length, x, y, eager, [str(inputs), f"{share:.0%}", f"{eager / 1e3:.1f}"]


def against_torch(machine: Machine, stream: Any) -> None:
    """Host time from the call to the end, consumer included, of what the model picks."""
    from eclip.cuda.driver import call, cu
    from eclip.varout.cuda.stage import Compaction, built

    rows = []
    ratios: dict[str, list[tuple[int, float]]] = {"any": [], "unmerged": []}
    for inputs, length, x, y, eager, row in eager_cases((10, 12, 14, 16, 18, 20, 22, 24, 26)):
        for kind, allowed in (("any", estimate.CHOICES), ("unmerged", UNMERGED)):
            lengths = sample_around(length, inputs)
            choice = estimate.choose(machine, lengths, allowed, inputs=inputs)
            picked = Mechanism(choice.mechanism)
            stage = Compaction(x, y, picked, max(2, choice.capacity))
            with built(stage, stream) as executable:

                def captured(handle: Any = executable.handle) -> None:
                    call(cu.cuGraphLaunch, handle, stream)
                    call(cu.cuStreamSynchronize, stream)

                found = _host_ns(captured)
            ratios[kind].append((inputs, eager / found))
            row += [picked.value, f"{choice.expected / 1e3:.1f}", f"{found / 1e3:.1f}",
                    f"{eager / found:.2f}"]  # fmt: skip
        rows.append(row)
    print_table(
        "PyTorch's nonzero and indexing against one graph (host time, consumer included)",
        ["inputs", "set", "torch µs", "pick", "predicted µs", "host µs", "torch/pick",
         "unmerged pick", "predicted µs", "host µs", "torch/pick"],
        rows,
    )  # fmt: skip
    for kind, each in ratios.items():
        _print_ratios(f"{kind} pick", each)
    print("")


def _print_ratios(what: str, ratios: Sequence[tuple[int, float]]) -> None:
    small = min(ratio for inputs, ratio in ratios if inputs <= 1 << 16)
    print(
        f"{what}: at least {small:.2f} times as fast up to 65536 inputs (claim: 3), at least "
        f"{min(ratio for _, ratio in ratios):.2f} at any size (claim: 0.97)"
    )


def public(machine: Machine, stream: Any) -> None:
    """``eclip.varout.nonzero`` and a PyTorch consumer in one graph against the same in eager."""
    import torch

    rows = []
    ratios: tuple[list[tuple[int, float]], ...] = ([], [])
    for inputs, length, x, y, eager, row in eager_cases((10, 12, 14, 16, 20, 24, 26)):
        for capacity in (None, math.ceil(1.25 * length)):
            found = _captured_ns(x, y.zero_(), capacity, stream)
            ratios[capacity is not None].append((inputs, eager / found))
            wrong = not torch.equal(y, torch.where(x != 0, 2 * x + 1, 0))
            row += [f"{found / 1e3:.1f}", "WRONG" if wrong else f"{eager / found:.2f}"]
        rows.append(row)
    print_table(
        "eclip.varout.nonzero(x).each(consumer), captured, against eager PyTorch; then with a "
        "capacity of 1.25 times the length",
        ["inputs", "set", "torch µs", "captured µs", "torch/captured", "with capacity µs",
         "torch/captured"],
        rows,
    )  # fmt: skip
    for kind, each in zip(("without a capacity", "with one"), ratios, strict=True):
        _print_ratios(kind, each)
    print("")


def _captured_ns(x: Any, y: Any, capacity: int | None, stream: Any) -> float:
    import torch

    from eclip import varout
    from eclip.cuda.conditional import keeping
    from eclip.cuda.driver import call, cu
    from eclip.cuda.graphs import Executable

    def compact() -> None:
        found = varout.nonzero(x, capacity=capacity)
        found.each(lambda window: window.put(y, 2 * window.take(x) + 1))

    own = torch.cuda.ExternalStream(int(stream))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.inference_mode(), torch.cuda.stream(own):
        compact()
        own.synchronize()
        with keeping() as kept, torch.cuda.graph(graph, stream=own):
            compact()
        executable = Executable(cu.CUgraph(graph.raw_cuda_graph()))

    def request() -> None:
        call(cu.cuGraphLaunch, executable.handle, stream)
        call(cu.cuStreamSynchronize, stream)

    try:
        return _host_ns(request)
    finally:
        executable.close()
        del kept  # the memory of the graph's loop, needed until here


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
    for inputs in (INPUTS, 1 << 22, 1 << 24):
        _memory(machine, stream, inputs)


def _memory(machine: Machine, stream: Any, inputs: int) -> None:
    from eclip.varout.cuda.measure import Timed

    random = np.random.default_rng(1)
    drawn = np.minimum(np.exp(random.normal(np.log(inputs / 90), 0.9, 1000)), inputs)
    sample = [*drawn.astype(int).tolist(), inputs]
    lengths = lengths_of(sample, "lognormal")
    requests = [data(inputs, length) for length in random.choice(sample, REQUESTS).tolist()]
    most = 8 * inputs
    wanted: list[tuple[str, Sequence[Mechanism], int | None]] = [
        ("", [Mechanism.MAXIMUM], None),
        *(("", [one], most // 4) for one in (*BY_CAPACITY, Mechanism.MERGE)),
        ("pick", estimate.CHOICES, most // 4),
        ("pick unmerged", UNMERGED, most // 4),
    ]
    base, rows, verdicts = 0.0, [], []
    for note, allowed, limit in wanted:
        choice = estimate.choose(machine, lengths, allowed, 0.0, limit, inputs)
        with Timed(Mechanism(choice.mechanism), max(2, choice.capacity), inputs, stream) as timed:
            mean = statistics.fmean(_mean_of_each_graph(timed, requests))
        used = timed.stage.memory_bytes
        base = base or mean
        if note:
            verdicts.append(
                f"{note}: {choice.mechanism} takes {used / most:.2f} of the memory (claim: 0.25) "
                f"and {mean / base:.3f} of the time (claim: 1.05)"
            )
        rows.append(
            [
                f"{note} ({choice.mechanism})" if note else choice.mechanism,
                str(choice.capacity),
                f"{used / 1e6:.3f}",
                f"{used / most:.2f}",
                f"{choice.expected / 1e3:.2f}",
                f"{mean / 1e3:.2f}",
                f"{mean / base:.3f}",
            ]
        )
    print_table(
        f"{inputs} inputs, lognormal, longest / mean = {lengths.longest / lengths.mean:.1f}",
        ["mechanism", "capacity", "buffer MB", "of maximum", "predicted µs", "mean µs",
         "of maximum"],
        rows,
    )  # fmt: skip
    for verdict in verdicts:
        print(verdict)
    print("")


PARTS: dict[str, Callable[[Machine, Any], None]] = {
    "mechanisms": mechanisms,
    "grid": grid,
    "torch": against_torch,
    "memory": memory,
    "public": public,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [--machine FILE] [PART ...]"
    )
    parser.add_argument("--machine", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    given = parser.parse_args()
    wanted = given.parts or list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise SystemExit(f"unknown part {unknown[0]}; choose from {', '.join(PARTS)}")
    # Before torch initialises the driver, which reads it then.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        import torch
    except ModuleNotFoundError:
        print("lab/varout.py needs torch and a GPU: nothing was measured")
        return
    if not torch.cuda.is_available():
        print("lab/varout.py needs a GPU: nothing was measured")
        return
    from eclip.varout.cuda.measure import measure_machine

    torch.zeros(1, device="cuda")  # makes the context that everything below is in
    begin = time.monotonic()
    machine = store.load(given.machine, Machine) if given.machine else measure_machine()
    print(f"machine: {machine.source} ({time.monotonic() - begin:.0f} s)\n")
    with stream_of_own() as stream:
        for name in wanted:
            begin = time.monotonic()
            PARTS[name](machine, stream)
            print(f"({name}: {time.monotonic() - begin:.0f} s)\n")


if __name__ == "__main__":
    main()

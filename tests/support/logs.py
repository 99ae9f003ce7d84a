"""Run logs, and the mixes, profiles and plans of them, made up without running anything."""

from __future__ import annotations

import msgspec
import numpy as np

from eclip.core.mix import Mix, MixWorker
from eclip.core.model_key import ModelKey
from eclip.core.plan import Assignment, Group, Lane, Plan, PlannedWorker, Variant
from eclip.core.profile import Profile
from eclip.core.runlog import KernelRecords, Requests, RunLog, WorkerCounters
from eclip.core.topology import Topology
from eclip.core.trace import Kernel, Trace, with_traces
from eclip.files import store

H200 = store.load_builtin("h200", Topology)
KERNELS = 60


def model_key(model: str) -> ModelKey:
    """``albert`` or ``albert~66`` in batches of 8; of a file, any other name is possible too."""
    name, _, units = model.partition("~")
    return ModelKey(name, 8, int(units or 0))


def make_mix(workers: int, model: str = "albert") -> Mix:
    return Mix(
        name=f"{workers}x{model}:8",
        workers=tuple(
            MixWorker(name=f"{model}.{index + 1}", model=model_key(model))
            for index in range(workers)
        ),
    )


def make_profile(model: str = "albert", topology: Topology = H200, name: str = "gemm") -> Profile:
    costs = np.random.default_rng(7).integers(4_000, 60_000, KERNELS)
    bound = np.random.default_rng(8).uniform(0, 1.1, KERNELS)
    sizes = topology.lane_sizes
    busy = [
        tuple(int(cost * (sizes[-1] / size) ** part) for size in sizes)
        for cost, part in zip(costs, bound, strict=True)
    ]
    empty = ((0,) * len(sizes),) * KERNELS
    kernels = tuple(
        Kernel(name=f"{name}<{index}>", grid=(8, 1, 1), block=(128, 1, 1))
        for index in range(KERNELS)
    )
    trace = Trace(model=model_key(model), kernels=kernels)
    return Profile(
        trace=trace,
        fingerprint=with_traces(topology.fingerprint, [trace]),
        modelled=True,
        source="made up for a test",
        sizes=sizes,
        request_ns=tuple(sum(column) for column in zip(*busy, strict=True)),
        busy_ns=tuple(busy),
        gap_ns=empty,
        spread_ns=empty,
        dram_bytes=(0,) * KERNELS,
        l2_bytes=(0,) * KERNELS,
        blocks_per_unit=(1,) * KERNELS,
        footprint=None,
    )


def make_plan(policy: str, mix: Mix, sizes: tuple[int, ...], topology: Topology = H200) -> Plan:
    """Every worker goes round lanes of its own, one of each size, in groups of ten kernels."""
    order = range(len(topology.slice_units))
    everyone = tuple(range(len(mix.workers)))
    group_kernels = 10 if len(sizes) > 1 else KERNELS
    return Plan(
        mix=mix,
        policy=policy,
        topology=topology,
        fingerprint=topology.fingerprint,
        modelled=True,
        workers=tuple(
            PlannedWorker(name=worker.name, model=worker.model, kernels=KERNELS, why="a test")
            for worker in mix.workers
        ),
        lanes=tuple(
            Lane(owner=worker, mask=topology.take(size, order))
            for worker in everyone
            for size in sizes
        ),
        variants=(
            Variant(
                active=everyone,
                assignments=tuple(
                    Assignment(
                        worker=worker,
                        groups=tuple(
                            Group(
                                lane=worker * len(sizes) + index % len(sizes),
                                kernels=group_kernels,
                                predicted_ns=250_000,
                            )
                            for index in range(KERNELS // group_kernels)
                        ),
                    )
                    for worker in everyone
                ),
            ),
        ),
        why="made up for a test",
    )


def make_log(
    policy: str,
    workers: int = 3,
    sizes: tuple[int, ...] = (48, 96),
    *,
    mix: Mix | None = None,
    topology: Topology = H200,
    window_ns: int = 5_000_000,
    kernel_ns: int = 40_000,
) -> RunLog:
    """Workers run back to back in closed loop; every worker is a little slower than the last."""
    plan = make_plan(policy, mix or make_mix(workers), sizes, topology)
    random = np.random.default_rng(3)
    records: list[tuple[int, int, int, int, int]] = []  # end, start, worker, position, lane
    requests: list[tuple[int, int, int]] = []  # end, arrival, worker
    for part in plan.main.assignments:
        lane_of = [group.lane for group in part.groups for _ in range(group.kernels)]
        now = arrival = -200_000  # during the warm-up
        while now < window_ns:
            for position, lane in enumerate(lane_of):
                start = now
                now += int(random.integers(kernel_ns // 8, kernel_ns)) + 500 * part.worker
                records.append((now, start, part.worker, position, lane))
            requests.append((now, arrival, part.worker))
            arrival = now
    kept = sorted(record for record in records if 0 <= record[0] < window_ns)
    done = sorted(request for request in requests if request[0] < 2 * window_ns)
    count = len(plan.workers)
    counters = WorkerCounters(
        kernels=600, barriers=40, lane_waits=0, false_waits=0, false_wait_ns=0
    )
    return RunLog(
        plan=plan,
        device="a simulated H200",
        modelled=True,
        load="closed loop",
        seed=3,
        duration_ns=2 * window_ns,
        energy_uj=4_000_000,
        requests=Requests(
            worker=tuple(worker for _, _, worker in done),
            arrival_ns=tuple(arrival for _, arrival, _ in done),
            start_ns=tuple(arrival for _, arrival, _ in done),
            end_ns=tuple(end for end, _, _ in done),
        ),
        kernels=KernelRecords(
            window_ns=window_ns,
            worker=tuple(record[2] for record in kept),
            position=tuple(record[3] for record in kept),
            lane=tuple(record[4] for record in kept),
            start_ns=tuple(record[1] for record in kept),
            end_ns=tuple(record[0] for record in kept),
        ),
        counters=(counters,) * count,
        unfinished=(1,) * count,
        offered=(None,) * count,
        lag_ns=(0,) * count,
        alone_rps=(900.0,) * count,
    )


def without_records(log: RunLog) -> RunLog:
    return msgspec.structs.replace(
        log,
        requests=Requests(worker=(), arrival_ns=(), start_ns=(), end_ns=()),
        kernels=KernelRecords(window_ns=0, worker=(), position=(), lane=(), start_ns=(), end_ns=()),
        energy_uj=0,
    )

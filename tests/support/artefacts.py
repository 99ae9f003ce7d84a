"""One small valid artefact of every kind, and helpers to write, edit and refuse its file."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eclip.core.calibration import Calibration
from eclip.core.footprint import Footprint
from eclip.core.mix import mix_of
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.runlog import KernelRecords, Requests, RunLog, WorkerCounters
from eclip.core.topology import Topology
from eclip.core.trace import Kernel, Trace, with_traces
from eclip.errors import ArtefactError
from eclip.files import store
from eclip.files.observations import Observations, ObservedHome, ObservedRun
from eclip.files.store import Artefact
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem

TOPOLOGY = Topology(
    name="toy",
    title="Toy µ-GPU",
    unit_name="SM",
    compute="9.0",
    slice_units=(2, 2, 4),
    lane_sizes=(2, 4, 8),
    hardware_queues=16,
    memory_bytes=1 << 30,
    context_bytes=1 << 20,
    lane_bytes=1 << 10,
    source="by hand",
)
TRACE = Trace(
    model=ModelKey("m", 2),
    kernels=(
        Kernel(name='quote " and λ', grid=(3, 2, 1), block=(32, 1, 1), shared_bytes=9, cluster=2),
        Kernel(name="k", grid=(1, 1, 1), block=(1, 1, 1)),
    ),
    inputs=("2×3 float16",),
    libraries={"torch": "2"},
)
FOOTPRINT = Footprint(
    weights_bytes=4000,
    activations_bytes=300,
    workspaces_bytes=20,
    executables_bytes=1,
    modelled=True,
)
PROFILE = Profile(
    trace=TRACE,
    fingerprint=with_traces(TOPOLOGY.fingerprint, [TRACE]),
    modelled=True,
    source="by hand",
    sizes=(2, 4, 8),
    request_ns=(65, 35, 27),
    busy_ns=((40, 20, 15), (20, 10, 8)),
    gap_ns=((3, 3, 3), (2, 2, 1)),
    spread_ns=((1, 1, 1), (0, 0, 0)),
    dram_bytes=(100, 0),
    l2_bytes=(200, 50),
    blocks_per_unit=(2, 1),
    footprint=FOOTPRINT,
)
CALIBRATION = msgspec.structs.replace(
    store.load_builtin("h200", Calibration), fingerprint=TOPOLOGY.fingerprint, source="by hand"
)
PLAN = make_plan("eclip", Problem(mix_of([ModelKey("m", 2)] * 2), TOPOLOGY, (PROFILE, PROFILE)))
RUN = RunLog(
    plan=PLAN,
    device="toy",
    modelled=True,
    load="closed loop",
    seed=1,
    duration_ns=1000,
    energy_uj=7,
    requests=Requests(worker=(0, 1), arrival_ns=(-3, 0), start_ns=(-3, 1), end_ns=(5, 9)),
    kernels=KernelRecords(
        window_ns=10, worker=(0,), position=(1,), lane=(0,), start_ns=(-1,), end_ns=(5,)
    ),
    counters=(WorkerCounters(kernels=2, barriers=1, lane_waits=0, false_waits=0, false_wait_ns=0),)
    * 2,
    unfinished=(1, 0),
    offered=(None, 3),
    lag_ns=(0, 2_000_000),
    alone_rps=(10.5, 1e-3),
    warnings=("careful",),
)
OBSERVATIONS = Observations(
    fingerprint=msgspec.structs.replace(
        TOPOLOGY.fingerprint, traces={str(TRACE.model): TRACE.digest}, driver="1.2"
    ),
    source="by hand",
    date=datetime.date(2026, 11, 15),
    runs=(
        ObservedRun(
            mix="2xm:2",
            kind="lanes",
            homes=(ObservedHome(0, 1, 1), ObservedHome(2, -1, 3, 0.5, 14)),
            routes=(((1, 2),), ((3, 1), (1, 1))),
            alone_rps=(10.5, 10.5),
            rates_rps=(3.25, 1e-3),
            power_w=99.5,
            seconds=0.45,
        ),
        ObservedRun(
            mix="m:2",
            kind="shared",
            homes=(),
            alone_rps=(10.5,),
            rates_rps=(10.0,),
            power_w=80.0,
            seconds=1.0,
        ),
    ),
)
ARTEFACTS: dict[str, Artefact] = {
    "topology": TOPOLOGY,
    "trace": TRACE,
    "profile": PROFILE,
    "calibration": CALIBRATION,
    "observations": OBSERVATIONS,
    "plan": PLAN,
    "run": RUN,
}
SUFFIXES = (".json", ".json.gz")
every_kind = pytest.mark.parametrize("kind", ARTEFACTS)
every_suffix = pytest.mark.parametrize("suffix", SUFFIXES)


def saved(folder: Path, artefact: Artefact, suffix: str = ".json") -> Path:
    path = folder / f"artefact{suffix}"
    store.save(artefact, path)
    return path


def refusal(path: Path) -> str:
    """The one line that a damaged file is refused with."""
    with pytest.raises(ArtefactError) as caught:
        store.load(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def write(path: Path, kind: str, data: Any, **envelope: Any) -> Path:
    """A file as somebody may write it by hand: without a digest."""
    version = store._KINDS[kind][1] if kind in store._KINDS else 1
    content = {"format": f"eclip/{kind}", "version": version, "body": data} | envelope
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def with_value(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = with_value(copy[path[0]], path[1:], value) if path[1:] else value
    return copy

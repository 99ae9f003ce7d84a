"""One process per worker, with workloads that need no GPU: real processes, pipes and deaths."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load, closed_loop
from eclip.core.measures import measure
from eclip.core.mix import mix_of
from eclip.core.model_key import ModelKey
from eclip.core.plan import (
    FOREIGN,
    Assignment,
    Group,
    Joints,
    Lane,
    Plan,
    PlannedWorker,
    Promise,
    Rule,
    Turns,
    Variant,
)
from eclip.core.topology import Topology
from eclip.core.trace import with_traces
from eclip.cuda.processes import session as remote
from eclip.cuda.processes.child import Job
from eclip.cuda.processes.mps import PRIORITY, python_path
from eclip.cuda.processes.session import Host, LoneSession, ProcessSession, ProcessSets
from eclip.errors import DeviceError, MismatchError, UsageError
from eclip.files import store
from eclip.planner.policies import with_shares
from punctual import run_in_time
from standins import (
    ENTRY,
    KERNELS,
    POWER_W,
    SERVING,
    SteadyCounter,
    install_control,
    processes_with,
    trace_of,
)
from waiting import PATIENCE_S, until

H200 = store.load_builtin("h200", Topology)
UUID = f"GPU-of-test-{os.getpid()}"
WINDOW = Window(seconds=0.4, warmup_seconds=0.1, trace_ms=0.0)


def plan_of(*models: str) -> Plan:
    """Workers that take turns; ``steady:5`` is the model steady with a batch of 5."""
    parts = [(name, int(batch or 2)) for name, _, batch in (one.partition(":") for one in models)]
    mix = mix_of(ModelKey(*part) for part in parts)
    return Plan(
        mix=mix,
        policy="timeslice",
        topology=H200,
        fingerprint=with_traces(H200.fingerprint, [trace_of(*part) for part in parts]),
        modelled=False,
        workers=tuple(
            PlannedWorker(name=worker.name, model=worker.model, kernels=KERNELS, why="")
            for worker in mix.workers
        ),
        lanes=tuple(Lane(index, H200.full) for index in range(len(parts))),
        variants=(
            Variant(
                tuple(range(len(parts))),
                tuple(Assignment(n, (Group(n, KERNELS, 0),)) for n in range(len(parts))),
            ),
        ),
        why="",
        sharing=Turns(),
    )


def jobs_of(plan: Plan, entry: str = ENTRY) -> list[Job]:
    return [Job(entry, model) for model in plan.models]


def host_of(counter: SteadyCounter | None = None) -> Host:
    return Host(UUID, "a GPU", H200, counter or SteadyCounter())


def start_sets(*plans: Plan, counter: SteadyCounter | None = None) -> ProcessSets:
    return ProcessSets(host_of(counter), plans, [jobs_of(plan) for plan in plans])


def open_sets(*plans: Plan, counter: SteadyCounter | None = None) -> ProcessSets:
    sets = start_sets(*plans, counter=counter)
    sets.wait()
    return sets


def ours() -> list[str]:
    return processes_with(f"CUDA_VISIBLE_DEVICES={UUID}")


def folders_of(parent: int) -> list[Path]:
    return list(Path("/tmp").glob(f"eclip-mps-{parent}-*"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert ours() == []
    assert folders_of(os.getpid()) == []


@pytest.fixture
def mps_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_control(tmp_path, "working")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_workers_serve_a_window_at_once_each_in_its_own_process() -> None:
    plan = plan_of("steady:2", "steady:8")
    with open_sets(plan) as sets:
        (session,) = sets.sessions
        assert len({os.getpid(), *(child.pid for child in session.children)}) == 3
        log = run_in_time(session, closed_loop(2), WINDOW)
    requests = log.requests
    first, second = (requests.worker.count(worker) for worker in (0, 1))
    assert 199 <= first <= 200
    assert 49 <= second <= 50
    assert list(requests.end_ns) == sorted(requests.end_ns)
    assert requests.end_ns[0] < 2e6, "nothing ran in the warm-up"
    assert log.duration_ns - requests.end_ns[-1] <= 2e6
    assert [counters.kernels for counters in log.counters] == [3 * first, 3 * second]
    assert log.energy_uj == pytest.approx(POWER_W * 0.4 * 1e6)
    assert (log.plan, log.device, log.modelled) == (plan, "a GPU", False)
    assert set(log.unfinished) <= {0, 1}
    measured = msgspec.structs.replace(log, alone_rps=(500.0, 125.0))
    assert measure(measured).stp == pytest.approx(2.0, rel=0.03)


def test_no_worker_begins_before_the_instant_given_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Window(seconds=0.1, warmup_seconds=0.0, trace_ms=0.0)
    with open_sets(plan_of("steady:1", "steady:1", "steady:1")) as sets:
        for lead_s in (remote._LEAD_S, 0.1, 0.5, 2.5):  # a busy machine may need longer
            monkeypatch.setattr(remote, "_LEAD_S", lead_s)
            log = sets.sessions[0].run(closed_loop(3), window)
            assert min(log.requests.start_ns, default=0) >= 0
            if set(log.requests.worker) == {0, 1, 2}:
                break
    assert set(log.requests.worker) == {0, 1, 2}


def test_arrivals_are_those_of_the_load() -> None:
    times = np.arange(-40, 400, 10, dtype=np.int64) * 1_000_000
    load = Load(label="by hand", seed=3, arrivals=(times, CLOSED_LOOP))
    with open_sets(plan_of("steady:2", "steady:2")) as sets:
        log = run_in_time(sets.sessions[0], load, WINDOW)
    seen = [
        arrival
        for arrival, worker in zip(log.requests.arrival_ns, log.requests.worker, strict=True)
        if worker == 0
    ]
    assert seen[0] <= 0
    before = times.tolist().index(seen[0])  # those ended before the measured part
    assert seen == times.tolist()[before:][: len(seen)]
    assert before + len(seen) + log.unfinished[0] == len(times)
    assert (log.load, log.seed) == ("by hand", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("mps_control")
def test_sets_take_turns_and_keep_their_processes() -> None:
    plan = plan_of("steady:2", "steady:4")
    counter = SteadyCounter()
    wide, narrow = with_shares(plan, (100, 100)), with_shares(plan, (75, 25), "mps-model")
    with open_sets(plan, wide, narrow, counter=counter) as sets:
        pids = [[child.pid for child in session.children] for session in sets.sessions]
        assert counter.ours >= {pid for mine in pids for pid in mine}
        assert len(counter.ours) > 6, "the daemon is one of us, too"
        policies = []
        for turn in range(3):
            for index in range(3):
                session = sets.sessions[(turn + index) % 3]
                short = Window(seconds=0.05, warmup_seconds=0.02, trace_ms=0.0)
                log = run_in_time(session, closed_loop(2), short)
                assert set(log.requests.worker) == {0, 1}
                policies.append(log.plan.policy)
        assert pids == [[child.pid for child in session.children] for session in sets.sessions]
        units = [[found.units for found in session.facts] for session in sets.sessions]
    assert policies[:4] == ["timeslice", "mps", "mps-model", "mps"]
    assert units == [[132, 132], [132, 132], [99, 33]]


@pytest.mark.usefixtures("mps_control")
@pytest.mark.parametrize("under_mps", [False, True])
def test_a_child_sees_one_gpu_and_only_the_daemon_meant_for_it(
    monkeypatch: pytest.MonkeyPatch, under_mps: bool
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/somebody-elses")
    plan = plan_of("tells")
    folder = "/tmp/eclip-mps-" if under_mps else "/nonexistent"
    with pytest.raises(DeviceError, match=rf"worker tells .*: {UUID} None {folder}"):
        open_sets(with_shares(plan, (50,)) if under_mps else plan)


@pytest.mark.usefixtures("mps_control")
def test_clients_are_told_their_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRIORITY, "1")  # a user's own: for the daemon it would be everybody's limit
    plan = plan_of("steady", "steady")
    lower = with_shares(plan, (100, 50), below_normal=(1,))
    with open_sets(plan, lower) as sets:
        told = [
            [environment_of(child.pid).get(PRIORITY) for child in session.children]
            for session in sets.sessions
        ]
    assert told == [[None, None], ["0", "1"]]


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("refuses", "refuses does not fit into the GPU's memory"),
        ("raises", "ValueError: a factory's mistake$"),
        ("dies", "ended with status 3: terminate called after throwing an instance"),
    ],
)
def test_a_worker_that_cannot_be_built_is_named_with_the_reason(model: str, reason: str) -> None:
    with pytest.raises(DeviceError, match=rf"worker {model} \(timeslice\):? {reason}"):
        open_sets(plan_of("steady", model))


def test_an_entry_that_needs_a_missing_package_says_so() -> None:
    plan = plan_of("steady")
    sets = ProcessSets(host_of(), [plan], [jobs_of(plan, "nosuch:entry")])
    with pytest.raises(DeviceError, match="the package nosuch is missing"):
        sets.wait()


def test_a_worker_that_takes_too_long_to_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_BUILD_SECONDS", 0.01)
    with pytest.raises(DeviceError, match=r"steady \(timeslice\) was not ready in time"):
        open_sets(plan_of("steady"))


@pytest.mark.parametrize(
    ("model", "reason"), [("killed", " was killed"), ("breaks", ": a launch failed: CUDA_ERROR")]
)
def test_a_death_during_a_window_ends_its_set_at_once_and_leaves_the_others(
    model: str, reason: str
) -> None:
    # So long that this test would be stopped before it ends.
    long = Window(seconds=3600.0, warmup_seconds=0.0, trace_ms=0.0)
    with open_sets(plan_of("steady", model), plan_of("steady")) as sets:
        broken, sound = sets.sessions
        with pytest.raises(DeviceError, match=rf"worker {model} \(timeslice\){reason}"):
            broken.run(closed_loop(2), long)
        assert len(ours()) == 1
        with pytest.raises(DeviceError, match="the processes of timeslice have ended"):
            broken.run(closed_loop(2), WINDOW)
        assert run_in_time(sound, closed_loop(1), WINDOW).requests.worker


def test_a_process_that_does_not_leave_is_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LEAVE_SECONDS", 0.3)
    with open_sets(plan_of("stubborn")) as sets:
        assert len(ours()) == 1
        (child,) = sets.sessions[0].children
    assert child._process.returncode == -signal.SIGKILL


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also if a shell's background job runs us
from test_processes import Window, closed_loop, open_sets, plan_of, with_shares
plan = plan_of("steady", "steady")
with open_sets(plan, with_shares(plan, (50, 50))) as sets:
    print("ready", flush=True)
    if sys.argv[1] == "serving":
        sets.sessions[0].run(closed_loop(2), Window(seconds=3600.0, trace_ms=0.0))
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("mps_control")
@pytest.mark.parametrize("state", ["waiting", "serving"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_parent_that_is_interrupted_or_killed(
    state: str, how: signal.Signals, tmp_path: Path
) -> None:
    here = str(Path(__file__).parent)
    serving = tmp_path / "serving"
    program = PARENT.replace("test_processes", Path(__file__).stem)
    with subprocess.Popen(
        [sys.executable, "-c", program, state],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((here, python_path())),
            "TEST_UUID": UUID,
            SERVING: str(serving),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        assert state == "waiting" or until(serving.exists)
        assert len(processes_with(f"TEST_UUID={UUID}")) >= 6  # it, four workers, the guard
        parent.send_signal(how)
        assert parent.wait(timeout=PATIENCE_S) != 0
    assert until(lambda: processes_with(f"TEST_UUID={UUID}") == [])
    assert until(lambda: folders_of(parent.pid) == [])


@pytest.mark.usefixtures("mps_control")
def test_other_kernels_are_refused_in_plain_processes_and_told_of_under_mps() -> None:
    plan = plan_of("changed")
    with pytest.raises(MismatchError, match="changed launches other kernels"):
        open_sets(plan)
    with open_sets(with_shares(plan, (60,))) as sets:
        log = run_in_time(sets.sessions[0], closed_loop(1), WINDOW)
    assert "under mps 60% libraries chose other kernels for changed" in log.warnings


@pytest.mark.usefixtures("mps_control")
def test_a_process_that_did_not_reach_the_daemon_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"unattached \(mps 60%\) is no client of MPS"):
        open_sets(with_shares(plan_of("unattached"), (60,)))


def test_a_worker_that_begins_late_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LEAD_S", -0.05)
    window = Window(seconds=0.2, warmup_seconds=0.0, trace_ms=0.0)
    with open_sets(plan_of("steady")) as sets:
        log = sets.sessions[0].run(closed_loop(1), window)
    (late,) = [warning for warning in log.warnings if "late" in warning]
    assert re.fullmatch(r"worker steady \(timeslice\) began \d+\.\d ms late", late)


def test_a_load_for_other_workers_is_refused_and_harms_nothing() -> None:
    with open_sets(plan_of("steady")) as sets:
        with pytest.raises(UsageError, match="for 2 workers, not 1"):
            sets.sessions[0].run(closed_loop(2), WINDOW)
        assert run_in_time(sets.sessions[0], closed_loop(1), WINDOW).requests.worker


def test_session_of_one_plan_ends_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessSession, "run", run_in_time)
    plan = plan_of("steady", "steady")
    with LoneSession(host_of(), plan, jobs_of(plan)) as session:
        assert len(ours()) == 2
        assert session.run(closed_loop(2), WINDOW).requests.worker
    assert ours() == []


def test_processes_that_were_not_waited_for_end_too() -> None:
    with start_sets(plan_of("steady", "refuses")):
        assert ours()
    assert ours() == []


def test_closing_twice_is_harmless() -> None:
    sets = open_sets(plan_of("steady"))
    with contextlib.closing(sets):
        sets.sessions[0].close()
        sets.close()


# --- Sets whose workers give way ----------------------------------------------------------------


def giving_way(plan: Plan, lane: int | None = None) -> Plan:
    """The second worker gives way to the first, a service."""
    service, background = plan.workers
    promise = Promise(bound_ns=10**12, request_ns=1_000_000, some_ns=0, none_ns=0)
    rule = Rule(to=(FOREIGN, 0), lane=lane)
    joints = Joints(at=(1,), depth=1, rules=(rule,), stretch_ns=(1, 2))
    workers = (
        msgspec.structs.replace(service, promise=promise),
        msgspec.structs.replace(background, joints=joints),
    )
    return msgspec.structs.replace(plan, workers=workers)


@pytest.mark.usefixtures("mps_control")
@pytest.mark.parametrize("under_mps", [False, True])
def test_workers_of_a_set_see_on_a_board_who_is_busy(under_mps: bool) -> None:
    plan = giving_way(plan_of("steady", "steady"))
    plan = with_shares(plan, (100, 100)) if under_mps else plan
    nothing = Load(label="by hand", seed=0, arrivals=(np.empty(0, dtype=np.int64), CLOSED_LOOP))
    before = set(Path("/proc/self/fd").iterdir())
    with open_sets(plan) as sets:
        for seconds in (0.2, 1.0, 5.0, 20.0):  # a busy machine may need longer
            window = Window(seconds=seconds, warmup_seconds=0.0, trace_ms=0.0)
            busy = sets.sessions[0].run(closed_loop(2), window)
            if busy.counters[1].yields:
                break
        idle = sets.sessions[0].run(nothing, window)
    assert busy.counters[1].yields
    assert idle.counters[1].yields == 0
    assert busy.counters[0].yields == 0
    assert len(set(Path("/proc/self/fd").iterdir())) == len(before), "a board is left open"


def test_a_worker_in_a_process_of_its_own_cannot_move() -> None:
    plan = giving_way(plan_of("steady", "steady"), lane=1)
    with pytest.raises(UsageError, match=r"steady\.2 is planned to move to another lane"):
        start_sets(plan)


def test_a_set_that_gets_no_board_starts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UsageError, match="No space left on device"):
        start_sets(giving_way(plan_of("steady", "steady")))

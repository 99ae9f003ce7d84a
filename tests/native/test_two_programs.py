"""Two unmodified programs in two processes: one gives way to the other, without a plan."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from eclip.core.rules import (
    BACKGROUND,
    BUSY_SINCE,
    HEARTBEAT,
    IDLE,
    LAUNCHED,
    NAME,
    PID,
    SERVED,
    SERVICE,
    YIELDED,
)
from eclip.gpu.board import Board, open_board
from native_build import Native
from two_programs import BUSY_MS, STEADY, Service, goes_on, rows_of
from unmodified import Running, running, version_of
from waiting import PATIENCE_S, until


def is_held(board: Board, program: Running) -> bool:
    """Waits until a background has yielded, and looks whether it stays where it is."""
    (row,) = rows_of(board, BACKGROUND)
    assert until(lambda: bool(board.words[row, YIELDED] > 0), 0.001)

    def stands_still() -> bool:
        before = program.launched
        time.sleep(0.2)
        return program.launched == before

    return until(stands_still, 0, 20)


def test_background_holds_while_a_service_is_busy(
    native: Native, board: Board, service: Service, tmp_path: Path
) -> None:
    with running(native, tmp_path, STEADY, "background") as program:
        for _ in range(5):
            assert goes_on(program)
            raised = service.raise_busy()
            assert is_held(board, program)
            # One launch may have looked just before; the rest of depth 2 was under way already.
            assert program.launched_after(raised) <= 2
            service.clear_busy()
        assert goes_on(program)


GRAPH_KERNELS = 30
LOG = 1000  # where the stand-in's log begins in the words
GRAPHS = f"""
words[{LOG} + 1] = 20000
cuda.standin_watch(u64(ctypes.addressof(words) + 8 * {LOG}))
stream, graph, executable = new_stream(), u64(), u64()
check(cuda.cuStreamBeginCapture_v2(u64(stream), 2))
for _ in range({GRAPH_KERNELS}): launch(1000, stream=stream)
check(cuda.cuStreamEndCapture(u64(stream), ctypes.byref(graph)))
check(cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, u64(0)))
while True:
    check(cuda.cuGraphLaunch(executable, u64(stream)))
    synchronise(stream)
    say(1)
"""


def test_background_gives_way_within_a_graph(
    native: Native, board: Board, service: Service, tmp_path: Path
) -> None:
    def began_after(ns: int) -> int:
        """Kernels of the stand-in's log."""
        lines = program.words[LOG + 2 : LOG + 2 + 5 * int(program.words[LOG])].reshape(-1, 5)
        return int(((lines[:, 0] == 2) & (lines[:, 3] > ns)).sum())

    with running(native, tmp_path, GRAPHS, "background") as program:
        assert until(lambda: program.words[1] >= 8)  # it was measured by then, and cut
        for _ in range(3):
            raised = service.raise_busy()
            assert is_held(board, program)
            # One launch may have looked just before; the rest of depth 2 was under way already.
            assert began_after(raised) <= 4 < GRAPH_KERNELS / 2
            before = int(program.words[1])
            service.clear_busy()
            assert until(lambda before=before: program.words[1] > before + 1)  # type: ignore[misc]


def test_without_a_tier_nobody_holds(
    native: Native, board: Board, service: Service, tmp_path: Path
) -> None:
    service.raise_busy()
    with running(native, tmp_path, STEADY, None) as program:
        assert goes_on(program)
        assert rows_of(board, BACKGROUND) == []


RUN_AHEAD = """
log = (ctypes.c_int64 * (2 + 5 * 4096))(0, 4096)
cuda.standin_watch(ctypes.byref(log))
def run_ahead(count, word):
    for _ in range(count):
        launch(200)
        ended = sum(1 for line in range(log[0]) if log[2 + 5 * line + 4])
        words[word] = max(words[word], words[0] - ended)
"""
# Of a machine so busy that nothing runs for a while, no wait is given up.
PATIENT = "1000000"


@pytest.mark.parametrize(("tier", "depth"), [("background", 1), ("background", 2), (None, 0)])
def test_run_ahead_is_limited(native: Native, tmp_path: Path, tier: str | None, depth: int) -> None:
    body = RUN_AHEAD + "run_ahead(400, 1); synchronise()"
    variables = {"ECLIP_DEPTH": str(depth), "ECLIP_PATIENCE_US": PATIENT}
    with running(native, tmp_path, body, tier, **variables) as program:
        assert program.child.wait(PATIENCE_S) == 0
        most = int(program.words[1])
    if tier is None:
        assert most > 100  # the program would fill the queue
    else:
        # Eight launches a stretch until the first was measured.
        assert depth <= most <= 8 * (depth + 1) + 1


def test_stretches_can_be_counted_in_launches(native: Native, tmp_path: Path) -> None:
    """As others count them, whatever they take: these launches alone take more than the grain."""
    body = RUN_AHEAD + "run_ahead(400, 1); synchronise()"
    variables = {"ECLIP_LAUNCHES": "32", "ECLIP_PATIENCE_US": PATIENT}
    with running(native, tmp_path, body, "background", **variables) as program:
        assert program.child.wait(PATIENCE_S) == 0
        # Two stretches, less what has ended meanwhile. By the grain it would be 25 at most.
        assert 32 < program.words[1] <= 3 * 32 + 1


def test_a_program_that_the_device_waits_for_is_not_kept_waiting(
    native: Native, tmp_path: Path
) -> None:
    """And paced again afterwards."""
    body = (
        RUN_AHEAD
        + """
gate = threading.Event()
opens = ctypes.CFUNCTYPE(None, u64)(lambda _: gate.wait())
check(cuda.cuLaunchHostFunc(u64(0), opens, u64(0)))
run_ahead(200, 1)
gate.set()
synchronise()
run_ahead(200, 2)
synchronise()
"""
    )
    with running(native, tmp_path, body, "background", ECLIP_PATIENCE_US="50000") as program:
        assert program.child.wait(PATIENCE_S) == 0, program.child.communicate()
        assert program.words[1] == 200
        assert program.words[2] <= 8 * 3 + 1


def test_background_goes_on_beside_a_service_that_launches_nothing(
    native: Native, board: Board, service: Service, tmp_path: Path
) -> None:
    with running(native, tmp_path, STEADY, "background") as program:
        assert goes_on(program)
        (row,) = rows_of(board, BACKGROUND)

        def has_yielded() -> bool:
            # On a busy machine the service may count as hung before the background looks once.
            service.raise_busy(launches=False)
            time.sleep(0.02)
            return bool(board.words[row, YIELDED] > 0)

        assert until(has_yielded, 0)
        assert goes_on(program)
        assert service.row[BUSY_SINCE] != IDLE


@pytest.mark.parametrize(("floor", "moves"), [("0", False), ("0.5", True)])
def test_background_behind_its_floor_does_not_hold(
    native: Native, board: Board, service: Service, tmp_path: Path, floor: str, moves: bool
) -> None:
    with running(native, tmp_path, STEADY, "background", ECLIP_FLOOR=floor) as program:
        assert goes_on(program)
        service.raise_busy()
        if moves:
            assert goes_on(program, 200)
        else:
            assert is_held(board, program)


# While anything captures nobody asks for streams: what ends busy then is the program's own wait.
ANSWERS = """
if os.environ["CAPTURE"] == "1":
    check(cuda.cuStreamBeginCapture_v2(u64(new_stream()), 2))
for _ in range(int(os.environ["REQUESTS"])):
    launch(20000)
    {wait}
    say(1)
    time.sleep(0.05)
time.sleep(1000)
"""
WAITS = {
    "stream": "synchronise()",
    "context": "check(cuda.cuCtxSynchronize())",
    "event": """event = new_event()
    check(cuda.cuEventRecord(u64(event), u64(0)))
    check(cuda.cuEventSynchronize(u64(event)))""",
    "polled event": """event = new_event()
    check(cuda.cuEventRecord(u64(event), u64(0)))
    while cuda.cuEventQuery(u64(event)): time.sleep(0.001)""",
    "copy": "copy(cuda.cuMemcpyDtoH_v2)",
    "none": "pass",
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_service_is_busy_until_its_work_is_done(
    native: Native, board: Board, tmp_path: Path, wait: str
) -> None:
    body = ANSWERS.format(wait=WAITS[wait])
    variables = {"REQUESTS": "8", "CAPTURE": str(int(wait != "none"))}
    with running(native, tmp_path, body, "service", **variables) as program:
        assert until(lambda: rows_of(board, SERVICE) != [], 0.0005)
        (row,) = rows_of(board, SERVICE)
        seen_busy = seen_idle = 0
        busy, end = False, time.monotonic() + PATIENCE_S
        while program.words[1] < 8 or busy:
            assert time.monotonic() < end  # or it stays busy
            assert program.child.poll() is None, program.child.communicate()
            was, busy = busy, bool(board.words[row, BUSY_SINCE] != IDLE)
            seen_busy += busy and not was
            seen_idle += was and not busy
            time.sleep(0.0005)
        # Where nobody waits the row is asked for later, and requests may run into each other.
        assert seen_busy == seen_idle
        assert seen_busy >= (2 if wait == "none" else 4)
        assert board.words[row, SERVED] >= seen_busy
        assert board.words[row, LAUNCHED] >= 8


RAISED_BEFORE = """
seen = ctypes.CFUNCTYPE(None, ctypes.c_char_p, u64)(lambda call, stream: look(call))
def look(call):
    if call == b"copy":
        with open(os.environ["ECLIP_BOARD"], "rb") as file:
            row = file.read()[512:]
        say(1, int.from_bytes(row[8:16], "little", signed=True) != -(1 << 62))
        say(2)
launch(0)
synchronise()
time.sleep(0.3)
cuda.standin_calls(seen)
copy(cuda.cuMemcpyDtoDAsync_v2)
os._exit(0)  # other threads may call Python until the end
"""


def test_busy_is_raised_before_the_driver_is_called(native: Native, tmp_path: Path) -> None:
    with running(native, tmp_path, RAISED_BEFORE, "service") as program:
        assert program.child.wait(PATIENCE_S) == 0, program.child.communicate()
        assert (program.words[1], program.words[2]) == (1, 1)


def test_two_threads_that_never_let_a_service_idle_show_their_oldest_request(
    native: Native, board: Board, tmp_path: Path
) -> None:
    body = """
def serve():
    check(cuda.cuCtxSetCurrent(context))
    stream = new_stream()
    while True:
        launch(5000, stream=stream)
        synchronise(stream)
threads = [threading.Thread(target=serve, daemon=True) for _ in range(2)]
for thread in threads: thread.start(); time.sleep(0.002)
time.sleep(1000)
"""
    with running(native, tmp_path, body, "service") as program:
        assert goes_on(program, 20)
        (row,) = rows_of(board, SERVICE)
        since = set()
        for _ in range(100):
            since.add(int(board.words[row, BUSY_SINCE]))
            time.sleep(0.01)
        assert len(since) > 10  # it moves on, or the service would count as hung


CAPTURES = """
stop = []
def capture():
    check(cuda.cuCtxSetCurrent(context))
    stream, graph = new_stream(), u64()
    while not stop:
        check(cuda.cuStreamBeginCapture_v2(u64(stream), 0))
        for _ in range(3): launch(0, stream=stream); time.sleep(0.0005)
        check(cuda.cuStreamEndCapture(u64(stream), ctypes.byref(graph)))
        say(1)
def work():
    check(cuda.cuCtxSetCurrent(context))
    stream = new_stream()
    while not stop: launch(100, stream=stream); time.sleep(0.0002)
def guarded(run):
    try: run()
    except BaseException: say(2); raise
threads = [threading.Thread(target=guarded, args=(run,)) for run in (capture, work, work)]
for thread in threads: thread.start()
while words[1] < 200 and not words[2]: time.sleep(0.01)
stop.append(True)
for thread in threads: thread.join()
"""


@pytest.mark.parametrize("tier", ["service", "background"])
def test_captures_are_not_broken(
    native: Native, service: Service, tmp_path: Path, tier: str
) -> None:
    with running(native, tmp_path, CAPTURES, tier) as program:
        while program.child.poll() is None:
            service.raise_busy(launches=False)
            time.sleep(0.002)
            service.clear_busy()
            time.sleep(0.002)
        _, errors = program.child.communicate()
        assert (program.child.returncode, errors) == (0, "")
        assert (int(program.words[1]) >= 200, int(program.words[2])) == (True, 0)


OTHERS_RUN = """
def count():
    while True: say(1); time.sleep(0.001)
threading.Thread(target=count, daemon=True).start()
while True: launch(1000, library=locked)
"""


@pytest.mark.parametrize("kept", [False, True])
def test_other_python_threads_go_on_while_held(
    native: Native, board: Board, service: Service, tmp_path: Path, kept: bool
) -> None:
    variables = {"ECLIP_KEEP_PYTHON_LOCK": "1"} if kept else {}
    with running(native, tmp_path, OTHERS_RUN, "background", **variables) as program:
        assert goes_on(program)
        service.raise_busy()
        assert is_held(board, program)
        counted = int(program.words[1])
        if kept:  # what happens without care, so that this test could fail
            time.sleep(0.2)
            assert program.words[1] == counted
        else:
            assert until(lambda: program.words[1] > counted + 20)
        assert is_held(board, program)


@pytest.mark.parametrize("where", ["main", "thread"])
def test_an_interrupt_ends_a_program_that_is_held(
    native: Native, board: Board, service: Service, tmp_path: Path, where: str
) -> None:
    in_thread = """
def work():
    check(cuda.cuCtxSetCurrent(context))
    for _ in range(words[2] or 1 << 60): launch(1000)
thread = threading.Thread(target=work, daemon=True); thread.start()
thread.join()
"""
    body = STEADY if where == "main" else in_thread
    with running(native, tmp_path, body, "background") as program:
        assert goes_on(program)
        service.raise_busy()
        assert is_held(board, program)
        program.child.send_signal(signal.SIGINT)
        assert program.child.wait(PATIENCE_S) != 0
        assert "KeyboardInterrupt" in program.child.communicate()[1]
        assert service.row[BUSY_SINCE] != IDLE


def test_a_forked_child_neither_owns_nor_ends_a_row(
    native: Native, board: Board, tmp_path: Path
) -> None:
    body = """
launch(0)
synchronise()
if os.fork() == 0:
    os._exit(0)
os.wait()
child = os.fork()
if child == 0:
    time.sleep(1000)
words[2] = child
time.sleep(1000)
"""
    with running(native, tmp_path, body, "background") as program:
        assert until(lambda: program.words[2] != 0)
        (row,) = rows_of(board, BACKGROUND)
        beat = int(board.words[row, HEARTBEAT])
        assert until(lambda: board.words[row, HEARTBEAT] > beat)  # the first child ended nothing
        try:
            program.child.kill()
            # The second lives and keeps no lock.
            assert until(lambda: row not in rows_of(board, BACKGROUND))
            os.kill(int(program.words[2]), 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(program.words[2]), signal.SIGKILL)


def test_a_child_that_was_forked_before_joins_by_itself(
    native: Native, board: Board, tmp_path: Path
) -> None:
    body = """
if os.fork() == 0:
    launch(0)
    time.sleep(1000)
time.sleep(1000)
"""
    with running(native, tmp_path, body, "background"):
        assert until(lambda: len(rows_of(board, BACKGROUND)) == 1)
        (row,) = rows_of(board, BACKGROUND)
        child = int(board.words[row, PID])
        os.kill(child, signal.SIGKILL)
        assert until(lambda: rows_of(board, BACKGROUND) == [])


def test_threads_that_die_leave_no_service_busy(
    native: Native, board: Board, tmp_path: Path
) -> None:
    body = """
def once():
    check(cuda.cuCtxSetCurrent(context))
    launch(1000, stream=2)
for _ in range(50):
    thread = threading.Thread(target=once); thread.start(); thread.join()
say(1)
time.sleep(1000)
"""
    with running(native, tmp_path, body, "service") as program:
        assert until(lambda: program.words[1] == 1)
        (row,) = rows_of(board, SERVICE)
        assert until(lambda: board.words[row, BUSY_SINCE] == IDLE)


def test_programs_of_nccl_are_told_and_not_held(
    native: Native, board: Board, service: Service, tmp_path: Path
) -> None:
    body = """
gather = kernel(b"ncclDevKernel_AllReduce_Sum_f32_RING_LL")
for _ in range(40): launch(1000, gather)
while True: launch(1000)
"""
    service.raise_busy()
    with running(native, tmp_path, body, "background") as program:
        assert goes_on(program, 60)
        program.child.kill()
        told = program.child.communicate()[1].splitlines()
    assert len(told) == 1
    assert "NCCL" in told[0]


def test_a_board_that_cannot_be_used_is_said_once_and_nothing_else(
    native: Native, board: Board, service: Service, tmp_path: Path
) -> None:
    service.raise_busy()
    version_of(tmp_path / "board", 99)
    body = "for _ in range(50): launch(10)\nsynchronise()"
    with running(native, tmp_path, body, "background") as program:
        _, errors = program.child.communicate(timeout=PATIENCE_S)
        assert program.child.returncode == 0
    (line,) = errors.splitlines()
    assert "is of version 99, and this eclip's is 3" in line
    assert program.launched == 50


def test_the_board_is_where_python_looks_for_it(native: Native, tmp_path: Path) -> None:
    body = "launch(0)\nsynchronise()\nsay(1)\ntime.sleep(1000)"
    with running(native, tmp_path, body, "service", ECLIP_BOARD=str(tmp_path)) as program:
        assert until(lambda: program.words[1] == 1)
        uuid = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
        path = tmp_path / f"eclip-board-{os.geteuid()}-{uuid}"
        assert path.stat().st_mode & 0o777 == 0o600
        with open_board(path) as opened:
            (row,) = rows_of(opened, SERVICE)
            assert bytes(opened.words[row, NAME:]).startswith(b"service-")


def test_many_processes_join_at_once(native: Native, board: Board, tmp_path: Path) -> None:
    count = 200
    probe = native.folder / "plain" / "probe"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(native.library),
        "ECLIP_TIER": "background",
        "ECLIP_BOARD": str(tmp_path / "board"),
    }
    children = [
        subprocess.Popen(
            [probe, "join"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(count)
    ]
    try:
        # What each of them waited for its row, beside all others.
        waits_ms = [int(child.stdout.readline()) / 1e6 for child in children if child.stdout]
        assert len(rows_of(board, BACKGROUND)) == count
        assert max(waits_ms) < BUSY_MS
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert until(lambda: rows_of(board, BACKGROUND) == [])

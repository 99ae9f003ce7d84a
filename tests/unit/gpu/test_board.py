"""The board between processes: real processes that claim, stop, fork and die."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from board_owner import PROMISE, Owner
from eclip.core import decide as deciding
from eclip.core import rules
from eclip.core.model_key import ModelKey
from eclip.core.plan import PlannedWorker, Promise
from eclip.core.rules import (
    ALWAYS,
    BACKGROUND,
    BOUND,
    BUSY_SINCE,
    HEARTBEAT,
    IDLE,
    MOST_ROWS,
    NONE,
    PLAIN,
    SERVICE,
    SOME,
    STOPPED_NS,
    TIER,
    WORDS,
)
from eclip.cuda.processes.mps import python_path
from eclip.errors import ArtefactError, DeviceError, EclipError, UsageError
from eclip.gpu import board as boards
from eclip.gpu.board import Board, LentRow, board_path, open_board, private_board
from waiting import PATIENCE_S, until

NATIVE = Path(__file__).parents[3] / "native"
counts_as_busy = deciding.counts_as_busy.py_func  # type: ignore[attr-defined]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "board"


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def busy(board: Board, row: int) -> bool:
    return bool(counts_as_busy(board.words, row, now_ns()))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def row_is_free(path: Path, row: int) -> bool:
    """Whether another process could lock it."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return boards._try_lock(descriptor, row)
    finally:
        os.close(descriptor)  # the lock goes with it


# --- The file ---------------------------------------------------------------------------------


def test_a_board_is_the_users_alone_and_put_in_place_whole(path: Path) -> None:
    before = os.umask(0o277)  # as strict as it gets
    try:
        with open_board(path) as board:
            assert board.words.shape == (MOST_ROWS, WORDS)
            assert not board.words.any()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert struct.unpack("=8q", path.read_bytes()[:64]) == (*boards.HEADER, 0, 0, 0, 0)
    assert path.stat().st_size == boards.SIZE == 512 * 257
    assert path.stat().st_blocks * 512 >= boards.SIZE, "its space is not taken"
    assert list(path.parent.iterdir()) == [path], "a draft is left"


def test_a_board_that_is_there_is_kept(path: Path) -> None:
    with open_board(path) as first:
        row = first.claim(PROMISE)
        inode = path.stat().st_ino
        with open_board(path) as second:
            assert second.words[row, TIER] == SERVICE
        assert path.stat().st_ino == inode
        assert first.words[row, TIER] == SERVICE


def test_one_that_somebody_else_puts_there_first_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def too_late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        with open_board(target) as other:
            other.words[5, BOUND] = 7
        link(source, target)

    monkeypatch.setattr(os, "link", too_late)
    with open_board(path) as board:
        assert board.words[5, BOUND] == 7
    assert list(path.parent.iterdir()) == [path]


def test_the_path_says_which_gpu_and_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(boards.VARIABLE, raising=False)
    assert board_path("GPU-1") == Path(f"/dev/shm/eclip-board-{os.geteuid()}-GPU-1")
    assert board_path("GPU-1") != board_path("GPU-2")
    monkeypatch.setenv(boards.VARIABLE, str(tmp_path / "mine"))
    assert board_path("GPU-1") == tmp_path / "mine"
    monkeypatch.setenv(boards.VARIABLE, str(tmp_path))  # containers mount folders
    assert board_path("GPU-1").parent == tmp_path
    assert board_path("GPU-1") != board_path("GPU-2")


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "foreign":
        content[:8] = b"somebody"
    elif how == "version":
        content[8:16] = struct.pack("=q", 2)
        del content[24 * 8 * 257 :]  # as long as boards of version 2
    elif how == "newer and longer":
        content[8:16] = struct.pack("=q", 4)
        content += bytes(4096)
    elif how == "rows":
        content[16:24] = struct.pack("=q", 1000)
    elif how == "short":
        del content[-1:]
    elif how == "long":
        content += b"\0"
    elif how == "cut":
        del content[12:]
    elif how == "empty":
        content.clear()
    path.write_bytes(content)
    if how == "mode":
        path.chmod(0o660)
    elif how == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("foreign", "is no board of eclip"),
        ("cut", "is no board of eclip"),
        ("empty", "is no board of eclip"),
        ("pipe", "is no board of eclip"),
        ("version", "is of version 2, and this eclip's is 3"),
        ("newer and longer", "is of version 4, and this eclip's is 3"),
        ("rows", "is damaged"),
        ("short", "is damaged"),
        ("long", "is damaged"),
        ("mode", "is open to other users"),
        ("link", "cannot be used: Too many levels of symbolic links"),
        ("folder", "cannot be used: Is a directory"),
    ],
)
def test_what_is_no_board_of_ours_is_refused_and_left_alone(
    path: Path, how: str, reason: str
) -> None:
    open_board(path).close()
    damage(path, how)
    before = path.lstat()
    descriptors = open_files()
    with pytest.raises((ArtefactError, UsageError), match=reason) as caught:
        open_board(path)
    assert caught.value.exit_code == 2
    assert "set ECLIP_BOARD to" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (path.lstat().st_size, path.lstat().st_mode) == (before.st_size, before.st_mode)
    assert open_files() == descriptors


def test_a_board_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_board(path).close()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ArtefactError, match="open to other users"):
        open_board(path)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file or directory; set ECLIP_BOARD") as caught:
        open_board(tmp_path / "nowhere" / "board")
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match=r"cannot be used: .*; set ECLIP_BOARD"):
        open_board(Path("/proc/eclip-board"))


OPEN = """
import pathlib, resource, sys
from eclip.gpu.board import open_board
from eclip.errors import EclipError
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    open_board(pathlib.Path(sys.argv[1]))
except EclipError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
NO_ROOM = """
mount -t tmpfs -o size=8k tmpfs "$1" || exit 77
dd if=/dev/zero of="$1/ballast" bs=4k count=2 status=none || exit 78
"$2" -c "$3" "$1/board" 0; status=$?
test "$(ls -A "$1")" = ballast || exit 79
exit $status
"""


def run_python(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def can_unshare(*kinds: str) -> bool:
    return (
        shutil.which("unshare") is not None
        and run_python(["unshare", "--user", "--map-root-user", *kinds, "true"]).returncode == 0
    )


def test_a_full_file_system_is_an_error_and_no_signal(tmp_path: Path) -> None:
    if not can_unshare("--mount"):
        pytest.skip("no mount namespaces here, so no tiny file system to fill")
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", NO_ROOM, "sh"]
    ended = run_python([*enter, str(tmp_path), sys.executable, OPEN])
    if ended.returncode == 77:
        pytest.skip("a tmpfs cannot be mounted here")
    assert ended.returncode == 1, (ended.returncode, ended.stderr)
    assert ended.stderr.startswith("UsageError: the board ")
    assert "No space left on device; containers get more with --shm-size" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_limit_on_files_is_an_error_and_no_signal(path: Path) -> None:
    ended = run_python([sys.executable, "-c", OPEN, str(path), "1024"])
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert "cannot be used: File too large" in ended.stderr
    assert list(path.parent.iterdir()) == []


def test_a_private_board_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    descriptors = open_files()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UsageError, match="No space left on device"):
        private_board()
    assert open_files() == descriptors


# --- The layout, in C and here ----------------------------------------------------------------

CONSTANTS = {
    "ECLIP_BOARD_MAGIC": boards.MAGIC,
    "ECLIP_BOARD_VERSION": boards.VERSION,
    "ECLIP_BOARD_ROWS": MOST_ROWS,
    "ECLIP_BOARD_WORDS": WORDS,
    "ECLIP_BOARD_NAME_BYTES": rules.NAME_BYTES,
    "ECLIP_SLICE_WORDS": rules.SLICE_WORDS,
    "ECLIP_NOBODY": rules.NOBODY,
    "ECLIP_SERVICE": SERVICE,
    "ECLIP_BACKGROUND": BACKGROUND,
    "ECLIP_PLAIN": PLAIN,
    "ECLIP_IDLE": IDLE,
    "ECLIP_ALWAYS": ALWAYS,
    "ECLIP_STOPPED_NS": STOPPED_NS,
    "ECLIP_HUNG_BOUNDS": rules.HUNG_BOUNDS,
    "ECLIP_MOST_OVERTAKEN": rules.MOST_OVERTAKEN,
    "sizeof(struct eclip_board_row)": boards.ROW_BYTES,
    "sizeof(struct eclip_board)": boards.SIZE,
    "offsetof(struct eclip_board, magic)": 0,
    "offsetof(struct eclip_board, version)": 8,
    "offsetof(struct eclip_board, rows)": 16,
    "offsetof(struct eclip_board, words)": 24,
    "offsetof(struct eclip_board, row)": boards.FIRST_ROW,
    "offsetof(struct eclip_board_row, tier)": 8 * TIER,
    "offsetof(struct eclip_board_row, busy_since)": 8 * BUSY_SINCE,
    "offsetof(struct eclip_board_row, deadline)": 8 * rules.DEADLINE,
    "offsetof(struct eclip_board_row, left_ns)": 8 * rules.LEFT,
    "offsetof(struct eclip_board_row, heartbeat)": 8 * HEARTBEAT,
    "offsetof(struct eclip_board_row, bound_ns)": 8 * BOUND,
    "offsetof(struct eclip_board_row, some_ns)": 8 * SOME,
    "offsetof(struct eclip_board_row, none_ns)": 8 * NONE,
    "offsetof(struct eclip_board_row, strict)": 8 * rules.STRICT,
    "offsetof(struct eclip_board_row, latest)": 8 * rules.LATEST,
    "offsetof(struct eclip_board_row, account)": 8 * rules.ACCOUNT,
    "offsetof(struct eclip_board_row, credit)": 8 * rules.CREDIT,
    "offsetof(struct eclip_board_row, gain)": 8 * rules.GAIN,
    "offsetof(struct eclip_board_row, lock)": 8 * rules.LOCK,
    "offsetof(struct eclip_board_row, strict_since)": 8 * rules.STRICT_SINCE,
    "offsetof(struct eclip_board_row, draw)": 8 * rules.DRAW,
    "offsetof(struct eclip_board_row, counted)": 8 * rules.COUNTED,
    "offsetof(struct eclip_board_row, late)": 8 * rules.LATE,
    "offsetof(struct eclip_board_row, lost)": 8 * rules.LOST,
    "offsetof(struct eclip_board_row, late_strict)": 8 * rules.LATE_STRICT,
    "offsetof(struct eclip_board_row, late_host)": 8 * rules.LATE_HOST,
    "offsetof(struct eclip_board_row, audited)": 8 * rules.AUDITED,
    "offsetof(struct eclip_board_row, audited_late)": 8 * rules.AUDITED_LATE,
    "offsetof(struct eclip_board_row, free)": 8 * rules.FREE,
    "offsetof(struct eclip_board_row, free_late)": 8 * rules.FREE_LATE,
    "offsetof(struct eclip_board_row, strict_ns)": 8 * rules.STRICT_NS,
    "offsetof(struct eclip_board_row, pid)": 8 * rules.PID,
    "offsetof(struct eclip_board_row, served)": 8 * rules.SERVED,
    "offsetof(struct eclip_board_row, launched)": 8 * rules.LAUNCHED,
    "offsetof(struct eclip_board_row, yielded)": 8 * rules.YIELDED,
    "offsetof(struct eclip_board_row, moved)": 8 * rules.MOVED,
    "offsetof(struct eclip_board_row, crossed)": 8 * rules.CROSSED,
    "offsetof(struct eclip_board_row, longest_pause_ns)": 8 * rules.LONGEST_PAUSE,
    "offsetof(struct eclip_board_row, tail_ns)": 8 * rules.TAIL,
    "offsetof(struct eclip_board_row, units_wanted)": 8 * rules.UNITS_WANTED,
    "offsetof(struct eclip_board_row, units_held)": 8 * rules.UNITS_HELD,
    "offsetof(struct eclip_board_row, slices_held)": 8 * rules.SLICES_HELD,
    "offsetof(struct eclip_board_row, slices_wanted)": 8 * rules.SLICES_WANTED,
    "offsetof(struct eclip_board_row, changes)": 8 * rules.CHANGES,
    "offsetof(struct eclip_board_row, memory_cap)": 8 * rules.MEMORY_CAP,
    "offsetof(struct eclip_board_row, memory_used)": 8 * rules.MEMORY_USED,
    "offsetof(struct eclip_board_row, begun)": 8 * rules.BEGUN,
    "offsetof(struct eclip_board_row, ended)": 8 * rules.ENDED,
    "offsetof(struct eclip_board_row, name)": 8 * rules.NAME,
}


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_in_c_has_the_same_layout(tmp_path: Path, language: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is missing")
    prints = "".join(f'printf("%lld\\n", (long long){name});\n' for name in CONSTANTS)
    source = tmp_path / "layout"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n"
        f'#include "board.h"\nint main(void) {{\n{prints}return 0; }}\n'
    )
    program = tmp_path / "program"
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run(
        [compiler, "-x", language, *strict, f"-I{NATIVE}", str(source), "-o", str(program)],
        check=True,
    )
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert dict(zip(CONSTANTS, map(int, printed.split()), strict=True)) == CONSTANTS


def test_every_constant_of_the_header_is_compared() -> None:
    named = set(re.findall(r"\bECLIP_[A-Z_]+\b", (NATIVE / "board.h").read_text()))
    assert named - {"ECLIP_BOARD_H"} == {name for name in CONSTANTS if name.isupper()}


# --- Rows -------------------------------------------------------------------------------------


def test_a_claim_says_who_came(path: Path) -> None:
    with open_board(path) as board:
        service, background = board.claim(PROMISE), board.claim()
        assert board.words[service, [TIER, BUSY_SINCE]].tolist() == [SERVICE, IDLE]
        promised = [PROMISE.bound_ns, PROMISE.some_ns, PROMISE.none_ns]
        assert board.words[service, [BOUND, SOME, NONE]].tolist() == promised
        assert board.words[background, [TIER, BUSY_SINCE, BOUND]].tolist() == [BACKGROUND, IDLE, 0]
        assert board.words[service, HEARTBEAT] <= now_ns()
        board.release(service)
        assert not board.words[service].any()
        assert row_is_free(path, service)
        assert not row_is_free(path, background)
    assert row_is_free(path, background)


def test_two_sessions_of_one_process_have_different_rows(path: Path) -> None:
    with open_board(path) as first, open_board(path) as second:
        rows = [first.claim(), second.claim(PROMISE), first.claim(), second.claim()]
        assert len(set(rows)) == 4
        first.release(rows[1])  # not its own
        assert second.words[rows[1], TIER] == SERVICE
        assert not row_is_free(path, rows[1])


def planned(promises: Sequence[Promise | None]) -> list[PlannedWorker]:
    return [
        PlannedWorker(name=f"w{index}", model=ModelKey("m", 1), kernels=1, why="", promise=promise)
        for index, promise in enumerate(promises)
    ]


def test_a_full_board_is_one_line_and_all_or_nothing(path: Path) -> None:
    with open_board(path) as board, open_board(path) as other:
        rows = board.claim_all(planned([None] * (MOST_ROWS - 1)))
        assert len(set(rows)) == MOST_ROWS - 1
        with pytest.raises(DeviceError, match="is full: 256 workers share this GPU already"):
            other.claim_all(planned([PROMISE, None]))
        assert np.count_nonzero(board.words[:, TIER]) == MOST_ROWS - 1
        last = other.claim()
        assert last not in rows
        board.release(rows[3])
        assert other.claim() == rows[3]


def test_a_closed_board_gives_no_rows(path: Path) -> None:
    board = open_board(path)
    row = board.claim()
    words = board.words
    board.close()
    board.close()
    board.release(row)
    with pytest.raises(DeviceError, match="is closed"):
        board.claim()
    assert not words[row].any(), "the memory is gone with the board"


def test_owners_beat_while_they_have_a_row(path: Path) -> None:
    with open_board(path) as board:
        row, lent = board.claim(), board.claim(beats=False)
        first = board.words[row, HEARTBEAT]
        said = board.words[lent, HEARTBEAT]
        assert until(lambda: board.words[row, HEARTBEAT] > first)
        assert board.words[lent, HEARTBEAT] == said
        board.release(row)
        time.sleep(3 * boards.BEAT_S)  # can only miss a mistake
        assert board.words[row, HEARTBEAT] == 0
    assert 4 * boards.BEAT_S * 1e9 < STOPPED_NS, "one late beat must not look like a stop"


def test_words_from_before_a_restart_of_the_machine_are_cleared(path: Path) -> None:
    with open_board(path) as board:
        left = np.zeros_like(board.words)
        rules.enter(left, 4, PROMISE, now_ns() + 10**15)
        left[4, BUSY_SINCE] = now_ns()
        assert counts_as_busy(left, 4, now_ns())
        board.words[4] = left[4]  # nobody's: a sweep may clear it at any time
    with open_board(path) as board:
        assert not board.words[4].any()


# --- Owners in other processes ----------------------------------------------------------------


def test_processes_see_each_other(path: Path) -> None:
    with open_board(path) as board, Owner(path) as owner:
        mine, theirs = board.claim(), owner.claim()
        assert mine != theirs
        assert board.words[theirs, TIER] == SERVICE
        assert not busy(board, theirs)
        owner.tell("busy")
        assert until(lambda: busy(board, theirs))
        owner.tell("release")
        assert not board.words[theirs].any()
        assert board.claim() == theirs


def test_a_killed_owner_is_idle_and_its_row_is_cleared(path: Path) -> None:
    with open_board(path) as board, Owner(path) as owner:
        row = owner.claim()
        owner.tell("busy")
        assert until(lambda: busy(board, row))
        owner.kill()
        killed_at = now_ns()
        left = board.words.copy()
        assert left[row, HEARTBEAT] <= killed_at
        assert not counts_as_busy(left, row, killed_at + STOPPED_NS + 1)
        assert left[row, TIER] == SERVICE, "somebody cleared it: this says nothing about heartbeats"
        descriptor = os.open(path, os.O_RDWR)
        assert boards._try_lock(descriptor, row)  # so that our own claim takes another row
        board.claim()  # now it lives, and sweeps
        assert board.words[row, TIER] == SERVICE
        os.close(descriptor)
        assert until(lambda: not board.words[row].any())


def test_the_row_of_a_killed_owner_is_claimed_at_once(path: Path) -> None:
    with open_board(path) as board, Owner(path) as owner:
        row = owner.claim()
        owner.tell("busy")
        owner.kill()
        assert board.claim() == row
        assert board.words[row, [TIER, BUSY_SINCE]].tolist() == [BACKGROUND, IDLE]


def test_an_owner_killed_in_the_middle_of_its_claim_leaves_a_free_row(path: Path) -> None:
    with Owner(path) as owner, open_board(path) as board:
        owner.begin("claim_and_die")
        assert owner.wait() == -signal.SIGKILL
        assert not busy(board, 0)
        assert board.claim(PROMISE) == 0


def test_a_stopped_owner_is_idle_keeps_its_row_and_comes_back(path: Path) -> None:
    with open_board(path) as board, Owner(path) as owner:
        mine, row = board.claim(), owner.claim()
        owner.tell("busy")
        assert until(lambda: busy(board, row))
        owner.stop()
        stopped_at = now_ns()
        assert board.words[row, HEARTBEAT] <= stopped_at
        assert not counts_as_busy(board.words, row, stopped_at + STOPPED_NS + 1)
        assert until(lambda: not busy(board, row))
        board.sweep()
        assert board.words[row, TIER] == SERVICE, "stopped is not gone"
        assert board.claim() not in (mine, row)
        owner.go_on()
        assert until(lambda: busy(board, row))


def test_a_forked_child_neither_owns_nor_ends_its_parents_row(path: Path) -> None:
    with open_board(path) as board, Owner(path) as owner:
        row = owner.claim()
        owner.tell("busy")
        assert owner.tell("fork") == "0", "the child failed"
        assert not row_is_free(path, row)
        assert until(lambda: busy(board, row))
        before = board.words[row, HEARTBEAT]
        assert until(lambda: board.words[row, HEARTBEAT] > before)
        assert np.count_nonzero(board.words[:, TIER]) == 1


def test_a_forked_child_does_not_keep_its_dead_parents_row(path: Path) -> None:
    with Owner(path) as owner:
        row = owner.claim()
        child = int(owner.tell("fork_one_that_stays"))
        assert not row_is_free(path, row)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        os.kill(child, 0)  # lives
        assert until(lambda: row_is_free(path, row))


def test_many_processes_at_once_get_different_rows(path: Path) -> None:
    with contextlib.ExitStack() as stack:
        owners = [stack.enter_context(Owner(path)) for _ in range(16)]
        for owner in owners:
            owner.begin("claim")
        rows = {int(owner.answer()) for owner in owners}
        assert rows == set(range(16))


def test_no_two_processes_ever_own_one_row(path: Path) -> None:
    """Four processes and hundreds of claims. All but two rows are taken, so they meet all the time.
    A second owner of a row finds the first one's mark and dies."""
    with open_board(path) as board, contextlib.ExitStack() as stack:
        board.claim_all(planned([None] * (MOST_ROWS - 2)))
        owners = [stack.enter_context(Owner(path)) for _ in range(4)]
        for owner in owners:
            owner.begin("quarrel")
        seen = [int(owner.answer()) for owner in owners]
        assert max(seen) >= 1
        assert np.count_nonzero(board.words[:, TIER]) == MOST_ROWS - 2


def test_a_board_is_made_once_by_many_at_once(path: Path) -> None:
    with contextlib.ExitStack() as stack:
        owners = [stack.enter_context(Owner(path.with_name("other"))) for _ in range(4)]
        for turn in range(10):
            path.with_name("other").unlink()
            for owner in owners:
                owner.begin("reopen")
            assert {owner.answer() for owner in owners} == {"open"}
            rows = [owner.claim() for owner in owners]
            assert sorted(rows) == [0, 1, 2, 3], f"several boards in turn {turn}"
    assert [one.name for one in path.parent.iterdir()] == ["other"]


def test_owners_in_two_pid_namespaces_see_each_other(path: Path) -> None:
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if not can_unshare("--pid", "--fork", "--kill-child"):
        pytest.skip("no PID namespaces here")
    with (
        Owner(path, through=apart) as first,
        Owner(path, through=apart) as second,
        open_board(path) as board,
    ):
        rows = first.claim(), second.claim()
        assert rows[0] != rows[1]
        first.tell("busy")
        second.tell("busy")
        assert until(lambda: all(busy(board, row) for row in rows))
        first.kill()
        assert until(lambda: not busy(board, rows[0]))
        assert until(lambda: row_is_free(path, rows[0]))
        assert until(lambda: busy(board, rows[1]))


# --- Rows that are lent to children -----------------------------------------------------------

CHILD = """
import sys, time
from eclip.gpu.board import LentRow
from eclip.core.rules import BUSY_SINCE
with LentRow(int(sys.argv[1]), int(sys.argv[2])) as lent:
    lent.words[lent.row, BUSY_SINCE] = time.monotonic_ns()
    print("busy", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def lent_to_child(board: Board, row: int) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(board.descriptor), str(row)],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[board.descriptor],
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "busy\n"
            yield child
        finally:
            child.kill()


def test_a_child_speaks_for_the_row_that_it_was_lent() -> None:
    with private_board() as board:
        row = board.claim(PROMISE, beats=False)
        with lent_to_child(board, row) as child:
            assert until(lambda: busy(board, row))
            child.kill()
            child.wait(PATIENCE_S)
            assert until(lambda: not busy(board, row))
        assert board.words[row, TIER] == SERVICE, "the row is still the set's"


PARENT = """
import pathlib, subprocess, sys
from eclip.gpu.board import open_board
board = open_board(pathlib.Path(sys.argv[1]))
row = board.claim(beats=False)
command = [sys.executable, "-c", sys.argv[2], str(board.descriptor), str(row)]
child = subprocess.Popen(command, pass_fds=[board.descriptor])
print(child.pid, flush=True)
child.wait()
"""


def test_a_lent_row_stays_taken_while_the_child_lives_after_its_parent(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(path), CHILD],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "busy\n"
        parent.kill()
        parent.wait(PATIENCE_S)
        assert not row_is_free(path, 0)
        os.kill(child, signal.SIGKILL)
        assert until(lambda: row_is_free(path, 0))


def test_a_child_refuses_what_is_no_board(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    with (tmp_path / "file").open("r+b") as file, pytest.raises(EclipError, match="is no board"):
        LentRow(file.fileno(), 0)

"""``eclip exec --replicas``: processes of one command, started again and ended together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from eclip.cuda import uuid
from eclip.errors import UsageError
from eclip.programs.replicas import Patience, Replicas, Replication, commands_of
from native_build import Native
from standins import install_control, processes_with
from waiting import PATIENCE_S, has_ended, until

QUICK = Patience(restarts=3, first=0.01, longest=0.04, settled=60.0, end=0.2)


def run(
    script: str, replicas: int = 2, patience: Patience = QUICK
) -> tuple[int, list[str], Replicas]:
    """Replicas of a shell script in this process: exit status, what was said, and how they are."""
    said: list[str] = []
    running = Replicas(["sh", "-c", script], replicas, dict(os.environ), said.append, patience)
    return running.run(), said, running


def test_the_number_stands_for_index_in_every_word_and_in_the_environment(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert commands_of(["serve", "--port=80{index}", "{index}-{index}", "{other}"], 2) == [
        ["serve", "--port=800", "0-0", "{other}"],
        ["serve", "--port=801", "1-1", "{other}"],
    ]
    code, said, _ = run("echo {index} $ECLIP_REPLICA", 3)
    assert (code, said) == (0, [])
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 | 0 0", "1 | 1 1", "2 | 2 2"]


def test_lines_have_the_number_before_them_and_none_is_lost(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, _, _ = run("seq 20000; printf 'no end'; echo bad >&2")
    found = capfd.readouterr()
    assert code == 0
    for index in range(2):
        own = [line for line in found.out.splitlines() if line.startswith(f"{index} | ")]
        assert own == [f"{index} | {word}" for word in [*range(1, 20001), "no end"]]
    assert sorted(found.err.splitlines()) == ["0 | bad", "1 | bad"]


def test_a_failed_replica_starts_again_and_the_others_are_left_alone(tmp_path: Path) -> None:
    script = f"""cd {tmp_path}; echo begun >>{{index}}
        [ {{index}} = 0 ] && {{ until [ -e done ]; do sleep 0.01; done; exit 0; }}
        [ $(wc -l <1) -ge 3 ] && {{ touch done; exit 0; }}
        [ $(wc -l <1) = 1 ] && exit 5
        kill -9 $$"""
    code, said, running = run(script)
    assert code == 0
    assert [(tmp_path / str(index)).read_text().count("begun") for index in range(2)] == [1, 3]
    assert [replica.restarts for replica in running.replicas] == [0, 2]
    assert [re.sub(r"after [\d.]+ s", "after … s", line) for line in said] == [
        "replica 1 ended with status 5 after … s; it starts again in 0.01 s (1 of 3 in a row)",
        "replica 1 ended with SIGKILL after … s; it starts again in 0.02 s (2 of 3 in a row)",
    ]


def test_a_replica_that_fails_again_and_again_is_given_up(tmp_path: Path) -> None:
    script = f"echo begun >>{tmp_path}/{{index}}; [ {{index}} = 0 ] || exit 4"
    code, said, _ = run(script)
    assert code == 4
    assert (tmp_path / "0").read_text().count("begun") == 1
    assert (tmp_path / "1").read_text().count("begun") == 4
    assert said[-1].endswith("is given up, after 3 restarts; the others go on")
    assert len(said) == 4
    code, said, _ = run("exit 4", 1, Patience(restarts=0))
    assert code == 4 and len(said) == 1 and "given up, after 0 restarts" in said[0]


def test_a_replica_that_ran_for_long_has_not_failed_in_a_row(tmp_path: Path) -> None:
    script = f"echo begun >>{tmp_path}/x; [ $(wc -l <{tmp_path}/x) -ge 6 ] || exit 1"
    code, said, running = run(script, 1, Patience(restarts=1, first=0.01, settled=0.0))
    assert code == 0 and running.replicas[0].restarts == 5
    assert all("(1 of 1 in a row)" in line for line in said)


def test_what_a_replica_leaves_behind_ends_before_it_starts_again(tmp_path: Path) -> None:
    """A child that ignores SIGTERM would keep a port."""
    child = "trap '' TERM; while :; do sleep 0.01; done"
    script = f"""cd {tmp_path}; [ -e pid ] && exit 0
        sh -c "{child}" & echo $! >pid; exit 1"""
    code, _, _ = run(script, 1)
    assert code == 0
    pid = int((tmp_path / "pid").read_text())
    assert until(lambda: has_ended(pid))


def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot run nothere: No such file"):
        Replicas(["nothere"], 2, dict(os.environ), print, QUICK).run()


# --- Signals, and ends of eclip itself ------------------------------------------------------------


@contextmanager
def exec_replicas(
    tmp_path: Path, *options: str, script: str, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """``eclip exec --replicas 2`` of a script in which each replica has written its number."""
    command = f"cd {tmp_path}; {script.replace('READY', 'echo $$ >{index}')}"
    words = ["exec", "--replicas", "2", *options, "--", "sh", "-c", command]
    with subprocess.Popen(
        [sys.executable, "-m", "eclip", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    ) as process:
        try:
            ready = [tmp_path / "0", tmp_path / "1"]
            assert until(
                lambda: (
                    all(path.exists() and path.read_text().endswith("\n") for path in ready)
                    or process.poll() is not None
                )
            )
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            process.kill()


def pids(tmp_path: Path) -> list[int]:
    return [int((tmp_path / str(index)).read_text()) for index in range(2)]


LASTING = "READY; while :; do sleep 0.05; done"


def test_a_signal_reaches_all_and_nothing_is_started_again(native: Native, tmp_path: Path) -> None:
    script = "trap 'echo bye; exit 3' TERM; " + LASTING
    with exec_replicas(tmp_path, script=script) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3
    assert sorted(out.splitlines()) == ["0 | bye", "1 | bye"]
    assert "starts again" not in err
    assert "in turns" in err
    assert all(map(has_ended, pids(tmp_path)))


def test_replicas_that_ignore_a_signal_are_killed_in_the_end(tmp_path: Path) -> None:
    for index in range(2):
        (tmp_path / str(index)).unlink(missing_ok=True)
    script = f"cd {tmp_path}; trap '' TERM; touch {{index}}; while :; do sleep 0.01; done"
    said: list[str] = []
    running = Replicas(["sh", "-c", script], 2, dict(os.environ), said.append, QUICK)
    watcher = subprocess.Popen(
        [
            "sh",
            "-c",
            f"cd {tmp_path}; until [ -e 0 -a -e 1 ]; do sleep 0.01; done; kill {os.getpid()}",
        ]
    )
    assert running.run() == 128 + signal.SIGKILL
    watcher.wait()
    assert running.signal == signal.SIGTERM
    assert said == ["killed after 0.2 s, because they did not end: 0, 1"]


def test_replicas_end_when_eclip_is_killed(native: Native, tmp_path: Path) -> None:
    with exec_replicas(tmp_path, script=LASTING) as process:
        process.kill()
        assert until(lambda: all(map(has_ended, pids(tmp_path))))


# --- MPS ------------------------------------------------------------------------------------------


@pytest.fixture
def control(native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for NVIDIA's control program, and for the driver that tells the GPU's UUID."""
    folder = tmp_path / "bin"
    folder.mkdir()
    install_control(folder, "working")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(native.folder / "plain"))
    return folder


def test_replicas_under_mps_share_a_server_that_ends_with_them(
    control: Path, native: Native, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(uuid, "LIBRARY", str(native.standin))
    said: list[str] = []
    script = (
        "echo $CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES $ECLIP_GPU; "
        "test -e $CUDA_MPS_PIPE_DIRECTORY/listening"
    )
    replication = Replication(2, said.append, QUICK, mps_gpu=0)
    environment = {**os.environ, "ECLIP_GPU": "0"}
    assert replication(["sh", "-c", script], environment) == (0, None)
    lines = {line.partition(" | ")[2] for line in capfd.readouterr().out.splitlines()}
    (line,) = lines
    pipes, visible, index = line.split()
    assert visible == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f" and index == "0"
    assert not Path(pipes).exists()
    assert not processes_with(f"CUDA_MPS_PIPE_DIRECTORY={pipes}")
    assert len(said) == 1 and "a GPU fault in one of them" in said[0] and "ends all" in said[0]


def test_the_mps_server_ends_when_eclip_is_killed(control: Path, tmp_path: Path) -> None:
    script = "echo $CUDA_MPS_PIPE_DIRECTORY >pipes; " + LASTING
    with exec_replicas(tmp_path, "--mps", script=script) as process:
        pipes = (tmp_path / "pipes").read_text().strip()
        assert Path(pipes, "listening").exists()
        process.kill()
        assert until(lambda: not processes_with(f"CUDA_MPS_PIPE_DIRECTORY={pipes}"))
        assert until(lambda: not Path(pipes).exists())
        assert all(map(has_ended, pids(tmp_path)))


# --- The command line -----------------------------------------------------------------------------


def refused(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "eclip", "exec", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--replicas", "0", "--", "true"), "invalid value for '--replicas'"),
        (("--mps", "--", "true"), "--mps needs --replicas N"),
        (("--restarts", "2", "--", "true"), "--restarts needs --replicas N"),
        (("--replicas", "2", "--plan", "x.json", "--", "true"), "leave out --plan, or --replicas"),
        (("--", "true"), "--replicas N, or --plan FILE"),
    ],
)
def test_what_does_not_go_together_is_refused(words: Sequence[str], said: str) -> None:
    assert said in refused(*words)

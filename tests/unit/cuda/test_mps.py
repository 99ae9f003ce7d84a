"""The MPS daemon of our own, with a stand-in for NVIDIA's control program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eclip.cuda.processes import mps
from eclip.cuda.processes.mps import MpsDaemon
from eclip.errors import DeviceError
from standins import install_control, processes_with

UUID = "GPU-12345678"


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def processes_of(folder: Path) -> list[str]:
    return processes_with(f"CUDA_MPS_PIPE_DIRECTORY={folder}")


def test_a_daemon_runs_in_a_private_directory_until_it_is_closed(on_path: Path) -> None:
    install_control(on_path, "working")
    with MpsDaemon(UUID) as one, MpsDaemon(UUID) as other:
        assert one.pipes != other.pipes
        assert (one.pipes / "listening").exists()
        assert processes_of(one.pipes)
        assert one.pids()
        assert len(str(one.pipes)) < 80
    for daemon in (one, other):
        assert not daemon.pipes.exists()
        assert not processes_of(daemon.pipes)


def test_a_missing_control_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(DeviceError, match=r"nvidia-cuda-mps-control is not on the PATH"):
        MpsDaemon(UUID)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("failing", rf"nvidia-cuda-mps-control ended with status 1 \(no such GPU {UUID}\)"),
        ("silent", r"nvidia-cuda-mps-control ended with status 7 \(it said nothing\)"),
    ],
)
def test_a_daemon_that_does_not_start_says_why_and_leaves_nothing(
    on_path: Path, mode: str, reason: str
) -> None:
    install_control(on_path, mode)
    with pytest.raises(DeviceError, match=f"the MPS daemon did not start: {reason}"):
        MpsDaemon(UUID)
    assert not list(Path("/tmp").glob(f"eclip-mps-{os.getpid()}-*"))


def test_a_daemon_that_never_listens_is_given_up(
    on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_control(on_path, "mute")
    monkeypatch.setattr(mps, "_LISTEN_SECONDS", 0.3)
    with (
        pytest.raises(DeviceError, match=r"does not listen \(cannot find the daemon\)"),
        mps._running(tmp_path, UUID),
    ):
        pass


def test_a_daemon_that_does_not_quit_is_killed(
    on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_control(on_path, "deaf")
    monkeypatch.setattr(mps, "_QUIT_SECONDS", 0.3)
    folder = tmp_path / "pipes"
    folder.mkdir()
    with mps._running(folder, UUID):
        assert processes_of(folder)
    assert not processes_of(folder)


def test_a_daemon_inherits_no_share_and_sees_one_gpu(
    on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_control(on_path, "working")
    monkeypatch.setenv(mps.SHARE, "30")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    folder = tmp_path / "pipes"
    folder.mkdir()
    with mps._running(folder, UUID):
        daemon = processes_of(folder)[0]
    assert f"CUDA_VISIBLE_DEVICES={UUID}" in daemon
    assert mps.SHARE not in daemon

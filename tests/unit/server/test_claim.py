"""One server a GPU: a second one is refused, or shares it through the board."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from eclip.errors import DeviceError
from eclip.gpu.board import VARIABLE
from eclip.server.device import claim
from eclip.server.device.claim import claimed
from waiting import until


@pytest.fixture
def uuid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(claim, "_FOLDER", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    return f"GPU-{secrets.token_hex(4)}"


def test_a_second_server_is_refused_until_the_first_ends(uuid: str) -> None:
    with claimed(uuid):
        with pytest.raises(
            DeviceError, match=f"another server runs on {uuid}; end it, .*{VARIABLE}"
        ):
            claimed(uuid).__enter__()
        with claimed("GPU-other"):
            pass
    with claimed(uuid):
        pass


def test_servers_on_the_board_share_and_one_that_is_not_is_refused(
    uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/dev/shm")
    with claimed(uuid), claimed(uuid):
        monkeypatch.delenv(VARIABLE)
        with pytest.raises(DeviceError, match="another server"):
            claimed(uuid).__enter__()


def test_a_server_that_is_killed_keeps_nothing(uuid: str) -> None:
    program = (
        "import sys, time, pathlib; from eclip.server.device import claim; "
        "claim._FOLDER = pathlib.Path(sys.argv[1]); "
        "claimed = claim.claimed(sys.argv[2]); claimed.__enter__(); "
        "print('claimed', flush=True); time.sleep(600)"
    )
    arguments = [sys.executable, "-c", program, str(claim._FOLDER), uuid]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline()
            with pytest.raises(DeviceError, match="another server"):
                claimed(uuid).__enter__()
        finally:
            server.kill()

    def is_free() -> bool:
        try:
            with claimed(uuid):
                return True
        except DeviceError:
            return False

    assert until(is_free)

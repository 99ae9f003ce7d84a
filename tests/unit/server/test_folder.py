"""A server's own folder: gone when it ends, and when it was killed, with the next server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from eclip.fleet.config import load_fleet_file
from eclip.fleet.ray import cluster
from eclip.progress import Progress
from eclip.server.folder import own_folder

ROOT = Path(__file__).parents[3]
# Holds a folder with a file in it until it is killed, beside a child as a server has them.
_SERVER = """
import subprocess, sys
from eclip.server.folder import own_folder
with own_folder() as folder:
    (folder / "regions").mkdir()
    (folder / "plan").write_text("a plan")
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    print(child.pid, folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def server(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The process of another server, and its folder."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        child, folder = process.stdout.readline().split()
        try:
            yield process, Path(folder)
        finally:
            process.kill()
            os.kill(int(child), 9)


def test_it_is_gone_when_the_server_ends(temporary: Path) -> None:
    with own_folder() as folder:
        (folder / "plan").touch()
        assert folder.parent == temporary
    assert not list(temporary.iterdir())


def test_the_next_server_removes_what_a_killed_one_left(
    temporary: Path, server: tuple[subprocess.Popen[str], Path]
) -> None:
    process, left = server
    process.kill()
    process.wait()  # its child lives on, as a device process does for a moment
    assert (left / "plan").exists()
    with own_folder() as folder:
        assert list(temporary.iterdir()) == [folder]


def test_the_folder_of_a_server_that_lives_stays(
    server: tuple[subprocess.Popen[str], Path],
) -> None:
    _, theirs = server
    with own_folder() as ours, own_folder() as another:
        assert (theirs / "plan").exists()
        assert ours.exists() and another.exists()
    assert (theirs / "plan").exists()


def test_nothing_else_is_removed(temporary: Path) -> None:
    foreign = temporary / "eclip-server-mine"  # as one might call a folder of one's own
    foreign.mkdir()
    (foreign / "thesis").touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".lock").touch()
    (temporary / "eclip-server-link").symlink_to(elsewhere)
    (temporary / "eclip-server-file").touch()
    (temporary / "eclip-server-tricky").mkdir()
    (temporary / "eclip-server-tricky" / ".lock").symlink_to(elsewhere / ".lock")
    before = sorted(temporary.rglob("*"))
    with own_folder():
        pass
    assert sorted(temporary.rglob("*")) == before


def test_a_folder_of_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = temporary / "eclip-server-theirs"
    theirs.mkdir()
    (theirs / ".lock").touch()
    monkeypatch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
    with own_folder():
        assert theirs.exists()


def test_servers_that_start_at_once_keep_their_folders() -> None:
    failures: list[BaseException] = []

    def start_and_end() -> None:
        try:
            for _ in range(50):
                with own_folder() as folder:
                    (folder / "plan").write_text("a plan")
                    assert (folder / "plan").read_text() == "a plan"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start_and_end) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_ray_on_this_machine_removes_what_a_killed_one_left(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cluster:
        def add_node(self, **_: object) -> None: ...

        def shutdown(self) -> None: ...

    monkeypatch.setattr(cluster, "import_ray", lambda _: None)
    monkeypatch.setitem(sys.modules, "ray.cluster_utils", SimpleNamespace(Cluster=Cluster))
    left = temporary / "eclip-ray-left"
    left.mkdir()
    (left / ".lock").touch()
    file = load_fleet_file(ROOT / "examples" / "fleet-local.toml")
    with own_folder() as of_a_server, cluster.LocalRay(file, Progress()):
        (ours,) = set(temporary.iterdir()) - {of_a_server}
        assert ours.name.startswith("eclip-ray-") and ours != left
    assert not list(temporary.iterdir())

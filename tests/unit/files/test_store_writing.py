"""Writing artefact files: the old file or the new one, never a part, and nobody else's replaced."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from artefacts import ARTEFACTS, PLAN, RUN, TOPOLOGY, TRACE, every_suffix, saved, write
from eclip.core.topology import Topology
from eclip.errors import ArtefactError
from eclip.files import store
from waiting import PATIENCE_S, until

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from eclip.files import store
from eclip.core.topology import Topology

os.{call} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store.save(store.load_builtin("h200", Topology), Path(sys.argv[1]))
"""


@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
def test_crash_while_writing_leaves_the_old_file(tmp_path: Path, call: str) -> None:
    path = saved(tmp_path, TOPOLOGY)
    script = KILLED_WHILE_WRITING.format(call=call)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=False, timeout=PATIENCE_S
    )
    if call == "rename" and done.returncode == 0:
        assert store.load(path) == store.load_builtin("h200", Topology)
        return
    assert done.returncode == -signal.SIGKILL
    assert store.load(path) == TOPOLOGY
    store.save(store.load_builtin("mi50", Topology), path)
    assert store.load(path) == store.load_builtin("mi50", Topology)


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("existing", [True, False])
def test_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, existing: bool
) -> None:
    path = saved(tmp_path, TOPOLOGY) if existing else tmp_path / "new.json"
    before = sorted(tmp_path.iterdir())

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ArtefactError, match="No space left on device") as caught:
        store.save(store.load_builtin("h200", Topology), path)
    assert str(path) in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    assert not existing or store.load(path) == TOPOLOGY


def test_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(TRACE, tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b"dear diary", b"{}", b'{"format": "other", "version": 1, "body": 1}']
)
def test_foreign_file_is_never_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "precious.json"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match="will not replace it"):
        store.save(PLAN, path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("existing", [kind for kind in ARTEFACTS if kind != "plan"])
def test_artefact_of_another_kind_is_never_replaced(tmp_path: Path, existing: str) -> None:
    path = saved(tmp_path, ARTEFACTS[existing])
    with pytest.raises(ArtefactError, match=f"is {existing}, so a plan will not replace it"):
        store.save(PLAN, path)
    assert store.load(path) == ARTEFACTS[existing]


def test_artefact_of_the_same_kind_is_replaced_even_if_damaged_or_older(tmp_path: Path) -> None:
    path = write(tmp_path / "old.json", "plan", {"not": "a plan"}, version=0)
    store.save(PLAN, path)
    assert store.load(path) == PLAN


def test_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, TRACE)
    for path in (tmp_path / "none" / "a.json", file / "a.json", tmp_path / ("a" * 300), tmp_path):
        with pytest.raises(ArtefactError) as caught:
            store.save(TRACE, path)
        assert str(path) in str(caught.value)


@every_suffix
def test_artefact_too_large_to_be_loaded_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(store, "MAX_BYTES", 1000)
    with pytest.raises(ArtefactError):
        store.save(RUN, tmp_path / f"new{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_file_has_the_permissions_that_others_expect(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        path = saved(tmp_path, TRACE)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(umask)


WRITE_OFTEN = """
import sys
from pathlib import Path
from eclip.files import store
from eclip.core.topology import Topology

topology = store.load_builtin(sys.argv[2], Topology)
while not Path(sys.argv[3]).exists():
    store.save(topology, Path(sys.argv[1]))
"""


def test_two_writers_leave_one_whole_file_at_every_moment(tmp_path: Path) -> None:
    topologies = [store.load_builtin(name, Topology) for name in ("h200", "mi50")]
    folder, enough = tmp_path / "folder", tmp_path / "enough"
    folder.mkdir()
    path = saved(folder, topologies[0])
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITE_OFTEN, str(path), topology.name, str(enough)])
        for topology in topologies
    ]
    found = []

    def replaced_often() -> bool:
        found.append(store.load(path))
        return sum(one != two for one, two in itertools.pairwise(found)) >= 30

    try:
        assert until(replaced_often, pause_s=0.0)
    finally:
        enough.touch()
    assert [writer.wait(timeout=PATIENCE_S) for writer in writers] == [0, 0]
    assert all(one in topologies for one in found)
    assert list(folder.iterdir()) == [path]


def test_export_replaces_only_what_carries_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    store.save_export(path, b"<!-- mark --> one", b"<!-- mark -->")
    store.save_export(path, b"<!-- mark --> two", b"<!-- mark -->")
    assert path.read_bytes() == b"<!-- mark --> two"
    path.write_bytes(b"mine")
    with pytest.raises(ArtefactError, match="will not be replaced"):
        store.save_export(path, b"<!-- mark -->", b"<!-- mark -->")
    assert path.read_bytes() == b"mine"
    with pytest.raises(ArtefactError):
        store.save_export(tmp_path / ("a" * 300), b"", b"")

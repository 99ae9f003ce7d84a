"""Output paths are looked at before work, and results that cannot be written are rescued."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from artefacts import PLAN, TOPOLOGY, saved
from comparisons import comparison
from eclip.core.plan import Plan
from eclip.core.topology import Topology
from eclip.errors import ArtefactError
from eclip.files import outputs, store

MARK = b"eclip report"


def refusal(path: Path, what: type[Topology] | type[Plan] | bytes = Topology) -> str:
    with pytest.raises(ArtefactError) as caught:
        outputs.check_output(path, what)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths_that_can_be_written_are_not_touched(here: Path) -> None:
    outputs.check_output(Path("new.json"), Topology)
    outputs.check_output(Path("new.html"), MARK)
    outputs.check_folder(Path("new/deeper/folder"))
    outputs.check_folder(here)
    assert list(here.iterdir()) == []
    path = saved(here, TOPOLOGY)
    outputs.check_output(path, Topology)
    Path("link.json").symlink_to(path)
    outputs.check_output(Path("link.json"), Topology)


def test_paths_that_cannot_be_written_are_named(here: Path) -> None:
    assert "there is no folder missing" in refusal(Path("missing/plan.json"))
    assert "is a folder" in refusal(here)
    assert "is a folder" in refusal(Path())
    assert "- is not a file name" in refusal(Path("-"))
    assert "name too long" in refusal(Path("x" * 300)).lower()
    Path("file").write_text("mine")
    assert "no eclip file" in refusal(Path("file"))
    assert "not a file of this kind" in refusal(Path("file"), MARK)
    assert "cannot write" in refusal(Path("file/plan.json"))
    assert "is topology, so a plan" in refusal(saved(here, TOPOLOGY), Plan)


def test_folders_that_cannot_be_used_are_named(here: Path) -> None:
    Path("file").write_text("mine")
    for path, word in (("file", "is a file"), ("file/deeper", "is a file"), ("-", "not a folder"),
                       ("x" * 300, "too long"), (f"new/{'x' * 300}", "too long")):  # fmt: skip
        with pytest.raises(ArtefactError, match=word):
            outputs.check_folder(Path(path))


def test_full_disk_and_missing_permission_are_known_before(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_blocks=100, f_bavail=0, f_files=100, f_ffree=10)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert "the disk is full" in refusal(Path("new.json"))
    with pytest.raises(ArtefactError, match="the disk is full"):
        outputs.check_folder(Path("new"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "no permission" in refusal(Path("new.json"))


def test_nothing_is_rescued_where_all_is_well(here: Path) -> None:
    assert outputs.save_or_rescue(PLAN, Path("plan.json")) is None
    assert outputs.append_or_rescue(comparison({"shared": 1.0}), Path("r.jsonl")) is None
    assert sorted(path.name for path in here.iterdir()) == ["plan.json", "r.jsonl"]


def test_result_goes_beside_what_is_in_the_way(here: Path) -> None:
    Path("plan.json.gz").write_text("came meanwhile")
    trouble = outputs.save_or_rescue(PLAN, Path("plan.json.gz"))
    assert trouble is not None and trouble.path == Path("plan.rescued-1.json.gz")
    assert "the result is in plan.rescued-1.json.gz" in str(trouble)
    assert trouble.exit_code == 1
    assert store.load(trouble.path, Plan) == PLAN
    again = outputs.save_or_rescue(PLAN, Path("plan.json.gz"))
    assert again is not None and again.path == Path("plan.rescued-2.json.gz")


def test_result_goes_to_the_current_folder_where_its_own_is_gone(here: Path) -> None:
    trouble = outputs.save_or_rescue(PLAN, Path("gone/plan.json"))
    assert trouble is not None and trouble.path == here / "plan.rescued-1.json"
    assert store.load(trouble.path, Plan) == PLAN
    long = outputs.save_or_rescue(PLAN, Path(f"{'x' * 300}.json"))
    assert long is not None and long.path is not None and long.path.exists()
    added = outputs.append_or_rescue(comparison({"shared": 1.0}), Path("gone/r.jsonl"))
    assert added is not None and added.path is not None
    assert len(store.load_results(added.path).comparisons) == 1


def test_result_goes_to_the_temporary_folder_where_the_disk_is_full(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    make = tempfile.mkstemp
    rooms = [other]

    def full_elsewhere(dir: Path, prefix: str, suffix: str) -> tuple[int, str]:
        if dir not in rooms:
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(dir=dir, prefix=prefix, suffix=suffix)

    monkeypatch.setattr(tempfile, "mkstemp", full_elsewhere)
    trouble = outputs.save_or_rescue(PLAN, Path("plan.json"))
    assert trouble is not None and trouble.path == other / "plan.rescued-1.json"
    assert "No space left on device" in str(trouble)
    assert store.load(trouble.path, Plan) == PLAN
    rooms.clear()
    nowhere = outputs.save_or_rescue(PLAN, Path("plan.json"))
    assert nowhere is not None and nowhere.path is None
    assert list(here.iterdir()) == []

"""``eclip profile`` keeps what it has, names what hangs or crashes, and goes on with the rest."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eclip.capture import measuring
from eclip.cli import profile as command
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.errors import DeviceError
from eclip.files import store
from eclip.models.library import file_of
from eclip.models.synthetic import synthetic_profile
from eclip.progress import Progress
from waiting import PATIENCE_S

# As eclip.capture.profiler, each model with a fate of its own. Its arguments: GPU, seconds of
# energy, full or quick, folder, models.
CHILD = """
import os, signal, sys, time
from pathlib import Path
folder, keys = Path(sys.argv[4]), sys.argv[5:]
(folder / "children").open("a").write(" ".join(keys) + "\\n")
if "early" in keys[0]:
    sys.exit("eclip: other processes use GPU 0")
def tell(word):
    print(word, os.fstat(2).st_size, flush=True)
tell("ready")
for key in keys:
    print("a model's own words", flush=True)
    if "silent" not in key:
        sys.stderr.write("x" * 200_000 + "\\n")
    if "crash" in key:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "fails" in key:
        sys.exit("a traceback\\neclip: it does not fit into memory")
    if "silent" in key:
        sys.exit(3)
    if "hangs" in key:
        time.sleep(10_000)
    (folder / f"{key.replace(':', '-')}.json.gz").write_bytes((folder / "sample").read_bytes())
    sys.stderr.flush()
    tell(f"done {key}")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    (tmp_path / "sample").write_bytes(b"a profile")
    monkeypatch.setattr(measuring, "_CHILD", (sys.executable, str(script)))
    known = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *package: name if name == "torch" else known(name, *package),
    )
    return tmp_path


def profile(folder: Path, *keys: str, limit: float = 60.0, ncu: bool = False) -> None:
    command.profile(list(keys), folder=folder, gpu=0, energy_seconds=0.0, ncu=ncu, limit=limit)


def test_models_that_crash_or_fail_are_named_and_the_others_are_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DeviceError, match=r"^not profiled: crash:1, fails:1, silent:1; "):
        profile(folder, "good:1", "crash:1", "fails:1", "fine:2", "silent:1", "last:1")
    assert sorted(path.name for path in folder.glob("*.gz")) == [
        *("fine-2.json.gz", "good-1.json.gz", "last-1.json.gz")
    ]
    said = " ".join(capsys.readouterr().err.split())
    assert "crash:1: the measuring process died of SIGSEGV" in said
    assert "fails:1: it does not fit into memory" in said
    assert "silent:1: the measuring process ended with exit code 3" in said
    assert (folder / "children").read_text().splitlines() == [
        "good:1 crash:1 fails:1 fine:2 silent:1 last:1",
        "fails:1 fine:2 silent:1 last:1",
        "fine:2 silent:1 last:1",
        "last:1",
    ]


def test_model_that_hangs_is_stopped_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = measuring._said

    def patient(word: str, lines: Any, seconds: float) -> int | None:
        """Two seconds are long enough for the model that hangs, however busy the machine is."""
        assert seconds == 2.0 or word == "ready"
        return said(word, lines, 0.5 if word == "done hangs:1" else PATIENCE_S)

    monkeypatch.setattr(measuring, "_said", patient)
    with pytest.raises(DeviceError, match="not profiled: hangs:1;"):
        profile(folder, "good:1", "hangs:1", "fine:1", limit=2.0)
    assert "hangs:1 took more than 2 s and was stopped" in capsys.readouterr().err
    assert (folder / "fine-1.json.gz").exists()


def test_reason_that_concerns_all_models_is_said_once(folder: Path) -> None:
    with pytest.raises(DeviceError, match=r"^no model can be measured: other processes use GPU 0$"):
        profile(folder, "early:1", "good:1")
    assert len((folder / "children").read_text().splitlines()) == 1


def test_models_that_are_done_are_not_measured_again(folder: Path) -> None:
    profile(folder, "good:1")
    (folder / "children").unlink()
    profile(folder, "good:1", "fine:1")
    assert (folder / "children").read_text() == "fine:1\n"


def test_traffic_is_counted_one_by_one_where_counting_all_at_once_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, h200: Topology
) -> None:
    keys = good, bad, fine = [ModelKey(name, 1) for name in ("good", "bad", "fine")]
    for key in keys:
        made = synthetic_profile(1, 3, h200, key.name, key.batch)
        made = msgspec.structs.replace(made, dram_bytes=(0,) * 3, l2_bytes=(0,) * 3)
        store.save(made, file_of(folder, key))
    asked: list[list[ModelKey]] = []
    saved: list[ModelKey] = []
    warned: list[str] = []

    class Heard(Progress):
        def warn(self, message: str) -> None:
            warned.append(message)

    def count(profiles: list[Profile], gpu: int, seconds: float) -> list[Profile]:
        asked.append([one.model for one in profiles])
        if any(one.model == bad for one in profiles):
            raise DeviceError("ncu failed")
        return profiles

    def save(value: Any, path: Path) -> None:
        saved.append(value.model)

    monkeypatch.setattr(measuring, "with_traffic", count)
    monkeypatch.setattr(store, "save", save)
    failed = measuring.measure_profiles(keys, folder, progress=Heard())
    assert failed == [bad]
    assert asked == [keys, [good], [bad], [fine]]
    assert saved == [good, fine]
    assert not (folder / "children").exists()  # nothing was measured anew
    kept = [
        f"{file_of(folder, key)} exists and is kept; remove it to measure again" for key in keys
    ]
    assert warned == [*kept, "bad:1 has no memory traffic: ncu failed"]

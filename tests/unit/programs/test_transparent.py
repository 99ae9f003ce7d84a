"""Commands under libeclip: signals reach them, their end is awaited, odd paths can be preloaded."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from eclip.cli import record as record_command
from eclip.cli.screen import interrupt
from eclip.core.topology import Topology
from eclip.errors import DeviceError, UsageError
from eclip.files import store
from eclip.programs import transparent
from eclip.programs.table import WorkersBy, record_table
from eclip.programs.transparent import (
    AMD,
    COUNTERS,
    NVIDIA,
    CommandOutcome,
    Vendor,
    run_under,
    vendor_of,
)
from waiting import until

# A shell that starts another process and waits for it: both have to get the signal.
# Alone it ends after the test would have been stopped.
WAITING = "trap 'kill $! 2> /dev/null; echo told > told; exit 7' INT TERM; "
WAITING += "sleep 3600 & touch ready; wait"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    for vendor in (NVIDIA, AMD):
        (tmp_path / vendor.library).touch()
    monkeypatch.setattr(transparent, "library", lambda vendor: tmp_path / vendor.library)
    return tmp_path


def signal_when_ready(number: int) -> threading.Thread:
    def send() -> None:
        until(Path("ready").exists)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_passed_on_to_the_group_and_the_end_awaited(number: int) -> None:
    before = signal.getsignal(number)
    sender = signal_when_ready(number)
    outcome = run_under(["bash", "-c", WAITING], b"")
    sender.join()
    assert (outcome.code, outcome.signal) == (7, number)
    assert Path("told").exists()
    assert signal.getsignal(number) is before


def test_command_that_dies_of_a_signal_ends_as_a_shell_says() -> None:
    sender = signal_when_ready(signal.SIGINT)
    script = "import pathlib, signal, time; signal.signal(2, signal.SIG_DFL); "
    script += "pathlib.Path('ready').touch(); time.sleep(3600)"
    outcome = run_under([sys.executable, "-c", script], b"")
    sender.join()
    assert outcome.code == 130


def test_interrupted_record_ends_and_leaves_no_folder(here: Path) -> None:
    sender = signal_when_ready(signal.SIGTERM)
    with pytest.raises(interrupt.Interrupt) as stop:
        record_command.record(
            ["bash", "-c", WAITING], models=["a:1"], sizes="132", folder=Path("profiles/new")
        )
    sender.join()
    assert interrupt.exit_code(stop.value) == 143
    assert not Path("profiles").exists()


def test_failed_record_leaves_no_folder() -> None:
    with pytest.raises(DeviceError, match="ended with status 1"):
        record_command.record(["false"], models=["a:1"], sizes="132", folder=Path("profiles"))
    assert not Path("profiles").exists()


def test_library_whose_path_has_blanks_is_preloaded_by_a_link(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = here / "my env: new" / "libeclip.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(transparent, "library", lambda _: library)
    run_under(["bash", "-c", 'readlink -f "$LD_PRELOAD" > where; echo "$LD_PRELOAD" > name'], b"")
    assert Path("where").read_text() == f"{library}\n"
    assert " " not in Path("name").read_text()
    monkeypatch.setattr("tempfile.tempdir", str(library.parent))
    with pytest.raises(UsageError, match="TMPDIR"):
        run_under(["true"], b"")


@pytest.mark.parametrize(
    ("topology", "vendor", "library", "queues"),
    [
        ("h200", NVIDIA, "libeclip.so", "CUDA_DEVICE_MAX_CONNECTIONS=32"),
        ("mi50", AMD, "libeclip_hip.so", "GPU_MAX_HW_QUEUES=8"),
    ],
)
def test_library_and_queues_are_those_of_the_plans_vendor(
    here: Path, topology: str, vendor: Vendor, library: str, queues: str
) -> None:
    known = store.load_builtin(topology, Topology)
    assert vendor_of(known) is vendor
    table = record_table(known, known.units, WorkersBy.STREAM)
    run_under(["bash", "-c", "env > seen"], table, vendor=vendor)
    seen = Path("seen").read_text().splitlines()
    assert queues in seen
    assert f"LD_PRELOAD={here / library}" in seen


def test_what_was_placed_is_counted() -> None:
    none = dict.fromkeys(COUNTERS, 0)
    assert (CommandOutcome(0, {}).launches, CommandOutcome(0, {}).placed) == (0, 0)
    seen = CommandOutcome(0, {1: none | {"launches": 5}, 2: none | {"graph_launches": 2}})
    assert (seen.launches, seen.placed) == (7, 0)
    planned = CommandOutcome(0, {1: none | {"launches": 5, "planned": 3, "graph_planned": 1}})
    assert planned.placed == 4

"""`make gpu-test` leaves no test out: what part 1 does not run, a later part runs alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_test", ROOT / "tools" / "gpu_test.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_runs_beside_others_or_alone_or_in_both_ways(tool: ModuleType) -> None:
    beside, *alone = ([Path(job[0]).name for job in tool.jobs_of(part)] for part in tool.PARTS)
    second, third = alone
    assert not set(second) & set(third)
    assert third[-1] == "conformance"
    files = {path.name: path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    for name, text in files.items():
        wholly_alone = "\npytestmark = pytest.mark.alone\n" in text
        assert (name in beside) != wholly_alone
        assert (name in second + third) == ("mark.alone" in text)


def test_pieces_of_a_file_are_all_of_it(tool: ModuleType) -> None:
    pieces = [job[-1] for job in tool.jobs_of("1") if Path(job[0]).name == "test_closing.py"]
    assert pieces == ["1/4", "2/4", "3/4", "4/4"]


def test_a_part_that_does_not_exist_is_refused(tool: ModuleType) -> None:
    for words in (["4"], ["nosuch"], ["1", "2"]):
        with pytest.raises(SystemExit, match="name a part"):
            tool.main(words)


def test_a_host_that_lacks_something_is_refused_before_anything_is_left_out(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "run", None)
    monkeypatch.setattr(tool, "environment", lambda: {"PYTHONPATH": ""})
    assert tool.main(["lanes"]) == 2
    assert capfd.readouterr().err.startswith("gpu-test: ModuleNotFoundError")


# It waits in Python, or like one that waits for the driver: it hears no interrupt.
_IN_PYTHON = "time.sleep(600)"
_IN_A_DRIVER = "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"


@pytest.mark.parametrize("waits", [_IN_PYTHON, _IN_A_DRIVER])
def test_a_file_that_hangs_is_stopped_and_named_in_one_line(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    monkeypatch.setattr(tool, "LIMIT_S", 2.0)
    monkeypatch.setattr(tool, "LEAVE_S", 1.0)
    hangs = tmp_path / "test_hangs.py"
    hangs.write_text(f"import signal, time\n\ndef test_it():\n    {waits}\n")
    well, line = tool.run([str(hangs)])
    assert not well
    assert line.startswith("STOPPED at its limit of 2 s: test_hangs.py, ")
    assert "\n" not in line


def test_a_file_that_ends_is_not_stopped(tool: ModuleType, tmp_path: Path) -> None:
    for body, wanted in (("pass", True), ("assert 0", False)):
        file = tmp_path / "test_ends.py"
        file.write_text(f"def test_it():\n    {body}\n")
        well, line = tool.run([str(file)])
        assert well == wanted
        assert line.startswith("ends: " if wanted else "FAILED with status 1: ")


def test_a_whole_file_may_take_as_long_as_its_pieces(tool: ModuleType) -> None:
    piece = tool.jobs_of("1")[0]
    (whole,) = tool.jobs_of("closing")
    assert Path(piece[0]) == Path(whole[0])
    assert tool.limit_of(whole) == 4 * tool.limit_of(piece) == 4 * tool.LIMIT_S

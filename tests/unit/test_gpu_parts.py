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

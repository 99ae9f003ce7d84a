"""``eclip exec`` and ``eclip record`` called wrongly: one line, the right exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eclip.cli import main
from eclip.errors import DeviceError
from eclip.programs import transparent

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["eclip", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code is None or isinstance(stop.value.code, int)
        return stop.value.code or 0, capsys.readouterr().err

    return call


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that is there; these commands end before anything needs more of it."""
    path = tmp_path / "libeclip.so"
    path.touch()
    monkeypatch.setattr(transparent, "library", lambda _: path)
    return path


def assert_refused(outcome: tuple[int, str], *words: str, code: int = 2) -> None:
    lines = outcome[1].strip().splitlines()
    assert outcome[0] == code
    assert len(lines) == 1
    assert lines[0].startswith("eclip: ")
    for word in words:
        assert word in lines[0]


@pytest.fixture
def plan(run: Run) -> Path:
    assert run("plan", "alexnet:8,vgg19:8", "-o", "plan.json")[0] == 0
    return Path("plan.json")


def test_a_damaged_plan_is_refused(run: Run, plan: Path) -> None:
    plan.write_bytes(plan.read_bytes()[:-20])
    assert_refused(run("exec", "--plan", plan, "--", "true"), "plan.json", "damaged")


def test_a_modelled_plan_is_refused(run: Run) -> None:
    assert run("plan", "alexnet:3", "-o", "plan.json")[0] == 0
    outcome = run("exec", "--plan", "plan.json", "--", "true")
    assert_refused(outcome, "modelled", "eclip record")


def test_time_slicing_is_refused(run: Run) -> None:
    assert run("plan", "alexnet:8", "--policy", "timeslice", "-o", "plan.json")[0] == 0
    outcome = run("exec", "--plan", "plan.json", "--", "true")
    assert_refused(outcome, "timeslice", "one process per model", "choose another policy")


def test_processes_are_refused(run: Run) -> None:
    assert run("plan", "alexnet:8", "--policy", "mps", "--shares", 60, "-o", "plan.json")[0] == 0
    outcome = run("exec", "--plan", "plan.json", "--", "true")
    assert_refused(outcome, "mps", "one process per model", "choose another policy")


def test_a_library_that_is_not_built_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("eclip.programs.transparent.resources.files", lambda _: tmp_path)
    with pytest.raises(DeviceError, match="make native"):
        transparent.library()


def test_another_number_of_hardware_queues_is_refused(
    run: Run, plan: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    outcome = run("exec", "--plan", plan, "--", "true")
    assert_refused(outcome, "CUDA_DEVICE_MAX_CONNECTIONS is 8", "32")


def test_a_command_that_does_not_exist_is_named(run: Run, plan: Path, library: Path) -> None:
    outcome = run("exec", "--plan", plan, "--", "./no-such-thing")
    assert_refused(outcome, "no-such-thing", "No such file")


def test_an_unknown_way_to_tell_workers_apart_is_refused(run: Run, plan: Path) -> None:
    outcome = run("exec", "--plan", plan, "--workers", "planet", "--", "true")
    assert_refused(outcome, "planet", "thread, stream")


@pytest.mark.parametrize(
    ("sizes", "word"), [("many", "list of numbers"), ("33", "33 units"), ("0", "0 units")]
)
def test_sizes_that_mean_nothing_are_refused(
    run: Run, library: Path, sizes: str, word: str
) -> None:
    assert_refused(run("record", "--sizes", sizes, "--as", "a:1", "--", "true"), word)


def test_a_worker_needs_a_model_and_a_batch(run: Run) -> None:
    assert_refused(run("record", "--as", "bert", "--", "true"), "'bert'", "model:batch")


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        ({}, "nothing was placed: libeclip saw no kernel launch"),
        ({"launches": 9}, "nothing was placed: libeclip saw 9 launches"),
        ({"launches": 9, "planned": 9}, ""),
    ],
)
def test_command_of_which_nothing_was_placed_is_told(
    run: Run, plan: Path, monkeypatch: pytest.MonkeyPatch, counters: dict[str, int], words: str
) -> None:
    counts = {1: dict.fromkeys(transparent.COUNTERS, 0) | counters} if counters else {}
    outcome = transparent.CommandOutcome(3, counts)
    monkeypatch.setattr("eclip.cli.exec.run_under", lambda *_, **__: outcome)
    code, said = run("exec", "--plan", plan, "--", "true")
    assert code == 3
    assert words in said if words else said == ""
    assert len(said.splitlines()) == bool(words)

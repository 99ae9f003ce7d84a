"""The bench of goodput, rehearsed with fronts that serve up to a known load."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.serving import goodput
from lab.serving.goodput import WAYS, Results, first_load, run
from lab.support.beside import misses, part_of_free
from lab.support.goodput_tables import print_beside, print_goodput
from lab.support.kept import add_rows, read_rows
from lab.support.knee import HALVINGS, LEAST_LOAD, MOST_LOAD, STEP, find_knee
from lab.support.offered import MIXES, MOST_OF_BOUND, Service, arrivals_of, services_of

RESOLUTION = STEP ** (0.5**HALVINGS)


def up_to(knee: float, seen: list[float]) -> Callable[[float], float]:
    """Serves all up to a load, then ever fewer."""

    def attain(load: float) -> float:
        seen.append(load)
        return min(1.0, 0.989 * knee / load) if load > knee else 1.0

    return attain


@pytest.mark.parametrize("knee", [0.1, 0.9, 2.3, 5.0])
@pytest.mark.parametrize("first", [0.5, 1.0, 3.0])
def test_knee_is_found_from_wherever_the_steps_begin(knee: float, first: float) -> None:
    seen: list[float] = []
    assert knee / RESOLUTION <= find_knee(up_to(knee, seen), first) <= knee
    assert len(set(seen)) == len(seen)  # no load is paid for twice


@pytest.mark.parametrize("first", [0.8, 1.0, 1.4])
def test_a_first_load_near_the_knee_saves_runs(first: float) -> None:
    seen: list[float] = []
    find_knee(up_to(1.0, seen), first)
    assert len(seen) == 2 + HALVINGS


def test_a_knee_beyond_all_loads_ends_the_steps() -> None:
    seen: list[float] = []
    assert find_knee(up_to(0.0, seen), 1.0) == 0
    assert LEAST_LOAD <= min(seen) < LEAST_LOAD * STEP
    seen.clear()
    assert find_knee(up_to(99.0, seen), 1.0) == max(seen)
    assert MOST_LOAD / STEP < max(seen) <= MOST_LOAD


def test_arrivals_keep_their_rates_and_are_the_same_but_shorter_at_a_higher_load() -> None:
    services = [Service("a", 2.0, 10.0, (1,), 0.5), Service("b", 0.5, 2.5, (1,), 0.5)]
    few, many = (arrivals_of(services, load, 20.0 / load) for load in (0.5, 1.0))
    assert [one.name for _, one in few] == [one.name for _, one in many]
    assert [at_s for at_s, _ in few] == pytest.approx([2 * at_s for at_s, _ in many])
    for service, rate_rps in zip(services, (250, 1000), strict=True):
        count = sum(one is service for _, one in many)
        assert count / 20 == pytest.approx(rate_rps, rel=0.05)


def test_services_share_the_device_evenly_and_their_batches_fit_their_bounds() -> None:
    services = services_of("six", 5.0)
    assert sum(one.rate_rps(1.0) * one.rest_ms for one in services) == pytest.approx(1e3)
    for one in services:
        assert one.batches[0] == 1
        assert one.bound_ms == pytest.approx(5 * one.rest_ms)
    assert MOST_OF_BOUND < 1
    assert any(8 in one.batches for one in services)


class Steady:
    """A front whose servers serve up to a load."""

    def __init__(self, knee: float, services: object) -> None:
        self._attain = up_to(knee, [])

    def rest_ms(self) -> dict[str, float]:
        return dict.fromkeys(MIXES["three"], 0.1)

    def run(self, load: float, seconds: float) -> dict[str, Any]:
        return {"load": load, "attained": self._attain(load), "generator_late_ms": 0.0}


@pytest.fixture
def rehearse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Mapping[str, float]], None]:
    """Runs the bench on servers with these knees; a way without one fails."""
    supervisor = SimpleNamespace(services=SimpleNamespace(deployed=SimpleNamespace(generation=1)))

    def rehearsed(knees: Mapping[str, float]) -> None:
        class Servers(float):
            served = SimpleNamespace(supervisor=supervisor)

        @contextlib.contextmanager
        def started(
            services: object, way: str, *_: object
        ) -> Iterator[tuple[float, dict[str, Any]]]:
            if way not in knees:
                raise RuntimeError(f"no {way} today")
            yield Servers(knees[way]), {}

        monkeypatch.setattr(goodput, "started", started)
        ways = ["eclip", "streams", "priorities", "mps"]
        run(tmp_path, device="sim", mixes=["three"], bounds=[5.0, 3.0], ways=ways, seconds=0.0)

    monkeypatch.setattr(goodput, "Front", Steady)
    monkeypatch.setattr(goodput, "SETTLE_S", 0.0)
    return rehearsed


def test_a_way_that_fails_leaves_an_error_and_only_that_is_measured_again(
    rehearse: Callable[[Mapping[str, float]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rehearse({"eclip": 2.0, "priorities": 1.0})
    rows = read_rows(tmp_path / "goodput-sim.jsonl")
    assert [row["key"]["way"] for row in rows] == 2 * ["eclip", "streams", "priorities"]
    assert rows[1]["error"] == "RuntimeError: no streams today"
    for row, knee in ((rows[0], 2.0), (rows[2], 1.0)):
        assert knee / RESOLUTION <= row["goodput"] <= knee
        assert row["start_s"] >= 0 <= row["sweep_s"]
    said = capsys.readouterr().out
    assert said.count("mps is left out") == 1
    assert "streams: RuntimeError: no streams today" in said

    rehearse({"eclip": 9.9, "streams": 1.6, "priorities": 9.9})
    again = read_rows(tmp_path / "goodput-sim.jsonl")[len(rows) :]
    assert [row["key"]["way"] for row in again] == 2 * ["streams"]
    table = capsys.readouterr().out.split("three, bound 5  ")[1].split("\n")[0]
    assert table.split()[3] == "1.26"  # eclip ÷ streams, of knees found to 2.6%


class Stalled(Steady):
    """The first try of every load finds the generator late, and so everybody."""

    def __init__(self, knee: float, services: object) -> None:
        super().__init__(knee, services)
        self._tried: set[float] = set()

    def run(self, load: float, seconds: float) -> dict[str, Any]:
        if load in self._tried:
            return super().run(load, seconds)
        self._tried.add(load)
        return {"load": load, "attained": 0.9, "generator_late_ms": 2.0}


def test_a_load_that_the_generator_missed_is_measured_once_more(
    rehearse: Callable[[Mapping[str, float]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(goodput, "Front", Stalled)
    rehearse({"eclip": 2.0, "streams": 2.0, "priorities": 2.0})
    row = read_rows(tmp_path / "goodput-sim.jsonl")[0]
    assert 2.0 / RESOLUTION <= row["goodput"] <= 2.0
    loads = [run["load"] for run in row["runs"]]
    assert loads[::2] == loads[1::2]  # each twice
    assert all(run["attained"] == 0.9 for run in row["runs"][::2])


def test_a_row_is_kept_as_soon_as_it_is_there(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.jsonl")
    found = {"goodput": 1.0, "start_s": 0.0, "sweep_s": 0.0}
    results.attempt(lambda: found, mix="six", bound=5.0)
    (row,) = read_rows(tmp_path / "x.jsonl")
    assert Results(tmp_path / "x.jsonl").find(mix="six", bound=5.0) == row
    assert results.find(mix="six", bound=3.0) is None


def test_nothing_begins_that_should_end_too_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(tmp_path / "x.jsonl", time.monotonic() + goodput.USUAL_S - 1)
    results.attempt(dict, mix="six", bound=5.0)
    assert results.rows == []
    assert "left out" in capsys.readouterr().out
    quick = {"key": {"mix": "three", "bound": 5.0}, "start_s": 1.0, "sweep_s": 2.0}
    add_rows(tmp_path / "x.jsonl", [quick])
    results = Results(tmp_path / "x.jsonl", time.monotonic() + goodput.USUAL_S - 1)
    results.attempt(lambda: {"start_s": 0.0, "sweep_s": 0.0}, mix="six", bound=5.0)
    assert len(results.rows) == 2


def test_a_sweep_begins_where_the_mix_was_found_last() -> None:
    rows = [
        {"key": {"mix": mix, "bound": bound, "way": "eclip"}, "goodput": goodput}
        for mix, bound, goodput in (
            ("six", 5.0, 2.0), ("six", 3.0, 1.5), ("five", 5.0, 7.0), ("six", 3.0, 0.0),
        )
    ]  # fmt: skip
    assert first_load(rows, "six", 5.0) == 2.0
    assert first_load(rows, "six", 3.0) == 1.5
    assert first_load(rows, "six", 10.0) == 1.5
    assert first_load(rows, "four", 5.0) == 1.0


def test_table_says_what_makes_a_number_worth_less(capsys: pytest.CaptureFixture[str]) -> None:
    missed = {"load": 3.0, "attained": 0.9}
    ways: list[tuple[str, float, float, dict[str, Any]]] = [
        ("eclip", 3.0, 0.4, {"runs": [missed | {"generator_late_ms": 0.1}]}),
        ("streams", 2.0, 0.6, {"runs": [missed | {"generator_late_ms": 0.3}]}),
        ("mps", 1.5, 0.4, {"runs": [], "servers": 6, "mps_clients": 5}),
    ]
    rows = [
        {"key": {"mix": "six", "bound": 5.0, "way": way}, "goodput": found}
        | {"bounds_ms": {"a": 1.0, "b": 40.0}, "rest_ms": {"a": rest_ms, "b": 3.0}}
        | more
        for way, found, rest_ms, more in ways
    ]
    print_goodput(rows, list(WAYS))
    said = capsys.readouterr().out
    assert "1.50         2.00" in said
    remarks = "streams: a takes 60% of its bound at rest; streams: generator late; mps: 5 of 6"
    assert said.endswith(f"  {remarks} servers under MPS\n\n")


def beside(**other: float) -> dict[str, Any]:
    return {
        "key": {"mix": "six", "bound": 5.0}, "load": 1.0, "busy_share": 0.5, "attained_alone": 1.0,
        "attained": 0.995, "worst": 0.99, "alone_rps": 200.0, "beside_rps": 91.0, **other,
    }  # fmt: skip


def test_background_is_held_against_what_services_leave() -> None:
    assert part_of_free(beside()) == pytest.approx(91 / 200 / 0.5)
    assert misses(beside()) == []
    assert misses(beside(beside_rps=89.0)) == ["background"]
    assert misses(beside(busy_share=0.6, beside_rps=73.0)) == []
    assert misses(beside(attained=0.98)) == ["bounds"]


def test_background_has_a_table_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"key": {"mix": "five", "bound": 5.0}, "error": "no room"}
    print_beside([beside(beside_rps=80.0), failed], 0.6)
    six, five = capsys.readouterr().out.splitlines()[-3:-1]
    assert six.split()[-3:] == ["0.400", "0.80", "background"]
    assert five.endswith("no room")

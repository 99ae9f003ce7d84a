"""A visit to a GPU: what fits, what is done already, and what its tables say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from eclip.core.model_key import ModelKey
from eclip.core.plan import Lanes, Processes
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.cuda.processes.child import Job
from eclip.errors import DeviceError
from eclip.models.library import find_profile
from eclip.planner.case import find_calibration, find_topology
from eclip.sim.device import SimDevice

sys.path.insert(0, str(Path(__file__).parents[3]))

from lab.gpu import visit
from lab.support import deaths, promises
from lab.support.always_busy import run_always_busy
from lab.support.bounded import factors, pick
from lab.support.contenders import CLAIMED, KNOWN
from lab.support.effort import BEGIN_S, Effort, Task, expected_s, measured_s
from lab.support.measuring import run_task
from lab.support.pairs import PAIRS
from lab.support.promises import Table
from lab.support.replayed import replay
from lab.support.stages import Part, done_parts, fitting, note_done, scaled, stages
from lab.support.workshop import Bench, Shelf

MS = 1_000_000


def rows_of(way: str, ratio: float, background: float, **more: Any) -> dict[str, Any]:
    found = {
        "requests": 1000,
        "latency": {"p99_ms": ratio},
        "alone": {"p99_ms": 1.0},
        "excess": {"p99_ms": ratio - 1},
        "p50_ratio": {"value": 1.0},
        "p99_ratio": {"value": ratio},
    }
    row = {
        "stage": "main",
        "pair": "bert+vgg",
        "models": ["bert:1", "vgg19:32"],
        "load": 0.35,
        "shape": "poisson",
        "floor": 0.0,
        "busy_cores": False,
        "way": way,
        "busy_share": 0.35,
        "services": [found | more.pop("service", {})],
        "background": background,
        "background_rps": 100 * background,
        "background_over_rest": background / 0.65,
        "background_gain_u": (background - 0.65) / 0.35,
        "idle_cost": 0.01,
        "longest_pause_ms": 3.0,
        "why": "yields",
    }
    return row | more


# --- Time -------------------------------------------------------------------------------------


def test_every_part_names_pairs_and_ways_that_exist_and_none_twice() -> None:
    parts = [part for each in stages().values() for part in each]
    assert len({part.name for part in parts}) == len(parts)
    tasks = [part.task for part in parts if part.task is not None]
    assert {task.pair for task in tasks} <= set(PAIRS)
    assert {way for task in tasks for way in (*task.ways, *(task.later_ways or ()))} <= set(KNOWN)
    swept = {task.pair for task in tasks if task.stage in ("main", "more", "decode")}
    assert len(swept) >= 12
    at_all = [task for task in tasks if {0.2, 0.35, 0.6} <= set(task.loads)]
    assert len(at_all) == 4 and all("MPS 50" in task.ways_at(0.2) for task in at_all)


def test_a_window_has_as_many_requests_as_asked_within_limits() -> None:
    effort = Effort(requests=1000, rounds=2, least_s=0.5, most_s=2.0)
    assert effort.window(500).seconds == pytest.approx(1.05)
    assert effort.window(5000).seconds == 0.5
    assert effort.window(10).seconds == 2.0
    assert effort.brief_window(500).seconds < effort.window(500).seconds


def test_more_ways_take_longer_and_captures_are_paid_once() -> None:
    few = Task("bert+vgg", (0.35,), ("yield d2",))
    many = Task("bert+vgg", (0.35,), ("yield d2", "streams", "bound 1.5"))
    assert measured_s(many, 0.35, lambda _: 1.0) > measured_s(few, 0.35, lambda _: 1.0)
    found = expected_s([few, many], lambda _: 1.0, lambda _: True, lambda *_: False)
    again = expected_s(
        [few], lambda _: 1.0, lambda _: True, lambda *_: True, PAIRS["bert+vgg"].models
    )
    assert found[few] > again[few]
    prepared = expected_s([many], lambda _: 1.0, lambda _: True, lambda *_: True)
    searching = expected_s([many], lambda _: 1.0, lambda _: True, lambda *_: False)
    assert searching[many] > prepared[many]


def test_the_next_part_is_the_first_that_is_left_and_fits(tmp_path: Path) -> None:
    parts = [Part("together", mix=name) for name in ("a", "b", "c")]
    expected = {"together: a": 50.0, "together: b": 100.0, "together: c": 20.0}
    assert done_parts(tmp_path) == {}
    note_done(tmp_path, parts[0], 47.26)
    done = done_parts(tmp_path)
    assert done == {"together: a": 47.3}
    assert fitting(parts, expected, done, 200) is parts[1]
    assert fitting(parts, expected, done, 30) is parts[2]
    assert fitting(parts, expected, done, 10) is None


def test_a_rehearsal_has_less_of_everything() -> None:
    (part, *_) = stages()["main"]
    assert part.task is not None
    small = scaled(part, 0.1).task
    assert small is not None and small.effort.requests == 100
    assert scaled(part, 1.0) is part
    assert scaled(part, 0.1).name == part.name


def test_every_part_fits_into_a_call_and_all_but_the_claims_into_four(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = visit.parse([str(tmp_path), "--plan"])
    visit.show_plan(visit.parts_of(options), visit.shelf_of(options))
    said = capsys.readouterr().out
    assert "main: bert+vgg 0.35/0.2/0.6" in said
    call_s = 60 * options.minutes - BEGIN_S
    found = visit.reckoned(visit.parts_of(options), visit.shelf_of(options))
    assert max(found.values()) < call_s
    assert sum(found[name] for name in found if not name.startswith("claims")) < 4 * call_s


def test_every_p99_that_is_claimed_has_a_thousand_requests_and_a_claim_four(tmp_path: Path) -> None:
    options = visit.parse([str(tmp_path)])
    shelf = visit.shelf_of(options)
    for part in visit.parts_of(options):
        if part.task is None or part.stage in ("loop", "decode"):
            continue  # of steps that come without a pause, or take milliseconds
        services = PAIRS[part.task.pair].services
        for load in part.task.loads:
            rates = [load * 1e3 / shelf.request_ms(one) / len(services) for one in services]
            effort = part.task.effort
            requests = effort.rounds * effort.window(min(rates)).seconds * min(rates)
            assert requests >= (4000 if part.stage == "claims" else 1000), part.name


# --- Processes --------------------------------------------------------------------------------


class Begun:
    """Sessions of processes, as a GPU starts them; the simulator runs what they would."""

    def __init__(self, sessions: list[Any], log: list[str]) -> None:
        self.sessions = sessions
        self._log = log

    def wait(self) -> None:
        self._log.append("waited")

    def close(self) -> None:
        self._log.append("closed")


class WithProcesses(SimDevice):
    modelled = False

    def __init__(self, log: list[str]) -> None:
        topology = find_topology("h200")
        super().__init__(topology, find_calibration(None, topology))
        self._log = log

    def start(self, plans: Any, jobs: Any) -> Any:
        assert all(isinstance(job, Job) for of_plan in jobs for job in of_plan)
        if self._log and isinstance(plans[0].sharing, Processes):
            raise DeviceError("there is no MPS here")
        self._log.append("started")
        profiles = [find_measured_profile(model) for model in plans[0].models]
        plain = [msgspec.structs.replace(plan, sharing=Lanes()) for plan in plans]
        programs = [lower(plan, [one.trace for one in profiles]) for plan in plain]
        return Begun([self.open(program, profiles) for program in programs], self._log)


def find_measured_profile(model: ModelKey) -> Profile:
    topology = find_topology("h200")
    return find_profile(model, topology, find_calibration(None, topology), [])


def test_processes_are_started_first_and_waited_for_and_may_fail(tmp_path: Path) -> None:
    log: list[str] = []
    device = WithProcesses(log)
    shelf = Shelf(tmp_path, (), device.topology, device.calibration, rehearsal=True)
    bench = Bench(device, shelf)
    ways = ("streams", "yield d2", "time-sliced", "MPS 50", "yield time-sliced")
    run_task(bench, Task("alexnet+resnet152", (0.35,), ways, Effort(100, 50)))
    assert log == ["started", "waited", "closed"]
    found = {row["way"]: row for row in bench.rows}
    assert found["MPS 50"]["error"] == "there is no MPS here"
    (service,) = found["yield time-sliced"]["services"]
    assert service["against_alone_apart"]["p99_ratio"]["value"] < 1.3
    (alone,) = found["alone in time-sliced"]["alone"]
    assert {"served", "late", "lag_ms", "warnings", "latency"} <= set(alone)
    assert found["time-sliced"]["background"] > 0


def test_beside_a_service_that_is_always_busy_only_lanes_leave_background_something(
    tmp_path: Path,
) -> None:
    topology = find_topology("h200")
    calibration = find_calibration(None, topology)
    shelf = Shelf(tmp_path, (), topology, calibration, rehearsal=True)
    bench = Bench(SimDevice(topology, calibration), shelf)
    task = Task(
        "decode+prefill",
        (1.0,),
        ("yield d2", "masks 25", "streams"),
        Effort(most_s=0.3),
        stage="loop",
    )
    run_always_busy(bench, task)
    found = {row["way"]: row for row in bench.rows}
    assert found["yield d2"]["background_part"] == 0
    assert found["yield d2"]["p99_ratio"] == pytest.approx(1, abs=0.02)
    assert 0.1 < found["masks 25"]["background_part"] < found["streams"]["background_part"]
    assert 1 < found["masks 25"]["p99_ratio"] < found["streams"]["p99_ratio"]
    table = promises.always_busy(bench.rows)
    assert len(table.lines) == 3
    kept = [row["background_part"] for row in bench.rows if row["p99_ratio"] <= 1.3]
    assert f"{max(kept):.3g}, at least 0.2" in table.verdicts[0]


def test_of_what_uses_little_of_a_bound_the_best_is_taken() -> None:
    class Tried:
        def __init__(self, tail: float) -> None:
            self.tail = tail

    tried: Any = [Tried(0.99), Tried(0.9), Tried(0.7)]
    assert pick(tried, 0.95) is tried[1]
    assert pick(tried, 0.8) is tried[2]
    assert pick(tried, 0.1) is tried[2]
    assert factors(1.5, 3) == (1.5, 2.25, 3.0)


# --- Tables -----------------------------------------------------------------------------------


def test_a_verdict_says_measured_target_and_by_how_much() -> None:
    table = Table("t", ["a"])
    table.judge("x", 1.2, 1.15)
    table.judge("y", 1.0, 0.95, at_most=False)
    table.judge("z", None, 1.0)
    assert table.verdicts == [
        "x: 1.2, at most 1.15; **missed** by 0.05",
        "y: 1, at least 0.95; kept",
        "z: at most 1; not measured",
    ]
    assert "- y: 1" in table.markdown()


def test_of_plans_for_a_bound_the_one_that_keeps_it_with_most_background_counts() -> None:
    rows = [
        rows_of("bound 1.5", 1.6, 0.9, service={"bound": 1.5}),
        rows_of("bound 1.5 careful", 1.4, 0.8, service={"bound": 1.5}),
        rows_of("yield d2", 1.0, 0.66),
        rows_of("MPS 50", 1.45, 0.5),
        rows_of("masks 50", 1.9, 0.7),
        rows_of("priorities", 8.0, 0.9),
    ]
    (best,) = promises.chosen(rows, 1.5).values()
    assert best["way"] == "bound 1.5 careful"
    (line,) = [line for line in promises.against_baselines(rows).lines if line[3] == "1.5"]
    assert line[4:] == ["80.0", "50.0", "MPS 50", "1.60"]
    assert any("8, at least 5; kept" in one for one in promises.against_priorities(rows).verdicts)
    verdicts = promises.bounds(rows).verdicts
    assert "bound 1.5 missed and kept when simulated, of 1: 0, at most 0; kept" in verdicts


def test_what_was_measured_again_counts_as_it_was_with_most_requests() -> None:
    """Else a bound would count as kept as soon as one of two measurements kept it."""
    first = rows_of("bound 1.5", 1.4, 0.8, service={"bound": 1.5})
    again = rows_of("bound 1.5", 1.6, 0.8, service={"bound": 1.5, "requests": 4000})
    again["stage"] = "claims"
    for rows in ([first, again], [again, first]):
        (table,) = [one for one in promises.tables_of(rows) if one.title.startswith("Bounds")]
        (line,) = table.lines
        assert line[4] == "4,000" and line[5] == "1.60"


def test_ways_are_held_against_each_other_only_where_they_ran_in_turns() -> None:
    rows = [rows_of("priorities", 8.0, 0.9), rows_of("yield d2", 1.0, 0.66)]
    assert len(promises.against_priorities(rows).lines) == 1
    rows[1]["stage"] = "claims"
    assert promises.against_priorities(rows).lines == []


def test_baselines_that_were_not_measured_do_not_count_as_worse() -> None:
    rows = [rows_of("bound 1.5", 1.4, 0.8, service={"bound": 1.5}), rows_of("priorities", 8.0, 0.9)]
    table = promises.against_baselines(rows)
    assert table.lines == [] and "0 cases" in table.verdicts[-1]
    table = promises.against_baselines([*rows, rows_of("masks 50", 1.9, 0.7)])
    assert len(table.lines) == 1 and "1 cases" in table.verdicts[-1]


def test_a_missed_bound_is_told_apart_from_one_that_the_simulator_misses_too() -> None:
    for said, kept in ((1.4, "**no**"), (1.6, "no, as simulated")):
        row = rows_of("bound 1.5", 1.7, 0.9, service={"bound": 1.5})
        row["simulated"] = {"services": [{"p99_ratio": {"value": said}}]}
        table = promises.bounds([row])
        assert table.lines[0][6:8] == [f"{said:.2f}", kept]
        assert any("**missed** by 1" in verdict for verdict in table.verdicts) == (said == 1.4)


def test_verdicts_have_three_digits_and_no_exponent() -> None:
    table = promises.Table("a table", ["a column"])
    for value in (3257.6, 0.9, 0):
        table.judge("measured", value, 0)
    assert table.verdicts == [
        "measured: 3260, at most 0; **missed** by 3260",
        "measured: 0.9, at most 0; **missed** by 0.9",
        "measured: 0, at most 0; kept",
    ]


def test_all_tables_can_be_made_of_nothing_and_of_failures() -> None:
    for table in promises.tables_of([{"stage": "main", "pair": "bert+vgg", "error": "no"}]):
        assert table.markdown().startswith("#### ")


def test_what_is_claimed_is_known() -> None:
    assert set(KNOWN) > CLAIMED


# --- Deaths -----------------------------------------------------------------------------------


def test_recovery_is_the_time_until_the_rate_is_full_again() -> None:
    before = np.arange(0, 500, 2) * MS
    after = np.arange(620, 900, 2) * MS
    late = deaths.recovery_ms(np.concatenate([before, after]), 500 * MS, 500.0)
    assert late == pytest.approx(120)
    assert deaths.recovery_ms(before, 500 * MS, 500.0) is None
    slow = np.arange(500, 900, 20) * MS  # a tenth of the rate is not full
    assert deaths.recovery_ms(slow, 500 * MS, 500.0) is None


def test_tails_are_of_requests_that_arrived_in_the_span() -> None:
    served = np.array([[0, 2 * MS], [10 * MS, 15 * MS], [30 * MS, 31 * MS]])
    assert deaths.tail_ms(served, 5 * MS, 20 * MS)["max_ms"] == pytest.approx(5)
    assert deaths.tail_ms(served, 40 * MS, 50 * MS) == {}


def test_replayed_service_is_held_against_itself_on_all_units_whatever_its_lane(
    tmp_path: Path,
) -> None:
    """As on the device, where it runs alone in a session without masks."""
    topology = find_topology("h200")
    shelf = Shelf(tmp_path, (), topology, find_calibration(None, topology), rehearsal=False)
    row = {"pair": "bert+vgg", "load": 0.35, "rates": [350.0], "floor": 0.0, "grain_us": 150.0}
    row |= {"shape": "poisson", "seconds": 0.3, "warmup": 0.02, "run_seconds": 0.3, "runs": 1}
    replays = [replay(row | {"way": way}, shelf) for way in ("yield d2", "masks 75")]
    (yielding, masked) = (one["services"][0] for one in replays if one is not None)
    assert masked["alone"] == pytest.approx(yielding["alone"])
    # On 32 SMs bert takes 1.6 times as long even without a neighbour.
    assert masked["p50_ratio"]["value"] > 1.6

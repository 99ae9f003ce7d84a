"""A visit to a GPU, rehearsed on the simulator: what fits, what is done already, what is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eclip.contest.contest import known_policies
from eclip.errors import DeviceError

sys.path.insert(0, str(Path(__file__).parents[3]))

from lab.gpu import visit
from lab.support import promises, stages
from lab.support.contenders import PLANS
from lab.support.kept import read_rows
from lab.support.measuring import run_part
from lab.support.pairs import PAIRS
from lab.support.promises import Table
from lab.support.stages import BEGIN_S, LOOP, STAGES, Part, done_parts, expected, fitting, note_done
from lab.support.workshop import RESULTS

ALL = [part for parts in STAGES.values() for part in parts]


def go(folder: Path, *words: str) -> list[dict[str, Any]]:
    options = visit.parse([str(folder), "--device", "sim", "--scale", "0.1", *words])
    assert visit.visit(options) == 0
    return read_rows(folder / RESULTS)


# --- Time -------------------------------------------------------------------------------------


def test_every_part_names_pairs_and_ways_that_exist_and_none_twice() -> None:
    assert len({part.name for part in ALL}) == len({part.slug for part in ALL}) == len(ALL)
    assert {part.pair for part in ALL if part.stage != "mixes"} <= set(PAIRS)
    named = {way for part in ALL for way in part.contenders}
    assert named <= {*PLANS, *known_policies()}
    assert not set(PLANS) & set(known_policies())  # a plan would hide a policy
    assert len({part.pair for part in ALL if part.load}) >= 12


def test_every_part_fits_into_a_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = visit.parse([str(tmp_path), "--plan"])
    visit.show_plan(visit.parts_of(options), visit.shelf_of(options))
    assert "main: bert+vgg at 0.35" in capsys.readouterr().out
    found = expected(ALL, visit.shelf_of(options))
    assert max(found.values()) < 60 * options.minutes - BEGIN_S


def test_every_p99_has_a_thousand_requests_and_a_claim_many_more(tmp_path: Path) -> None:
    """Where a run may be as long as that takes; a p99 of few requests is marked in the tables."""
    shelf = visit.shelf_of(visit.parse([str(tmp_path)]))
    for part in ALL:
        if part.stage in (LOOP, "mixes", "decode"):
            continue
        requests = part.rounds * part.seconds(shelf) * min(part.rates(shelf))
        least = 8000 if part.stage == "claims" else 950
        assert requests >= least, (part.name, requests)


def test_the_next_part_is_the_first_that_is_left_and_fits(tmp_path: Path) -> None:
    parts = ALL[:3]
    seconds = {part.name: taken for part, taken in zip(parts, (50.0, 100.0, 20.0), strict=True)}
    note_done(tmp_path, parts[0], 47.26)
    assert done_parts(tmp_path) == {parts[0].name: 47.3}
    shelf = visit.shelf_of(visit.parse([str(tmp_path)]))
    assert list(expected(parts, shelf)) == [part.name for part in parts[1:]]
    del seconds[parts[0].name]
    assert fitting(parts, seconds, 200) is parts[1]
    assert fitting(parts, seconds, 30) is parts[2]
    assert fitting(parts, seconds, 10) is None


def test_more_ways_take_longer_and_captures_are_paid_once(tmp_path: Path) -> None:
    shelf = visit.shelf_of(visit.parse([str(tmp_path)]))
    few, every = Part("few", "bert+vgg", 0.35, contenders=("yield",)), Part("all", "bert+vgg", 0.35)
    assert every.expected_s(shelf, []) > 2 * few.expected_s(shelf, [])
    assert few.expected_s(shelf, few.models) < few.expected_s(shelf, [])


# --- Rehearsals -------------------------------------------------------------------------------


def test_a_rehearsal_keeps_every_way_and_a_second_call_nothing_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--stages", "main,shapes", "--pairs", "bert+vgg")
    rows = go(tmp_path, *words)
    of_main = {row["way"]: row for row in rows if "way" in row and row["stage"] == "main"}
    assert {"shared", "masks", "timeslice", "yield", "move", "search"} <= of_main.keys()
    (service,) = of_main["yield"]["services"]
    assert service["kept"] and service["p99_ratio"]["value"] < 1.3
    assert of_main["yield"]["background_over_rest"] == pytest.approx(1, abs=0.1)
    assert of_main["search"]["background"] > of_main["yield"]["background"]
    assert any("no processes" in row.get("error", "") for row in rows)  # MPS is said to be left out
    assert {row["shape"] for row in rows if "way" in row} > {"poisson", "bursts"}
    assert go(tmp_path, *words) == rows
    visit.finish(visit.parse([str(tmp_path), "--device", "sim", "--scale", "0.1", *words]))
    for row in read_rows(tmp_path / RESULTS):  # what was measured repeats itself exactly
        if row.get("way") in ("yield", "search"):
            assert row["simulated"]["background"] == pytest.approx(row["background"], rel=1e-9)
            assert row["simulated"]["p99_ratios"] == [row["services"][0]["p99_ratio"]["value"]]
    assert "background off, worst: 0, at most 0.12; kept" in (tmp_path / "tables.jsonl").read_text()


def test_beside_a_service_that_is_always_busy_only_lanes_leave_background_something(
    tmp_path: Path,
) -> None:
    rows = go(tmp_path, "--stages", "loop")
    found = {row["way"]: row for row in rows if "way" in row}
    assert found["yield"]["background"] == 0
    assert found["yield"]["p99_ratio"] == pytest.approx(1, abs=0.02)
    assert 0.1 < found["masks 25"]["background"] < found["masks 75"]["background"]
    assert 1 < found["masks 25"]["p99_ratio"] < found["masks 75"]["p99_ratio"]
    kept = [row["background"] for row in found.values() if row["p99_ratio"] <= 1.3]
    (_, _, _, table, _) = promises.tables_of(rows)
    assert f"{max(kept):.3g}, at least 0.2" in table.verdicts[0]


def test_a_mix_of_background_is_measured_as_the_comparisons_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part("mixes", "gpt2:8,vit_b_16:8", rounds=1, verify=1, refine_s=0.3)
    monkeypatch.setitem(stages.STAGES, "mixes", (part,))
    rows = go(tmp_path, "--stages", "mixes")
    found = {row["way"]: row for row in rows if "way" in row}
    assert {"shared", "masks", "eclip", "search"} <= found.keys()
    assert found["search"]["stp"] >= found["shared"]["stp"]
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["body"]["mix"] == part.pair
    assert list(tmp_path.glob("*.observations.json.gz"))


def test_plans_of_the_lab_take_part_beside_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part("three", "bert+vgg", 0.35, contenders=("masks 50",))
    monkeypatch.setitem(stages.STAGES, "three", (part,))
    found = {row["way"]: row for row in go(tmp_path, "--stages", "three")}
    assert list(found) == ["shared", "masks 50"]
    assert found["masks 50"]["background"] < 0.8 < found["shared"]["background"]


def test_a_part_that_fails_is_said_and_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bench: Any, part: Part) -> None:
        if part.shape == "bursts":
            raise DeviceError("the device is gone")
        run_part(bench, part)

    monkeypatch.setattr(visit, "run_part", fail)
    words = ["--stages", "shapes", "--pairs", "bert+vgg"]
    options = visit.parse([str(tmp_path), "--device", "sim", "--scale", "0.1", *words])
    assert visit.visit(options) == 1
    errors = [row["error"] for row in read_rows(tmp_path / RESULTS) if "error" in row]
    assert errors == ["DeviceError: the device is gone"]
    assert len(done_parts(tmp_path)) == 2


# --- Tables -----------------------------------------------------------------------------------


def row_of(way: str, kept: bool, background: float, part: str = "main: a") -> dict[str, Any]:
    service = {
        "requests": 1000,
        "kept": kept,
        "excess_us": {"p99": 10.0},
        "p99_ratio": {"value": 1.4, "low": 1.3, "high": 1.6},
    }
    return {
        "part": part,
        "pair": "bert+vgg",
        "load": 0.35,
        "bound": 1.5,
        "shape": "poisson",
        "floor": 0.0,
        "way": way,
        "setting": "",
        "why": "yields",
        "services": [service],
        "background": background,
        "background_rps": 100 * background,
        "background_over_rest": background / 0.65,
    }


def test_a_verdict_says_measured_target_and_by_how_much() -> None:
    table = Table("t", ["a"])
    table.judge("x", 3257.6, 1.15)
    table.judge("y", 1.0, 0.95, at_most=False)
    table.judge("z", None, 1.0)
    assert table.verdicts == [
        "x: 3260, at most 1.15; **missed** by 3260",
        "y: 1, at least 0.95; kept",
        "z: at most 1; not measured",
    ]
    assert "- y: 1" in table.markdown()


def test_ours_is_held_against_the_best_that_kept_the_bound_in_the_same_turns() -> None:
    rows = [
        row_of("search", False, 0.9),
        row_of("yield", True, 0.6),
        row_of("mps", True, 0.5),
        row_of("masks", False, 0.7),
        row_of("shared", True, 0.9, part="main: another"),
    ]
    bounds, yielding, baselines, _, _ = promises.tables_of(rows)
    assert "search: bounds missed, of 1: 1, at most 0; **missed** by 1" in bounds.verdicts
    assert yielding.verdicts[0].endswith("**missed** by 1")
    first, second = baselines.lines
    assert first[4:] == ["60.0", "50.0", "mps", "1.20"]
    assert second[4:] == ["0.0", "90.0", "shared", "0.00"]


def test_all_tables_can_be_made_of_nothing_and_of_failures() -> None:
    for table in promises.tables_of([{"part": "main: a", "stage": "main", "error": "no"}]):
        assert table.markdown().startswith("#### ")
        assert all("not measured" in one or "0 cases" in one for one in table.verdicts)

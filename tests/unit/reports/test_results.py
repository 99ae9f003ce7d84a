"""Results files: added to by many at once, read whole or refused; tables drawn from them."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comparisons import comparison, entry, score
from eclip.errors import ArtefactError
from eclip.files import store
from eclip.files.comparison import Comparison, plan_digest
from eclip.planner.policies import make_plan
from eclip.reports import results as drawn
from eclip.reports.labels import ABSENT
from simulations import H200, flat_profile, problem_of
from waiting import PATIENCE_S

MIXES = ("m/1", "m/2", "m/3")

_WRITER = """
import sys
from pathlib import Path
from comparisons import comparison
from eclip.files import store
for number in range(int(sys.argv[2])):
    store.append(comparison({"shared": 1.0}, mix=f"{sys.argv[1]} {number}"), Path(sys.argv[3]))
"""


def refusal(path: Path) -> str:
    with pytest.raises(ArtefactError) as caught:
        store.load_results(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_comparisons_come_back_in_the_order_in_which_they_were_added(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    added = [comparison({"shared": 1.0 + n}, mix=mix) for n, mix in enumerate(MIXES)]
    for one in added:
        store.append(one, path)
    assert store.load_results(path) == (added, [])
    assert path.read_bytes().count(b"\n") == 3


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, f"writer{n}", "40", str(path)], env=environment
        )
        for n in range(4)
    ]
    assert [writer.wait(timeout=PATIENCE_S) for writer in writers] == [0] * 4
    found = [one.mix for one in store.load_results(path).comparisons]
    assert len(found) == 160
    for n in range(4):  # each writer's own are all there, in its order
        mine = [mix for mix in found if mix.startswith(f"writer{n} ")]
        assert mine == [f"writer{n} {number}" for number in range(40)]


def test_file_cut_at_any_byte_loses_no_later_comparison(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for mix in MIXES[:2]:
        store.append(comparison({"shared": 1.0}, mix=mix), path)
    whole = path.read_bytes()
    first = whole.index(b"\n")
    for cut in (first + 1, first + 40, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:cut])
        store.append(comparison({"shared": 1.0}, mix="m/3"), path)
        found = store.load_results(path)
        mixes = [one.mix for one in found.comparisons]
        if cut in (first + 1, len(whole) - 1):  # a whole line, or all but its end
            assert mixes[0] == "m/1" and mixes[-1] == "m/3"
            assert not found.warnings
        else:
            assert mixes == ["m/1", "m/3"]
            (warning,) = found.warnings
            assert f"{path} line 2" in warning and "left out" in warning


def test_file_whose_only_line_was_cut_can_be_added_to(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    store.append(comparison({"shared": 1.0}, mix="m/1"), path)
    whole = path.read_bytes()
    for cut in (5, 40, len(whole) - 20):
        path.write_bytes(whole[:cut])
        (warning,) = store.check_results(path)
        assert "line 1" in warning
        store.append(comparison({"shared": 1.0}, mix="m/2"), path)
        assert [one.mix for one in store.load_results(path).comparisons] == ["m/2"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"years of work", "not an eclip file"),
        (b'{"format":"eclip/comparison","version":99,"body":{}}', "update eclip"),
        (b'{"format":"eclip/comparison","version":2,"body":{}}', "not a valid comparison"),
        (
            b'{"format":"eclip/comparison","version":1,"body":{}}',
            "make the file again: eclip compare",
        ),
        (b"\xff\xfe", "damaged"),
    ],
)
def test_damaged_line_is_named_and_the_others_count(
    tmp_path: Path, line: bytes, fault: str
) -> None:
    path = tmp_path / "r.jsonl"
    store.append(comparison({"shared": 1.0}), path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    found = store.load_results(path)
    assert len(found.comparisons) == 1
    (warning,) = found.warnings
    assert "r.jsonl line 2" in warning and fault in warning
    assert store.check_results(path) == [warning]
    path.write_bytes(line + b"\n")
    if line.startswith(b'{"format":"eclip/comparison"'):
        assert store.check_results(path)
    else:
        assert "line 1" in refusal(path)
        with pytest.raises(ArtefactError, match="line 1"):
            store.check_results(path)


def test_edited_number_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    store.append(comparison({"shared": 1.25}), path)
    path.write_bytes(path.read_bytes().replace(b"1.25", b"1.75"))
    assert "digest" in store.load_results(path).warnings[0]


def test_other_artefacts_are_no_results(tmp_path: Path) -> None:
    plan = make_plan("shared", problem_of([flat_profile("m", [1000], H200)], H200))
    path = tmp_path / "plan.json"
    store.save(plan, path)
    assert "holds no comparison" in refusal(path)


def test_full_disk_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    store.append(comparison({"shared": 1.0}), path)
    before = path.read_bytes()

    def no_space(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ArtefactError, match="No space left"):
        store.append(comparison({"shared": 2.0}), path)
    assert path.read_bytes() == before


def test_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="there is no folder"):
        store.check_results(tmp_path / "missing" / "r.jsonl")
    with pytest.raises(ArtefactError):
        store.check_results(tmp_path)
    store.check_results(tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"alone_rps": (1.0,)}, "for every worker"),
        ({"entries": ()}, "needs entries"),
        ({"entries": (entry("x", score(1.0)),) * 2}, "one for each policy"),
        ({"repeats": 1, "entries": (entry("x", score(1.0), score(1.0)),)}, "2 runs of 1"),
        ({"entries": (entry("x", score(1.0, p99_ms=(1.0,))),)}, "not for 2 workers"),
        ({"entries": (entry("x", score(1.0), switches=(0,)),)}, "switches of 2 workers"),
    ],
)
def test_comparison_that_does_not_add_up_cannot_exist(wrong: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        comparison(**({"entries": {"shared": 1.0}} | wrong))


def test_equal_plans_have_equal_digests_whoever_made_them() -> None:
    problem = problem_of([flat_profile("m", [1000, 500], H200)], H200)
    plan = make_plan("shared", problem)
    renamed = msgspec.structs.replace(plan, policy="mine", why="because")
    assert plan_digest(plan) == plan_digest(renamed)
    assert plan_digest(plan) != plan_digest(make_plan("timeslice", problem))
    lane = msgspec.structs.replace(plan.lanes[0], priority=1)
    assert plan_digest(plan) != plan_digest(msgspec.structs.replace(plan, lanes=(lane,)))


# Tables


def table_of(comparisons: list[Comparison], start: str) -> drawn.ResultsTable:
    return next(table for table in drawn.tables(comparisons) if table.title.startswith(start))


def row(table: drawn.ResultsTable, name: str) -> dict[str, str]:
    found = next(row for row in table.rows if name in row[:2])
    return dict(zip(table.columns, found, strict=True))


def test_means_over_mixes_are_geometric_and_against_the_best_rival() -> None:
    means = table_of(
        [
            comparison({"shared": 1.0, "mps": 1.2, "mps-model": 1.1, "masks": 1.0, "search": 1.2}),
            comparison(
                {"shared": 1.0, "mps": 1.0, "mps-model": 1.6, "model": 1.25, "search": 1.5},
                mix="m/2",
            ),
        ],
        "Means",
    )
    search = row(means, "search")
    assert search["mixes"] == "2"
    assert search["STP ÷ shared"] == f"{math.sqrt(1.2 * 1.5):.3f} (1.200)"
    assert search["STP ÷ best MPS"] == f"{math.sqrt(1.0 * 1.5 / 1.6):.3f} (0.938)"
    assert search["STP ÷ best masks"] == f"{math.sqrt(1.2 * 1.2):.3f} (1.200)"
    assert row(means, "masks")["mixes"] == "1"


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_geometric_mean_lies_inside_and_inverts(values: list[float]) -> None:
    mean = drawn.geometric_mean(values)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    inverse = drawn.geometric_mean([1 / value for value in values])
    assert mean * inverse == pytest.approx(1)


def test_last_comparison_of_a_mix_counts() -> None:
    old = comparison({"shared": 1.0, "eclip": 2.0})
    new = comparison({"shared": 1.0, "eclip": 1.5})
    other = comparison({"shared": 1.0, "eclip": 1.25}, mix="m/2")
    table = table_of([old, other, new], "Policies")
    assert [cells[0] for cells in table.rows] == ["m/1", "", "m/2", ""]
    assert row(table, "eclip")["STP"] == "1.500"


def test_what_was_chosen_for_the_same_objective_is_in_one_mean_whatever_else_was_tried() -> None:
    both = comparison({"shared": 1.0, "search": 1.2, "search-energy": 1.1}, mix="m/1")
    found = [
        msgspec.structs.replace(both, objective="throughput,energy"),
        comparison({"shared": 1.0, "search": 1.3}, mix="m/2"),
        msgspec.structs.replace(both, objective="energy", mix="m/3"),
    ]
    means = [table for table in drawn.tables(found) if table.title.startswith("Means")]
    (throughput,) = [table for table in means if "settings tried" not in table.title]
    assert row(throughput, "search")["mixes"] == "2"
    assert row(throughput, "search-energy")["mixes"] == "1"
    (energy,) = [table for table in means if "settings tried for energy" in table.title]
    assert row(energy, "search")["mixes"] == "1"


def test_spread_of_the_runs_is_shown_with_the_setting() -> None:
    swept = entry("mps", score(1.1), score(1.0), score(1.2), setting="mps 60%")
    table = table_of([comparison([entry("shared", score(1.0)), swept])], "Policies")
    assert row(table, "mps")["range (runs)"] == "1.000 to 1.200 (3)"
    assert row(table, "mps")["setting"] == "mps 60%"
    assert row(table, "shared")["range (runs)"] == ""


def test_modelled_results_have_tables_of_their_own() -> None:
    both = [
        comparison({"shared": 1.0}),
        comparison({"shared": 1.1}, modelled=True, device="simulator of a GPU", driver=None),
    ]
    titles = [table.title for table in drawn.tables(both)]
    assert [title.startswith("Policies") for title in titles] == [True, False, True, False, False]
    assert [("modelled" in title) for title in titles] == [False, False, True, True, False]


def test_simulator_is_held_against_hardware_for_equal_plans_only() -> None:
    measured = comparison(
        [entry("shared", score(1.0)), entry("masks", score(1.0), plan="measured's")]
    )
    guess = entry("shared", score(1.1, power=90.0, rate_rps=(110.0, 180.0)))
    modelled = comparison(
        [guess, entry("masks", score(1.0), plan="another")],
        modelled=True,
        device="simulator of a GPU",
    )
    table = table_of([measured, modelled], "Simulator against hardware")
    assert [cells[:2] for cells in table.rows[1:]] == [("mean", "shared"), ("mean", "all")]
    assert row(table, "shared")["rates: mean absolute error"] == "10.0%"
    assert row(table, "shared")["power: error"] == "-10.0%"
    assert table.rows[-1][-1] == "10.0%"


def test_latency_table_has_the_ratio_to_shared_of_every_worker() -> None:
    mine = entry("search", score(1.0, p99_ms=(1.5, 4.4)))
    mute = entry("kernel", score(1.0, p99_ms=(None, 4.0)))
    table = table_of(
        [comparison([entry("shared", score(1.0)), mine, mute], load_part=0.6, load="Poisson")],
        "Latency",
    )
    assert row(table, "search")["÷ shared"] == "0.50, 1.10"
    assert row(table, "search")["worst"] == "1.10"
    assert row(table, "kernel")["÷ shared"] == f"{ABSENT}, 1.00"


@pytest.mark.parametrize(("alone", "ratio"), [((100.0, 10.0), "0.50"), ((10.0, 100.0), "1.10")])
def test_latency_table_says_how_the_worst_off_model_fares(
    alone: tuple[float, ...], ratio: str
) -> None:
    mine = entry("search", score(1.0, p99_ms=(1.5, 4.4)))
    loaded = comparison([entry("shared", score(1.0)), mine], load_part=0.6, load="Poisson")
    loaded = msgspec.structs.replace(loaded, alone_rps=alone)
    table = table_of([loaded], "Latency")
    assert row(table, "search")["worst-off model"] == ratio
    assert row(table, "shared")["worst-off model"] == "1.00"


def test_section_between_the_marks_is_replaced_and_nothing_else() -> None:
    document = f"before\n{drawn.BEGIN}\nold\n{drawn.END}\nafter\n"
    once = drawn.replace_section(document, "new")
    assert once == f"before\n{drawn.BEGIN}\n\nnew\n\n{drawn.END}\nafter\n"
    assert drawn.replace_section(once, "new") == once
    with pytest.raises(ValueError, match="no section"):
        drawn.replace_section("a document", "new")


def test_text_of_others_cannot_break_a_table() -> None:
    text = drawn.markdown([comparison({"shared": 1.0}, mix="a|b<script>")])
    assert "a\\|b&lt;script>" in text

"""Tables that a narrow screen does not break, measures side by side, and progress."""

from __future__ import annotations

import io
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eclip.cli import screen
from eclip.cli.screen import measured
from eclip.cli.screen.tables import lay_out
from eclip.core.measures import Measures, WorkerMeasures
from eclip.core.model_key import parse_model

WORDS = ["policy", "searching", "eclip", "1.234", "+11.9%", "densenet201", "of", "alone", "a b"]


def worker(name: str, rate: float, offered: float | None = None, model: str = "") -> WorkerMeasures:
    return WorkerMeasures(
        name=name,
        model=parse_model(model or f"{name}:8"),
        requests=100,
        rate_rps=rate,
        alone_rps=1000.0,
        ratio=rate / 1000,
        p50_ms=1.0,
        p95_ms=2.0,
        p99_ms=3.0,
        switches_per_request=4,
        offered_rps=offered,
    )


def measures(policy: str, stp: float, *workers: WorkerMeasures, power: float = 500.0) -> Measures:
    return Measures(
        policy=policy,
        device="sim",
        modelled=True,
        seconds=2.0,
        stp=stp,
        fairness=0.9,
        power_w=power,
        energy_j=2 * power,
        joules_per_request=0.0123,
        efficiency_per_kj=1000 * stp / power,
        switches_per_request=12,
        workers=workers or (worker("albert", 500.0),),
    )


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is printed on a screen of 80 columns."""
    text = io.StringIO()
    console = screen._Console(file=text, width=80, highlight=False, markup=False)
    monkeypatch.setattr(screen, "out", console)
    return text


def words_of(rows: Sequence[Sequence[str]]) -> set[str]:
    return {word for row in rows for cell in row for word in cell.split()}


def test_no_table_breaks_a_word_at_80_columns(shown: io.StringIO) -> None:
    columns = ["policy", "setting", *(f"densenet20{n} of alone" for n in range(9)), "STP"]
    rows = [["plain streams", "the best of these masks", *(["99.9%"] * 9), "1.234"]] * 2
    screen.print_table("A title", columns, rows, names=2, optional=("STP",))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    table, _, note = " ".join(lines).partition("(too narrow for: ")
    said = table.split()
    assert set(said) - {"─" * len(one) for one in said} <= {
        *words_of([columns]), *words_of(rows), "A", "title"
    }  # fmt: skip
    assert "STP" in note


@given(
    st.lists(st.sampled_from(WORDS), min_size=2, max_size=12, unique=True),
    st.integers(30, 160),
    st.data(),
)
def test_columns_that_are_shown_fit_and_hold_their_words(
    columns: list[str], width: int, data: st.DataObject
) -> None:
    cell = st.sampled_from(WORDS)
    size = st.lists(cell, min_size=len(columns), max_size=len(columns))
    rows = data.draw(st.lists(size, max_size=4))
    layout = lay_out(columns, rows, 1, width)
    assert sum(wide + 2 for wide in layout.widths) + 1 <= width
    assert layout.shown[:2] == [0, 1]
    assert {columns[index] for index in layout.shown} | {*layout.left_out} == {*columns}
    for index, wide in zip(layout.shown, layout.widths, strict=True):
        cells = [columns[index], *(row[index] for row in rows)]
        assert wide >= max(len(word) for one in cells for word in one.split())
        if index:
            assert wide >= max((len(row[index]) for row in rows), default=0)


def test_optional_columns_go_first_and_long_names_are_cut() -> None:
    layout = lay_out(["a", "first", "second"], [["x" * 100, "1" * 20, "2" * 20]], 1, 60, ["first"])
    assert layout.left_out == ["first"] and layout.shown == [0, 2]
    assert layout.widths == [35, 20]


def test_best_policy_is_marked_and_held_against_plain_streams(shown: io.StringIO) -> None:
    compared = [measures("shared", 1.0, power=400.0), measures("search", 1.119, power=600.0)]
    measured.print_measures(compared, best="search", aim="throughput")
    text = shown.getvalue()
    assert "search *" in text and "+11.9%" in text and "+0.0%" in text and "vs shared" in text
    assert "* highest STP" in text
    assert max(map(len, text.splitlines())) <= 80
    measured.print_measures(compared, best="shared", aim="energy")
    assert "shared *" in shown.getvalue()[len(text) :]


@pytest.mark.parametrize("missing", [{}, {"bound_ms": 2.0}, {"floor": 0.6}])
def test_best_policy_is_not_said_to_keep_what_it_misses(
    shown: io.StringIO, missing: dict[str, float]
) -> None:
    promised = msgspec.structs.replace(worker("albert", 500.0), **missing)
    compared = [measures("shared", 1.0, promised), measures("yield", 1.2, promised)]
    measured.print_measures(compared, best="yield", aim="slo")
    assert ("every bound and floor kept" in shown.getvalue()) == (not missing)
    assert ("no policy keeps every bound and floor" in shown.getvalue()) == bool(missing)


def test_plan_for_services_of_a_mix_without_any_breaks_no_table(shown: io.StringIO) -> None:
    promised = msgspec.structs.replace(worker("albert", 500.0), bound_ms=2.0)
    for compared in ([worker("albert", 400.0), promised], [promised, worker("albert", 400.0)]):
        measured.print_measures([measures(str(n), 1.0, one) for n, one in enumerate(compared)])
    assert "Services" not in shown.getvalue()


def test_one_policy_is_held_against_nothing(shown: io.StringIO) -> None:
    measured.print_measures([measures("shared", 1.0)])
    assert "vs shared" not in shown.getvalue() and "*" not in shown.getvalue()


def test_overload_is_said_in_words(shown: io.StringIO) -> None:
    measured.print_measures([measures("shared", 1.0, worker("bert", 337.0, 99999.0))])
    assert "bert: offered 99999/s, served 337/s: overloaded, its queue grew" in shown.getvalue()
    assert "99999.0" in shown.getvalue() and "offered/s" in shown.getvalue()


def test_workers_that_keep_up_are_not_called_overloaded(shown: io.StringIO) -> None:
    measured.print_measures(
        [measures("shared", 1.0, worker("bert", 99.0, 100.0), worker("vgg", 1))]
    )
    assert "overloaded" not in shown.getvalue()


def test_kernels_for_fewer_units_are_named(shown: io.StringIO) -> None:
    usual, chosen = worker("gpt2", 500.0), worker("gpt2", 600.0, model="gpt2~66:8")
    measured.print_measures([measures("shared", 1.0, usual), measures("search", 1.2, chosen)])
    text = shown.getvalue()
    assert "gpt2~66" not in text  # a model has one name in all rows
    assert "search uses kernels chosen for fewer units: gpt2 for 66." in text
    assert screen.worker_label("gpt2.2", parse_model("gpt2~66:8")) == "gpt2~66.2"
    assert screen.worker_label("gpt2", parse_model("gpt2:8")) == "gpt2"
    assert screen.worker_label("m", parse_model("package.module:m:8")) == "m"


def test_runs_are_counted_in_words() -> None:
    assert (screen.runs_title(1), screen.runs_title(3)) == ("STP, 1 run", "STP of 3 runs")


def test_bar_shows_phase_elapsed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    text, now = io.StringIO(), [0.0]
    terminal = screen._Console(file=text, width=100, force_terminal=True, get_time=lambda: now[0])
    monkeypatch.setattr(screen, "err", terminal)
    with screen.progress_bar("planning paper/3") as progress:
        progress.phase("trying on the device")
        now[0] = 65.0
        progress.part(0.25)
        progress.warn("something is odd")
        progress._bar.refresh()
    assert "planning paper/3: trying on the device" in text.getvalue()
    assert "0:01:05" in text.getvalue() and "left" in text.getvalue()
    assert "warning: something is odd" in text.getvalue()
    assert not progress.stopped

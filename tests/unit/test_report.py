"""The report: what it says about run logs, and that no log or name breaks it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import msgspec
import numpy as np
import pytest

from eclip.artefacts import store
from eclip.artefacts.measures import measure
from eclip.artefacts.model_key import ModelKey
from eclip.artefacts.plan import ALL_WORKERS, Lane
from eclip.artefacts.runlog import KernelRecords, Requests
from eclip.artefacts.topology import Mask, Topology
from eclip.errors import UsageError
from eclip.reports import lanes, page, tables
from eclip.reports.labels import (
    duration,
    modelled_words,
    number,
    plain,
    run_labels,
    worker_colour,
)
from logs import H200, make_log, make_mix, make_profile, without_records

ALBERT = ModelKey("albert", 8)
EVIL = "</script><script>throw 1</script><b>ä→日本"


class Reader(HTMLParser):
    """What a browser would make of the page: text, start tags and the contents of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str, str]] = []  # type, text
        self.words: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs).get("type") or "", ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            kind, text = self.scripts.pop()
            self.scripts.append((kind, text + data))
        elif self.cdata_elem is None:
            self.words.append(data)

    @property
    def data(self) -> list[Any]:
        return [json.loads(text) for kind, text in self.scripts if kind == "application/json"]


# --- the page


def test_page_shows_the_header_the_measures_and_the_words() -> None:
    logs = [make_log("shared", sizes=(132,)), make_log("eclip")]
    reader = Reader(page.render(logs, {ALBERT: make_profile()}))
    for words in (
        "3xalbert:8",
        "NVIDIA H200",
        "132 SMs in 16 slices",
        "a simulated H200",
        "10.0 ms",
        "closed loop",
        "fairness",
        "energy per request mJ",
        "p99 ms",
        "The sum of the workers' ratios",
    ):
        assert words in reader.text
    assert [tag for tag, attrs in reader.tags if attrs.get("role") == "tab"] == ["button"] * 2


def test_every_chart_and_table_of_modelled_data_says_so() -> None:
    html = page.render([make_log("eclip")], {ALBERT: make_profile()})
    captions = re.findall(r"<figcaption>.*?</figcaption>", html, re.DOTALL)
    assert len(captions) == 8
    assert all('<span class="badge">modelled' in caption for caption in captions)
    headings = re.findall(r"<h2.*?</h2>", html, re.DOTALL)
    assert sum('<span class="badge">modelled' in heading for heading in headings) == 2


def test_measured_data_is_not_called_modelled() -> None:
    log = make_log("eclip")
    plan = msgspec.structs.replace(log.plan, modelled=False)
    profile = msgspec.structs.replace(make_profile(), modelled=False)
    measured = msgspec.structs.replace(log, modelled=False, plan=plan)
    html = page.render([measured], {ALBERT: profile})
    assert '<span class="badge">' not in html
    assert "were measured on the device" in html


def test_a_gpu_log_says_whose_kernels_it_draws_and_which_waits_nobody_saw() -> None:
    log = make_log("eclip", workers=1)
    unseen = msgspec.structs.replace(
        log.counters[0], lane_waits=None, false_waits=None, false_wait_ns=None
    )
    measured = msgspec.structs.replace(
        log,
        kernels=msgspec.structs.replace(log.kernels, own_run=True),
        counters=(unseen,),
        modelled=False,
    )
    words = "of a run of their own after the measured one"
    assert words in Reader(page.render([measured], {})).text
    assert words not in Reader(page.render([log], {})).text
    both = [log, measured]
    table = tables.per_worker(["modelled", "measured"], both, [measure(one) for one in both])
    waits = [column.title for column in table.columns].index("false waits")
    seen, unknown = (row.cells[waits].text for row in table.blocks[0].rows)
    assert float(seen) == 0.0
    assert unknown == number(None)


def test_a_mixture_names_the_modelled_runs() -> None:
    modelled = make_log("eclip")
    measured = msgspec.structs.replace(modelled, modelled=False, device="a real H200")
    text = Reader(page.render([modelled, measured], {})).text
    assert "partly modelled: eclip on a simulated H200" in text
    assert "they differ in device" in text


def test_runs_with_kernels_that_a_search_chose_are_in_one_report_with_the_others() -> None:
    asked = make_mix(2)
    chosen = msgspec.structs.replace(
        asked,
        workers=(
            msgspec.structs.replace(asked.workers[0], model=ALBERT.with_kernels_for(66)),
            asked.workers[1],
        ),
    )
    logs = [make_log("shared", sizes=(132,), mix=asked), make_log("search", mix=chosen)]
    profiles = {one.model: one for one in map(make_profile, ("albert", "albert~66"))}
    reader = Reader(page.render(logs, profiles))
    assert "albert:8, albert~66:8" in reader.text
    assert "No heat map" not in reader.text
    (names,) = (data for data in reader.data if "albert~66:8" in data)
    assert names.keys() == set(map(str, profiles))
    assert "No heat map: The profile of albert~66:8 was not given" in (
        Reader(page.render(logs, {ALBERT: profiles[ALBERT]})).text
    )


def test_profile_of_other_kernels_than_a_later_run_had_is_not_drawn() -> None:
    log = make_log("shared")
    traces = {"albert:8": "0" * 64}
    other = msgspec.structs.replace(
        log.plan, fingerprint=msgspec.structs.replace(log.plan.fingerprint, traces=traces)
    )
    logs = [log, msgspec.structs.replace(log, plan=other)]
    text = Reader(page.render(logs, {ALBERT: make_profile()})).text
    assert "No heat map: the plan and profile albert:8 hold different kernels" in text


def test_logs_that_do_not_compare_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one run log"):
        page.render([], {})
    with pytest.raises(UsageError, match="different mixes"):
        page.render([make_log("shared"), make_log("eclip", workers=2)], {})
    mi50 = store.load_builtin("mi50", Topology)
    other = make_log("eclip", sizes=(mi50.units,), topology=mi50)
    with pytest.raises(UsageError, match="different topologies"):
        page.render([make_log("shared"), other], {})


def test_a_missing_profile_and_one_of_another_device_are_explained() -> None:
    log = make_log("eclip")
    assert "The profile of albert:8 was not given" in Reader(page.render([log], {})).text
    foreign = make_profile(topology=store.load_builtin("mi50", Topology))
    assert "are for different devices" in Reader(page.render([log], {ALBERT: foreign})).text


def test_warnings_are_shown_once_with_their_runs() -> None:
    logs = [
        msgspec.structs.replace(make_log(policy), warnings=("clock was not fixed",) * 2)
        for policy in ("shared", "eclip")
    ]
    text = Reader(page.render(logs, {})).text
    assert text.count("clock was not fixed") == 1
    assert "shared, eclip : clock was not fixed" in text


@pytest.mark.parametrize("empty", [False, True])
def test_a_run_of_nothing_still_gives_a_page(empty: bool) -> None:
    """Alone, and next to a run of something."""
    logs = [without_records(make_log("eclip"))] + ([] if empty else [make_log("shared")])
    text = Reader(page.render(logs, {})).text
    assert "No kernel was recorded" in text
    assert ("No request completed" in text) == empty


@pytest.mark.parametrize("workers", [1, 32])
def test_few_and_many_workers_give_a_page(workers: int) -> None:
    log = make_log("eclip", workers=workers, kernel_ns=400_000)
    reader = Reader(page.render([log], {ALBERT: make_profile()}))
    assert f"albert.{workers}" in reader.text


def test_names_from_files_stay_text() -> None:
    mix = make_mix(2, EVIL)
    topology = msgspec.structs.replace(H200, title=EVIL, unit_name=EVIL)
    log = make_log(EVIL, mix=mix, topology=topology)
    log = msgspec.structs.replace(log, device=EVIL, load=EVIL, warnings=(EVIL,))
    profile = make_profile(EVIL, name=EVIL)
    reader = Reader(page.render([log], {profile.model: profile}))
    plain_page = Reader(page.render([make_log("eclip", workers=2)], {ALBERT: make_profile()}))
    kinds = [kind for kind, _ in reader.scripts]
    assert kinds == [kind for kind, _ in plain_page.scripts]
    assert not [tag for tag, _ in reader.tags if tag == "b"]
    assert EVIL in reader.text
    names = reader.data[-1]
    assert names[f"{EVIL}:8"][0] == plain(f"{EVIL}<0>")
    # In a label Plotly would read a tag, so none may be left there.
    figures = json.dumps(reader.data[:-1], ensure_ascii=False)
    assert "&lt;b&gt;ä" in figures
    assert "<b>ä" not in figures.replace('"model": "' + EVIL, "")  # a key, never shown


def test_the_page_loads_nothing() -> None:
    html = page.render([make_log("eclip")], {ALBERT: make_profile()})
    reader = Reader(html)
    for tag, attrs in reader.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attrs
        assert (attrs.get("href") or "#").startswith("#")
    assert html.count("plotly.js v") == 1
    assert "default-src 'none'" in html


def test_importing_the_report_leaves_plotly_alone() -> None:
    code = "import sys, eclip.reports.page; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- tables, labels


def test_the_best_value_is_marked_in_its_direction() -> None:
    fast = make_log("eclip", kernel_ns=20_000)
    slow = make_log("shared", kernel_ns=40_000)
    table = tables.summary(["eclip", "shared"], [measure(fast), measure(slow)])
    best = {
        column.title: [row.cells[index].best for row in table.blocks[0].rows]
        for index, column in enumerate(table.columns)
    }
    assert best["throughput"] == [True, False]
    assert best["slowest worker's p99"] == [True, False]
    assert best["energy per request"] == [True, False]
    assert best["power"] == [False, False]


def test_equal_values_and_a_single_run_have_no_best() -> None:
    log = make_log("eclip")
    for logs in ([log], [log, log]):
        labels = run_labels(logs)
        all_measures = [measure(each) for each in logs]
        for table in (
            tables.summary(labels, all_measures),
            tables.per_worker(labels, logs, all_measures),
        ):
            assert not any(
                cell.best for block in table.blocks for row in block.rows for cell in row.cells
            )


def test_a_worker_that_completed_nothing_leaves_no_worst_p99() -> None:
    log = make_log("eclip")
    kept = [index for index, worker in enumerate(log.requests.worker) if worker != 1]
    columns = {
        field: tuple(getattr(log.requests, field)[index] for index in kept)
        for field in ("worker", "arrival_ns", "start_ns", "end_ns")
    }
    starved = msgspec.structs.replace(log, requests=Requests(**columns))
    assert tables.worst_p99(measure(log)) is not None
    assert tables.worst_p99(measure(starved)) is None


def test_runs_of_one_policy_get_labels_of_their_own() -> None:
    log = make_log("eclip")
    other = msgspec.structs.replace(log, device="gpu")
    assert run_labels([log]) == ["eclip"]
    assert run_labels([log, other]) == ["eclip on a simulated H200", "eclip on gpu"]
    assert run_labels([other, other]) == ["eclip on gpu (1)", "eclip on gpu (2)"]


def test_every_worker_of_the_largest_mix_has_a_colour_of_its_own() -> None:
    assert len({worker_colour(worker) for worker in range(32)}) == 32


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\N{EN DASH}"),
        (0.0, "0"),
        (0.01234, "0.012"),
        (0.1234, "0.123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (12345.6, "12,346"),
    ],
)
def test_numbers_are_short_and_without_exponent(value: float | None, text: str) -> None:
    assert number(value) == text


def test_durations_carry_the_unit_that_suits_them() -> None:
    assert [duration(time) for time in (0, 12, 1_500, 2_500_000, 10**9)] == [
        "0 ns",
        "12 ns",
        "1.50 µs",
        "2.50 ms",
        "1.00 s",
    ]


def test_modelled_words_name_some_all_or_none() -> None:
    assert modelled_words(["a", "b"], [True, True]) == "modelled"
    assert modelled_words(["a", "b"], [False, True]) == "partly modelled: b"
    assert modelled_words(["a", "b"], [False, False]) == ""


# --- charts of one run


def test_timeline_draws_the_first_kernels_and_says_so() -> None:
    log = make_log("eclip", kernel_ns=2_000)
    assert len(log.kernels.worker) > lanes.MAX_BARS
    figure, drawn = lanes.timeline(log)
    assert drawn == lanes.MAX_BARS == sum(len(trace["x"]) for trace in figure["data"])
    last_ms = sorted(log.kernels.end_ns)[drawn - 1] / 1e6
    assert figure["layout"]["xaxis"]["range"] == [0, last_ms]
    assert "The first 4,000 of" in Reader(page.render([log], {})).text


def test_plan_drawing_steps_where_the_groups_end() -> None:
    figure = lanes.plan_drawing(make_log("eclip", workers=1).plan)
    bars, line = figure["data"]
    assert bars["width"] == [10] * 6
    assert bars["y"] == [48, 96] * 3
    assert line["x"] == [0, 10, 20, 30, 40, 50, 60]
    assert "slices 0-5" in bars["text"][0] and "predicted 250 µs" in bars["text"][0]
    assert bars["marker"]["color"][0] != bars["marker"]["color"][1]


def test_occupancy_counts_kernels_on_the_slices_of_their_masks() -> None:
    log = make_log("eclip", workers=2)
    plan = msgspec.structs.replace(
        log.plan,
        lanes=(
            Lane(owner=0, mask=Mask([0, 1])),
            Lane(owner=0, mask=Mask([5])),
            Lane(owner=1, mask=Mask([1])),
            Lane(owner=ALL_WORKERS, mask=Mask([6])),
        ),
    )
    records = KernelRecords(
        window_ns=100,
        worker=(0, 1),
        position=(0, 0),
        lane=(0, 2),
        start_ns=(-50, 25),
        end_ns=(50, 75),
    )
    log = msgspec.structs.replace(log, plan=plan, kernels=records)
    table = lanes.occupied(log, np.array([0.0, 50.0, 100.0]))
    assert table[0].tolist() == [1.0, 0.0]
    assert table[1].tolist() == [1.5, 0.5]
    assert not table[2:].any()


def test_occupancy_agrees_with_counting_moment_by_moment() -> None:
    log = make_log("eclip")
    edges = np.linspace(0, log.kernels.window_ns, 41)
    table = lanes.occupied(log, edges)
    moments = np.arange(log.kernels.window_ns // 500) * 500 + 250
    counted = np.zeros((16, len(moments)))
    for lane, start, end in zip(
        log.kernels.lane, log.kernels.start_ns, log.kernels.end_ns, strict=True
    ):
        counted[list(log.plan.lanes[lane].mask)] += (moments >= start) & (moments < end)
    assert np.allclose(table, counted.reshape(16, 40, -1).mean(axis=2), atol=0.02)

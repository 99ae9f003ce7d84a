"""The report: what it says about run logs, plans and comparisons, and that no name breaks it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from comparisons import comparison, entry, score
from eclip.core.made import Made
from eclip.core.mix import parse_mix
from eclip.core.model_key import ModelKey
from eclip.core.plan import FOREIGN, Joints, Rule, Turns
from eclip.core.runlog import Requests
from eclip.core.topology import Mask, Topology
from eclip.errors import ArtefactError, UsageError
from eclip.files import store
from eclip.files.comparison import plan_digest, trial_of
from eclip.reports import inside
from eclip.reports.chapters import Named, chapters_of, worst_p99
from eclip.reports.choosing import trial_table
from eclip.reports.drawing import scale_of
from eclip.reports.labels import duration, is_baseline, number, percent, worker_colour
from eclip.reports.names import demangled, readable
from eclip.reports.page import break_at_commas, keep_whole
from eclip.reports.write import write_report
from logs import H200, make_log, make_mix, make_plan, make_profile, without_records
from report_pages import Reader, best, chapter, render, unpacked

ALBERT = ModelKey("albert", 8)
EVIL = "</script><script>throw 1</script><b>ä→日本"


# --- the page


def test_page_has_the_three_questions_and_says_where_its_numbers_come_from() -> None:
    made = Made(date="2026-11-16T08:00:00+00:00", eclip="1.2", command="eclip run plan.json")
    logs = [make_log("shared", sizes=(132,)), make_log("eclip")]
    logs = [msgspec.structs.replace(log, made=made) for log in logs]
    text = Reader(render(*logs, profiles={ALBERT: make_profile()})).text
    for words in (
        "Which way of sharing should I take?",
        "What does it do to each of my models?",
        "What does the plan do?",
        "3xalbert:8",
        "132 SMs in 16 slices",
        "a simulated H200",
        "1 round of 10.0 ms each",
        "closed loop",
        "2026-11-16 08:00 UTC",
        "eclip 1.2",
        "eclip run plan.json",
        "modelled by a simulator, not on a device",
    ):
        assert words in text


def test_measured_data_is_called_so() -> None:
    log = make_log("eclip")
    measured = msgspec.structs.replace(
        log, modelled=False, plan=msgspec.structs.replace(log.plan, modelled=False)
    )
    text = Reader(render(measured)).text
    assert "numbers measured" in text
    assert "by a simulator" not in text
    found = chapters_of([Named(measured), Named(log)])
    assert len(found) == 2  # measured and modelled runs are never ranked together
    other = Reader(render(measured, msgspec.structs.replace(measured, device="another GPU"))).text
    assert "the runs differ in device" in other


def test_the_page_loads_nothing() -> None:
    html = render(make_log("eclip"), profiles={ALBERT: make_profile()})
    for tag, attrs in Reader(html).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attrs
        assert (attrs.get("href") or "#").startswith("#")
    assert "default-src 'none'" in html


def test_names_from_files_stay_text() -> None:
    mix = make_mix(2, EVIL)
    topology = msgspec.structs.replace(H200, title=EVIL, unit_name=EVIL)
    log = make_log(EVIL, mix=mix, topology=topology)
    log = msgspec.structs.replace(log, device=EVIL, load=EVIL, warnings=(EVIL,))
    profile = make_profile(EVIL, name=EVIL)
    reader = Reader(render(log, profiles={profile.model: profile}))
    ordinary = Reader(render(make_log("eclip", workers=2), profiles={ALBERT: make_profile()}))
    assert [kind for kind, _ in reader.scripts] == [kind for kind, _ in ordinary.scripts]
    assert not [tag for tag, _ in reader.tags if tag == "b"]
    assert EVIL in reader.text


@pytest.mark.parametrize("empty", [False, True])
def test_a_run_of_nothing_still_gives_a_page(empty: bool) -> None:
    """Alone, and next to a run of something."""
    logs = [without_records(make_log("eclip"))] + ([] if empty else [make_log("shared")])
    assert "No kernel was recorded" in Reader(render(*logs)).text


@pytest.mark.parametrize("workers", [1, 32])
def test_few_and_many_workers_give_a_page(workers: int) -> None:
    log = make_log("eclip", workers=workers, kernel_ns=400_000)
    assert f"albert.{workers}" in Reader(render(log, profiles={ALBERT: make_profile()})).text


def test_a_stored_comparison_alone_gives_a_page() -> None:
    text = Reader(render(comparison({"shared": 1.0, "search": 1.3}))).text
    assert "+30.0%" in text
    assert "eclip compare m/1 --repeats 3" in text
    assert "What does the plan do?" not in text  # it holds no plan


# --- chapters


def test_what_is_given_is_compared_where_mix_load_and_device_agree() -> None:
    closed = [make_log("shared"), make_log("eclip")]
    other_load = msgspec.structs.replace(make_log("shared"), load="Poisson")
    mi50 = store.load_builtin("mi50", Topology)
    other_device = make_log("shared", sizes=(mi50.units,), topology=mi50)
    given = [*closed, other_load, other_device, make_log("shared", workers=2)]
    found = chapters_of(Named(one) for one in given)
    assert [len(one.ways) for one in found] == [2, 1, 1, 1]
    with pytest.raises(UsageError, match="at least one"):
        chapters_of([])


def test_what_is_promised_is_part_of_the_mix() -> None:
    tiers = [
        ("300rps/5ms", "background"),
        ("300rps/5ms", "background/weight=1"),  # the same in other words
        ("300rps/2ms", "background"),
        ("300rps/5ms", "background/floor=0.2"),
    ]
    mixes = [parse_mix(f"albert:8@{first},albert:8@{second}") for first, second in tiers]
    found = chapters_of(Named(make_log("yield", mix=mix)) for mix in mixes)
    assert [len(one.ways) for one in found] == [2, 1, 1]


def test_a_plan_joins_the_runs_of_its_mix_and_is_not_said_to_have_run() -> None:
    plan = make_plan("search", make_mix(3), (48,))
    found = chapter(plan, make_log("eclip"))
    assert [way.policy for way in found.ways] == ["eclip", "search"]
    assert [way.policy for way in found.ran] == ["eclip"]
    assert "This plan has not run" in Reader(render(plan, make_log("eclip"))).text
    assert "these plans have not run yet" in Reader(render(plan)).text


def test_two_of_one_policy_are_told_apart_by_their_files_then_devices() -> None:
    log = make_log("eclip")
    other = msgspec.structs.replace(log, device="gpu")

    def labels(*named: Named) -> set[str]:
        return {way.label for one in chapters_of(named) for way in one.ways}

    assert labels(Named(log, "a.json"), Named(other, "b.json")) == {
        "eclip (a.json)",
        "eclip (b.json)",
    }
    assert labels(Named(log), Named(other)) == {"eclip on a simulated H200", "eclip on gpu"}
    assert len(labels(Named(log), Named(log))) == 2


def test_a_run_log_completes_the_entry_that_it_belongs_to() -> None:
    log = make_log("search")
    workers = tuple(worker.name for worker in log.plan.workers)
    three: dict[str, Any] = {
        "requests": (1,) * 3,
        "rate_rps": (100.0,) * 3,
        "p50_ms": (1.0,) * 3,
        "p99_ms": (2.0,) * 3,
        "offered_rps": (None,) * 3,
    }
    stored = comparison(
        [
            entry(
                policy,
                score(stp, **three),
                switches=(0,) * 3,
                plan=plan_digest(log.plan) if policy == "search" else "other",
            )
            for policy, stp in (("shared", 1.0), ("search", 1.5))
        ],
        mix=log.plan.mix.name,
        workers=workers,
        models=log.plan.models,
        alone_rps=(900.0,) * 3,
        device=log.device,
        modelled=log.modelled,
        load=log.load,
    )
    given = [Named(stored, "r.jsonl"), Named(log, "search.run.json")]
    for named in (given, given[::-1]):  # files are given in any order
        (found,) = chapters_of(named)
        assert [way.label for way in found.ways] == ["search", "shared"]
        assert best(found).log == log
        assert best(found).file == "r.jsonl, search.run.json"
    elsewhere = msgspec.structs.replace(log, device="another GPU")
    (found,) = chapters_of([Named(stored), Named(elsewhere, "b.json")])
    assert len(found.ways) == 3


def test_kernels_that_a_search_chose_are_in_one_chapter_with_the_others() -> None:
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
    reader = Reader(render(*logs, profiles=profiles))
    assert "albert~66:8" in reader.text
    assert {data["model"] for data in reader.data if "names" in data} == set(map(str, profiles))
    fewer = Reader(render(*logs, profiles={ALBERT: profiles[ALBERT]})).text
    assert "the profile of albert~66:8 was not given" in fewer


def test_a_profile_of_other_kernels_or_of_another_device_is_not_drawn() -> None:
    log = make_log("eclip")
    foreign = make_profile(topology=store.load_builtin("mi50", Topology))
    assert "are for different devices" in Reader(render(log, profiles={ALBERT: foreign})).text
    prints = msgspec.structs.replace(log.plan.fingerprint, traces={"albert:8": "0" * 64})
    other = msgspec.structs.replace(log.plan, fingerprint=prints)
    logs = [log, msgspec.structs.replace(log, plan=other)]
    text = Reader(render(*logs, profiles={ALBERT: make_profile()})).text
    assert "the plan and profile albert:8 hold different kernels" in text


def test_warnings_are_shown_once_with_their_runs() -> None:
    logs = [
        msgspec.structs.replace(make_log(policy), warnings=("clock was not fixed",) * 2)
        for policy in ("shared", "eclip")
    ]
    text = Reader(render(*logs)).text
    assert text.count("clock was not fixed") == 1
    assert "shared, eclip: clock was not fixed" in text


def test_a_results_file_is_read_and_other_kinds_are_refused(tmp_path: Path) -> None:
    store.append(comparison({"shared": 1.0, "search": 1.2}), tmp_path / "r.jsonl")
    results = tmp_path / "r.jsonl"
    with pytest.raises(UsageError, match="a trace needs a run log"):
        write_report(results, tmp_path / "r.html", tmp_path / "t.json.gz")
    store.save(H200, tmp_path / "h200.json")
    with pytest.raises(ArtefactError, match="holds a topology"):
        write_report([tmp_path / "h200.json"], tmp_path / "r.html")
    text = Reader(write_report(results, tmp_path / "r.html").read_text()).text
    assert "r.jsonl" in text


# --- plans and kernels


def test_slices_are_drawn_where_the_groups_run() -> None:
    plan = make_log("eclip", workers=1).plan
    (request,) = inside.insides(chapter(plan), None)[0].requests
    assert request.head == (
        "60 kernels in 6 groups on 48 SMs (slices 0-5) and 96 SMs (slices 0-11), "
        "1.50 ms undisturbed"
    )
    assert request.shades[0].startswith("M0 0h1666v6h-1666z")  # 48 SMs: six slices of eight
    assert request.shades[1].startswith("M1666 0h1667v12")
    assert request.joints == ""
    assert "50% of the time on 48 SMs" in request.words


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((132,), "Every model may use the whole device."),
        (
            (48,),
            "Of 132 SMs albert.1 has 48 and albert.2 has 48; slices 0-5 are for several of them.",
        ),
        ((48, 96), "Of 132 SMs albert.1 has 48 to 96 and albert.2 has 48 to 96; slices "),
    ],
)
def test_a_plan_is_told_in_a_sentence(sizes: tuple[int, ...], words: str) -> None:
    plan = make_plan("search", make_mix(2), sizes)
    (shown,) = inside.insides(chapter(plan), None)
    assert shown.gist.startswith(words)
    turns = msgspec.structs.replace(plan, sharing=Turns())
    assert "take turns of the whole device" in Reader(render(turns)).text


def test_slices_of_unequal_size_are_explained_where_they_are_drawn() -> None:
    words = "Slices differ in size but are drawn at one height"
    unequal = Reader(render(make_plan("search", make_mix(2), (48,)))).text
    assert f"{words}: 15 of 8 SMs and 1 of 12 SMs." in unequal
    mi50 = store.load_builtin("mi50", Topology)
    equal = Reader(render(make_plan("search", make_mix(2), (15,), mi50))).text
    assert "slices over time" in equal and words not in equal


def test_masks_of_scattered_slices_are_drawn_in_runs() -> None:
    assert inside._runs(Mask([0, 1, 5, 7, 8])) == [(0, 2), (5, 1), (7, 2)]


def test_joints_yields_and_moves_are_told() -> None:
    log = make_log("yield", workers=2)
    yields = (Rule(to=(FOREIGN,)),)
    joints = Joints(at=(20, 40), depth=2, rules=yields, stretch_ns=(100, 200, 100))
    workers = (msgspec.structs.replace(log.plan.workers[0], joints=joints), log.plan.workers[1])
    counters = msgspec.structs.replace(
        log.counters[0], yields=7, moves=3, longest_pause_ns=2_000_000
    )
    log = msgspec.structs.replace(
        log,
        plan=msgspec.structs.replace(log.plan, workers=workers),
        counters=(counters, log.counters[1]),
    )
    (shown,) = inside.insides(chapter(log), None)
    first, second = shown.requests
    assert first.joints == "M2500 0v1M7500 0v1"
    assert any(
        "yielded 7 times (longest pause 2.00 ms) and ran 3 stretches aside" in fact
        for fact in first.facts
    )
    assert second.joints == "" and not any("yielded" in fact for fact in second.facts)
    data = unpacked(shown.kernels)
    assert data["workers"][0]["joints"] == [20, 40]
    assert "albert.1 yields while a service of another process is busy." in shown.gist


def test_every_recorded_kernel_is_in_the_page() -> None:
    log = make_log("eclip", kernel_ns=2_000)
    assert len(log.kernels.worker) > 9_000
    (shown,) = inside.insides(chapter(log), None)
    data = unpacked(shown.kernels)
    assert sum(len(worker["start"]) for worker in data["workers"]) == len(log.kernels.worker)
    first = data["workers"][0]
    own = [index for index, worker in enumerate(log.kernels.worker) if worker == 0]
    starts = sorted(log.kernels.start_ns[index] // 100 for index in own)
    assert np.cumsum(first["start"]).tolist() == starts
    assert min(first["long"]) >= 0
    assert set(np.cumsum(first["at"]).tolist()) == set(range(60))
    assert (
        f"The {len(log.kernels.worker):,} kernels of the first 5.00 ms of the run." in shown.caption
    )
    own_run = msgspec.structs.replace(log.kernels, own_run=True)
    (other,) = inside.insides(chapter(msgspec.structs.replace(log, kernels=own_run)), None)
    assert "of a run of their own after the measured one" in other.caption


def test_what_a_smaller_lane_costs_is_packed_with_names() -> None:
    profile = make_profile()
    (cost,) = inside.lane_costs(chapter(make_log("eclip")), {ALBERT: profile})
    data = unpacked(cost.data)
    assert data["names"][:2] == ["gemm<0>", "gemm<1>"]
    assert data["sizes"] == list(profile.sizes)
    busy = np.array(profile.busy_ns)
    assert np.allclose(np.array(data["times"]) / 100, busy / busy[:, -1:], atol=0.006)


# --- words, numbers, scales


def test_names_are_demangled_without_arguments_and_cut() -> None:
    name = "_ZN2at6native24vectorized_gather_kernelILi16ElEEvPcS2_PT0_illllb"
    assert demangled(name).startswith("void at::native::vectorized_gather_kernel<16, long>(char*")
    assert readable(name) == "vectorized_gather_kernel<16, long>"
    assert readable("_Zbroken") == "_Zbroken"
    assert readable("nvjet_sm90") == "nvjet_sm90"
    assert len(readable("x" * 500)) == 90


def test_baselines_are_what_needs_no_plan_of_ours() -> None:
    assert all(map(is_baseline, ("shared", "mps", "masks", "launches-4-2", "kernel")))
    assert not any(map(is_baseline, ("eclip", "search", "yield", "move", "my-plan", "model-2")))


def test_a_worker_that_completed_nothing_leaves_no_worst_p99() -> None:
    assert worst_p99(score(1.0)) == 4.0
    assert worst_p99(score(1.0, p99_ms=(3.0, None))) is None


def test_a_worker_that_completed_nothing_gives_a_page() -> None:
    log = make_log("eclip")
    kept = [index for index, worker in enumerate(log.requests.worker) if worker != 1]
    columns = {
        field: tuple(getattr(log.requests, field)[index] for index in kept)
        for field in ("worker", "arrival_ns", "start_ns", "end_ns")
    }
    starved = msgspec.structs.replace(log, requests=Requests(**columns))
    assert "albert.2" in Reader(render(starved, make_log("shared"))).text


def test_every_worker_of_the_largest_mix_has_a_colour_of_its_own() -> None:
    for dark in (False, True):
        assert len({worker_colour(worker, dark=dark) for worker in range(32)}) == 32


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


def test_percentages_have_a_real_minus_sign() -> None:
    assert percent(-0.0312) == "\N{MINUS SIGN}3.1%"


def test_durations_carry_the_unit_that_suits_them() -> None:
    assert [duration(time) for time in (0, 12, 1_500, 2_500_000, 10**9)] == [
        "0 ns",
        "12 ns",
        "1.50 µs",
        "2.50 ms",
        "1.00 s",
    ]


@pytest.mark.parametrize(
    ("values", "log", "texts"),
    [
        ([0.0, 22.0], False, ["0", "5", "10", "15", "20"]),
        ([1.0, 1500.0], True, ["1", "10", "100", "1,000"]),
        ([2.0, 60.0], True, ["2", "5", "10", "20", "50"]),
        ([0.5, 1.5], False, ["0.5", "1", "1.5"]),
    ],
)
def test_ticks_are_few_and_round(values: list[float], log: bool, texts: list[str]) -> None:
    scale = scale_of(values)
    assert scale.log == log
    assert [tick.text for tick in scale.ticks] == texts
    places = [tick.at for tick in scale.ticks]
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= 100


@pytest.mark.parametrize("values", [[], [0.0], [3.0], [1.0, 1.0], [float("inf"), 2.0], [0.0, 1e-9]])
def test_scales_of_few_values_place_them(values: list[float]) -> None:
    for log in (None, True):
        scale = scale_of(values, log=log)
        assert all(0 <= scale.place(value) <= 100 for value in values)
        assert all(re.fullmatch(r"[-\d.,e+]+", tick.text) for tick in scale.ticks)


def test_lines_end_neither_in_a_name_nor_within_a_model() -> None:
    assert keep_whole("Take launches-16-8 & slices 0-1,13-15") == (
        'Take <span class="whole">launches-16-8</span> &amp; slices '
        '<span class="whole">0-1</span>,<span class="whole">13-15</span>'
    )
    assert break_at_commas("a<b:1@3rps,b:8") == "a&lt;b:1@3rps,<wbr>b:8"


def test_of_settings_with_one_name_none_is_called_the_one_taken() -> None:
    tried = [trial_of(name, stp, 0.9, 2.0) for name, stp in (("64+64", 1.2), ("96+36", 1.1))]
    for trials, notes in (
        (tried, ["taken", ""]),
        ([*tried, tried[0]], ["one of these 2 was taken: they differ in slices", ""]),
    ):
        masks = entry("masks", score(1.2), setting="64+64", trials=tuple(trials))
        found = chapter(comparison([entry("shared", score(1.0)), masks]))
        assert [row[-1] for row in trial_table(found)[1]][:2] == notes


def test_plans_that_have_not_run_are_not_called_measured() -> None:
    plan = msgspec.structs.replace(make_plan("eclip", make_mix(2), (132,)), modelled=False)
    text = Reader(render(plan)).text
    assert "planned not run yet" in text
    assert "numbers measured" not in text


def test_comparisons_of_one_mix_are_told_apart_by_their_load() -> None:
    late = comparison({"shared": 1.0, "eclip": 1.1}, load="Poisson at 60%", load_part=0.6)
    text = Reader(render(comparison({"shared": 1.0, "eclip": 1.1}), late)).text
    assert "(measured, closed loop): " in text and "(measured, Poisson at 60%): " in text

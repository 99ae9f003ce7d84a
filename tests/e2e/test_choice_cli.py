"""Kernels that libraries choose for fewer units, from ``eclip plan`` to ``eclip report``."""

from __future__ import annotations

import re
import shutil
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from commands import Cli, assert_refused
from eclip.core.model_key import parse_model
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.core.trace import with_traces
from eclip.files import store
from eclip.files.observations import Observations

MIX = "gpt2:8,vit_b_16:8"
CHOSEN = ["gpt2~66:8", "vit_b_16~66:8"]
SEARCH = ("--policy", "search", "--batches", 2)
PACK = Path(str(resources.files("eclip") / "data" / "profiles" / "h200"))


@pytest.fixture
def plan(cli: Cli) -> Path:
    """Of a search that has chosen other kernels for both workers."""
    assert cli("plan", MIX, *SEARCH, "-o", "plan.json").code == 0
    assert models_of(Path("plan.json")) == CHOSEN
    return Path("plan.json")


def models_of(file: Path) -> list[str]:
    return [str(model) for model in store.load(file, Plan).models]


def own_profiles(folder: Path) -> Path:
    """A user's folder with the workers' own profiles and no others."""
    folder.mkdir()
    for name in ("gpt2-8.json.gz", "vit_b_16-8.json.gz"):
        shutil.copy(PACK / name, folder)
    return folder


def renamed(profile: Profile, model: str) -> Profile:
    trace = msgspec.structs.replace(profile.trace, model=parse_model(model))
    fingerprint = with_traces(profile.fingerprint, [trace])
    return msgspec.structs.replace(profile, trace=trace, fingerprint=fingerprint)


def test_plan_of_a_search_with_other_kernels_is_explained_run_and_reported(
    cli: Cli, plan: Path
) -> None:
    explained = cli("explain", plan)
    assert explained.out.count("kernels chosen for 66") == 2
    data = cli("explain", plan, "--json").data
    models = ["gpt2~66:8", "vit_b_16~66:8"]
    assert (data["mix"], [worker["model"] for worker in data["workers"]]) == (MIX, models)

    ran = cli("run", plan, "--seconds", 0.3, "-o", "run.json", "--json")
    assert (ran.code, ran.err.strip()) == (0, "")
    assert cli("plan", MIX, "--policy", "shared", "-o", "shared.json").code == 0
    plain = cli("run", "shared.json", "--seconds", 0.3, "-o", "plain.json", "--json")
    # Rates alone are of the mix as asked, so that throughput compares.
    logs = [store.load(Path(name), RunLog) for name in ("run.json", "plain.json")]
    assert logs[0].alone_rps == logs[1].alone_rps
    assert ran.data["stp"] > plain.data["stp"]
    said = store.load(plan, Plan).evidence
    assert said is not None
    (trial,) = (one for one in said.trials if one.chosen)
    assert ran.data["stp"] == pytest.approx(sum(trial.ratios), rel=0.02)

    drawn = cli("report", "plain.json", "run.json", "-o", "both.html")
    assert (drawn.code, drawn.err.strip()) == (0, "")
    page = Path("both.html").read_text(encoding="utf-8")
    assert "gpt2~66:8" in page and "Nothing to draw" not in page
    traced = cli("report", "run.json", "-o", "one.html", "--trace", "trace.json.gz")
    assert traced.code == 0
    assert Path("trace.json.gz").exists()


def test_search_keeps_to_own_kernels_if_told_or_if_there_are_no_others(
    cli: Cli, tmp_path: Path
) -> None:
    assert cli("plan", MIX, *SEARCH, "--usual-kernels", "-o", "told.json").code == 0
    mine = own_profiles(tmp_path / "mine")
    assert cli("plan", MIX, *SEARCH, "--profiles", mine, "-o", "mine.json").code == 0
    assert (
        cli("plan", "gpt2~66:8,vit_b_16:8", *SEARCH, "--usual-kernels", "-o", "named.json").code
        == 0
    )
    assert models_of(Path("told.json")) == models_of(Path("mine.json")) == MIX.split(",")
    assert models_of(Path("named.json")) == ["gpt2~66:8", "vit_b_16:8"]


def test_plan_with_other_kernels_takes_part_in_a_comparison(cli: Cli, plan: Path) -> None:
    outcome = cli(
        "compare", MIX, "--policies", "shared,search", "--set", "usual-kernels=yes",
        "--set", "batches=0", "--plan", f"tuned={plan}", "--seconds", 0.2, "--json", "-o", "out",
        "--report", "r.html",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    stp = {one["policy"]: one["stp"] for one in outcome.data["policies"]}
    assert stp["tuned"] > stp["shared"]
    assert models_of(Path("out/search.plan.json")) == MIX.split(",")
    assert models_of(Path("out/tuned.plan.json")) == CHOSEN
    assert "No heat map" not in Path("r.html").read_text(encoding="utf-8")


def test_what_a_search_tried_with_other_kernels_is_kept_for_fitting(cli: Cli) -> None:
    outcome = cli(
        "compare", MIX, "--policies", "search", "--set", "batches=0", "--seconds", 0.1,
        "--set", "trial-seconds=0.1", "--verify", 1, "--refine", 0.1, "-o", "out",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    kept = store.load(Path("out/observations.json.gz"), Observations)
    assert any(home.kernels_for for run in kept.runs for home in run.homes)
    assert kept.fingerprint.traces.keys() == {*CHOSEN, *MIX.split(",")}
    still = sum(not any(home.switch_max for home in run.homes) for run in kept.runs)
    # All of them are replayed, with their kernels; they are only too few.
    fitted = cli("calibrate", "--from", "out/observations.json.gz")
    assert_refused(fitted, "runs without switches of 1 mixes are too few")
    counted = re.search(r"(\d+) runs without", fitted.err)
    assert counted is not None and int(counted[1]) >= still


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ("albert~", "or albert~66:8 for"),
        ("albert~x:8", "or albert~66:8 for"),
        ("~66:8", "write it like"),
        ("albert~999999:8", "132 SMs"),
        ("albert~66:4", "eclip profile albert~66:4"),
    ],
)
def test_models_that_name_no_kernels_are_refused_in_one_line(
    cli: Cli, mix: str, words: str
) -> None:
    assert_refused(cli("plan", mix, *SEARCH), words)
    assert_refused(cli("compare", f"vgg19,{mix}"), words)
    assert not Path("plan.json").exists()


def test_one_model_with_several_kernels_is_planned_as_it_is_named(cli: Cli) -> None:
    mix = "2xalbert~66:8,albert:8"
    assert cli("plan", mix, *SEARCH, "-o", "plan.json").code == 0
    assert models_of(Path("plan.json"))[:2] == ["albert~66:8"] * 2
    ran = cli("run", "plan.json", "--seconds", 0.2, "--json")
    assert [one["name"] for one in ran.data["workers"]] == ["albert.1", "albert.2", "albert.3"]
    log = store.load(Path("run.json"), RunLog)
    assert log.alone_rps[0] == log.alone_rps[1] != log.alone_rps[2]


def test_damaged_profile_of_other_kernels_is_named_and_can_be_done_without(
    cli: Cli, tmp_path: Path
) -> None:
    mine = own_profiles(tmp_path / "mine")
    (mine / "gpt2~66-8.json.gz").write_bytes((PACK / "gpt2~66-8.json.gz").read_bytes()[:500])
    with_mine = ("--profiles", mine, "-o", "plan.json")
    assert_refused(cli("plan", MIX, *SEARCH, *with_mine), "gpt2~66-8.json.gz")
    assert cli("plan", MIX, *SEARCH, *with_mine, "--usual-kernels").code == 0
    # A comparison without a search has no need of it either.
    compared = cli("compare", MIX, "--policies", "shared", "--seconds", 0.1, "--profiles", mine)
    assert compared.code == 0


def test_plan_whose_profile_is_gone_or_has_changed_is_refused(cli: Cli, tmp_path: Path) -> None:
    mine = own_profiles(tmp_path / "mine")
    file = mine / "gpt2~40-8.json.gz"
    store.save(renamed(store.load(PACK / "gpt2~66-8.json.gz", Profile), "gpt2~40:8"), file)
    assert cli("plan", MIX, *SEARCH, "--profiles", mine, "-o", "plan.json").code == 0
    assert models_of(Path("plan.json"))[0] == "gpt2~40:8"
    assert cli("run", "plan.json", "--seconds", 0.1, "--profiles", mine).code == 0
    assert_refused(cli("run", "plan.json"), "no profile of gpt2~40:8", "as profiles")
    for command in (
        ("compare", MIX, "--policies", "shared", "--plan", "mine=plan.json"),
        (
            "report",
            "run.json",
        ),
    ):
        assert_refused(cli(*command), "no profile of gpt2~40:8", "as profiles")
    file.unlink()
    store.save(renamed(store.load(PACK / "gpt2-8.json.gz", Profile), "gpt2~40:8"), file)
    changed = cli("run", "plan.json", "--profiles", mine)
    assert_refused(changed, "gpt2 was made for other kernels", "plan again")


def test_command_is_not_run_under_a_plan_for_kernels_it_does_not_launch(
    cli: Cli, plan: Path
) -> None:
    assert_refused(cli("exec", "--plan", plan, "--", "true"), "--usual-kernels")


def test_mix_with_rates_is_searched_with_other_kernels(cli: Cli) -> None:
    mix = "gpt2:8@150rps,vit_b_16:8@250rps"
    made = cli("plan", mix, *SEARCH, "-o", "plan.json")
    assert made.code == 0, made.err
    ran = cli("run", "plan.json", "--seconds", 0.5, "--json")
    assert ran.code == 0
    assert ran.data["workers"][0]["rate_rps"] == pytest.approx(150, rel=0.3)

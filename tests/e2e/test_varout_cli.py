"""``eclip varout`` as its users meet it: tables, JSON, the page, and every way to get it wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eclip.cli import main, screen
from eclip.core.lengths import Lengths
from eclip.files import store
from eclip.files.machine import Machine


class Cli:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(screen.out, "_width", 160)  # room for all columns
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """What it printed; to standard error if it failed, which must be one line."""
        self._monkeypatch.setattr(sys, "argv", ["eclip", "varout", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        captured = self._capsys.readouterr()
        assert (stop.value.code or 0) == code, captured.err
        if code == 0:
            return captured.out
        assert captured.out == ""
        assert captured.err.startswith("eclip: ")
        assert captured.err.count("\n") == 1
        return captured.err

    def data(self, *arguments: object) -> Any:
        return json.loads(self(*arguments, "--json"))


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(tmp_path)
    return Cli(monkeypatch, capsys)


def test_compare_prints_the_document_and_the_device(cli: Cli) -> None:
    text = cli("compare")
    assert "2004 document" in text
    assert "NVIDIA H200" in text
    assert "modelled" in text
    for name in ("maximum", "double-symmetric", "double-conditional", "spill", "swap", "merge"):
        assert name in text


def test_compare_as_json_and_at_given_ratios(cli: Cli) -> None:
    (found,) = cli.data("compare", "--machine", "imagine", "--ratios", "5,10")
    assert [point["ratio"] for point in found["points"]] == [5, 10]
    assert found["points"][1]["exact"] == 5732
    assert found["points"][1]["interval"]["swap"] == 5802
    (wider,) = cli.data("compare", "--machine", "imagine", "--ratios", "10", "--allocated", "10")
    assert wider["points"][0]["interval"]["swap"] == 5732


def test_the_page_needs_nothing_else_and_is_replaced_only_by_its_like(cli: Cli) -> None:
    cli("compare", "--report", "growth.html")
    cli("compare", "--report", "growth.html")
    text = Path("growth.html").read_text()
    assert "eclip report" in text
    assert not re.search(r'(src|href)="http|<script', text)
    assert text.count('class="area"') == len(store.builtin_names(Machine))
    assert text.count("</svg>swap</li>") == len(store.builtin_names(Machine))
    Path("notes.html").write_text("mine")
    assert "will not be replaced" in cli("compare", "--report", "notes.html", code=2)


def test_a_machine_of_ones_own(cli: Cli) -> None:
    machine = store.load_builtin("imagine", Machine)
    store.save(machine, Path("mine.json"))
    (found,) = cli.data("compare", "--machine", "mine.json")
    assert found["machine"] == "imagine"


def test_estimate_chooses_and_keeps_the_distribution(cli: Cli) -> None:
    Path("sample.txt").write_text("\n".join(["100"] * 99 + ["90000"]))
    found = cli.data(
        "estimate", "sample.txt", "--mechanisms", "swap,maximum", "--price", 1e-2, "-o", "l.json"
    )
    assert found["best"]["mechanism"] == "swap"
    assert 100 <= found["best"]["capacity"] < 90000
    assert found["best"]["overflow"] == pytest.approx(0.01)
    assert {one["mechanism"] for one in found["each"]} == {"swap", "maximum"}
    assert store.load(Path("l.json"), Lengths).longest == 90000
    one, more = (
        cli.data("estimate", "l.json", "--mechanisms", "spill", "--inputs", inputs)["best"]
        for inputs in (1 << 20, 1 << 24)
    )
    assert 0 < one["expected"] < more["expected"]
    assert (one["memory_bytes"], more["memory_bytes"]) == (8 << 20, 8 << 24)  # an arena for all
    assert "at most 5120" in cli("estimate", "l.json", "--machine", "imagine", code=2)
    Path("short.txt").write_text("100 200 3000")
    assert "capacity" in cli("estimate", "short.txt", "--machine", "imagine")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "--machine", "nowhere"], "unknown machine 'nowhere'; choose one of: h200"),
        (["compare", "--machine", "none.json"], "cannot read none.json"),
        (["compare", "--ratios", "1,x"], "is no list of numbers; separate them by commas"),
        (["compare", "--machine", "imagine", "--ratios", "21"], "exceeds the largest"),
        (["compare", "--allocated", "0"], "more than 0"),
        (["estimate", "none.txt"], "cannot read none.txt"),
        (["estimate", "words.txt"], "one whole number a line"),
        (["estimate", "below.txt"], "none below 0"),
        (["estimate", "good.txt", "--mechanisms", "magic"], "unknown mechanism 'magic'"),
        (["estimate", "good.txt", "--price", "-1"], "--price must be 0 to 1e+09, not -1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(cli: Cli, arguments: list[str], words: str) -> None:
    Path("words.txt").write_text("one two")
    Path("below.txt").write_text("3 -1")
    Path("good.txt").write_text("3 1")
    assert words in cli(*arguments, code=2)


def test_impossible_limits_are_a_failure_to_plan(cli: Cli) -> None:
    Path("good.txt").write_text("3 1")
    error = cli("estimate", "good.txt", "--mechanisms", "maximum", "--most-bytes", 8, code=1)
    assert "more memory" in error


def test_comparing_does_not_load_numba_or_torch() -> None:
    script = (
        "import sys; from eclip.varout import growth, estimate, watch; "
        "print([m for m in ('numba', 'torch', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_new_artefacts_are_inspected(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from eclip.cli import inspect

    for name in store.builtin_names(Machine):
        inspect.show(store.load_builtin(name, Machine), as_json=False)
    inspect.show(Lengths(values=(1, 9), times=(3, 1)), as_json=False)


def test_annotate_writes_expected_and_tail_times(cli: Cli) -> None:
    from eclip.core.profile import Profile
    from eclip.core.topology import Topology
    from eclip.models.synthetic import synthetic_profile

    store.save(synthetic_profile(0, 6, store.load_builtin("h200", Topology)), Path("p.json"))
    Path("l.txt").write_text("100 " * 50 + "90000")
    text = cli(
        "annotate", "p.json", "--lengths", "l.txt", "--kernels", "1,2", "--capacity", 1000,
        "-o", "q.json",
    )  # fmt: skip
    assert "p99 ms" in text
    made = store.load(Path("q.json"), Profile)
    assert [one.kernel for one in made.trace.lengths] == [1, 2]
    assert "unknown mechanism" in cli(
        "annotate", "p.json", "--lengths", "l.txt", "--mechanism", "hope", "-o", "r.json", code=2
    )

"""Bad input of every kind: one line after ``eclip:``, the right exit code, no traceback."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from commands import Cli, assert_refused
from comparisons import comparison
from eclip.cli import make_app, screen
from eclip.cli.screen.interrupt import SAME_S
from eclip.core.device import Window
from eclip.errors import UsageError
from eclip.files import store
from eclip.planner.search.objective import Objective
from eclip.progress import Progress
from waiting import PATIENCE_S, until

BOTH = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
# A command of the command line that works until it is told to stop; one that only reads ends when
# it has read a line, and one that never looks says that it goes on.
WORK = """
import sys, time
import eclip.cli
from eclip.cli import screen

def work(manner: str):
    steps = 1_000_000
    with screen.progress_bar("working") as progress:
        progress.phase("first")
        print("ready", flush=True)
        for step in range(steps):
            progress.part(step / steps)
            if manner == "reads":
                sys.stdin.readline()
                break
            time.sleep(0.05)
            if progress.stopped and manner == "looks":
                break
            if progress.stopped and manner == "never looks":
                print("going on", flush=True)
                manner = "has said so"
    screen.exit_if_stopped(progress, "3 of 10 runs are in r.jsonl")

make_app = eclip.cli.make_app

def make_app_with_work(names=()):
    app = make_app(["inspect"])
    app.command("work")(work)
    return app

eclip.cli.make_app = make_app_with_work
sys.argv.insert(1, "work")
eclip.cli.main()
"""


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | more


def eclip(*arguments: object, shell: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own; ``shell`` is what a shell adds to the command."""
    words = [sys.executable, "-m", "eclip", *map(str, arguments)]
    return subprocess.run(
        ["bash", "-c", f'"$@" {shell}', "bash", *words],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture
def plan(cli: Cli) -> Path:
    assert cli("plan", "alexnet:8,vgg19:8", "-o", "plan.json").code == 0
    return Path("plan.json")


# --- Signals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), BOTH)
def test_signal_while_commands_are_imported_is_one_line(
    tmp_path: Path, number: int, code: int
) -> None:
    slow = tmp_path / "typer.py"
    slow.write_text("import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(3600)\n")
    with child_of("-m", "eclip", "--help", folder=tmp_path) as child:
        assert until((tmp_path / "importing").exists)
        child.send_signal(number)
        _, said = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == code
    assert len(said.splitlines()) == 1 and said.startswith("eclip: ")


def test_installed_command_is_the_same_door() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'eclip = "eclip.__main__:main"' in text


@pytest.mark.parametrize(("number", "code"), BOTH)
def test_first_signal_asks_the_work_to_end_and_what_ran_is_kept(
    tmp_path: Path, number: int, code: int
) -> None:
    with working(tmp_path, "looks") as child:
        child.send_signal(number)
        _, said = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == code
    lines = said.strip().splitlines()
    assert lines[0] == "stopping: finished runs are kept; press Ctrl-C again to stop at once"
    assert lines[-1] == "eclip: stopped early; 3 of 10 runs are in r.jsonl"
    assert len(lines) == 2


@pytest.mark.parametrize(("number", "code"), BOTH)
def test_second_signal_ends_at_once(tmp_path: Path, number: int, code: int) -> None:
    with working(tmp_path, "never looks") as child:
        child.send_signal(signal.SIGINT)
        assert child.stdout is not None and child.stdout.readline() == "going on\n"
        time.sleep(SAME_S)  # two signals within this time count once
        child.send_signal(number)
        _, said = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == code
    assert len(said.splitlines()) == 2 and said.splitlines()[-1].startswith("eclip: ")
    assert said.count("stopping:") == 1


@pytest.mark.parametrize(("number", "code"), BOTH)
def test_signal_outside_of_a_bar_ends_the_command_with_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def slow(name: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr(store, "load", slow)
    assert_refused(cli("inspect", "plan.json"), code=code)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # put back


def test_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{WORK}"
    with working(tmp_path, "reads", ignoring) as child:
        child.send_signal(signal.SIGINT)
        _, said = child.communicate("\n", timeout=PATIENCE_S)
    assert (child.returncode, said) == (0, "")


@contextlib.contextmanager
def child_of(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Python in a process of its own, which is ended where the test fails."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()  # nothing if it has ended, as it should have


@contextlib.contextmanager
def working(folder: Path, manner: str, script: str = WORK) -> Iterator[subprocess.Popen[str]]:
    with child_of("-c", script, manner, folder=folder) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        yield child


def test_work_that_was_not_stopped_goes_on_to_its_end() -> None:
    screen.exit_if_stopped(Progress(), "everything")
    stopped = Progress()
    stopped.stop()
    with pytest.raises(typer.Exit) as end:
        screen.exit_if_stopped(stopped, "everything")
    assert end.value.exit_code == 130


# --- Standard streams -------------------------------------------------------------------------


def test_closed_standard_output_is_refused_before_any_work(plan: Path) -> None:
    done = eclip("plan", "alexnet:8", "-o", "other.json", shell=">&-")
    assert done.returncode == 2
    assert done.stderr == "eclip: standard output is closed; leave it open, or send it to a file\n"
    assert not Path("other.json").exists()


@pytest.mark.parametrize("command", [("explain", "plan.json"), ("explain", "plan.json", "--json"),
                                     ("plan", "--help")])  # fmt: skip
def test_reader_that_stops_reading_is_no_error(plan: Path, command: tuple[str, ...]) -> None:
    # `true` ends before eclip has imported anything.
    done = eclip(*command, shell="| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (0, "")
    done = eclip(*command, shell="| head -1; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (0, "")


def test_work_is_saved_though_nobody_reads(plan: Path) -> None:
    done = eclip("plan", "alexnet:8", "-o", "other.json", shell="| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (0, "")
    assert store.kind_at(Path("other.json")) == "plan"


def test_full_standard_output_is_one_line(plan: Path) -> None:
    done = eclip("explain", "plan.json", shell="> /dev/full")
    assert done.returncode == 1
    assert done.stderr == "eclip: No space left on device\n"


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"},
                                       {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0",
                                        "PYTHONUTF8": "0"}])  # fmt: skip
@pytest.mark.parametrize("command", [("explain", "plan.json"), ("explain", "plan.json", "--json"),
                                     ("plan", "--help")])  # fmt: skip
def test_characters_that_cannot_be_written_are_replaced(
    plan: Path, variables: dict[str, str], command: tuple[str, ...]
) -> None:
    done = eclip(*command, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii() and len(done.stdout) > 200


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-"])
def test_closed_standard_error_disturbs_nothing(plan: Path, closed: str) -> None:
    assert eclip("run", "plan.json", "--seconds", 0.1, shell=closed).returncode == 0
    assert store.kind_at(Path("run.json")) == "run"
    assert eclip("run", "nowhere.json", shell=closed).returncode == 2


def test_columns_count_in_a_pipe(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    widths = {}
    for columns in ({}, {"COLUMNS": "80"}, {"COLUMNS": "0"}, {"COLUMNS": "wide"}):
        done = subprocess.run(
            [sys.executable, "-m", "eclip", "topology"],
            env=environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | columns,
            capture_output=True,
            text=True,
            check=True,
        )
        widths[columns.get("COLUMNS")] = max(map(len, done.stdout.splitlines()))
    assert widths["80"] <= 80 < widths[None] == widths["0"] == widths["wide"]


# --- What typer refuses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--polcy", "eclip"), "no such option: --polcy; did you mean --policy? see"),
        (("plan",), "missing argument 'MIX'; see `eclip plan --help`"),
        (("plan", "alexnet", "more"), "see `eclip plan --help`"),
        (("plan", "alexnet", "--verify", "-1"), "'--verify'"),
        (("plan", "alexnet", "--verify", "x"), "'--verify'"),
        (("plan", "alexnet", "--seed"), "--seed"),
        (("plann",), "plan"),
        (("varout", "estimate", "--prise", "1"), "did you mean --price? see `eclip varout"),
    ],
)
def test_arguments_that_cannot_be_read_are_one_line(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    assert_refused(cli(*arguments), words, "--help`")


def test_help_is_what_it_was(cli: Cli) -> None:
    alone = cli()
    assert "Usage: eclip [OPTIONS] COMMAND [ARGS]..." in alone.out + alone.err
    asked = cli("plan", "--help")
    assert asked.code == 0 and "Usage: eclip plan [OPTIONS]" in asked.out
    assert cli("--version").out.startswith("eclip ")


@pytest.mark.parametrize("group", [(), ("fleet",), ("varout",)])
def test_a_list_of_commands_says_in_full_what_each_does(cli: Cli, group: tuple[str, ...]) -> None:
    listed = cli(*group, "--help").out.partition("Commands:")[2]
    assert listed and "..." not in listed


# --- Numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("command", "option", "before"),
    [
        ("plan", "--weights", "1,"),
        ("plan", "--fairness", ""),
        ("plan", "--tolerance", ""),
        ("plan", "--seconds", ""),
        ("plan", "--refine", ""),
        ("compare", "--seconds", ""),
        ("run", "--warmup", ""),
        ("run", "--trace-ms", ""),
    ],
)
def test_numbers_that_are_none_are_refused_with_the_range(
    cli: Cli, command: str, option: str, before: str, value: str
) -> None:
    more = ("--policy", "search") if option == "--weights" else ()
    outcome = cli(command, "alexnet:8,vgg19:8", f"{option}={before}{value}", *more)
    assert_refused(outcome, option, value)
    assert any(word in outcome.err for word in ("or more", " to ", "finite"))


def float_options() -> list[tuple[tuple[str, ...], str]]:
    """Every option of every command that takes a number with a fraction."""
    found: list[tuple[tuple[str, ...], str]] = []
    tops = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
    commands: dict[tuple[str, ...], Any] = {(name,): one for name, one in tops.items()}
    for group in ("varout", "fleet"):
        commands |= {(group, name): one for name, one in tops[group].commands.items()}
    for path, one in commands.items():
        for option in one.params:
            text = " ".join(str(getattr(option, name, "")) for name in ("type", "type_descriptor"))
            if "float" in text.lower():
                found.append((path, option.opts[0]))
    return found


def test_no_command_takes_nan(cli: Cli) -> None:
    options = float_options()
    assert len(options) > 12
    for path, option in options:
        takes_none = path in (("calibrate",), ("top",), ("varout", "compare"))
        arguments = [] if takes_none else ["alexnet:8"]
        assert_refused(cli(*path, *arguments, f"{option}=nan"), option)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "alexnet:8", "--seconds", "1e-9"), "--seconds must be 0.001 to 86400"),
        (("plan", "albert:1000000"), "must be 1 to 65536"),
        (("plan", "albert:99999999999999999999"), "must be 1 to 65536"),
        (("plan", "1000000xalbert"), "more than 32 workers"),
        (("plan", "99999999999999xalbert"), "more than 32 workers"),
        (("plan", "albert@9999999999rps"), "the largest rate is 1000000000 requests/s"),
    ],
)  # fmt: skip
def test_limits_are_named(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    assert_refused(cli(*arguments), words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seconds": 1e-9}, "a run takes 0.001 to 86400 s, not 1e-09"),
        ({"seconds": math.nan}, "a run takes 0.001 to 86400 s, not nan"),
        ({"warmup_seconds": math.inf}, "warming up takes 0 to 86400 s, not inf"),
        ({"seconds": 1.0, "trace_ms": 1001.0}, "0 to 1000 ms, which is the whole run, not 1001"),
        ({"trace_ms": math.nan}, "not nan ms"),
    ],
)
def test_window_says_what_it_can_be(given: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Window(**given)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_objective_takes_only_numbers(value: float) -> None:
    with pytest.raises(UsageError, match=f"not 1,{value:g}"):
        Objective(weights=(1.0, value))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "--ratios", "nan"), "--ratios must be 0 to 1e+06"),
        (("compare", "--ratios", "1,inf"), "--ratios must be 0 to 1e+06"),
        (("compare", "--ratios", "-1"), "--ratios must be 0 to 1e+06"),
        (("compare", "--allocated", "nan"), "--allocated"),
        (("compare", "--allocated", "inf"), "--allocated"),
        (("compare", "--report", "missing/r.html"), "there is no folder missing"),
        (("compare", "--report", "-"), "- is not a file name"),
        (("estimate", "l.txt", "--price", "nan"), "--price must be 0 to 1e+09"),
        (("estimate", "l.txt", "--price", "inf"), "--price must be 0 to 1e+09"),
        (("estimate", "l.txt", "--inputs", str(10**30)), "--inputs"),
        (("estimate", "l.txt", "-o", "missing/l.json"), "there is no folder missing"),
        (("estimate", "huge.txt"), "huge.txt"),
        (("annotate", "p.json", "--lengths", "l.txt", "-o", "o.json", "--kernels", "nan"),
         "--kernels"),
        (("annotate", "p.json", "--lengths", "l.txt", "-o", "o.json", "--kernels", "1.5"),
         "--kernels"),
        (("annotate", "p.json", "--lengths", "l.txt", "-o", "o.json", "--capacity", str(10**30)),
         "--capacity"),
        (("annotate", "p.json", "--lengths", "l.txt", "-o", "missing/o.json"), "missing"),
        (("measure", "-o", "-"), "- is not a file name"),
    ],
)  # fmt: skip
def test_varout_refuses_what_means_nothing(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    Path("l.txt").write_text("3 1 4")
    Path("huge.txt").write_text(str(10**30))
    assert_refused(cli("varout", *arguments), words)


# --- Files ------------------------------------------------------------------------------------


def test_results_file_whose_last_line_was_cut_is_used_and_added_to(cli: Cli) -> None:
    path = Path("r.jsonl")
    for mix in ("m/1", "m/2"):
        store.append(comparison({"shared": 1.0, "eclip": 1.1}, mix=mix), path)
    path.write_bytes(path.read_bytes()[:-100])
    shown = cli("results", "r.jsonl")
    assert shown.code == 0
    assert "m/1" in shown.out and "m/2" not in shown.out
    assert "r.jsonl line 2" in shown.err and "Traceback" not in shown.err
    added = cli("compare", "alexnet:8", "--policies", "shared", "--seconds", 0.1,
                "--results", "r.jsonl")  # fmt: skip
    assert added.code == 0 and "r.jsonl line 2" in added.err
    assert [one.mix for one in store.load_results(path).comparisons] == ["m/1", "alexnet:8"]


def test_results_file_is_inspected(cli: Cli) -> None:
    path = Path("r.jsonl")
    for mix in ("m/1", "m/2"):
        store.append(comparison({"shared": 1.0}, mix=mix), path)
    assert "m/2" in cli("inspect", "r.jsonl").out
    assert [one["mix"] for one in cli("inspect", "r.jsonl", "--json").data] == ["m/1", "m/2"]


def test_report_looks_at_its_paths_first(cli: Cli, plan: Path) -> None:
    cli("run", "plan.json", "--seconds", 0.1)
    for where in ("missing/r.html", "-", "."):
        assert_refused(cli("report", "run.json", "-o", where))
        assert_refused(cli("report", "run.json", "--trace", where))
    assert not Path("report.html").exists()


def test_explain_says_which_figures_are_modelled(cli: Cli) -> None:
    cli("plan", "alexnet:8,vgg19:8", "--policy", "search", "--batches", 2, "-o", "plan.json")
    data = cli("explain", "plan.json", "--json").data
    assert "modelled" not in data and data["profiles_modelled"] is False
    assert data["evidence"]["trials_modelled"] is True
    assert data["evidence"]["frontier_modelled"] is True
    assert "modelled" not in data["evidence"]

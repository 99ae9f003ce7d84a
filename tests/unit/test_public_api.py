"""The public API: what ``import eclip`` offers, how it is documented, and that it all works."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

import eclip
from comparisons import comparison
from eclip.contest import compare as contest_compare
from eclip.contest.contest import known_policies
from eclip.models.library import file_of
from eclip.models.synthetic import synthetic_profile
from logs import make_log, make_mix
from waiting import PATIENCE_S

FUNCTIONS = [
    *("background", "case", "colocate", "compare", "lane", "load", "load_builtin", "measure"),
    *("parse_mix", "plan", "report", "request", "run", "save", "search", "serve", "split"),
]
NEEDS_A_GPU = {"background", "colocate", "lane", "split"}
EVIL = "</script><script>alert(1)</script>&<b>ä"
ROOT = Path(eclip.__file__).parent
UNTYPED: Any = eclip  # for calls that no type checker lets pass


def in_a_fresh_process(script: str, folder: Path | None = None) -> str:
    """What a script prints, in a process that sees no GPU."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# --- What is offered --------------------------------------------------------------------------


def test_every_public_name_exists_and_is_sorted() -> None:
    assert all(hasattr(eclip, name) for name in eclip.__all__)
    assert list(eclip.__all__) == sorted(eclip.__all__)
    assert set(dir(eclip)) == {*eclip.__all__, "__version__"}


def test_all_is_what_type_checkers_see() -> None:
    """``__init__`` names everything twice: once for them, and once to import it when it is used."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    offered = {f"{node.module}.{name.name}" for node in seen for name in node.names}
    assert all(name.asname == name.name for node in seen for name in node.names)  # a re-export
    assert {name.rpartition(".")[2] for name in offered} == set(eclip.__all__)
    for name in offered:
        module, _, own = name.rpartition(".")
        assert getattr(sys.modules[module], own) is getattr(eclip, own)


def test_public_functions_are_these() -> None:
    found = [name for name in eclip.__all__ if inspect.isfunction(getattr(eclip, name))]
    assert sorted(found) == sorted(FUNCTIONS)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'eclip' has no attribute 'plans'"):
        _ = eclip.plans
    assert re.match(r"\d+[.+]", eclip.__version__)


def test_importing_eclip_loads_nothing_heavy() -> None:
    heavy = ("numba", "numpy", "msgspec", "highspy", "typer", "rich", "torch", "jinja2")
    script = f"import sys, eclip; print([name for name in {heavy} if name in sys.modules])"
    assert in_a_fresh_process(script).strip() == "[]"


def test_types_ship() -> None:
    assert (ROOT / "py.typed").is_file()


# --- Documentation ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", eclip.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(eclip, name)
    own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__  # not inherited
    assert own and own.strip()
    assert not own.startswith(f"{name}(")  # what dataclasses write where nobody has


def examples_of(name: str) -> str:
    """The code after ``::`` in a docstring."""
    doc = inspect.getdoc(getattr(eclip, name)) or ""
    _, _, code = doc.partition("::\n")
    assert code.strip(), f"eclip.{name} has no example"
    assert not code.strip("\n")[0].strip(), f"eclip.{name}: the example is not indented"
    return textwrap.dedent(code)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example_that_calls_it(name: str) -> None:
    tree = ast.parse(examples_of(name))
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert f"eclip.{name}" in calls


@pytest.fixture(scope="module")
def plan() -> eclip.Plan:
    return eclip.plan("alexnet:8,vgg19:8", "shared")


@pytest.fixture(scope="module")
def log(plan: eclip.Plan) -> eclip.RunLog:
    return eclip.run(plan, seconds=0.1)


@pytest.fixture(scope="module")
def outcome() -> eclip.Outcome:
    return eclip.compare("alexnet:8,vgg19:8", ["shared", "model"], seconds=0.1)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NEEDS_A_GPU])
def test_examples_run(
    name: str,
    plan: eclip.Plan,
    log: eclip.RunLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    h200: eclip.Topology,
) -> None:
    """As they are, but on the simulator and with short searches."""
    code = examples_of(name)
    for long, short in (
        ('device="cuda"', 'device="sim"'),
        ("seconds=10", "batches=0"),
        ("seconds=3", "seconds=0.1"),
        ("refine=12", "refine=0.1"),
        ('policy="search")', 'policy="search", batches=0)'),
        ("repeats=3", "seconds=0.1"),
    ):
        code = code.replace(long, short)
    quick = functools.partial(eclip.CompareOptions, batches=0, trials=2, trial_seconds=0.05)
    monkeypatch.setattr(contest_compare, "CompareOptions", quick)
    monkeypatch.chdir(tmp_path)
    eclip.save(plan, "plan.json")
    mine = synthetic_profile(1, 30, h200, "my.package:factory", 4)
    Path("mine").mkdir()
    eclip.save(mine, file_of(Path("mine"), mine.model))
    names: dict[str, Any] = {"eclip": eclip, "plan": plan, "log": log}
    names |= {"model": abs, "inputs": -1}  # what a program serves is its own affair
    exec(compile(code, f"<example of eclip.{name}>", "exec"), names)


# --- How things show themselves ---------------------------------------------------------------


def shown(plan: eclip.Plan, log: eclip.RunLog, outcome: eclip.Outcome) -> list[Any]:
    return [plan, log, outcome, outcome.comparison]


def test_reprs_are_one_short_line(
    plan: eclip.Plan, log: eclip.RunLog, outcome: eclip.Outcome
) -> None:
    every = comparison(dict.fromkeys(known_policies(), 1.0))
    for thing in [*shown(plan, log, outcome), every]:
        assert repr(thing).startswith(f"{type(thing).__name__}(")
        assert "\n" not in repr(thing)
        assert len(repr(thing)) <= 200


def test_notebooks_get_tables_of_the_workers_or_policies(
    plan: eclip.Plan, log: eclip.RunLog, outcome: eclip.Outcome
) -> None:
    for thing, names in (
        (plan, ("alexnet", "vgg19")),
        (log, ("alexnet", "vgg19")),
        (outcome, ("shared", "model")),
        (outcome.comparison, ("shared", "model")),
    ):
        page = thing._repr_html_()
        assert page.startswith("<table>") and page.endswith("</table>")
        for name in names:
            assert f">{name}</td>" in page
    measured = re.search(r"STP (\d\.\d{3})", log._repr_html_())
    assert measured is not None and float(measured[1]) == round(eclip.measure(log).stp, 3)
    without = msgspec.structs.replace(log, alone_rps=())
    assert "alexnet" in without._repr_html_()


def test_notebooks_show_names_as_text() -> None:
    log = make_log(EVIL, mix=make_mix(2, EVIL))
    log = msgspec.structs.replace(log, device=EVIL, load=EVIL)
    plan = msgspec.structs.replace(log.plan, why=EVIL)
    compared = comparison({"shared": 1.0, EVIL: 1.1}, mix=EVIL, device=EVIL, load=EVIL)
    for thing in (log, plan, compared):
        page = thing._repr_html_()
        assert "&lt;script&gt;" in page
        assert "<script" not in page and "<b>" not in page and "&<" not in page


# --- Strings, paths, and what is wrong --------------------------------------------------------


@pytest.mark.parametrize("form", [str, Path])
def test_strings_and_paths_are_accepted(
    form: type[str] | type[Path],
    plan: eclip.Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    h200: eclip.Topology,
) -> None:
    monkeypatch.chdir(tmp_path)
    eclip.save(plan, form("plan.json"))
    assert eclip.load(form("plan.json")) == eclip.load(form("plan.json"), eclip.Plan) == plan
    Path("arrivals.csv").write_text("time_s,worker\n0.01,alexnet\n0.02,vgg19\n")
    log = eclip.run(form("plan.json"), seconds=0.1, arrivals=form("arrivals.csv"))
    assert len(log.requests.worker) == 2
    eclip.save(log, form("run.json.gz"))
    for logs in (log, form("run.json.gz"), [form("run.json.gz"), log]):
        written = eclip.report(logs, form("report.html"), trace=form("trace.json.gz"))
        assert written == Path("report.html") and written.stat().st_size > 40_000
    compared = eclip.compare(
        "alexnet:8,vgg19:8",
        "shared",
        seconds=0.1,
        load=form("arrivals.csv"),
        plans={"mine": form("plan.json")},
    )
    assert list(compared.logs) == ["shared", "mine"]
    compared.save(form("kept"))
    assert eclip.load(form("kept/mine.plan.json"), eclip.Plan).lanes == plan.lanes
    assert eclip.report(compared, form("report.html")) == Path("report.html")
    mine = synthetic_profile(1, 30, h200, "mine", 4)
    eclip.save(h200, form("device.json"))
    eclip.save(mine, file_of(tmp_path, mine.model))
    constants = eclip.load_builtin("h200", eclip.Calibration)
    eclip.save(constants, form("constants.json"))
    for folders in (form("."), [form(".")]):
        found = eclip.case(
            "mine:4", "./device.json", calibration=form("constants.json"), profiles=folders
        )
        assert found.profiles == (mine,)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda plan: UNTYPED.save("plan.json", plan), "save takes an artefact and a file name"),
        (lambda plan: UNTYPED.load(eclip.Plan, "plan.json"), "load takes a file name and then"),
        (lambda plan: UNTYPED.load(plan), "load takes a file name"),
        (lambda plan: UNTYPED.load_builtin(eclip.Topology, "h200"), "takes a name and then a kind"),
        (lambda plan: eclip.load_builtin("h200", eclip.Plan), "takes a name and then a kind"),
        (lambda plan: eclip.load_builtin("h201", eclip.Topology), "a100, h100, h200"),
        (lambda plan: eclip.plan("alexnet:8", "magic"), "unknown policy 'magic'"),
        (lambda plan: eclip.plan("alexnet:8", "search", objective="speed"), "throughput"),
        (lambda plan: eclip.compare("alexnet:8", "shared,shared"), "named twice"),
        (lambda plan: eclip.compare("alexnet:8", plans={"mine": plan}), "not alexnet:8"),
        (lambda plan: eclip.run(plan, "tpu"), "unknown device 'tpu'"),
        (lambda plan: eclip.run(plan, "sim:1"), "no device sim:1"),
        (lambda plan: eclip.run(plan, seconds=0.01, trace_ms=11), "not 11 ms"),
        (lambda plan: eclip.parse_mix("albert:8:8"), "write it like"),
    ],
)
def test_what_is_wrong_is_a_usage_error(call: Any, words: str, plan: eclip.Plan) -> None:
    with pytest.raises(eclip.UsageError) as refusal:
        call(plan)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_trace_is_cut_to_a_short_run_unless_its_length_is_given(plan: eclip.Plan) -> None:
    assert eclip.run(plan, seconds=0.005).kernels.window_ns == 5_000_000
    assert eclip.run(plan, seconds=0.1).kernels.window_ns == 20_000_000


EIGHT_CALLS = """
import eclip

plan = eclip.plan("alexnet:8,vgg19:8")
found = eclip.search("alexnet:8,vgg19:8", "energy", batches=0, verify=1)
log = eclip.run(found, seconds=0.1)
outcome = eclip.compare("alexnet:8,vgg19:8", ["shared", "eclip"], seconds=0.1)
print(outcome.best in outcome.plans, eclip.measure(log).stp > 0, found.evidence.objective)
print(eclip.report(outcome, "report.html"))
eclip.save(plan, "plan.json")
print(eclip.load("plan.json") == plan)
try:
    eclip.colocate({"a": (None, [])})
except eclip.EclipError as error:
    print(type(error).__name__, "\\n" in str(error))
"""


def test_eight_calls_in_a_fresh_process_without_a_gpu(tmp_path: Path) -> None:
    said = in_a_fresh_process(EIGHT_CALLS, tmp_path)
    assert said.splitlines() == [
        "True True energy",
        "report.html",
        "True",
        "DeviceError False",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "report.html"]


def test_plan_takes_from_the_options_what_it_is_not_given() -> None:
    options = eclip.PolicyOptions(batches=1, seed=7, objective=eclip.Objective("energy"))
    evidence = eclip.plan("alexnet:8,vgg19:8", "search", options=options).evidence
    assert evidence is not None
    assert (evidence.batches, evidence.seed, evidence.objective) == (1, 7, "energy")
    told = eclip.plan("alexnet:8,vgg19:8", "search", batches=0, seed=0, options=options).evidence
    assert told is not None
    assert (told.batches, told.seed) == (0, 0)


# --- Arguments, in words of their own ---------------------------------------------------------


def test_mix_may_be_a_list_of_its_parts() -> None:
    listed = eclip.plan(["squeezenet:1", "alexnet:1@20rps"])
    assert listed == eclip.plan("squeezenet:1,alexnet:1@20rps")
    assert eclip.case((eclip.ModelKey("alexnet", 2),)).mix.name == "alexnet:2"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: UNTYPED.plan([]), "a mix is a text such as"),
        (lambda: UNTYPED.plan(["alexnet:1", 3]), "a mix is a text such as"),
        (lambda: UNTYPED.plan(None), "a mix is a text such as"),
        (lambda: UNTYPED.plan("alexnet:1", "search", batches=1.5), "batches must be a whole"),
        (lambda: UNTYPED.plan("alexnet:1", "search", seed=-1), "seed must be a whole"),
        (lambda: UNTYPED.plan("alexnet:1", "search", seconds="3"), "seconds must be a number"),
        (lambda: UNTYPED.search("alexnet:1", verify=0), "verify must be a whole"),
        (lambda: UNTYPED.search("alexnet:1", refine=-1.0), "refine must be a number"),
        (lambda: UNTYPED.run(eclip.plan("alexnet:1"), seed=-1), "seed must be a whole"),
        (lambda: UNTYPED.run(eclip.plan("alexnet:1"), seconds=0), "seconds"),
        (lambda: UNTYPED.compare("alexnet:1", []), "policies is empty"),
        (lambda: UNTYPED.compare("alexnet:1", repeats=1.5), "repeats must be a whole"),
        (lambda: UNTYPED.CompareOptions(trials=True), "trials must be a whole"),
        (lambda: UNTYPED.PolicyOptions(tolerance=float("nan")), "tolerance must be a number"),
    ],
)
def test_wrong_argument_is_named_in_words_of_python(call: Any, words: str) -> None:
    with pytest.raises(eclip.UsageError) as refused:
        call()
    assert words in str(refused.value)
    assert "--" not in str(refused.value)


def test_no_library_error_names_an_option_of_the_command_line() -> None:
    """Commands are named with their options, where a library's error says how to make a file."""
    found = []
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in ("cli", "programs", "cuda", "hip"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                texts = [
                    part.value
                    for part in ast.walk(node)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                text = "".join(texts)
                if re.search(r"(?<![\w-])--[a-z]", text) and "eclip " not in text:
                    found.append(f"{path.relative_to(ROOT)}: {text}")
    assert found == []

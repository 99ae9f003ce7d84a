"""``eclip compare``: one mix under several policies, side by side."""

from __future__ import annotations

import datetime
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from eclip import __version__, store
from eclip.cli import report, screen, wiring
from eclip.cli.contest import Contest
from eclip.cli.contest_options import ContestOptions, known_policies
from eclip.cli.options import (
    ArrivalsOption,
    BatchesOption,
    CalibrationOption,
    DeviceOption,
    GpuOption,
    JsonOption,
    MixArgument,
    OwnKernelsOption,
    ProfilesOption,
    RefineOption,
    SecondsOption,
    SeedOption,
    SwitchMaxOption,
    TailOption,
    ToleranceOption,
    TopologyOption,
    TraceOption,
    WarmupOption,
)
from eclip.cli.verification import Verification
from eclip.comparison import Comparison, Entry, plan_digest, score_of
from eclip.errors import EclipError, UsageError, unknown_name
from eclip.measures import measure, measure_together
from eclip.mix import parse_mix
from eclip.observations import Observations
from eclip.plan import Plan
from eclip.profile import Profile

_NAME = re.compile(r"[A-Za-z][\w.-]{0,40}", re.ASCII)


def compare(
    mix: MixArgument,
    policies: Annotated[
        str, typer.Option("--policies", help="all, or names with commas between them.")
    ] = "all",
    plan: Annotated[
        list[str] | None,
        typer.Option(
            "--plan", help="A plan file that takes part too, as FILE or NAME=FILE; repeatable."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Rounds; each begins with another policy.")
    ] = 1,
    load: Annotated[
        float | None,
        typer.Option(
            "--load",
            help="Poisson arrivals at this part of every worker's closed-loop rate under shared, "
            "which is measured first, for --seconds.",
        ),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            "--requests",
            help="With --load: run until about so many arrived in all, and a tenth of that for "
            "every worker; all repeats together.",
        ),
    ] = 2000,
    results: Annotated[
        Path | None, typer.Option("--results", help="Add the comparison to this results file.")
    ] = None,
    trials: Annotated[
        int, typer.Option("--trials", help="masks: static placements to try first.")
    ] = 24,
    trial_seconds: Annotated[
        float, typer.Option("--trial-seconds", help="mps, masks: how long a setting is tried.")
    ] = 0.3,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="mps, masks, search: best at throughput, or energy; or both: throughput,energy.",
        ),
    ] = "throughput",
    fairness: Annotated[
        float,
        typer.Option("--fairness", help="mps, masks, search: least share over largest."),
    ] = 0.7,
    search_seconds: Annotated[
        float, typer.Option("--search-seconds", help="search: how long.")
    ] = 20.0,
    batches: BatchesOption = None,
    verify: Annotated[
        int,
        typer.Option("--verify", min=0, help="search: try so many plans on the device first."),
    ] = 0,
    refine: RefineOption = 0.0,
    own_kernels: OwnKernelsOption = False,
    processes: Annotated[
        int,
        typer.Option("--processes", help="cuda: at most so many at once; thins the MPS sweep."),
    ] = 30,
    reopen: Annotated[
        bool,
        typer.Option("--reopen", help="Open every session anew for every run, one at a time."),
    ] = False,
    report_file: Annotated[
        Path | None, typer.Option("--report", help="Also write the HTML report here.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Also keep plans and run logs in this folder."),
    ] = None,
    topology: TopologyOption = "h200",
    device: DeviceOption = "sim",
    gpu: GpuOption = 0,
    seconds: SecondsOption = 2.0,
    warmup: WarmupOption = 0.1,
    trace_ms: TraceOption = 20.0,
    seed: SeedOption = 0,
    arrivals: ArrivalsOption = None,
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    switch_max: SwitchMaxOption = 14,
    tolerance: ToleranceOption = 0.05,
    tail: TailOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a mix under several policies in turns, with identical arrivals, and compare them.

    Kernels are recorded only if they are kept (--report, --out).
    """
    from eclip.planning.objective import Objective
    from eclip.planning.policies import PolicyOptions

    run_options = wiring.run_options(device, gpu, seconds, warmup, trace_ms, seed, arrivals)
    if report_file is None and folder is None:
        run_options = wiring.without_trace(run_options)
    aims = tuple(
        Objective(kind=kind.strip(), least_fairness=fairness) for kind in objective.split(",")
    )
    if len(set(aims)) != len(aims):
        raise UsageError(f"--objective {objective} names one twice")
    if refine and not verify:
        raise UsageError("--refine goes with --verify, which decides at the end")
    options = ContestOptions(
        repeats=repeats,
        trials=trials,
        trial_seconds=trial_seconds,
        objectives=aims,
        verification=Verification(verify, refine) if verify else None,
        processes=processes,
        load_part=load,
        requests=requests,
        reopen=reopen,
    )
    if results is not None:
        store.check_results(results)
    names, plans = _policy_names(policies), _plans(plan or [])
    wanted = parse_mix(mix)
    shape = wiring.find_topology(topology)
    constants = wiring.find_calibration(calibration, shape)
    found = wiring.find_profiles(wanted, shape, constants, profiles or [], tail)
    others: tuple[Profile, ...] = ()
    if not own_kernels and (names is None or "search" in names):
        others = wiring.find_other_kernels(wanted, shape, profiles or [], tail)
    planned = [
        one
        for given in plans.values()
        for one in wiring.find_profiles(given.mix, shape, constants, profiles or [], tail)
    ]
    with screen.progress_bar(f"comparing {wanted.name}") as progress:
        contest = Contest(
            wanted,
            shape,
            constants,
            found,
            PolicyOptions(
                switch_max=switch_max,
                tolerance=tolerance,
                objective=aims[0],
                seconds=search_seconds,
                batches=batches,
                seed=seed,
                others=others,
            ),
            run_options,
            options,
            progress,
            planned,
        )
        try:
            contest.hold(names, plans)
        except (KeyboardInterrupt, EclipError):
            if contest.measured:  # nothing of it is lost
                if results is not None:
                    store.append(comparison_of(contest, options), results)
                show(contest, options, as_json)
            raise
    if results is not None:
        store.append(comparison_of(contest, options), results)
    if folder is not None:
        keep(contest, folder)
    if report_file is not None:
        logs = [one.logs[-1] for one in contest.measured]
        report.write_report(logs, (*planned, *others, *found), report_file)
    show(contest, options, as_json)
    if report_file is not None and not as_json:
        screen.out.print(f"Report: {report_file}")


def keep(contest: Contest, folder: Path) -> None:
    """Write every plan and its last run log into a folder, made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use the folder {folder}: {error.strerror or error}") from None
    for entrant in contest.measured:
        # A plan has no shares: run again from a file, MPS's would be plain streams.
        if not entrant.policy.startswith("mps"):
            store.save(entrant.plan, folder / f"{entrant.policy}.plan.json")
        store.save(entrant.logs[-1], folder / f"{entrant.policy}.run.json")
    if contest.observed:
        store.save(observations_of(contest), folder / "observations.json.gz")


def observations_of(contest: Contest) -> Observations:
    """What a search tried on the device, as ``eclip calibrate`` reads it."""
    now = datetime.datetime.now(datetime.UTC)
    return Observations(
        fingerprint=contest.fingerprint,
        source=f"eclip compare {contest.mix.name}: what a search tried on the device",
        date=now.date(),
        runs=tuple(contest.observed),
    )


def comparison_of(contest: Contest, options: ContestOptions) -> Comparison:
    first = contest.measured[0].logs[0]
    return Comparison(
        mix=contest.mix.name,
        workers=tuple(worker.name for worker in contest.mix.workers),
        models=tuple(worker.key for worker in contest.mix.workers),
        topology=first.plan.topology.name,
        device=first.device,
        driver=contest.driver,
        modelled=first.modelled,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["eclip", *sys.argv[1:]]),
        eclip=__version__,
        load=first.load,
        load_part=options.load_part,
        seed=first.seed,
        repeats=options.repeats,
        objective=",".join(aim.kind for aim in options.objectives),
        alone_rps=contest.alone_rps,
        entries=tuple(
            Entry(
                policy=entrant.policy,
                setting=entrant.setting,
                plan=plan_digest(entrant.plan),
                switches=tuple(part.switches for part in entrant.plan.main.assignments),
                runs=tuple(score_of(measure(log)) for log in entrant.logs),
                together=score_of(measure_together(entrant.logs)),
                trials=entrant.trials,
            )
            for entrant in contest.measured
        ),
        left_out=tuple(f"{policy}: {why}" for policy, why in contest.left_out.items()),
        warnings=_warnings(contest),
    )


def show(contest: Contest, options: ContestOptions, as_json: bool) -> None:
    """Print a contest: all runs of a policy together, and how far they lie apart."""
    for policy, why in contest.left_out.items():
        screen.warn(f"{policy} is left out: {why}")
    for warning in _warnings(contest):
        screen.warn(warning)
    comparison = comparison_of(contest, options)
    measures = [measure_together(entrant.logs) for entrant in contest.measured]
    if as_json:
        screen.print_json(
            {
                "mix": comparison.mix,
                "topology": comparison.topology,
                "device": comparison.device,
                "modelled": comparison.modelled,
                "load": comparison.load,
                "seed": comparison.seed,
                "policies": measures,
                "table_i": _table_i(comparison),
                "comparison": comparison,
                "warnings": comparison.warnings,
            }
        )
        return
    rounds = f", {options.repeats} rounds in rotated order" if options.repeats > 1 else ""
    each_s = contest.measured[0].logs[0].duration_ns / 1e9
    screen.print_facts(
        [
            ("mix", comparison.mix),
            ("device", comparison.device),
            ("load", f"{comparison.load}, seed {comparison.seed}, {each_s:g} s{rounds}"),
        ]
    )
    screen.print_measures(measures)
    if options.repeats > 1 or any(entry.setting for entry in comparison.entries):
        _print_spreads(comparison)
    if options.load_part is not None:
        _print_tails(comparison)
    _print_table_i(comparison)


def _print_spreads(comparison: Comparison) -> None:
    plain = comparison.entry("shared")
    screen.print_table(
        f"STP of {comparison.repeats} runs{screen.modelled_note(comparison.modelled)}",
        ["policy", "setting", "mean", "median", "min", "max", "of shared"],
        (
            [
                entry.policy,
                entry.setting,
                *(f"{value:.3f}" for value in spread([run.stp for run in entry.runs])),
                "" if plain is None else f"{entry.together.stp / plain.together.stp:.3f}",
            ]
            for entry in comparison.entries
        ),
        names=2,
    )


def spread(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, median, least and greatest."""
    return statistics.fmean(values), statistics.median(values), min(values), max(values)


def _print_tails(comparison: Comparison) -> None:
    plain = comparison.entry("shared")
    screen.print_table(
        f"p99 of all runs together{screen.modelled_note(comparison.modelled)}",
        ["worker", "policy", "requests", "p99 ms", "of shared"],
        (
            [
                name if entry is comparison.entries[0] else "",
                entry.policy,
                str(entry.together.requests[index]),
                screen.number(entry.together.p99_ms[index], 2),
                _ratio(entry, plain, index),
            ]
            for index, name in enumerate(comparison.workers)
            for entry in comparison.entries
        ),
        names=2,
    )


def _ratio(entry: Entry, plain: Entry | None, worker: int) -> str:
    mine = entry.together.p99_ms[worker]
    theirs = None if plain is None else plain.together.p99_ms[worker]
    return "" if mine is None or not theirs else f"{mine / theirs:.2f}"


def _policy_names(text: str) -> list[str] | None:
    """None for all of them."""
    if text == "all":
        return None
    names = [name.strip() for name in text.split(",")]
    known = known_policies()
    for name in names:
        if name not in known:
            raise unknown_name("policy", name, ["all", *known])
    if len(set(names)) != len(names):
        raise UsageError(f"--policies {text} names a policy twice; name each once")
    return names


def _plans(texts: Sequence[str]) -> dict[str, Plan]:
    """From ``FILE`` or ``NAME=FILE``; without a name a plan is called after its file."""
    plans: dict[str, Plan] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        path = Path(file if equals else text)
        name = name if equals else path.name.partition(".")[0]
        taken = {*known_policies()} - {"search"} | {*plans}
        if not _NAME.fullmatch(name) or name in taken:
            raise UsageError(
                f"--plan {text}: {name!r} is taken or no name; write NAME={path}, "
                f"with letters and digits"
            )
        plans[name] = store.load(path, Plan)
    return plans


def _print_table_i(comparison: Comparison) -> None:
    table = _table_i(comparison)
    if table is None or not table["ours"]:
        return
    screen.print_table(
        "Lane switches per request: the ECLIP paper's Table I (MI50, measured) and ours",
        ["", *table["paper"], *(f"ours: {name}" for name in table["ours"])],
        [
            [
                comparison.mix,
                *map(str, table["paper"].values()),
                *map(str, table["ours"].values()),
            ]
        ],
    )


def _table_i(comparison: Comparison) -> dict[str, dict[str, int]] | None:
    from eclip.planning.paper import TABLE_I

    printed = TABLE_I.get(comparison.mix)
    if printed is None:
        return None
    ours = {
        entry.policy: sum(entry.switches)
        for entry in comparison.entries
        if entry.policy in ("kernel", "eclip")
    }
    return {"paper": printed, "ours": ours}


def _warnings(contest: Contest) -> tuple[str, ...]:
    logs = [log for entrant in contest.measured for log in entrant.logs]
    return tuple(dict.fromkeys(warning for log in logs for warning in log.warnings))

"""``eclip compare``: one mix under several policies, side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from eclip.artefacts import store
from eclip.artefacts.mix import parse_mix
from eclip.artefacts.plan import Plan
from eclip.artefacts.profile import Profile
from eclip.cli import outcome, report, screen, wiring
from eclip.cli.contest import Contest
from eclip.cli.contest_options import ContestOptions, known_policies
from eclip.cli.options import (
    ArrivalsOption,
    BatchesOption,
    CalibrationOption,
    DeviceOption,
    EarlierOption,
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
from eclip.errors import EclipError, UsageError, unknown_name

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
    earlier: EarlierOption = None,
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
    from eclip.planning.policies import PolicyOptions
    from eclip.planning.search.objective import Objective

    run_options = wiring.run_options(device, gpu, seconds, warmup, trace_ms, seed, arrivals)
    if report_file is None and folder is None:
        run_options = wiring.without_trace(run_options)
    aims = tuple(
        Objective(kind=kind.strip(), least_fairness=fairness) for kind in objective.split(",")
    )
    if len(set(aims)) != len(aims):
        raise UsageError(f"--objective {objective} names one twice")
    if results is not None:
        for warning in store.check_results(results):
            screen.warn(warning)
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
    options = ContestOptions(
        repeats=repeats,
        trials=trials,
        trial_seconds=trial_seconds,
        objectives=aims,
        verification=wiring.make_verification(
            verify, refine, earlier, wanted, shape, (*others, *found), device
        ),
        processes=processes,
        load_part=load,
        requests=requests,
        reopen=reopen,
    )
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
            progress.part_or_end,
            planned,
        )
        try:
            contest.hold(names, plans)
        except (KeyboardInterrupt, EclipError):
            if contest.measured:  # nothing of it is lost
                if results is not None:
                    store.append(outcome.comparison_of(contest, options), results)
                outcome.show(contest, options, as_json)
            raise
    if results is not None:
        store.append(outcome.comparison_of(contest, options), results)
    if folder is not None:
        outcome.keep(contest, folder)
    if report_file is not None:
        logs = [one.logs[-1] for one in contest.measured]
        report.write_report(logs, (*planned, *others, *found), report_file)
    outcome.show(contest, options, as_json)
    if report_file is not None and not as_json:
        screen.out.print(f"Report: {report_file}")


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

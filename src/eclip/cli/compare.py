"""``eclip compare``: one mix under several policies, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eclip import store
from eclip.cli import report, screen, wiring
from eclip.cli.options import (
    ArrivalsOption,
    CalibrationOption,
    DeviceOption,
    GpuOption,
    JsonOption,
    MixArgument,
    ProfilesOption,
    SecondsOption,
    SeedOption,
    SwitchMaxOption,
    TailOption,
    ToleranceOption,
    TopologyOption,
    TraceOption,
    WarmupOption,
)
from eclip.errors import UsageError, unknown_name
from eclip.measures import Measures, measure
from eclip.mix import parse_mix
from eclip.profile import Profile
from eclip.runlog import RunLog

if TYPE_CHECKING:
    from eclip.planning.policies import PolicyOptions


def compare(
    mix: MixArgument,
    policies: Annotated[
        str, typer.Option("--policies", help="all, or names with commas between them.")
    ] = "all",
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
    """Run a mix under several policies with identical arrivals and compare them."""
    from eclip.planning.policies import PolicyOptions

    options = wiring.run_options(device, gpu, seconds, warmup, trace_ms, seed, arrivals)
    logs, found = run_policies(
        mix,
        policies,
        topology,
        calibration,
        profiles or [],
        PolicyOptions(switch_max=switch_max, tolerance=tolerance),
        options,
        tail,
    )
    if folder is not None:
        keep(logs, folder)
    if report_file is not None:
        report.write_report(logs, found, report_file)
    measures = [measure(log) for log in logs]
    if as_json:
        screen.print_json(as_data(logs, measures))
    else:
        print_comparison(logs, measures)
        if report_file is not None:
            screen.out.print(f"Report: {report_file}")


def run_policies(
    mix: str,
    policies: str,
    topology: str,
    calibration: Path | None,
    folders: Sequence[Path],
    policy_options: PolicyOptions,
    options: wiring.RunOptions,
    tail: bool = False,
) -> tuple[list[RunLog], tuple[Profile, ...]]:
    """Plan and run every policy; the logs come in the order of the policies."""
    wanted = parse_mix(mix)
    device = wiring.find_topology(topology)
    constants = wiring.find_calibration(calibration, device)
    names = _policy_names(policies)
    if policies == "all" and options.device == "cuda":
        names.remove("timeslice")
        screen.warn("timeslice is left out: on a GPU it needs one process per model")
    found = wiring.find_profiles(wanted, device, constants, folders, tail)
    with screen.progress_bar(f"comparing {wanted.name}") as progress:
        plans = [
            wiring.make_plan(name, wanted, device, found, constants, policy_options)
            for name in names
        ]
        logs = wiring.run_plans(plans, found, constants, options, progress)
    for warning in dict.fromkeys(warning for log in logs for warning in log.warnings):
        screen.warn(warning)
    return logs, found


def keep(logs: Sequence[RunLog], folder: Path) -> None:
    """Write every plan and run log into a folder, made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use the folder {folder}: {error.strerror or error}") from None
    for log in logs:
        store.save(log.plan, folder / f"{log.plan.policy}.plan.json")
        store.save(log, folder / f"{log.plan.policy}.run.json")


def print_comparison(logs: Sequence[RunLog], measures: Sequence[Measures]) -> None:
    first = logs[0]
    screen.print_facts(
        [
            ("mix", first.plan.mix.name),
            ("device", first.device),
            ("load", f"{first.load}, seed {first.seed}, {first.duration_ns / 1e9:g} s"),
        ]
    )
    screen.print_measures(measures)
    table = _table_i(logs, measures)
    if table is not None:
        screen.print_table(
            "Lane switches per request: the ECLIP paper's Table I (MI50, measured) and ours",
            ["", *table["paper"], *(f"ours: {name}" for name in table["ours"])],
            [
                [
                    first.plan.mix.name,
                    *map(str, table["paper"].values()),
                    *map(str, table["ours"].values()),
                ]
            ],
        )


def _policy_names(text: str) -> list[str]:
    from eclip.planning.policies import POLICIES

    if text == "all":
        return list(POLICIES)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise unknown_name("policy", name, ["all", *POLICIES])
    if len(set(names)) != len(names):
        raise UsageError(f"--policies {text} names a policy twice; name each once")
    return names


def _table_i(
    logs: Sequence[RunLog], measures: Sequence[Measures]
) -> dict[str, dict[str, int]] | None:
    from eclip.planning.paper import TABLE_I

    printed = TABLE_I.get(logs[0].plan.mix.name)
    if printed is None:
        return None
    ours = {
        one.policy: one.switches_per_request
        for one in measures
        if one.policy in ("kernel", "eclip")
    }
    return {"paper": printed, "ours": ours}


def as_data(logs: Sequence[RunLog], measures: Sequence[Measures]) -> dict[str, Any]:
    """What ``print_comparison`` prints, as plain data."""
    first = logs[0]
    return {
        "mix": first.plan.mix.name,
        "topology": first.plan.topology.name,
        "device": first.device,
        "modelled": any(log.modelled for log in logs),
        "load": first.load,
        "seed": first.seed,
        "policies": list(measures),
        "table_i": _table_i(logs, measures),
        "warnings": list(dict.fromkeys(warning for log in logs for warning in log.warnings)),
    }

"""``eclip plan``: makes a plan file from a mix and a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import eclip
from eclip.cli import explain, screen
from eclip.cli.options import (
    BatchesOption,
    CalibrationOption,
    DeviceOption,
    EarlierOption,
    FairnessOption,
    FrontierOption,
    JsonOption,
    MixArgument,
    ObjectiveOption,
    ProfilesOption,
    RefineOption,
    SearchSeedOption,
    SearchTimeOption,
    SharesOption,
    StrictOption,
    SwitchMaxOption,
    TailOption,
    ToleranceOption,
    TopologyOption,
    UsualKernelsOption,
    VerifyOption,
    WeightsOption,
    given_options,
    numbers,
    shares_of,
)
from eclip.errors import UsageError
from eclip.files import outputs

# Options for some policies only; other policies would ignore them, so they are refused.
_POLICIES_WITH = {
    "--switch-max": ("eclip",),
    "--tolerance": ("model", "kernel", "mps-model"),
    "--shares": ("mps",),
    **dict.fromkeys(
        ("--objective", "--weights", "--fairness", "--seconds", "--batches", "--seed",
         "--verify", "--refine", "--earlier", "--usual-kernels"),
        ("search",),
    ),
}  # fmt: skip


def plan(
    context: typer.Context,
    mix: MixArgument,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="shared, priority, timeslice, mps, mps-model, model, kernel, eclip or search; for "
            "mixes with services also yield, move, priority-segments, launches-16-8, launches-4-2, "
            "launches-1-1; for mixes with floors also yield.",
        ),
    ] = "eclip",
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the plan.")] = Path(
        "plan.json"
    ),
    topology: TopologyOption = "h200",
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    switch_max: SwitchMaxOption = 14,
    tolerance: ToleranceOption = 0.05,
    shares: SharesOption = None,
    objective: ObjectiveOption = None,
    weights: WeightsOption = None,
    fairness: FairnessOption = None,
    seconds: SearchTimeOption = 20.0,
    batches: BatchesOption = None,
    seed: SearchSeedOption = 0,
    verify: VerifyOption = 0,
    refine: RefineOption = 0.0,
    earlier: EarlierOption = None,
    usual_kernels: UsualKernelsOption = False,
    device: DeviceOption = "sim",
    tail: TailOption = False,
    strict: StrictOption = False,
    frontier: FrontierOption = False,
    as_json: JsonOption = False,
) -> None:
    """Decide which lane every kernel of a mix takes, and write the plan."""
    outputs.check_output(out, eclip.Plan)
    given = given_options(context)
    for option in given:
        policies = _POLICIES_WITH.get(option, (policy,))
        if policy not in policies:
            raise UsageError(f"{option} needs --policy {' or '.join(policies)}")
    if refine and not verify:
        raise UsageError("--refine needs --verify, which decides at the end")
    if earlier is not None and not refine:
        raise UsageError("--earlier needs --refine, which continues the search on the device")
    if "--device" in given and not verify:
        raise UsageError("--device needs --verify, which runs plans on the device")
    case = eclip.case(
        mix,
        topology,
        calibration=calibration,
        profiles=profiles or [],
        tail=tail,
        usual_kernels=usual_kernels,
    )
    kind = objective or ("slo" if case.mix.services else "throughput")
    aim = eclip.Objective(kind, weights=numbers(weights, "--weights"), fairness=fairness)
    with screen.progress_bar(f"planning {case.mix.name}") as progress:
        if verify:
            made = eclip.search(
                case,
                aim,
                seconds=seconds,
                batches=batches,
                seed=seed,
                device=device,
                verify=verify,
                refine=refine,
                earlier=earlier,
                progress=progress,
            )
        else:
            made = eclip.plan(
                case,
                policy,
                objective=aim,
                seconds=seconds,
                batches=batches,
                seed=seed,
                options=eclip.PolicyOptions(
                    switch_max=switch_max,
                    tolerance=tolerance,
                    shares=shares_of(shares),
                ),
                progress=progress,
            )
    failed = outputs.save_or_rescue(made, out)
    if made.aliased:
        screen.warn(
            f"{len(made.lanes)} lanes on {made.topology.hardware_queues} hardware queues: "
            f"some lanes will wait for each other"
        )
    if as_json:
        screen.print_json(explain.describe(made))
    else:
        explain.print_plan(made, frontier)
        if failed is None:
            screen.out.print(f"Written to {out}. Next: eclip run {out} -o run.json")
    if failed is not None:
        raise failed
    screen.exit_if_stopped(progress, f"{out} has the best plan so far")
    screen.exit_if_missed(made.evidence.missed if made.evidence else (), strict)

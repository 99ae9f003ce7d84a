"""``eclip plan``: a mix and a policy to a plan file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eclip.artefacts import store
from eclip.artefacts.mix import parse_mix
from eclip.artefacts.profile import Profile
from eclip.cli import explain, screen, wiring
from eclip.cli.options import (
    BatchesOption,
    CalibrationOption,
    DeviceOption,
    EarlierOption,
    FairnessOption,
    GpuOption,
    JsonOption,
    MixArgument,
    ObjectiveOption,
    OwnKernelsOption,
    P99Option,
    ProfilesOption,
    RefineOption,
    SearchSecondsOption,
    SearchSeedOption,
    SwitchMaxOption,
    TailOption,
    ToleranceOption,
    TopologyOption,
    WeightsOption,
    numbers,
)
from eclip.errors import UsageError


def plan(
    mix: MixArgument,
    policy: Annotated[
        str, typer.Option("--policy", help="shared, timeslice, model, kernel, eclip or search.")
    ] = "eclip",
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the plan.")] = Path(
        "plan.json"
    ),
    topology: TopologyOption = "h200",
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    switch_max: SwitchMaxOption = 14,
    tolerance: ToleranceOption = 0.05,
    objective: ObjectiveOption = "throughput",
    weights: WeightsOption = None,
    p99: P99Option = None,
    fairness: FairnessOption = 0.7,
    seconds: SearchSecondsOption = 20.0,
    batches: BatchesOption = None,
    seed: SearchSeedOption = 0,
    verify: Annotated[
        int,
        typer.Option("--verify", min=0, help="search: try so many plans on the device first."),
    ] = 0,
    refine: RefineOption = 0.0,
    earlier: EarlierOption = None,
    own_kernels: OwnKernelsOption = False,
    device: DeviceOption = "sim",
    gpu: GpuOption = 0,
    tail: TailOption = False,
    as_json: JsonOption = False,
) -> None:
    """Decide which lane every kernel of a mix takes, and write the plan."""
    from eclip.planning.policies import PolicyOptions
    from eclip.planning.search.objective import Objective

    wanted = parse_mix(mix)
    layout = wiring.find_topology(topology)
    constants = wiring.find_calibration(calibration, layout)
    found = wiring.find_profiles(wanted, layout, constants, profiles or [], tail)
    others: tuple[Profile, ...] = ()
    if policy == "search" and not own_kernels:
        others = wiring.find_other_kernels(wanted, layout, profiles or [], tail)
    if policy != "search" and verify:
        raise UsageError("--verify goes with --policy search")
    how = wiring.make_verification(
        verify, refine, earlier, wanted, layout, (*others, *found), device
    )
    with screen.progress_bar(f"planning {wanted.name}") as progress:
        options = PolicyOptions(
            switch_max=switch_max,
            tolerance=tolerance,
            objective=Objective(
                kind=objective,
                weights=numbers(weights, "--weights"),
                p99_ms=numbers(p99, "--p99"),
                least_fairness=fairness,
            ),
            seconds=seconds,
            batches=batches,
            seed=seed,
            others=others,
            progress=progress.part_or_end,
        )
        if how is not None:
            trials = wiring.run_options(device, gpu, 1.0, 0.1, 0.0, seed, None)
            made = wiring.search_and_verify(
                wanted,
                layout,
                found,
                constants,
                options,
                how,
                trials,
                progress.part_or_end,
            )
        else:
            made = wiring.make_plan(policy, wanted, layout, found, constants, options)
    store.save(made, out)
    if made.aliased:
        screen.warn(
            f"{len(made.lanes)} lanes on {layout.hardware_queues} hardware queues: "
            f"some will wait on each other"
        )
    if as_json:
        screen.print_json(explain.describe(made))
    else:
        explain.print_plan(made)
        screen.out.print(f"Written to {out}. Next: eclip run {out} -o run.json")

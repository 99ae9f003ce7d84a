"""``eclip plan``: a mix and a policy to a plan file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eclip import store
from eclip.cli import explain, screen, wiring
from eclip.cli.options import (
    CalibrationOption,
    JsonOption,
    MixArgument,
    ProfilesOption,
    SwitchMaxOption,
    TailOption,
    ToleranceOption,
    TopologyOption,
)
from eclip.mix import parse_mix


def plan(
    mix: MixArgument,
    policy: Annotated[
        str, typer.Option("--policy", help="shared, timeslice, model, kernel or eclip.")
    ] = "eclip",
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the plan.")] = Path(
        "plan.json"
    ),
    topology: TopologyOption = "h200",
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    switch_max: SwitchMaxOption = 14,
    tolerance: ToleranceOption = 0.05,
    tail: TailOption = False,
    as_json: JsonOption = False,
) -> None:
    """Decide which lane every kernel of a mix takes, and write the plan."""
    from eclip.planning.policies import PolicyOptions

    wanted = parse_mix(mix)
    device = wiring.find_topology(topology)
    constants = wiring.find_calibration(calibration, device)
    found = wiring.find_profiles(wanted, device, constants, profiles or [], tail)
    options = PolicyOptions(switch_max=switch_max, tolerance=tolerance)
    with screen.progress_bar(f"planning {wanted.name}"):
        made = wiring.make_plan(policy, wanted, device, found, options)
    store.save(made, out)
    if made.aliased:
        screen.warn(
            f"{len(made.lanes)} lanes on {device.hardware_queues} hardware queues: "
            f"some will wait on each other"
        )
    if as_json:
        screen.print_json(explain.describe(made))
    else:
        explain.print_plan(made)
        screen.out.print(f"Written to {out}. Next: eclip run {out} -o run.json")

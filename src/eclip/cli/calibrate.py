"""``eclip calibrate``: fit the simulator to a GPU, from runs measured there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import asdict

import eclip
from eclip.artefacts import outputs
from eclip.cli import screen
from eclip.cli.options import CalibrationOption, JsonOption, ProfilesOption
from eclip.devices import open_device
from eclip.errors import DeviceError
from eclip.lab.calibrate import MIXES, cases_on, fit_observations, measure
from eclip.lab.case import find_calibration, find_observations, find_topology
from eclip.lab.fit import Errors, Fit


def calibrate(
    device: Annotated[
        str, typer.Option("--device", help="Where to measure: cuda, or cuda:1 for the second GPU.")
    ] = "cuda",
    mixes: Annotated[
        list[str] | None, typer.Option("--mixes", help="A mix to measure; repeatable.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Runs of each mix.")] = 20,
    budget: Annotated[
        float, typer.Option("--budget", min=1.0, help="Seconds of measuring, at most.")
    ] = 300.0,
    observations: Annotated[
        Path, typer.Option("--observations", help="Where runs are kept; more are added to it.")
    ] = Path("observations.json.gz"),
    stored: Annotated[
        str | None,
        typer.Option("--from", help="Measure nothing: fit this file of runs, or a built-in one."),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The calibration to write.")] = Path(
        "calibration.json"
    ),
    topology: Annotated[
        str, typer.Option("--topology", help="--from: the device that was measured, or a file.")
    ] = "h200",
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of placements, and of what is held out.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure random placements on a GPU and fit the simulator's constants to them."""
    outputs.check_output(out, eclip.Calibration)
    folders = profiles or []
    with screen.progress_bar("calibrating") as progress:
        if stored is not None:
            found = find_observations(stored)
            shape = find_topology(topology)
        else:
            outputs.check_output(observations, eclip.Observations)
            wanted = [eclip.parse_mix(mix) for mix in mixes or MIXES]
            try:
                opened = open_device(device)
            except DeviceError as error:
                raise DeviceError(
                    f"{error}; runs measured elsewhere can be fitted with --from"
                ) from None
            with opened:
                shape = opened.topology
                found = measure(
                    opened,
                    cases_on(opened, wanted, calibration, folders),
                    observations,
                    runs=runs,
                    budget_s=budget,
                    seed=seed,
                    progress=progress,
                )
        if not progress.stopped:
            base = find_calibration(calibration, shape)
            fitted = fit_observations(found, shape, base, folders, seed=seed, progress=progress)
    screen.exit_if_stopped(progress, f"{observations} has {len(found.runs)} runs; call again")
    failed = outputs.save_or_rescue(fitted.calibration, out)
    if as_json:
        screen.print_json(describe(fitted))
    else:
        print_fit(fitted)
        if failed is None:
            screen.out.print(f"Written to {out}. Next: eclip compare MIX --calibration {out}")
    if failed is not None:
        raise failed


def describe(fitted: Fit) -> dict[str, Any]:
    """For JSON."""
    calibration = fitted.calibration
    return {
        "interference": asdict(calibration.interference),
        "idle_w": calibration.power.idle_w,
        "launch_ns": calibration.costs.launch_ns,
        "errors": {name: msgspec.to_builtins(one) for name, one in _rows(fitted)},
    }


def print_fit(fitted: Fit) -> None:
    calibration = fitted.calibration
    constants = [
        *asdict(calibration.interference).items(),
        ("idle_w", calibration.power.idle_w),
        ("launch_ns", calibration.costs.launch_ns),
    ]
    screen.print_table(
        "Fitted constants", ["constant", "value"], ([n, f"{v:g}"] for n, v in constants)
    )
    screen.print_table(
        "Simulated against measured",
        ["runs", "count", "rate error", "power error", "STP bias", "STP correlation"],
        (
            [
                name,
                str(one.runs),
                f"{one.rate:.1%}",
                f"{one.power:.1%}",
                f"{one.stp_bias:+.1%}",
                f"{one.stp_correlation:.2f}",
            ]
            for name, one in _rows(fitted)
        ),
    )
    left_out = fitted.left_out.values()
    rate = sum(one.rate for one in left_out) / len(left_out)
    power = sum(one.power for one in left_out) / len(left_out)
    screen.out.print(
        f"On a mix that was not fitted, mean of {len(left_out)}: rates are {rate:.1%} off, power "
        f"{power:.1%}."
    )


def _rows(fitted: Fit) -> list[tuple[str, Errors]]:
    rows = [
        ("all: the calibration written", fitted.fitted),
        ("part: fitted", fitted.seen),
        ("part: not fitted, of the same mixes", fitted.held_runs),
        ("part: not fitted, of other mixes", fitted.held_mixes),
        *((f"not fitted: {mix}", one) for mix, one in fitted.left_out.items()),
        ("with switches, never fitted", fitted.switching),
    ]
    return [(name, one) for name, one in rows if one.runs]

"""``eclip calibrate``: fit the simulator to a GPU, from runs measured there."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import asdict

import eclip
from eclip.cli import screen
from eclip.cli.options import CalibrationOption, JsonOption, ProfilesOption, given_options
from eclip.devices import open_device
from eclip.errors import DeviceError, StoppedError, UsageError
from eclip.files import outputs
from eclip.planner.case import find_calibration, find_observations, find_topology
from eclip.tune.calibrate import MIXES, cases_on, fit_observations, measure, pairs_on
from eclip.tune.fit import Errors, Fit

_MEASURING = ("--device", "--mixes", "--runs", "--budget", "--observations")


def calibrate(
    context: typer.Context,
    device: Annotated[
        str,
        typer.Option("--device", help="The GPU: cuda, hip, or cuda:1 for the second GPU."),
    ] = "cuda",
    mixes: Annotated[
        list[str] | None, typer.Option("--mixes", help="A mix to measure; repeatable.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Measure N runs of each mix.")] = 20,
    budget: Annotated[
        float, typer.Option("--budget", min=1.0, help="Measure for at most this many seconds.")
    ] = 300.0,
    observations: Annotated[
        Path,
        typer.Option("--observations", help="File of measured runs, to which new runs are added."),
    ] = Path("observations.json.gz"),
    stored: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Measure nothing; fit the runs in this file, or built-in runs such as h200.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The calibration to write.")] = Path(
        "calibration.json"
    ),
    topology: Annotated[
        str,
        typer.Option("--topology", help="With --from: the measured device, by name or file."),
    ] = "h200",
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of the placements and of the held-out runs.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure random placements and joints on a GPU, and fit the simulator to them."""
    given = given_options(context)
    if ignored := [option for option in given if option in _MEASURING and stored is not None]:
        raise UsageError(f"{ignored[0]} is for measuring, and --from measures nothing")
    if "--topology" in given and stored is None:
        raise UsageError("--topology needs --from; a measured device has its own topology")
    outputs.check_output(out, eclip.Calibration)
    folders = profiles or []
    fitted: Fit | None = None
    with screen.progress_bar("calibrating") as progress:
        if stored is not None:
            observed = find_observations(stored)
            shape = find_topology(topology)
        else:
            outputs.check_output(observations, eclip.Observations)
            asked = [eclip.parse_mix(mix) for mix in mixes or MIXES]
            try:
                opened = open_device(device)
            except DeviceError as error:
                raise DeviceError(
                    f"{error}; runs measured elsewhere can be fitted with --from"
                ) from None
            with opened:
                shape = opened.topology
                cases = cases_on(opened, asked, calibration, folders)
                observed = measure(
                    opened,
                    cases,
                    observations,
                    pairs_on(opened, cases, calibration, folders),
                    runs=runs,
                    budget_s=budget,
                    seed=seed,
                    progress=progress,
                )
        if not progress.stopped:
            base = find_calibration(calibration, shape)
            with contextlib.suppress(StoppedError):
                fitted = fit_observations(
                    observed, shape, base, folders, seed=seed, progress=progress
                )
    if fitted is None:
        kept = f"{stored or observations} has {len(observed.runs)} runs"
        screen.exit_if_stopped(progress, f"{kept}; fit them with --from, or repeat the command")
        return
    failed = outputs.save_or_rescue(fitted.calibration, out)
    if as_json:
        screen.print_json(describe(fitted))
    else:
        print_fit(fitted)
        if failed is None:
            screen.out.print(f"Written to {out}. Next: eclip compare MIX --calibration {out}")
    if failed is not None:
        raise failed
    screen.exit_if_stopped(progress, f"{out} has the complete fit")


def describe(fitted: Fit) -> dict[str, Any]:
    """For JSON."""
    calibration = fitted.calibration
    return {
        "interference": asdict(calibration.interference),
        "idle_w": calibration.power.idle_w,
        **_fitted_costs(fitted),
        "errors": {name: msgspec.to_builtins(errors) for name, errors in _rows(fitted)},
    }


def _fitted_costs(fitted: Fit) -> dict[str, int]:
    costs = fitted.calibration.costs
    joints = ("joint_ns", "notice_ns", "hold_ns") if fitted.pairs else ()
    return {name: getattr(costs, name) for name in ("launch_ns", *joints)}


def print_fit(fitted: Fit) -> None:
    calibration = fitted.calibration
    constants = [
        *asdict(calibration.interference).items(),
        ("idle_w", calibration.power.idle_w),
        *_fitted_costs(fitted).items(),
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
                str(errors.runs),
                f"{errors.rate:.1%}",
                f"{errors.power:.1%}",
                f"{errors.stp_bias:+.1%}",
                f"{errors.stp_correlation:.2f}",
            ]
            for name, errors in _rows(fitted)
        ),
    )
    left_out = fitted.left_out.values()
    rate = sum(errors.rate for errors in left_out) / len(left_out)
    power = sum(errors.power for errors in left_out) / len(left_out)
    screen.out.print(
        f"Mean error on a mix left out of the fit, over {len(left_out)} mixes: rates {rate:.1%}, "
        f"power {power:.1%}."
    )


def _rows(fitted: Fit) -> list[tuple[str, Errors]]:
    rows = [
        ("all: the calibration written", fitted.fitted),
        ("part: fitted", fitted.seen),
        ("part: not fitted, of the same mixes", fitted.held_runs),
        ("part: not fitted, of other mixes", fitted.held_mixes),
        *((f"not fitted: {mix}", errors) for mix, errors in fitted.left_out.items()),
        ("with switches, never fitted", fitted.switching),
    ]
    return [(name, errors) for name, errors in rows if errors.runs]

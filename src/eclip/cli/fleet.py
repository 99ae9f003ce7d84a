"""``eclip fleet``: which services share which of many GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eclip.artefacts import outputs, store
from eclip.cli import screen
from eclip.cli.options import JsonOption, ProfilesOption, between, finite_numbers
from eclip.errors import UsageError
from eclip.fleet import placement as placing
from eclip.fleet.config import find_kinds, load_fleet
from eclip.fleet.moves import Moves, moves_between
from eclip.fleet.placement import Placement
from eclip.fleet.scores import Scorer
from eclip.fleet.simulate import Day, simulate_day
from eclip.reports import fleet_day

app = typer.Typer(
    help="Many GPUs: services placed by simulation, and simulated fleets.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _group() -> None:
    """With one command only, typer would drop its name."""


@app.command()
@finite_numbers
def plan(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The fleet: services and GPUs, TOML.")
    ],
    objective: Annotated[
        str | None,
        typer.Option("--objective", help="fewest, goodput or energy; the file's unless given."),
    ] = None,
    running: Annotated[
        Path | None,
        typer.Option("--running", help="The placement that runs; says what must move from it."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Where to write the placement, JSON.")
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option("--scores", help="Keep the scores of simulated sets in this .json.gz file."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Prove the optimum; for small fleets, needs HiGHS.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also simulate a day, following and static.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the simulated day as SVG here.")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", help="Search for about so long.", callback=between("--seconds", 0.1, 86400)
        ),
    ] = placing.DEFAULT_SECONDS,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=0, help="Run exactly N search steps instead (reproducible)."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the search.")] = 0,
    profiles: ProfilesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide which services share which GPU, and what that gives. Nothing is deployed."""
    if picture is not None and not simulate:
        raise UsageError("--picture goes with --simulate: it draws the simulated day")
    if exact and running is not None:
        raise UsageError("--exact and --running exclude each other; give one of them")
    fleet, aim = load_fleet(file)
    scorer = Scorer(find_kinds(fleet, profiles or []))
    before = None if running is None else placing.load_placement(running)
    if out is not None:
        outputs.check_output(out, placing.ASSUMED.encode())
    if picture is not None:
        outputs.check_output(picture, fleet_day.MARK)
    if scores is not None:
        scorer.remember(scores)
    days: list[Day] = []
    with screen.progress_bar(f"placing {len(fleet.services)} services") as progress:
        if exact:
            made = placing.place_exactly(fleet, scorer, objective or aim, progress=progress)
        else:
            made = placing.place(
                fleet,
                scorer,
                objective or aim,
                running=before,
                seconds=seconds,
                steps=steps,
                seed=seed,
                progress=progress,
            )
        if simulate:
            days = [
                simulate_day(fleet, scorer, static=static, progress=progress)
                for static in (False, True)
            ]
    if scores is not None:
        scorer.keep(scores)
    moves = None if before is None else moves_between(before, made, fleet, scorer.kinds)
    if out is not None:
        placing.save_placement(made, out)
    if picture is not None:
        store.save_export(picture, fleet_day.draw_days(days).encode(), fleet_day.MARK)
    if as_json:
        told: dict[str, Any] = {"placement": made, "moves": moves, "days": days}
        screen.print_json({name: value for name, value in told.items() if value})
    else:
        _print_placement(made)
        if moves is not None:
            _print_moves(moves)
        _print_days(days)
    screen.exit_if_stopped(progress, "the placement is the best found until then")


def _print_placement(made: Placement) -> None:
    rows = [
        [
            str(placed.gpu),
            placed.policy,
            ", ".join(
                f"{one.service} {one.rate_rps:.4g}/s (p99 {one.p99_ms:.2f} of {one.bound_ms:g} ms)"
                for one in placed.instances
            ),
            f"{placed.power_w:.0f}",
        ]
        for placed in made.gpus
    ]
    proven = ", proven" if made.exact else ""
    title = f"{len(made.gpus)} GPUs, objective {made.objective}{proven}"
    screen.print_table(title, ["GPU", "policy", "instances", "W"], rows, names=3)
    for name, part in made.refused.items():
        screen.warn(f"{name}: no room for {part:.0%} of its requests")
    screen.out.print(
        f"{made.goodput_rps:.0f} requests/s within bounds, {made.power_w:.0f} W. {made.assumed}."
    )


def _print_moves(moves: Moves) -> None:
    rows = [
        [
            str(change.gpu),
            ", ".join(change.load) or "-",
            ", ".join(change.unload) or "-",
            f"{change.load_s:.1f}",
            f"{change.both_bytes / 2**30:.1f} of {change.memory_bytes / 2**30:.0f}",
            "beside" if change.beside else "after the old",
        ]
        for change in moves.changes
    ]
    columns = ["GPU", "loads", "unloads", "s", "GiB for both", "opens"]
    screen.print_table(f"{moves.instances} instances to load", columns, rows, names=3)
    screen.out.print(f"Assumed: {moves.assumed}.")


def _print_days(days: list[Day]) -> None:
    if not days:
        return
    rows = [
        [
            day.label,
            f"{day.kept:.3%}",
            f"{day.gpus_mean:.1f} ({day.gpus_most})",
            str(day.moved),
            str(day.failed),
            f"{day.energy_kwh:.1f}",
            f"{day.within:.3%} of {day.requests}",
            f"{day.sampled_kept} of {day.sampled_gpus}",
        ]
        for day in days
    ]
    columns = ["day", "bounds kept", "GPUs (most)", "moves", "failures", "kWh", "routed in time",
               "simulated kept"]  # fmt: skip
    screen.print_table("A simulated day", columns, rows)
    screen.out.print(f"{days[0].modelled}.")

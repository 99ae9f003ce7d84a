"""``eclip fleet``: places services on many GPUs, and runs them there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from eclip.cli import screen
from eclip.cli.options import JsonOption, ProfilesOption, between, finite_numbers
from eclip.cli.screen import interrupt
from eclip.errors import StoppedError, UsageError
from eclip.files import outputs, store
from eclip.fleet import kubernetes
from eclip.fleet.config import FleetFile, find_kinds, load_fleet_file
from eclip.fleet.place import placement as placing
from eclip.fleet.place.moves import Moves, moves_between
from eclip.fleet.place.placement import Placement
from eclip.fleet.place.scores import MARK, Scorer
from eclip.fleet.place.simulate import Day, simulate_day
from eclip.fleet.planning import plan_fleet
from eclip.fleet.ray import cluster
from eclip.fleet.running import FleetRunner
from eclip.reports import fleet_day

app = typer.Typer(
    help="Many GPUs: services placed by simulation, run on Ray, and simulated fleets.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


SecondsOption = Annotated[
    float,
    typer.Option(
        "--seconds", help="Search for about N seconds.", callback=between("--seconds", 0.1, 86400)
    ),
]
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A TOML file of services and GPUs.")
]


@app.command()
@finite_numbers
def plan(
    file: FileArgument,
    objective: Annotated[
        str | None,
        typer.Option("--objective", help="fewest, goodput or energy. Default: the file's."),
    ] = None,
    running: Annotated[
        Path | None,
        typer.Option("--running", help="Start from this running placement, and print the moves."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the placement to this JSON file.")
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option("--scores", help="Keep the scores of simulated sets in this .json.gz file."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Prove the optimum (small fleets only, needs HiGHS).")
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Also simulate a day, with changing placements and with a fixed placement.",
        ),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the simulated day to this SVG file.")
    ] = None,
    seconds: SecondsOption = placing.DEFAULT_SECONDS,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=0, help="Run exactly N search steps (reproducible)."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the search.")] = 0,
    profiles: ProfilesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide which services share which GPU. Nothing is deployed."""
    if picture is not None and not simulate:
        raise UsageError("--picture draws the simulated day and needs --simulate")
    if exact and running is not None:
        raise UsageError("--exact and --running cannot be combined")
    loaded = load_fleet_file(file)
    fleet, aim = loaded.fleet, loaded.objective
    scorer = Scorer(find_kinds(fleet, profiles or []))
    before = None if running is None else placing.load_placement(running)
    if out is not None:
        outputs.check_output(out, placing.ASSUMED.encode())
    if picture is not None:
        outputs.check_output(picture, fleet_day.MARK)
    if scores is not None:
        outputs.check_output(scores, MARK)
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
            with contextlib.suppress(StoppedError):  # the placement is printed all the same
                days = [
                    simulate_day(fleet, scorer, static=static, progress=progress)
                    for static in (False, True)
                ]
    if scores is not None:
        scorer.keep(scores)
    moves = None if before is None else moves_between(before, made, fleet, scorer.kinds)
    if out is not None:
        placing.save_placement(made, out)
    if picture is not None and days:
        store.save_export(picture, fleet_day.draw_days(days), fleet_day.MARK)
    if as_json:
        told: dict[str, Any] = {"placement": made, "moves": moves, "days": days}
        screen.print_json({name: value for name, value in told.items() if value})
    else:
        print_placement(made)
        if moves is not None:
            _print_moves(moves)
        _print_days(days)
    no_day = "; no day was simulated" if simulate and not days else ""
    screen.exit_if_stopped(progress, f"the placement is the best found until then{no_day}")


def print_placement(made: Placement) -> None:
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
        f"{made.goodput_rps:.0f} requests/s within bounds, {made.power_w:.0f} W. The p99s are "
        f"those with {made.reserve:.0%} more requests (reserve). {made.assumed}."
    )


def _print_moves(moves: Moves) -> None:
    if not moves.changes:
        screen.out.print("Nothing has to be loaded or unloaded.")
        return
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


@app.command()
@finite_numbers
def up(
    file: FileArgument,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Return as soon as the fleet serves. Needs an address in [ray]."
        ),
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            help="Search for a placement for about N seconds.",
            callback=between("--seconds", 0.1, 86400),
        ),
    ] = 5.0,
    profiles: ProfilesOption = None,
) -> None:
    """Run the fleet: on the cluster that FILE names, or with Ray on this machine.

    A running fleet is changed to match FILE, and the command returns. Otherwise the command starts
    the fleet and stays: Ctrl-C or SIGTERM takes the fleet down, and after a loss of Ray's head the
    command brings the fleet back from FILE.
    """
    with FleetRunner(file, profiles or [], seconds) as keeper:
        if detach and keeper.file.ray.address is None:
            raise UsageError(
                "--detach needs an address in [ray]: a Ray on this machine ends with the command"
            )
        with screen.progress_bar(f"bringing up {file.name}", in_lines=True) as progress:
            status = keeper.up(progress)
        routers = sorted({(one.http, one.grpc) for one in status.routers})
        where = ", ".join(f"http://{http} (gRPC {grpc})" for http, grpc in routers)
        in_use = sum(bool(gpu.services) for gpu in status.gpus)
        what = "changed and up" if keeper.adopted else "up"
        screen.out.print(
            f"The fleet of {file.name} is {what}: {in_use} of {len(status.gpus)} GPUs, "
            f"{len(status.routers)} routers at {where}."
        )
        if detach or keeper.adopted:
            return
        screen.out.print("Ctrl-C takes the fleet down.")
        stop = threading.Event()
        with interrupt.handled_by(lambda *_: stop.set()):
            keeper.stay(stop, screen.out.print)


@app.command()
def status(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show GPUs, routers and rates of a running fleet. Exit code 1: the fleet is not ready."""
    with _fleet_that_is_up(load_fleet_file(file)) as controller:
        now = cluster.ask(controller.status)
    if as_json:
        screen.print_json(now)
    else:
        rows = [
            [
                gpu.gpu,
                gpu.state,
                ", ".join(f"{name} {rate:.4g}/s" for name, rate in gpu.services.items()) or "-",
                gpu.http or "-",
            ]
            for gpu in now.gpus
        ]
        screen.print_table("GPUs", ["GPU", "state", "planned", "server"], rows, names=4)
        rows = [
            [
                str(one.number),
                "ready" if one.ready else "not ready",
                one.http,
                one.grpc,
                str(one.near),
                str(one.far),
            ]
            for one in now.routers
        ]
        columns = ["router", "state", "HTTP", "gRPC", "GPUs near", "GPUs far"]
        screen.print_table("Routers", columns, rows, names=4)
        rates = ", ".join(f"{name} {rate:.4g}/s" for name, rate in now.rates_rps.items() if rate)
        screen.out.print(f"Requests in the last seconds: {rates or 'none'}.")
        for name, part in now.refused.items():
            screen.warn(f"{name}: no room for {part:.0%} of its requests")
        for line in filter(None, (now.doing, now.trouble)):
            screen.warn(line)
    if not now.ready:
        raise typer.Exit(1)


@app.command()
def down(file: FileArgument) -> None:
    """Take the fleet down: open requests are answered first."""
    with _fleet_that_is_up(load_fleet_file(file)):
        cluster.take_down()
    screen.out.print(f"The fleet of {file.name} is down.")


@app.command()
@finite_numbers
def render(
    file: FileArgument,
    k8s: Annotated[
        bool, typer.Option("--k8s", help="Write Kubernetes manifests: one pod per GPU, no Ray.")
    ] = False,
    image: Annotated[
        str, typer.Option("--image", help="The container image; eclip must be installed in it.")
    ] = "eclip:latest",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write to this file. Default: the screen.")
    ] = None,
    seconds: SecondsOption = 5.0,
    profiles: ProfilesOption = None,
) -> None:
    """Write the fleet's placement for another orchestrator. Nothing is deployed."""
    if not k8s:
        raise UsageError("give a format: --k8s writes Kubernetes manifests")
    loaded = load_fleet_file(file)
    if out is not None:
        outputs.check_output(out, kubernetes.MARK)
    with screen.progress_bar(f"placing {len(loaded.fleet.services)} services") as progress:
        planned = plan_fleet(
            loaded, loaded.fleet, folders=profiles or [], seconds=seconds, progress=progress
        )
    text = kubernetes.render_text(loaded, planned.placement, image)
    if out is None:
        screen.write(text)
    else:
        store.save_export(out, text, kubernetes.MARK)
    screen.exit_if_stopped(progress, "the placement is the best found until then")


@contextlib.contextmanager
def _fleet_that_is_up(file: FleetFile) -> Iterator[Any]:
    cluster.connect(file.ray)
    try:
        controller = cluster.find_controller()
        if controller is None:
            raise UsageError(
                f"no fleet is up at {cluster.address_of(file.ray)}; run eclip fleet up"
            )
        yield controller
    finally:
        cluster.disconnect()

"""``eclip bench``: the speed of solver and simulator here, and the cost of lanes on a GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from eclip.cli import screen
from eclip.cli.options import JsonOption, given_options
from eclip.cuda.characterise import characterise
from eclip.errors import UsageError, unknown_name
from eclip.tune.speed import BENCHES, REPEATS


def bench(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WHAT]",
            help="solver, simulator or search (default: all three); or device, for a GPU's lanes.",
        ),
    ] = None,
    gpu: Annotated[int, typer.Option("--gpu", min=0, help="device: the GPU, from 0.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure solver, simulator and search on this machine, or a GPU's lanes."""
    if "--gpu" in given_options(context) and what != "device":
        raise UsageError("--gpu needs `eclip bench device`")
    if what == "device":
        _bench_device(gpu, as_json)
        return
    if what is not None and what not in BENCHES:
        raise unknown_name("bench", what, [*BENCHES, "device"])
    figures = []
    with screen.progress_bar("measuring") as progress:
        names = [what] if what else list(BENCHES)
        for index, name in enumerate(names):
            figures += BENCHES[name]()
            progress.part_or_end((index + 1) / len(names))
    if as_json:
        screen.print_json(figures)
        return
    screen.print_table(
        f"This machine, one core, median of {REPEATS}",
        ["claim", "median", "range", "unit", "target", "met"],
        (
            [
                figure.what,
                f"{figure.median:.3g}",
                f"{figure.lowest:.3g} to {figure.highest:.3g}",
                figure.unit,
                figure.target,
                "yes" if figure.met else "NO",
            ]
            for figure in figures
        ),
    )


def _bench_device(gpu: int, as_json: bool) -> None:
    with screen.progress_bar(f"characterising GPU {gpu}") as progress:
        figures = characterise(gpu, progress.part_or_end)
    if as_json:
        screen.print_json(figures)
        return
    for table in dict.fromkeys(figure.table for figure in figures):
        shown = [figure for figure in figures if figure.table == table]
        columns = list(dict.fromkeys(figure.column for figure in shown))
        value = {(figure.row, figure.column): figure for figure in shown}
        screen.print_table(
            table,
            ["", *(f"{column} ({value[shown[0].row, column].unit})" for column in columns)],
            (
                [row, *(f"{value[row, column].value:.2f}" for column in columns)]
                for row in dict.fromkeys(figure.row for figure in shown)
            ),
        )

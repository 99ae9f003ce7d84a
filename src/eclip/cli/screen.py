"""What commands print: tables and words to standard output, the rest to standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eclip.artefacts.measures import Measures

_PIPE_WIDTH = 160  # a table cut at 80 columns is of no use in a file

# No markup: names and messages may hold square brackets.
out = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One JSON document on standard output, and nothing else."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1
) -> None:
    """The first columns hold names, to the left; the others numbers, to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < names else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Name and value, a line each; long values wrap under themselves."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    out.print(table)


def warn(message: str) -> None:
    err.print(f"warning: {message}", style="yellow")


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[float], None]]:
    """A bar moved by a function of the share done, 0 to 1; it vanishes when the work ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def modelled_note(modelled: bool) -> str:
    return " (modelled: time and energy are a simulator's)" if modelled else ""


def print_measures(measures: Sequence[Measures]) -> None:
    """Policies side by side, then every worker under every policy; fits 80 columns.

    Switches are per request.
    """
    note = modelled_note(any(one.modelled for one in measures))
    print_table(
        f"Policies{note}",
        ["policy", "STP", "fairness", "power W", "J/request", "STP·s/kJ", "switches"],
        (
            [
                one.policy,
                f"{one.stp:.3f}",
                f"{one.fairness:.2f}",
                f"{one.power_w:.0f}",
                number(one.joules_per_request, 4),
                f"{one.efficiency_per_kj:.2f}",
                str(one.switches_per_request),
            ]
            for one in measures
        ),
    )
    print_table(
        f"Workers{note}",
        [
            "worker",
            "policy",
            "rate/s",
            "of alone",
            "p50 ms",
            "p95 ms",
            "p99 ms",
            "switches",
        ],
        (
            [
                one.workers[index].name if first else "",
                one.policy,
                f"{one.workers[index].rate_rps:.1f}",
                f"{one.workers[index].ratio:.0%}",
                number(one.workers[index].p50_ms, 2),
                number(one.workers[index].p95_ms, 2),
                number(one.workers[index].p99_ms, 2),
                str(one.workers[index].switches_per_request),
            ]
            for index in range(len(measures[0].workers))
            for first, one in ((one is measures[0], one) for one in measures)
        ),
        names=2,
    )


def number(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"

"""``eclip results``: shows the comparisons of a results file as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from eclip.cli import screen
from eclip.cli.options import JsonOption
from eclip.errors import ArtefactError, UsageError
from eclip.files import store
from eclip.files.comparison import Comparison
from eclip.files.writing import check_name
from eclip.reports import results as drawn

# On a narrow screen these columns are left out, in this order.
_OPTIONAL = (
    "mJ/request",
    "switches",
    "range (runs)",
    "W",
    "setting",
    "requests",
    "p99 per worker, ms",
)


def results(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A results file.")],
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    into: Annotated[
        Path | None,
        typer.Option("--into", help="Replace the tables between the marks of this Markdown file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the comparisons in a results file of `eclip compare`, mix by mix and as means."""
    if as_json + as_markdown + (into is not None) > 1:
        raise UsageError("--json, --markdown and --into cannot be combined")
    comparisons, warnings = store.load_results(file)
    for warning in warnings:
        screen.warn(warning)
    if not comparisons:
        readable = " that can be read" if warnings else ""
        raise ArtefactError(
            f"{file} has no comparisons{readable}; add one: eclip compare MIX --results {file}"
        )
    if into is not None:
        check_name(into, "file")
    if as_json:
        screen.print_json(comparisons)
        return
    if into is not None:
        document = _read(into)
        try:
            text = drawn.replace_section(document, drawn.markdown(comparisons))
        except ValueError as error:
            raise ArtefactError(f"{into}: {error}; add both marks where tables belong") from None
        store.save_export(into, text, drawn.BEGIN.encode())
        screen.out.print(f"Tables of {len(comparisons)} comparisons are in {into}.")
    elif as_markdown:
        screen.write(drawn.markdown(comparisons) + "\n")
    else:
        print_results(comparisons)


def print_results(comparisons: Sequence[Comparison]) -> None:
    for table in drawn.tables(comparisons):
        screen.print_table(table.title, table.columns, table.rows, names=2, optional=_OPTIONAL)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ArtefactError(f"{path} is not a text file: {error}") from None

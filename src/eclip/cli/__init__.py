"""The command line: one file a command, joined here.

Whatever goes wrong ends in one line after ``eclip:`` and an exit code: 2 for what the caller can
correct, 1 for what failed, 130 for an interrupt.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from eclip import __version__
from eclip.cli import (
    bench,
    calibrate,
    compare,
    demo,
    doctor,
    exec,
    explain,
    inspect,
    plan,
    profile,
    record,
    report,
    results,
    run,
    topology,
    varout,
)
from eclip.errors import EclipError

app = typer.Typer(
    name="eclip",
    help="Run several ML models on one GPU at once, each kernel group on its own compute units.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS = (
    demo,
    compare,
    plan,
    explain,
    run,
    report,
    results,
    inspect,
    topology,
    profile,
    record,
    exec,
    calibrate,
    doctor,
    bench,
)
for command in COMMANDS:
    name = command.__name__.rpartition(".")[2]
    app.command(name)(getattr(command, name))
app.add_typer(varout.app, name="varout")


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"eclip {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Run several ML models on one GPU at once, each kernel group on its own compute units."""


def main() -> None:
    try:
        app()
    except EclipError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    except MemoryError:
        _fail("out of memory; ask for a shorter run, a smaller trace window or fewer workers", 1)
    except SystemExit as stop:
        if stop.code == 130:
            _fail("interrupted; files written before are whole, nothing else was left", 130)
        raise


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"eclip: {message}\n")
    sys.exit(code)

"""The command line: one file a command, joined here.

Every error ends in one line after ``eclip:`` and an exit code: 2 for errors that the user can
correct, 1 for other failures, 130 for SIGINT and 143 for SIGTERM.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.main

import eclip
from eclip.cli import screen
from eclip.cli.options import finite_numbers
from eclip.cli.screen import interrupt
from eclip.errors import EclipError

_HELP = "Run several ML models on one GPU at once, each kernel group on its own compute units."
# In the order in which a new user needs them. A command's module is imported when the command is
# used: packages that compile or load the GPU's driver take a second.
COMMANDS = (
    "demo",
    "compare",
    "plan",
    "explain",
    "run",
    "serve",
    "report",
    "results",
    "inspect",
    "topology",
    "profile",
    "record",
    "exec",
    "top",
    "calibrate",
    "doctor",
    "bench",
    "fleet",
    "varout",
)


def make_app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands."""
    app = typer.Typer(
        name="eclip",
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for name in names:
        module = importlib.import_module(f"eclip.cli.{name}")
        if hasattr(module, "app"):  # a command with commands of its own
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(finite_numbers(getattr(module, name)))
    return app


_COMPLETE = "_ECLIP_COMPLETE"  # set by the scripts of `eclip --install-completion`
# typer brings click along, inside or beside it, depending on its version.
_CLICK_ERROR: type[Exception] = next(
    one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException"
)


def _version(asked: bool) -> None:
    if asked:
        screen.write(f"eclip {eclip.__version__}\n")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Run several ML models on one GPU at once, each kernel group on its own compute units."""


def main() -> None:
    """Run what the arguments name, and exit."""
    with interrupt.handled_by(interrupt.end_at_once):
        try:
            code = _run(sys.argv[1:])
        finally:
            screen.end_output()
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """The exit code. typer itself would print usage errors on three lines."""
    named = arguments[0] if arguments else ""
    try:
        command = typer.main.get_command(
            make_app([named] if named in COMMANDS and _COMPLETE not in os.environ else COMMANDS)
        )
        _say_in_full(command)
        if _COMPLETE in os.environ:  # a shell asks how the line may go on
            command(prog_name="eclip")
        with command.make_context("eclip", arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except EclipError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno == errno.EPIPE and screen.nobody_reads():  # as in `eclip … | head -1`
            return 0
        where = f": {error.filename}" if error.filename else ""
        return _fail(f"{error.strerror or error}{where}", 1)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "eclip"):
            raise
        return _fail(
            f"this command needs the package {error.name}, which is not installed; "
            f"install eclip with all that it needs: pip install eclip",
            1,
        )
    except MemoryError:
        return _fail("out of memory; ask for a shorter run, a smaller trace or fewer workers", 1)
    except KeyboardInterrupt as stop:
        code = interrupt.exit_code(stop)
        word = "terminated" if code == 128 + signal.SIGTERM else "interrupted"
        return _fail(f"{word}; files written before are complete", code)
    except _CLICK_ERROR as error:
        return _refuse(error)
    return 0


def _say_in_full(command: Any) -> None:
    """Show whole sentences in the list of commands: typer would cut them off."""
    for one in getattr(command, "commands", {}).values():
        one.short_help = " ".join((one.help or "").partition("\n\n")[0].split())
        _say_in_full(one)


def _refuse(error: Any) -> int:
    """Print typer's usage error as one line. `eclip` alone shows the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    words = " ".join(error.format_message().split()).rstrip(".")
    if near := getattr(error, "possibilities", None):
        words = f"No such option: {error.option_name}; did you mean {near[0]}?"
    context = getattr(error, "ctx", None)
    help_of = context.command_path if context is not None else "eclip"
    end = "" if words.endswith("?") else ";"
    return _fail(f"{words[:1].lower()}{words[1:]}{end} see `{help_of} --help`", 2)


def _fail(message: str, code: int) -> int:
    line = message.replace("\n", " ")
    with contextlib.suppress(OSError):
        sys.stderr.write(f"eclip: {line}\n")
        sys.stderr.flush()
    return code

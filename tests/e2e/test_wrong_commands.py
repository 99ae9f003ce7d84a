"""Wrong commands, generated from the command line itself: each is refused in one line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from commands import Cli, assert_refused
from eclip.cli import make_app

Words = tuple[str, ...]

MISSING = "no/such/file.json"
_SHORT = ("--policies", "shared", "--seconds", "0.001", "--set", "warmup=0")
# Arguments with which a command would begin its work; options come on top. Whatever is not here
# needs none.
GOOD: dict[str, Words] = {
    "bench": ("search",),
    "compare": ("squeezenet:1", *_SHORT),
    "demo": ("--device", "nonsense"),
    "exec": ("--service", "--background", "true"),
    "explain": (MISSING,),
    "fleet down": (MISSING,),
    "fleet plan": (MISSING,),
    "fleet render": (MISSING,),
    "fleet status": (MISSING,),
    "fleet up": (MISSING,),
    "inspect": (MISSING,),
    "plan": ("squeezenet:1",),
    "profile": ("squeezenet:1",),
    "record": ("true",),
    "report": (MISSING,),
    "results": (MISSING,),
    "run": (MISSING,),
    "serve": ("nonsense",),
    "topology": ("nonsense",),
    "varout estimate": (MISSING,),
    "varout profile": (MISSING,),
}
WRONG_NUMBERS = ("many", "nan", "-1e400", "", "1e", "9" * 5000)
WRONG_PATHS = (MISSING, "x" * 5000, "\udcff/\udcfe", "garbage", "loop/x", ".")
WRONG_TEXTS = ("\udcff", "", "nonsense", "=", "\U0001f9c0" * 3000, "-1")


def commands() -> Iterator[tuple[str, Any]]:
    """The name and definition of every command."""
    open_groups: list[tuple[str, Any]] = [("", typer.main.get_command(make_app()))]
    while open_groups:
        name, command = open_groups.pop()
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            open_groups += [(f"{name} {part}".strip(), one) for part, one in inner.items()]


def wrong_commands() -> Iterator[Words]:
    for name, command in commands():
        words, good = tuple(name.split()), GOOD.get(name, ())
        yield (*words, *good, "--nonsense")
        yield (*words, *good, "\udcff", "\udcfe", "\udcfd")
        for option in command.params:
            if option.param_type_name != "option" or option.name == "help":
                continue
            flag = max(option.opts, key=len)
            yield (*words, *good, flag[:-1] + "zz")
            if option.is_flag:
                yield (*words, *good, f"{flag}=perhaps")
                continue
            yield (*words, *good, flag)
            kind = str(getattr(option, "type_descriptor", None) or option.type)
            number = re.search("int|float", kind, re.IGNORECASE)
            path = re.search("path", kind, re.IGNORECASE)
            for value in WRONG_NUMBERS if number else WRONG_PATHS if path else WRONG_TEXTS:
                # The last of two counts, but what follows a COMMAND is its own.
                yield (*words, flag, value, *good, *(() if "true" in good else (flag, value)))


ALL = sorted(set(wrong_commands()))
PARTS = 4


def check(cli: Cli, part: int) -> None:
    Path("garbage").write_bytes(bytes(range(256)))
    Path("loop").symlink_to("loop")
    for words in itertools.islice(ALL, part, None, PARTS):
        outcome = cli(*words)
        if outcome.code != 0:  # some values are right after all
            assert_refused(outcome, code=outcome.code)


def test_wrong_command_gets_one_line(cli: Cli) -> None:
    assert len(ALL) > 300 * (PARTS - 1)
    check(cli, 0)


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, PARTS))
def test_any_wrong_command_gets_one_line(cli: Cli, part: int) -> None:
    check(cli, part)

"""Files edited by hand: every command that reads one takes it or refuses it in one line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from commands import Cli, assert_refused
from hand_edits import COMMANDS, Edited

MOST_HERE = 250  # edits outside of `make test-long`, at most
MOST_LONG = 5000


def check(cli: Cli, most: int, every_command: bool) -> None:
    def run(*arguments: str) -> None:
        outcome = cli(*arguments)
        assert outcome.code == 0, outcome.err

    chance = random.Random(most)
    edited = Edited(Path.cwd(), run)
    edits = list(edited.edits(chance))
    assert len(edits) > MOST_LONG
    assert {edit.kind for edit in edits} == {*COMMANDS}
    for edit in chance.sample(edits, most):
        name = edited.write(edit).name
        commands = COMMANDS[edit.kind]
        for command in commands if every_command else [chance.choice(commands)]:
            outcome = cli(*command.replace("FILE", name).split())
            if outcome.code == 0:
                continue
            lines = [line for line in outcome.err.splitlines() if not line.startswith("warning: ")]
            told = "\n".join(lines)
            assert_refused(outcome._replace(err=told), code=outcome.code)


def test_edited_number_is_taken_or_refused_in_one_line(cli: Cli) -> None:
    check(cli, MOST_HERE, every_command=False)


@pytest.mark.long
def test_five_thousand_edits_are_taken_or_refused_in_one_line(cli: Cli) -> None:
    check(cli, MOST_LONG, every_command=True)

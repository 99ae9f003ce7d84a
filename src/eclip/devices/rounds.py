"""Rounds: several sessions run in turns, so that clocks and temperature treat them alike.

Every session runs once a round; each round begins one further down the list, so that over as many
rounds as there are sessions each has had every place once.
"""

from __future__ import annotations

from collections.abc import Iterator


def rotation(sessions: int, rounds: int) -> Iterator[tuple[int, int]]:
    """Round and session of every run, in order."""
    for number in range(rounds):
        for place in range(sessions):
            yield number, (number + place) % sessions

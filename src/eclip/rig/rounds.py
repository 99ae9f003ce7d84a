"""Rounds: several sessions run in turns, so that clocks and temperature treat them alike.

Every session runs once a round. Over as many rounds as there are sessions each has had every place
once, and nobody keeps coming after the same one: at its power limit a GPU makes a session pay for
the one before it, which no number of rounds averages out if that is always the same. (Williams'
design for carry-over effects; exact where sessions are even in number, where they are odd a session
comes after the same one at most twice.)
"""

from __future__ import annotations

from collections.abc import Iterator


def rotation(sessions: int, rounds: int) -> Iterator[tuple[int, int]]:
    """Round and session of every run, in order."""
    for number in range(rounds):
        for place in range(sessions):
            # 0, 1, -1, 2, -2, …: no two neighbours of a round are equally far apart.
            offset = (place + 1) // 2 if place % 2 else -(place // 2)
            yield number, (number + offset) % sessions

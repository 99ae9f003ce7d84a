"""Rounds: several sessions run in turns, so that clocks and temperature treat them alike.

Every session runs once a round. Over n rounds of n sessions, each session has had every place once,
and its predecessors differ. At its power limit a GPU makes a session pay for its predecessor, and
no number of rounds averages that out if the predecessor is always the same. (Williams' design for
carry-over effects: exact for an even number of sessions; for an odd number a session has the same
predecessor at most twice.)
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

"""Routing: which instance of a service gets a request. The router and simulated fleets call this.

Plain Python without imports, so that a router loads nothing heavy and a simulation can compile it.
"""

from __future__ import annotations

from typing import Any


def choose(slack_ns: Any, shares: Any, first_draw: float, second_draw: float) -> int:
    """The instance with more slack of two instances drawn by their shares.

    Slack is as old as its last report, so the best of all instances would get every request until
    the next report. For the same reason a router subtracts its own requests since the report from
    the slack: of two instances, both are drawn each time. An instance whose model is not loaded has
    a share of 0 and is never drawn. ``first_draw`` and ``second_draw`` are uniform in [0, 1).
    Returns -1 if no instance may be drawn.
    """
    total = 0.0
    for index in range(len(shares)):
        total += shares[index]
    chosen = -1
    for draw in (first_draw, second_draw):
        # The point of the shares laid end to end, without the one drawn first.
        point = draw * (total - (shares[chosen] if chosen >= 0 else 0.0))
        drawn = -1
        for index in range(len(shares)):
            if index == chosen or shares[index] <= 0:
                continue
            drawn = index
            point -= shares[index]
            if point < 0:
                break
        if drawn >= 0 and (chosen < 0 or slack_ns[drawn] > slack_ns[chosen]):
            chosen = drawn
    return chosen

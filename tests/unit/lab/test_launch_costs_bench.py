"""The bench of launch costs: what its turns say about a launch."""

from __future__ import annotations

import pytest
from lab.gpu.transparent import NATIVE, TURNS, middle, over_native, print_launches
from lab.support.kept import Row


def rows(ns: float) -> list[Row]:
    return [
        {"stream": stream, "idle": idle, "waits": waits, "ns": ns, "low_ns": ns, "high_ns": ns}
        for stream in ("default", "own")
        for idle in (0, 8)
        for waits in (False, True)
    ]


def test_a_launch_is_held_against_the_native_one_of_its_turn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The host gets slower from turn to turn; what libeclip adds does not."""
    found = {
        NATIVE: [rows(1000 + 500 * turn) for turn in range(TURNS)],
        "hook": [rows(1000 + 500 * turn + 30 + 2 * (turn % 2)) for turn in range(TURNS)],
    }
    mean, low, high = over_native(found, "hook", "own", False)
    assert mean == pytest.approx(31)
    # Six values of 30 and 32: a deviation of 1.095, and 2.571 standard errors around the mean.
    assert (low, high) == pytest.approx((31 - 1.15, 31 + 1.15), abs=0.01)
    print_launches(found)
    assert "+30 to +32" in capsys.readouterr().out


def test_numbers_are_the_medians_of_the_turns() -> None:
    (first, *_) = middle([rows(ns) for ns in (10, 12, 900)])
    assert first == {"stream": "default", "idle": 0, "waits": False} | dict.fromkeys(
        ("ns", "low_ns", "high_ns"), 12
    )

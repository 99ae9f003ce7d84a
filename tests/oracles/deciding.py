"""Deciding at a joint a second time, from the rules that core/rules.py states in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

TENTH_OF_A_SECOND = 100_000_000


@dataclass(frozen=True)
class Owner:
    """One who has a row on the board."""

    service: bool
    busy_since: int | None  # None: idle
    deadline: int = 0
    left: int = 0
    heartbeat: int | None = None  # None: it cannot stop without its readers
    bound: int = 0
    some: int = 0
    none: int = 0
    strict: bool = False  # its account says so
    latest: int | None = None  # when one of its requests is too late; None: it has no account

    @property
    def must_act_at(self) -> int:
        return self.deadline - self.left

    def counts_as_busy(self, now: int) -> bool:
        if self.busy_since is None:
            return False
        stopped = self.heartbeat is not None and now > self.heartbeat + TENTH_OF_A_SECOND
        hung = self.bound > 0 and now > self.busy_since + 10 * self.bound
        return not stopped and not hung

    def is_strict(self, now: int) -> bool:
        return self.latest is not None and (self.strict or now > self.latest)

    def is_owed(self, now: int) -> bool:
        """Its floor, as background."""
        return not self.service and now > self.must_act_at

    def slack(self, now: int) -> str:
        left = self.must_act_at - now
        if left < self.none:
            return "none"
        return "some" if left < self.some else "plenty"


@dataclass(frozen=True)
class Rule:
    to: frozenset[int]
    slack: str  # or less; "owed": of background
    choice: str | int  # "yield", "go on", or the number of a move


_LESS_OR_EQUAL = {
    "none": {"none"},
    "some": {"none", "some"},
    "plenty": {"none", "some", "plenty"},
}


def choice_of(
    owners: Mapping[int, Owner], mine: int, rules: Sequence[Rule], overtaken: int, now: int
) -> str | int:
    """The first rule that applies to anybody who is busy. Who is owed its floor does not yield.
    Background yields to services that are strict, if any of its rules is about them."""
    strict = [
        one
        for rule in rules
        if rule.slack != "owed" and not owners[mine].service
        for one in (owners.get(other) for other in rule.to)
        if one is not None and one.service and one.counts_as_busy(now) and one.is_strict(now)
    ]
    if strict:
        return "go on" if owners[mine].is_owed(now) else "yield"
    for rule in rules:
        if any(_applies(rule, owners, mine, other, overtaken, now) for other in rule.to):
            yields = rule.choice == "yield"
            return "go on" if yields and owners[mine].is_owed(now) else rule.choice
    return "go on"


def _applies(
    rule: Rule, owners: Mapping[int, Owner], mine: int, other: int, overtaken: int, now: int
) -> bool:
    they, we = owners.get(other), owners[mine]
    if they is None or not they.counts_as_busy(now):
        return False
    if rule.slack == "owed":
        return they.is_owed(now) and not we.is_owed(now)
    if not they.service:
        return False
    if not we.service:
        return they.slack(now) in _LESS_OR_EQUAL[rule.slack]
    return overtaken < 2 and (they.must_act_at, other) < (we.must_act_at, mine)


def owed(floor: Fraction, happened: Sequence[tuple[int, int]]) -> Fraction:
    """After stretches of (time passed, work done): what is due, less what was done. More than a
    tenth of a second's part is never in the bank. This is in work, deadlines are in time."""
    behind = Fraction(0)
    for elapsed, done in happened:
        behind = max(behind + floor * elapsed - done, -floor * TENTH_OF_A_SECOND)
    return behind

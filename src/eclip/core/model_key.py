"""ModelKey: which model a worker runs, at which batch, with which kernels.

``albert:8`` is the zoo's albert in batches of 8. ``package.module:factory:8`` is a user's own
model. ``albert~66:8`` is albert with the kernels that libraries choose for a device of 66 units.
"""

from __future__ import annotations

import re

import msgspec

from eclip.errors import UsageError

MAX_BATCH = 65_536
_NAME = r"[A-Za-z][\w.-]*(?::[A-Za-z_]\w*)?"
_UNITS = r"[1-9]\d{0,5}"
_KEY = re.compile(rf"(?P<name>{_NAME})(?:~(?P<units>{_UNITS}))?:(?P<batch>\d{{1,30}})", re.ASCII)


class ModelKey(
    msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A model, its batch and its kernels; ``str`` gives its text in a mix."""

    name: str  # of the zoo, or package.module:factory
    batch: int
    kernels_for: int = 0  # units that libraries chose kernels for; 0: all units of the device

    def __post_init__(self) -> None:
        if not self.name or "~" in self.name:
            raise ValueError(f"{self.name!r} is not a model's name")
        if not 1 <= self.batch <= MAX_BATCH:
            raise ValueError(f"the batch of {self.name} must be 1 to {MAX_BATCH}, not {self.batch}")
        if self.kernels_for < 0:
            raise ValueError(f"{self.name}: kernels cannot be chosen for {self.kernels_for} units")

    def __str__(self) -> str:
        return f"{self.title}:{self.batch}"

    @property
    def title(self) -> str:
        """``albert~66``: the key without its batch."""
        return f"{self.name}~{self.kernels_for}" if self.kernels_for else self.name

    @property
    def usual(self) -> ModelKey:
        """The same model and batch with its usual kernels, those for all units."""
        return self.with_kernels_for(0)

    def with_kernels_for(self, units: int) -> ModelKey:
        return ModelKey(self.name, self.batch, units)


def parse_model(text: str) -> ModelKey:
    """``albert:8``, ``albert~66:8`` or ``package.module:factory:8``."""
    match = _KEY.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not model:batch, like albert:8, package.module:factory:8, or albert~66:8 "
            f"for kernels chosen for 66 units"
        )
    try:
        return ModelKey(match["name"], int(match["batch"]), int(match["units"] or 0))
    except ValueError as error:
        raise UsageError(str(error)) from None

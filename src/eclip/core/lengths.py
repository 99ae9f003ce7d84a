"""Lengths: how long the output of a variable-output stage was, over a sample of requests.

The whole distribution is kept, since the cost of a capacity depends on the tail. Distinct lengths
rise. If a sample has too many, neighbours are merged into the longer length, so that a capacity
chosen from them is never too small for the sample.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_MOST_DISTINCT = 512


class Lengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    values: tuple[int, ...]  # distinct, rising
    times: tuple[int, ...]  # how often each was seen
    source: str = ""  # a phrase on what was sampled

    def __post_init__(self) -> None:
        if not self.values or len(self.values) != len(self.times):
            raise ValueError("a length distribution needs values, and times for each of them")
        if self.values[0] < 0 or list(self.values) != sorted(set(self.values)):
            raise ValueError("lengths must be at least 0 and rise")
        if min(self.times) < 1:
            raise ValueError("every length was seen at least once")

    @property
    def samples(self) -> int:
        return sum(self.times)

    @property
    def longest(self) -> int:
        return self.values[-1]

    @property
    def mean(self) -> float:
        return float(np.dot(self.values, self.times)) / self.samples

    @property
    def weights(self) -> Floats:
        """The share of the sample that each value has."""
        return np.asarray(self.times, dtype=np.float64) / self.samples

    def quantile(self, share: float) -> int:
        """The shortest length that at least ``share`` of the sample does not exceed."""
        if not 0 <= share <= 1:
            raise ValueError(f"a quantile is between 0 and 1, not {share}")
        reached = np.cumsum(self.times) >= share * self.samples * (1 - 1e-12)
        return self.values[int(np.argmax(reached))]

    def overflow(self, capacity: int) -> float:
        """The share of the sample longer than ``capacity``."""
        longer = sum(
            times for value, times in zip(self.values, self.times, strict=True) if value > capacity
        )
        return longer / self.samples


def lengths_of(sample: Iterable[int], source: str = "") -> Lengths:
    """The distribution of a sample of lengths."""
    values, times = np.unique(np.fromiter(sample, dtype=np.int64), return_counts=True)
    if len(values) > _MOST_DISTINCT:
        # Equal shares of the sample, each under its longest value; the tail is what must stay fine.
        share = np.cumsum(times) / times.sum()
        group = np.minimum((share * _MOST_DISTINCT).astype(np.int64), _MOST_DISTINCT - 1)
        ends = np.append(np.flatnonzero(np.diff(group)), len(values) - 1)
        times = np.diff(np.append(0, np.cumsum(times)[ends]))
        values = values[ends]
    return Lengths(values=tuple(values.tolist()), times=tuple(times.tolist()), source=source)

"""Footprint: the device memory of one worker.

Two workers of one model have a footprint each: captures share nothing. The memory of a process's
context and lanes is in the topology.
"""

from __future__ import annotations

import msgspec


class Footprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weights_bytes: int  # parameters and buffers
    activations_bytes: int  # inputs, outputs and all between; depends on the batch
    workspaces_bytes: int  # what libraries keep between requests
    executables_bytes: int  # the executable graph of a request, for one variant of a plan
    modelled: bool

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")

    @property
    def total_bytes(self) -> int:
        return self.total_with(variants=1)

    def total_with(self, variants: int) -> int:
        """The sum, with an executable graph for each of ``variants``."""
        fixed_bytes = self.weights_bytes + self.activations_bytes + self.workspaces_bytes
        return fixed_bytes + variants * self.executables_bytes

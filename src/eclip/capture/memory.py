"""The GPU memory of a capture."""

from __future__ import annotations

from dataclasses import dataclass

from eclip.core.footprint import Footprint


@dataclass(frozen=True)
class CaptureMemory:
    """As torch's allocator counts it."""

    weights_bytes: int  # of the module's parameters and buffers, without their rounding
    activations_bytes: int  # static inputs, and the capture's own pool, which holds the outputs
    # Memory left allocated by the warm-up: workspaces that libraries keep for the stream, and
    # tensors that the module keeps. Memory that libraries allocate past torch does not count.
    workspaces_bytes: int

    def footprint(self, executables_bytes: int) -> Footprint:
        return Footprint(
            weights_bytes=self.weights_bytes,
            activations_bytes=self.activations_bytes,
            workspaces_bytes=self.workspaces_bytes,
            executables_bytes=executables_bytes,
            modelled=False,
        )

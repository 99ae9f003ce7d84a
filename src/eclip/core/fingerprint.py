"""Fingerprint: the device, software and traces that an artefact was made for.

The hard part (units, slices, compute capability, traces) must match, or the artefact is refused
with the reason. The soft part (driver, device, libraries) may differ; each difference becomes a
warning that the run log keeps.
"""

from __future__ import annotations

import msgspec

from eclip.errors import MismatchError


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    units: int
    slice_units: tuple[int, ...]
    compute: str
    traces: dict[str, str] = {}  # model:batch → digest of its trace
    driver: str = ""
    device: str = ""
    libraries: dict[str, str] = {}

    def check(self, other: Fingerprint, mine: str, theirs: str) -> tuple[str, ...]:
        """Raise if the hard parts differ; return a warning for every soft difference.

        Only traces of models that both sides name are compared.
        """
        for what, here, there in (
            ("units", self.units, other.units),
            ("slices", self.slice_units, other.slice_units),
            ("compute capability", self.compute, other.compute),
        ):
            if here != there:
                raise MismatchError(
                    f"{mine} and {theirs} are for different devices: {what} {here} against "
                    f"{there}; make {mine} again for this device"
                )
        for model in sorted(self.traces.keys() & other.traces.keys()):
            if self.traces[model] != other.traces[model]:
                raise MismatchError(
                    f"{mine} and {theirs} hold different kernels for {model} (trace "
                    f"{self.traces[model][:12]} against {other.traces[model][:12]}); "
                    f"make {mine} again"
                )
        soft = [("driver", self.driver, other.driver), ("device", self.device, other.device)]
        soft += [
            (name, self.libraries[name], other.libraries[name])
            for name in sorted(self.libraries.keys() & other.libraries.keys())
        ]
        return tuple(
            f"{mine} was made with {what} {here}, {theirs} with {there}"
            for what, here, there in soft
            if here and there and here != there
        )
